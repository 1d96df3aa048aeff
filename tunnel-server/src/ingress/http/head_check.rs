//! Refuses heads that parsers in front of this one may read differently: lines that end with a bare LF, Content-Length next
//! to Transfer-Encoding, and several Content-Length fields. hyper takes all three and passes one reading of them on.
//!
//! The check sees the bytes that hyper reads and changes none of them. It looks for line ends and the names of two fields, and
//! reads no value: its one effect is that a request is answered with 400. Bodies are not parsed either. A next head begins behind as many bytes as hyper itself found the body to
//! be long ([`BodyFraming::Length`]). Where that length is unknown (chunked bodies, protocols that were switched) nothing is
//! checked until the connection is idle behind bytes that end a message, so that bytes of a body are never taken for a head.

use bytes::{Buf as _, BytesMut};
use http::{Method, Request};
use hyper::body::Body;

use crate::ingress::http::headers::requested_upgrade;

/// Why a head is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeadError {
    /// RFC 9112, section 2.2, lets a recipient take it; recipients differ in where.
    #[error("a line of the head ends with LF alone; end each line with CR LF")]
    BareLf,
    /// RFC 9112, section 6.3: it ought to be handled as an error.
    #[error("the head has Content-Length and Transfer-Encoding; send one of them")]
    TwoFramings,
    /// RFC 9110, section 8.6: a recipient may refuse it, also where both are equal.
    #[error("the head has Content-Length more than once; send it once")]
    TwoLengths,
}

/// What follows a head, as hyper has read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFraming {
    /// A body of so many bytes, then a head.
    Length(u64),
    /// A chunked body.
    Chunked,
    /// Bytes of another protocol, or the end.
    Opaque,
}

impl BodyFraming {
    /// What follows the head of this request.
    pub(crate) fn of<B: Body>(request: &Request<B>) -> Self {
        let switches = *request.method() == Method::CONNECT
            || requested_upgrade(request.version(), request.headers()).is_some();
        match request.body().size_hint().exact() {
            _ if switches => Self::Opaque,
            Some(length) => Self::Length(length),
            None => Self::Chunked,
        }
    }
}

/// The check of one caller's connection.
///
/// ```text
///   Head ──empty line──▶ Ended ──hyper has the head: length──▶ Body ──so many bytes──▶ Head
///                          ├─────────────────────── chunked──▶ Unknown ──idle behind an end──▶ Head
///                          └────────────── CONNECT, Upgrade──▶ Off
/// ```
#[derive(Debug)]
pub(crate) struct HeadCheck {
    state: State,
    /// Of the last head that has ended.
    head_error: Option<HeadError>,
}

#[derive(Debug)]
enum State {
    /// In a head, or in front of it.
    Head(Head),
    /// The head has ended; these bytes came behind it.
    Ended(BytesMut),
    /// So many bytes of a body are to come.
    Body(u64),
    /// Where the next head begins is unknown until the connection is idle behind these bytes.
    Unknown(Option<&'static [u8]>),
    /// Nothing is checked any more.
    Off,
}

impl Default for HeadCheck {
    fn default() -> Self {
        Self {
            state: State::Head(Head::default()),
            head_error: None,
        }
    }
}

impl HeadCheck {
    /// Notes what hyper reads.
    pub(crate) fn read(&mut self, data: &[u8]) {
        let rest = self.advance(data);
        if !rest.is_empty()
            && let State::Ended(pipelined) = &mut self.state
        {
            if pipelined.len() + rest.len() > PIPELINED_MAX_BYTES {
                self.state = State::Unknown(None);
            } else {
                pipelined.extend_from_slice(rest);
            }
        }
    }

    /// Notes that hyper has read a head, before it reads on; returns what is wrong with that head.
    pub(crate) fn request(&mut self, framing: BodyFraming) -> Option<HeadError> {
        let pipelined = match std::mem::replace(&mut self.state, State::Off) {
            State::Ended(pipelined) => Some(pipelined),
            State::Head(_) | State::Body(_) | State::Unknown(_) => None,
            State::Off => return None,
        };
        self.state = match (framing, &pipelined) {
            (BodyFraming::Opaque, _) => State::Off,
            (BodyFraming::Chunked, _) => State::Unknown(Some(LAST_CHUNK)),
            (BodyFraming::Length(0), Some(_)) => State::Head(Head::default()),
            (BodyFraming::Length(length), Some(_)) => State::Body(length),
            (BodyFraming::Length(0), None) => State::Unknown(Some(EMPTY_LINE)),
            (BodyFraming::Length(_), None) => State::Unknown(None),
        };
        let head_error = self.head_error.take();
        if let Some(mut pipelined) = pipelined {
            let left = self.advance(&pipelined).len();
            pipelined.advance(pipelined.len() - left);
            if let State::Ended(rest) = &mut self.state {
                *rest = pipelined;
            }
        }
        head_error
    }

    /// Notes that the connection is idle, and that these bytes were the last ones.
    pub(crate) fn idle(&mut self, last: &[u8]) {
        if let State::Unknown(Some(end)) = self.state
            && last.ends_with(end)
        {
            self.state = State::Head(Head::default());
        }
    }

    /// Goes through bytes up to the end of a head; returns what is behind it.
    fn advance<'a>(&mut self, mut data: &'a [u8]) -> &'a [u8] {
        while !data.is_empty() {
            match &mut self.state {
                State::Head(head) => {
                    let Some(length) = data.iter().position(|byte| head.push(*byte)) else {
                        return &[];
                    };
                    self.head_error = head.head_error;
                    self.state = State::Ended(BytesMut::new());
                    return data.get(length + 1..).unwrap_or_default();
                }
                State::Body(left) => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len());
                    *left -= here as u64;
                    if *left == 0 {
                        self.state = State::Head(Head::default());
                    }
                    data = data.get(here..).unwrap_or_default();
                }
                State::Ended(_) | State::Unknown(_) | State::Off => return data,
            }
        }
        data
    }
}

/// One head, up to its empty line.
#[derive(Debug, Default)]
struct Head {
    /// The request line has ended.
    in_fields: bool,
    /// The beginning of the field's name, in lower case.
    name: [u8; NAME_MAX_BYTES],
    /// Bytes of the line, without its end.
    length: usize,
    /// The colon of the line has come.
    named: bool,
    /// The last byte was CR.
    cr: bool,
    has_length: bool,
    has_coding: bool,
    head_error: Option<HeadError>,
}

impl Head {
    /// Whether the head ends with this byte.
    fn push(&mut self, byte: u8) -> bool {
        match byte {
            b'\n' => return self.end_line(),
            // A CR within a line is part of it; hyper refuses such a head.
            b'\r' => self.length += usize::from(std::mem::replace(&mut self.cr, true)),
            _ => {
                self.length += usize::from(std::mem::take(&mut self.cr));
                if byte == b':' && !self.named {
                    self.named = true;
                    self.end_field_name();
                } else if let Some(slot) = self.name.get_mut(self.length)
                    && !self.named
                {
                    *slot = byte.to_ascii_lowercase();
                }
                self.length += 1;
            }
        }
        false
    }

    fn end_line(&mut self) -> bool {
        if !self.cr {
            self.set_error(HeadError::BareLf);
        }
        let is_empty = self.length == 0;
        // Empty lines in front of a request are no part of it (RFC 9112, section 2.2).
        let is_end = is_empty && self.in_fields;
        self.in_fields |= !is_empty;
        (self.length, self.named, self.cr) = (0, false, false);
        is_end
    }

    fn end_field_name(&mut self) {
        let name = self.name.get(..self.length).filter(|_| self.in_fields);
        match name {
            Some(b"content-length") => {
                if self.has_length {
                    self.set_error(HeadError::TwoLengths);
                }
                self.has_length = true;
            }
            Some(b"transfer-encoding") => self.has_coding = true,
            Some(_) | None => {}
        }
        if self.has_length && self.has_coding {
            self.set_error(HeadError::TwoFramings);
        }
    }

    fn set_error(&mut self, head_error: HeadError) {
        self.head_error.get_or_insert(head_error);
    }
}

/// Of `transfer-encoding`, the longest name that counts.
const NAME_MAX_BYTES: usize = 17;
/// What came behind a head, up to hyper's having read that head: at most one read of hyper's. Behind more nothing is checked.
const PIPELINED_MAX_BYTES: usize = 64 * 1024;
/// How a request without a body ends.
const EMPTY_LINE: &[u8] = b"\r\n\r\n";
/// How a chunked body without trailer fields ends; a line of text that is a chunk ends like [`EMPTY_LINE`].
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

#[cfg(test)]
mod tests;
