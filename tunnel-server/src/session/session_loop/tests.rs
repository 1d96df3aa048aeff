use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tunnel_proto::transport::{Session, StreamCut, find_cause};

use super::*;
use crate::routing::registry::{DiagError, OpenError, SuspectReason};
use crate::testing::{Bench, eventually, node};

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn drain_without_another_server() -> ControlMessage {
    ControlMessage::Drain {
        deadline: secs(30),
        move_within: Duration::ZERO,
    }
}

fn suspect_reason(bench: &Bench) -> Option<SuspectReason> {
    bench.sessions.registry.of_node(&node())[0].suspect_reason()
}

#[tokio::test(start_paused = true)]
async fn silence_while_a_request_waits_stops_new_streams_after_five_seconds_until_it_ends() {
    let (bench, mut agent) = Bench::with_agent().await;
    sleep(secs(20)).await;
    let mut opened = bench.open().await.unwrap().stream;
    let mut accepted = agent.stream().await;
    accepted.accept("").await.unwrap();
    agent.near.script().is_silent = true;
    sleep(secs(4)).await;
    assert_eq!(suspect_reason(&bench), None, "5 s have not passed");
    // The 5 s of the request, and up to one probe interval since the last sign of life.
    sleep(secs(4)).await;
    let reason = suspect_reason(&bench);
    assert!(matches!(reason, Some(SuspectReason::Silent(_))));
    let asked = Instant::now();
    let refused = bench.open().await.unwrap_err();
    assert!(matches!(refused, OpenError::Suspect(_)), "{refused}");
    assert_eq!(asked, Instant::now(), "the answer waited");
    assert_eq!(agent.recv().await, ControlMessage::Suspect(true));
    assert_eq!(bench.metric("tunnel_server_sessions_suspect"), Some(1));
    // The streams of the session continue.
    accepted.write_all(b"late").await.unwrap();
    let mut late = [0; 4];
    opened.read_exact(&mut late).await.unwrap();
    agent.near.script().is_silent = false;
    assert_eq!(agent.recv().await, ControlMessage::Suspect(false));
    assert_eq!(suspect_reason(&bench), None);
    assert!(bench.open().await.is_ok());
    assert_eq!(bench.metric("tunnel_server_sessions_suspect"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn idle_session_is_probed_and_suspect_after_fifteen_seconds() {
    let (bench, agent) = Bench::with_agent().await;
    let before = agent.near.stats().acknowledged;
    sleep(secs(61)).await;
    let probes = agent.near.stats().acknowledged - before;
    // The agent of the test sends no keep-alives. Each one is overdue after 7.5 s.
    assert!((7..=9).contains(&probes), "{probes} probes in a minute");
    agent.near.script().is_silent = true;
    sleep(secs(9)).await;
    assert_eq!(suspect_reason(&bench), None);
    sleep(secs(7)).await;
    assert!(suspect_reason(&bench).is_some());
}

#[tokio::test(start_paused = true)]
async fn stream_on_an_idle_session_is_looked_at_from_its_first_moment() {
    let (bench, agent) = Bench::with_agent().await;
    agent.near.script().is_silent = true;
    // Between two checks of an idle session.
    sleep(Duration::from_millis(5_100)).await;
    let _opened = bench.open().await.unwrap();
    sleep(Duration::from_millis(4_900)).await;
    assert_eq!(suspect_reason(&bench), None);
    sleep(Duration::from_millis(400)).await;
    // 5 s since the stream have passed.
    assert!(suspect_reason(&bench).is_some());
}

#[tokio::test(start_paused = true)]
async fn dead_session_is_closed_after_a_minute_and_its_streams_are_cut() {
    let (bench, agent) = Bench::with_agent().await;
    let mut opened = bench.open().await.unwrap().stream;
    agent.near.script().is_silent = true;
    agent.near.script().is_slow_to_close = true;
    sleep(secs(55)).await;
    assert_eq!(bench.sessions.registry.all().len(), 1);
    sleep(Duration::from_millis(5500)).await;
    // A session that is closing is not registered.
    assert!(bench.sessions.registry.all().is_empty());
    let reason = crate::testing::within(agent.far.closed()).await;
    assert_eq!(reason.code, CloseCode::Dead);
    assert!(opened.read_u8().await.is_err());
    let ends = "tunnel_server_session_ends_total{code=\"dead\"}";
    eventually("the end is counted", || bench.metric(ends) == Some(1)).await;
    assert_eq!(bench.metric("tunnel_server_sessions_suspect"), Some(0));
}

#[tokio::test(start_paused = true)]
async fn word_of_the_agent_counts_at_once_and_is_not_given_back() {
    let (bench, mut agent) = Bench::with_agent().await;
    agent.send(ControlMessage::Suspect(true)).await;
    let doubted = || suspect_reason(&bench) == Some(SuspectReason::PeerHearsNothing);
    let began = Instant::now();
    eventually("suspect", doubted).await;
    assert!(began.elapsed() < Duration::from_millis(10));
    agent.send(ControlMessage::Suspect(false)).await;
    eventually("not suspect", || suspect_reason(&bench).is_none()).await;
    // The next message has another subject, because the server never suspected the session.
    bench.sessions.shutdown.leaving().cancel();
    assert_eq!(agent.recv().await, drain_without_another_server());
}

#[tokio::test(start_paused = true)]
async fn agents_of_a_leaving_server_are_asked_to_move_at_once_and_still_take_streams() {
    let bench = Bench::new();
    let mut sessions = [bench.agent(1).await, bench.agent(1).await];
    let began = Instant::now();
    bench.sessions.shutdown.leaving().cancel();
    for session in &mut sessions {
        assert_eq!(session.recv().await, drain_without_another_server());
    }
    assert!(began.elapsed() < Duration::from_millis(10));
    assert!(bench.open().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn change_of_the_servers_is_sent_to_the_agent() {
    let (bench, mut agent) = Bench::with_agent().await;
    bench.sessions.peers.leave();
    let ControlMessage::Members(members) = agent.recv().await else {
        panic!("another message");
    };
    let leaving: Vec<_> = members.iter().map(|member| member.is_leaving).collect();
    assert_eq!(leaving, [true]);
}

#[tokio::test(start_paused = true)]
async fn agent_that_takes_no_messages_delays_neither_looks_nor_the_end() {
    let bench = Bench::new();
    // The stream is too narrow for a single message that is not read.
    let (agent, answer) = bench.connect_agent(1, 2).await;
    assert!(matches!(answer, ControlMessage::Welcome(_)));
    let _opened = bench.open().await.unwrap();
    agent.near.script().is_silent = true;
    sleep(secs(10)).await;
    assert!(suspect_reason(&bench).is_some());
    agent.near.script().is_silent = false;
    sleep(secs(3)).await;
    // The session does not wait for an unsent message.
    assert_eq!(suspect_reason(&bench), None);
    agent.near.script().is_silent = true;
    let began = Instant::now();
    let reason = crate::testing::within(agent.far.closed()).await;
    assert_eq!(reason.code, CloseCode::Dead);
    let waited = began.elapsed();
    assert!((secs(58)..secs(70)).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn end_of_the_control_stream_withdraws_and_a_broken_one_closes() {
    let (bench, mut agent) = Bench::with_agent().await;
    agent.writer.finish().await.unwrap();
    let withdrawn = || bench.sessions.registry.of_node(&node())[0].is_withdrawn();
    eventually("withdrawn", withdrawn).await;
    agent.far.close(CloseCode::Normal, "done").await;
    let gone = || bench.sessions.registry.all().is_empty();
    eventually("gone", gone).await;
    let ends = "tunnel_server_session_ends_total{code=\"normal\"}";
    eventually("counted", || bench.metric(ends) == Some(1)).await;
    assert!(bench.sessions.failures.all().is_empty(), "an orderly end");
}

#[tokio::test(start_paused = true)]
async fn session_that_is_cut_within_half_a_minute_is_a_failure_and_a_longer_one_is_none() {
    for (lasted, expected) in [(secs(1), &["short_session"][..]), (secs(31), &[])] {
        let (bench, agent) = Bench::with_agent().await;
        sleep(lasted).await;
        agent.far.close(CloseCode::Protocol, "cut").await;
        let ends = "tunnel_server_session_ends_total{code=\"protocol\"}";
        eventually("the end is counted", || bench.metric(ends) == Some(1)).await;
        let failures = bench.sessions.failures.all();
        let codes: Vec<_> = failures.iter().map(|failure| failure.code).collect();
        assert_eq!(codes, expected, "{failures:?}");
        let history = bench.sessions.registry.history(&node()).unwrap();
        assert_eq!((history.connects, history.ends["protocol"]), (1, 1));
        assert!(history.connected >= lasted, "{history:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn agent_is_asked_for_facts_and_only_its_answer_to_that_counts() {
    let (bench, mut agent) = Bench::with_agent().await;
    let registered = bench.sessions.registry.of_node(&node()).remove(0);
    let early = ControlMessage::DiagReply("early".into());
    for message in [early, ControlMessage::Withdraw] {
        agent.send(message).await;
    }
    eventually("both are read", || registered.is_withdrawn()).await;
    let document = "{}".to_owned();
    let asking = registered.diag();
    let answering = async {
        assert_eq!(agent.recv().await, ControlMessage::DiagRequest);
        agent
            .send(ControlMessage::DiagReply(document.clone()))
            .await;
    };
    assert_eq!(tokio::join!(asking, answering).0, Ok(document.clone()));
    assert_eq!(registered.diag().await, Err(DiagError::NoAnswer));
}

#[tokio::test(start_paused = true)]
async fn agent_is_asked_to_renew_once_for_each_stage() {
    let (bench, mut agent) = Bench::with_agent().await;
    let registered = bench.sessions.registry.of_node(&node()).remove(0);
    let asked = ControlMessage::RenewSoon(RENEWED_WITHIN_MAX);
    for stage in [1, 2] {
        let since = SystemTime::UNIX_EPOCH + secs(stage);
        registered.ask_to_renew(since);
        assert_eq!(agent.recv().await, asked);
        registered.ask_to_renew(since);
        assert!(!registered.take_renewal_request());
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_control_messages_ends_the_session_as_a_breach_of_the_protocol() {
    for message in [
        ControlMessage::Withdraw,
        ControlMessage::Unknown,
        ControlMessage::Suspect(true),
    ] {
        let (bench, mut agent) = Bench::with_agent().await;
        for _ in 0..=50 {
            let _closed_meanwhile = agent.writer.send(&message).await;
        }
        let reason = crate::testing::within(agent.far.closed()).await;
        assert_eq!(reason.code, CloseCode::Protocol, "{message:?}: {reason}");
        let ends = "tunnel_server_session_ends_total{code=\"protocol\"}";
        eventually("the end is counted", || bench.metric(ends) == Some(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn reached_clocks_of_sessions_are_counted_by_their_limit() {
    let bench = Bench::new();
    let reached = |limit: Limit| {
        let name = limit.label();
        let series = format!("tunnel_server_limits_reached_total{{limit=\"{name}\"}}");
        bench.metric(&series).unwrap_or_default()
    };
    let idle = bench.agent(1).await;
    idle.near.script().is_silent = true;
    sleep(secs(9)).await;
    assert_eq!(reached(Limit::SuspectAfterIdle), 0);
    sleep(secs(7)).await;
    assert_eq!(reached(Limit::SuspectAfterIdle), 1);
    sleep(secs(38)).await;
    assert_eq!(reached(Limit::DeadAfter), 0);
    sleep(secs(7)).await;
    assert_eq!(reached(Limit::DeadAfter), 1);
    assert_eq!(reached(Limit::SuspectAfterBusy), 0);
    let busy = bench.agent(2).await;
    let _opened = bench.open().await.unwrap();
    busy.near.script().is_silent = true;
    sleep(secs(4)).await;
    assert_eq!(reached(Limit::SuspectAfterBusy), 0);
    sleep(secs(4)).await;
    assert_eq!(reached(Limit::SuspectAfterBusy), 1);
    assert_eq!(reached(Limit::SuspectAfterIdle), 1);
}

#[tokio::test(start_paused = true)]
async fn session_that_its_agent_has_lost_is_closed_and_the_next_one_takes_streams_at_once() {
    let (bench, old) = Bench::with_agent().await;
    let mut stalled = bench.open().await.unwrap().stream;
    let mut reading = JoinSet::new();
    reading.spawn(async move { stalled.read_u8().await });
    old.near.script().is_silent = true;
    let mut agent = bench.agent(1).await;
    let sessions = bench.sessions.registry.of_node(&node());
    let ids = [0, 1].map(|index| sessions[index].id);
    let began = Instant::now();
    // Its own and an unknown one are left alone.
    let lost = vec![ids[0], ids[1], SessionId(u64::MAX)];
    agent.send(ControlMessage::Lost(lost)).await;
    let new = Some(crate::routing::via::Via::Local(ids[0]));
    let active = || bench.sessions.registry.active(&node());
    eventually("new session takes streams", || active() == new).await;
    assert!(bench.open().await.is_ok());
    let read = crate::testing::within(reading.join_next()).await;
    let cut = read.unwrap().unwrap().unwrap_err();
    let lost = Some(&StreamCut::SessionLost);
    assert_eq!(find_cause(&cut), lost, "{cut}");
    assert!(began.elapsed() < secs(1), "a new session waits that long");
    assert_eq!(old.far.closed().await.code, CloseCode::Dead);
    eventually("closed", || bench.sessions.registry.all().len() == 1).await;
}
