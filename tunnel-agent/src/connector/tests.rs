//! The driver between scripted transports, with sessions that carry streams. What is decided when is
//! tested in [`plan`].

use std::ops::RangeBounds;
use std::time::Duration;

use tokio::time::timeout;
use tunnel_process::followed::Followed;
use tunnel_process::meta::Readiness;
use tunnel_proto::transport::memory::{MemoryConnection, Path};
use tunnel_proto::transport::{Session, TransportKind};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Member, Welcome};

use super::member_addresses::ServerPolicy;
use super::*;
use crate::config::Limits;
use crate::credentials::{CaFile, CredentialStore, Credentials, RotatingCredentials};
use crate::metrics::{ConnectResult, Metrics};
use crate::proxy::ProxyChoice;
use crate::testing::net::{AGES, Busy, FakeNetwork, Peer, welcome};
use crate::testing::{Ca, ScratchDir, context, credentials, stored};

/// Two servers with addresses of their own. The agent is configured with the first.
const TWO: &[(&str, &str)] = &[("server-1", "192.0.2.1:10262"), ("server-2", "192.0.2.2:2")];

/// The connectors of an agent between scripted transports. The test acts as the servers.
struct TestEnv {
    net: FakeNetwork,
    context: Arc<SessionContext>,
    readiness: Readiness,
    agent: JoinSet<()>,
    start: Instant,
}

impl TestEnv {
    fn start() -> Self {
        Self::with(None)
    }

    /// Starts with a session.
    async fn ready(transport: TransportKind) -> (Self, Peer) {
        let mut env = match transport {
            TransportKind::H2 => Self::behind_a_firewall(),
            TransportKind::Quic | TransportKind::Memory => Self::start(),
        };
        let peer = env.peer(transport).await;
        (env, peer)
    }

    /// Starts with UDP blocked.
    fn behind_a_firewall() -> Self {
        let env = Self::start();
        env.net.quic.set(Path::Silent);
        env
    }

    fn with(rotating_credentials: Option<Arc<RotatingCredentials>>) -> Self {
        let (net, readiness) = (FakeNetwork::new(), Readiness::default());
        let mut context = context(Limits {
            // Targets are real sockets, and a paused clock may jump while they connect.
            target_dial_timeout: AGES,
            ..Limits::default()
        });
        context.rotating_credentials = rotating_credentials.unwrap_or(context.rotating_credentials);
        let context = Arc::new(context);
        let configured = [TWO[0].1.parse().unwrap()];
        let dialers = Arc::new(Dialers {
            server_policy: Arc::new(ServerPolicy::new(&configured, Followed::default())),
            proxy: ProxyChoice::default(),
            quic: net.quic.clone(),
            h2: net.h2.clone(),
        });
        let readiness_block = Some(readiness.block(SESSION));
        let connectors = ConnectorSet::new(
            dialers,
            TransportChoice::Auto,
            2,
            context.clone(),
            Arc::new(SessionStatuses::new(readiness.clone())),
            readiness_block,
        );
        let mut agent = JoinSet::new();
        agent.spawn(connectors.run());
        Self {
            net,
            context,
            readiness,
            agent,
            start: Instant::now(),
        }
    }

    async fn peer(&mut self, transport: TransportKind) -> Peer {
        let peer = self.net.peer().await;
        let after = self.start.elapsed();
        let dialed = peer.connection.agent.transport();
        assert_eq!(dialed, transport, "after {after:?}");
        self.until(|env| env.is_ready()).await;
        peer
    }

    /// Returns the seconds since the start or the last call.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let lap = now - std::mem::replace(&mut self.start, now);
        lap.as_secs_f64()
    }

    /// Expects a time in seconds since the start or the last call.
    #[track_caller]
    fn expect_lap(&mut self, bounds: impl RangeBounds<f64>) {
        let waited = self.lap();
        assert!(bounds.contains(&waited), "{waited}");
    }

    fn is_ready(&self) -> bool {
        self.readiness.read().0.is_empty()
    }

    async fn until(&self, is: impl Fn(&Self) -> bool) {
        let becomes = async {
            while !is(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(AGES, becomes).await.unwrap();
    }

    async fn advance(&self, seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}

/// Expects that the session retires and has no streams left.
async fn expect_retirement(peer: &mut Peer) {
    assert_eq!(peer.recv_control().await, Some(ControlMessage::Withdraw));
    expect_bye(peer).await;
}

async fn expect_bye(peer: &mut Peer) {
    let bye = peer.recv_control().await;
    assert!(matches!(bye, Some(ControlMessage::Bye(_))), "{bye:?}");
    assert_eq!(peer.recv_control().await, None);
    assert_eq!(peer.closed().await.code, CloseCode::Normal);
}

/// Admits a session as server `id` of two.
async fn admit_as(connection: MemoryConnection, id: &str) -> Peer {
    let member = |(id, address): &(&str, &str)| Member {
        id: id.parse().unwrap(),
        addresses: vec![(*address).to_owned()],
        is_leaving: false,
        zone: None,
    };
    let welcome = Welcome {
        replica_id: id.parse().unwrap(),
        members: TWO.iter().map(member).collect(),
        ..welcome()
    };
    Peer::admit_with(connection, welcome).await
}

impl TestEnv {
    /// Returns the agent's next session, admitted by the server at the address that was dialed.
    async fn next_of_two(&mut self) -> Peer {
        let connection = self.net.arrival().await;
        let server = TWO.iter().find(|(_, address)| *address == connection.name);
        admit_as(connection, server.unwrap().0).await
    }

    /// Waits until so many connectors have a session, and none looks for one.
    async fn until_connected(&self, count: i64) {
        let sessions = |state| self.context.metrics.sessions(state);
        self.until(|_| {
            sessions(SessionState::Connected) == count && sessions(SessionState::Connecting) == 0
        })
        .await;
    }

    /// Returns the condition about the sessions, or an empty string without one.
    fn condition(&self) -> String {
        let conditions = self.readiness.conditions();
        conditions.into_iter().map(|(_, line)| line).collect()
    }
}

/// The stored certificate has never carried a session, and the previous certificate is available.
#[tokio::test(start_paused = true)]
async fn certificate_that_three_handshakes_refuse_is_replaced_by_the_one_before() {
    let (scratch, ca) = (ScratchDir::new().unwrap(), Ca::new());
    let store = CredentialStore::open(scratch.path()).unwrap();
    let key = store.key().unwrap();
    let key = Arc::new(key);
    let issue = || {
        let chain = [ca.issue(&*key, "culvert://agent/worker-1").to_vec()];
        Credentials::issued(key.clone(), &chain, &[ca.der().to_vec()]).unwrap()
    };
    let [older, newer] = [issue(), issue()];
    store.save(&older).unwrap();
    let rotating = |credentials| {
        let (node, store) = ("worker-1".parse().unwrap(), Some(store.clone()));
        let ca = CaFile::channel(None).1;
        RotatingCredentials::new(node, credentials, store, ca, Metrics::default())
    };
    rotating(older.clone()).adopt(newer.clone(), false).await;
    let [older, newer] = [older, newer].map(|credentials| credentials.own.cert[0].to_vec());
    let rotating_credentials = rotating(stored(scratch.path()));
    let in_use = || rotating_credentials.identity().own().cert[0].to_vec();
    let some_credentials = Some(rotating_credentials.clone());
    let mut env = TestEnv::with(some_credentials);
    env.net.set(Path::Refused);
    env.advance(10).await;
    // No connection says nothing of certificates.
    assert_eq!(in_use(), newer);
    env.net.quic.set(Path::Alert);
    env.until(|_| in_use() == older).await;
    env.net.quic.set(Path::Open);
    let _peer = env.peer(TransportKind::Quic).await;
    let previous = scratch.path().join("agent.crt.previous");
    env.until(|_| !previous.exists()).await;
    assert_eq!(in_use(), older);
}

#[tokio::test(start_paused = true)]
async fn upgrade_retires_the_old_session_and_its_streams_go_on() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::H2).await;
    let running = Busy::on(&*old.connection.server).await;
    env.advance(100).await;
    env.net.quic.set(Path::Open);
    env.lap();
    let new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..=45.1);

    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));
    // The server opened the stream before it read Withdraw.
    let late = Busy::on(&*old.connection.server).await;
    assert_eq!(env.context.metrics.transport_changes(), (1, 1));
    env.advance(600).await;
    assert!(env.is_ready());
    late.finish().await;
    env.advance(600).await;
    running.finish().await;
    expect_bye(&mut old).await;
    Busy::on(&*new.connection.server).await.finish().await;
    assert!(env.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn suspect_session_is_replaced_and_keeps_its_streams() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    let running = Busy::on(&*old.connection.server).await;
    env.net.quic.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    env.lap();
    env.until(|env| !env.is_ready()).await;
    let new = env.peer(TransportKind::H2).await;
    env.expect_lap(..10.0);
    old.expect_suspect(true).await;
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));

    env.advance(20).await;
    old.connection.agent.script().is_silent = false;
    old.expect_suspect(false).await;
    running.finish().await;
    expect_bye(&mut old).await;
    Busy::on(&*new.connection.server).await.finish().await;
    assert!(env.is_ready());
}

#[tokio::test(start_paused = true)]
async fn drain_with_two_sessions_closes_both_without_loss() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::H2).await;
    let on_old = Busy::on(&*old.connection.server).await;
    env.net.quic.set(Path::Open);
    let mut new = env.peer(TransportKind::Quic).await;
    let on_new = Busy::on(&*new.connection.server).await;
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));

    let shutdown = env.context.shutdown.clone();
    shutdown.drain().cancel();
    assert_eq!(new.recv_control().await, Some(ControlMessage::Withdraw));
    on_old.finish().await;
    on_new.finish().await;
    env.context.graceful_shutdown.cancel();
    let ended = async {
        tokio::join!(expect_bye(&mut old), expect_bye(&mut new));
        env.agent.join_next().await
    };
    ended.await.unwrap().unwrap();
    assert!(env.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn drain_withdraws_both_current_sessions() {
    let mut env = TestEnv::start();
    let (mut one, mut other) = (env.next_of_two().await, env.next_of_two().await);
    env.until_connected(2).await;
    let shutdown = env.context.shutdown.clone();
    shutdown.drain().cancel();
    for peer in [&mut one, &mut other] {
        assert_eq!(peer.recv_control().await, Some(ControlMessage::Withdraw));
    }
    env.context.graceful_shutdown.cancel();
    let ended = async {
        tokio::join!(expect_bye(&mut one), expect_bye(&mut other));
        env.agent.join_next().await
    };
    ended.await.unwrap().unwrap();
    assert!(env.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn dropped_connector_cuts_its_sessions() {
    let (mut env, peer) = TestEnv::ready(TransportKind::Quic).await;
    env.agent.shutdown().await;
    // The agent's end is gone; the test holds the last handle.
    assert_eq!(Arc::strong_count(&peer.connection.agent), 1);
}

#[tokio::test(start_paused = true)]
async fn session_with_a_server_of_another_one_is_declined_before_it_takes_streams() {
    let mut env = TestEnv::start();
    let first = env.next_of_two().await;
    let mut duplicate = admit_as(env.net.arrival().await, "server-1").await;
    // No Withdraw, since the session took no streams.
    expect_bye(&mut duplicate).await;
    let second = admit_as(env.net.arrival().await, "server-2").await;
    env.until_connected(2).await;
    let metrics = &env.context.metrics;
    let duplicates = metrics.connect_attempts(TransportKind::Quic, ConnectResult::Duplicate);
    assert_eq!(duplicates, 1);
    Busy::on(&*first.connection.server).await.finish().await;
    Busy::on(&*second.connection.server).await.finish().await;
}

#[tokio::test(start_paused = true)]
async fn renewed_certificate_is_dialed_at_once() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    let renewed = credentials(&Ca::new());
    let rotating_credentials = &env.context.rotating_credentials;
    rotating_credentials.adopt(renewed, true).await;
    env.lap();
    let _new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..0.1);
    expect_retirement(&mut old).await;
}

#[tokio::test(start_paused = true)]
async fn one_session_of_two_is_ready_and_a_condition_says_why_the_other_is_missing() {
    let mut env = TestEnv::start();
    let (one, other) = (env.next_of_two().await, env.next_of_two().await);
    env.until_connected(2).await;
    assert_eq!(env.condition(), "");
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    let missing = "1 of 2 sessions, with server-2; none with server-1: quic: 192.0.2.1:10262";
    env.until(|env| env.condition().starts_with(missing)).await;
    assert!(env.is_ready());
    env.net.set(Path::Open);
    let one = env.next_of_two().await;
    env.until_connected(2).await;
    assert_eq!(env.condition(), "");
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    other.close(CloseCode::Draining).await;
    env.until(|env| !env.is_ready()).await;
    let missing = "0 of 2 sessions; none with server-";
    assert!(env.condition().starts_with(missing), "{}", env.condition());
}
