//! One session takes over from another.

use super::*;

#[tokio::test(start_paused = true)]
async fn promotion_retires_the_old_session_and_its_streams_go_on() {
    let mut world = World::behind_a_firewall();
    let mut old = world.peer(TransportKind::H2).await;
    let running = Busy::on(&old).await;
    world.rest(100).await;
    world.net.quic.set(Path::Open);
    world.lap();
    let new = world.peer(TransportKind::Quic).await;
    let waited = world.lap();
    assert!(waited <= 45.1, "{waited}");

    assert_eq!(old.hears().await, Some(ControlMessage::Withdraw));
    // The server opened it before it read Withdraw.
    let late = Busy::on(&old).await;
    assert_eq!(world.shared.metrics.moves(), (1, 1));
    world.rest(600).await;
    assert!(world.is_ready());
    late.finish().await;
    world.rest(600).await;
    running.finish().await;
    says_goodbye(&mut old).await;
    Busy::on(&new).await.finish().await;
    world.net.quic.dials();
    world.rest(3600).await;
    assert_eq!(world.net.quic.dials(), [], "there is nothing above QUIC");
    assert!(world.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn quic_lost_soon_after_promotion_is_left_alone_for_2_4_to_30_minutes() {
    let mut world = World::behind_a_firewall();
    let mut h2 = world.peer(TransportKind::H2).await;
    for minutes in [0.75, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
        world.net.quic.set(Path::Open);
        let quic = world.peer(TransportKind::Quic).await;
        let waited = world.lap() / 60.0;
        let bounds = minutes * 0.79..minutes * 1.11;
        assert!(bounds.contains(&waited), "{minutes}: {waited}");
        leaves(&mut h2).await;
        world.rest(30).await;
        world.net.quic.set(Path::Silent);
        quic.session.close(CloseCode::Dead, "blocked again").await;
        h2 = world.peer(TransportKind::H2).await;
        world.lap();
    }
}

#[tokio::test(start_paused = true)]
async fn loss_counts_from_the_silence_and_not_from_what_replaced_it() {
    let mut world = World::behind_a_firewall();
    let _h2 = world.peer(TransportKind::H2).await;
    world.net.quic.set(Path::Open);
    let mut quic = world.net.peer().await;
    world.rest(58).await;
    world.net.quic.set(Path::Silent);
    quic.doubts().await;
    world.until(|world| !world.is_ready()).await;
    world.lap();
    let _h2 = world.peer(TransportKind::H2).await;
    world.net.quic.set(Path::Open);
    let waited = world.lap();
    assert!((3.0..3.1).contains(&waited), "{waited}");
    let _quic = world.net.peer().await;
    let waited = world.lap();
    assert!((120.0..135.0).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn suspect_session_that_recovers_keeps_its_streams_and_its_place() {
    let mut world = World::start(AUTO);
    let mut peer = world.peer(TransportKind::Quic).await;
    let running = Busy::on(&peer).await;
    world.net.quic.set(Path::Silent);
    world.net.h2.set(Path::Silent);
    world.net.quic.dials();
    peer.line.cut(true);
    world.lap();
    world.until(|world| !world.is_ready()).await;
    let waited = world.lap();
    assert!((5.0..8.0).contains(&waited), "{waited}");
    world.rest(20).await;
    assert!(world.net.quic.dials().len() >= 3 && !world.net.h2.dials().is_empty());

    peer.line.cut(false);
    world.until(World::is_ready).await;
    world.net.quic.dials();
    world.rest(120).await;
    assert_eq!(world.net.quic.dials(), []);
    assert_eq!(peer.hears().await, Some(ControlMessage::Doubt(true)));
    assert_eq!(peer.hears().await, Some(ControlMessage::Doubt(false)));
    running.finish().await;
    Busy::on(&peer).await.finish().await;
}

#[tokio::test(start_paused = true)]
async fn suspect_session_gives_way_to_another_and_keeps_its_streams() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    let running = Busy::on(&old).await;
    world.net.quic.set(Path::Silent);
    old.line.cut(true);
    world.lap();
    world.until(|world| !world.is_ready()).await;
    let new = world.peer(TransportKind::H2).await;
    let waited = world.lap();
    assert!(waited < 10.0, "{waited}");
    assert_eq!(old.hears().await, Some(ControlMessage::Doubt(true)));
    assert_eq!(old.hears().await, Some(ControlMessage::Withdraw));

    world.rest(20).await;
    old.line.cut(false);
    assert_eq!(old.hears().await, Some(ControlMessage::Doubt(false)));
    running.finish().await;
    says_goodbye(&mut old).await;
    Busy::on(&new).await.finish().await;
    assert!(world.is_ready());
}

#[tokio::test(start_paused = true)]
async fn sign_of_life_on_a_retired_session_over_quic_brings_quic_back() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    world.net.quic.set(Path::Silent);
    old.line.cut(true);
    world.until(|world| !world.is_ready()).await;
    let mut h2 = world.peer(TransportKind::H2).await;
    world.net.quic.set(Path::Open);
    old.line.cut(false);
    assert_eq!(old.hears().await, Some(ControlMessage::Doubt(true)));
    assert_eq!(old.hears().await, Some(ControlMessage::Withdraw));
    assert_eq!(old.hears().await, Some(ControlMessage::Doubt(false)));
    world.lap();
    let _quic = world.net.peer().await;
    assert!(world.lap() < 0.1);
    leaves(&mut h2).await;
}

#[tokio::test(start_paused = true)]
async fn idle_session_that_is_silent_is_replaced_within_20_seconds() {
    let mut world = World::start(AUTO);
    let old = world.peer(TransportKind::Quic).await;
    world.rest(100).await;
    world.net.quic.set(Path::Silent);
    old.line.cut(true);
    world.lap();
    world.until(|world| !world.is_ready()).await;
    let _new = world.peer(TransportKind::H2).await;
    let waited = world.lap();
    assert!(waited < 20.0, "{waited}");
    assert_eq!(old.closed().await.code, CloseCode::Dead);
    let waited = world.lap();
    assert!((39.0..46.0).contains(&waited), "{waited}");
    assert!(world.is_ready());
}

#[tokio::test(start_paused = true)]
async fn dead_session_leaves_the_search_for_another_as_it_is() {
    let mut world = World::start(AUTO);
    let old = world.peer(TransportKind::Quic).await;
    world.net.quic.set(Path::Silent);
    world.net.h2.set(Path::Silent);
    old.line.cut(true);
    assert_eq!(old.closed().await.code, CloseCode::Dead);
    let dead = Instant::now();
    assert!(!world.is_ready());
    world.rest(5).await;
    let dials = world.net.quic.dials();
    assert!(dials.len() > 3 && !dials.contains(&dead), "{dials:?}");
    world.net.quic.set(Path::Open);
    world.lap();
    world.net.peer().await;
    let waited = world.lap();
    assert!(waited <= 6.0, "{waited}");
}

#[tokio::test(start_paused = true)]
async fn word_on_a_suspect_session_shows_that_the_server_is_back() {
    let mut world = World::start(AUTO);
    let old = world.peer(TransportKind::Quic).await;
    world.net.quic.set(Path::Silent);
    world.net.h2.set(Path::Silent);
    old.line.cut(true);
    world.until(|world| !world.is_ready()).await;
    world.rest(8).await;
    world.net.quic.set(Path::Open);
    old.session.close(CloseCode::Draining, "restarted").await;
    world.lap();
    let _new = world.peer(TransportKind::Quic).await;
    assert!(world.lap() < 0.1);
}

#[tokio::test(start_paused = true)]
async fn loser_that_was_admitted_retires() {
    let mut world = World::start(AUTO);
    world.net.quic.set(Path::Slow(Duration::from_secs(4)));
    let h2 = world.net.arrival().await;
    let quic = world.net.arrival().await;
    let kinds = (h2.transport, quic.transport);
    assert_eq!(kinds, (TransportKind::H2, TransportKind::Quic));
    let winner = h2.welcome().await;
    world.until(World::is_ready).await;
    let mut loser = quic.welcome().await;
    leaves(&mut loser).await;
    Busy::on(&winner).await.finish().await;
}

#[tokio::test(start_paused = true)]
async fn drain_with_two_sessions_closes_both_without_loss() {
    let mut world = World::behind_a_firewall();
    let mut old = world.peer(TransportKind::H2).await;
    let on_old = Busy::on(&old).await;
    world.net.quic.set(Path::Open);
    let mut new = world.peer(TransportKind::Quic).await;
    let on_new = Busy::on(&new).await;
    assert_eq!(old.hears().await, Some(ControlMessage::Withdraw));

    let shutdown = world.shared.shutdown.clone();
    shutdown.drain().cancel();
    assert_eq!(new.hears().await, Some(ControlMessage::Withdraw));
    on_old.finish().await;
    on_new.finish().await;
    world.shared.farewell.cancel();
    let ended = async {
        tokio::join!(says_goodbye(&mut old), says_goodbye(&mut new));
        world.agent.join_next().await
    };
    ended.await.unwrap().unwrap();
    assert!(world.net.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn drain_ends_an_agent_that_has_no_session() {
    let mut world = World::behind_a_firewall();
    world.net.h2.set(Path::Silent);
    world.rest(4).await;
    world.shared.shutdown.drain().cancel();
    world.lap();
    world.agent.join_next().await.unwrap().unwrap();
    assert!(world.lap() < 0.1);
}

#[tokio::test(start_paused = true)]
async fn dropped_connector_cuts_its_sessions() {
    let mut world = World::start(AUTO);
    let peer = world.peer(TransportKind::Quic).await;
    world.agent.shutdown().await;
    // The agent's end is gone, whose last handle is the test's.
    assert_eq!(Arc::strong_count(&peer.line), 1);
}

#[tokio::test(start_paused = true)]
async fn drain_of_the_server_has_another_session_dialed_while_the_old_one_serves() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    let running = Busy::on(&old).await;
    world.rest(60).await;
    world.lap();
    old.drains().await;
    let new = world.peer(TransportKind::Quic).await;
    let waited = world.lap();
    assert!(waited < 0.6, "{waited}");
    assert_eq!(old.hears().await, Some(ControlMessage::Withdraw));
    Busy::on(&new).await.finish().await;
    world.rest(20).await;
    assert!(world.is_ready());
    running.finish().await;
    says_goodbye(&mut old).await;
    assert_eq!(world.net.h2.dials(), []);
}

#[tokio::test(start_paused = true)]
async fn agent_of_a_stopping_server_dials_on_until_another_one_answers() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    world.rest(60).await;
    world.net.quic.set(Path::Refused);
    world.net.h2.set(Path::Refused);
    world.net.quic.dials();
    old.drains().await;
    world.rest(10).await;
    let dials = world.net.quic.dials().len();
    assert!((5..60).contains(&dials), "{dials} dials in 10 s");
    assert!(world.is_ready());
    Busy::on(&old).await.finish().await;
    world.net.quic.set(Path::Open);
    world.lap();
    let _new = world.peer(TransportKind::Quic).await;
    let waited = world.lap();
    assert!(waited < 2.1, "{waited}");
    leaves(&mut old).await;
}

#[tokio::test(start_paused = true)]
async fn end_of_a_stopped_server_has_the_next_one_dialed_afresh() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    world.rest(60).await;
    world.net.quic.set(Path::Silent);
    world.net.h2.set(Path::Refused);
    old.drains().await;
    world.rest(2).await;
    world.net.quic.set(Path::Open);
    old.session.close(CloseCode::Draining, "restarting").await;
    world.lap();
    let _new = world.net.peer().await;
    let waited = world.lap();
    assert!(waited < 2.1, "{waited}");
}

#[tokio::test(start_paused = true)]
async fn agents_of_a_stopping_server_do_not_dial_in_step() {
    let mut waits = Vec::new();
    for _ in 0..50 {
        let mut world = World::start(AUTO);
        let mut old = world.peer(TransportKind::Quic).await;
        world.rest(60).await;
        old.drains().await;
        world.lap();
        let _new = world.net.peer().await;
        waits.push(world.lap());
    }
    let early = waits.iter().filter(|wait| **wait < 0.2).count();
    let late = waits.iter().filter(|wait| **wait > 0.3).count();
    assert!(early > 0 && late > 0, "{waits:?}");
    assert!(waits.iter().all(|wait| *wait < 0.6), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn stopping_server_that_falls_silent_and_is_heard_again_is_replaced_all_the_same() {
    let mut world = World::start(AUTO);
    let mut old = world.peer(TransportKind::Quic).await;
    world.rest(60).await;
    world.net.quic.set(Path::Refused);
    world.net.h2.set(Path::Refused);
    old.drains().await;
    world.rest(1).await;
    old.line.cut(true);
    world.until(|world| !world.is_ready()).await;
    old.line.cut(false);
    world.until(World::is_ready).await;
    world.net.quic.set(Path::Open);
    world.lap();
    let _new = world.net.peer().await;
    let waited = world.lap();
    assert!(waited < 2.1, "{waited}");
}
