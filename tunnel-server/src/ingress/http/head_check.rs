//! Rejects heads that a parser in front of this server may interpret differently: lines that end
//! with a bare LF, Content-Length next to Transfer-Encoding, and several Content-Length fields.
//! hyper accepts all three and forwards one interpretation.
//!
//! The check observes the bytes that hyper reads and does not change them. The check looks for line
//! ends and for the names of two fields, and does not read values. The only effect of the check is
//! that a request is answered with 400. The check does not parse bodies. After a body, the next
//! head begins after the number of bytes that hyper determined as the length of the body
//! ([`BodyFraming::Length`]). If that length is unknown (chunked bodies, switched protocols), the
//! check pauses until the connection is idle after bytes that end a message. Bytes of a body are
//! therefore never taken for a head.

use bytes::{Buf as _, BytesMut};
use http::{Method, Request};
use hyper::body::Body;

use crate::ingress::http::headers::requested_upgrade;

/// Reason why a head is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeadError {
    /// RFC 9112, section 2.2, allows a recipient to accept a bare LF. Recipients differ in where
    /// they accept it.
    #[error("a line of the head ends with LF alone; end each line with CR LF")]
    BareLf,
    /// RFC 9112, section 6.3, says that such a message ought to be handled as an error.
    #[error("the head has Content-Length and Transfer-Encoding; send one of them")]
    TwoFramings,
    /// RFC 9110, section 8.6, allows a recipient to reject such a message, even if both values are
    /// equal.
    #[error("the head has Content-Length more than once; send it once")]
    TwoLengths,
}

/// The data that follows a head, as hyper has interpreted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFraming {
    /// A body of this many bytes, followed by a head.
    Length(u64),
    /// A body in chunked coding, whose length is unknown.
    Chunked,
    /// Bytes of another protocol, or the end of the connection.
    Opaque,
}

impl BodyFraming {
    /// Returns the framing of the data that follows the head of this request.
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
///   Head ──empty line──▶ Ended ──hyper has the head: length──▶ Body ──end of body──▶ Head
///                          ├─────────────────────── chunked──▶ Unknown ──idle after an end──▶ Head
///                          └────────────── CONNECT, Upgrade──▶ Off
/// ```
#[derive(Debug)]
pub(crate) struct HeadCheck {
    state: State,
    /// The error in the last complete head.
    head_error: Option<HeadError>,
}

#[derive(Debug)]
enum State {
    /// Within a head, or before one.
    Head(Head),
    /// The head has ended. The value contains the bytes that followed it.
    Ended(BytesMut),
    /// This many bytes of a body remain.
    Body(u64),
    /// The start of the next head is unknown until the connection is idle after these bytes.
    Unknown(Option<&'static [u8]>),
    /// The check has ended.
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

    /// Records that hyper has read a head. Must be called before hyper reads further. Returns the
    /// error in that head, if any.
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

    /// Records that the connection is idle after these last bytes.
    pub(crate) fn idle(&mut self, last: &[u8]) {
        if let State::Unknown(Some(end)) = self.state
            && last.ends_with(end)
        {
            self.state = State::Head(Head::default());
        }
    }

    /// Consumes bytes up to the end of a head. Returns the bytes after it.
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

/// A head, up to its empty line.
#[derive(Debug, Default)]
struct Head {
    /// The request line has ended.
    in_fields: bool,
    /// The beginning of the field name, in lower case.
    name: [u8; NAME_MAX_BYTES],
    /// Bytes of the line, without its line end.
    length: usize,
    /// The line has contained a colon.
    named: bool,
    cr: bool,
    has_length: bool,
    has_coding: bool,
    head_error: Option<HeadError>,
}

impl Head {
    /// Consumes a byte. Returns whether the head ends with this byte.
    fn push(&mut self, byte: u8) -> bool {
        match byte {
            b'\n' => return self.end_line(),
            // A CR within a line belongs to the line. hyper rejects such a head.
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
        // Empty lines before a request do not belong to the request (RFC 9112, section 2.2).
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

/// Length of `transfer-encoding`, the longest field name that the check recognizes.
const NAME_MAX_BYTES: usize = 17;
/// Largest number of bytes that arrive after a head before hyper has read that head: at most one
/// read of hyper. With more bytes, the check stops.
const PIPELINED_MAX_BYTES: usize = 64 * 1024;
/// End of a request without a body.
const EMPTY_LINE: &[u8] = b"\r\n\r\n";
/// End of a chunked body without trailer fields. A chunk that contains a line of text ends like
/// [`EMPTY_LINE`].
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

#[cfg(test)]
mod tests;
