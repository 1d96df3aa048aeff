//! Finds the end of a body in chunked coding (RFC 9112, section 7.1), with the grammar of hyper's
//! decoder: what hyper refuses is malformed here, too.

/// The place within a body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ChunkState {
    /// Before the first digit of a size.
    #[default]
    Start,
    /// Within the digits of a size.
    Size(u64),
    /// In the space after a size.
    Space(u64),
    /// In the extensions of a chunk, up to the end of their line.
    Extension(u64),
    /// Before the LF of a size's line.
    SizeLf(u64),
    /// This many bytes of a chunk remain.
    Data(u64),
    DataCr,
    DataLf,
    /// At the beginning of a line after the last chunk: a trailer field, or the end.
    EndCr,
    EndLf,
    /// Within a trailer field. An LF alone belongs to it.
    Trailer,
    TrailerLf,
}

/// What follows some bytes of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkStep {
    /// Further bytes of the body.
    Within,
    /// The next head, since the body has ended.
    End,
    /// The bytes are not in chunked coding.
    Malformed,
}

impl ChunkState {
    /// Consumes bytes up to the end of the body. Returns how many, and what follows them.
    pub(crate) fn read(&mut self, data: &[u8]) -> (usize, ChunkStep) {
        let mut consumed = 0;
        while let Some(byte) = data.get(consumed) {
            if let Self::Data(left) = self {
                let remaining = data.len() - consumed;
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(remaining);
                *left -= here as u64;
                consumed += here;
                if *left == 0 {
                    *self = Self::DataCr;
                }
                continue;
            }
            consumed += 1;
            match self.after(*byte) {
                Some(next) => *self = next,
                None if (*self, *byte) == (Self::EndLf, b'\n') => {
                    return (consumed, ChunkStep::End);
                }
                None => return (consumed, ChunkStep::Malformed),
            }
        }
        (consumed, ChunkStep::Within)
    }

    /// Returns the state after a byte that is no data, or `None` if the body ends or the byte is not
    /// allowed.
    fn after(self, byte: u8) -> Option<Self> {
        match (self, byte) {
            (Self::Start, _) => Self::digit(0, byte),
            (Self::Size(size) | Self::Space(size), b' ' | b'\t') => Some(Self::Space(size)),
            (Self::Size(size) | Self::Space(size), b';') => Some(Self::Extension(size)),
            (Self::Size(size) | Self::Space(size) | Self::Extension(size), b'\r') => {
                Some(Self::SizeLf(size))
            }
            (Self::Size(size), _) => Self::digit(size, byte),
            (Self::Extension(size), _) if byte != b'\n' => Some(Self::Extension(size)),
            (Self::SizeLf(0), b'\n') => Some(Self::EndCr),
            (Self::SizeLf(size), b'\n') => Some(Self::Data(size)),
            (Self::DataCr, b'\r') => Some(Self::DataLf),
            (Self::DataLf, b'\n') => Some(Self::Start),
            (Self::EndCr, b'\r') => Some(Self::EndLf),
            (Self::EndCr, _) => Some(Self::Trailer),
            (Self::Trailer, b'\r') => Some(Self::TrailerLf),
            (Self::Trailer, _) => Some(Self::Trailer),
            (Self::TrailerLf, b'\n') => Some(Self::EndCr),
            (
                Self::Space(_)
                | Self::Extension(_)
                | Self::SizeLf(_)
                | Self::Data(_)
                | Self::DataCr
                | Self::DataLf
                | Self::EndLf
                | Self::TrailerLf,
                _,
            ) => None,
        }
    }

    fn digit(size: u64, byte: u8) -> Option<Self> {
        let digit = char::from(byte).to_digit(16)?;
        let size = size.checked_mul(16)?.checked_add(u64::from(digit))?;
        Some(Self::Size(size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a body in pieces. Returns the bytes behind its end.
    fn bytes_behind(body: &str, piece: usize) -> Result<&str, ChunkStep> {
        let (mut chunks, mut at) = (ChunkState::default(), 0);
        for piece in body.as_bytes().chunks(piece) {
            let (consumed, step) = chunks.read(piece);
            at += consumed;
            match step {
                ChunkStep::Within => assert_eq!(consumed, piece.len()),
                ChunkStep::End => return Ok(&body[at..]),
                ChunkStep::Malformed => return Err(ChunkStep::Malformed),
            }
        }
        Err(ChunkStep::Within)
    }

    #[test]
    fn end_of_a_body_is_found_however_it_is_split() {
        let malformed = Err(ChunkStep::Malformed);
        for (body, expected) in [
            ("0\r\n\r\n", Ok("")),
            ("0\r\n\r\nGET", Ok("GET")),
            ("5\r\nhello\r\n0\r\n\r\nGET", Ok("GET")),
            ("5;a=b\r\n0\r\n\r\n\r\n000 \t;x\r\n\r\nGET", Ok("GET")),
            (
                "A\r\n0123456789\r\n0\r\nX: y\r\nZ: \n\r\n\r\nGET",
                Ok("GET"),
            ),
            ("1\r\n\n\r\n00;x\r\n\r\n\r\n", Ok("\r\n")),
            ("ffffffffffffffff\r\n", Err(ChunkStep::Within)),
            ("0\r\nX", Err(ChunkStep::Within)),
            ("10000000000000000\r\n", malformed),
            ("\r\n", malformed),
            ("x\r\n", malformed),
            ("0\n\n", malformed),
            ("1\n\n\r\n", malformed),
            ("0 0\r\n", malformed),
            ("0;a\n\r\n", malformed),
            ("1\r\na0\r\n\r\n", malformed),
            ("1\r\na\n0\r\n\r\n", malformed),
            ("0\r\nX: y\rZ: a\r\n\r\n", malformed),
            ("0\r\n\rX", malformed),
        ] {
            for piece in 1..=body.len() {
                assert_eq!(bytes_behind(body, piece), expected, "{body:?} by {piece}");
            }
        }
    }
}
