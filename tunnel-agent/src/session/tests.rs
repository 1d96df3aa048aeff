use std::time::SystemTime;

use rcgen::KeyPair;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tunnel_process::shutdown::{DrainOutcome, Shutdown};
use tunnel_proto::session::control::ControlWriter;
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{Stream, TransportKind, find_cause};
use tunnel_proto::wire::VERSION_MAX;
use tunnel_proto::wire::code::{EnrollCode, RefusalCode};
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{InstanceId, Port, SessionId};

use super::*;
use crate::config::Limits;
use crate::credentials::{CaFile, RotatingCredentials};
use crate::testing::net::{self, Busy};
use crate::testing::{Ca, context, credentials};

mod cloud;

const LONG: Duration = Duration::from_secs(10);
/// Longer than any silence of a session in these tests.
const AGES: Duration = Duration::from_secs(100);

type SessionResult = Result<SessionSummary, AdmitError>;

/// An agent's session and the scripted server at its other end.
struct TestEnv {
    server: Arc<MemorySession>,
    agent_session: Arc<MemorySession>,
    shutdown: Shutdown,
    graceful_shutdown: CancellationToken,
    retire: CancellationToken,
    session_event: mpsc::Receiver<(DialId, SessionEvent)>,
    members_changed: watch::Sender<()>,
    agent: JoinSet<SessionResult>,
}

impl TestEnv {
    fn start() -> Self {
        Self::with(context(Limits::default()))
    }

    fn with(context: SessionContext) -> Self {
        Self::with_shared(Arc::new(context))
    }

    fn with_shared(context: Arc<SessionContext>) -> Self {
        let (server, agent_session) = memory::pair();
        agent_session.script().transport = Some(TransportKind::Quic);
        let (event_sender, session_event) = mpsc::channel(8);
        let retire = CancellationToken::new();
        let members_changed = watch::Sender::new(());
        let handle = SessionHandle {
            id: DialId(0),
            retire: retire.clone(),
            session_event: event_sender,
            members_changed: members_changed.subscribe(),
        };
        let (shutdown, graceful_shutdown) =
            (context.shutdown.clone(), context.graceful_shutdown.clone());
        let mut agent = JoinSet::new();
        let session = agent_session.clone();
        agent.spawn(async move {
            let admitted = AdmittedSession::admit(session, &context, Instant::now()).await?;
            let (replica, members) = ("server-1".parse().unwrap(), Vec::new());
            handle
                .send(SessionEvent::Admitted { replica, members })
                .await;
            Ok(admitted.run(&context, &handle).await)
        });
        Self {
            server,
            agent_session,
            shutdown,
            graceful_shutdown,
            retire,
            session_event,
            members_changed,
            agent,
        }
    }

    async fn open(&self, kind: StreamKind) -> Stream {
        let header = StreamHeader::new(kind);
        self.server.open(&header, LONG).await.unwrap()
    }

    /// Starts a session and takes it up to Welcome.
    async fn ready() -> (Self, ControlReader, ControlWriter) {
        Self::start().welcomed().await
    }

    async fn welcomed(mut self) -> (Self, ControlReader, ControlWriter) {
        let (reader, writer) = net::admit(&*self.server, welcome()).await;
        self.expect_admission().await;
        (self, reader, writer)
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
            CaFile::channel(None).1,
            context.metrics.clone(),
        );
        Self::with(context).welcomed().await
    }

    async fn expect_admission(&mut self) {
        let session_event = self.session_event().await;
        assert!(matches!(session_event, SessionEvent::Admitted { .. }));
    }

    async fn session_event(&mut self) -> SessionEvent {
        let session_event = timeout(AGES, self.session_event.recv()).await;
        session_event.unwrap().unwrap().1
    }

    async fn outcome(&mut self) -> SessionResult {
        let joined = timeout(AGES, self.agent.join_next()).await;
        joined.unwrap().unwrap().unwrap()
    }

    /// Expects that either end observes a session that the agent closes for this reason.
    async fn expect_closed_for(&mut self, code: CloseCode) {
        assert_eq!(self.server.closed().await.code, code);
        let reason = self.outcome().await.unwrap().reason;
        assert_eq!((reason.by, reason.code), (ClosedBy::Local, code));
    }
}

fn welcome() -> Welcome {
    Welcome {
        capabilities: vec![CAPABILITY_RENEW.to_owned()],
        ..net::welcome()
    }
}

/// Returns the next message that the server receives.
async fn recv_control(reader: &mut ControlReader) -> Option<ControlMessage> {
    timeout(AGES, reader.receive()).await.unwrap().unwrap()
}

async fn expect_control(reader: &mut ControlReader, expected: ControlMessage) {
    assert_eq!(recv_control(reader).await, Some(expected));
}

async fn expect_bye(reader: &mut ControlReader) {
    let bye = recv_control(reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(recv_control(reader).await, None);
}

#[tokio::test]
async fn session_is_ready_after_welcome_and_reports_why_it_ended() {
    let mut env = TestEnv::start();
    let (hello, _reader, mut writer) = net::hello(&*env.server).await;
    assert_eq!(hello.node_name.as_str(), "worker-1");
    assert_eq!(hello.node_ip, "127.0.0.1");
    assert_eq!(hello.instance, InstanceId::new([7; 16]));
    assert!(env.session_event.try_recv().is_err());
    let welcome = ControlMessage::Welcome(welcome());
    writer.send(&welcome).await.unwrap();
    env.expect_admission().await;
    env.server.close(CloseCode::Superseded, "newer").await;
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Superseded);
    assert_eq!(summary.reason.by, ClosedBy::Peer);
}

#[tokio::test]
async fn refusal_of_the_server_keeps_its_code_and_detail() {
    let mut env = TestEnv::start();
    let (_, _reader, mut writer) = net::hello(&*env.server).await;
    let message = ControlMessage::NotAdmitted(CloseCode::NameInUse, "worker-1 is live".into());
    writer.send(&message).await.unwrap();
    let error = env.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(CloseCode::NameInUse));
    assert!(error.to_string().contains("worker-1 is live"), "{error}");
}

#[tokio::test]
async fn close_code_without_a_message_is_reported() {
    let mut env = TestEnv::start();
    let _control = net::hello(&*env.server).await;
    let code = CloseCode::NameNotInCredential;
    env.server.close(code, "not yours").await;
    let error = env.outcome().await.unwrap_err();
    assert_eq!(error.code(), Some(code));
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
    let _control = net::hello(&*env.server).await;
    let error = env.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Timeout), "{error:?}");
    assert_eq!(env.server.closed().await.code, CloseCode::HandshakeTimeout);
}

#[tokio::test]
async fn drain_withdraws_finishes_streams_and_sends_bye() {
    let (mut env, mut reader, _writer) = TestEnv::ready().await;
    let busy = Busy::on(&*env.server).await;
    let shutdown = env.shutdown.clone();
    let mut drain = JoinSet::new();
    drain.spawn(async move { shutdown.drain_within(LONG).await });
    expect_control(&mut reader, ControlMessage::Withdraw).await;
    let target = Target::Node(Port::new(9100).unwrap());
    let mut late = env.open(StreamKind::Target(target)).await;
    let error = late.read_u8().await.unwrap_err();
    let refusal = find_cause::<Refusal>(&error).unwrap();
    assert_eq!(refusal.code, RefusalCode::Draining);

    busy.finish().await;
    let end = timeout(LONG, drain.join_next()).await.unwrap();
    assert_eq!(end.unwrap().unwrap(), DrainOutcome::Complete);

    env.graceful_shutdown.cancel();
    expect_bye(&mut reader).await;
    env.expect_closed_for(CloseCode::Normal).await;
}

#[tokio::test]
async fn drain_during_admission_closes_the_session() {
    let mut env = TestEnv::start();
    let _control = net::hello(&*env.server).await;
    env.shutdown.drain().cancel();
    env.outcome().await.unwrap_err();
    env.server.closed().await;
}

#[tokio::test(start_paused = true)]
async fn session_of_a_stopping_server_withdraws_when_others_know_the_new_one() {
    for (is_stopping, wait) in [(true, WITHDRAW_DELAY), (false, Duration::ZERO)] {
        let (mut env, mut reader, mut writer) = TestEnv::ready().await;
        if is_stopping {
            writer.send(&drain()).await.unwrap();
            let session_event = env.session_event().await;
            assert!(matches!(session_event, SessionEvent::Draining { .. }));
        }
        let replaced = Instant::now();
        env.retire.cancel();
        expect_control(&mut reader, ControlMessage::Withdraw).await;
        assert_eq!(replaced.elapsed().as_millis(), wait.as_millis());
    }
}

#[tokio::test(start_paused = true)]
async fn bye_of_the_server_ends_the_session() {
    let (mut env, _reader, mut writer) = TestEnv::ready().await;
    let bye = ControlMessage::Bye("done".into());
    for message in [drain(), ControlMessage::Unknown, bye] {
        writer.send(&message).await.unwrap();
    }
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Normal);
    env.server.closed().await;
}

#[tokio::test]
async fn cut_control_stream_ends_the_session() {
    let (mut env, reader, writer) = TestEnv::ready().await;
    drop((reader, writer));
    let summary = env.outcome().await.unwrap();
    assert_eq!(summary.reason.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn doubt_of_the_server_makes_the_session_suspect() {
    let (mut env, _reader, mut writer) = TestEnv::ready().await;
    let began = Instant::now();
    for (doubts, session_event) in [(true, SessionEvent::Suspect), (false, SessionEvent::Live)] {
        writer.send(&ControlMessage::Suspect(doubts)).await.unwrap();
        assert_eq!(env.session_event().await, session_event);
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn change_of_the_servers_has_quic_sessions_send_at_once_and_thrice_more() {
    let cases = [
        (TransportKind::Quic, [1, 2, 3, 4, 4]),
        (TransportKind::H2, [0; 5]),
    ];
    for (transport, expected) in cases {
        let (env, _reader, _writer) = TestEnv::ready().await;
        env.agent_session.script().transport = Some(transport);
        let sent = || env.agent_session.stats().acknowledged;
        let before = sent();
        env.members_changed.send_replace(());
        for probes in expected {
            sleep(PATH_PROBE_INTERVAL / 2).await;
            assert_eq!(sent() - before, probes, "{transport}");
            sleep(PATH_PROBE_INTERVAL / 2).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_ends_the_session_as_a_breach_of_the_protocol() {
    for message in [drain(), ControlMessage::Unknown, ControlMessage::Withdraw] {
        let (mut env, _reader, mut writer) = TestEnv::ready().await;
        for _ in 0..=50 {
            let _closed_meanwhile = writer.send(&message).await;
        }
        env.expect_closed_for(CloseCode::Protocol).await;
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_before_welcome_ends_the_session() {
    let mut env = TestEnv::start();
    let (_, _reader, mut writer) = net::hello(&*env.server).await;
    for _ in 0..=50 {
        let _closed_meanwhile = writer.send(&ControlMessage::Unknown).await;
    }
    let error = env.outcome().await.unwrap_err();
    assert!(matches!(error, AdmitError::Control(_)), "{error:?}");
    assert_eq!(env.server.closed().await.code, CloseCode::Protocol);
}

#[tokio::test(start_paused = true)]
async fn silent_session_is_dead_at_its_limit_though_its_messages_are_not_read() {
    let env = TestEnv::start();
    // The stream is too narrow for a single message that is not read.
    env.server.script().next_window = Some(1);
    let (mut env, _reader, _writer) = env.welcomed().await;
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
    let (mut env, _reader, _writer) = TestEnv::ready().await;
    env.agent_session.script().is_silent = true;
    // A time between two checks of an idle session.
    sleep(Duration::from_millis(7300)).await;
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(target.local_addr().unwrap().port()).unwrap();
    let began = Instant::now();
    let _stream = env.open(StreamKind::Target(Target::Node(port))).await;
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    let waited = began.elapsed();
    assert!((5000..5300).contains(&waited.as_millis()), "{waited:?}");
}

#[tokio::test]
async fn drain_sends_bye_on_a_retired_session_too() {
    let (mut env, mut reader, _writer) = TestEnv::ready().await;
    let _busy = Busy::on(&*env.server).await;
    env.retire.cancel();
    env.shutdown.drain().cancel();
    env.graceful_shutdown.cancel();
    expect_control(&mut reader, ControlMessage::Withdraw).await;
    let bye = recv_control(&mut reader).await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(env.outcome().await.unwrap().reason.by, ClosedBy::Local);
}

/// The server opened the stream before it had read Withdraw.
#[tokio::test(start_paused = true)]
async fn stream_behind_bye_is_served_to_its_end_in_a_session_whose_silence_is_noticed() {
    for (is_silent, code) in [(false, CloseCode::Normal), (true, CloseCode::Dead)] {
        let (mut env, mut reader, _writer) = TestEnv::ready().await;
        let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = Port::new(target.local_addr().unwrap().port()).unwrap();
        env.retire.cancel();
        expect_control(&mut reader, ControlMessage::Withdraw).await;
        expect_bye(&mut reader).await;
        let mut stream = env.open(StreamKind::Target(Target::Node(port))).await;
        stream.accepted().await.unwrap();
        env.agent_session.script().is_silent = is_silent;
        sleep(Duration::from_secs(10)).await;
        assert!(env.agent.try_join_next().is_none(), "{code}");
        // The stream of a silent session does not end by itself.
        let _stream = is_silent.then_some(stream);
        let reason = env.outcome().await.unwrap().reason;
        assert_eq!((reason.by, reason.code), (ClosedBy::Local, code));
    }
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_server_is_one_event() {
    let (mut env, _reader, mut writer) = TestEnv::ready().await;
    for _ in 0..3 {
        writer.send(&drain()).await.unwrap();
    }
    writer.send(&ControlMessage::Suspect(true)).await.unwrap();
    let move_within = Duration::from_secs(3);
    let draining = SessionEvent::Draining { move_within };
    assert_eq!(env.session_event().await, draining);
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
}

#[tokio::test(start_paused = true)]
async fn changes_of_the_members_are_events() {
    let (mut env, _reader, mut writer) = TestEnv::ready().await;
    let members = vec![Member {
        id: "server-1".parse().unwrap(),
        addresses: vec!["192.0.2.1:10262".into()],
        is_leaving: true,
        zone: None,
    }];
    let message = ControlMessage::Members(members.clone());
    writer.send(&message).await.unwrap();
    assert_eq!(env.session_event().await, SessionEvent::Members(members));
}

#[tokio::test(start_paused = true)]
async fn declined_session_ends_with_bye_and_is_never_ready() {
    let (server, agent_session) = memory::pair();
    let context = context(Limits::default());
    let admit = async {
        let mut admitted = AdmittedSession::admit(agent_session, &context, Instant::now())
            .await
            .unwrap();
        assert_eq!(admitted.replica().as_str(), "server-1");
        assert_eq!(admitted.take_members(), []);
        admitted.decline().await;
    };
    let welcome = Welcome {
        replica_id: "server-1".parse().unwrap(),
        ..welcome()
    };
    let serve = async {
        let (mut reader, _writer) = net::admit(&*server, welcome).await;
        expect_bye(&mut reader).await;
    };
    tokio::join!(admit, serve);
    assert_eq!(server.closed().await.code, CloseCode::Normal);
}

fn drain() -> ControlMessage {
    ControlMessage::Drain {
        deadline: LONG,
        move_within: Duration::from_secs(3),
    }
}

fn renewed() -> ControlMessage {
    let reply = EnrollReply::Refused(EnrollCode::Unavailable, "not now".into());
    ControlMessage::Renewed(reply)
}

#[tokio::test]
async fn certificate_that_was_not_asked_for_ends_the_session() {
    let (mut env, _reader, mut writer) = TestEnv::ready().await;
    writer.send(&renewed()).await.unwrap();
    env.expect_closed_for(CloseCode::Protocol).await;
}

#[tokio::test]
async fn request_for_a_certificate_has_one_answer() {
    let (mut env, mut reader, mut writer) = TestEnv::ready_to_renew().await;
    let asked = recv_control(&mut reader).await;
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

#[tokio::test(start_paused = true)]
async fn certificate_is_renewed_within_the_time_for_which_a_server_asks_first() {
    let mut context = context(Limits::default());
    let mut fresh = credentials(&Ca::new());
    fresh.signer = Some(Arc::new(KeyPair::generate().unwrap()));
    context.rotating_credentials = RotatingCredentials::new(
        context.node.clone(),
        fresh,
        None,
        CaFile::channel(None).1,
        context.metrics.clone(),
    );
    let (_env, mut reader, mut writer) = TestEnv::with(context).welcomed().await;
    let asked_at = Instant::now();
    for seconds in [2, 0] {
        let ask = ControlMessage::RenewSoon(Duration::from_secs(seconds));
        writer.send(&ask).await.unwrap();
    }
    let request = recv_control(&mut reader).await;
    assert!(
        matches!(request, Some(ControlMessage::Renew(_))),
        "{request:?}"
    );
    let waited = asked_at.elapsed();
    assert!(
        !waited.is_zero() && waited <= Duration::from_secs(2),
        "{waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn lost_session_is_named_to_its_server_by_the_next_one_and_again_if_that_is_lost() {
    let context = Arc::new(context(Limits::default()));
    let named = |id| Welcome {
        session: SessionId(id),
        replica_id: "server-1".parse().unwrap(),
        ..welcome()
    };
    for (id, expected) in [(1, vec![]), (2, vec![1]), (3, vec![1, 2])] {
        let mut env = TestEnv::with_shared(context.clone());
        let (mut reader, _writer) = net::admit(&*env.server, named(id)).await;
        if !expected.is_empty() {
            let expected = expected.into_iter().map(SessionId).collect();
            expect_control(&mut reader, ControlMessage::Lost(expected)).await;
        }
        env.agent_session.script().is_silent = true;
        let reason = env.outcome().await.unwrap().reason;
        assert_eq!((reason.by, reason.code), (ClosedBy::Local, CloseCode::Dead));
    }
}
