//! Requests written by hand, byte for byte.

/// A request exactly as sent. Nothing is added, not even Host or Content-Length.
#[derive(Debug, Clone)]
pub struct RawRequest {
    head: Vec<u8>,
    end_of_head: &'static [u8],
    body: Vec<u8>,
    wait_for_continue: bool,
}

impl RawRequest {
    /// Creates `GET path` for `host` with `Connection: close`.
    pub fn get(host: &str, path: &str) -> Self {
        Self::new("GET", path, host).header("Connection", "close")
    }

    /// Creates `METHOD target HTTP/1.1` with Host and nothing else.
    pub fn new(method: &str, target: &str, host: &str) -> Self {
        Self::without_host(method, target).header("Host", host)
    }

    /// Creates `METHOD target HTTP/1.1` and nothing else.
    pub fn without_host(method: &str, target: &str) -> Self {
        Self {
            end_of_head: b"\r\n",
            ..Self::raw(format!("{method} {target} HTTP/1.1\r\n"))
        }
    }

    /// Creates a request of arbitrary bytes. The builder methods do not apply to it.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            head: bytes.into(),
            end_of_head: b"",
            body: Vec::new(),
            wait_for_continue: false,
        }
    }

    /// Adds a header line; names may repeat.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.head
            .extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        self
    }

    /// Adds Content-Length and the body.
    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let length = body.len().to_string();
        self.header("Content-Length", &length).followed_by(body)
    }

    /// Sends `bytes` after the head in the same write, without a Content-Length.
    pub fn followed_by(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.body = bytes.into();
        self
    }

    /// Adds `Expect: 100-continue` and sends the body only after a 100. After an earlier final
    /// answer the body is not sent.
    pub fn expecting_continue(self) -> Self {
        Self {
            wait_for_continue: true,
            ..self.header("Expect", "100-continue")
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        [self.head_bytes().as_slice(), &self.body].concat()
    }

    /// Returns the bytes up to the end of the head.
    pub fn head_bytes(&self) -> Vec<u8> {
        [&self.head, self.end_of_head].concat()
    }

    /// Returns the bytes after the head.
    pub(crate) fn body_bytes(&self) -> &[u8] {
        &self.body
    }

    pub(crate) fn waits_for_continue(&self) -> bool {
        self.wait_for_continue
    }

    pub(crate) fn is_head(&self) -> bool {
        self.head.starts_with(b"HEAD ")
    }
}
