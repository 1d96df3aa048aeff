use std::time::SystemTime;

use bytes::BytesMut;
use rcgen::KeyPair;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tunnel_proto::process::shutdown::DrainEnd;
use tunnel_proto::transport::control::{self, ControlWriter};
use tunnel_proto::transport::{Stream, TransportKind, cause_in};
use tunnel_proto::wire::code::{EnrollCode, RefusalCode};
use tunnel_proto::wire::control::Welcome;
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{Port, SessionId};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN};

use super::*;
use crate::testing::net::Line;
use crate::testing::{Ca, credentials, sessions, shared};

const LONG: Duration = Duration::from_secs(10);
/// Longer than any session of these tests is silent.
const AGES: Duration = Duration::from_secs(100);
const CURRENT: StreamKind = StreamKind::Control {
    version_min: VERSION_MIN,
    version_max: VERSION_MAX,
};

type Outcome = Result<Held, AdmitError>;

/// An agent's session and the scripted server at its other end.
struct World {
    server: Arc<dyn Session>,
    line: Arc<Line>,
    shutdown: Shutdown,
    farewell: CancellationToken,
    retire: CancellationToken,
    news: mpsc::Receiver<(Id, News)>,
    agent: JoinSet<Outcome>,
}

impl World {
    fn start() -> Self {
        Self::with(shared(Limits::default()))
    }

    fn with(shared: Shared) -> Self {
        let (server, session) = sessions();
        let line = Line::new(TransportKind::Quic, session);
        let (tell, news) = mpsc::channel(8);
        let retire = CancellationToken::new();
        let tether = Tether {
            retire: retire.clone(),
            news: tell,
        };
        let (shutdown, farewell) = (shared.shutdown.clone(), shared.farewell.clone());
        let mut agent = JoinSet::new();
        let session = line.clone();
        agent.spawn(async move { run(session, &shared, &tether, Instant::now()).await });
        Self {
            server,
            line,
            shutdown,
            farewell,
            retire,
            news,
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

    /// A session as far as Welcome.
    async fn ready(&mut self) -> (ControlReader, ControlWriter) {
        let (mut reader, mut writer) = self.control().await;
        let hello = reader.receive().await.unwrap();
        assert!(matches!(hello, Some(ControlMessage::Hello(_))));
        writer.send(&welcome()).await.unwrap();
        assert_eq!(self.news().await, News::Ready);
        (reader, writer)
    }

    /// As [`World::ready`], with a certificate that is due to be renewed.
    async fn ready_to_renew() -> (Self, ControlReader, ControlWriter) {
        let mut shared = shared(Limits::default());
        let mut due = credentials(&Ca::new());
        due.signer = Some(Arc::new(KeyPair::generate().unwrap()));
        due.issued = SystemTime::now() - Duration::from_secs(86400);
        shared.keeper = Keeper::new(shared.node.clone(), due, None, None, shared.metrics.clone());
        let mut world = Self::with(shared);
        let (reader, writer) = world.ready().await;
        (world, reader, writer)
    }

    /// What the server hears next.
    async fn said(&self, reader: &mut ControlReader) -> Option<ControlMessage> {
        timeout(AGES, reader.receive()).await.unwrap().unwrap()
    }

    async fn news(&mut self) -> News {
        let news = timeout(AGES, self.news.recv()).await;
        news.unwrap().unwrap().1
    }

    /// A stream that is being served, and the target's end of it.
    async fn busy(&self, target: &TcpListener) -> (Stream, TcpStream) {
        let port = Port::new(target.local_addr().unwrap().port()).unwrap();
        let stream = self.open(StreamKind::Target(Target::Node(port))).await;
        let (socket, _) = target.accept().await.unwrap();
        (stream, socket)
    }

    async fn outcome(&mut self) -> Outcome {
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
async fn session_is_ready_after_welcome_and_tells_why_it_ended() {
    let mut world = World::start();
    let (mut reader, mut writer) = world.control().await;
    let Some(ControlMessage::Hello(hello)) = world.said(&mut reader).await else {
        panic!("no Hello")
    };
    assert_eq!(hello.node_name.as_str(), "worker-1");
    assert_eq!(hello.node_ip, "127.0.0.1");
    assert_eq!(hello.instance, InstanceId::new([7; 16]));
    assert!(world.news.try_recv().is_err());
    writer.send(&welcome()).await.unwrap();
    assert_eq!(world.news().await, News::Ready);
    world.server.close(CloseCode::Superseded, "newer").await;
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Superseded);
    assert_eq!(held.reason.by, ClosedBy::Peer);
}

#[tokio::test]
async fn refusal_of_the_server_keeps_its_code_and_words() {
    let mut world = World::start();
    let (mut reader, mut writer) = world.control().await;
    world.said(&mut reader).await;
    let message = ControlMessage::NotAdmitted(CloseCode::NameInUse, "worker-1 is live".into());
    writer.send(&message).await.unwrap();
    let error = world.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::NameInUse));
    assert!(error.to_string().contains("worker-1 is live"), "{error}");
}

#[tokio::test]
async fn code_of_a_session_closed_without_a_word_is_kept() {
    let mut world = World::start();
    let (mut reader, _writer) = world.control().await;
    world.said(&mut reader).await;
    let reason = "not yours";
    world
        .server
        .close(CloseCode::NameNotInCredential, reason)
        .await;
    let error = world.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::NameNotInCredential));
}

#[tokio::test]
async fn no_common_version_is_told_to_both() {
    let mut world = World::start();
    let newer = StreamKind::Control {
        version_min: VERSION_MAX + 1,
        version_max: VERSION_MAX + 2,
    };
    let _stream = world.open(newer).await;
    let error = world.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::Version));
    assert_eq!(world.server.closed().await.code, CloseCode::Version);
}

#[tokio::test]
async fn first_stream_must_be_the_control_stream() {
    let mut world = World::start();
    let target = Target::Node(Port::new(9100).unwrap());
    let _stream = world.open(StreamKind::Target(target)).await;
    let error = world.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Protocol(_)), "{error:?}");
    assert_eq!(world.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn welcome_must_come_in_time() {
    let mut world = World::start();
    let _control = world.control().await;
    let error = world.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Timeout), "{error:?}");
    assert_eq!(
        world.server.closed().await.code,
        CloseCode::HandshakeTimeout
    );
}

#[tokio::test]
async fn drain_withdraws_finishes_streams_and_says_goodbye() {
    let mut world = World::start();
    let (mut reader, _writer) = world.ready().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(listener.local_addr().unwrap().port()).unwrap();
    let mut stream = world.open(StreamKind::Target(Target::Node(port))).await;
    let (mut socket, _) = listener.accept().await.unwrap();

    let shutdown = world.shutdown.clone();
    let mut drain = JoinSet::new();
    drain.spawn(async move { shutdown.drain_within(LONG).await });
    assert_eq!(
        world.said(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    let mut late = world.open(StreamKind::Target(Target::Node(port))).await;
    let error = late.read_u8().await.unwrap_err();
    let refusal = cause_in::<Refusal>(&error).unwrap();
    assert_eq!(refusal.code, RefusalCode::Draining);

    socket.write_all(&[1; 100_000]).await.unwrap();
    drop(socket);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer.len(), 100_000);
    stream.shutdown().await.unwrap();
    let end = timeout(LONG, drain.join_next()).await.unwrap();
    assert_eq!(end.unwrap().unwrap(), DrainEnd::Complete);

    world.farewell.cancel();
    let bye = world.said(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(world.said(&mut reader).await, None);
    assert_eq!(world.server.closed().await.code, CloseCode::Normal);
    assert_eq!(world.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

#[tokio::test]
async fn drain_during_admission_closes_the_session() {
    let mut world = World::start();
    let (mut reader, _writer) = world.control().await;
    world.said(&mut reader).await;
    world.shutdown.drain().cancel();
    world.outcome().await.unwrap_err();
    world.server.closed().await;
}

#[tokio::test(start_paused = true)]
async fn goodbye_of_the_server_ends_the_session() {
    let mut world = World::start();
    let (_reader, mut writer) = world.ready().await;
    writer.send(&ControlMessage::Drain(LONG)).await.unwrap();
    writer.send(&ControlMessage::Unknown).await.unwrap();
    writer
        .send(&ControlMessage::Bye("done".into()))
        .await
        .unwrap();
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Normal);
    world.server.closed().await;
}

#[tokio::test]
async fn cut_control_stream_ends_the_session() {
    let mut world = World::start();
    drop(world.ready().await);
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn suspicion_is_told_to_both_and_taken_back() {
    let mut world = World::start();
    let (mut reader, _writer) = world.ready().await;
    world.line.cut(true);
    assert_eq!(world.news().await, News::Suspect);
    assert_eq!(
        world.said(&mut reader).await,
        Some(ControlMessage::Doubt(true))
    );
    world.line.cut(false);
    assert_eq!(world.news().await, News::Live);
    assert_eq!(
        world.said(&mut reader).await,
        Some(ControlMessage::Doubt(false))
    );
}

#[tokio::test(start_paused = true)]
async fn word_of_the_server_makes_the_session_suspect() {
    let mut world = World::start();
    let (_reader, mut writer) = world.ready().await;
    let began = Instant::now();
    for (doubts, news) in [(true, News::Suspect), (false, News::Live)] {
        writer.send(&ControlMessage::Doubt(doubts)).await.unwrap();
        assert_eq!(world.news().await, news);
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_ends_the_session_as_a_breach_of_the_protocol() {
    let drain = ControlMessage::Drain(LONG);
    for message in [drain, ControlMessage::Unknown, ControlMessage::Withdraw] {
        let mut world = World::start();
        let (_reader, mut writer) = world.ready().await;
        for _ in 0..=50 {
            let _closed_meanwhile = writer.send(&message).await;
        }
        assert_eq!(world.server.closed().await.code, CloseCode::Protocol);
        let held = world.outcome().await.unwrap();
        assert_eq!(held.reason.by, ClosedBy::Local);
        assert_eq!(held.reason.code, CloseCode::Protocol, "{message:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_before_welcome_ends_the_session() {
    let mut world = World::start();
    let (_reader, mut writer) = world.control().await;
    for _ in 0..=50 {
        let _closed_meanwhile = writer.send(&ControlMessage::Unknown).await;
    }
    let error = world.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Control(_)), "{error:?}");
    assert_eq!(world.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn silent_session_is_dead_at_its_limit_though_nobody_takes_what_it_says() {
    let (raw, mut server) = tokio::io::duplex(1);
    let mut world = World::start();
    world.line.offer(raw);
    let mut hello = Vec::new();
    let mut header = BytesMut::new();
    StreamHeader::new(CURRENT).encode(&mut header).unwrap();
    server.write_all(&header).await.unwrap();
    // Reply and Hello, as far as the node's name.
    while !hello.ends_with(b"127.0.0.1") {
        hello.push(server.read_u8().await.unwrap());
    }
    let mut message = BytesMut::new();
    welcome().encode(&mut message).unwrap();
    server.write_all(&message).await.unwrap();
    assert_eq!(world.news().await, News::Ready);
    let ready = Instant::now();
    world.line.cut(true);
    assert_eq!(world.news().await, News::Suspect);
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Dead);
    // Decided up to 250 ms early.
    assert_eq!(ready.elapsed().as_secs_f64().round(), 60.0);
}

#[tokio::test(start_paused = true)]
async fn silence_is_suspect_five_seconds_after_the_first_request_of_a_quiet_session() {
    let mut world = World::start();
    let _control = world.ready().await;
    world.line.cut(true);
    // Between two looks at an idle session.
    tokio::time::sleep(Duration::from_millis(7300)).await;
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(target.local_addr().unwrap().port()).unwrap();
    let began = Instant::now();
    let _stream = world.open(StreamKind::Target(Target::Node(port))).await;
    assert_eq!(world.news().await, News::Suspect);
    let waited = began.elapsed();
    assert!((5000..5300).contains(&waited.as_millis()), "{waited:?}");
}

#[tokio::test]
async fn retired_session_serves_what_was_opened_before_and_ends_with_its_last_stream() {
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut world = World::start();
    let (mut reader, _writer) = world.ready().await;
    let (mut first, mut first_socket) = world.busy(&target).await;
    world.retire.cancel();
    assert_eq!(
        world.said(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    // The server opened it before it read Withdraw.
    let (mut late, mut late_socket) = world.busy(&target).await;
    for (stream, socket) in [
        (&mut first, &mut first_socket),
        (&mut late, &mut late_socket),
    ] {
        assert!(world.agent.try_join_next().is_none());
        socket.write_all(&[7; 100_000]).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer.len(), 100_000);
        stream.shutdown().await.unwrap();
    }
    let bye = world.said(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(world.said(&mut reader).await, None);
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.by, ClosedBy::Local);
    assert_eq!(held.reason.code, CloseCode::Normal);
}

#[tokio::test]
async fn drain_says_goodbye_on_a_retired_session_too() {
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut world = World::start();
    let (mut reader, _writer) = world.ready().await;
    let _busy = world.busy(&target).await;
    world.retire.cancel();
    world.shutdown.drain().cancel();
    world.farewell.cancel();
    assert_eq!(
        world.said(&mut reader).await,
        Some(ControlMessage::Withdraw)
    );
    let bye = world.said(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(world.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_server_is_news_once() {
    let mut world = World::start();
    let (_reader, mut writer) = world.ready().await;
    for _ in 0..3 {
        writer.send(&ControlMessage::Drain(LONG)).await.unwrap();
    }
    writer.send(&ControlMessage::Doubt(true)).await.unwrap();
    assert_eq!(world.news().await, News::Draining);
    assert_eq!(world.news().await, News::Suspect);
}

fn renewed() -> ControlMessage {
    let reply = EnrollReply::Refused(EnrollCode::Unavailable, "not now".into());
    ControlMessage::Renewed(reply)
}

#[tokio::test]
async fn certificate_that_was_not_asked_for_ends_the_session() {
    let mut world = World::start();
    let (_reader, mut writer) = world.ready().await;
    writer.send(&renewed()).await.unwrap();
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Protocol);
    assert_eq!(world.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test]
async fn request_for_a_certificate_has_one_answer() {
    let (mut world, mut reader, mut writer) = World::ready_to_renew().await;
    let asked = world.said(&mut reader).await;
    assert!(matches!(asked, Some(ControlMessage::Renew(_))), "{asked:?}");
    writer.send(&renewed()).await.unwrap();
    // Read before the second answer is sent.
    writer.send(&ControlMessage::Doubt(true)).await.unwrap();
    assert_eq!(world.news().await, News::Suspect);
    assert!(world.agent.try_join_next().is_none());
    writer.send(&renewed()).await.unwrap();
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Protocol);
}
