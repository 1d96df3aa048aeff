//! Serves a stream that the other end of a session has opened: header, admission, dial, reply, relay,
//! and one record of its end. Agents, servers for their agents, and servers for each other differ in
//! what a [`StreamServer`] says.

use std::future::poll_fn;
use std::io;
use std::time::Duration;

use tokio::time::{Instant, timeout};

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
    mut stream: Stream,
    mut record: OpenRecord<S>,
) {
    let admitted = record.sinks.admit(&header, &stream);
    record.lock().asked(&header);
    let admitted = match admitted {
        Ok(admitted) => admitted,
        Err(refused) => return refuse(refused, stream, &mut record).await,
    };
    let dialed = tokio::select! {
        biased;
        dialed = record.sinks.dial(&admitted) => dialed,
        error = opener_gone(&mut stream) => {
            let detail = error.to_string();
            return record.lock().fail(StreamEnd::OpenerGone, detail);
        }
    };
    match dialed {
        Ok(dialed) => relay_dialed(dialed, stream, &mut record).await,
        Err(refused) => refuse(refused, stream, &mut record).await,
    }
}

/// Time for which a dial lasts before the opener is asked whether it still reads. Most dials are
/// shorter, and over QUIC the question needs memory.
const READER_CHECK_AFTER: Duration = Duration::from_millis(500);

/// Waits until the opener of a stream without a reply is gone: it has cut the stream, or the
/// session was lost. All that shows the cut of an opener that has ended its half is that it reads
/// no more. Cancel-safe.
async fn opener_gone(stream: &mut Stream) -> io::Error {
    let cut = poll_fn(|cx| stream.poll_opener_cut(cx));
    match timeout(READER_CHECK_AFTER, cut).await {
        Ok(error) => error,
        Err(_elapsed) => poll_fn(|cx| stream.poll_opener_gone(cx)).await,
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::io::AsyncWriteExt;
    use tokio::sync::{OwnedSemaphorePermit, Semaphore};
    use tokio::time::sleep;
    use tunnel_process::telemetry::LineForm;

    use super::*;
    use crate::stream_record::StreamRecord;
    use crate::transport::{Session, find_cause, memory};
    use crate::wire::code::RefusalCode;
    use crate::wire::header::{StreamKind, Target};
    use crate::wire::name::Port;

    const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
    const LONG: Duration = Duration::from_secs(60);

    /// The end of a stream whose target does not answer.
    struct SilentTarget {
        permits: Arc<Semaphore>,
        ends: Arc<Mutex<Vec<StreamEnd>>>,
    }

    impl StreamServer for SilentTarget {
        type Admitted = OwnedSemaphorePermit;
        type Guard = ();

        fn admit(&self, _: &StreamHeader, _: &Stream) -> Result<Self::Admitted, Refused> {
            Ok(self.permits.clone().try_acquire_owned().unwrap())
        }

        async fn dial(&self, _: &Self::Admitted) -> Result<Dialed<()>, Refused> {
            sleep(DIAL_TIMEOUT).await;
            let (code, detail) = (RefusalCode::TargetTimeout, String::new());
            Err(Refusal { code, detail }.into())
        }
    }

    impl RecordSinks for SilentTarget {
        const DROPPED: StreamEnd = StreamEnd::AgentStopping;
        const REPORTER: &'static str = "agent";

        fn has_reached_target(&self, record: &StreamRecord) -> bool {
            record.end.has_reached_target()
        }

        fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
            self.ends.lock().push(record.end);
            None
        }
    }

    /// How a stream to a target that does not answer ended.
    struct Ended {
        after: Duration,
        ends: Vec<StreamEnd>,
        permits: usize,
        /// What the opener got, if it did not cut the stream.
        refusal: Option<RefusalCode>,
    }

    /// Opens a stream to a target that does not answer. The opener cuts it after `cut_after`.
    async fn dial_silent_target(is_half_closed: bool, cut_after: Option<Duration>) -> Ended {
        let (opener, session) = memory::pair();
        let permits = Arc::new(Semaphore::new(1));
        let ends = Arc::<Mutex<Vec<StreamEnd>>>::default();
        let server = SilentTarget {
            permits: permits.clone(),
            ends: ends.clone(),
        };
        let began = Instant::now();
        let serving = async {
            let incoming = session.accept().await.unwrap();
            serve(server, incoming, LONG, || {}).await;
            began.elapsed()
        };
        let opening = async {
            let kind = StreamKind::Target(Target::Node(Port::new(9100).unwrap()));
            let header = StreamHeader::new(kind);
            let mut stream = opener.open(&header, LONG).await.unwrap();
            stream.write_all(b"question").await.unwrap();
            if is_half_closed {
                stream.shutdown().await.unwrap();
            }
            if let Some(cut_after) = cut_after {
                sleep(cut_after).await;
                assert_eq!(permits.available_permits(), 0);
                return None;
            }
            let error = stream.accepted().await.unwrap_err();
            find_cause::<Refusal>(&error).map(|refusal| refusal.code)
        };
        let (after, refusal) = tokio::join!(serving, opening);
        Ended {
            after,
            ends: std::mem::take(&mut *ends.lock()),
            permits: permits.available_permits(),
            refusal,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stream_that_its_opener_cuts_ends_while_its_target_is_dialed() {
        for cut_after in [1, 2000].map(Duration::from_millis) {
            for is_half_closed in [false, true] {
                let ended = dial_silent_target(is_half_closed, Some(cut_after)).await;
                assert_eq!(ended.ends, [StreamEnd::OpenerGone]);
                assert_eq!(ended.permits, 1);
                let expected = if is_half_closed {
                    cut_after.max(READER_CHECK_AFTER)
                } else {
                    cut_after
                };
                let is_in_time = ended.after <= expected + Duration::from_millis(10);
                assert!(is_in_time, "{:?}, not {expected:?}", ended.after);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn opener_that_only_half_closes_gets_the_reply() {
        for is_half_closed in [false, true] {
            let ended = dial_silent_target(is_half_closed, None).await;
            let refused = StreamEnd::Refused(RefusalCode::TargetTimeout);
            assert_eq!(ended.ends, [refused]);
            assert_eq!(ended.refusal, Some(RefusalCode::TargetTimeout));
            assert!(ended.after >= DIAL_TIMEOUT && ended.permits == 1);
        }
    }
}
