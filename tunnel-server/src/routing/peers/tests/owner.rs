//! One owner of a node among all servers.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tunnel_proto::transport::{Session as _, memory};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::InstanceId;
use tunnel_proto::wire::peer::{Ask, HeldNode, Holds};

use super::fixture::{
    Agent, Installation, Server, address, claim, first_message, id, instance, node, within,
};
use crate::routing::peers::PeerEndpoint;
use crate::routing::peers::link::{Link, PendingAsk};
use crate::routing::peers::owner::CROSSING;
use crate::routing::registry::SuspectReason;
use crate::testing::eventually;

#[tokio::test]
async fn question_is_answered_by_a_probe_and_a_silent_session_yields_to_the_newcomer() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let x = node("x");
    let newcomer = async || a.peers.is_held_by_other(&x, instance(2)).await;
    assert_eq!(within(newcomer()).await, Some(id("b")));
    let same = a.peers.is_held_by_other(&x, instance(1));
    assert_eq!(within(same).await, None);
    agent.near.script().is_silent = true;
    assert_eq!(within(newcomer()).await, None);
    // A question before an admission ends nothing, and the session may answer again.
    assert!(!agent.session().is_withdrawn());
    agent.near.script().is_silent = false;
    assert_eq!(within(newcomer()).await, Some(id("b")));
    agent.near.script().is_silent = true;
    assert_eq!(within(newcomer()).await, None);
    // Neither does an announcement.
    let newcomer = a.agent("x", 2);
    let is_announced = || {
        let others = &b.peers.state.lock().directory;
        !others.others(&x, instance(1)).is_empty()
    };
    eventually("the announcement of the newcomer", is_announced).await;
    assert!(!agent.session().is_withdrawn());
    // A server compares what it has admitted, and the monitor of the session says that it is silent.
    let silent = SuspectReason::PeerHearsNothing;
    agent.session().set_suspect_reason(Some(silent));
    check_owner(&a, &newcomer);
    let is_withdrawn = || agent.session().is_withdrawn();
    eventually("silent session yields", is_withdrawn).await;
    assert!(!newcomer.session().is_withdrawn());
}

/// A session that answers again before the other server has admitted its agent stays.
#[tokio::test]
async fn session_that_was_silent_only_for_a_question_keeps_its_name() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    agent.near.script().is_silent = true;
    let x = node("x");
    let asked = a.peers.is_held_by_other(&x, instance(2));
    assert_eq!(within(asked).await, None);
    agent.near.script().is_silent = false;
    let newcomer = a.agent("x", 2);
    check_owner(&a, &newcomer);
    let reason = within(newcomer.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
    assert!(!agent.session().is_withdrawn());
}

/// The second server was cut off from the first one while it admitted the agent.
#[tokio::test]
async fn of_two_live_agents_the_lower_instance_stays_and_both_servers_say_so() {
    for (own, other) in [(1, 2), (2, 1)] {
        let installation = Installation::new();
        let a = installation.server("a").await;
        let b = installation.server("b").await;
        let (at_a, at_b) = (a.agent("x", own), b.agent("x", other));
        a.dial(&[&b]);
        b.dial(&[&a]);
        let (loser, winner) = if own < other {
            (&at_b, &at_a)
        } else {
            (&at_a, &at_b)
        };
        let reason = within(loser.far.closed()).await;
        assert_eq!(reason.code, CloseCode::NameInUse);
        assert!(loser.session().is_withdrawn());
        assert!(!winner.session().is_withdrawn());
        for server in [&a, &b] {
            let condition = || server.peers.used_twice();
            eventually("condition", || condition().is_some()).await;
            let condition = condition().unwrap();
            assert!(
                condition.starts_with("name used twice: x (here and at "),
                "{condition}"
            );
        }
    }
}

#[tokio::test]
async fn admission_that_missed_an_announcement_is_checked_again() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let first = b.agent("x", 1);
    a.sees("x", &b).await;
    let second = a.agent("x", 2);
    check_owner(&a, &second);
    let reason = within(second.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
    assert!(!first.session().is_withdrawn());
    first.near.script().is_silent = true;
    let silent = SuspectReason::PeerHearsNothing;
    first.session().set_suspect_reason(Some(silent));
    let third = a.agent("x", 3);
    check_owner(&a, &third);
    let is_withdrawn = || first.session().is_withdrawn();
    eventually("silent session yields", is_withdrawn).await;
    assert!(!third.session().is_withdrawn());
}

/// Another server, played by the test, that is connected to `a` since more than [`CROSSING`].
struct Hostile {
    endpoint: PeerEndpoint,
    link: Arc<Link>,
    asks: mpsc::Receiver<PendingAsk>,
}

impl Hostile {
    async fn connected(installation: &Installation, a: &Server) -> Self {
        let hostile = Self::connecting(installation, a);
        sleep(CROSSING).await;
        hostile
    }

    fn connecting(installation: &Installation, a: &Server) -> Self {
        let (near, _far) = memory::pair();
        let (link, asks) = Link::new(id("b"), near, 8);
        a.peers.expect(&address("b"));
        a.peers.link_up(&link, &first_message("b"));
        Self {
            endpoint: a.endpoint(installation),
            link,
            asks,
        }
    }

    /// Announces a node with a process that precedes all others, since 1970.
    fn announce(&self, name: &str) {
        let added = vec![HeldNode {
            node: node(name),
            instance: FIRST,
            since: UNIX_EPOCH,
        }];
        let holds = Holds {
            added: added.clone(),
            ..Holds::default()
        };
        self.endpoint.peers.apply(&self.link.replica, holds);
        self.endpoint.compare_announced(&self.link.replica, &added);
    }

    /// Answers every question so that the session at `a` would yield, until none comes for a while.
    async fn claims_all(&mut self) -> usize {
        let mut asked = 0;
        while let Ok(Some(ask)) = timeout(2 * CROSSING, self.asks.recv()).await {
            answer(ask).send(true).unwrap();
            asked += 1;
        }
        asked
    }

    fn ask(&self, name: &str, is_admitted: bool) -> Ask {
        Ask {
            id: 1,
            node: node(name),
            instance: FIRST,
            is_admitted,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn live_session_yields_to_no_announcement_and_to_no_claim_of_another_server() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let mut b = Hostile::connected(&installation, &a).await;
    let agent = a.agent("x", 1);
    sleep(CROSSING).await;
    b.announce("x");
    assert_eq!(b.claims_all().await, 0);
    for is_admitted in [false, true] {
        let ask = b.ask("x", is_admitted);
        assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    }
    // A session that replaces another one is no later admission.
    let newer = a.agent("x", 1);
    agent.session().withdraw();
    b.announce("x");
    assert_eq!(b.claims_all().await, 0);
    let ask = b.ask("x", true);
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    assert!(!newer.session().is_withdrawn());
}

#[tokio::test(start_paused = true)]
async fn after_a_connection_is_back_sessions_are_compared_again_and_few_yield_to_one_server() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let agents: Vec<_> = (0..15)
        .map(|number| a.agent(&format!("x{number}"), 1))
        .collect();
    let silent = a.agent("silent", 1);
    silent.near.script().is_silent = true;
    sleep(CROSSING).await;
    let mut b = Hostile::connecting(&installation, &a);
    // A question about a process that is not admitted changes nothing, however new the connection.
    let ask = b.ask("x0", false);
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    for number in 0..15 {
        b.announce(&format!("x{number}"));
    }
    b.announce("silent");
    b.claims_all().await;
    let withdrawn = || agents.iter().filter(|agent| agent.session().is_withdrawn());
    assert_eq!(withdrawn().count(), 10);
    assert!(!silent.session().is_withdrawn(), "the other server asks");
    let condition = a.peers.used_twice().unwrap();
    assert!(
        condition.contains("name used twice: x0 (here and at b)"),
        "{condition}"
    );
    // The limit is one for both directions, and for a minute.
    sleep(Duration::from_secs(60)).await;
    b.endpoint.peers.record_connection(&id("b"));
    let next = agents
        .iter()
        .find(|agent| !agent.session().is_withdrawn())
        .unwrap();
    let ask = b.ask(next.session().node.as_str(), true);
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(false));
    assert!(next.session().is_withdrawn());
}

#[tokio::test(start_paused = true)]
async fn session_that_is_silent_for_the_time_of_a_probe_is_not_closed_and_a_lost_one_is() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let b = Hostile::connected(&installation, &a).await;
    let agent = a.agent("x", 1);
    let ask = b.ask("x", true);
    sleep(CROSSING).await;
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    agent.near.script().is_silent = true;
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, None);
    assert!(!agent.session().is_withdrawn());
    agent.near.script().is_silent = false;
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    // By its own monitor, or by as long a silence.
    agent.near.script().is_silent = true;
    let mut asked = 0;
    while b.endpoint.keeps_name(&id("b"), &ask).await.is_none() {
        asked += 1;
    }
    assert!((7..11).contains(&asked), "{asked} probes of a second");
    assert!(agent.session().is_withdrawn());
    let next = a.agent("y", 1);
    next.near.script().is_silent = true;
    let silent = SuspectReason::PeerHearsNothing;
    next.session().set_suspect_reason(Some(silent));
    let ask = b.ask("y", true);
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(false));
    assert!(next.session().is_withdrawn());
}

#[tokio::test(start_paused = true)]
async fn higher_instance_of_a_server_that_is_back_yields_to_the_lower_one() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let agent = a.agent("x", 1);
    sleep(CROSSING).await;
    let mut b = Hostile::connecting(&installation, &a);
    let ask = Ask {
        instance: instance(2),
        ..b.ask("x", true)
    };
    assert_eq!(b.endpoint.keeps_name(&id("b"), &ask).await, Some(true));
    let claim = claim("x");
    b.endpoint.peers.apply(&id("b"), claim.clone());
    b.endpoint.compare_announced(&id("b"), &claim.added);
    b.claims_all().await;
    assert!(!agent.session().is_withdrawn());
}

#[tokio::test(start_paused = true)]
async fn server_that_did_not_answer_is_asked_until_it_does() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let mut b = Hostile::connected(&installation, &a).await;
    b.endpoint.peers.apply(&id("b"), claim("x"));
    let newcomer = a.agent("x", 1);
    check_owner(&a, &newcomer);
    let unanswered = within(b.asks.recv()).await.unwrap();
    drop(answer(unanswered));
    let asked = within(b.asks.recv()).await.unwrap();
    assert!(!newcomer.session().is_withdrawn());
    answer(asked).send(true).unwrap();
    let reason = within(newcomer.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
}

fn answer(ask: PendingAsk) -> oneshot::Sender<bool> {
    let PendingAsk::Holds { answer, .. } = ask else {
        panic!("{ask:?}");
    };
    answer
}

fn check_owner(server: &Server, agent: &Agent) {
    server.peers.check_owner(agent.session(), &server.shutdown);
}

/// An instance id that precedes all others.
const FIRST: InstanceId = InstanceId::new([0; 16]);
