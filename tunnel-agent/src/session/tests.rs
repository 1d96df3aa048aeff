use std::time::SystemTime;

use rcgen::KeyPair;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;
use tunnel_proto::process::shutdown::{DrainOutcome, Shutdown};
use tunnel_proto::session::control::{self, ControlWriter};
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{Stream, TransportKind, find_cause};
use tunnel_proto::wire::code::{EnrollCode, RefusalCode};
use tunnel_proto::wire::control::Welcome;
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{InstanceId, Port, SessionId};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN};

use super::*;
use crate::config::Limits;
use crate::credentials::RotatingCredentials;
use crate::testing::{Ca, context, credentials};

const LONG: Duration = Duration::from_secs(10);
/// Longer than any silence of a session in these tests.
const AGES: Duration = Duration::from_secs(100);
const CURRENT: StreamKind = StreamKind::Control {
    version_min: VERSION_MIN,
    version_max: VERSION_MAX,
};

type SessionResult = Result<SessionSummary, AdmitError>;

/// An agent's session and the scripted server at its other end.
struct TestEnv {
    server: Arc<MemorySession>,
    agent_session: Arc<MemorySession>,
    shutdown: Shutdown,
    graceful_shutdown: CancellationToken,
    retire: CancellationToken,
    session_event: mpsc::Receiver<(Id, SessionEvent)>,
    agent: JoinSet<SessionResult>,
}

impl TestEnv {
    fn start() -> Self {
        Self::with(context(Limits::default()))
    }

    fn with(context: SessionContext) -> Self {
        let (server, agent_session) = memory::pair();
        agent_session.script().transport = Some(TransportKind::Quic);
        let (event_sender, session_event) = mpsc::channel(8);
        let retire = CancellationToken::new();
        let handle = SessionHandle {
            retire: retire.clone(),
            session_event: event_sender,
        };
        let (shutdown, graceful_shutdown) =
            (context.shutdown.clone(), context.graceful_shutdown.clone());
        let mut agent = JoinSet::new();
        let session = agent_session.clone();
        agent.spawn(async move { run(session, &context, &handle, Instant::now()).await });
        Self {
            server,
            agent_session,
            shutdown,
            graceful_shutdown,
            retire,
            session_event,
            agent,
        }
    }

    async fn open(&self, kind: StreamKind) -> Stream {
        let header = StreamHeader::new(kind);
        self.server.open(&header, LONG).await.unwrap()
    }

    async fn control(&self) -> (ControlReader, ControlWriter) {
        control::split(self.open(CURRENT).await)
    }

    /// Takes the session up to Welcome.
    async fn ready(&mut self) -> (ControlReader, ControlWriter) {
        let (mut reader, mut writer) = self.control().await;
        let hello = reader.receive().await.unwrap();
        assert!(matches!(hello, Some(ControlMessage::Hello(_))));
        writer.send(&welcome()).await.unwrap();
        assert_eq!(self.session_event().await, SessionEvent::Ready);
        (reader, writer)
    }

    /// Like [`TestEnv::ready`], with a certificate that is due for renewal.
    async fn ready_to_renew() -> (Self, ControlReader, ControlWriter) {
        let mut context = context(Limits::default());
        let mut due = credentials(&Ca::new());
        due.signer = Some(Arc::new(KeyPair::generate().unwrap()));
        due.issued = SystemTime::now() - Duration::from_secs(86400);
        context.rotating_credentials = RotatingCredentials::new(
            context.node.clone(),
            due,
            None,
            None,
            context.metrics.clone(),
        );
        let mut env = Self::with(context);
        let (reader, writer) = env.ready().await;
        (env, reader, writer)
    }

    /// Returns the next message that the server receives.
    async fn recv_control(&self, reader: &mut ControlReader) -> Option<ControlMessage> {
        timeout(AGES, reader.receive()).await.unwrap().unwrap()
    }

    async fn session_event(&mut self) -> SessionEvent {
        let session_event = timeout(AGES, self.session_event.recv()).await;
        session_event.unwrap().unwrap().1
    }

    /// Opens a stream that the agent serves, and returns it with the target's end.
    async fn busy(&self, target: &TcpListener) -> (Stream, TcpStream) {
        let port = Port::new(target.local_addr().unwrap().port()).unwrap();
        let stream = self.open(StreamKind::Target(Target::Node(port))).await;
        let (socket, _) = target.accept().await.unwrap();
        (stream, socket)
    }

    async fn outcome(&mut self) -> SessionResult {
        let joined = timeout(AGES, self.agent.join_next()).await;
        joined.unwrap().unwrap().unwrap()
    }
}

fn welcome() -> ControlMessage {
    ControlMessage::Welcome(Welcome {
        version: 1,
        session: SessionId(9),
        capabilities: vec![CAPABILITY_RENEW.to_owned()],
        streams_per_agent: 256,
        replicas: vec![],
        target_dial_timeout: LONG,
    })
}

#[tokio::test]
async fn session_is_ready_after_welcome_and_reports_why_it_ended() {
    let mut env = TestEnv::start();
    let (mut reader, mut writer) = env.control().await;
    let Some(ControlMessage::Hello(hello)) = env.recv_control(&mut reader).await else {
        panic!("no Hello")
    };
    assert_eq!(hello.node_name.as_str(), "worker-1");
    assert_eq!(hello.node_ip, "127.0.0.1");
    assert_eq!(hello.instance, InstanceId::new([7; 16]));
    assert!(env.session_event.try_recv().is_err());
    writer.send(&welcome()).await.unwrap();
    assert_eq!(env.session_event().await, SessionEvent::Ready);
    env.server.close(CloseCode::Superseded, "newer").await;
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Superseded);
    assert_eq!(summary.reason.by, ClosedBy::Peer);
}

#[tokio::test]
async fn refusal_of_the_server_keeps_its_code_and_detail() {
    let mut env = TestEnv::start();
    let (mut reader, mut writer) = env.control().await;
    env.recv_control(&mut reader).await;
    let message = ControlMessage::NotAdmitted(CloseCode::NameInUse, "worker-1 is live".into());
    writer.send(&message).await.unwrap();
    let error = env.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::NameInUse));
    assert!(error.to_string().contains("worker-1 is live"), "{error}");
}

#[tokio::test]
async fn close_code_without_a_message_is_reported() {
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.control().await;
    env.recv_control(&mut reader).await;
    let reason = "not yours";
    env.server
        .close(CloseCode::NameNotInCredential, reason)
        .await;
    let error = env.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::NameNotInCredential));
}

#[tokio::test]
async fn no_common_version_is_reported_to_both() {
    let mut env = TestEnv::start();
    let newer = StreamKind::Control {
        version_min: VERSION_MAX + 1,
        version_max: VERSION_MAX + 2,
    };
    let _stream = env.open(newer).await;
    let error = env.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::Version));
    assert_eq!(env.server.closed().await.code, CloseCode::Version);
}

#[tokio::test]
async fn first_stream_must_be_the_control_stream() {
    let mut env = TestEnv::start();
    let target = Target::Node(Port::new(9100).unwrap());
    let _stream = env.open(StreamKind::Target(target)).await;
    let error = env.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Protocol(_)), "{error:?}");
    assert_eq!(env.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn welcome_must_come_in_time() {
    let mut env = TestEnv::start();
    let _control = env.control().await;
    let error = env.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Timeout), "{error:?}");
    assert_eq!(env.server.closed().await.code, CloseCode::HandshakeTimeout);
}

#[tokio::test]
async fn drain_withdraws_finishes_streams_and_sends_bye() {
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.ready().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(listener.local_addr().unwrap().port()).unwrap();
    let mut stream = env.open(StreamKind::Target(Target::Node(port))).await;
    let (mut socket, _) = listener.accept().await.unwrap();

    let shutdown = env.shutdown.clone();
    let mut drain = JoinSet::new();
    drain.spawn(async move { shutdown.drain_within(LONG).await });
    assert_eq!(
        env.recv_control(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    let mut late = env.open(StreamKind::Target(Target::Node(port))).await;
    let error = late.read_u8().await.unwrap_err();
    let refusal = find_cause::<Refusal>(&error).unwrap();
    assert_eq!(refusal.code, RefusalCode::Draining);

    socket.write_all(&[1; 100_000]).await.unwrap();
    drop(socket);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer.len(), 100_000);
    stream.shutdown().await.unwrap();
    let end = timeout(LONG, drain.join_next()).await.unwrap();
    assert_eq!(end.unwrap().unwrap(), DrainOutcome::Complete);

    env.graceful_shutdown.cancel();
    let bye = env.recv_control(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(env.recv_control(&mut reader).await, None);
    assert_eq!(env.server.closed().await.code, CloseCode::Normal);
    assert_eq!(env.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

#[tokio::test]
async fn drain_during_admission_closes_the_session() {
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.control().await;
    env.recv_control(&mut reader).await;
    env.shutdown.drain().cancel();
    env.outcome().await.unwrap_err();
    env.server.closed().await;
}

#[tokio::test(start_paused = true)]
async fn bye_of_the_server_ends_the_session() {
    let mut env = TestEnv::start();
    let (_reader, mut writer) = env.ready().await;
    writer.send(&ControlMessage::Drain(LONG)).await.unwrap();
    writer.send(&ControlMessage::Unknown).await.unwrap();
    writer
        .send(&ControlMessage::Bye("done".into()))
        .await
        .unwrap();
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Normal);
    env.server.closed().await;
}

#[tokio::test]
async fn cut_control_stream_ends_the_session() {
    let mut env = TestEnv::start();
    drop(env.ready().await);
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn suspicion_is_reported_to_both_and_withdrawn() {
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.ready().await;
    env.agent_session.script().is_silent = true;
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    assert_eq!(
        env.recv_control(&mut reader).await,
        Some(ControlMessage::Suspect(true))
    );
    env.agent_session.script().is_silent = false;
    assert_eq!(env.session_event().await, SessionEvent::Live);
    assert_eq!(
        env.recv_control(&mut reader).await,
        Some(ControlMessage::Suspect(false))
    );
}

#[tokio::test(start_paused = true)]
async fn doubt_of_the_server_makes_the_session_suspect() {
    let mut env = TestEnv::start();
    let (_reader, mut writer) = env.ready().await;
    let began = Instant::now();
    for (doubts, session_event) in [(true, SessionEvent::Suspect), (false, SessionEvent::Live)] {
        writer.send(&ControlMessage::Suspect(doubts)).await.unwrap();
        assert_eq!(env.session_event().await, session_event);
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_ends_the_session_as_a_breach_of_the_protocol() {
    let drain = ControlMessage::Drain(LONG);
    for message in [drain, ControlMessage::Unknown, ControlMessage::Withdraw] {
        let mut env = TestEnv::start();
        let (_reader, mut writer) = env.ready().await;
        for _ in 0..=50 {
            let _closed_meanwhile = writer.send(&message).await;
        }
        assert_eq!(env.server.closed().await.code, CloseCode::Protocol);
        let summary = env.outcome().await.unwrap();
        assert_eq!(summary.reason.by, ClosedBy::Local);
        assert_eq!(summary.reason.code, CloseCode::Protocol, "{message:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_before_welcome_ends_the_session() {
    let mut env = TestEnv::start();
    let (_reader, mut writer) = env.control().await;
    for _ in 0..=50 {
        let _closed_meanwhile = writer.send(&ControlMessage::Unknown).await;
    }
    let error = env.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Control(_)), "{error:?}");
    assert_eq!(env.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn silent_session_is_dead_at_its_limit_though_its_messages_are_not_read() {
    let mut env = TestEnv::start();
    // The stream is too narrow for a single message that is not read.
    env.server.script().next_window = Some(1);
    let _control = env.ready().await;
    let ready = Instant::now();
    env.agent_session.script().is_silent = true;
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Dead);
    // The decision is up to 250 ms early.
    assert_eq!(ready.elapsed().as_secs_f64().round(), 60.0);
}

#[tokio::test(start_paused = true)]
async fn silence_is_suspect_five_seconds_after_the_first_request_of_a_quiet_session() {
    let mut env = TestEnv::start();
    let _control = env.ready().await;
    env.agent_session.script().is_silent = true;
    // A time between two checks of an idle session.
    tokio::time::sleep(Duration::from_millis(7300)).await;
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(target.local_addr().unwrap().port()).unwrap();
    let began = Instant::now();
    let _stream = env.open(StreamKind::Target(Target::Node(port))).await;
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    let waited = began.elapsed();
    assert!((5000..5300).contains(&waited.as_millis()), "{waited:?}");
}

#[tokio::test]
async fn retired_session_serves_what_was_opened_before_and_ends_with_its_last_stream() {
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.ready().await;
    let (mut first, mut first_socket) = env.busy(&target).await;
    env.retire.cancel();
    assert_eq!(
        env.recv_control(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    // The server opened the stream before it read Withdraw.
    let (mut late, mut late_socket) = env.busy(&target).await;
    for (stream, socket) in [
        (&mut first, &mut first_socket),
        (&mut late, &mut late_socket),
    ] {
        assert!(env.agent.try_join_next().is_none());
        socket.write_all(&[7; 100_000]).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer.len(), 100_000);
        stream.shutdown().await.unwrap();
    }
    let bye = env.recv_control(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(env.recv_control(&mut reader).await, None);
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.by, ClosedBy::Local);
    assert_eq!(summary.reason.code, CloseCode::Normal);
}

#[tokio::test]
async fn drain_sends_bye_on_a_retired_session_too() {
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut env = TestEnv::start();
    let (mut reader, _writer) = env.ready().await;
    let _busy = env.busy(&target).await;
    env.retire.cancel();
    env.shutdown.drain().cancel();
    env.graceful_shutdown.cancel();
    assert_eq!(
        env.recv_control(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    let bye = env.recv_control(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(env.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_server_is_one_event() {
    let mut env = TestEnv::start();
    let (_reader, mut writer) = env.ready().await;
    for _ in 0..3 {
        writer.send(&ControlMessage::Drain(LONG)).await.unwrap();
    }
    writer.send(&ControlMessage::Suspect(true)).await.unwrap();
    assert_eq!(env.session_event().await, SessionEvent::Draining);
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
}

fn renewed() -> ControlMessage {
    let reply = EnrollReply::Refused(EnrollCode::Unavailable, "not now".into());
    ControlMessage::Renewed(reply)
}

#[tokio::test]
async fn certificate_that_was_not_asked_for_ends_the_session() {
    let mut env = TestEnv::start();
    let (_reader, mut writer) = env.ready().await;
    writer.send(&renewed()).await.unwrap();
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Protocol);
    assert_eq!(env.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test]
async fn request_for_a_certificate_has_one_answer() {
    let (mut env, mut reader, mut writer) = TestEnv::ready_to_renew().await;
    let asked = env.recv_control(&mut reader).await;
    assert!(matches!(asked, Some(ControlMessage::Renew(_))), "{asked:?}");
    writer.send(&renewed()).await.unwrap();
    // The agent reads this before the second answer is sent.
    writer.send(&ControlMessage::Suspect(true)).await.unwrap();
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    assert!(env.agent.try_join_next().is_none());
    writer.send(&renewed()).await.unwrap();
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Protocol);
}
