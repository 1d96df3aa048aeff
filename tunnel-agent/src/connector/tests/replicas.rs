//! Tests of an agent with several servers.

use tunnel_proto::transport::memory::MemoryConnection;
use tunnel_proto::wire::control::{Member, Welcome};

use super::*;
use crate::connector::assignment::wanted_replicas;
use crate::connector::distance::ZoneDistances;
use crate::testing::credentials;
use crate::testing::net::welcome;

/// Two servers with addresses of their own. The agent is configured with the first.
const TWO: &[(&str, &str)] = &[("server-1", "192.0.2.1:10262"), ("server-2", "192.0.2.2:2")];
/// Two servers behind one address.
const BEHIND_ONE: &[(&str, &str)] = &[
    ("server-1", "192.0.2.1:10262"),
    ("server-2", "192.0.2.1:10262"),
];

fn member(id: &str, address: &str) -> Member {
    Member {
        id: id.parse().unwrap(),
        addresses: vec![address.to_owned()],
        is_leaving: false,
        zone: None,
    }
}

fn members(servers: &[(&str, &str)]) -> Vec<Member> {
    servers
        .iter()
        .map(|(id, address)| member(id, address))
        .collect()
}

fn leaving(servers: &[(&str, &str)], id: &str) -> Vec<Member> {
    let mut members = members(servers);
    for member in members.iter_mut().filter(|member| member.id.as_str() == id) {
        member.is_leaving = true;
    }
    members
}

/// Admits a session as server `id`, which knows `members`.
async fn admit_as(connection: MemoryConnection, id: &str, members: Vec<Member>) -> Peer {
    let welcome = Welcome {
        replica_id: Some(id.parse().unwrap()),
        members,
        ..welcome()
    };
    Peer::admit_with(connection, welcome).await
}

/// Returns the name of the server at an address of its own.
fn id_of(servers: &[(&'static str, &str)], connection: &MemoryConnection) -> &'static str {
    let server = servers
        .iter()
        .find(|(_, address)| *address == connection.name);
    server.unwrap().0
}

impl TestEnv {
    /// Returns the agent's next session, admitted by the server at the address that was dialed.
    async fn next_of(&mut self, servers: &[(&'static str, &str)]) -> (&'static str, Peer) {
        let connection = self.net.arrival().await;
        let id = id_of(servers, &connection);
        (id, admit_as(connection, id, members(servers)).await)
    }

    /// Starts with a session at each of two servers.
    async fn with_two() -> (Self, [Peer; 2]) {
        let mut env = Self::start(AUTO);
        let (first, one) = env.next_of(TWO).await;
        let (second, other) = env.next_of(TWO).await;
        assert_eq!((first, second), ("server-1", "server-2"));
        env.until_connected(2).await;
        (env, [one, other])
    }

    async fn until_connected(&self, count: i64) {
        self.until_states(count, 0).await;
    }

    /// Waits until so many connectors have a session, and so many look for one.
    async fn until_states(&self, connected: i64, connecting: i64) {
        let metrics = &self.context.metrics;
        self.until(|_| {
            metrics.sessions(SessionState::Connected) == connected
                && metrics.sessions(SessionState::Connecting) == connecting
        })
        .await;
    }

    /// Returns the condition about the sessions, or an empty string without one.
    fn condition(&self) -> String {
        let conditions = self.readiness.conditions();
        conditions.into_iter().map(|(_, line)| line).collect()
    }

    /// Expects no dial for an hour.
    async fn expect_quiet(&mut self) {
        self.net.quic.dials();
        self.advance(3600).await;
        assert_eq!(self.net.quic.dials(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn agent_has_a_session_with_each_of_two_servers() {
    let (mut env, [one, other]) = TestEnv::with_two().await;
    Busy::on(&*one.connection.server).await.finish().await;
    Busy::on(&*other.connection.server).await.finish().await;
    env.expect_quiet().await;
    assert!(env.is_ready());
}

#[tokio::test(start_paused = true)]
async fn agent_of_an_older_server_has_one_session() {
    let mut env = TestEnv::start(AUTO);
    let _peer = env.peer(TransportKind::Quic).await;
    env.until_connected(1).await;
    env.expect_quiet().await;
}

/// A load balancer with servers of both versions.
#[tokio::test(start_paused = true)]
async fn second_session_with_an_older_server_replaces_the_first_one() {
    let mut env = TestEnv::start(AUTO);
    let first = env.net.arrival().await;
    let first = admit_as(first, "server-1", members(BEHIND_ONE)).await;
    let mut second = env.net.peer().await;
    env.until_connected(2).await;
    let running = Busy::on(&*second.connection.server).await;
    first.close(CloseCode::Draining).await;
    let third = env.net.peer().await;
    assert_eq!(second.recv_control().await, Some(ControlMessage::Withdraw));
    env.until_connected(1).await;
    assert!(env.is_ready());
    Busy::on(&*third.connection.server).await.finish().await;
    running.finish().await;
    expect_bye(&mut second).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn agent_of_a_single_server_has_one_session() {
    let mut env = TestEnv::start(AUTO);
    let (_, _peer) = env.next_of(&TWO[..1]).await;
    env.until_connected(1).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn two_of_three_servers_are_enough() {
    let three = [TWO, &[("server-3", "192.0.2.3:3")]].concat();
    let mut env = TestEnv::start(AUTO);
    let (_, _one) = env.next_of(&three).await;
    let (_, _other) = env.next_of(&three).await;
    env.until_connected(2).await;
    // The first session moves if another replica is preferred.
    let _moved = timeout(Duration::from_secs(70), env.next_of(&three)).await;
    env.until_connected(2).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn reported_address_that_no_server_can_have_is_not_dialed() {
    let two = [TWO[0], ("server-2", "0.0.0.0:2")];
    let mut env = TestEnv::start(AUTO);
    let first = env.net.arrival().await;
    let _first = admit_as(first, "server-1", members(&two)).await;
    let second = env.net.arrival().await;
    assert_eq!(second.name, TWO[0].1);
    let _second = admit_as(second, "server-2", members(&two)).await;
    env.until_connected(2).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn load_balancer_is_dialed_until_it_chooses_another_replica() {
    let mut env = TestEnv::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = env.net.arrival().await;
    let first = admit_as(first, "server-2", both.clone()).await;
    let mut last = Instant::now();
    for wait in [2.0, 1.0, 2.0, 4.0] {
        let connection = env.net.arrival().await;
        let waited = (Instant::now() - last).as_secs_f64();
        assert!(waited <= wait * 1.11, "{waited}");
        last = Instant::now();
        let mut again = admit_as(connection, "server-2", both.clone()).await;
        // No Withdraw, since the session took no streams.
        expect_bye(&mut again).await;
    }
    let second = env.net.arrival().await;
    let second = admit_as(second, "server-1", both).await;
    env.until_connected(2).await;
    let duplicates = env.count(TransportKind::Quic, ConnectResult::Duplicate);
    assert_eq!(duplicates, 4);
    Busy::on(&*first.connection.server).await.finish().await;
    Busy::on(&*second.connection.server).await.finish().await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn load_balancer_that_always_chooses_one_replica_is_left_alone_until_the_members_change() {
    let mut env = TestEnv::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = env.net.arrival().await;
    let mut first = admit_as(first, "server-1", both.clone()).await;
    for _ in 0..10 {
        let connection = env.net.arrival().await;
        expect_bye(&mut admit_as(connection, "server-1", both.clone()).await).await;
    }
    env.until_connected(1).await;
    env.expect_quiet().await;
    assert!(env.is_ready());
    let mut three = both;
    three.push(member("server-3", "192.0.2.1:10262"));
    first.send_members(three.clone()).await;
    let second = env.net.arrival().await;
    let _second = admit_as(second, "server-3", three).await;
    env.until_connected(2).await;
}

/// Returns an agent of three servers behind one address, and its sessions with the two that are in one
/// zone.
async fn in_one_zone() -> (TestEnv, Vec<Member>, Vec<Peer>) {
    let mut three = members(BEHIND_ONE);
    three.push(member("server-3", "192.0.2.1:10262"));
    for (member, zone) in three.iter_mut().zip(["a", "a", "b"]) {
        member.zone = Some(zone.parse().unwrap());
    }
    let mut env = TestEnv::start(AUTO);
    let mut sessions = Vec::new();
    for id in ["server-1", "server-2"] {
        let connection = env.net.arrival().await;
        sessions.push(admit_as(connection, id, three.clone()).await);
    }
    (env, three, sessions)
}

#[tokio::test(start_paused = true)]
async fn load_balancer_is_dialed_until_the_sessions_are_in_two_zones() {
    let (mut env, mut three, mut sessions) = in_one_zone().await;
    env.until_connected(2).await;
    // Both sessions serve while the load balancer selects a server of their zone.
    for id in ["server-1", "server-2", "server-2"] {
        let connection = env.net.arrival().await;
        expect_bye(&mut admit_as(connection, id, three.clone()).await).await;
    }
    let connection = env.net.arrival().await;
    let _third = admit_as(connection, "server-3", three.clone()).await;
    expect_retirement(&mut sessions[1]).await;
    env.until_connected(2).await;
    env.expect_quiet().await;
    // While the zone of the third server is not known, it is not another one.
    three[2].zone = None;
    sessions[0].send_members(three).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn load_balancer_that_selects_one_zone_is_left_alone_after_a_while() {
    let (mut env, three, _sessions) = in_one_zone().await;
    for _ in 0..10 {
        let connection = env.net.arrival().await;
        expect_bye(&mut admit_as(connection, "server-1", three.clone()).await).await;
    }
    env.until_connected(2).await;
    env.expect_quiet().await;
}

/// The agent wants one session, and first reaches the server that it prefers by weight.
#[tokio::test(start_paused = true)]
async fn agent_of_a_far_zone_tries_another_one_and_stays_where_it_is_near() {
    let mut both = members(TWO);
    for (member, zone) in both.iter_mut().zip(["a", "b"]) {
        member.zone = Some(zone.parse().unwrap());
    }
    let node = "worker-1".parse().unwrap();
    let preferred = wanted_replicas(&node, &both, &ZoneDistances::default(), 1);
    let is_preferred = |server: &&(&str, &str)| server.0 == preferred[0].as_str();
    let far = *TWO.iter().find(is_preferred).unwrap();
    let near = *TWO.iter().find(|server| !is_preferred(server)).unwrap();
    let mut env = TestEnv::with_replicas(1, AUTO, &[far.1], None);
    let connection = env.net.arrival().await;
    connection.agent.script().rtt = Duration::from_millis(120);
    let mut first = admit_as(connection, far.0, both.clone()).await;
    let connection = env.net.arrival().await;
    assert_eq!(connection.name, near.1);
    connection.agent.script().rtt = Duration::from_millis(20);
    let second = admit_as(connection, near.0, both.clone()).await;
    expect_retirement(&mut first).await;
    env.until_connected(1).await;
    env.expect_quiet().await;
    // A queue that is full for three minutes is not a distance, and a path that stays long is.
    second.connection.agent.script().rtt = Duration::from_millis(400);
    env.net.quic.dials();
    env.advance(180).await;
    assert_eq!(env.net.quic.dials(), []);
    second.connection.agent.script().rtt = Duration::from_millis(20);
    env.expect_quiet().await;
    second.connection.agent.script().rtt = Duration::from_millis(400);
    let connection = env.net.arrival().await;
    assert_eq!(connection.name, far.1);
}

/// After a rollout all servers are new, and the dials for a second session would be a minute apart.
#[tokio::test(start_paused = true)]
async fn change_of_the_members_starts_the_dials_behind_one_address_again() {
    let mut env = TestEnv::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = env.net.arrival().await;
    let mut first = admit_as(first, "server-1", both.clone()).await;
    for _ in 0..7 {
        let connection = env.net.arrival().await;
        expect_bye(&mut admit_as(connection, "server-1", both.clone()).await).await;
    }
    env.advance(5).await;
    let mut three = both.clone();
    three.push(member("server-3", "192.0.2.1:10262"));
    first.send_members(three.clone()).await;
    env.lap();
    for longest in [2.0, 1.11] {
        let connection = env.net.arrival().await;
        env.expect_lap(..=longest);
        expect_bye(&mut admit_as(connection, "server-1", three.clone()).await).await;
    }
    // The path is away: the outage is long when the members change.
    env.net.set(Path::Refused);
    env.advance(600).await;
    first.send_members(both.clone()).await;
    env.advance(2).await;
    env.net.set(Path::Open);
    env.lap();
    let second = env.net.arrival().await;
    env.expect_lap(..=2.1);
    let _second = admit_as(second, "server-2", both).await;
    env.until_connected(2).await;
}

#[tokio::test(start_paused = true)]
async fn loss_of_a_session_starts_another_search() {
    let mut env = TestEnv::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = env.net.arrival().await;
    let first = admit_as(first, "server-1", both.clone()).await;
    for _ in 0..10 {
        let connection = env.net.arrival().await;
        expect_bye(&mut admit_as(connection, "server-1", both.clone()).await).await;
    }
    env.until_connected(1).await;
    env.expect_quiet().await;
    first.close(CloseCode::Draining).await;
    let mut peers = Vec::new();
    for id in ["server-1", "server-2"] {
        let connection = env.net.arrival().await;
        peers.push(admit_as(connection, id, both.clone()).await);
    }
    env.until_connected(2).await;
}

/// The load balancer sends all dials to the first server, so the session with the second one cannot
/// be replaced.
#[tokio::test(start_paused = true)]
async fn new_certificate_is_dialed_a_few_times_behind_a_load_balancer() {
    let mut env = TestEnv::start(AUTO);
    let both = members(BEHIND_ONE);
    let mut peers = Vec::new();
    for id in ["server-1", "server-2"] {
        let connection = env.net.arrival().await;
        peers.push(admit_as(connection, id, both.clone()).await);
    }
    env.until_connected(2).await;
    let renewed = credentials(&Ca::new());
    let rotating_credentials = &env.context.rotating_credentials;
    rotating_credentials.adopt(renewed, true).await;
    // The first session is replaced at once.
    for _ in 0..1 + 10 {
        let connection = env.net.arrival().await;
        peers.push(admit_as(connection, "server-1", both.clone()).await);
    }
    env.until(|env| env.count(TransportKind::Quic, ConnectResult::Duplicate) == 10)
        .await;
    env.until_connected(2).await;
    env.expect_quiet().await;
    peers[1].close(CloseCode::Draining).await;
    let connection = env.net.arrival().await;
    let _second = admit_as(connection, "server-2", both).await;
    env.until_connected(2).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn agent_stays_ready_while_one_of_its_sessions_is_lost() {
    let (mut env, [one, _other]) = TestEnv::with_two().await;
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    for _ in 0..20 {
        env.advance(1).await;
        assert!(env.is_ready());
    }
    let metrics = &env.context.metrics;
    assert_eq!(metrics.sessions(SessionState::Connecting), 1);
    env.net.set(Path::Open);
    let (id, _one) = env.next_of(TWO).await;
    assert_eq!(id, "server-1");
    env.until_connected(2).await;
}

/// The agent wants one session. Its server is the one that it prefers of the two.
#[tokio::test(start_paused = true)]
async fn server_that_another_one_reported_is_dialed_when_the_configured_one_has_gone() {
    let node = "worker-1".parse().unwrap();
    let preferred = wanted_replicas(&node, &members(TWO), &ZoneDistances::default(), 1);
    let is_preferred = |server: &(&str, &str)| server.0 == preferred[0].as_str();
    let configured = *TWO.iter().find(|server| is_preferred(server)).unwrap();
    let other = *TWO.iter().find(|server| !is_preferred(server)).unwrap();
    let mut env = TestEnv::with_replicas(1, AUTO, &[configured.1], None);
    let (id, first) = env.next_of(TWO).await;
    assert_eq!(id, configured.0);
    env.until_connected(1).await;
    env.expect_quiet().await;
    first.close(CloseCode::Draining).await;
    let second = loop {
        let connection = env.net.arrival().await;
        if connection.name == other.1 {
            break admit_as(connection, other.0, members(&[other])).await;
        }
        assert_eq!(connection.name, configured.1);
        reject(connection, CloseCode::Overloaded).await;
    };
    env.until_connected(1).await;
    env.expect_quiet().await;
    second.close(CloseCode::Draining).await;
    let (id, _third) = env.next_of(TWO).await;
    assert_eq!(id, other.0, "the server that answered last is dialed first");
}

/// The agent wants one session. A server behind the first addresses of the preferred server is
/// another one.
#[tokio::test(start_paused = true)]
async fn move_tries_each_address_of_the_preferred_server() {
    let node = "worker-1".parse().unwrap();
    let mut both = members(TWO);
    let preferred = wanted_replicas(&node, &both, &ZoneDistances::default(), 1);
    let preferred = preferred[0].as_str();
    let current = *TWO.iter().find(|(id, _)| *id != preferred).unwrap();
    let own = ["192.0.2.8:1", "192.0.2.8:2", "192.0.2.8:3"];
    for member in both
        .iter_mut()
        .filter(|member| member.id.as_str() == preferred)
    {
        member.addresses = own.map(str::to_owned).into();
    }
    let mut env = TestEnv::with_replicas(1, AUTO, &[current.1], None);
    let first = env.net.arrival().await;
    let mut first = admit_as(first, current.0, both.clone()).await;
    // The wait after a whole list is that of a search.
    for (address, bounds) in [
        (own[0], 0.0..60.1),
        (own[1], 0.0..0.1),
        (own[2], 0.0..0.1),
        (own[0], 1.0..1.2),
        (own[1], 0.0..0.1),
    ] {
        let connection = env.net.arrival().await;
        assert_eq!(connection.name, address);
        env.expect_lap(bounds);
        expect_bye(&mut admit_as(connection, current.0, both.clone()).await).await;
    }
    let connection = env.net.arrival().await;
    assert_eq!(connection.name, own[2]);
    let _moved = admit_as(connection, preferred, both).await;
    expect_retirement(&mut first).await;
    env.until_connected(1).await;
    env.expect_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn one_session_of_two_is_ready_and_a_condition_says_why_the_other_is_missing() {
    let (mut env, [one, other]) = TestEnv::with_two().await;
    assert_eq!(env.condition(), "");
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    let missing = "1 of 2 sessions, with server-2; none with server-1: quic: 192.0.2.1:10262";
    env.until(|env| env.condition().starts_with(missing)).await;
    assert!(env.is_ready());
    env.net.set(Path::Open);
    let (_, one) = env.next_of(TWO).await;
    env.until_connected(2).await;
    assert_eq!(env.condition(), "");
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    other.close(CloseCode::Draining).await;
    env.until(|env| !env.is_ready()).await;
    let missing = "0 of 2 sessions; none with server-";
    assert!(env.condition().starts_with(missing), "{}", env.condition());
}

#[tokio::test(start_paused = true)]
async fn agent_is_not_ready_without_any_session() {
    let (mut env, [one, other]) = TestEnv::with_two().await;
    env.net.set(Path::Refused);
    one.close(CloseCode::Draining).await;
    other.close(CloseCode::Draining).await;
    env.until(|env| !env.is_ready()).await;
    env.net.set(Path::Open);
    let (_, _peer) = env.next_of(TWO).await;
    env.until(TestEnv::is_ready).await;
}

#[tokio::test(start_paused = true)]
async fn connector_of_a_server_that_is_gone_retires() {
    let (mut env, [mut one, other]) = TestEnv::with_two().await;
    env.net.set(Path::Refused);
    other.close(CloseCode::Draining).await;
    env.until_states(1, 1).await;
    one.send_members(members(&TWO[..1])).await;
    env.until_connected(1).await;
    env.expect_quiet().await;
    assert!(env.is_ready());

    env.net.set(Path::Open);
    one.send_members(members(TWO)).await;
    let (id, _other) = env.next_of(TWO).await;
    assert_eq!(id, "server-2");
    env.until_connected(2).await;
}

#[tokio::test(start_paused = true)]
async fn server_that_does_not_know_the_others_yet_changes_nothing() {
    let (mut env, [_one, mut other]) = TestEnv::with_two().await;
    other.send_members(members(&TWO[1..])).await;
    env.expect_quiet().await;
    env.until_connected(2).await;
}

#[tokio::test(start_paused = true)]
async fn session_of_a_stopping_server_moves_within_the_time_that_the_server_sets() {
    let three = [TWO, &[("server-3", "192.0.2.3:3")]].concat();
    let (mut env, [mut one, mut other]) = TestEnv::with_two().await;
    let running = Busy::on(&*other.connection.server).await;
    env.lap();
    other.send_drain_within(Duration::from_secs(10)).await;
    one.send_members(leaving(&three, "server-2")).await;
    let (id, _new) = env.next_of(&three).await;
    assert_eq!(id, "server-3");
    env.expect_lap(..10.1);
    env.until_connected(2).await;
    assert_eq!(other.recv_control().await, Some(ControlMessage::Withdraw));
    running.finish().await;
    expect_bye(&mut other).await;
    assert!(env.is_ready());
}

#[tokio::test(start_paused = true)]
async fn session_of_a_stopping_server_retires_if_no_other_replica_is_left() {
    let (mut env, [mut one, mut other]) = TestEnv::with_two().await;
    let running = Busy::on(&*other.connection.server).await;
    other.send_drain_within(Duration::from_secs(10)).await;
    one.send_members(leaving(TWO, "server-2")).await;
    assert_eq!(other.recv_control().await, Some(ControlMessage::Withdraw));
    env.until_connected(1).await;
    running.finish().await;
    expect_bye(&mut other).await;
    env.expect_quiet().await;
}

/// The agent's other session is suspect, so the one with the stopping server is the only one that
/// takes streams.
#[tokio::test(start_paused = true)]
async fn last_live_session_does_not_retire_while_the_other_one_is_suspect() {
    let (env, [one, mut other]) = TestEnv::with_two().await;
    let running = Busy::on(&*other.connection.server).await;
    env.net.set(Path::Refused);
    one.connection.agent.script().is_silent = true;
    let metrics = &env.context.metrics;
    env.until(|_| metrics.sessions(SessionState::Suspect) == 1)
        .await;
    other.send_drain_within(Duration::from_secs(1)).await;
    for _ in 0..20 {
        env.advance(1).await;
        assert!(env.is_ready());
    }
    one.connection.agent.script().is_silent = false;
    assert_eq!(other.recv_control().await, Some(ControlMessage::Withdraw));
    env.until(|_| metrics.sessions(SessionState::Connected) == 1)
        .await;
    assert!(env.is_ready());
    running.finish().await;
    expect_bye(&mut other).await;
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_agent_ends_all_sessions() {
    let (mut env, [mut one, mut other]) = TestEnv::with_two().await;
    let running = Busy::on(&*one.connection.server).await;
    env.context.shutdown.drain().cancel();
    for peer in [&mut one, &mut other] {
        assert_eq!(peer.recv_control().await, Some(ControlMessage::Withdraw));
    }
    running.finish().await;
    env.context.graceful_shutdown.cancel();
    let ended = async {
        tokio::join!(expect_bye(&mut one), expect_bye(&mut other));
        env.agent.join_next().await
    };
    ended.await.unwrap().unwrap();
    assert!(env.net.is_quiet());
}

/// Another connector has found that UDP is blocked: a new session does not wait for QUIC.
#[tokio::test(start_paused = true)]
async fn blocked_udp_is_learned_once() {
    let mut env = TestEnv::behind_a_firewall();
    let (_, _one) = env.next_of(TWO).await;
    env.lap();
    let (_, other) = env.next_of(TWO).await;
    let transport = other.connection.agent.transport();
    assert_eq!(transport, TransportKind::H2);
    env.expect_lap(..2.1);
}
