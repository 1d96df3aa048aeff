use super::*;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn ladder(choice: TransportChoice) -> Ladder {
    Ladder::new(choice, &Limits::default())
}

/// When the next probe is, in seconds from `start`.
fn probe(ladder: &Ladder, start: Instant) -> Option<u64> {
    ladder
        .probe_at()
        .map(|at| at.duration_since(start).as_secs())
}

#[test]
fn what_became_ready_is_dialled_first_and_the_other_still_raced() {
    let mut ladder = ladder(TransportChoice::Auto);
    let now = Instant::now();
    assert_eq!(ladder.order(), (Rung::Quic, Some(Rung::H2)));
    assert_eq!(ladder.ready(Rung::H2, now, 0.0), Change::Fallback);
    assert_eq!(ladder.order(), (Rung::H2, Some(Rung::Quic)));
    assert_eq!(ladder.ready(Rung::H2, now, 0.0), Change::None);
    assert_eq!(ladder.ready(Rung::Quic, now, 0.0), Change::Promotion);
    assert_eq!(ladder.order(), (Rung::Quic, Some(Rung::H2)));
    assert_eq!(ladder.ready(Rung::Quic, now, 0.0), Change::None);
}

#[test]
fn explicit_transport_is_neither_raced_nor_left() {
    for (choice, rung) in [
        (TransportChoice::Quic, Rung::Quic),
        (TransportChoice::H2, Rung::H2),
    ] {
        let mut ladder = ladder(choice);
        let now = Instant::now();
        ladder.tried(rung, now, 0.0);
        assert_eq!(ladder.ready(rung, now, 0.0), Change::None);
        assert_eq!(ladder.order(), (rung, None));
        assert_eq!(ladder.probe_at(), None);
    }
}

#[test]
fn quic_is_probed_every_45_s_while_h2_carries_the_session() {
    let mut ladder = ladder(TransportChoice::Auto);
    let start = Instant::now();
    ladder.tried(Rung::Quic, start, 0.0);
    assert_eq!(ladder.probe_at(), None);
    ladder.ready(Rung::H2, start + seconds(3), 0.0);
    assert_eq!(probe(&ladder, start), Some(45));
    // A session over h2 that is replaced by another one does not put the probe off.
    ladder.missed(start + seconds(30));
    ladder.tried(Rung::H2, start + seconds(31), 0.0);
    ladder.ready(Rung::H2, start + seconds(32), 0.0);
    assert_eq!(probe(&ladder, start), Some(45));
    ladder.tried(Rung::Quic, start + seconds(45), 1.0);
    assert_eq!(probe(&ladder, start), Some(45 + 36));
    ladder.ready(Rung::Quic, start + seconds(46), 0.0);
    assert_eq!(ladder.probe_at(), None);
}

#[test]
fn quic_lost_soon_after_promotion_is_left_alone_2_4_to_30_minutes() {
    let mut ladder = ladder(TransportChoice::Auto);
    let mut now = Instant::now();
    ladder.ready(Rung::H2, now, 0.0);
    let mut waits = Vec::new();
    for _ in 0..6 {
        ladder.tried(Rung::Quic, now, 0.0);
        ladder.ready(Rung::Quic, now, 0.0);
        ladder.missed(now + seconds(59));
        // That h2 takes some time to be ready does not make QUIC hold longer.
        now += seconds(65);
        assert_eq!(ladder.ready(Rung::H2, now, 0.0), Change::Fallback);
        waits.push(probe(&ladder, now).unwrap() / 60);
        now += seconds(3600);
    }
    assert_eq!(waits, [2, 4, 8, 16, 30, 30]);
}

#[test]
fn quic_that_held_or_was_not_promoted_is_probed_as_usual() {
    let mut ladder = ladder(TransportChoice::Auto);
    let start = Instant::now();
    let lose = |ladder: &mut Ladder, after: u64| {
        ladder.tried(Rung::Quic, start, 0.0);
        ladder.missed(start + seconds(after));
        ladder.ready(Rung::H2, start + seconds(after), 0.0);
        probe(ladder, start).unwrap()
    };
    assert_eq!(lose(&mut ladder, 1), 45, "not promoted");
    for (held, next) in [(59, 59 + 120), (59, 59 + 240), (60, 45), (59, 59 + 120)] {
        ladder.ready(Rung::Quic, start, 0.0);
        assert_eq!(lose(&mut ladder, held), next);
    }
}

#[test]
fn silence_that_ends_well_is_no_loss() {
    let mut ladder = ladder(TransportChoice::Auto);
    let start = Instant::now();
    ladder.ready(Rung::H2, start, 0.0);
    ladder.tried(Rung::Quic, start, 0.0);
    ladder.ready(Rung::Quic, start, 0.0);
    ladder.missed(start + seconds(10));
    ladder.heard();
    ladder.missed(start + seconds(100));
    ladder.ready(Rung::H2, start + seconds(103), 0.0);
    assert_eq!(probe(&ladder, start), Some(45));
}

#[test]
fn answer_on_an_old_session_calls_for_a_probe_unless_quic_did_not_hold() {
    let mut ladder = ladder(TransportChoice::Auto);
    let start = Instant::now();
    ladder.tried(Rung::Quic, start, 0.0);
    ladder.ready(Rung::H2, start, 0.0);
    ladder.quic_answers(start + seconds(7));
    assert_eq!(probe(&ladder, start), Some(7));
    ladder.tried(Rung::Quic, start + seconds(7), 0.0);
    assert_eq!(probe(&ladder, start), Some(7 + 45));

    ladder.ready(Rung::Quic, start + seconds(10), 0.0);
    ladder.missed(start + seconds(20));
    ladder.ready(Rung::H2, start + seconds(23), 0.0);
    ladder.quic_answers(start + seconds(30));
    assert_eq!(probe(&ladder, start), Some(23 + 120));
}
