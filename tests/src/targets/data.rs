//! Reproducible bytes, digests, and the answer to a WebSocket key.

use std::fmt::Write;

use aws_lc_rs::digest::{Context, Digest, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use base64::prelude::{BASE64_STANDARD, Engine as _};

/// Returns the first `n` pseudo-random bytes of the sequence with this seed. Shorter results are
/// prefixes of longer ones.
///
/// The targets send sequence 0 by default.
pub fn deterministic_bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    ByteSource::new(seed).fill(&mut bytes);
    bytes
}

/// Returns 64 KiB that a large answer repeats. The block is cheap to create, and wrong or missing
/// bytes are still detected.
pub fn repeated_block() -> Vec<u8> {
    deterministic_bytes(0, 64 << 10)
}

/// Returns the SHA-256 of `data` in lower-case hexadecimal.
pub fn sha256_hex(data: &[u8]) -> String {
    hex(&digest(&SHA256, data))
}

/// SHA-256 of data that arrives in pieces.
#[derive(Clone)]
pub struct Sha256 {
    context: Context,
    bytes: u64,
}

impl Sha256 {
    /// Creates the digest of no data.
    pub fn new() -> Self {
        Self {
            context: Context::new(&SHA256),
            bytes: 0,
        }
    }

    /// Adds the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.context.update(piece);
        self.bytes += piece.len() as u64;
    }

    /// Returns the number of bytes added so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the digest in lower-case hexadecimal.
    pub fn finish(self) -> String {
        hex(&self.context.finish())
    }
}

impl Default for Sha256 {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sha256")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A position in the sequence of [`deterministic_bytes`].
#[derive(Debug)]
pub(crate) struct ByteSource {
    seed: u64,
    /// Words generated so far.
    blocks: u64,
    /// The rest of the last word, used from its lowest byte on.
    tail: u64,
    rest_bytes: u32,
}

impl ByteSource {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            blocks: 0,
            tail: 0,
            rest_bytes: 0,
        }
    }

    /// Fills all of `bytes` with the next bytes of the sequence.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        let mut bytes = bytes.iter_mut();
        while self.rest_bytes > 0 {
            let Some(byte) = bytes.next() else { return };
            *byte = self.next_byte();
        }
        let mut blocks = bytes.into_slice().chunks_exact_mut(8);
        for word in &mut blocks {
            word.copy_from_slice(&self.next_word().to_le_bytes());
        }
        for byte in blocks.into_remainder() {
            if self.rest_bytes == 0 {
                self.tail = self.next_word();
                self.rest_bytes = 8;
            }
            *byte = self.next_byte();
        }
    }

    fn next_byte(&mut self) -> u8 {
        let [byte, ..] = self.tail.to_le_bytes();
        self.tail >>= 8;
        self.rest_bytes -= 1;
        byte
    }

    /// Returns the next word by SplitMix64 over a counter.
    fn next_word(&mut self) -> u64 {
        self.blocks += 1;
        let mut word = self
            .seed
            .wrapping_add(self.blocks.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

/// Returns the `Sec-WebSocket-Accept` of a `Sec-WebSocket-Key` (RFC 6455, section 4.2.2).
pub(crate) fn websocket_accept(key: &str) -> String {
    let salted = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    BASE64_STANDARD.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, salted.as_bytes()))
}

fn hex(digest: &Digest) -> String {
    digest
        .as_ref()
        .iter()
        .fold(String::new(), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_pieces_is_the_digest_of_the_whole() {
        let mut pieces = Sha256::new();
        pieces.update(b"a");
        pieces.update(b"bc");
        assert_eq!(pieces.bytes(), 3);
        assert_eq!(pieces.finish(), sha256_hex(b"abc"));
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn websocket_accept_matches_the_example_of_the_rfc() {
        assert_eq!(
            websocket_accept("dGhlIHNhbXBsZSBub25jZQ=="),
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
    }
}
