//! Bytes that hyper has read from a connection and has not used. They are read once more.

use bytes::{Buf as _, Bytes};
use tokio::io::ReadBuf;

/// The bytes in front of those that a connection has not returned yet.
#[derive(Debug, Default)]
pub(super) struct UnreadBytes(Bytes);

impl From<Bytes> for UnreadBytes {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

impl UnreadBytes {
    /// Reads from these bytes. Returns whether there were any.
    pub(super) fn read(&mut self, out: &mut ReadBuf<'_>) -> bool {
        if !self.0.has_remaining() {
            return false;
        }
        let count = self.0.len().min(out.remaining());
        out.put_slice(&self.0.split_to(count));
        if self.0.is_empty() {
            // An empty handle keeps the memory of all that was read.
            self.0 = Bytes::new();
        }
        true
    }

    /// Puts bytes in front of these.
    pub(super) fn put_back(&mut self, first: Bytes) {
        if first.is_empty() {
            return;
        }
        self.0 = if self.0.is_empty() {
            first
        } else {
            [first, self.take()].concat().into()
        };
    }

    /// Takes all bytes that are unread.
    pub(super) fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.0)
    }

    /// Returns whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
