use std::collections::BTreeSet;
use std::pin::pin;
use std::thread::ThreadId;

use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tunnel_process::shutdown::DrainOutcome;
use tunnel_proto::stream_record::{RecordedPeer, StreamEnd};
use tunnel_proto::transport::{ClosedBy, Session as _, StreamCut, find_cause, memory};
use tunnel_proto::wire::code::{CloseCode, RefusalCode, ResetCode};
use tunnel_proto::wire::header::{StreamKind, Target};
use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_proto::wire::order::{NodeOrder, Order};
use tunnel_proto::wire::peer::{Holds, PeerMessage};

use super::monitor::LinkCheck;
use super::*;
use crate::routing::registry::{CallerKey, Registry, RegistryLimits, SuspectReason};
use crate::routing::{Routing, via::Via};
use crate::testing::{POOL, eventually};

mod fixture;
mod owner;

use fixture::{Installation, LIMIT, Server, connect, control, hello, id, node, refusal, within};
use tunnel_routing::policy::{PortLists, PortPolicy};

#[tokio::test]
async fn nodes_and_server_are_known_for_a_while_after_the_connection_is_lost() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let _agent = b.agent("x", 1);
    a.sees("x", &b).await;
    assert_eq!(a.members(), ["a", "b"]);
    let lost = async {
        eventually("connection is lost", || a.peers.connected() == 0).await;
        assert!(a.peers.holds(&node("x")));
        assert_eq!(a.members(), ["a", "b"]);
        eventually("node is forgotten", || !a.peers.holds(&node("x"))).await;
        assert_eq!(a.members(), ["a"]);
    };
    tokio::join!(b.stop(), lost);
}

#[test]
fn new_list_of_several_messages_replaces_the_previous_one_with_its_last_message() {
    let limits = PeerLimits {
        streams: 1,
        directory_nodes: 8,
        buffer_pool: 1,
    };
    let peers = Peers::new(id("a"), limits, PeerMetrics::default());
    peers.expect(&fixture::address("b"));
    for name in ["x", "y"] {
        peers.apply(&id("b"), fixture::claim(name));
    }
    let begin = Holds {
        is_full: true,
        has_more: true,
        ..fixture::claim("z")
    };
    peers.apply(&id("b"), begin);
    assert_eq!(peers.held_nodes().len(), 3);
    peers.apply(&id("b"), fixture::claim("y"));
    let mut held_nodes = peers.held_nodes();
    held_nodes.sort_unstable();
    assert_eq!(held_nodes, [(node("y"), id("b")), (node("z"), id("b"))]);
    peers.remove(&id("b"));
    peers.apply(&id("b"), fixture::claim("x"));
    assert!(!peers.holds(&node("x")), "late message of a removed server");
}

#[test]
fn server_that_leaves_is_reported_once() {
    let limits = PeerLimits {
        streams: 1,
        directory_nodes: 8,
        buffer_pool: 1,
    };
    let peers = Peers::new(id("a"), limits, PeerMetrics::default());
    peers.expect(&fixture::address("b"));
    assert!(peers.peer_leaves(&id("b")));
    assert!(!peers.peer_leaves(&id("b")), "repeated");
    assert!(!peers.peer_leaves(&id("c")), "not dialed");
}

#[tokio::test]
async fn zone_that_an_operator_wrote_is_preferred_to_the_listed_one() {
    let installation = Installation::new();
    let [a, b, c] = [
        installation.server("a").await,
        installation.server("b").await,
        installation.server("c").await,
    ];
    b.peers.set_zone(Some(zone("written")));
    let listed = |server: &Server, zone: Option<&str>| PeerAddress {
        zone: zone.map(self::zone),
        ..server.listed()
    };
    let zones = || -> Vec<Option<String>> {
        let members = a.peers.members().borrow().clone();
        let zones = members.iter().map(|member| member.zone.as_ref());
        zones.map(|zone| zone.map(ToString::to_string)).collect()
    };
    let [one, two] = ["one", "two"].map(str::to_owned);
    let written = Some("written".to_owned());
    assert_eq!(zones(), [None]);
    a.follow([
        listed(&a, Some("one")),
        listed(&b, Some("one")),
        listed(&c, None),
    ]);
    let expected = [Some(one.clone()), written.clone(), None];
    eventually("the zones", || zones() == expected).await;
    assert_eq!(a.peers.zone_of(&id("b")), Some(zone("written")));
    assert_eq!(
        (a.peers.zone_of(&id("c")), a.peers.zone_of(&id("d"))),
        (None, None)
    );
    // A change of the list needs no other connection.
    a.follow([
        listed(&a, None),
        listed(&b, Some("two")),
        listed(&c, Some("two")),
    ]);
    let expected = [None, written, Some(two)];
    eventually("the other zones", || zones() == expected).await;
}

fn zone(name: &str) -> ZoneName {
    name.parse().unwrap()
}

#[tokio::test]
async fn node_is_forgotten_when_its_agent_has_gone() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agents = [b.agent("x", 1), b.agent("y", 1)];
    a.sees("x", &b).await;
    a.sees("y", &b).await;
    let [x, _y] = agents;
    drop(x);
    eventually("x is forgotten", || {
        a.peers.held_nodes() == [(node("y"), id("b"))]
    })
    .await;
}

#[tokio::test]
async fn forwarded_stream_carries_the_reply_and_both_directions() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = a.open("x", None).await.unwrap();
    assert_eq!(opened.via, Via::Replica(id("b")));
    let mut target = agent.stream().await;
    target.accept("192.0.2.7:9100").await.unwrap();
    let dialed = within(opened.stream.accepted()).await.unwrap();
    assert_eq!(dialed, "192.0.2.7:9100");
    let mut received = Vec::new();
    opened.stream.write_all(b"question").await.unwrap();
    within(opened.stream.shutdown()).await.unwrap();
    within(target.read_to_end(&mut received)).await.unwrap();
    assert_eq!(received, b"question");
    target.write_all(b"answer").await.unwrap();
    within(target.shutdown()).await.unwrap();
    received.clear();
    within(opened.stream.read_to_end(&mut received))
        .await
        .unwrap();
    assert_eq!(received, b"answer");
}

#[tokio::test]
async fn forwarded_stream_is_recorded_once_at_the_server_of_its_agent() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = a.open("x", None).await.unwrap();
    let mut target = agent.accepts().await;
    opened.stream.write_all(b"question").await.unwrap();
    within(opened.stream.shutdown()).await.unwrap();
    within(target.read_to_end(&mut Vec::new())).await.unwrap();
    within(target.shutdown()).await.unwrap();
    within(opened.stream.read_to_end(&mut Vec::new()))
        .await
        .unwrap();
    eventually("the first is recorded", || b.records.lock().len() == 1).await;
    b.policy.replace(&PortPolicy::default().into());
    let mut refused = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut refused).await, RefusalCode::Policy);
    eventually("both are recorded", || b.records.lock().len() == 2).await;
    let records = std::mem::take(&mut *b.records.lock());
    for (record, expected) in records
        .iter()
        .zip([StreamEnd::Ok, StreamEnd::Refused(RefusalCode::Policy)])
    {
        assert_eq!(record.peer, Some(RecordedPeer::Server(id("a"))));
        assert_eq!((record.end, &record.node), (expected, &Some(node("x"))));
    }
    assert_eq!(records[0].bytes_out, "question".len() as u64);
    assert!(a.records.lock().is_empty());
}

#[tokio::test]
async fn refusal_of_the_agent_is_the_end_in_the_record_of_its_server() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = a.open("x", None).await.unwrap();
    let target = agent.stream().await;
    target
        .refuse(RefusalCode::TargetRefused, "nobody listens")
        .await;
    assert_eq!(refusal(&mut opened).await, RefusalCode::TargetRefused);
    drop(opened);
    eventually("it is recorded", || b.records.lock().len() == 1).await;
    let record = b.records.lock().remove(0);
    assert_eq!(record.end, StreamEnd::Refused(RefusalCode::TargetRefused));
    assert_eq!(record.detail, "nobody listens");
}

/// Each server decides for the agents that it holds, whatever the other server allows its callers.
#[tokio::test]
async fn forwarded_stream_to_a_port_that_its_holder_does_not_allow_is_refused() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    b.policy.replace(&PortPolicy::default().into());
    let mut refused = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut refused).await, RefusalCode::Policy);
    let lists = PortLists {
        localhost: "9100".parse().unwrap(),
        ..PortLists::default()
    };
    b.policy
        .replace(&PortPolicy::of_lists(lists, Vec::new()).into());
    let mut refused = a.open("x", None).await.unwrap();
    let code = refusal(&mut refused).await;
    assert_eq!(code, RefusalCode::Policy, "as a port of the loopback only");
    b.policy.replace(&fixture::policy().into());
    let _opened = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
}

#[tokio::test]
async fn refusal_of_the_agent_and_a_cut_pass() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut refused = a.open("x", None).await.unwrap();
    within(agent.stream().await.refuse(RefusalCode::Policy, "no")).await;
    assert_eq!(refusal(&mut refused).await, RefusalCode::Policy);
    let mut opened = a.open("x", None).await.unwrap();
    let mut target = agent.accepts().await;
    target.write_all(b"half").await.unwrap();
    let mut half = [0; 4];
    within(opened.stream.read_exact(&mut half)).await.unwrap();
    drop(target);
    let error = within(opened.stream.read(&mut half)).await.unwrap_err();
    let cut = find_cause::<StreamCut>(&error);
    assert!(matches!(cut, Some(StreamCut::Reset(_))), "{error}");
}

#[tokio::test]
async fn holder_without_the_node_is_forgotten_and_the_next_one_is_asked() {
    let installation = Installation::new();
    let [a, b, c] = installation.connected(["a", "b", "c"]).await;
    let agent = c.agent("x", 1);
    a.sees("x", &c).await;
    // The holder whose server stays is asked first.
    a.receive_claim("x", &b);
    a.peers.peer_leaves(&id("c"));
    let mut first = a.open("x", None).await.unwrap();
    assert_eq!(first.via, Via::Replica(id("b")));
    assert_eq!(refusal(&mut first).await, RefusalCode::NotHere);
    (a.routing).not_here(&node("x"), &first.via, first.forwarded.take());
    assert_eq!(a.peers.held_nodes(), [(node("x"), id("c"))]);
    let mut second = a.open("x", Some(&first.via)).await.unwrap();
    let _target = agent.accepts().await;
    within(second.stream.accepted()).await.unwrap();
}

#[tokio::test]
async fn refused_forwarded_stream_is_counted_once() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    a.receive_claim("x", &b);
    let mut opened = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut opened).await, RefusalCode::NotHere);
    (a.routing).not_here(&node("x"), &opened.via, opened.forwarded.take());
    drop(opened);
    let count = |result| {
        let counter = a.peers.metrics.counter(ForwardDirection::Out, result);
        counter.get()
    };
    let counts = [ForwardResult::Ok, ForwardResult::NotHere].map(count);
    assert_eq!(counts, [0, 1]);
}

#[tokio::test]
async fn late_not_here_keeps_what_was_announced_after_the_stream_was_opened() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    a.receive_claim("x", &b);
    let mut opened = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut opened).await, RefusalCode::NotHere);
    let before = announced(&a, "x", "b");
    let agent = b.agent("x", 1);
    eventually("x is announced again", || announced(&a, "x", "b") != before).await;
    (a.routing).not_here(&node("x"), &opened.via, opened.forwarded.take());
    let mut second = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
    within(second.stream.accepted()).await.unwrap();
}

#[tokio::test]
async fn server_never_forwards_a_forwarded_stream() {
    let installation = Installation::new();
    let [a, b, c] = installation.connected(["a", "b", "c"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    c.sees("x", &b).await;
    let announcement = announced(&c, "x", "b").unwrap();
    c.peers.not_here(&node("x"), &id("b"), announcement);
    c.receive_claim("x", &a);
    let mut opened = c.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut opened).await, RefusalCode::NotHere);
    let next = timeout(Duration::from_millis(50), agent.far.accept());
    next.await.unwrap_err();
}

#[tokio::test]
async fn stream_to_a_node_that_two_servers_claim_ends_after_both_were_asked() {
    let installation = Installation::new();
    let [a, b, c] = installation.connected(["a", "b", "c"]).await;
    a.receive_claim("x", &b);
    b.receive_claim("x", &a);
    c.receive_claim("x", &a);
    c.receive_claim("x", &b);
    let mut asked = Vec::new();
    for _ in 0..2 {
        let mut opened = c.open("x", asked.last()).await.unwrap();
        assert_eq!(refusal(&mut opened).await, RefusalCode::NotHere);
        (c.routing).not_here(&node("x"), &opened.via, opened.forwarded.take());
        asked.push(opened.via);
    }
    assert_ne!(asked[0], asked[1]);
    let third = c.open("x", asked.last()).await;
    assert!(matches!(third, Err(OpenError::NoAgent)), "{third:?}");
    assert!(!c.routing.is_held(&node("x")));
}

#[tokio::test]
async fn stream_prefers_a_holder_that_answers_to_one_whose_connection_is_suspect() {
    let limits = PeerLimits {
        streams: 8,
        directory_nodes: 8,
        buffer_pool: 1,
    };
    let peers = Peers::new(id("a"), limits, PeerMetrics::default());
    for name in ["b", "c"] {
        let (near, _far) = memory::pair();
        let (link, _asks) = Link::new(id(name), near, limits.streams);
        peers.expect(&fixture::address(name));
        peers.link_up(&link, &fixture::first_message(name));
        peers.apply(&id(name), fixture::claim("x"));
    }
    let first = |except: &[Via]| {
        peers.candidates(&node("x"), except).unwrap()[0]
            .link
            .clone()
    };
    let preferred = first(&[]);
    let via = Via::Replica(preferred.replica.clone());
    let other = first(&[via]);
    preferred.record_check(LinkCheck::Suspect);
    assert!(Arc::ptr_eq(&first(&[]), &other));
    assert_eq!(peers.preferred(&node("x")).as_ref(), Some(&other.replica));
    let via = Via::Replica(other.replica.clone());
    assert!(Arc::ptr_eq(&first(&[via]), &preferred));
    preferred.record_check(LinkCheck::Live);
    assert!(Arc::ptr_eq(&first(&[]), &preferred));
}

#[tokio::test]
async fn request_leaves_a_suspect_connection_once_another_server_holds_the_node() {
    let limits = PeerLimits {
        streams: 8,
        directory_nodes: 8,
        buffer_pool: 1,
    };
    let peers = Peers::new(id("a"), limits, PeerMetrics::default());
    let registry = Arc::new(Registry::new(RegistryLimits {
        streams_per_agent: 8,
        buffer_pool: POOL,
    }));
    let routing = Routing::new(registry, peers.clone());
    let holder = |name: &str| {
        let (near, far) = memory::pair();
        let (link, asks) = Link::new(id(name), near, limits.streams);
        peers.expect(&fixture::address(name));
        peers.link_up(&link, &fixture::first_message(name));
        peers.apply(&id(name), fixture::claim("x"));
        (link, far, asks)
    };
    let (link, _far, _asks) = holder("b");
    let (x, via) = (node("x"), Via::Replica(id("b")));
    let mut replaceable = pin!(routing.replaceable(&x, &via));
    assert!(!routing.is_suspect(&x, &via));
    assert!(replaceable.as_mut().now_or_never().is_none());

    link.record_check(LinkCheck::Suspect);
    assert!(routing.is_suspect(&x, &via));
    assert!(replaceable.as_mut().now_or_never().is_none());

    let _other = holder("c");
    within(replaceable).await;
    link.record_check(LinkCheck::Live);
    assert!(!routing.is_suspect(&x, &via));
}

#[tokio::test]
async fn holder_whose_agent_is_silent_is_not_forgotten() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let silent = SuspectReason::PeerHearsNothing;
    agent.session().set_suspect_reason(Some(silent));
    // The list of that server may already be without the node.
    a.receive_claim("x", &b);
    let mut opened = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut opened).await, RefusalCode::AgentSuspect);
}

#[tokio::test]
async fn loss_of_the_agents_session_is_no_reset_of_the_target() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut replied = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
    within(replied.stream.accepted()).await.unwrap();
    let mut pending = a.open("x", None).await.unwrap();
    let _unanswered = agent.stream().await;
    within(agent.near.close(CloseCode::Dead, "gone")).await;
    // An in-memory session notices its end at the next read or write.
    for opened in [&mut pending, &mut replied] {
        within(opened.stream.write_all(b"x")).await.unwrap();
    }
    let lost = Some(&StreamCut::Reset(ResetCode::SessionLost));
    let error = within(pending.stream.accepted()).await.unwrap_err();
    assert_eq!(find_cause::<StreamCut>(&error), lost, "before the reply");
    let error = within(replied.stream.read(&mut [0; 4])).await.unwrap_err();
    assert_eq!(find_cause::<StreamCut>(&error), lost, "after the reply");
    // The session is still registered.
    let mut refused = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut refused).await, RefusalCode::AgentLost);
}

#[tokio::test]
async fn limit_of_streams_holds_at_both_ends() {
    let installation = Installation::new();
    let a = installation.server_with("a", 2).await;
    let b = installation.server_with("b", 1).await;
    connect(&[&a, &b]).await;
    let agents = [a.agent("x", 1), b.agent("y", 1)];
    a.sees("y", &b).await;
    b.sees("x", &a).await;
    // One end counts what it opens.
    let first = b.open("x", None).await.unwrap();
    let second = b.open("x", None).await;
    assert!(
        matches!(second, Err(OpenError::PeerStreams(1))),
        "{second:?}"
    );
    drop(first);
    b.open("x", None).await.unwrap();
    // The other end counts what it accepts.
    let mut first = a.open("y", None).await.unwrap();
    let _target = agents[1].accepts().await;
    within(first.stream.accepted()).await.unwrap();
    let mut second = a.open("y", None).await.unwrap();
    assert_eq!(refusal(&mut second).await, RefusalCode::TooManyStreams);
}

#[tokio::test]
async fn forwarded_stream_without_memory_at_the_holder_is_refused() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut others = b.pool.permit();
    assert!(others.grow(b.pool.limit() - b.pool.reserved()));
    let mut refused = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut refused).await, RefusalCode::TooManyStreams);
    others.release();
    let mut opened = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
    within(opened.stream.accepted()).await.unwrap();
}

#[tokio::test]
async fn idle_streams_are_kept_while_a_connection_has_streams_to_spare() {
    let installation = Installation::new();
    let a = installation.server_with("a", 8).await;
    let b = installation.server("b").await;
    connect(&[&a, &b]).await;
    let _agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = Vec::new();
    for is_spare in [true, true, false] {
        opened.push(a.open("x", None).await.unwrap());
        let via = &opened[0].via;
        assert_eq!(a.routing.can_reuse(&node("x"), via), is_spare);
        assert_eq!(a.routing.active(&node("x")).as_ref(), Some(via));
    }
}

#[tokio::test]
async fn stream_of_another_server_gets_the_permit_of_an_evicted_one() {
    let installation = Installation::new();
    let a = installation.server_with("a", 60).await;
    let b = installation.server_with("b", 60).await;
    connect(&[&a, &b]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    // Three quarters of the agent's streams.
    let mut open = Vec::new();
    for _ in 0..48 {
        let opened = a.open("x", None).await.unwrap();
        open.push((opened, agent.accepts().await));
    }
    let mut refused = a.open("x", None).await.unwrap();
    assert_eq!(refusal(&mut refused).await, RefusalCode::TooManyStreams);
    let (via, caller) = (&refused.via, CallerKey::Local(None));
    assert!(!a.routing.evict_idle(&node("x"), via).await, "none is idle");
    let entry = a.routing.keep_idle(&node("x"), via, &caller);
    assert!(a.routing.evict_idle(&node("x"), via).await);
    assert!(entry.is_evicted());
    open.pop();
    let mut next = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
    within(next.stream.accepted()).await.unwrap();
}

#[tokio::test]
async fn server_with_a_wrong_name_is_refused() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let own = installation.dial_as("a", &a).await;
    let wrong = installation.dial_as("c", &a).await;
    let (_reader, mut writer) = control(&wrong).await;
    writer.send(&hello("b")).await.unwrap();
    for session in [own, wrong] {
        let reason = within(session.closed()).await;
        assert_eq!(
            (reason.by, reason.code),
            (ClosedBy::Peer, CloseCode::Protocol)
        );
    }
}

#[tokio::test]
async fn silent_connections_from_other_addresses_do_not_lock_out_a_server() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    // As many as fit. In their first second they are not evicted by connections of their own
    // address.
    let mut crowd = Vec::new();
    for number in 0..128 {
        let address = ["127.0.0.2:0", "127.0.0.3:0"][number / 64];
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(address.parse().unwrap()).unwrap();
        crowd.push(within(socket.connect(a.address)).await.unwrap());
    }
    let session = installation.dial_as("c", &a).await;
    let (mut reader, mut writer) = control(&session).await;
    writer.send(&hello("c")).await.unwrap();
    let first = within(reader.receive()).await.unwrap();
    assert!(matches!(first, Some(PeerMessage::Hello(_))), "{first:?}");
}

#[tokio::test]
async fn newer_connection_of_a_server_replaces_the_older_one() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        let session = installation.dial_as("c", &a).await;
        let (mut reader, mut writer) = control(&session).await;
        writer.send(&hello("c")).await.unwrap();
        // The second message shows that the connection is ready.
        let first = within(reader.receive()).await.unwrap();
        assert!(matches!(first, Some(PeerMessage::Hello(_))), "{first:?}");
        let second = within(reader.receive()).await.unwrap();
        assert!(matches!(second, Some(PeerMessage::Holds(_))), "{second:?}");
        sessions.push((session, reader, writer));
    }
    for (session, ..) in &sessions[..2] {
        let reason = within(session.closed()).await;
        assert_eq!(reason.code, CloseCode::Superseded);
    }
    let newest = timeout(Duration::from_millis(50), sessions[2].0.closed());
    newest.await.unwrap_err();
}

#[tokio::test]
async fn only_one_connection_that_was_replaced_keeps_its_streams() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let agent = a.agent("x", 1);
    let port = Port::new(9100).unwrap();
    let forwarded = StreamHeader::new(StreamKind::Forward {
        node: node("x"),
        target: Target::Node(port),
        is_verified: true,
    });
    let mut opened = Vec::new();
    for _ in 0..4 {
        let session = installation.dial_as("c", &a).await;
        let (reader, mut writer) = control(&session).await;
        writer.send(&hello("c")).await.unwrap();
        let stream = within(session.open(&forwarded, LIMIT)).await.unwrap();
        opened.push((session, reader, writer, stream, agent.accepts().await));
    }
    for (session, ..) in &opened[..2] {
        let reason = within(session.closed()).await;
        assert_eq!(reason.code, CloseCode::Superseded);
    }
    for (.., stream, target) in &mut opened[2..] {
        target.write_all(b"more").await.unwrap();
        let mut more = [0; 4];
        within(stream.read_exact(&mut more)).await.unwrap();
    }
}

#[tokio::test]
async fn server_that_is_removed_and_added_again_keeps_its_connection_and_streams() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let c = installation.server("c").await;
    let d = installation.server("d").await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = a.open("x", None).await.unwrap();
    let mut target = agent.accepts().await;
    let since = a.peers.status()[0].since;
    a.dial(&[&c]);
    eventually("b is removed", || a.peers.connected() == 2).await;
    assert!(a.peers.holds(&node("x")));
    a.dial(&[&b, &c, &d]);
    eventually("b is added again", || a.peers.connected() == 3).await;
    target.write_all(b"more").await.unwrap();
    let mut more = [0; 4];
    within(opened.stream.read_exact(&mut more)).await.unwrap();
    assert_eq!(a.peers.status()[0].since, since, "b was dialed again");
}

#[tokio::test]
async fn server_at_another_address_is_dialed_and_streams_of_the_older_connection_go_on() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut older = a.open("x", None).await.unwrap();
    let mut older_target = agent.accepts().await;
    let since = a.peers.status()[0].since;
    let address = b.forward_port().await;
    a.dial_at(&b, address);
    let is_replaced = || a.peers.status()[0].since != since;
    eventually("the other address is connected", is_replaced).await;
    assert_eq!(a.peers.status()[0].address, address.to_string());
    let mut newer = a.open("x", None).await.unwrap();
    let mut newer_target = agent.accepts().await;
    for (opened, target) in [
        (&mut older, &mut older_target),
        (&mut newer, &mut newer_target),
    ] {
        target.write_all(b"more").await.unwrap();
        let mut more = [0; 4];
        within(opened.stream.read_exact(&mut more)).await.unwrap();
    }
}

#[tokio::test]
async fn server_that_leaves_is_marked_and_still_carries_streams() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    b.peers.leave();
    assert_eq!(b.members(), ["-b", "a"]);
    eventually("b leaves", || a.members() == ["a", "-b"]).await;
    let mut opened = a.open("x", None).await.unwrap();
    let _target = agent.accepts().await;
    within(opened.stream.accepted()).await.unwrap();
}

#[tokio::test]
async fn server_that_leaves_gets_no_stream_of_a_node_that_is_held_elsewhere() {
    let installation = Installation::new();
    let [a, b, c] = installation.connected(["a", "b", "c"]).await;
    let names: Vec<_> = (0..8).map(|number| format!("x{number}")).collect();
    let mut agents = Vec::new();
    for name in &names {
        agents.extend([b.agent(name, 1), c.agent(name, 1)]);
        a.sees(name, &b).await;
        a.sees(name, &c).await;
    }
    b.peers.leave();
    eventually("b leaves", || a.members() == ["a", "-b", "c"]).await;
    for name in &names {
        assert_eq!(a.peers.preferred(&node(name)), Some(id("c")), "{name}");
        let opened = a.open(name, None).await.unwrap();
        assert_eq!(opened.via, Via::Replica(id("c")), "{name}");
    }
}

#[tokio::test]
async fn reply_that_was_sent_arrives_although_the_server_stops() {
    let installation = Installation::new();
    let [a, b] = installation.connected(["a", "b"]).await;
    let agent = b.agent("x", 1);
    a.sees("x", &b).await;
    let mut opened = a.open("x", None).await.unwrap();
    let mut target = agent.accepts().await;
    within(opened.stream.shutdown()).await.unwrap();
    let (reply, mut received) = (vec![7; 100_000], Vec::new());
    within(target.read_to_end(&mut received)).await.unwrap();
    target.write_all(&reply).await.unwrap();
    within(target.shutdown()).await.unwrap();
    let stopping = async {
        let drained = b.shutdown.drain_within(LIMIT).await;
        assert_eq!(drained, DrainOutcome::Complete);
        b.stop().await;
    };
    let reading = within(opened.stream.read_to_end(&mut received));
    let (result, ()) = tokio::join!(reading, stopping);
    result.unwrap();
    assert!(received == reply, "{} bytes", received.len());
}

#[tokio::test]
async fn orders_reach_servers_that_connect_later() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let b = installation.server("b").await;
    let order = |name, counter| NodeOrder {
        node: node(name),
        order: Order {
            counter,
            ..Order::default()
        },
    };
    let orders = [order("x", 5), order("y", 6)];
    a.peers.set_orders(orders.to_vec());
    connect(&[&a, &b]).await;
    for expected in &orders {
        let is_known = || b.orders.lock().contains(expected);
        eventually("the order is known", is_known).await;
    }
    assert_eq!(a.peers.holders_of(&orders), [(id("b"), false)].into());
    // Either end of a connection learns from the other.
    b.peers.set_orders(vec![order("z", 7)]);
    let is_known = || a.orders.lock().contains(&order("z", 7));
    eventually("the order is known", is_known).await;
    b.peers.set_orders(orders.to_vec());
    let is_same = || a.peers.holders_of(&orders) == [(id("b"), true)].into();
    eventually("both know the same", is_same).await;
}

#[tokio::test]
async fn ca_of_another_server_is_known_while_it_is_connected() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let b = installation.server("b").await;
    b.peers.set_ca([1; 32]);
    a.peers.expect(&fixture::address("b"));
    assert_eq!(a.peers.announced_cas(), [(id("b"), None)].into());
    // Only b dials.
    b.dial(&[&a]);
    let peers = a.peers.clone();
    let is = |ca: Option<[u8; 32]>| {
        let peers = peers.clone();
        move || peers.announced_cas() == [(id("b"), ca)].into()
    };
    eventually("the CA of b", is(Some([1; 32]))).await;
    b.peers.set_ca([2; 32]);
    eventually("the next CA of b", is(Some([2; 32]))).await;
    b.stop().await;
    eventually("b is gone", is(None)).await;
}

#[tokio::test]
async fn servers_say_which_certificates_they_know_and_one_that_is_gone_is_left_out() {
    let installation = Installation::new();
    let [a, b, c] = installation.connected(["a", "b", "c"]).await;
    let agents: Vec<_> = [(&b, "x"), (&b, "y"), (&b, "z"), (&c, "x")]
        .into_iter()
        .map(|(server, name)| server.agent(name, 1))
        .collect();
    let fetched = || async {
        let (until, none) = (Instant::now() + LIMIT, Answers::default());
        let fetching = a.peers.fetch_certificates(until, none, Answers::add);
        let answers = fetching.await.unwrap();
        let runtime = std::thread::current().id();
        assert!(!answers.threads.contains(&runtime), "merged in the runtime");
        answers.names
    };
    let all = BTreeMap::from([
        (id("b"), BTreeSet::from([node("x"), node("y"), node("z")])),
        (id("c"), BTreeSet::from([node("x")])),
    ]);
    assert_eq!(fetched().await, all);
    assert!(
        a.peers.agents_move_for().is_some(),
        "connected a moment ago"
    );
    a.sees("y", &b).await;
    a.sees("z", &b).await;
    let none = BTreeSet::new();
    assert!(a.peers.gone_nodes(&none).is_empty());
    let gone = BTreeSet::from([node("y"), node("z")]);
    let lost = async {
        let is_lost = || a.peers.gone_nodes(&none) == gone;
        eventually("the nodes of a server that is gone", is_lost).await;
    };
    tokio::join!(b.stop(), lost);
    assert_eq!(fetched().await.into_keys().collect::<Vec<_>>(), [id("c")]);
    // The server leaves the list, and its agents are still known to nobody.
    a.follow([c.listed()]);
    eventually("b is no longer expected", || {
        a.peers.status().iter().all(|other| other.id != id("b"))
    })
    .await;
    for at_once in 1..4 {
        assert_eq!(a.peers.gone_nodes_in_parts(&none, at_once), gone);
    }
    let (y, z) = (BTreeSet::from([node("y")]), BTreeSet::from([node("z")]));
    assert_eq!(a.peers.gone_nodes_in_parts(&y, 1), z);
    assert_eq!(a.peers.gone_nodes(&none), z, "y was here");
    drop(agents);
}

#[tokio::test]
async fn hash_of_the_configuration_is_known_to_the_other_end_after_each_change() {
    let installation = Installation::new();
    let a = installation.server("a").await;
    let b = installation.server("b").await;
    a.peers.set_configuration([1; 32]);
    b.dial(&[&a]);
    let peers = a.peers.clone();
    let is = |others: &[(ReplicaId, [u8; 32])]| {
        let others: BTreeMap<_, _> = others.iter().cloned().collect();
        let peers = peers.clone();
        move || peers.configurations() == (Some([1; 32]), others.clone())
    };
    // A server that says nothing is no difference.
    assert!(is(&[])());
    for hash in [[2; 32], [1; 32]] {
        b.peers.set_configuration(hash);
        eventually("the hash of b", is(&[(id("b"), hash)])).await;
    }
    b.stop().await;
    eventually("b is gone", is(&[])).await;
}

/// The nodes that other servers said, and the threads that added them.
#[derive(Default)]
struct Answers {
    names: BTreeMap<ReplicaId, BTreeSet<NodeName>>,
    threads: Vec<ThreadId>,
}

impl Answers {
    fn add(&mut self, replica: ReplicaId, answer: Result<Vec<NodeCertificate>, FetchError>) {
        let names = answer.unwrap().into_iter().map(|node| node.node);
        self.names.insert(replica, names.collect());
        self.threads.push(std::thread::current().id());
    }
}

/// Returns what a server received about a node from `holder`.
fn announced(server: &Server, name: &str, holder: &str) -> Option<Announcement> {
    let state = server.peers.state.lock();
    state.directory.announcement(&node(name), &id(holder))
}
