//! Control messages over a stream. Both ends of a session use this module after the control
//! stream's header and reply, and so do two servers.

use std::io;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::Instant;

use crate::transport::Stream;
use crate::wire::control::{ControlMessage, Message};
use crate::wire::frame::{self, FrameError};
use crate::wire::peer::PeerMessage;

/// Splits a control stream into its halves. The stream no longer counts as open. It is dropped
/// together with the second half, and reset unless it was finished.
pub fn split<M: Message>(mut stream: Stream) -> (ControlReader<M>, ControlWriter<M>) {
    stream.exclude_from_count();
    let (input, output) = tokio::io::split(stream);
    let reader = ControlReader {
        input,
        buffer: BytesMut::new(),
        rate: MessageRate::default(),
        message: PhantomData,
    };
    let writer = ControlWriter {
        output,
        message: PhantomData,
    };
    (reader, writer)
}

/// The receiving half of a control stream.
#[derive(Debug)]
pub struct ControlReader<M = ControlMessage> {
    input: ReadHalf<Stream>,
    /// Bytes of incomplete messages. The buffer makes `receive` cancel-safe.
    buffer: BytesMut,
    rate: MessageRate,
    message: PhantomData<fn() -> M>,
}

/// The receiving half of a control stream between servers.
pub type PeerReader = ControlReader<PeerMessage>;
/// The sending half of a control stream between servers.
pub type PeerWriter = ControlWriter<PeerMessage>;

/// The error for a peer that sent more messages in one second than it may. Contains the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {0} control messages in a second")]
pub struct TooManyMessages(u32);

/// The number of messages in the current second.
#[derive(Debug, Default)]
struct MessageRate {
    window_start: Option<Instant>,
    messages: u32,
}

impl MessageRate {
    fn count(&mut self, now: Instant, limit: u32) -> Result<(), TooManyMessages> {
        let has_elapsed =
            |window_start| now.saturating_duration_since(window_start) >= Duration::from_secs(1);
        if self.window_start.is_none_or(has_elapsed) {
            (self.window_start, self.messages) = (Some(now), 0);
        }
        self.messages += 1;
        if self.messages > limit {
            return Err(TooManyMessages(limit));
        }
        Ok(())
    }
}

impl<M: Message> ControlReader<M> {
    /// Receives the next message. Returns `None` when the peer has ended its half after a complete
    /// message. Cancel-safe.
    ///
    /// # Errors
    /// - When the stream was cut or refused.
    /// - `InvalidData` around [`FrameError`] when a message is too large or malformed.
    /// - `InvalidData` around [`TooManyMessages`] when the peer sends messages too fast.
    /// - `UnexpectedEof` when the half ends inside a message.
    ///
    /// After an error the session is not usable. Close it with
    /// [`Protocol`](crate::wire::code::CloseCode::Protocol).
    pub async fn receive(&mut self) -> io::Result<Option<M>> {
        loop {
            let frame_bytes = frame::take(&mut self.buffer, M::SIZE_MAX).map_err(invalid)?;
            if let Some(message) = frame_bytes {
                let within_limit = self.rate.count(Instant::now(), M::PER_SECOND);
                within_limit.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                return M::decode(&message).map(Some).map_err(invalid);
            }
            if self.input.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }
}

/// The sending half of a control stream.
#[derive(Debug)]
pub struct ControlWriter<M = ControlMessage> {
    output: WriteHalf<Stream>,
    message: PhantomData<fn(M)>,
}

impl<M: Message> ControlWriter<M> {
    /// Sends one message. Not cancel-safe: if the future is dropped, a part of the message may have
    /// been sent.
    ///
    /// # Errors
    /// When the stream was cut or refused, or the message is too large.
    pub async fn send(&mut self, message: &M) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer).map_err(invalid)?;
        self.output.write_all(&buffer).await?;
        self.output.flush().await
    }

    /// Ends the sent half after the last message. Completes when the peer has received everything.
    /// Cancel-safe.
    ///
    /// # Errors
    /// When the stream was cut or refused.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.output.shutdown().await
    }
}

fn invalid(error: FrameError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
pub(super) mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::transport::{Session, memory};
    use crate::wire::header::{StreamHeader, StreamKind};

    const TEST_TIMEOUT: Duration = Duration::from_secs(5);

    /// Returns the halves at the opener and at the accepting end, and the values that keep the
    /// sessions open.
    pub(in crate::session) async fn control_stream() -> (
        (ControlReader, ControlWriter),
        (ControlReader, ControlWriter),
        impl Sized,
    ) {
        let (first, second) = memory::pair();
        let header = StreamHeader::new(StreamKind::Control {
            version_min: 1,
            version_max: 1,
        });
        let opened = first.open(&header, TEST_TIMEOUT).await.unwrap();
        let incoming = second.accept().await.unwrap();
        let received = incoming.header(Instant::now() + TEST_TIMEOUT).await;
        let (_, mut accepted) = received.unwrap();
        accepted.accept("").await.unwrap();
        (split(opened), split(accepted), (first, second))
    }

    #[tokio::test]
    async fn cancelled_receive_loses_no_bytes() {
        let (mut server, mut agent, _sessions) = control_stream().await;
        let bye = ControlMessage::Bye("in two parts".into());
        let mut bytes = BytesMut::new();
        bye.encode(&mut bytes).unwrap();
        let (head, tail) = bytes.split_at(5);
        agent.1.output.write_all(head).await.unwrap();
        let early = timeout(Duration::from_millis(20), server.0.receive()).await;
        early.unwrap_err();
        agent.1.output.write_all(tail).await.unwrap();
        assert_eq!(server.0.receive().await.unwrap(), Some(bye));
    }

    #[tokio::test]
    async fn message_above_the_cap_or_cut_short_is_an_error() {
        let (mut server, mut agent, _sessions) = control_stream().await;
        agent.1.output.write_all(&[0xff, 0xff, 0x7f]).await.unwrap();
        let error = server.0.receive().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);

        let (mut server, mut agent, _sessions) = control_stream().await;
        agent.1.output.write_all(&[9, 1]).await.unwrap();
        agent.1.finish().await.unwrap();
        let error = server.0.receive().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);

        let (mut server, agent, _sessions) = control_stream().await;
        drop(agent);
        let error = server.0.receive().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test(start_paused = true)]
    async fn more_than_fifty_messages_in_a_second_are_an_error() {
        let (mut server, mut agent, _sessions) = control_stream().await;
        for message in [ControlMessage::Withdraw, ControlMessage::Unknown] {
            for _ in 0..50 {
                agent.1.send(&message).await.unwrap();
                assert_eq!(server.0.receive().await.unwrap().as_ref(), Some(&message));
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        for _ in 0..=50 {
            agent.1.send(&ControlMessage::Suspect(true)).await.unwrap();
        }
        for _ in 0..50 {
            server.0.receive().await.unwrap();
        }
        let error = server.0.receive().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(error.to_string(), TooManyMessages(50).to_string());
    }
}
