//! Serves a stream that the other end of a session has opened: header, admission, dial, reply, relay,
//! and one record of its end. Agents, servers for their agents, and servers for each other differ in
//! what a [`StreamServer`] says.

use std::io;
use std::time::Duration;

use tokio::time::Instant;

use crate::egress::{TargetSocket, relay_socket};
use crate::forward::relay_streams;
use crate::open_record::{OpenRecord, RecordSinks};
use crate::stream_record::StreamEnd;
use crate::transport::{IncomingStream, Stream};
use crate::wire::header::{Refusal, StreamHeader};

/// One stream at the end that serves it, and the sinks of its record.
pub trait StreamServer: RecordSinks + Sync {
    /// What the stream may dial, with its permits, which are held to its end.
    type Admitted: Send;
    /// What the connection to the target needs to its end.
    type Guard: Send;

    /// Checks the header and acquires permits.
    ///
    /// # Errors
    /// The refusal of the stream.
    fn admit(&self, header: &StreamHeader, stream: &Stream) -> Result<Self::Admitted, Refused>;

    /// Connects to the target. Cancel-safe.
    ///
    /// # Errors
    /// The refusal of the stream.
    fn dial(
        &self,
        admitted: &Self::Admitted,
    ) -> impl Future<Output = Result<Dialed<Self::Guard>, Refused>> + Send;
}

/// A connection to a target.
#[derive(Debug)]
pub struct Dialed<G> {
    /// The connection.
    pub target: DialedTarget,
    /// The address that was dialed, for the record.
    pub address: String,
    /// What the connection needs to its end.
    pub guard: G,
}

/// The connection to a target.
#[derive(Debug)]
pub enum DialedTarget {
    /// A socket.
    Socket {
        /// The socket of the target.
        socket: TargetSocket,
        /// The address that the opener of the stream learns.
        reply: String,
    },
    /// A stream to the agent that dials, whose reply passes like all other bytes.
    Stream(Stream),
}

/// The refusal of a stream.
#[derive(Debug)]
pub struct Refused {
    /// What the opener receives.
    pub reply: Refusal,
    /// The reason, for the record.
    pub detail: String,
}

impl From<Refusal> for Refused {
    fn from(reply: Refusal) -> Self {
        let detail = reply.detail.clone();
        Self { reply, detail }
    }
}

/// Reads the header of a stream within `limit`, and serves the stream to its end. Dropping the future
/// cuts both sides. `on_late` is called for a header that does not arrive in time.
pub async fn serve<S: StreamServer>(
    server: S,
    incoming: IncomingStream,
    limit: Duration,
    on_late: impl FnOnce() + Send,
) {
    let began = Instant::now();
    let record = OpenRecord::start(began, server);
    record.lock().is_unread = true;
    match incoming.header(began + limit).await {
        Ok((header, stream)) => serve_with_header(header, stream, record).await,
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                on_late();
            }
            let detail = error.to_string();
            record.lock().fail(StreamEnd::NoHeader, detail);
        }
    }
}

/// Serves a stream whose header was read, to its end. Dropping the future cuts both sides.
pub async fn serve_with_header<S: StreamServer>(
    header: StreamHeader,
    stream: Stream,
    mut record: OpenRecord<S>,
) {
    let admitted = record.sinks.admit(&header, &stream);
    record.lock().asked(&header);
    match admitted {
        Ok(admitted) => match record.sinks.dial(&admitted).await {
            Ok(dialed) => relay_dialed(dialed, stream, &mut record).await,
            Err(refused) => refuse(refused, stream, &mut record).await,
        },
        Err(refused) => refuse(refused, stream, &mut record).await,
    }
}

async fn refuse<S: RecordSinks>(refused: Refused, stream: Stream, record: &mut OpenRecord<S>) {
    let Refusal { code, detail } = refused.reply;
    let end = StreamEnd::Refused(code);
    record.lock().fail(end, refused.detail);
    stream.refuse(code, &detail).await;
}

/// Accepts the stream and relays until both sides have ended or one was cut.
async fn relay_dialed<G, S: RecordSinks>(
    dialed: Dialed<G>,
    mut stream: Stream,
    record: &mut OpenRecord<S>,
) {
    let Dialed {
        target,
        address,
        guard: _guard,
    } = dialed;
    record.lock().dialed = address;
    match target {
        DialedTarget::Socket { socket, reply } => {
            record.carried(stream.bytes());
            // The socket resets when it is dropped, as after each cut.
            if let Err(error) = stream.accept(&reply).await {
                let detail = error.to_string();
                return record.lock().fail(StreamEnd::CutByPeer, detail);
            }
            record.started();
            record.relayed(relay_socket(stream, socket).await);
        }
        DialedTarget::Stream(opened) => {
            record.carried(opened.bytes());
            record.started();
            record.relayed(relay_streams(stream, opened).await);
        }
    }
}
