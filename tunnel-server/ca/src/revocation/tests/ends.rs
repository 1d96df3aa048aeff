//! Orders that are over: what others learn of them, and when they are forgotten.

use super::super::ends::KnownTime::{self, Alone, Confirmed, Unknown};
use super::*;

const DAY: u64 = 24 * 60 * 60;
/// The day on which orders are made.
const MADE: u64 = 20_500 * DAY;
/// When revocations and their ends are over.
const OVER: u64 = MADE + 501 * DAY;
/// When a reissue is over: no certificate lives longer.
const REISSUE_OVER: u64 = MADE + 3840 * DAY;

struct Server {
    scratch: Scratch,
    revocations: Revocations,
    began: Instant,
}

impl Server {
    fn new() -> Self {
        let scratch = Scratch::new();
        Self {
            revocations: Self::start(&scratch),
            scratch,
            began: Instant::now(),
        }
    }

    fn start(scratch: &Scratch) -> Revocations {
        open(scratch)
    }

    /// Orders this about `worker-1`, and lets another server confirm it.
    fn orders(self, actions: &[OrderAction]) -> Self {
        for action in actions {
            order(&self.revocations, *action, MADE);
        }
        let mut state = self.revocations.state.lock();
        self.revocations.confirm(&mut state, |_, _| true);
        drop(state);
        self
    }

    /// Observes the time after so many hours of uptime.
    fn observes(&self, time: impl Fn(SystemTime) -> KnownTime, at: u64, hours: u64) {
        let uptime = Duration::from_secs(hours * 60 * 60);
        let time = time(super::time(at + uptime.as_secs()));
        self.revocations.observe_time(time, self.began + uptime);
    }

    /// Observes a confirmed time each hour for more than a day.
    fn runs_for_a_day(&self, at: u64) {
        (0..=25).for_each(|hour| self.observes(Confirmed, at, hour));
    }

    fn known(&self) -> Order {
        self.revocations.of_node(&node())
    }

    /// Returns what others learn about `worker-1`.
    fn announced(&self) -> Option<Order> {
        let all = self.revocations.all();
        assert!(all.len() <= 1, "{all:?}");
        all.first().map(|announced| announced.order)
    }

    fn receives(&self, order: Order) {
        merge(&self.revocations, "a", &[NodeOrder::new(&node(), order)]);
    }

    fn conditions(&self) -> usize {
        let conditions = self.revocations.conditions().into_iter();
        conditions.filter(|line| line.contains("worker-1")).count()
    }
}

#[tokio::test]
async fn orders_that_are_over_are_not_announced_or_merged_and_are_forgotten_a_day_later() {
    let server = Server::new().orders(&[Revoke, Unrevoke, Reissue]);
    let order = server.known();
    server.observes(Confirmed, MADE + 400 * DAY, 0);
    assert_eq!(server.announced(), Some(order));
    let mut changes = 0;
    let mut announce = || {
        let announced = server.revocations.changed_since(changes);
        announced.map(|(now, orders)| {
            changes = now;
            orders.len()
        })
    };
    assert_eq!((announce(), announce()), (Some(1), None));
    server.observes(Confirmed, REISSUE_OVER, 0);
    assert_eq!(server.announced(), None);
    assert_eq!((announce(), announce()), (Some(0), None));
    // It is in force until it is forgotten.
    assert!(server.revocations.is_revoked(&peer(0)));
    server.runs_for_a_day(REISSUE_OVER + DAY);
    assert_eq!(server.known(), Order::default());
    // A server that still knows it says nothing new.
    server.receives(order);
    assert_eq!(server.known(), Order::default());
    server.revocations.flush().unwrap();
    assert_eq!(
        Server::start(&server.scratch).of_node(&node()),
        Order::default()
    );
    // The next order exceeds what was forgotten.
    super::order(&server.revocations, Reissue, REISSUE_OVER);
    assert!(server.known().generation > order.generation);
    assert_eq!(
        order.merge(server.known()).generation,
        server.known().generation
    );
}

#[tokio::test]
async fn nothing_is_forgotten_by_a_clock_that_jumps_or_that_no_other_confirms() {
    let server = Server::new().orders(&[Reissue]);
    let order = server.known();
    for hour in 0..100 {
        server.observes(|_| Unknown, REISSUE_OVER + 9 * DAY, hour);
        server.observes(Alone, REISSUE_OVER + 9 * DAY, hour);
        assert_eq!(server.announced(), Some(order));
    }
    // The clock jumps once a day, or another one differs.
    for hour in 0..100 {
        let jumps = hour / 20 * DAY;
        server.observes(Confirmed, REISSUE_OVER + DAY + jumps, hour);
        assert_eq!((server.announced(), server.known()), (None, order));
    }
    for hour in 0..100 {
        server.observes(Confirmed, REISSUE_OVER + DAY, hour);
        if hour % 20 == 0 {
            server.observes(|_| Unknown, REISSUE_OVER, hour);
            assert_eq!(server.announced(), Some(order), "as before");
        }
    }
    assert_eq!(server.known(), order);
    // The clock is right again.
    server.observes(Confirmed, MADE, 0);
    assert_eq!(server.announced(), Some(order));
    // An order whose clock was certainly wrong has no end.
    let wrong = Server::new();
    super::order(&wrong.revocations, Reissue, 5);
    wrong.runs_for_a_day(REISSUE_OVER + 9000 * DAY);
    assert_eq!(wrong.known().generation, 1);
}

#[tokio::test]
async fn connected_servers_renew_revocations_and_a_lone_one_does() {
    for time in [Confirmed, Alone] {
        let server = Server::new().orders(&[Revoke]);
        let first = server.known();
        for period in 0..20 {
            server.observes(time, MADE + period * 100 * DAY, 0);
            let now = server.announced().unwrap();
            assert!(now.is_revoked && now.counter == first.counter);
            assert!(now.ends_at <= MADE + period * 100 * DAY + 530 * DAY);
        }
        server.runs_for_a_day(MADE + 2000 * DAY);
        assert!(server.announced().unwrap().is_revoked);
        assert_eq!(server.conditions(), 0);
    }
    // A clock before any release gives a revocation without an end none that is over.
    let server = Server::new();
    let without_end = Order::default().with_revoked(true, MADE);
    assert_eq!(without_end.ends_at, 0);
    server.receives(without_end);
    server.observes(Alone, 10 * DAY, 0);
    server.observes(Confirmed, MADE, 1);
    assert!(server.announced().unwrap().is_revoked);
    // A server that was alone, and stopped for years.
    let server = Server::new().orders(&[Revoke]);
    server.observes(Alone, OVER + 9 * DAY, 0);
    server.observes(Confirmed, OVER + 9 * DAY, 1);
    assert!(server.announced().unwrap().is_revoked);
}

/// It was without the others for longer than they know an order.
#[tokio::test]
async fn server_with_old_state_brings_nothing_back_and_loses_nothing() {
    let old = Server::new().orders(&[Revoke]);
    let revoked = old.known();
    let others = Server::new().orders(&[Revoke]);
    others.observes(Confirmed, OVER - 200 * DAY, 0);
    let renewed = others.known();
    assert!(renewed.ends_at > OVER);
    // Taken back and forgotten.
    let forgotten = Server::new().orders(&[Revoke, Unrevoke]);
    forgotten.runs_for_a_day(OVER + DAY);
    assert_eq!(forgotten.known(), Order::default());
    old.observes(|_| Unknown, OVER, 0);
    assert_eq!(old.announced(), Some(revoked), "its time is not known");
    forgotten.receives(revoked);
    assert_eq!(forgotten.known(), Order::default());
    // It refuses the node, announces nothing, and forgets nothing.
    old.runs_for_a_day(OVER + 2 * DAY);
    assert_eq!(old.announced(), None);
    assert!(old.revocations.is_revoked(&peer(0)));
    assert_eq!(old.conditions(), 1);
    // Where it is in force, nothing is lost, and the server learns it.
    others.observes(Confirmed, OVER, 0);
    others.receives(revoked);
    assert_eq!(others.announced(), Some(renewed));
    old.receives(renewed);
    assert_eq!(old.announced(), Some(renewed));
    assert_eq!(old.conditions(), 0);
    // An operator decides about the others.
    let returned = Server::new().orders(&[Revoke]);
    returned.observes(Confirmed, OVER, 0);
    order(&returned.revocations, Unrevoke, OVER);
    assert!(!returned.announced().unwrap().is_revoked);
    forgotten.receives(returned.known());
    assert!(!forgotten.revocations.is_revoked(&peer(0)));
    // What nobody else has learned is renewed.
    let alone = Server::new();
    order(&alone.revocations, Revoke, MADE);
    alone.observes(Confirmed, OVER, 0);
    assert!(alone.announced().unwrap().is_revoked);
}

#[tokio::test]
async fn document_of_servers_has_no_orders_that_are_over_and_its_revocations_are_in_force() {
    let scratch = Scratch::new();
    let entry =
        |revoked: bool| format!(r#"{{"counter":20001,"revoked":{revoked},"endsAt":{OVER}}}"#);
    let content = format!(
        r#"{{"nodes":{{"worker-1":{},"worker-2":{}}}}}"#,
        entry(false),
        entry(true)
    );
    let (document, observed) = shared(&content);
    let revocations = Revocations::open_shared(&scratch.0, document, true).unwrap();
    assert_eq!(revocations.all().len(), 2);
    let began = Instant::now();
    let observe = |at: u64, uptime: u64| {
        let now = began + Duration::from_secs(uptime);
        revocations.observe_time(Confirmed(time(at + uptime)), now);
    };
    observe(OVER, 0);
    let written = OrdersDocument::of(&revocations.state.lock());
    // Nobody has renewed the revocation, but the document has it.
    assert!(!written.nodes.contains_key("worker-1"));
    let change = |content: Vec<u8>| {
        observed.send_modify(|observed| {
            observed.sequence += 1;
            observed.content = Some(content.into());
        });
        revocations.all()
    };
    let current = change(content.clone().into_bytes());
    assert_eq!(current.len(), 1, "{current:?}");
    assert!(current[0].order.is_revoked && current[0].order.ends_at > OVER);
    assert!(!revocations.unwritten().is_empty(), "its new end");
    // A server with another clock writes what is over. That alone is no reason to write again.
    let written = OrdersDocument::of(&revocations.state.lock());
    let mut theirs = serde_json::to_value(&written).unwrap();
    theirs["nodes"]["worker-3"] = serde_json::from_str(&entry(false)).unwrap();
    change(serde_json::to_vec(&theirs).unwrap());
    revocations.rows.flush(Table::Orders).unwrap();
    assert!(revocations.unwritten().is_empty());
    assert_eq!(revocations.all().len(), 1);
    observe(OVER + DAY, 0);
    observe(OVER + DAY, DAY + 1);
    assert_eq!(revocations.of_node(&node()), Order::default());
    change(content.into_bytes());
    assert_eq!(revocations.of_node(&node()), Order::default());
}

/// Other servers announce any number of names, and operators can always order something about a node.
#[tokio::test]
async fn flood_of_names_is_bounded_and_over_after_their_end() {
    let server = Server::new();
    let flood = (10_000..20_000).map(|number| {
        let order = Order::default()
            .with_revoked(true, MADE)
            .with_revoked(false, MADE);
        NodeOrder::new(&format!("n{number}").parse().unwrap(), order.with_end(OVER))
    });
    let flood: Vec<_> = flood.collect();
    merge(&server.revocations, "b", &flood);
    let room = FOREIGN_BYTES_MAX / (ENTRY_BYTES + 6);
    assert_eq!(server.revocations.all().len(), room);
    assert_eq!(order(&server.revocations, Revoke, OVER), 1);
    server.runs_for_a_day(OVER + DAY);
    assert!(server.announced().unwrap().is_revoked);
    server.revocations.flush().unwrap();
    let again = Server::start(&server.scratch);
    assert_eq!(again.all().len(), 1);
}
