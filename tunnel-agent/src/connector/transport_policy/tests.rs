use super::*;
use SessionTransport::{H2, Quic};

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn policy(choice: TransportChoice) -> TransportPolicy {
    TransportPolicy::new(choice, &Limits::default())
}

/// Returns the time of the next probe in seconds from `start`.
fn probe(policy: &TransportPolicy, start: Instant) -> Option<u64> {
    policy
        .probe_at()
        .map(|at| at.duration_since(start).as_secs())
}

#[test]
fn last_ready_transport_is_dialed_first_and_the_other_still_tried() {
    let mut policy = policy(TransportChoice::Auto);
    let now = Instant::now();
    assert_eq!(policy.dial_order(), (Quic, Some(H2)));
    for (ready, other, change) in [
        (H2, Quic, TransportChange::Fallback),
        (H2, Quic, TransportChange::None),
        (Quic, H2, TransportChange::Upgrade),
        (Quic, H2, TransportChange::None),
    ] {
        assert_eq!(policy.ready(ready, now, 0.0), change);
        assert_eq!(policy.dial_order(), (ready, Some(other)));
    }
}

#[test]
fn quic_is_probed_every_45_s_while_h2_carries_the_session() {
    let mut policy = policy(TransportChoice::Auto);
    let start = Instant::now();
    policy.record_dial(Quic, start, 0.0);
    assert_eq!(policy.probe_at(), None);
    policy.ready(H2, start + seconds(3), 0.0);
    assert_eq!(probe(&policy, start), Some(45));
    // Replacing a session over h2 does not postpone the probe.
    policy.record_loss(start + seconds(30));
    policy.record_dial(H2, start + seconds(31), 0.0);
    policy.ready(H2, start + seconds(32), 0.0);
    assert_eq!(probe(&policy, start), Some(45));
    policy.record_dial(Quic, start + seconds(45), 1.0);
    assert_eq!(probe(&policy, start), Some(45 + 36));
    policy.ready(Quic, start + seconds(46), 0.0);
    assert_eq!(policy.probe_at(), None);
}

#[test]
fn quic_that_held_or_was_not_promoted_is_probed_as_usual() {
    let mut policy = policy(TransportChoice::Auto);
    let start = Instant::now();
    let lose = |policy: &mut TransportPolicy, after: u64| {
        policy.record_dial(Quic, start, 0.0);
        policy.record_loss(start + seconds(after));
        policy.ready(H2, start + seconds(after), 0.0);
        probe(policy, start).unwrap()
    };
    assert_eq!(lose(&mut policy, 1), 45, "not promoted");
    for (held, next) in [(59, 59 + 120), (59, 59 + 240), (60, 45), (59, 59 + 120)] {
        policy.ready(Quic, start, 0.0);
        assert_eq!(lose(&mut policy, held), next);
    }
}

#[test]
fn fallback_of_another_connector_is_adopted_and_quic_probed_later() {
    let mut auto = policy(TransportChoice::Auto);
    let start = Instant::now();
    auto.adopt_fallback(start);
    assert_eq!(auto.dial_order(), (H2, Some(Quic)));
    assert_eq!(auto.ready(H2, start, 0.0), TransportChange::None);
    assert_eq!(probe(&auto, start), Some(45));
    auto.probe_quic_now(start + seconds(5));
    assert_eq!(probe(&auto, start), Some(5));
    let mut quic_only = policy(TransportChoice::Quic);
    quic_only.adopt_fallback(start);
    assert_eq!(quic_only.dial_order(), (Quic, None));
}

#[test]
fn silence_that_ends_well_is_no_loss() {
    let mut policy = policy(TransportChoice::Auto);
    let start = Instant::now();
    policy.ready(H2, start, 0.0);
    policy.record_dial(Quic, start, 0.0);
    policy.ready(Quic, start, 0.0);
    policy.record_loss(start + seconds(10));
    policy.record_recovery();
    policy.record_loss(start + seconds(100));
    policy.ready(H2, start + seconds(103), 0.0);
    assert_eq!(probe(&policy, start), Some(45));
}

#[test]
fn answer_on_an_old_session_calls_for_a_probe_unless_quic_did_not_hold() {
    let mut policy = policy(TransportChoice::Auto);
    let start = Instant::now();
    policy.record_dial(Quic, start, 0.0);
    policy.ready(H2, start, 0.0);
    policy.probe_quic_now(start + seconds(7));
    assert_eq!(probe(&policy, start), Some(7));
    policy.record_dial(Quic, start + seconds(7), 0.0);
    assert_eq!(probe(&policy, start), Some(7 + 45));

    policy.ready(Quic, start + seconds(10), 0.0);
    policy.record_loss(start + seconds(20));
    policy.ready(H2, start + seconds(23), 0.0);
    policy.probe_quic_now(start + seconds(30));
    assert_eq!(probe(&policy, start), Some(23 + 120));
}
