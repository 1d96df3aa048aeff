use tokio::time::sleep;
use tunnel_proto::transport::memory;

use super::*;
use crate::testing::{ADVERTISED, Agent, Bench, eventually, node, within};

fn closed_with(bench: &Bench, code: &str) -> Option<u64> {
    let ends = format!("tunnel_server_session_ends_total{{code=\"{code}\"}}");
    bench.metric(&ends)
}

/// Checks that an agent is refused with this code, and its session closed. Returns the detail.
async fn is_refused(agent: Agent, answer: &ControlMessage, code: CloseCode) -> &str {
    let ControlMessage::NotAdmitted(refused, detail) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(*refused, code, "{detail}");
    drop((agent.reader, agent.writer));
    assert_eq!(agent.far.closed().await.code, code);
    detail
}

/// A connected agent holds these futures, so state that only admission needs must not remain in
/// them.
#[test]
fn session_at_rest_is_small() {
    fn future<'a, A, F>(_: impl FnOnce(&'a Sessions, A) -> F) -> usize {
        size_of::<F>()
    }
    let (serving, running) = (future(Sessions::serve), future(Sessions::run));
    assert!(
        serving <= 384 && running <= 2048,
        "{serving}, {running} bytes"
    );
}

#[tokio::test(start_paused = true)]
async fn other_instance_is_refused_while_the_first_answers() {
    let (bench, first) = Bench::with_agent().await;
    let (second, answer) = bench.connect_agent(2, 4096).await;
    let detail = is_refused(second, &answer, CloseCode::NameInUse).await;
    assert!(detail.contains("worker-1"), "{detail}");
    assert_eq!(bench.sessions.registry.of_node(&node()).len(), 1);
    let failures = bench.sessions.failures.all();
    let [failure] = &failures[..] else {
        panic!("{failures:?}");
    };
    let refused = (failure.code, &failure.node);
    assert_eq!(refused, ("name_in_use", &FailedNode::Verified(node())));
    assert!(failure.detail.contains("cloned disk"), "{failure:?}");
    let counted = "tunnel_server_agent_failures_total{code=\"name_in_use\"}";
    assert_eq!(bench.metric(counted), Some(1));
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn session_above_the_limit_of_all_sessions_is_refused() {
    let (bench, first) = Bench::with_agent().await;
    let free = bench.sessions.permits.available_permits();
    let taken = bench
        .sessions
        .permits
        .try_acquire_many(u32::try_from(free).unwrap());
    let (near, far) = memory::pair();
    bench.sessions.serve(near).await;
    assert_eq!(far.closed().await.code, CloseCode::Overloaded);
    let reached = "tunnel_server_limits_reached_total{limit=\"sessionsTotal\"}";
    assert_eq!(bench.metric(reached), Some(1));
    drop((taken, first));
    let _admitted = bench.agent(2).await;
}

#[tokio::test(start_paused = true)]
async fn welcome_names_this_server_and_all_that_agents_may_dial() {
    let bench = Bench::new();
    let (_agent, answer) = bench.connect_agent(1, 4096).await;
    let ControlMessage::Welcome(welcome) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(welcome.replica_id, *bench.sessions.peers.own());
    let own = Member {
        id: "server-1".parse().unwrap(),
        addresses: vec![ADVERTISED.into()],
        is_leaving: false,
        zone: None,
    };
    assert_eq!(welcome.members, [own]);
}

#[tokio::test(start_paused = true)]
async fn process_with_four_sessions_gets_a_fifth_when_one_is_withdrawn() {
    let bench = Bench::new();
    let mut four = Vec::new();
    for _ in 0..4 {
        four.push(bench.agent(1).await);
    }
    let (refused, answer) = bench.connect_agent(1, 4096).await;
    is_refused(refused, &answer, CloseCode::TooManySessions).await;
    let oldest = bench.sessions.registry.of_node(&node()).pop().unwrap();
    oldest.withdraw();
    let _fifth = bench.agent(1).await;
    assert_eq!(four[0].far.closed().await.code, CloseCode::Superseded);
}

#[tokio::test(start_paused = true)]
async fn silent_session_gives_way_to_another_instance_after_a_second() {
    let (bench, first) = Bench::with_agent().await;
    first.near.script().is_silent = true;
    let began = Instant::now();
    let _second = bench.agent(2).await;
    let probed = began.elapsed();
    assert!(
        (Duration::from_secs(1)..Duration::from_secs(2)).contains(&probed),
        "{probed:?}"
    );
    assert_eq!(first.far.closed().await.code, CloseCode::Superseded);
    sleep(Duration::from_secs(1)).await;
    let left = bench.sessions.registry.of_node(&node());
    assert_eq!(left[0].instance.as_bytes(), &[2; 16]);
    assert_eq!(left.len(), 1);
    assert_eq!(closed_with(&bench, "superseded"), Some(1));
}

/// `tunnel-agent doctor` opens such a session.
#[tokio::test(start_paused = true)]
async fn session_that_ends_before_hello_is_not_the_last_close_of_its_node() {
    let bench = Bench::new();
    let (near, far) = memory::pair();
    far.close(CloseCode::Normal, "").await;
    bench.sessions.clone().serve(near).await;
    assert!(bench.sessions.registry.last_close(&node()).is_none());
}

#[tokio::test(start_paused = true)]
async fn instance_that_withdrew_yields_without_a_probe() {
    let (bench, mut first) = Bench::with_agent().await;
    first.send(ControlMessage::Withdraw).await;
    let withdrawn = || bench.sessions.registry.of_node(&node())[0].is_withdrawn();
    eventually("withdrawn", withdrawn).await;
    let began = Instant::now();
    let _second = bench.agent(2).await;
    assert!(began.elapsed() < Duration::from_millis(20));
}

#[tokio::test(start_paused = true)]
async fn agent_that_does_not_take_its_welcome_is_not_kept() {
    let bench = Bench::new();
    // The stream is too narrow for Welcome, because the agent does not read.
    let agent = bench.hello(1, 2).await;
    let began = Instant::now();
    let reason = within(agent.far.closed()).await;
    assert_eq!(reason.code, CloseCode::HandshakeTimeout);
    assert_eq!(
        began.elapsed(),
        bench.sessions.limits.load().handshake_timeout
    );
    eventually("gone", || bench.sessions.registry.all().is_empty()).await;
    let agents = bench.metric("tunnel_server_agents{transport=\"quic\"}");
    assert_eq!(agents, Some(0));
}

#[tokio::test(start_paused = true)]
async fn leaving_server_sends_an_agent_to_another_one() {
    let bench = Bench::new();
    bench.sessions.shutdown.leaving().cancel();
    let (agent, answer) = bench.connect_agent(1, 4096).await;
    is_refused(agent, &answer, CloseCode::Draining).await;
    assert!(bench.sessions.registry.all().is_empty());
}

/// F36: a panic while a session is being admitted or served ends only that session, and the server
/// continues to serve others.
#[tokio::test(start_paused = true)]
async fn f36_panic_in_a_session_costs_that_session_alone() {
    tunnel_process::panics::install_hook();
    let before = tunnel_process::panics::count();
    let bench = Bench::new();
    let (near, far) = memory::pair();
    near.script().is_panicking = true;
    let (sessions, serving) = (bench.sessions.clone(), near.clone());
    let serve = async move { sessions.serve(serving).await };
    bench.sessions.shutdown.spawn_service(serve);
    drop(near);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(tunnel_process::panics::count() - before, 1);
    assert!(bench.sessions.registry.of_node(&node()).is_empty());
    let _another = bench.agent(1).await;
    assert_eq!(bench.sessions.registry.of_node(&node()).len(), 1);
    assert!(!bench.sessions.shutdown.drain().is_cancelled());
    drop(far);
}
