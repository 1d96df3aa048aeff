use std::ops::RangeBounds;

use tokio::time::timeout;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::transport::memory::Path;
use tunnel_proto::transport::{Session, TransportKind};
use tunnel_proto::wire::control::ControlMessage;
use tunnel_proto::wire::ports::PortSet;

use super::member_addresses::ServerPolicy;
use super::set::ConnectorSet;
use super::status::SessionStatuses;
use super::*;
use crate::config::Limits;
use crate::credentials::{CaFile, CredentialStore, Credentials, RotatingCredentials};
use crate::metrics::Metrics;
use crate::proxy::ProxyChoice;
use crate::testing::net::{AGES, Busy, FakeNetwork, Peer, reject};
use crate::testing::{Ca, TempDir, context, stored};

mod changes;
mod replicas;
mod standby;

const AUTO: TransportChoice = TransportChoice::Auto;
const REPLICAS: usize = 2;

/// The connectors of an agent between scripted transports. The test acts as the servers.
struct TestEnv {
    net: FakeNetwork,
    context: Arc<SessionContext>,
    readiness: Readiness,
    agent: JoinSet<()>,
    start: Instant,
}

impl TestEnv {
    fn start(choice: TransportChoice) -> Self {
        Self::with(choice, &["192.0.2.1:10262"], None)
    }

    /// Starts with a session.
    async fn ready(transport: TransportKind) -> (Self, Peer) {
        let mut env = match transport {
            TransportKind::H2 => Self::behind_a_firewall(),
            TransportKind::Quic | TransportKind::Memory => Self::start(AUTO),
        };
        let peer = env.peer(transport).await;
        (env, peer)
    }

    /// Starts with UDP blocked.
    fn behind_a_firewall() -> Self {
        let env = Self::start(AUTO);
        env.net.quic.set(Path::Silent);
        env
    }

    /// Starts without an answer on any path, after a session over `remembered`.
    async fn cut_off(remembered: TransportKind) -> Self {
        let (env, peer) = Self::ready(remembered).await;
        env.net.set(Path::Silent);
        peer.close(CloseCode::Draining).await;
        env
    }

    fn with(
        choice: TransportChoice,
        servers: &[&str],
        rotating_credentials: Option<Arc<RotatingCredentials>>,
    ) -> Self {
        Self::with_replicas(REPLICAS, choice, servers, rotating_credentials)
    }

    fn with_replicas(
        replicas: usize,
        choice: TransportChoice,
        servers: &[&str],
        rotating_credentials: Option<Arc<RotatingCredentials>>,
    ) -> Self {
        let (net, readiness) = (FakeNetwork::new(), Readiness::default());
        let mut context = context(Limits {
            // Targets are real sockets, and a paused clock may jump while they connect.
            target_dial_timeout: AGES,
            ..Limits::default()
        });
        context.rotating_credentials = rotating_credentials.unwrap_or(context.rotating_credentials);
        let context = Arc::new(context);
        let configured: Vec<_> = servers.iter().map(|name| name.parse().unwrap()).collect();
        let dialers = Arc::new(Dialers {
            server_policy: ServerPolicy::new(&configured, PortSet::default()),
            proxy: ProxyChoice::default(),
            quic: net.quic.clone(),
            h2: net.h2.clone(),
        });
        let readiness_block = Some(readiness.block(live::SESSION));
        let connectors = ConnectorSet::new(
            dialers,
            choice,
            replicas,
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

    fn count(&self, transport: TransportKind, result: ConnectResult) -> u64 {
        self.context.metrics.connect_attempts(transport, result)
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

#[tokio::test(start_paused = true)]
async fn quic_that_answers_is_alone() {
    let (mut env, _peer) = TestEnv::ready(TransportKind::Quic).await;
    env.expect_lap(..0.1);
    env.advance(3600).await;
    assert_eq!(env.net.h2.dials(), []);
    assert_eq!(env.net.quic.dials().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn silent_quic_falls_back_to_h2_after_three_seconds() {
    let (mut env, _peer) = TestEnv::ready(TransportKind::H2).await;
    env.expect_lap(3.0..3.1);
    assert_eq!(env.count(TransportKind::H2, ConnectResult::Ready), 1);
    env.advance(1).await;
    assert_eq!(env.count(TransportKind::Quic, ConnectResult::Abandoned), 1);
    assert_eq!(env.context.metrics.transport_changes(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn quic_that_cannot_be_dialed_falls_back_at_once() {
    let mut env = TestEnv::start(AUTO);
    env.net.quic.set(Path::Refused);
    let _peer = env.peer(TransportKind::H2).await;
    env.expect_lap(..0.1);
}

#[tokio::test(start_paused = true)]
async fn alert_of_quic_is_no_reason_to_try_h2() {
    let mut env = TestEnv::start(AUTO);
    env.net.quic.set(Path::Alert);
    env.advance(600).await;
    assert_eq!(env.net.h2.dials(), []);
    assert!(env.count(TransportKind::Quic, ConnectResult::Failed) > 60);
    env.net.quic.set(Path::Open);
    let _peer = env.peer(TransportKind::Quic).await;
}

#[tokio::test(start_paused = true)]
async fn refusal_of_the_server_ends_the_attempt_and_sets_the_backoff() {
    let mut env = TestEnv::start(AUTO);
    let arrival = env.net.arrival().await;
    reject(arrival, CloseCode::NameInUse).await;
    env.lap();
    let _peer = env.peer(TransportKind::Quic).await;
    env.expect_lap(60.0..67.0);
    assert_eq!(env.net.h2.dials(), []);
    let refused = env.count(TransportKind::Quic, ConnectResult::NotAdmitted);
    assert_eq!(refused, 1);
}

#[tokio::test(start_paused = true)]
async fn refusal_of_a_stopped_server_does_not_delay_the_dial_to_the_next_one() {
    let (mut env, peer) = TestEnv::ready(TransportKind::Quic).await;
    peer.close(CloseCode::Draining).await;
    let arrival = env.net.arrival().await;
    reject(arrival, CloseCode::Overloaded).await;
    env.lap();
    let _peer = env.peer(TransportKind::Quic).await;
    env.expect_lap(..0.11);
}

#[tokio::test(start_paused = true)]
async fn last_ready_h2_is_dialed_first_and_quic_still_tried() {
    let (mut env, peer) = TestEnv::ready(TransportKind::H2).await;
    env.net.quic.dials();
    peer.close(CloseCode::Draining).await;
    env.lap();
    let peer = env.peer(TransportKind::H2).await;
    env.expect_lap(..0.1);
    assert_eq!(env.net.quic.dials(), []);

    env.advance(10).await;
    env.net.h2.set(Path::Silent);
    env.net.quic.set(Path::Open);
    peer.close(CloseCode::Draining).await;
    env.lap();
    let _peer = env.peer(TransportKind::Quic).await;
    env.expect_lap(3.0..3.1);
}

#[tokio::test(start_paused = true)]
async fn alert_over_h2_does_not_keep_quic_from_being_tried() {
    let (mut env, peer) = TestEnv::ready(TransportKind::H2).await;
    env.net.h2.set(Path::Alert);
    env.net.quic.set(Path::Open);
    peer.close(CloseCode::Draining).await;
    env.lap();
    let _peer = env.peer(TransportKind::Quic).await;
    env.expect_lap(..0.1);
}

/// The stored certificate has never carried a session, and the previous certificate is available.
#[tokio::test(start_paused = true)]
async fn certificate_that_three_handshakes_refuse_is_replaced_by_the_one_before() {
    let (scratch, ca) = (TempDir::new(), Ca::new());
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
    let mut env = TestEnv::with(AUTO, &["192.0.2.1:10262"], some_credentials);
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
async fn long_outage_ends_35_seconds_after_any_one_path_is_back() {
    use TransportKind::{H2, Quic};
    for (remembered, healed) in [(H2, Quic), (H2, H2), (Quic, H2), (Quic, Quic)] {
        for offset in 0..20 {
            let mut env = TestEnv::cut_off(remembered).await;
            env.advance(400 + 2 * offset).await;
            match healed {
                Quic => env.net.quic.set(Path::Open),
                H2 | TransportKind::Memory => env.net.h2.set(Path::Open),
            }
            env.lap();
            env.peer(healed).await;
            let waited = env.lap();
            assert!(waited <= 35.0, "{remembered}, then {healed}: {waited}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn short_outage_ends_three_seconds_after_the_partition() {
    for remembered in [TransportKind::Quic, TransportKind::H2] {
        for offset in 0..40 {
            let mut env = TestEnv::cut_off(remembered).await;
            tokio::time::sleep(Duration::from_millis(30_000 + 370 * offset)).await;
            env.net.set(Path::Open);
            env.lap();
            env.net.peer().await;
            let waited = env.lap();
            assert!(waited <= 3.0, "{remembered}: {waited}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn answer_within_the_head_start_keeps_h2_out() {
    let mut env = TestEnv::start(AUTO);
    env.net.quic.set(Path::Slow(Duration::from_secs(2)));
    let quic = env.net.arrival().await;
    env.advance(4).await;
    let _peer = Peer::admit(quic).await;
    env.until(TestEnv::is_ready).await;
    assert_eq!(env.net.h2.dials(), []);
}

#[tokio::test(start_paused = true)]
async fn explicit_transport_is_the_only_one() {
    let mut env = TestEnv::start(TransportChoice::H2);
    let peer = env.peer(TransportKind::H2).await;
    env.net.h2.set(Path::Silent);
    peer.close(CloseCode::Draining).await;
    env.advance(3600).await;
    env.net.h2.set(Path::Open);
    let _peer = env.peer(TransportKind::H2).await;
    env.advance(3600).await;
    assert_eq!(env.net.quic.dials(), []);
    assert_eq!(env.context.metrics.transport_changes(), (0, 0));

    let env = TestEnv::start(TransportChoice::Quic);
    env.net.quic.set(Path::Silent);
    env.advance(3600).await;
    assert_eq!(env.net.h2.dials(), []);
}

#[tokio::test(start_paused = true)]
async fn servers_and_their_addresses_are_tried_in_rotation() {
    let servers = ["192.0.2.1:1", "192.0.2.2:2"];
    let mut env = TestEnv::with(TransportChoice::Quic, &servers, None);
    for _ in 0..2 {
        for name in servers {
            let arrival = env.net.arrival().await;
            assert_eq!(arrival.name, name);
            reject(arrival, CloseCode::Overloaded).await;
        }
    }
    // The cursor stays at the address that worked.
    for _ in 0..2 {
        let arrival = env.net.arrival().await;
        assert_eq!(arrival.name, servers[0]);
        let peer = Peer::admit(arrival).await;
        env.until(TestEnv::is_ready).await;
        peer.close(CloseCode::Draining).await;
    }
}
