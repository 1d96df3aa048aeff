//! The plan with a clock that is a value. The test acts as the network and as the servers.

use std::collections::{HashMap, HashSet};
use std::ops::RangeBounds;
use std::time::Duration;

use futures_util::FutureExt;
use rand::SeedableRng;
use tunnel_process::followed::Followed;
use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::transport::memory::Path;
use tunnel_proto::transport::{CloseReason, ClosedBy, HandshakeError};
use tunnel_proto::wire::code::CloseCode;

use super::*;
use crate::config::Limit;
use crate::connector::endpoint::Endpoints;
use crate::connector::session_task::ConnectError;
use crate::credentials::Refusal;
use crate::session::AdmitError;
use crate::session::SessionSummary;
use SessionTransport::{H2, Quic};

mod changes;
mod replicas;
mod standby;
mod wanted;

const AUTO: TransportChoice = TransportChoice::Auto;
/// Longer than any wait in a test.
const AGES: Duration = Duration::from_secs(3600 * 24);

/// A plan, and what its actions have led to.
struct Sim {
    plan: Plan,
    metrics: Metrics,
    now: Instant,
    lap: Instant,
    quic: Path,
    h2: Path,
    /// Dials without an answer.
    pending: Vec<PendingDial>,
    /// Connections that the test has not received.
    arrivals: VecDeque<Arrival>,
    events: VecDeque<Event>,
    /// The position of each dial, and its server.
    remotes: HashMap<DialId, (Endpoints, String)>,
    /// Times and transports of the dials since the last [`Sim::take_dials`].
    dials: Vec<(Instant, SessionTransport)>,
    /// The sessions that are served, since when.
    served: HashMap<DialId, Instant>,
    retired: HashSet<DialId>,
    credentials: Vec<(u64, CredentialOutcome)>,
    /// Whether a failure replaces the credentials.
    is_rotating: bool,
    /// Whether clients of the cloud connect all the time.
    is_wanted: bool,
}

struct PendingDial {
    id: DialId,
    transport: SessionTransport,
    began: Instant,
    /// Time of the next packet, or of the answer over a slow path.
    next: Instant,
    is_answered: bool,
}

/// A connection that waits for the server's Welcome.
#[derive(Debug)]
struct Arrival {
    id: DialId,
    transport: SessionTransport,
    /// The address that was dialed.
    name: String,
}

impl Sim {
    fn start(choice: TransportChoice) -> Self {
        Self::with(7, 2, choice, &["192.0.2.1:10262"])
    }

    fn with(seed: u64, replicas: usize, transport: TransportChoice, servers: &[&str]) -> Self {
        let configured: Vec<_> = servers.iter().map(|name| name.parse().unwrap()).collect();
        let server_policy = ServerPolicy::new(&configured, Followed::default());
        let settings = PlanSettings {
            node: "worker-1".parse().unwrap(),
            server_policy: Arc::new(server_policy),
            transport,
            replicas,
            limits: Limits::default(),
        };
        let (metrics, now) = (Metrics::default(), Instant::now());
        let random = SmallRng::seed_from_u64(seed);
        let plan = Plan::new(settings, metrics.clone(), random, now);
        Self {
            plan,
            metrics,
            now,
            lap: now,
            quic: Path::Open,
            h2: Path::Open,
            pending: Vec::new(),
            arrivals: VecDeque::new(),
            events: VecDeque::new(),
            remotes: HashMap::new(),
            dials: Vec::new(),
            served: HashMap::new(),
            retired: HashSet::new(),
            credentials: Vec::new(),
            is_rotating: false,
            is_wanted: false,
        }
    }

    /// Starts with a session.
    fn ready(transport: SessionTransport) -> (Self, DialId) {
        let mut sim = match transport {
            H2 => Self::behind_a_firewall(),
            Quic => Self::start(AUTO),
        };
        let session = sim.session(transport);
        (sim, session)
    }

    /// Starts with UDP blocked.
    fn behind_a_firewall() -> Self {
        let mut sim = Self::start(AUTO);
        sim.quic = Path::Silent;
        sim
    }

    /// Starts without an answer on any path, after a session over `remembered`.
    fn cut_off(remembered: SessionTransport) -> Self {
        let (mut sim, session) = Self::ready(remembered);
        sim.set_paths(Path::Silent);
        sim.close(session, CloseCode::Draining);
        sim
    }

    fn set_paths(&mut self, path: Path) {
        (self.quic, self.h2) = (path, path);
    }

    fn handle(&mut self, event: Event) {
        self.events.push_back(event);
        self.run_now();
    }

    fn session_event(&mut self, id: DialId, event: SessionEvent) {
        self.handle(Event::Session(id, event));
    }

    fn suspect(&mut self, id: DialId) {
        self.session_event(id, SessionEvent::Suspect);
    }

    fn recover(&mut self, id: DialId) {
        self.session_event(id, SessionEvent::Live);
    }

    /// Lets the server of a session stop.
    fn stop_server(&mut self, id: DialId, move_within: Duration) {
        self.session_event(id, SessionEvent::Draining { move_within });
    }

    fn send_members(&mut self, id: DialId, members: Vec<Member>) {
        self.session_event(id, SessionEvent::Members(members));
    }

    /// Lets the server close a session.
    fn close(&mut self, id: DialId, code: CloseCode) {
        self.end(id, ClosedBy::Peer, code);
    }

    fn end(&mut self, id: DialId, by: ClosedBy, code: CloseCode) {
        let reason = "of the test".to_owned();
        let outcome = Ok(SessionSummary {
            ready_for: self.now - self.served[&id],
            reason: CloseReason { by, code, reason },
            replica: "server-1".parse().unwrap(),
        });
        self.exit(id, outcome);
        self.run_now();
    }

    fn exit(&mut self, id: DialId, outcome: Result<SessionSummary, ConnectError>) {
        let endpoints = self
            .remotes
            .get(&id)
            .map(|(endpoints, _)| endpoints.clone());
        let exit = SessionExit { endpoints, outcome };
        self.events.push_back(Event::Ended(id, exit));
    }

    fn remote(&self, id: DialId) -> ServerAddr {
        ServerAddr {
            name: self.remotes[&id].1.clone(),
            address: None,
        }
    }

    fn fail(&mut self, id: DialId, source: HandshakeError) {
        let remote = self.remote(id);
        self.exit(
            id,
            Err(ConnectError::Dial {
                remote,
                proxy: None,
                source,
            }),
        );
    }

    /// Rejects the agent on its connection.
    fn reject(&mut self, arrival: &Arrival, code: CloseCode) {
        let remote = self.remote(arrival.id);
        let detail = "not now".to_owned();
        let source = AdmitError::NotAdmitted { code, detail };
        self.exit(arrival.id, Err(ConnectError::Admit { remote, source }));
        self.run_now();
    }

    /// Admits a connection as the server `name`, which knows `members`.
    fn admit(&mut self, arrival: &Arrival, name: &str, members: &[Member]) -> DialId {
        let admitted = SessionEvent::Admitted {
            replica: name.parse().unwrap(),
            members: members.to_vec(),
        };
        self.session_event(arrival.id, admitted);
        arrival.id
    }

    /// Returns the agent's next session, which is over `transport`.
    #[track_caller]
    fn session(&mut self, transport: SessionTransport) -> DialId {
        let arrival = self.arrival();
        assert_eq!(
            arrival.transport,
            transport,
            "after {:?}",
            self.now - self.lap
        );
        let id = self.admit(&arrival, "server-1", &[]);
        assert!(self.served.contains_key(&id) && self.plan.is_ready());
        id
    }

    /// Expects that a session retires, and ends it.
    #[track_caller]
    fn expect_retirement(&mut self, id: DialId) {
        assert!(self.retired.contains(&id), "{:?}", self.retired);
        self.end(id, ClosedBy::Local, CloseCode::Normal);
    }

    /// Returns the agent's next connection.
    #[track_caller]
    fn arrival(&mut self) -> Arrival {
        self.arrival_within(AGES).unwrap()
    }

    fn arrival_within(&mut self, within: Duration) -> Option<Arrival> {
        let until = self.now + within;
        self.run_now();
        while self.arrivals.is_empty() && self.step(until) {}
        self.arrivals.pop_front()
    }

    fn advance(&mut self, seconds: f64) {
        let until = self.now + Duration::from_secs_f64(seconds);
        self.run_now();
        while self.step(until) {}
    }

    /// Goes on to the next timeout or packet. Returns `false` if there is none until then.
    fn step(&mut self, until: Instant) -> bool {
        let packets = self.pending.iter().map(|dial| dial.next);
        let wanted_at = self.plan.wanted_at().filter(|_| self.is_wanted);
        let wanted_at = wanted_at.map(|at| at.max(self.now));
        let timeouts = self.plan.poll_timeout().into_iter().chain(wanted_at);
        let next = timeouts.chain(packets).min();
        let Some(next) = next.filter(|next| *next <= until) else {
            self.now = until;
            return false;
        };
        self.now = self.now.max(next);
        if wanted_at.is_some_and(|at| at <= self.now) {
            self.plan.handle_event(Event::Wanted, self.now);
        }
        if self.plan.poll_timeout().is_some_and(|at| at <= self.now) {
            self.plan.handle_timeout(self.now);
        }
        self.run_now();
        true
    }

    /// Performs the actions and handles the events that follow from them without a wait.
    fn run_now(&mut self) {
        loop {
            while let Some(action) = self.plan.poll_action() {
                self.perform(action);
            }
            self.send_packets();
            let Some(event) = self.events.pop_front() else {
                return;
            };
            self.plan.handle_event(event, self.now);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Dial {
                id,
                transport,
                mut endpoints,
            } => {
                // Without a lookup.
                let next = endpoints.next(AGES, |_| true, |_, _| true).now_or_never();
                let remote = next.unwrap().unwrap();
                self.remotes.insert(id, (endpoints, remote.name));
                self.dials.push((self.now, transport));
                self.pending.push(PendingDial {
                    id,
                    transport,
                    began: self.now,
                    next: self.now,
                    is_answered: false,
                });
            }
            Action::Serve(id) => drop(self.served.insert(id, self.now)),
            Action::Decline(id) => {
                let remote = self.remote(id);
                self.exit(id, Err(ConnectError::Duplicate { remote }));
            }
            Action::Retire(id) => {
                let before = self.pending.len();
                self.pending.retain(|dial| dial.id != id);
                if self.pending.len() < before {
                    self.exit(id, Err(ConnectError::Abandoned));
                } else {
                    self.retired.insert(id);
                }
            }
            Action::MembersChanged => {}
            Action::Credentials(generation, outcome) => {
                self.credentials.push((generation, outcome));
                if self.is_rotating && outcome == CredentialOutcome::Failed {
                    self.plan.set_credentials(generation + 1);
                }
            }
        }
    }

    /// Sends a packet of each dial whose time has come. Packets are repeated after 1 and 3 s, so that
    /// a path that opens is found.
    fn send_packets(&mut self) {
        let now = self.now;
        let handshake_timeout = Limits::default().handshake_timeout;
        for mut dial in std::mem::take(&mut self.pending) {
            if dial.next > now {
                self.pending.push(dial);
                continue;
            }
            let path = match dial.transport {
                Quic => self.quic,
                H2 => self.h2,
            };
            let answers = dial.is_answered || path == Path::Open;
            match path {
                _ if answers => {
                    let (id, transport) = (dial.id, dial.transport);
                    let name = self.remotes[&id].1.clone();
                    self.events
                        .push_back(Event::Session(id, SessionEvent::Answered));
                    self.arrivals.push_back(Arrival {
                        id,
                        transport,
                        name,
                    });
                }
                _ if now >= dial.began + handshake_timeout => {
                    self.fail(dial.id, HandshakeError::Timeout);
                }
                Path::Open | Path::Slow(_) => {
                    if let Path::Slow(delay) = path {
                        dial.next = now + delay;
                    }
                    dial.is_answered = true;
                    self.pending.push(dial);
                }
                Path::Silent => {
                    let repeats = [1, 3].map(|seconds| dial.began + Duration::from_secs(seconds));
                    let repeat = repeats.into_iter().find(|at| *at > now);
                    dial.next = repeat.unwrap_or(dial.began + handshake_timeout);
                    self.pending.push(dial);
                }
                Path::Refused => {
                    let refused = std::io::ErrorKind::ConnectionRefused.into();
                    self.fail(dial.id, HandshakeError::Connect(refused));
                }
                Path::Alert => {
                    let text = "received fatal alert: CertificateRevoked".to_owned();
                    self.fail(dial.id, HandshakeError::Transport(text));
                }
            }
        }
    }

    /// Returns the transports of the dials since the last call.
    fn take_dials(&mut self) -> Vec<SessionTransport> {
        let dials = std::mem::take(&mut self.dials);
        dials.into_iter().map(|(_, transport)| transport).collect()
    }

    /// Expects no dial for an hour.
    #[track_caller]
    fn expect_quiet(&mut self) {
        self.take_dials();
        self.advance(3600.0);
        assert_eq!(self.take_dials(), []);
    }

    /// Returns the seconds since the start or the last call.
    fn lap(&mut self) -> f64 {
        let lap = self.now - std::mem::replace(&mut self.lap, self.now);
        lap.as_secs_f64()
    }

    /// Expects a time in seconds since the start or the last call.
    #[track_caller]
    fn expect_lap(&mut self, bounds: impl RangeBounds<f64>) {
        let waited = self.lap();
        assert!(bounds.contains(&waited), "{waited}");
    }

    fn count(&self, transport: SessionTransport, result: ConnectResult) -> u64 {
        self.metrics.connect_attempts(transport.transport(), result)
    }

    /// Expects so many connectors with a session, and none without.
    #[track_caller]
    fn expect_connected(&self, count: usize) {
        self.expect_states(count, 0);
    }

    #[track_caller]
    fn expect_states(&self, connected: usize, connecting: usize) {
        let states = [SessionState::Connected, SessionState::Connecting];
        let states = states.map(|state| self.plan.sessions(state));
        assert_eq!(
            states,
            [connected, connecting],
            "{:?}",
            self.plan.statuses()
        );
    }

    /// Returns why a session is missing.
    fn missing_reason(&self) -> Option<String> {
        let statuses = self.plan.statuses();
        statuses.into_values().find_map(|status| match status {
            SessionStatus::Live { .. } => None,
            SessionStatus::Missing { reason, .. } => Some(reason),
        })
    }
}

/// The first session over each pair of paths: its transport, and the seconds until it is dialed.
#[test]
fn happy_eyeballs_prefers_quic_and_falls_back_when_it_does_not_answer() {
    const SLOW: Path = Path::Slow(Duration::from_secs(2));
    const SLOWER: Path = Path::Slow(Duration::from_secs(4));
    for (quic, h2, transport, seconds) in [
        (Path::Open, Path::Open, Quic, 0.0..0.1),
        (Path::Open, Path::Silent, Quic, 0.0..0.1),
        (Path::Refused, Path::Open, H2, 0.0..0.1),
        (Path::Silent, Path::Open, H2, 3.0..3.1),
        // An answer within the head start keeps h2 out.
        (SLOW, Path::Open, Quic, 2.0..2.1),
        // Over TCP an alert may be a middlebox's.
        (SLOWER, Path::Alert, Quic, 4.0..4.1),
    ] {
        let mut sim = Sim::start(AUTO);
        (sim.quic, sim.h2) = (quic, h2);
        let arrival = sim.arrival();
        assert_eq!(arrival.transport, transport, "{quic:?} {h2:?}");
        sim.expect_lap(seconds);
        // Welcome may take a while.
        if transport == Quic && quic != SLOWER {
            sim.advance(4.0);
            assert_eq!(sim.take_dials(), [Quic]);
        }
        sim.admit(&arrival, "server-1", &[]);
        assert!(sim.plan.is_ready());
        let fallbacks = u64::from(transport == H2);
        assert_eq!(sim.metrics.transport_changes(), (fallbacks, 0));
        assert_eq!(sim.count(transport, ConnectResult::Ready), 1);
        let is_late = matches!(quic, Path::Silent | SLOWER);
        let reached = sim.metrics.reached(Limit::QuicHeadStart);
        assert_eq!(reached, u64::from(is_late), "{quic:?}");
        let abandoned = u64::from(quic == Path::Silent);
        assert_eq!(sim.count(Quic, ConnectResult::Abandoned), abandoned);
        if transport == Quic {
            sim.expect_quiet();
        }
    }
}

#[test]
fn alert_of_quic_is_no_reason_to_try_h2() {
    let mut sim = Sim::start(AUTO);
    sim.quic = Path::Alert;
    sim.advance(600.0);
    assert!(sim.take_dials().iter().all(|transport| *transport == Quic));
    assert!(sim.count(Quic, ConnectResult::Failed) > 60);
    let failed = (0, CredentialOutcome::Failed);
    assert!(sim.credentials.iter().all(|outcome| *outcome == failed));
    sim.quic = Path::Open;
    sim.session(Quic);
    assert_eq!(
        sim.credentials.last(),
        Some(&(0, CredentialOutcome::Accepted))
    );
}

/// The wait after a refusal of the only server, and what it says of the credentials.
#[test]
fn refusal_of_the_server_ends_the_attempt_and_sets_the_backoff() {
    use Refusal::{Expired, Revoked, Untrusted};
    for (code, seconds, refusal) in [
        (CloseCode::NameInUse, 60.0..67.0, None),
        (CloseCode::TooManySessions, 60.0..67.0, None),
        (CloseCode::Overloaded, 0.0..0.1, None),
        (CloseCode::Version, 30.0..34.0, None),
        (CloseCode::CredentialRevoked, 30.0..34.0, Some(Revoked)),
        (CloseCode::CredentialExpired, 0.0..34.0, Some(Expired)),
        (CloseCode::CredentialUntrusted, 0.0..34.0, Some(Untrusted)),
    ] {
        let mut sim = Sim::start(AUTO);
        let arrival = sim.arrival();
        sim.reject(&arrival, code);
        sim.lap();
        let outcome = refusal.map(|refusal| (0, CredentialOutcome::Refused(refusal)));
        assert_eq!(sim.credentials, Vec::from_iter(outcome), "{code}");
        sim.session(Quic);
        let waited = sim.lap();
        assert!(seconds.contains(&waited), "{code}: {waited}");
        assert_eq!(sim.take_dials(), [Quic, Quic]);
        assert_eq!(sim.count(Quic, ConnectResult::NotAdmitted), 1);
    }
}

#[test]
fn refusal_of_a_stopped_server_does_not_delay_the_dial_to_the_next_one() {
    let (mut sim, session) = Sim::ready(Quic);
    sim.close(session, CloseCode::Draining);
    let arrival = sim.arrival();
    sim.reject(&arrival, CloseCode::Overloaded);
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..0.11);
}

#[test]
fn last_ready_h2_is_dialed_first_and_quic_still_tried() {
    let (mut sim, session) = Sim::ready(H2);
    sim.take_dials();
    sim.close(session, CloseCode::Draining);
    sim.lap();
    let session = sim.session(H2);
    sim.expect_lap(..0.1);
    assert_eq!(sim.take_dials(), [H2]);
    sim.advance(10.0);
    (sim.h2, sim.quic) = (Path::Silent, Path::Open);
    sim.close(session, CloseCode::Draining);
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(3.0..3.1);
}

#[test]
fn alert_over_h2_does_not_keep_quic_from_being_tried() {
    let (mut sim, session) = Sim::ready(H2);
    (sim.h2, sim.quic) = (Path::Alert, Path::Open);
    sim.is_rotating = true;
    sim.close(session, CloseCode::Draining);
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..0.1);
    // The second dial has the credentials that the failure of the first one brought.
    let outcomes = [
        (0, CredentialOutcome::Failed),
        (1, CredentialOutcome::Accepted),
    ];
    assert_eq!(sim.credentials[1..], outcomes);
}

#[test]
fn long_outage_ends_35_seconds_after_any_one_path_is_back() {
    for (remembered, healed) in [(H2, Quic), (H2, H2), (Quic, H2), (Quic, Quic)] {
        for offset in 0..20 {
            let mut sim = Sim::cut_off(remembered);
            sim.advance(f64::from(400 + 2 * offset));
            match healed {
                Quic => sim.quic = Path::Open,
                H2 => sim.h2 = Path::Open,
            }
            sim.lap();
            sim.session(healed);
            sim.expect_lap(..=35.0);
        }
    }
}

#[test]
fn short_outage_ends_three_seconds_after_the_partition() {
    for remembered in [Quic, H2] {
        for offset in 0..40 {
            let mut sim = Sim::cut_off(remembered);
            sim.advance(30.0 + 0.37 * f64::from(offset));
            sim.set_paths(Path::Open);
            sim.lap();
            sim.arrival();
            sim.expect_lap(..=3.0);
        }
    }
}

#[test]
fn explicit_transport_is_the_only_one() {
    for (choice, only) in [(TransportChoice::H2, H2), (TransportChoice::Quic, Quic)] {
        let mut sim = Sim::start(choice);
        let session = sim.session(only);
        sim.set_paths(Path::Silent);
        sim.close(session, CloseCode::Draining);
        sim.advance(3600.0);
        sim.set_paths(Path::Open);
        sim.session(only);
        sim.advance(3600.0);
        assert!(sim.take_dials().iter().all(|transport| *transport == only));
        assert_eq!(sim.metrics.transport_changes(), (0, 0));
    }
}

#[test]
fn servers_are_tried_in_rotation_and_the_one_that_answered_is_dialed_first() {
    let servers = ["192.0.2.1:1", "192.0.2.2:2"];
    let mut sim = Sim::with(7, 2, TransportChoice::Quic, &servers);
    for name in [servers, servers].concat() {
        let arrival = sim.arrival();
        assert_eq!(arrival.name, name);
        sim.reject(&arrival, CloseCode::Overloaded);
    }
    for _ in 0..2 {
        let arrival = sim.arrival();
        assert_eq!(arrival.name, servers[0]);
        let session = sim.admit(&arrival, "server-1", &[]);
        sim.close(session, CloseCode::Draining);
    }
}

#[test]
fn newer_credentials_are_dialed_at_once_and_the_session_replaced() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    sim.lap();
    sim.renew();
    let new = sim.session(Quic);
    sim.expect_lap(..0.1);
    assert_eq!(
        sim.credentials.last(),
        Some(&(1, CredentialOutcome::Accepted))
    );
    sim.expect_retirement(old);
    sim.expect_quiet();
    // Without a session, the wait ends.
    sim.set_paths(Path::Refused);
    sim.close(new, CloseCode::Draining);
    sim.advance(600.0);
    sim.set_paths(Path::Open);
    sim.lap();
    sim.renew();
    sim.session(Quic);
    sim.expect_lap(..0.1);
}

impl Sim {
    fn renew(&mut self) {
        let newest = self.plan.shared.credentials + 1;
        self.plan.set_credentials(newest);
        self.handle(Event::Renewed);
    }
}
