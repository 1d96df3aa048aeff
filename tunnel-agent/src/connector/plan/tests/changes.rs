//! Tests of a session that takes over from another.

use super::*;

#[test]
fn upgrade_retires_the_session_over_h2_and_quic_is_the_best() {
    let (mut sim, old) = Sim::ready(H2);
    sim.advance(100.0);
    sim.quic = Path::Open;
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..=45.1);
    assert_eq!(sim.metrics.transport_changes(), (1, 1));
    sim.expect_retirement(old);
    sim.expect_quiet();
}

#[test]
fn quic_lost_soon_after_promotion_is_left_alone_for_2_4_to_30_minutes() {
    let (mut sim, mut h2) = Sim::ready(H2);
    for minutes in [0.75, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
        sim.quic = Path::Open;
        let quic = sim.session(Quic);
        sim.expect_lap(minutes * 60.0 * 0.79..minutes * 60.0 * 1.11);
        sim.expect_retirement(h2);
        sim.advance(30.0);
        sim.quic = Path::Silent;
        sim.close(quic, CloseCode::Dead);
        h2 = sim.session(H2);
        sim.lap();
    }
}

#[test]
fn loss_counts_from_the_silence_and_not_from_what_replaced_it() {
    let (mut sim, _h2) = Sim::ready(H2);
    sim.quic = Path::Open;
    let quic = sim.session(Quic);
    sim.advance(58.0);
    sim.quic = Path::Silent;
    sim.suspect(quic);
    assert!(!sim.plan.is_ready());
    sim.lap();
    sim.session(H2);
    sim.quic = Path::Open;
    sim.expect_lap(3.0..3.1);
    sim.session(Quic);
    sim.expect_lap(120.0..135.0);
}

#[test]
fn suspect_session_that_recovers_stays_current() {
    let (mut sim, session) = Sim::ready(Quic);
    sim.set_paths(Path::Silent);
    sim.take_dials();
    sim.suspect(session);
    assert!(!sim.plan.is_ready() && sim.plan.sessions(SessionState::Suspect) == 1);
    sim.advance(20.0);
    let dials = sim.take_dials();
    assert!(dials.iter().filter(|transport| **transport == Quic).count() >= 3);
    assert!(dials.contains(&H2));
    sim.recover(session);
    assert!(sim.plan.is_ready());
    sim.expect_connected(1);
    sim.expect_quiet();
    assert!(!sim.retired.contains(&session));
}

#[test]
fn suspect_session_is_replaced_and_its_late_recovery_changes_nothing() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.quic = Path::Silent;
    sim.suspect(old);
    sim.lap();
    sim.session(H2);
    sim.expect_lap(3.0..3.1);
    assert!(sim.retired.contains(&old));
    sim.advance(20.0);
    sim.recover(old);
    sim.expect_connected(1);
    sim.expect_retirement(old);
    assert!(sim.plan.is_ready());
}

#[test]
fn recovery_of_a_retired_quic_session_brings_quic_back() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.quic = Path::Silent;
    sim.suspect(old);
    let h2 = sim.session(H2);
    sim.quic = Path::Open;
    sim.recover(old);
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..0.1);
    sim.expect_retirement(h2);
}

#[test]
fn dead_session_leaves_the_search_for_another_as_it_is() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.set_paths(Path::Silent);
    sim.suspect(old);
    sim.advance(40.0);
    sim.take_dials();
    sim.end(old, ClosedBy::Local, CloseCode::Dead);
    assert_eq!(sim.take_dials(), []);
    assert!(!sim.plan.is_ready());
    sim.advance(30.0);
    assert!(sim.take_dials().len() > 3);
    sim.quic = Path::Open;
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..=6.0);
}

#[test]
fn close_of_a_suspect_session_shows_that_the_server_is_back() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    sim.set_paths(Path::Silent);
    sim.suspect(old);
    sim.advance(8.0);
    sim.quic = Path::Open;
    sim.close(old, CloseCode::Draining);
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..0.1);
}

#[test]
fn loser_that_was_admitted_retires() {
    let mut sim = Sim::start(AUTO);
    sim.quic = Path::Slow(Duration::from_secs(4));
    let (h2, quic) = (sim.arrival(), sim.arrival());
    assert_eq!((h2.transport, quic.transport), (H2, Quic));
    let winner = sim.admit(&h2, "server-1", &[]);
    let loser = sim.admit(&quic, "server-1", &[]);
    assert!(sim.served.contains_key(&loser));
    sim.expect_retirement(loser);
    assert!(!sim.retired.contains(&winner));
    sim.expect_connected(1);
}

#[test]
fn drain_of_the_agent_ends_with_its_last_session() {
    let (mut sim, old) = Sim::ready(H2);
    sim.quic = Path::Open;
    let new = sim.session(Quic);
    sim.handle(Event::Drain);
    assert!(sim.plan.statuses().is_empty() && sim.plan.is_ready());
    sim.expect_quiet();
    for session in [new, old] {
        assert!(!sim.plan.is_over());
        sim.end(session, ClosedBy::Local, CloseCode::Normal);
    }
    assert!(sim.plan.is_over() && !sim.plan.is_ready());
    // Without a session it ends at once.
    let mut sim = Sim::behind_a_firewall();
    sim.h2 = Path::Silent;
    sim.advance(4.0);
    sim.handle(Event::Drain);
    assert!(sim.plan.is_over());
}

#[test]
fn drain_of_the_server_has_another_session_dialed_while_the_old_one_serves() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    sim.take_dials();
    sim.lap();
    sim.stop_server(old, Duration::ZERO);
    let arrival = sim.arrival();
    assert!(sim.plan.is_ready() && !sim.retired.contains(&old));
    sim.admit(&arrival, "server-1", &[]);
    sim.expect_lap(..0.6);
    sim.expect_retirement(old);
    assert!(sim.plan.is_ready());
    assert_eq!(sim.take_dials(), [Quic]);
}

#[test]
fn agent_of_a_stopping_server_dials_on_until_another_one_answers() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    sim.set_paths(Path::Refused);
    sim.take_dials();
    sim.stop_server(old, Duration::ZERO);
    sim.advance(10.0);
    let dials = sim.take_dials().iter().filter(|one| **one == Quic).count();
    assert!((5..60).contains(&dials), "{dials} dials in 10 s");
    assert!(sim.plan.is_ready());
    sim.quic = Path::Open;
    sim.lap();
    sim.session(Quic);
    sim.expect_lap(..2.1);
    sim.expect_retirement(old);
}

#[test]
fn end_of_a_stopped_server_has_the_next_one_dialed_afresh() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    (sim.quic, sim.h2) = (Path::Silent, Path::Refused);
    sim.stop_server(old, Duration::ZERO);
    sim.advance(2.0);
    sim.quic = Path::Open;
    sim.close(old, CloseCode::Draining);
    sim.lap();
    sim.arrival();
    sim.expect_lap(..2.1);
}

#[test]
fn agents_of_a_stopping_server_do_not_dial_in_step() {
    let mut waits = Vec::new();
    for seed in 0..50 {
        let mut sim = Sim::with(seed, 2, AUTO, &["192.0.2.1:10262"]);
        let old = sim.session(Quic);
        sim.advance(60.0);
        sim.stop_server(old, Duration::ZERO);
        sim.lap();
        sim.arrival();
        waits.push(sim.lap());
    }
    let early = waits.iter().filter(|wait| **wait < 0.2).count();
    let late = waits.iter().filter(|wait| **wait > 0.3).count();
    assert!(early > 0 && late > 0, "{waits:?}");
    assert!(waits.iter().all(|wait| *wait < 0.6), "{waits:?}");
}

#[test]
fn stopping_server_that_falls_silent_and_recovers_is_still_replaced() {
    let (mut sim, old) = Sim::ready(Quic);
    sim.advance(60.0);
    sim.set_paths(Path::Refused);
    sim.stop_server(old, Duration::ZERO);
    sim.advance(1.0);
    sim.suspect(old);
    assert!(!sim.plan.is_ready());
    sim.advance(3.0);
    sim.recover(old);
    assert!(sim.plan.is_ready());
    sim.quic = Path::Open;
    sim.lap();
    sim.arrival();
    sim.expect_lap(..2.1);
}
