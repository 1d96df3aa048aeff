use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tunnel_proto::process::shutdown::DrainEnd;
use tunnel_proto::transport::{Stream, cause_in};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, Target};
use tunnel_proto::wire::name::{Port, SessionId};

use super::*;
use crate::policy::Ceiling;
use crate::testing::sessions;

const LONG: Duration = Duration::from_secs(10);
const CURRENT: StreamKind = StreamKind::Control {
    version_min: VERSION_MIN,
    version_max: VERSION_MAX,
};

type Outcome = Result<Held, AdmitError>;

/// An agent's session and the scripted server at its other end.
struct World {
    server: Arc<dyn Session>,
    shutdown: Shutdown,
    farewell: CancellationToken,
    readiness: Readiness,
    agent: JoinSet<Outcome>,
}

impl World {
    fn start() -> Self {
        let (server, session) = sessions();
        let (shutdown, farewell, readiness) = (
            Shutdown::new(),
            CancellationToken::new(),
            Readiness::default(),
        );
        let (node, limits): (NodeName, _) = ("worker-1".parse().unwrap(), Limits::default());
        let egress = Egress::new(
            node.clone(),
            Ceiling::default(),
            &limits,
            Metrics::default(),
            shutdown.drain().clone(),
        );
        let shared = Shared {
            node,
            node_ip: Some([127, 0, 0, 1].into()),
            instance: InstanceId::new([7; 16]),
            limits,
            egress: Arc::new(egress),
            metrics: Metrics::default(),
            readiness: readiness.clone(),
            shutdown: shutdown.clone(),
            farewell: farewell.clone(),
        };
        let mut waiting = Some(readiness.block("session"));
        let mut agent = JoinSet::new();
        agent.spawn(async move { run(session, &shared, Instant::now(), &mut waiting).await });
        Self {
            server,
            shutdown,
            farewell,
            readiness,
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
    async fn ready(&self) -> (ControlReader, ControlWriter) {
        let (mut reader, mut writer) = self.control().await;
        let hello = reader.receive().await.unwrap();
        assert!(matches!(hello, Some(ControlMessage::Hello(_))));
        writer.send(&welcome()).await.unwrap();
        while !self.readiness.read().0.is_empty() {
            tokio::task::yield_now().await;
        }
        (reader, writer)
    }

    async fn outcome(&mut self) -> Outcome {
        let joined = timeout(LONG, self.agent.join_next()).await;
        joined.unwrap().unwrap().unwrap()
    }
}

fn welcome() -> ControlMessage {
    ControlMessage::Welcome(Welcome {
        version: 1,
        session: SessionId(9),
        capabilities: vec![],
        streams_per_agent: 256,
        replicas: vec![],
        target_dial_timeout: LONG,
    })
}

#[tokio::test]
async fn session_is_ready_after_welcome_and_tells_why_it_ended() {
    let mut world = World::start();
    let (mut reader, mut writer) = world.control().await;
    let Some(ControlMessage::Hello(hello)) = reader.receive().await.unwrap() else {
        panic!("no Hello")
    };
    assert_eq!(hello.node_name.as_str(), "worker-1");
    assert_eq!(hello.node_ip, "127.0.0.1");
    assert_eq!(hello.instance, InstanceId::new([7; 16]));
    assert_eq!(world.readiness.read().0, ["session"]);
    writer.send(&welcome()).await.unwrap();
    while !world.readiness.read().0.is_empty() {
        tokio::task::yield_now().await;
    }
    world.server.close(CloseCode::Superseded, "newer").await;
    let held = world.outcome().await.unwrap();
    assert_eq!(held.reason.code, CloseCode::Superseded);
    assert_eq!(held.reason.by, ClosedBy::Peer);
}

#[tokio::test]
async fn refusal_of_the_server_keeps_its_code_and_words() {
    let mut world = World::start();
    let (mut reader, mut writer) = world.control().await;
    reader.receive().await.unwrap();
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
    reader.receive().await.unwrap();
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
        reader.receive().await.unwrap(),
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
    let bye = reader.receive().await.unwrap();
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(reader.receive().await.unwrap(), None);
    assert_eq!(world.server.closed().await.code, CloseCode::Normal);
    assert_eq!(world.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

#[tokio::test]
async fn drain_during_admission_closes_the_session() {
    let mut world = World::start();
    let (mut reader, _writer) = world.control().await;
    reader.receive().await.unwrap();
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

#[test]
fn silence_counts_from_the_last_thing_heard() {
    let start = Instant::now();
    let second = Duration::from_secs(1);
    let mut liveness = Liveness::new(5, start);
    assert_eq!(liveness.silence(5, start + 3 * second), 3 * second);
    assert_eq!(liveness.silence(6, start + 4 * second), Duration::ZERO);
    assert_eq!(liveness.silence(6, start + 9 * second), 5 * second);
}
