//! Tests of dials that clients of the cloud make due.

use super::*;

/// Each outage lasts longer than the first two minutes, in which the pauses are short anyway.
#[test]
fn client_that_needs_a_session_has_one_two_seconds_after_the_path_is_back() {
    for (remembered, healed) in [(H2, Quic), (H2, H2), (Quic, H2), (Quic, Quic)] {
        for offset in 0..40 {
            let mut sim = Sim::cut_off(remembered);
            sim.advance(400.0);
            sim.is_wanted = true;
            sim.advance(30.0 + 0.37 * f64::from(offset));
            sim.set_paths(Path::Silent);
            match healed {
                Quic => sim.quic = Path::Open,
                H2 => sim.h2 = Path::Open,
            }
            sim.lap();
            sim.session(healed);
            // The transport that answers may be the second of its round.
            let most = if remembered == healed { 2.3 } else { 5.3 };
            sim.expect_lap(..=most);
        }
    }
}

#[test]
fn clients_make_a_dial_due_every_two_seconds_at_most() {
    let mut sim = Sim::cut_off(Quic);
    sim.advance(400.0);
    // Each dial fails at once.
    sim.set_paths(Path::Refused);
    sim.advance(60.0);
    sim.take_dials();
    sim.is_wanted = true;
    sim.advance(200.0);
    let rounds: Vec<_> = std::mem::take(&mut sim.dials)
        .into_iter()
        .filter_map(|(at, transport)| (transport == Quic).then_some(at))
        .collect();
    // Without clients the pauses are up to 30 s, and some of them end by themselves.
    assert!((90..130).contains(&rounds.len()), "{} rounds", rounds.len());
    let pauses: HashSet<_> = rounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.len() > 20, "they all are {pauses:?}");
}

#[test]
fn refusal_of_a_server_keeps_its_pause() {
    for (code, least) in [(CloseCode::NameInUse, 60.0), (CloseCode::Version, 30.0)] {
        let mut sim = Sim::start(AUTO);
        sim.is_wanted = true;
        let arrival = sim.arrival();
        sim.reject(&arrival, code);
        sim.lap();
        sim.session(Quic);
        sim.expect_lap(least..);
    }
}

#[test]
fn no_dial_is_wanted_while_a_session_lives_or_the_agent_drains() {
    let (mut sim, session) = Sim::ready(Quic);
    sim.is_wanted = true;
    sim.expect_quiet();
    sim.set_paths(Path::Refused);
    sim.close(session, CloseCode::Draining);
    sim.advance(600.0);
    sim.handle(Event::Drain);
    sim.expect_quiet();
}
