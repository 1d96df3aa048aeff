use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpListener;
use tokio::time::timeout;
use tunnel_proto::dial::ResolveFuture;

use super::*;
use crate::routing::routes::{RouteNode, RouteSource};
use crate::testing::assert_contains;
use tunnel_routing::dial_policy::LiveClusterNetworks;

/// A resolver that returns its answers one after the other.
#[derive(Debug)]
struct Flipping {
    answers: Vec<Vec<SocketAddr>>,
    asked: Arc<AtomicUsize>,
}

impl Resolve for Flipping {
    fn resolve<'a>(&'a self, _name: &'a str, _port: u16) -> ResolveFuture<'a> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let answer = self.answers[number % self.answers.len()].clone();
        Box::pin(async move { Ok(answer) })
    }
}

const LIMIT: Duration = Duration::from_secs(5);

fn dial_policy(texts: &[&str]) -> DialPolicy {
    let targets = texts.iter().map(|text| text.parse().unwrap()).collect();
    DialPolicy::Listed(targets, LiveClusterNetworks::default())
}

fn named(name: &str) -> DialTarget {
    DialTarget::Name(name.parse().unwrap())
}

/// Returns a resolver with these answers, and the number of questions.
fn resolver(answers: Vec<Vec<SocketAddr>>) -> (Box<Flipping>, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let resolver = Flipping {
        answers,
        asked: asked.clone(),
    };
    (Box::new(resolver), asked)
}

async fn accepted(listener: &TcpListener) -> bool {
    let waited = timeout(Duration::from_millis(20), listener.accept());
    waited.await.is_ok()
}

/// S42: even if a name resolves differently with each call, one call resolves it once and dials
/// only the addresses that it checked.
#[tokio::test]
async fn s42_name_that_flips_is_resolved_once_and_only_the_checked_address_is_dialed() {
    let routes = Routes::default();
    let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = good.local_addr().unwrap().port();
    // The next call would reach the canary, and the one after it the metadata service.
    let canary = TcpListener::bind(("127.0.0.2", port)).await.unwrap();
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), port);
    let (resolver, asked) = resolver(vec![
        vec![at("127.0.0.1")],
        vec![at("127.0.0.2")],
        vec![at("169.254.169.254")],
        vec![at("127.0.0.2"), at("169.254.169.254"), at("127.0.0.1")],
    ]);
    let direct = DirectDialer::with_resolver(dial_policy(&["127.0.0.1/32"]), LIMIT, resolver);
    let port = Port::new(port).unwrap();
    let dial_target = named("flip.example");
    for round in 0..3 {
        let expected = [Ok(()), Err(()), Err(()), Ok(())];
        for (number, expected) in expected.into_iter().enumerate() {
            let dialed = direct.dial(&dial_target, port, "flip.example", &routes, &no_agent);
            let dialed = dialed.await;
            let outcome = dialed.as_ref().map(drop).map_err(|failure| {
                assert_eq!(failure.outcome, Outcome::RefusedByPolicy, "{failure}");
            });
            assert_eq!(outcome, expected, "call {number} of round {round}");
            let calls = round * 4 + number + 1;
            assert_eq!(asked.load(Ordering::Relaxed), calls, "asked once");
            assert_eq!(accepted(&good).await, expected.is_ok());
        }
    }
    assert!(!accepted(&canary).await);
}

/// T05: other spellings of addresses are names, and the addresses that they resolve to are checked.
#[tokio::test]
async fn t05_odd_spellings_of_loopback_reach_no_listener() {
    let routes = Routes::default();
    let canary = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(canary.local_addr().unwrap().port()).unwrap();
    let direct = DirectDialer::new(dial_policy(&["0.0.0.0/0", "::/0"]), LIMIT);
    let spellings =
        "2130706433 0x7f000001 017700000001 127.1 0x7f.1 0177.0.0.1 localhost localhost. 0 0x0";
    for spelling in spellings.split(' ') {
        let Ok(name) = spelling.parse() else {
            // Refused as an invalid name before anything is resolved.
            continue;
        };
        let dial_target = DialTarget::Name(name);
        let dialed = direct
            .dial(&dial_target, port, spelling, &routes, &no_agent)
            .await;
        let Err(failure) = dialed else {
            panic!("{spelling} was dialed");
        };
        let refusals = [Outcome::RefusedByPolicy, Outcome::TargetRefused];
        assert!(refusals.contains(&failure.outcome), "{spelling}: {failure}");
    }
    for address in "127.0.0.1 ::1 ::ffff:127.0.0.1 0.0.0.0 169.254.169.254".split(' ') {
        let dial_target = DialTarget::Addresses(vec![address.parse().unwrap()]);
        let dialed = direct
            .dial(&dial_target, port, address, &routes, &no_agent)
            .await;
        let failure = dialed.unwrap_err();
        assert_eq!(failure.outcome, Outcome::RefusedByPolicy, "{address}");
    }
    assert!(!accepted(&canary).await);
}

#[tokio::test]
async fn failures_say_what_was_tried_and_nothing_is_asked_where_nothing_is_allowed() {
    let routes = Routes::default();
    let (resolver, asked) = resolver(vec![Vec::new()]);
    let port = Port::new(1).unwrap();
    let nothing = DirectDialer::with_resolver(dial_policy(&[]), LIMIT, resolver);
    let name = named("a.example");
    let dialed = nothing
        .dial(&name, port, "a.example:1", &routes, &no_agent)
        .await;
    let failure = dialed.unwrap_err();
    assert_eq!(failure.outcome, Outcome::RefusedByPolicy);
    assert_contains(&failure.text, "--connect-direct");
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    let direct = DirectDialer::new(dial_policy(&["127.0.0.0/8"]), LIMIT);
    let closed = DialTarget::Addresses(vec!["127.0.0.1".parse().unwrap()]);
    let dialed = direct
        .dial(&closed, port, "127.0.0.1:1", &routes, &no_agent)
        .await;
    let failure = dialed.unwrap_err();
    assert_eq!(failure.outcome, Outcome::TargetRefused, "{failure}");
}

/// A name is subject to the claims of nodes on the address that it resolves to, regardless of the
/// operator's list.
#[tokio::test]
async fn names_lead_past_no_agent_and_to_no_contested_address() {
    let canary = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::new(canary.local_addr().unwrap().port()).unwrap();
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), port.get());
    let node = |name: &str| RouteNode::edge(name.parse().unwrap(), vec![at("127.0.0.1").ip()]);
    for (owners, outcome) in [
        ("edge-1", Outcome::RefusedByPolicy),
        ("edge-1, edge-2", Outcome::AmbiguousAddress),
    ] {
        let routes = Routes::default();
        let nodes = owners.split(", ").map(node);
        routes.set(RouteSource::Cluster, nodes.collect());
        let (resolver, _) = resolver(vec![vec![at("127.0.0.1")]]);
        let direct = DirectDialer::with_resolver(dial_policy(&["127.0.0.0/8"]), LIMIT, resolver);
        let dial_target = named("a.example");
        let dialed = direct
            .dial(&dial_target, port, "a.example", &routes, &no_agent)
            .await;
        let failure = dialed.unwrap_err();
        assert_eq!(failure.outcome, outcome, "{failure}");
        assert_contains(&failure.text, owners);
    }
    assert!(!accepted(&canary).await);
}

fn no_agent(_: &NodeName) -> bool {
    false
}
