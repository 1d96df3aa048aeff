//! Requests written by hand, byte for byte.

/// A request exactly as it goes out. Nothing is added, not even Host or Content-Length.
#[derive(Debug, Clone)]
pub struct RawRequest {
    head: Vec<u8>,
    body: Vec<u8>,
    wait_for_continue: bool,
}

impl RawRequest {
    /// `GET path` for `host` with `Connection: close`.
    pub fn get(host: &str, path: &str) -> Self {
        Self::new("GET", path, host).header("Connection", "close")
    }

    /// `METHOD target HTTP/1.1` with Host and nothing else.
    pub fn new(method: &str, target: &str, host: &str) -> Self {
        Self::without_host(method, target).header("Host", host)
    }

    /// `METHOD target HTTP/1.1` and nothing else.
    pub fn without_host(method: &str, target: &str) -> Self {
        let head = format!("{method} {target} HTTP/1.1\r\n").into_bytes();
        Self { head, body: Vec::new(), wait_for_continue: false }
    }

    /// These bytes, with start line, headers and empty line, or without one of them.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> RawBytes {
        RawBytes(bytes.into())
    }

    /// Adds a header line; names may repeat.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        self
    }

    /// Adds Content-Length and the body.
    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let length = body.len().to_string();
        self.header("Content-Length", &length).followed_by(body)
    }

    /// Sends `bytes` behind the head in the same write, without a Content-Length.
    pub fn followed_by(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.body = bytes.into();
        self
    }

    /// Adds `Expect: 100-continue` and sends the body only after a 100; a final answer before that one stands without
    /// the body having been sent.
    pub fn expecting_continue(self) -> Self {
        Self { wait_for_continue: true, ..self.header("Expect", "100-continue") }
    }
}
