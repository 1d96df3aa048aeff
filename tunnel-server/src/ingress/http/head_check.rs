//! Rejects heads that a parser in front of this server may interpret differently: lines that end
//! with a bare LF, Content-Length next to Transfer-Encoding, and several Content-Length fields.
//! hyper accepts all three and forwards one interpretation.
//!
//! The check observes the bytes that hyper reads and does not change them. It follows the framing of
//! the whole connection by itself: heads, bodies of a length, and chunks (`head_check/chunks.rs`).
//! For each head it compares the length of the body with the one that hyper has determined. If they
//! differ, or if the bytes are no HTTP that the check can follow, every further request is refused
//! with 400, which closes the connection: a check that does not know where a head begins must not go
//! on.
//!
//! The check also measures heads before hyper has their bytes, and stops at the byte that exceeds a
//! limit (`head_check/size.rs`).

use std::collections::VecDeque;

use http::{Method, Request};
use hyper::body::Body;

use self::chunks::{ChunkState, ChunkStep};
use self::size::{HeadExcess, HeadLimits, HeadSize, TARGET_MAX_BYTES};
use crate::config::CONNECTION_HEAD_BYTES;
use crate::ingress::http::headers::requested_upgrade;

pub(crate) mod chunks;
pub(crate) mod size;

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
    /// A parser in front of this server may find a head at another place.
    #[error(
        "the server does not know where the head begins or how long its body is; use another connection"
    )]
    Unframed,
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
///   Head ──empty line, no body──▶ Head        Head ──length──▶ Body ───end──▶ Head
///                                             Head ─chunked──▶ Chunks ─end──▶ Head
///   any ──bytes that are not HTTP──▶ Lost     CONNECT, Upgrade ──▶ Off
/// ```
#[derive(Debug)]
pub(crate) struct HeadCheck {
    state: State,
    /// The heads that hyper has not read yet, in order. A caller may send thousands at once, most of
    /// which are alike.
    heads: VecDeque<HeadRun>,
    limits: HeadLimits,
}

/// The place in some bytes at which the check has stopped, because a head exceeds a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadStop {
    /// The beginning of the head. 0 if the head began before these bytes.
    pub(crate) head: usize,
    /// Number of bytes that the check has followed.
    pub(crate) checked: usize,
}

/// What the check has read of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadProgress {
    /// Number of bytes that the check has followed.
    pub(crate) checked: usize,
    pub(crate) phase: HeadPhase,
    pub(crate) size: HeadSize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadPhase {
    /// The head goes on.
    Within,
    /// The head is complete.
    End,
    /// The next byte exceeds a limit.
    Excess(HeadExcess),
}

#[derive(Debug)]
enum State {
    /// Within a head, or before one.
    Head(Head),
    /// This many bytes of a body remain.
    Body(u64),
    /// Within a body in chunked coding.
    Chunks(ChunkState),
    /// The place of the next head is unknown.
    Lost,
    /// The connection has switched protocols.
    Off,
}

/// A head up to its empty line, as the check has read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CheckedHead {
    /// `None` if the check cannot read the fields.
    framing: Option<BodyFraming>,
    head_error: Option<HeadError>,
}

impl Default for HeadCheck {
    fn default() -> Self {
        Self::new(HeadLimits::NONE)
    }
}

impl HeadCheck {
    /// Creates the check of a connection whose heads have these limits.
    pub(crate) fn new(limits: HeadLimits) -> Self {
        Self {
            state: State::Head(Head::default()),
            heads: VecDeque::new(),
            limits,
        }
    }

    /// Sets the limits of the next heads.
    pub(crate) fn set_limits(&mut self, limits: HeadLimits) {
        self.limits = limits;
    }

    /// Returns how many bytes may be read at once. What a caller sends behind a request is in
    /// memory while the request runs, and the permit of the connection counts for one head of it.
    pub(crate) fn read_max(&self) -> usize {
        let of_body = match &self.state {
            State::Body(left) | State::Chunks(ChunkState::Data(left)) => *left,
            State::Head(_) | State::Chunks(_) | State::Lost => 0,
            State::Off => return usize::MAX,
        };
        usize::try_from(of_body)
            .unwrap_or(usize::MAX)
            .saturating_add(CONNECTION_HEAD_BYTES)
    }

    /// Follows bytes that hyper reads, up to the first head that exceeds a limit.
    pub(crate) fn read(&mut self, data: &[u8]) -> Option<HeadStop> {
        let all = data.len();
        let mut data = data;
        while !data.is_empty() {
            let at = all - data.len();
            let consumed = match &mut self.state {
                State::Head(head) => {
                    let begins_here = head.size.bytes == 0;
                    let progress = self.read_head(data, self.limits);
                    if let HeadPhase::Excess(_) = progress.phase {
                        return Some(HeadStop {
                            head: if begins_here { at } else { 0 },
                            checked: at + progress.checked,
                        });
                    }
                    progress.checked
                }
                State::Body(left) => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len());
                    *left -= here as u64;
                    if *left == 0 {
                        self.state = State::Head(Head::default());
                    }
                    here
                }
                State::Chunks(chunks) => {
                    let (consumed, phase) = chunks.read(data);
                    match phase {
                        ChunkStep::Within => {}
                        ChunkStep::End => self.state = State::Head(Head::default()),
                        ChunkStep::Malformed => self.state = State::Lost,
                    }
                    consumed
                }
                State::Lost | State::Off => return None,
            };
            data = data.get(consumed..).unwrap_or_default();
        }
        None
    }

    /// Follows bytes of a head with these limits, up to its end.
    pub(crate) fn read_head(&mut self, data: &[u8], limits: HeadLimits) -> HeadProgress {
        let State::Head(head) = &mut self.state else {
            return HeadProgress {
                checked: 0,
                phase: HeadPhase::End,
                size: HeadSize::default(),
            };
        };
        let (mut checked, mut phase) = (0, HeadPhase::Within);
        for byte in data {
            if let Some(excess) = head.excess(*byte, limits) {
                phase = HeadPhase::Excess(excess);
                break;
            }
            checked += 1;
            if head.push(*byte) {
                phase = HeadPhase::End;
                break;
            }
        }
        let (size, head) = (head.size, head.checked());
        if phase == HeadPhase::End {
            self.push(head);
        }
        HeadProgress {
            checked,
            phase,
            size,
        }
    }

    /// Returns the framing of the heads that hyper has not read yet.
    #[cfg(feature = "test-util")]
    pub(crate) fn framings(&self) -> Vec<BodyFraming> {
        let runs = self.heads.iter();
        runs.flat_map(|run| {
            let framing = run.head.framing.unwrap_or(BodyFraming::Chunked);
            std::iter::repeat_n(framing, run.count)
        })
        .collect()
    }

    /// Returns whether a body has begun whose end has not arrived.
    pub(crate) fn is_within_body(&self) -> bool {
        match &self.state {
            State::Body(_) | State::Chunks(_) | State::Lost => true,
            State::Head(_) | State::Off => false,
        }
    }

    /// Returns whether hyper has read all heads that are complete.
    pub(crate) fn is_read(&self) -> bool {
        self.heads.is_empty()
    }

    /// Returns whether a head has begun to arrive that hyper has not read. Empty lines are none.
    pub(crate) fn has_begun(&self) -> bool {
        let is_within = match &self.state {
            State::Head(head) => head.in_fields || head.length > 0,
            State::Body(_) | State::Chunks(_) | State::Lost | State::Off => false,
        };
        is_within || !self.heads.is_empty()
    }

    /// Records that hyper has read a head, and how it frames the body. Returns the error in that
    /// head, if any.
    pub(crate) fn request(&mut self, framing: BodyFraming) -> Option<HeadError> {
        if let State::Off = self.state {
            return None;
        }
        let Some(head) = self.pop() else {
            self.state = State::Lost;
            return Some(HeadError::Unframed);
        };
        if framing == BodyFraming::Opaque {
            self.state = State::Off;
            self.heads = VecDeque::new();
            return head.head_error;
        }
        let is_other = head.framing.is_some_and(|own| own != framing);
        if is_other {
            self.state = State::Lost;
            self.heads = VecDeque::new();
        }
        if self.heads.is_empty() {
            self.heads.shrink_to(HEADS_RETAINED);
        }
        head.head_error
            .or_else(|| is_other.then_some(HeadError::Unframed))
    }

    fn push(&mut self, head: CheckedHead) {
        self.state = match head.framing {
            Some(BodyFraming::Length(0)) => State::Head(Head::default()),
            Some(BodyFraming::Length(length)) => State::Body(length),
            Some(BodyFraming::Chunked) => State::Chunks(ChunkState::default()),
            Some(BodyFraming::Opaque) | None => State::Lost,
        };
        let is_full = self.heads.len() == RUNS_MAX;
        match self.heads.back_mut() {
            Some(last) if last.head == head => last.count += 1,
            Some(_) if is_full => self.state = State::Lost,
            Some(_) | None => self.heads.push_back(HeadRun { head, count: 1 }),
        }
    }

    fn pop(&mut self) -> Option<CheckedHead> {
        let first = self.heads.front_mut()?;
        let head = first.head;
        first.count -= 1;
        if first.count == 0 {
            self.heads.pop_front();
        }
        Some(head)
    }
}

/// Heads in a row that are alike.
#[derive(Debug)]
struct HeadRun {
    head: CheckedHead,
    /// The number of heads, at least 1.
    count: usize,
}

/// A head, up to its empty line.
#[derive(Debug, Default)]
struct Head {
    size: HeadSize,
    /// Bytes of the request target.
    target: usize,
    /// Spaces in the request line, which separate the target.
    spaces: u8,
    /// The request line has ended.
    in_fields: bool,
    /// The beginning of the field name, in lower case.
    name: [u8; NAME_MAX_BYTES],
    /// Bytes of the line, without its line end.
    length: usize,
    /// The line has contained a colon.
    named: bool,
    cr: bool,
    /// The field of the line, if the check reads its value.
    field: Option<FramingField>,
    /// The value of that field.
    value: FieldValue,
    has_length: bool,
    has_coding: bool,
    /// `None` if a value is not one that the check can read.
    framing: Framing,
    head_error: Option<HeadError>,
}

#[derive(Debug, Clone, Copy)]
enum FramingField {
    ContentLength,
    TransferEncoding,
}

/// The framing that the fields so far determine.
#[derive(Debug, Clone, Copy)]
struct Framing(Option<BodyFraming>);

impl Default for Framing {
    fn default() -> Self {
        Self(Some(BodyFraming::Length(0)))
    }
}

/// The beginning of a field's value.
#[derive(Debug, Default)]
struct FieldValue {
    bytes: [u8; VALUE_MAX_BYTES],
    length: usize,
}

impl FieldValue {
    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.length) {
            *slot = byte;
        }
        self.length += 1;
    }

    /// Returns the value without the space around it, or `None` if it is too long.
    fn text(&self) -> Option<&str> {
        let value = self.bytes.get(..self.length)?;
        str::from_utf8(value.trim_ascii()).ok()
    }

    fn as_length(&self) -> Option<BodyFraming> {
        let digits = self.text().filter(|text| {
            let mut bytes = text.bytes();
            bytes.all(|byte| byte.is_ascii_digit())
        });
        digits?.parse().ok().map(BodyFraming::Length)
    }

    fn as_coding(&self) -> Option<BodyFraming> {
        let is_chunked = self.text()?.eq_ignore_ascii_case("chunked");
        is_chunked.then_some(BodyFraming::Chunked)
    }
}

impl Head {
    fn checked(&self) -> CheckedHead {
        CheckedHead {
            framing: self.framing.0,
            head_error: self.head_error,
        }
    }

    /// Returns the limit that the head exceeds with the next byte.
    fn excess(&self, next: u8, limits: HeadLimits) -> Option<HeadExcess> {
        let is_text = !matches!(next, b'\r' | b'\n');
        let begins_field = self.in_fields && self.length == 0 && is_text;
        let continues_target = !self.in_fields && self.spaces == 1 && is_text && next != b' ';
        if self.size.bytes >= limits.bytes {
            Some(HeadExcess::Bytes)
        } else if begins_field && self.size.fields >= limits.fields {
            Some(HeadExcess::Fields)
        } else if continues_target && self.target >= TARGET_MAX_BYTES {
            Some(HeadExcess::Target)
        } else {
            None
        }
    }

    /// Consumes a byte. Returns whether the head ends with this byte.
    fn push(&mut self, byte: u8) -> bool {
        self.size.bytes += 1;
        match byte {
            b'\n' => return self.end_line(),
            // A CR within a line belongs to the line. hyper rejects such a head.
            b'\r' => self.length += usize::from(std::mem::replace(&mut self.cr, true)),
            _ => {
                if !self.in_fields {
                    self.push_request_line(byte);
                } else if self.length == 0 {
                    self.size.fields += 1;
                }
                self.length += usize::from(std::mem::take(&mut self.cr));
                if self.field.is_some() {
                    self.value.push(byte);
                } else if byte == b':' && !self.named {
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

    fn push_request_line(&mut self, byte: u8) {
        match (byte, self.spaces) {
            (b' ', _) => self.spaces = self.spaces.saturating_add(1),
            (_, 1) => self.target += 1,
            (_, _) => {}
        }
    }

    fn end_line(&mut self) -> bool {
        if !self.cr {
            self.set_error(HeadError::BareLf);
        }
        if let Some(field) = self.field.take() {
            self.framing = Framing(match field {
                FramingField::ContentLength => self.value.as_length(),
                // A second coding is refused.
                FramingField::TransferEncoding => self.value.as_coding(),
            });
            self.value = FieldValue::default();
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
                self.field = Some(FramingField::ContentLength);
            }
            Some(b"transfer-encoding") => {
                self.has_coding = true;
                self.field = Some(FramingField::TransferEncoding);
            }
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
/// Longest value that the check reads: the number of digits of a length, and some space around it.
const VALUE_MAX_BYTES: usize = 32;
/// Entries for heads that have arrived before hyper has read the first one, 16 KiB together. hyper
/// reads [`CONNECTION_HEAD_BYTES`] ahead, in which fewer heads fit: two that are not alike have 67
/// bytes, unless the server refuses one of them.
const RUNS_MAX: usize = 512;
/// Capacity for heads that a connection keeps.
const HEADS_RETAINED: usize = 4;

#[cfg(test)]
mod tests;
