//! Tests of a session that takes over from another.

use super::*;

#[tokio::test(start_paused = true)]
async fn upgrade_retires_the_old_session_and_its_streams_go_on() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::H2).await;
    let running = Busy::on(&*old.connection.server).await;
    env.advance(100).await;
    env.net.quic.set(Path::Open);
    env.lap();
    let new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..=45.1);

    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));
    // The server opened the stream before it read Withdraw.
    let late = Busy::on(&*old.connection.server).await;
    assert_eq!(env.context.metrics.transport_changes(), (1, 1));
    env.advance(600).await;
    assert!(env.is_ready());
    late.finish().await;
    env.advance(600).await;
    running.finish().await;
    expect_bye(&mut old).await;
    Busy::on(&*new.connection.server).await.finish().await;
    env.net.quic.dials();
    env.advance(3600).await;
    assert_eq!(env.net.quic.dials(), [], "there is nothing above QUIC");
    assert!(env.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn quic_lost_soon_after_promotion_is_left_alone_for_2_4_to_30_minutes() {
    let (mut env, mut h2) = TestEnv::ready(TransportKind::H2).await;
    for minutes in [0.75, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
        env.net.quic.set(Path::Open);
        let quic = env.peer(TransportKind::Quic).await;
        let waited = env.lap() / 60.0;
        let bounds = minutes * 0.79..minutes * 1.11;
        assert!(bounds.contains(&waited), "{minutes}: {waited}");
        expect_retirement(&mut h2).await;
        env.advance(30).await;
        env.net.quic.set(Path::Silent);
        quic.close(CloseCode::Dead).await;
        h2 = env.peer(TransportKind::H2).await;
        env.lap();
    }
}

#[tokio::test(start_paused = true)]
async fn loss_counts_from_the_silence_and_not_from_what_replaced_it() {
    let (mut env, _h2) = TestEnv::ready(TransportKind::H2).await;
    env.net.quic.set(Path::Open);
    let mut quic = env.net.peer().await;
    env.advance(58).await;
    env.net.quic.set(Path::Silent);
    quic.doubts().await;
    env.until(|env| !env.is_ready()).await;
    env.lap();
    let _h2 = env.peer(TransportKind::H2).await;
    env.net.quic.set(Path::Open);
    env.expect_lap(3.0..3.1);
    let _quic = env.net.peer().await;
    env.expect_lap(120.0..135.0);
}

#[tokio::test(start_paused = true)]
async fn suspect_session_that_recovers_keeps_its_streams_and_stays_current() {
    let (mut env, mut peer) = TestEnv::ready(TransportKind::Quic).await;
    let running = Busy::on(&*peer.connection.server).await;
    env.net.set(Path::Silent);
    env.net.quic.dials();
    peer.connection.agent.script().is_silent = true;
    env.lap();
    env.until(|env| !env.is_ready()).await;
    env.expect_lap(5.0..8.0);
    env.advance(20).await;
    assert!(env.net.quic.dials().len() >= 3 && !env.net.h2.dials().is_empty());

    peer.connection.agent.script().is_silent = false;
    env.until(TestEnv::is_ready).await;
    env.net.quic.dials();
    env.advance(120).await;
    assert_eq!(env.net.quic.dials(), []);
    peer.expect_suspect(true).await;
    peer.expect_suspect(false).await;
    running.finish().await;
    Busy::on(&*peer.connection.server).await.finish().await;
}

#[tokio::test(start_paused = true)]
async fn suspect_session_is_replaced_and_keeps_its_streams() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    let running = Busy::on(&*old.connection.server).await;
    env.net.quic.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    env.lap();
    env.until(|env| !env.is_ready()).await;
    let new = env.peer(TransportKind::H2).await;
    env.expect_lap(..10.0);
    old.expect_suspect(true).await;
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));

    env.advance(20).await;
    old.connection.agent.script().is_silent = false;
    old.expect_suspect(false).await;
    running.finish().await;
    expect_bye(&mut old).await;
    Busy::on(&*new.connection.server).await.finish().await;
    assert!(env.is_ready());
}

#[tokio::test(start_paused = true)]
async fn recovery_of_a_retired_quic_session_brings_quic_back() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    env.net.quic.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    env.until(|env| !env.is_ready()).await;
    let mut h2 = env.peer(TransportKind::H2).await;
    env.net.quic.set(Path::Open);
    old.connection.agent.script().is_silent = false;
    old.expect_suspect(true).await;
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));
    old.expect_suspect(false).await;
    env.lap();
    let _quic = env.net.peer().await;
    env.expect_lap(..0.1);
    expect_retirement(&mut h2).await;
}

#[tokio::test(start_paused = true)]
async fn idle_session_that_is_silent_is_replaced_within_20_seconds() {
    let (mut env, old) = TestEnv::ready(TransportKind::Quic).await;
    env.advance(100).await;
    env.net.quic.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    env.lap();
    env.until(|env| !env.is_ready()).await;
    let _new = env.peer(TransportKind::H2).await;
    env.expect_lap(..20.0);
    assert_eq!(old.closed().await.code, CloseCode::Dead);
    env.expect_lap(39.0..46.0);
    assert!(env.is_ready());
}

#[tokio::test(start_paused = true)]
async fn dead_session_leaves_the_search_for_another_as_it_is() {
    let (mut env, old) = TestEnv::ready(TransportKind::Quic).await;
    env.net.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    assert_eq!(old.closed().await.code, CloseCode::Dead);
    let dead = Instant::now();
    assert!(!env.is_ready());
    env.advance(5).await;
    let dials = env.net.quic.dials();
    assert!(dials.len() > 3 && !dials.contains(&dead), "{dials:?}");
    env.net.quic.set(Path::Open);
    env.lap();
    env.net.peer().await;
    env.expect_lap(..=6.0);
}

#[tokio::test(start_paused = true)]
async fn close_of_a_suspect_session_shows_that_the_server_is_back() {
    let (mut env, old) = TestEnv::ready(TransportKind::Quic).await;
    env.net.set(Path::Silent);
    old.connection.agent.script().is_silent = true;
    env.until(|env| !env.is_ready()).await;
    env.advance(8).await;
    env.net.quic.set(Path::Open);
    old.close(CloseCode::Draining).await;
    env.lap();
    let _new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..0.1);
}

#[tokio::test(start_paused = true)]
async fn loser_that_was_admitted_retires() {
    let mut env = TestEnv::start(AUTO);
    env.net.quic.set(Path::Slow(Duration::from_secs(4)));
    let h2 = env.net.arrival().await;
    let quic = env.net.arrival().await;
    let kinds = (h2.agent.transport(), quic.agent.transport());
    assert_eq!(kinds, (TransportKind::H2, TransportKind::Quic));
    let winner = Peer::admit(h2).await;
    env.until(TestEnv::is_ready).await;
    let mut loser = Peer::admit(quic).await;
    expect_retirement(&mut loser).await;
    Busy::on(&*winner.connection.server).await.finish().await;
}

#[tokio::test(start_paused = true)]
async fn drain_with_two_sessions_closes_both_without_loss() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::H2).await;
    let on_old = Busy::on(&*old.connection.server).await;
    env.net.quic.set(Path::Open);
    let mut new = env.peer(TransportKind::Quic).await;
    let on_new = Busy::on(&*new.connection.server).await;
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));

    let shutdown = env.context.shutdown.clone();
    shutdown.drain().cancel();
    assert_eq!(new.recv_control().await, Some(ControlMessage::Withdraw));
    on_old.finish().await;
    on_new.finish().await;
    env.context.graceful_shutdown.cancel();
    let ended = async {
        tokio::join!(expect_bye(&mut old), expect_bye(&mut new));
        env.agent.join_next().await
    };
    ended.await.unwrap().unwrap();
    assert!(env.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn drain_ends_an_agent_that_has_no_session() {
    let mut env = TestEnv::behind_a_firewall();
    env.net.h2.set(Path::Silent);
    env.advance(4).await;
    env.context.shutdown.drain().cancel();
    env.lap();
    env.agent.join_next().await.unwrap().unwrap();
    env.expect_lap(..0.1);
}

#[tokio::test(start_paused = true)]
async fn dropped_connector_cuts_its_sessions() {
    let (mut env, peer) = TestEnv::ready(TransportKind::Quic).await;
    env.agent.shutdown().await;
    // The agent's end is gone; the test holds the last handle.
    assert_eq!(Arc::strong_count(&peer.connection.agent), 1);
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_server_has_another_session_dialed_while_the_old_one_serves() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    let running = Busy::on(&*old.connection.server).await;
    env.advance(60).await;
    env.lap();
    old.send_drain().await;
    let new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..0.6);
    assert_eq!(old.recv_control().await, Some(ControlMessage::Withdraw));
    Busy::on(&*new.connection.server).await.finish().await;
    env.advance(20).await;
    assert!(env.is_ready());
    running.finish().await;
    expect_bye(&mut old).await;
    assert_eq!(env.net.h2.dials(), []);
}

#[tokio::test(start_paused = true)]
async fn agent_of_a_stopping_server_dials_on_until_another_one_answers() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    env.advance(60).await;
    env.net.set(Path::Refused);
    env.net.quic.dials();
    old.send_drain().await;
    env.advance(10).await;
    let dials = env.net.quic.dials().len();
    assert!((5..60).contains(&dials), "{dials} dials in 10 s");
    assert!(env.is_ready());
    Busy::on(&*old.connection.server).await.finish().await;
    env.net.quic.set(Path::Open);
    env.lap();
    let _new = env.peer(TransportKind::Quic).await;
    env.expect_lap(..2.1);
    expect_retirement(&mut old).await;
}

#[tokio::test(start_paused = true)]
async fn end_of_a_stopped_server_has_the_next_one_dialed_afresh() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    env.advance(60).await;
    env.net.quic.set(Path::Silent);
    env.net.h2.set(Path::Refused);
    old.send_drain().await;
    env.advance(2).await;
    env.net.quic.set(Path::Open);
    old.close(CloseCode::Draining).await;
    env.lap();
    let _new = env.net.peer().await;
    env.expect_lap(..2.1);
}

#[tokio::test(start_paused = true)]
async fn agents_of_a_stopping_server_do_not_dial_in_step() {
    let mut waits = Vec::new();
    for _ in 0..50 {
        let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
        env.advance(60).await;
        old.send_drain().await;
        env.lap();
        let _new = env.net.peer().await;
        waits.push(env.lap());
    }
    let early = waits.iter().filter(|wait| **wait < 0.2).count();
    let late = waits.iter().filter(|wait| **wait > 0.3).count();
    assert!(early > 0 && late > 0, "{waits:?}");
    assert!(waits.iter().all(|wait| *wait < 0.6), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn stopping_server_that_falls_silent_and_recovers_is_still_replaced() {
    let (mut env, mut old) = TestEnv::ready(TransportKind::Quic).await;
    env.advance(60).await;
    env.net.set(Path::Refused);
    old.send_drain().await;
    env.advance(1).await;
    old.connection.agent.script().is_silent = true;
    env.until(|env| !env.is_ready()).await;
    old.connection.agent.script().is_silent = false;
    env.until(TestEnv::is_ready).await;
    env.net.quic.set(Path::Open);
    env.lap();
    let _new = env.net.peer().await;
    env.expect_lap(..2.1);
}
