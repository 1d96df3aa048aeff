//! Header blocks of SPDY/3: names with values, in one zlib stream per direction that lasts as long
//! as the connection.
//!
//! Upstream: `moby/spdystream` `spdy/write.go` `writeHeaderValueBlock`, `spdy/read.go`
//! `parseHeaderValueBlock`.

use std::io;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::dictionary::DICTIONARY;

/// The header blocks that one end sends.
#[derive(Debug)]
pub(super) struct HeaderEncoder(Compress);

impl HeaderEncoder {
    pub(super) fn new() -> Self {
        Self(Compress::new(Compression::best(), true))
    }

    /// Compresses the block of these fields and flushes it.
    pub(super) fn encode(&mut self, fields: &[(&str, &str)]) -> io::Result<Vec<u8>> {
        if self.0.total_in() == 0 {
            self.0.set_dictionary(DICTIONARY)?;
        }
        let block = block(fields);
        let mut rest = block.as_slice();
        let mut compressed = Vec::new();
        loop {
            compressed.reserve(PIECE_BYTES);
            let before = self.0.total_in();
            self.0
                .compress_vec(rest, &mut compressed, FlushCompress::Sync)?;
            rest = after(rest, self.0.total_in() - before);
            // The flush is complete if it has not used all space.
            if compressed.len() < compressed.capacity() {
                return Ok(compressed);
            }
        }
    }
}

/// The header blocks that one end receives.
#[derive(Debug)]
pub(super) struct HeaderDecoder(Decompress);

impl HeaderDecoder {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }

    /// Decompresses a block and returns its fields.
    pub(super) fn decode(&mut self, compressed: &[u8]) -> io::Result<Vec<(String, String)>> {
        let mut rest = compressed;
        let mut block = Vec::new();
        loop {
            block.reserve(PIECE_BYTES);
            let before = self.0.total_in();
            let result = self
                .0
                .decompress_vec(rest, &mut block, FlushDecompress::Sync);
            rest = after(rest, self.0.total_in() - before);
            match result {
                // The first block names its dictionary.
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0.set_dictionary(DICTIONARY)?;
                }
                Err(error) => return Err(error.into()),
                Ok(Status::StreamEnd) => return Err(invalid("end of the zlib stream")),
                Ok(Status::Ok | Status::BufError) => {
                    if rest.is_empty() && block.len() < block.capacity() {
                        return parse_block(&block).ok_or_else(|| invalid("short header block"));
                    }
                }
            }
        }
    }
}

/// Encodes fields without compression, names in lower case.
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_be_bytes();
    let mut block = word(fields.len()).to_vec();
    for (name, value) in fields {
        for text in [name.to_lowercase().as_bytes(), value.as_bytes()] {
            block.extend_from_slice(&word(text.len()));
            block.extend_from_slice(text);
        }
    }
    block
}

fn parse_block(mut rest: &[u8]) -> Option<Vec<(String, String)>> {
    let word = |rest: &mut &[u8]| -> Option<usize> {
        let (word, more) = rest.split_first_chunk()?;
        *rest = more;
        usize::try_from(u32::from_be_bytes(*word)).ok()
    };
    let count = word(&mut rest)?;
    let text = |rest: &mut &[u8]| -> Option<String> {
        let length = word(rest)?;
        let (text, more) = rest.split_at_checked(length)?;
        *rest = more;
        String::from_utf8(text.to_vec()).ok()
    };
    (0..count)
        .map(|_| Some((text(&mut rest)?, text(&mut rest)?)))
        .collect()
}

/// Returns the bytes behind the first `read` ones.
fn after(bytes: &[u8], read: u64) -> &[u8] {
    let read = usize::try_from(read).unwrap_or(usize::MAX);
    bytes.get(read..).unwrap_or_default()
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// More than most blocks need.
const PIECE_BYTES: usize = 1024;
