//! WebSocket frames (RFC 6455, section 5) for remote commands: whole messages, never fragmented.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// One end of a connection.
#[derive(Debug)]
pub struct WebSocket<S> {
    stream: S,
    /// Whether this end masks its frames: clients must, servers must not.
    masks: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Data; for remote commands the first byte names the channel.
    Binary(Vec<u8>),
    /// A ping, which requests a pong with the same bytes.
    Ping(Vec<u8>),
    /// The answer to a ping.
    Pong(Vec<u8>),
    /// The end, with its code if there is one.
    Close(Option<u16>),
}

impl<S: AsyncRead + AsyncWrite + Unpin> WebSocket<S> {
    /// Creates the end that requested the upgrade.
    pub fn client(stream: S) -> Self {
        Self {
            stream,
            masks: true,
        }
    }

    /// Creates the end that granted the upgrade.
    pub fn server(stream: S) -> Self {
        Self {
            stream,
            masks: false,
        }
    }

    /// Returns the underlying connection.
    pub fn into_inner(self) -> S {
        self.stream
    }

    pub async fn send(&mut self, message: &Message) -> io::Result<()> {
        let (opcode, mut bytes) = match message {
            Message::Binary(bytes) => (BINARY, bytes.clone()),
            Message::Ping(bytes) => (PING, bytes.clone()),
            Message::Pong(bytes) => (PONG, bytes.clone()),
            Message::Close(code) => (
                CLOSE,
                code.map_or_else(Vec::new, |code| code.to_be_bytes().to_vec()),
            ),
        };
        let mask_bit = if self.masks { 0x80 } else { 0 };
        let mut frame = vec![FINAL | opcode];
        match bytes.len() {
            length @ 0..126 => frame.push(mask_bit | u8::try_from(length).unwrap_or_default()),
            length @ 126..=0xffff => {
                frame.push(mask_bit | 126);
                frame.extend_from_slice(&u16::try_from(length).unwrap_or_default().to_be_bytes());
            }
            length => {
                frame.push(mask_bit | 127);
                frame.extend_from_slice(&(length as u64).to_be_bytes());
            }
        }
        if self.masks {
            let key = [0x17, 0x2a, 0x3d, 0x44];
            mask(&mut bytes, key);
            frame.extend_from_slice(&key);
        }
        frame.extend_from_slice(&bytes);
        self.stream.write_all(&frame).await?;
        self.stream.flush().await
    }

    /// Returns the next message, or `None` at a clean end between two messages.
    ///
    /// # Errors
    /// Returns an error if the connection is broken, or the peer sent a frame that it must not
    /// send.
    pub async fn next(&mut self) -> io::Result<Option<Message>> {
        let mut head = [0; 2];
        if self.stream.read(&mut head[..1]).await? == 0 {
            return Ok(None);
        }
        self.stream.read_exact(&mut head[1..]).await?;
        let [first, second] = head;
        if first & 0xf0 != FINAL || (second & 0x80 == 0) != self.masks {
            return Err(invalid(format!("frame head {head:02x?}")));
        }
        let length = match second & 0x7f {
            126 => u64::from(self.stream.read_u16().await?),
            127 => self.stream.read_u64().await?,
            length => u64::from(length),
        };
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= MESSAGE_BYTES);
        let mut bytes = vec![0; length.ok_or_else(|| invalid("message is too long"))?];
        let mut key = [0; 4];
        if !self.masks {
            self.stream.read_exact(&mut key).await?;
        }
        self.stream.read_exact(&mut bytes).await?;
        mask(&mut bytes, key);
        Ok(Some(match first & 0x0f {
            BINARY => Message::Binary(bytes),
            PING => Message::Ping(bytes),
            PONG => Message::Pong(bytes),
            CLOSE => Message::Close(bytes.first_chunk().copied().map(u16::from_be_bytes)),
            opcode => return Err(invalid(format!("opcode {opcode}"))),
        }))
    }
}

fn mask(bytes: &mut [u8], key: [u8; 4]) {
    for (byte, key) in bytes.iter_mut().zip(key.iter().cycle()) {
        *byte ^= key;
    }
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

const FINAL: u8 = 0x80;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// Far above the size of any message of remote commands.
const MESSAGE_BYTES: usize = 1 << 24;
