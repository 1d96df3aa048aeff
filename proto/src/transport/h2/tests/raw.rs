//! A peer that writes and reads HTTP/2 frames by hand (RFC 9113, section 4.1), so it can violate
//! the rules.

use std::collections::HashMap;
use std::future::pending;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_STREAM: u8 = 1;
pub(super) const ACK: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;

pub(super) const INITIAL_WINDOW_SIZE: u16 = 4;
pub(super) const MAX_FRAME_SIZE: u16 = 5;
pub(super) const ENABLE_CONNECT_PROTOCOL: u16 = 8;

pub(super) const NO_ERROR: u32 = 0;
pub(super) const PROTOCOL_ERROR: u32 = 1;
pub(super) const FLOW_CONTROL_ERROR: u32 = 3;
pub(super) const CANCEL: u32 = 8;
pub(super) const ENHANCE_YOUR_CALM: u32 = 11;

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest payload that a peer accepts by default.
pub(super) const FRAME_PAYLOAD_MAX: usize = 16 << 10;
/// The payload of the PING that marks the end of a flood.
const MARK: [u8; 8] = *b"the mark";

/// Returns the bytes of one frame.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(9 + payload.len());
    bytes.put_uint(payload.len() as u64, 3);
    bytes.put_u8(kind);
    bytes.put_u8(flags);
    bytes.put_u32(stream);
    bytes.extend_from_slice(payload);
    bytes
}

pub(super) fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (id, value) in values {
        payload.put_u16(*id);
        payload.put_u32(*value);
    }
    frame(SETTINGS, 0, 0, &payload)
}

pub(super) fn window_update(stream: u32, bytes: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

pub(super) fn reset(stream: u32, code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &code.to_be_bytes())
}

pub(super) fn go_away(last: u32, code: u32) -> Vec<u8> {
    let payload = [last.to_be_bytes(), code.to_be_bytes()].concat();
    frame(GOAWAY, 0, 0, &payload)
}

/// Returns a request head in the form that our end sends.
pub(super) fn request(stream: u32, path: &str) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &request_block(path))
}

/// Encodes a request with HPACK (RFC 7541): `:method POST` and `:scheme https` by index, the rest
/// as literals without indexing.
pub(super) fn request_block(path: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x87];
    for (index, value) in [(4, path), (1, "culvert")] {
        block.push(index);
        put_text(&mut block, value);
    }
    block
}

/// Returns the head of an offer, an extended CONNECT request (RFC 8441, section 4).
pub(super) fn offer(stream: u32) -> Vec<u8> {
    let mut block = vec![2];
    put_text(&mut block, "CONNECT");
    // Without `:method POST`.
    block.extend(&request_block("/offer")[1..]);
    block.push(0);
    put_text(&mut block, ":protocol");
    put_text(&mut block, "culvert");
    frame(HEADERS, END_HEADERS, stream, &block)
}

/// The header block `:status 200`.
pub(super) const OK: [u8; 1] = [0x88];

pub(super) fn response(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &OK)
}

/// Returns `count` fields of 1 KiB each, as the size of a header list is measured (32 bytes of
/// overhead for each field, RFC 9113, section 6.5.2).
pub(super) fn fields(count: usize) -> Vec<u8> {
    let mut block = Vec::new();
    for _ in 0..count {
        block.push(0);
        put_text(&mut block, "x-long");
        put_text(&mut block, &"v".repeat(1024 - 32 - 6));
    }
    block
}

/// Returns a header block in as many frames as necessary.
pub(super) fn head(stream: u32, block: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let last = block.chunks(FRAME_PAYLOAD_MAX).count() - 1;
    for (index, piece) in block.chunks(FRAME_PAYLOAD_MAX).enumerate() {
        let kind = if index == 0 { HEADERS } else { CONTINUATION };
        let flags = if index == last { END_HEADERS } else { 0 };
        bytes.extend(frame(kind, flags, stream, piece));
    }
    bytes
}

fn put_text(block: &mut Vec<u8>, text: &str) {
    let length = text.len();
    match u8::try_from(length) {
        Ok(short @ ..127) => block.push(short),
        _ => {
            block.push(127);
            let mut rest = length - 127;
            while rest >= 128 {
                block.push(u8::try_from(rest % 128).unwrap() | 0x80);
                rest /= 128;
            }
            block.push(u8::try_from(rest).unwrap());
        }
    }
    block.extend_from_slice(text.as_bytes());
}

#[derive(Clone)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Bytes,
}

impl Frame {
    /// Returns the error code: the first number of the payload, or the second one in GOAWAY.
    pub(super) fn code(&self) -> u32 {
        let mut payload = self.payload.clone();
        if self.kind == GOAWAY {
            payload.advance(4);
        }
        payload.get_u32()
    }

    pub(super) fn ends(&self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0
    }
}

/// The raw end of a connection.
pub(super) struct RawPeer {
    pub(super) reader: RawReader,
    pub(super) writer: RawWriter,
}

pub(super) struct RawWriter(WriteHalf<TlsStream<TcpStream>>);

pub(super) struct RawReader {
    half: ReadHalf<TlsStream<TcpStream>>,
    buffer: BytesMut,
    /// Remaining window of the connection.
    window: u64,
    /// Initial window of a stream.
    first_window: u64,
    /// Remaining window of each stream whose window has changed.
    windows: HashMap<u32, u64>,
}

/// The frames that arrived until the end of the connection, or until the mark was answered.
#[derive(Debug, Default)]
pub(super) struct FloodOutcome {
    pub(super) closed: bool,
    pub(super) counts: [usize; 10],
    /// The code of GOAWAY.
    pub(super) go_away: Option<u32>,
}

impl RawPeer {
    pub(super) fn new(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        let (reader, writer) = tokio::io::split(stream.into());
        Self {
            reader: RawReader {
                half: reader,
                buffer: BytesMut::new(),
                window: 65_535,
                first_window: 65_535,
                windows: HashMap::new(),
            },
            writer: RawWriter(writer),
        }
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) {
        assert!(self.writer.send(bytes).await, "connection has gone");
    }

    /// Sends DATA as one frame and ignores the windows.
    pub(super) async fn send_data(&mut self, stream: u32, flags: u8, payload: &[u8]) {
        let count = payload.len() as u64;
        let room = self.reader.room(stream);
        *room = room.saturating_sub(count);
        self.reader.window = self.reader.window.saturating_sub(count);
        self.send(&frame(DATA, flags, stream, payload)).await;
    }

    /// Sends DATA of zeros within the windows.
    pub(super) async fn fill(&mut self, stream: u32, mut bytes: u64, flags: u8) {
        while bytes > 0 {
            let room = self.reader.window.min(*self.reader.room(stream));
            let count = room.min(bytes).min(FRAME_PAYLOAD_MAX as u64);
            if count == 0 {
                self.reader.next().await.expect("connection has gone");
                continue;
            }
            bytes -= count;
            let flags = if bytes == 0 { flags } else { 0 };
            let payload = vec![0; usize::try_from(count).unwrap()];
            self.send_data(stream, flags, &payload).await;
        }
    }

    /// Sends `chunk` `times` times and reads the replies. Stops when a mark after the flood is
    /// answered, or the other end closes.
    pub(super) async fn flood(&mut self, chunk: &[u8], times: usize) -> FloodOutcome {
        let Self { reader, writer } = self;
        let write = async {
            for _ in 0..times {
                if !writer.send(chunk).await {
                    break;
                }
            }
            writer.send(&frame(PING, 0, 0, &MARK)).await;
            pending::<()>().await;
        };
        tokio::select! {
            outcome = reader.watch() => outcome,
            () = write => unreachable!("waits"),
        }
    }
}

impl RawWriter {
    /// Sends bytes. Returns whether the connection accepted them.
    pub(super) async fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).await.is_ok() && self.0.flush().await.is_ok()
    }

    /// Sends close_notify and FIN.
    pub(super) async fn end(&mut self) {
        let _gone_before = self.0.shutdown().await;
    }
}

impl RawReader {
    pub(super) async fn preface(&mut self) {
        while self.buffer.len() < PREFACE.len() {
            assert_ne!(self.half.read_buf(&mut self.buffer).await.unwrap(), 0);
        }
        assert_eq!(self.buffer.split_to(PREFACE.len()), PREFACE);
    }

    /// Returns the next frame, or `None` when the connection has ended.
    pub(super) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = take_frame(&mut self.buffer) {
                self.note(&frame);
                return Some(frame);
            }
            match self.half.read_buf(&mut self.buffer).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => return None,
            }
        }
    }

    /// Returns the next frame of this kind.
    pub(super) async fn next_of_kind(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.next().await.expect("connection has gone");
            assert_ne!(frame.kind, GOAWAY, "code {}", frame.code());
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// Counts the received frames until the end of the connection or the answer to the mark.
    pub(super) async fn watch(&mut self) -> FloodOutcome {
        let mut outcome = FloodOutcome::default();
        while let Some(frame) = self.next().await {
            outcome.counts[usize::from(frame.kind)] += 1;
            if frame.kind == GOAWAY {
                outcome.go_away.get_or_insert_with(|| frame.code());
            }
            if frame.kind == PING && frame.payload[..] == MARK {
                return outcome;
            }
        }
        outcome.closed = true;
        outcome
    }

    fn room(&mut self, stream: u32) -> &mut u64 {
        let first = self.first_window;
        self.windows.entry(stream).or_insert(first)
    }

    fn note(&mut self, frame: &Frame) {
        match (frame.kind, frame.stream) {
            (WINDOW_UPDATE, 0) => self.window += u64::from(frame.code()),
            (WINDOW_UPDATE, stream) => *self.room(stream) += u64::from(frame.code()),
            (SETTINGS, _) if frame.flags & ACK == 0 => {
                let mut payload = frame.payload.clone();
                while payload.has_remaining() {
                    let (id, value) = (payload.get_u16(), payload.get_u32());
                    if id == INITIAL_WINDOW_SIZE {
                        self.first_window = value.into();
                    }
                }
            }
            _ => {}
        }
    }
}

fn take_frame(buffer: &mut BytesMut) -> Option<Frame> {
    let mut head = buffer.get(..9)?;
    let length = usize::try_from(head.get_uint(3)).unwrap();
    let (kind, flags, stream) = (head.get_u8(), head.get_u8(), head.get_u32());
    if buffer.len() < 9 + length {
        return None;
    }
    buffer.advance(9);
    Some(Frame {
        kind,
        flags,
        stream,
        payload: buffer.split_to(length).freeze(),
    })
}
