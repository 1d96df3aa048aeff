//! One owner of a node among all servers.

use std::time::Duration;

use tokio::time::sleep;
use tunnel_proto::transport::{Session as _, memory};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::peer::HeldNode;

use super::fixture::{
    Agent, Installation, Server, address, claim, first_message, id, instance, node, within,
};
use crate::routing::peers::link::Link;
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
    // A question without an agent process ends nothing, and the session may answer again.
    assert!(!agent.session().is_withdrawn());
    agent.near.script().is_silent = false;
    assert_eq!(within(newcomer()).await, Some(id("b")));
    agent.near.script().is_silent = true;
    assert_eq!(within(newcomer()).await, None);
    let other = a.agent("x", 3);
    let sees_other = || {
        let others = &b.peers.state.lock().directory;
        !others.others(&x, instance(1)).is_empty()
    };
    eventually("the announcement of another process", sees_other).await;
    assert!(!agent.session().is_withdrawn());
    other.session().withdraw();
    let _newcomer = a.agent("x", 2);
    let is_withdrawn = || agent.session().is_withdrawn();
    eventually("silent session yields", is_withdrawn).await;
}

#[tokio::test]
async fn of_crossed_admissions_the_first_one_stays() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let b = installation.server("b").await;
    let pause = || sleep(Duration::from_millis(5));
    let first = a.agent("x", 1);
    pause().await;
    let second = b.agent("x", 2);
    pause().await;
    // A session that replaces another one is no later admission.
    let newer = a.agent("x", 1);
    first.session().withdraw();
    a.dial(&[&b]);
    a.sees("x", &b).await;
    assert!(!newer.session().is_withdrawn());
    b.dial(&[&a]);
    let reason = within(second.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
    assert!(second.session().is_withdrawn());
    assert!(!newer.session().is_withdrawn());
}

#[tokio::test]
async fn admission_that_missed_an_announcement_is_checked_again() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let pause = || sleep(Duration::from_millis(5));
    let first = b.agent("x", 1);
    a.sees("x", &b).await;
    pause().await;
    let second = a.agent("x", 2);
    check_owner(&a, &second);
    let reason = within(second.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
    assert!(!first.session().is_withdrawn());
    first.near.script().is_silent = true;
    let third = a.agent("x", 3);
    check_owner(&a, &third);
    let is_withdrawn = || first.session().is_withdrawn();
    eventually("silent session yields", is_withdrawn).await;
    assert!(!third.session().is_withdrawn());
}

#[tokio::test]
async fn announcement_from_before_a_yield_does_not_close_the_newcomer() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let silent = a.agent("x", 1);
    b.sees("x", &a).await;
    let others = b
        .peers
        .state
        .lock()
        .directory
        .others(&node("x"), instance(2));
    let [(_, earlier)] = &others[..] else {
        panic!("{others:?}");
    };
    silent.near.script().is_silent = true;
    let (x, newcomer) = (node("x"), instance(2));
    assert_eq!(within(b.peers.is_held_by_other(&x, newcomer)).await, None);
    let newcomer = b.agent("x", 2);
    let is_withdrawn = || silent.session().is_withdrawn();
    eventually("silent session yields", is_withdrawn).await;
    let endpoint = b.endpoint(&installation);
    endpoint.resolve_crossed(&id("a"), std::slice::from_ref(earlier));
    assert!(!newcomer.session().is_withdrawn());
    // An admission after the yield counts, and from its own time.
    let _again = a.agent("x", 1);
    let later = a.registry.held_nodes().remove(0);
    assert!(later.since > earlier.since + Duration::from_millis(500));
    let crossed = HeldNode {
        since: earlier.since + Duration::from_millis(1),
        ..later
    };
    endpoint.resolve_crossed(&id("a"), &[crossed]);
    assert!(newcomer.session().is_withdrawn());
}

#[tokio::test]
async fn server_that_did_not_answer_is_asked_until_it_does() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let (near, _far) = memory::pair();
    let (link, mut asks) = Link::new(id("b"), near, 8);
    a.peers.expect(&address("b"));
    a.peers.link_up(&link, &first_message("b"));
    a.peers.apply(&id("b"), claim("x"));
    sleep(Duration::from_millis(5)).await;
    let newcomer = a.agent("x", 1);
    check_owner(&a, &newcomer);
    let unanswered = within(asks.recv()).await.unwrap();
    drop(unanswered.answer);
    let asked = within(asks.recv()).await.unwrap();
    assert!(!newcomer.session().is_withdrawn());
    asked.answer.send(true).unwrap();
    let reason = within(newcomer.far.closed()).await;
    assert_eq!(reason.code, CloseCode::NameInUse);
}

fn check_owner(server: &Server, agent: &Agent) {
    let (registry, shutdown) = (&server.registry, &server.shutdown);
    server
        .peers
        .check_owner(registry, agent.session(), shutdown);
}
