//! Tests of an agent with several servers.

use super::*;

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

/// Returns the two servers: the one that the agent prefers by its weight, and the other.
fn by_weight(members: &[Member]) -> [(&'static str, &'static str); 2] {
    let node = "worker-1".parse().unwrap();
    let preferred = wanted_replicas(&node, members, &ZoneDistances::default(), 1);
    let mut two = [TWO[0], TWO[1]];
    two.sort_by_key(|server| server.0 != preferred[0].as_str());
    two
}

impl Sim {
    /// Returns the agent's next session, admitted by the server at the address that was dialed.
    fn next_of(&mut self, servers: &[(&'static str, &str)]) -> (&'static str, DialId) {
        let arrival = self.arrival();
        let server = servers.iter().find(|(_, address)| *address == arrival.name);
        let id = server.unwrap().0;
        (id, self.admit(&arrival, id, &members(servers)))
    }

    /// Returns the agent's next session, admitted by the server `id`.
    fn next_as(&mut self, id: &str, members: &[Member]) -> DialId {
        let arrival = self.arrival();
        self.admit(&arrival, id, members)
    }

    /// Expects that so many dials that reach the server `id` end, since another connector has it.
    #[track_caller]
    fn expect_duplicates(&mut self, count: u64, id: &str, members: &[Member]) {
        let before = self.count(Quic, ConnectResult::Duplicate);
        for _ in 0..count {
            let session = self.next_as(id, members);
            assert!(!self.served.contains_key(&session));
        }
        let after = self.count(Quic, ConnectResult::Duplicate);
        assert_eq!(after - before, count);
    }

    /// Starts with a session at each of two servers.
    fn with_two() -> (Self, [DialId; 2]) {
        let mut sim = Self::start(AUTO);
        let (first, one) = sim.next_of(TWO);
        let (second, other) = sim.next_of(TWO);
        assert_eq!((first, second), ("server-1", "server-2"));
        sim.expect_connected(2);
        (sim, [one, other])
    }

    /// Measures a path once a minute.
    fn measure(&mut self, id: DialId, minutes: u32, millis: u64) {
        for _ in 0..minutes {
            self.advance(60.0);
            let rtt = Duration::from_millis(millis);
            self.session_event(id, SessionEvent::RoundTripTime(rtt));
        }
    }
}

/// The servers, and the sessions that the agent then has: each is dialed at its own address.
#[test]
fn agent_has_a_session_with_each_server_up_to_two() {
    let three = [TWO, &[("server-3", "192.0.2.3:3")]].concat();
    for (servers, sessions) in [(&TWO[..1], 1), (TWO, 2), (&three, 2)] {
        let mut sim = Sim::start(AUTO);
        for _ in 0..sessions {
            sim.next_of(servers);
        }
        // The first session moves if another replica is preferred.
        if let Some(arrival) = sim.arrival_within(Duration::from_secs(70)) {
            assert_eq!(servers.len(), 3);
            let server = servers.iter().find(|server| server.1 == arrival.name);
            sim.admit(&arrival, server.unwrap().0, &members(servers));
        }
        sim.expect_connected(sessions);
        sim.expect_quiet();
        assert!(sim.plan.is_ready());
    }
}

#[test]
fn reported_address_that_no_server_can_have_is_not_dialed() {
    let two = members(&[TWO[0], ("server-2", "0.0.0.0:2")]);
    let mut sim = Sim::start(AUTO);
    sim.next_as("server-1", &two);
    let second = sim.arrival();
    assert_eq!(second.name, TWO[0].1);
    sim.admit(&second, "server-2", &two);
    sim.expect_connected(2);
    sim.expect_quiet();
}

#[test]
fn load_balancer_is_dialed_until_it_chooses_another_replica() {
    let mut sim = Sim::start(AUTO);
    let both = members(BEHIND_ONE);
    sim.next_as("server-2", &both);
    for wait in [2.0, 1.0, 2.0, 4.0] {
        sim.lap();
        sim.expect_duplicates(1, "server-2", &both);
        sim.expect_lap(..=wait * 1.11);
    }
    sim.next_as("server-1", &both);
    sim.expect_connected(2);
    sim.expect_quiet();
}

#[test]
fn load_balancer_that_always_chooses_one_replica_is_left_alone_until_the_members_change() {
    let mut sim = Sim::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = sim.next_as("server-1", &both);
    sim.expect_duplicates(10, "server-1", &both);
    sim.expect_connected(1);
    sim.expect_quiet();
    assert!(sim.plan.is_ready());
    let three = [both, vec![member("server-3", "192.0.2.1:10262")]].concat();
    sim.send_members(first, three.clone());
    sim.next_as("server-3", &three);
    sim.expect_connected(2);
}

/// Returns an agent of three servers behind one address, and its sessions with the two that are in one
/// zone.
fn in_one_zone() -> (Sim, Vec<Member>, [DialId; 2]) {
    let mut three = members(BEHIND_ONE);
    three.push(member("server-3", "192.0.2.1:10262"));
    for (member, zone) in three.iter_mut().zip(["a", "a", "b"]) {
        member.zone = Some(zone.parse().unwrap());
    }
    let mut sim = Sim::start(AUTO);
    let sessions = ["server-1", "server-2"].map(|id| sim.next_as(id, &three));
    sim.expect_connected(2);
    (sim, three, sessions)
}

#[test]
fn load_balancer_is_dialed_until_the_sessions_are_in_two_zones() {
    let (mut sim, mut three, sessions) = in_one_zone();
    // Both sessions serve while the load balancer selects a server of their zone.
    for id in ["server-1", "server-2", "server-2"] {
        sim.expect_duplicates(1, id, &three);
    }
    sim.next_as("server-3", &three);
    sim.expect_retirement(sessions[1]);
    sim.expect_connected(2);
    sim.expect_quiet();
    // While the zone of the third server is not known, it is not another one.
    three[2].zone = None;
    sim.send_members(sessions[0], three);
    sim.expect_quiet();
}

#[test]
fn load_balancer_that_selects_one_zone_is_left_alone_after_a_while() {
    let (mut sim, three, _sessions) = in_one_zone();
    sim.expect_duplicates(10, "server-1", &three);
    sim.expect_connected(2);
    sim.expect_quiet();
}

/// The agent wants one session, and first reaches the server that it prefers by weight.
#[test]
fn agent_of_a_far_zone_tries_another_one_and_stays_where_it_is_near() {
    let mut both = members(TWO);
    for (member, zone) in both.iter_mut().zip(["a", "b"]) {
        member.zone = Some(zone.parse().unwrap());
    }
    let [far, near] = by_weight(&both);
    let mut sim = Sim::with(7, 1, AUTO, &[far.1]);
    let first = sim.next_as(far.0, &both);
    sim.measure(first, 1, 120);
    let arrival = sim.arrival();
    assert_eq!(arrival.name, near.1);
    let second = sim.admit(&arrival, near.0, &both);
    sim.expect_retirement(first);
    sim.take_dials();
    // A queue that is full for three minutes is not a distance, and a path that stays long is.
    for (minutes, millis) in [(50, 20), (3, 400), (50, 20)] {
        sim.measure(second, minutes, millis);
    }
    sim.expect_connected(1);
    assert_eq!(sim.take_dials(), []);
    sim.measure(second, 5, 400);
    assert_eq!(sim.arrival().name, far.1);
}

/// After a rollout all servers are new, and the dials for a second session would be a minute apart.
#[test]
fn change_of_the_members_starts_the_dials_behind_one_address_again() {
    let mut sim = Sim::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = sim.next_as("server-1", &both);
    sim.expect_duplicates(7, "server-1", &both);
    sim.advance(5.0);
    let mut three = both.clone();
    three.push(member("server-3", "192.0.2.1:10262"));
    sim.send_members(first, three.clone());
    for longest in [2.0, 1.11] {
        sim.lap();
        sim.expect_duplicates(1, "server-1", &three);
        sim.expect_lap(..=longest);
    }
    // The path is away: the outage is long when the members change.
    sim.set_paths(Path::Refused);
    sim.advance(600.0);
    sim.send_members(first, both.clone());
    sim.advance(2.0);
    sim.set_paths(Path::Open);
    sim.lap();
    sim.next_as("server-2", &both);
    sim.expect_lap(..=2.1);
    sim.expect_connected(2);
}

#[test]
fn loss_of_a_session_starts_another_search() {
    let mut sim = Sim::start(AUTO);
    let both = members(BEHIND_ONE);
    let first = sim.next_as("server-1", &both);
    sim.expect_duplicates(10, "server-1", &both);
    sim.expect_connected(1);
    sim.expect_quiet();
    sim.close(first, CloseCode::Draining);
    for id in ["server-1", "server-2"] {
        sim.next_as(id, &both);
    }
    sim.expect_connected(2);
}

/// The load balancer sends all dials to the first server, so the session with the second one cannot
/// be replaced.
#[test]
fn new_certificate_is_dialed_a_few_times_behind_a_load_balancer() {
    let mut sim = Sim::start(AUTO);
    let both = members(BEHIND_ONE);
    let [first, second] = ["server-1", "server-2"].map(|id| sim.next_as(id, &both));
    sim.expect_connected(2);
    sim.renew();
    for _ in 0..1 + 10 {
        sim.next_as("server-1", &both);
    }
    sim.expect_retirement(first);
    assert_eq!(sim.count(Quic, ConnectResult::Duplicate), 10);
    sim.expect_connected(2);
    sim.expect_quiet();
    sim.close(second, CloseCode::Draining);
    sim.next_as("server-2", &both);
    sim.expect_connected(2);
    sim.expect_quiet();
}

#[test]
fn agent_stays_ready_while_one_of_its_sessions_is_lost() {
    let (mut sim, [one, other]) = Sim::with_two();
    sim.set_paths(Path::Refused);
    sim.close(one, CloseCode::Draining);
    for _ in 0..20 {
        sim.advance(1.0);
        assert!(sim.plan.is_ready());
        sim.expect_states(1, 1);
    }
    sim.close(other, CloseCode::Draining);
    assert!(!sim.plan.is_ready());
    sim.set_paths(Path::Open);
    let mut ids = [sim.next_of(TWO).0, sim.next_of(TWO).0];
    assert!(sim.plan.is_ready());
    ids.sort_unstable();
    assert_eq!(ids, ["server-1", "server-2"]);
    sim.expect_connected(2);
}

/// The agent wants one session. Its server is the one that it prefers of the two.
#[test]
fn server_that_another_one_reported_is_dialed_when_the_configured_one_has_gone() {
    let [configured, other] = by_weight(&members(TWO));
    let mut sim = Sim::with(7, 1, AUTO, &[configured.1]);
    let (id, first) = sim.next_of(TWO);
    assert_eq!(id, configured.0);
    sim.expect_quiet();
    sim.close(first, CloseCode::Draining);
    let second = loop {
        let arrival = sim.arrival();
        if arrival.name == other.1 {
            break sim.admit(&arrival, other.0, &members(&[other]));
        }
        assert_eq!(arrival.name, configured.1);
        sim.reject(&arrival, CloseCode::Overloaded);
    };
    sim.expect_connected(1);
    sim.expect_quiet();
    sim.close(second, CloseCode::Draining);
    let (id, _third) = sim.next_of(TWO);
    assert_eq!(id, other.0, "the server that answered last is dialed first");
}

/// The agent wants one session. A server behind the first addresses of the preferred server is
/// another one.
#[test]
fn move_tries_each_address_of_the_preferred_server() {
    let mut both = members(TWO);
    let [preferred, current] = by_weight(&both);
    let own = ["192.0.2.8:1", "192.0.2.8:2", "192.0.2.8:3"];
    for member in both
        .iter_mut()
        .filter(|member| member.id.as_str() == preferred.0)
    {
        member.addresses = own.map(str::to_owned).into();
    }
    let mut sim = Sim::with(7, 1, AUTO, &[current.1]);
    let first = sim.next_as(current.0, &both);
    // The wait after a whole list is that of a search.
    for (address, bounds) in [
        (own[0], 0.0..60.1),
        (own[1], 0.0..0.1),
        (own[2], 0.0..0.1),
        (own[0], 1.0..1.2),
        (own[1], 0.0..0.1),
    ] {
        let arrival = sim.arrival();
        assert_eq!(arrival.name, address);
        sim.expect_lap(bounds);
        let session = sim.admit(&arrival, current.0, &both);
        assert!(!sim.served.contains_key(&session));
    }
    let arrival = sim.arrival();
    assert_eq!(arrival.name, own[2]);
    sim.admit(&arrival, preferred.0, &both);
    sim.expect_retirement(first);
    sim.expect_connected(1);
    sim.expect_quiet();
}

/// A session is lost, and its server starts again at another address.
#[test]
fn changed_address_of_a_server_restarts_the_dials() {
    let (mut sim, [one, other]) = Sim::with_two();
    sim.set_paths(Path::Refused);
    let moved = [TWO[0], ("server-2", "192.0.2.9:9")];
    sim.close(other, CloseCode::Draining);
    sim.advance(300.0);
    sim.send_members(one, members(&moved));
    sim.set_paths(Path::Open);
    sim.lap();
    let arrival = sim.arrival();
    assert_eq!(arrival.name, "192.0.2.9:9");
    sim.expect_lap(..=2.1);
    sim.admit(&arrival, "server-2", &members(&moved));
    sim.expect_connected(2);
}

#[test]
fn connector_of_a_server_that_is_gone_retires() {
    let (mut sim, [one, other]) = Sim::with_two();
    sim.set_paths(Path::Refused);
    sim.close(other, CloseCode::Draining);
    sim.expect_states(1, 1);
    sim.send_members(one, members(&TWO[..1]));
    sim.expect_connected(1);
    sim.expect_quiet();
    assert!(sim.plan.is_ready());
    sim.set_paths(Path::Open);
    sim.send_members(one, members(TWO));
    assert_eq!(sim.next_of(TWO).0, "server-2");
    sim.expect_connected(2);
}

#[test]
fn server_that_does_not_know_the_others_yet_changes_nothing() {
    let (mut sim, [_one, other]) = Sim::with_two();
    sim.send_members(other, members(&TWO[1..]));
    sim.expect_quiet();
    sim.expect_connected(2);
}

#[test]
fn session_of_a_stopping_server_moves_within_the_time_that_the_server_sets() {
    let three = [TWO, &[("server-3", "192.0.2.3:3")]].concat();
    let (mut sim, [one, other]) = Sim::with_two();
    sim.lap();
    sim.stop_server(other, Duration::from_secs(10));
    sim.send_members(one, leaving(&three, "server-2"));
    assert_eq!(sim.next_of(&three).0, "server-3");
    sim.expect_lap(..10.1);
    sim.expect_connected(2);
    sim.expect_retirement(other);
    assert!(sim.plan.is_ready());
}

#[test]
fn session_of_a_stopping_server_retires_if_no_other_replica_is_left() {
    let (mut sim, [one, other]) = Sim::with_two();
    sim.stop_server(other, Duration::from_secs(10));
    sim.send_members(one, leaving(TWO, "server-2"));
    sim.expect_connected(1);
    sim.expect_retirement(other);
    sim.expect_quiet();
}

/// The agent's other session is suspect, so the one with the stopping server is the only one that
/// takes streams.
#[test]
fn last_live_session_does_not_retire_while_the_other_one_is_suspect() {
    let (mut sim, [one, other]) = Sim::with_two();
    sim.set_paths(Path::Refused);
    sim.suspect(one);
    sim.stop_server(other, Duration::from_secs(1));
    sim.send_members(other, leaving(TWO, "server-2"));
    for _ in 0..20 {
        sim.advance(1.0);
        assert!(sim.plan.is_ready() && !sim.retired.contains(&other));
    }
    sim.recover(one);
    sim.expect_retirement(other);
    sim.expect_connected(1);
    assert!(sim.plan.is_ready());
}

/// Another connector has found that UDP is blocked: a new session does not wait for QUIC.
#[test]
fn blocked_udp_is_learned_once() {
    let mut sim = Sim::behind_a_firewall();
    sim.next_of(TWO);
    sim.lap();
    let arrival = sim.arrival();
    assert_eq!(arrival.transport, H2);
    sim.expect_lap(..2.1);
}

/// Another connector has found that UDP gets through again.
#[test]
fn path_over_quic_is_learned_once() {
    let mut sim = Sim::behind_a_firewall();
    let old = [sim.next_of(TWO).1, sim.next_of(TWO).1];
    sim.expect_connected(2);
    sim.quic = Path::Open;
    sim.next_of(TWO);
    sim.lap();
    sim.next_of(TWO);
    sim.expect_lap(..0.1);
    for session in old {
        sim.expect_retirement(session);
    }
}
