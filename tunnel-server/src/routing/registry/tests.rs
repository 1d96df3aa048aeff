use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{CloseReason, ClosedBy, Session};
use tunnel_proto::wire::code::CloseCode;

use super::*;
use crate::routing::OpenStream;
use crate::testing::{self, POOL, WAIT_TIMEOUT, assert_contains, header, node};

const OPERATOR: CallerKey = CallerKey::Local(None);

fn registry() -> Arc<Registry> {
    Arc::new(Registry::new(RegistryLimits {
        streams_per_agent: 2,
        buffer_pool: POOL,
    }))
}

/// A registered session, with the server's end and the agent's end.
struct Member {
    registration: Registration,
    near: Arc<MemorySession>,
    far: Arc<dyn Session>,
}

impl Member {
    fn session(&self) -> &Arc<AgentSession> {
        self.registration.session()
    }

    fn id(&self) -> SessionId {
        self.session().id
    }

    fn via(&self) -> Via {
        Via::Local(self.id())
    }

    fn suspect(&self) {
        let reason = SuspectReason::PeerHearsNothing;
        self.session().set_suspect_reason(Some(reason));
    }
}

fn try_join(
    registry: &Arc<Registry>,
    node: NodeName,
    instance: u8,
    yielded: &[SessionId],
) -> Result<Member, RegisterError> {
    let (near, far) = memory::pair();
    let instance = InstanceId::new([instance; 16]);
    let entry = AgentSession::new(registry.next_id(), node, instance, near.clone());
    let registration = registry.register(entry, yielded)?;
    Ok(Member {
        registration,
        near,
        far,
    })
}

fn join(registry: &Arc<Registry>) -> Member {
    try_join(registry, node(), 1, &[]).unwrap()
}

/// Waits until sessions that were just registered take streams like older ones.
async fn takeover() {
    tokio::time::advance(TAKEOVER_DELAY).await;
}

async fn open(registry: &Arc<Registry>) -> Result<OpenStream, OpenError> {
    testing::open(registry, &node(), &OPERATOR).await
}

/// An agent names the sessions that it lost, and the server may be another process by then.
#[test]
fn ids_of_sessions_differ_from_those_of_other_processes() {
    let limits = RegistryLimits {
        streams_per_agent: 1,
        buffer_pool: 1,
    };
    let ids = || {
        let registry = Registry::new(limits);
        Vec::from_iter((0..100).map(|_| registry.next_id()))
    };
    let (of_first, of_second) = (ids(), ids());
    assert!(of_first.is_sorted() && !of_first.iter().any(|id| of_second.contains(id)));
}

#[tokio::test]
async fn late_goodbye_of_old_session_keeps_new_one() {
    let registry = registry();
    let (old, new) = (join(&registry), join(&registry));
    drop(old);
    let left = registry.of_node(&node());
    assert_eq!((left.len(), left[0].id), (1, new.id()));
}

#[tokio::test]
async fn suspect_node_stays_held_until_its_agent_withdraws() {
    let registry = registry();
    let member = join(&registry);
    member.suspect();
    assert!(registry.held_node(&node()).is_some());
    member.session().withdraw();
    assert!(registry.held_node(&node()).is_none());
}

#[tokio::test]
async fn node_changes_when_a_session_is_registered_withdrawn_or_removed() {
    let registry = registry();
    let first = join(&registry);
    let changed = || registry.take_changed_nodes().len();
    assert_eq!((changed(), changed()), (1, 0), "all nodes at first");
    let second = join(&registry);
    assert_eq!((changed(), changed()), (1, 0));
    first.suspect();
    assert_eq!(changed(), 0);
    first.session().withdraw();
    first.session().withdraw();
    assert_eq!((changed(), changed()), (1, 0));
    assert!(registry.held_node(&node()).is_some(), "by the second one");
    drop(second);
    assert_eq!((changed(), changed()), (1, 0));
    registry.nodes_changed().await;
}

#[tokio::test(start_paused = true)]
async fn silent_session_yields_to_a_newer_one_at_once() {
    let registry = registry();
    let old = join(&registry);
    takeover().await;
    let newer = join(&registry);
    assert_eq!(
        registry.active(&node()),
        Some(old.via()),
        "the session answers"
    );
    drop(newer);
    old.near.script().is_silent = true;
    tokio::time::advance(SILENCE * 2).await;
    let newer = join(&registry);
    assert_eq!(registry.active(&node()), Some(newer.via()));
}

#[tokio::test]
async fn other_instance_is_let_in_only_after_the_live_one_yielded() {
    let registry = registry();
    let first = join(&registry);
    let Err(RegisterError::InUse(in_the_way)) = try_join(&registry, node(), 2, &[]) else {
        panic!("a live session was ignored");
    };
    assert_eq!(in_the_way.id, first.id());
    assert!(try_join(&registry, node(), 3, &[in_the_way.id]).is_ok());
    first.session().withdraw();
    let after = try_join(&registry, node(), 4, &[]);
    assert!(after.is_ok(), "a session that withdrew yields at once");
}

#[tokio::test]
async fn node_at_its_limit_loses_a_session_that_takes_no_streams_first_one_without_any() {
    let registry = registry();
    let mut members: Vec<_> = (0..SESSIONS_PER_NODE).map(|_| join(&registry)).collect();
    let is_full = || {
        let newcomer = try_join(&registry, node(), 1, &[]);
        matches!(newcomer, Err(RegisterError::TooManySessions))
    };
    assert!(is_full(), "all are in use");
    let _stream = members[1].session().count_stream();
    members[2].suspect();
    members[1].session().withdraw();
    for expected in [2, 1] {
        let mut newcomer = join(&registry);
        let superseded = newcomer.registration.superseded().unwrap();
        assert_eq!(superseded.id, members[expected].id());
        assert!(superseded.is_closing() && !superseded.is_routable());
        members.push(newcomer);
    }
    assert!(is_full(), "sessions that are closing make room once");
    let other: NodeName = "worker-2".parse().unwrap();
    assert!(try_join(&registry, other, 1, &[]).is_ok(), "another node");
}

#[tokio::test(start_paused = true)]
async fn lost_session_gives_way_to_the_spare() {
    let registry = registry();
    assert!(matches!(open(&registry).await, Err(OpenError::NoAgent)));
    let (spare, active) = (join(&registry), join(&registry));
    takeover().await;
    active.far.close(CloseCode::Normal, "gone").await;
    assert_eq!(open(&registry).await.unwrap().via, spare.via());
}

#[tokio::test(start_paused = true)]
async fn newer_session_of_the_same_agent_takes_new_streams_and_the_older_keeps_its_own() {
    let registry = registry();
    let old = join(&registry);
    let mut before = open(&registry).await.unwrap().stream;
    let new = join(&registry);
    takeover().await;
    assert_eq!(open(&registry).await.unwrap().via, new.via());
    let incoming = old.far.accept().await.unwrap();
    let header = incoming.header(Instant::now() + WAIT_TIMEOUT);
    let (_, mut accepted) = header.await.unwrap();
    accepted.accept("").await.unwrap();
    accepted.write_all(b"goes on").await.unwrap();
    let mut got = [0; 7];
    before.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"goes on");
}

/// An agent that looks for another server may reach this one again, and then closes the newcomer.
#[tokio::test(start_paused = true)]
async fn newcomer_takes_no_streams_for_a_second_while_an_older_session_does() {
    let registry = registry();
    let old = join(&registry);
    assert_eq!(registry.active(&node()), Some(old.via()), "alone");
    let (newer, newest) = (join(&registry), join(&registry));
    let order = [&old, &newer, &newest];
    for (seen, expected) in order.iter().enumerate() {
        assert_eq!(registry.active(&node()), Some(expected.via()), "{seen}");
        assert_eq!(open(&registry).await.unwrap().via, expected.via());
        assert!(registry.can_reuse(&node(), expected.id()), "{seen}");
        expected.session().withdraw();
    }
}

#[tokio::test(start_paused = true)]
async fn newcomer_that_stays_for_a_second_replaces_the_older_session() {
    let registry = registry();
    let old = join(&registry);
    takeover().await;
    let new = join(&registry);
    for expected in [&old, &new] {
        assert_eq!(registry.active(&node()), Some(expected.via()));
        for member in [&old, &new] {
            let is_active = member.id() == expected.id();
            assert_eq!(registry.can_reuse(&node(), member.id()), is_active);
        }
        takeover().await;
    }
    // The older session is the spare, also of one that left within its first second.
    let brief = join(&registry);
    brief.session().withdraw();
    assert_eq!(registry.active(&node()), Some(new.via()));
    drop(new);
    assert_eq!(registry.active(&node()), Some(old.via()));
}

#[tokio::test(start_paused = true)]
async fn suspect_session_is_left_out_until_it_is_trusted_again() {
    let registry = registry();
    let (spare, active) = (join(&registry), join(&registry));
    takeover().await;
    active.suspect();
    assert_eq!(open(&registry).await.unwrap().via, spare.via());
    active.session().set_suspect_reason(None);
    assert_eq!(open(&registry).await.unwrap().via, active.via());
}

#[tokio::test(start_paused = true)]
async fn node_with_suspect_sessions_alone_is_refused_at_once() {
    let registry = registry();
    let member = join(&registry);
    let since = Instant::now();
    tokio::time::advance(Duration::from_secs(7)).await;
    let silent = SuspectReason::Silent(since);
    member.session().set_suspect_reason(Some(silent));
    let began = Instant::now();
    let error = open(&registry).await.unwrap_err();
    assert_eq!(began, Instant::now(), "it waited");
    assert!(matches!(error, OpenError::Suspect(doubt) if doubt == silent));
    assert_contains(&error, "nothing received for 7 s");
    member.session().withdraw();
    assert!(matches!(open(&registry).await, Err(OpenError::Draining)));
}

#[tokio::test(start_paused = true)]
async fn places_are_shared_by_all_sessions_of_an_agent_and_come_back() {
    let registry = registry();
    let _old = join(&registry);
    let first = open(&registry).await.unwrap();
    let new = join(&registry);
    let _second = open(&registry).await.unwrap();
    let Err(OpenError::TooManyStreams(exhausted)) = open(&registry).await else {
        panic!("a third stream");
    };
    assert_eq!(
        (exhausted.quota, exhausted.streams),
        (StreamQuota::Agent, 2)
    );
    // Another agent has its own limit.
    let other: NodeName = "worker-2".parse().unwrap();
    let _other = try_join(&registry, other.clone(), 2, &[]).unwrap();
    assert!(testing::open(&registry, &other, &OPERATOR).await.is_ok());
    drop(first);
    takeover().await;
    assert_eq!(open(&registry).await.unwrap().via, new.via());
}

#[tokio::test(start_paused = true)]
async fn idle_stream_yields_to_a_new_one_that_finds_no_permit() {
    let registry = registry();
    let member = join(&registry);
    let first = open(&registry).await.unwrap();
    let _second = open(&registry).await.unwrap();
    let entry = registry.keep_idle(&node(), &member.via(), &OPERATOR);
    let owner = async move {
        poll_fn(|cx| entry.poll_evicted(cx)).await;
        drop(first);
    };
    let (third, ()) = tokio::join!(open(&registry), owner);
    let _third = third.unwrap();
    let fourth = open(&registry).await;
    assert!(matches!(fourth, Err(OpenError::TooManyStreams(_))));
}

#[tokio::test(start_paused = true)]
async fn stream_waits_for_the_permit_of_an_evicted_one_while_other_shares_are_released() {
    let registry = Arc::new(Registry::new(RegistryLimits {
        streams_per_agent: 4,
        buffer_pool: POOL,
    }));
    let member = join(&registry);
    let caller = CallerKey::Source([192, 0, 2, 1].into());
    let open_as =
        async |caller: &CallerKey| testing::open(&registry, &node(), caller).await.unwrap();
    let other = open_as(&OPERATOR).await;
    // Half of the agent's streams.
    let (first, _second) = (open_as(&caller).await, open_as(&caller).await);
    let entry = registry.keep_idle(&node(), &member.via(), &caller);
    let owner = async move {
        poll_fn(|cx| entry.poll_evicted(cx)).await;
        drop(other);
        // The new stream sees that release first.
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        drop(first);
    };
    let (_third, ()) = tokio::join!(open_as(&caller), owner);
}

#[tokio::test]
async fn idle_streams_over_other_servers_have_a_share_of_a_quarter() {
    let registry = Registry::new(RegistryLimits {
        streams_per_agent: 32,
        buffer_pool: POOL,
    });
    let via = Via::Replica("server-1".parse().unwrap());
    let mut entries = Vec::new();
    for (servers, share) in [(9, 1), (3, 2), (1, 8)] {
        while entries.len() < share {
            assert!(registry.can_keep_idle(&node(), &via, servers), "{servers}");
            entries.push(registry.keep_idle(&node(), &via, &OPERATOR));
        }
        assert!(!registry.can_keep_idle(&node(), &via, servers), "{servers}");
    }
}

#[tokio::test]
async fn agent_whose_stalled_readers_hold_too_much_gets_no_new_streams_on_any_session() {
    let registry = registry();
    let (old, _new) = (join(&registry), join(&registry));
    old.near.script().is_full = true;
    let error = open(&registry).await.unwrap_err();
    assert!(matches!(error, OpenError::BufferPoolFull(POOL)), "{error}");
    assert_contains(&error, "limits.bufferPool, 64MiB");
    old.near.script().is_full = false;
    assert!(open(&registry).await.is_ok());
}

#[tokio::test]
async fn stalled_readers_of_a_session_that_takes_no_streams_refuse_none() {
    let registry = registry();
    let (old, new) = (join(&registry), join(&registry));
    old.near.script().is_full = true;
    old.session().withdraw();
    assert_eq!(open(&registry).await.unwrap().via, new.via());
}

#[tokio::test]
async fn session_that_refused_is_left_out() {
    let registry = registry();
    let only = join(&registry);
    let (node, except) = (node(), [only.via()]);
    let request = StreamRequest {
        node: &node,
        header: header(),
        caller_key: &OPERATOR,
        limit: WAIT_TIMEOUT,
    };
    let again = async || registry.open(&request, &except).await;
    let refused = again().await.unwrap_err();
    assert!(matches!(refused.error, OpenError::Draining));
    assert_eq!(refused.via, None);
    let new = join(&registry);
    assert_eq!(again().await.unwrap().via, new.via());
}

#[tokio::test]
async fn busy_is_reported_for_the_first_stream_only() {
    let registry = registry();
    let member = join(&registry);
    let is_busy = async || {
        let busy = tokio::time::timeout(Duration::from_millis(20), member.session().busy());
        busy.await.is_ok()
    };
    let first = open(&registry).await.unwrap();
    assert!(is_busy().await);
    let second = open(&registry).await.unwrap();
    assert!(!is_busy().await);
    drop((first, second));
    let _third = open(&registry).await.unwrap();
    assert!(is_busy().await);
}

#[tokio::test]
async fn end_is_reported_with_the_reason_that_closed_it_first_unless_the_agent_or_network_did() {
    let registry = registry();
    let member = join(&registry);
    let reason = |by| CloseReason {
        by,
        code: CloseCode::Normal,
        reason: "closed".into(),
    };
    let end = |by| member.session().end(reason(by)).code;
    assert_eq!(end(ClosedBy::Local), CloseCode::Normal);
    let session = member.session();
    session.close(CloseCode::Dead, "silent").await;
    session.close(CloseCode::Draining, "stopping").await;
    assert_eq!(member.far.closed().await.code, CloseCode::Dead);
    assert_eq!(end(ClosedBy::Local), CloseCode::Dead);
    assert_eq!(end(ClosedBy::Peer), CloseCode::Normal);
    assert_eq!(end(ClosedBy::Network), CloseCode::Normal);
}
