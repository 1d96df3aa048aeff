use super::*;
use DialAction::{Dial, Exhausted, RoundFailed, Wait};
use DialFailure::{HandshakeFailed, RefusedByServer, Timeout, Unreachable};
use SessionTransport::{H2, Quic};

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Returns happy eyeballs over QUIC, then h2.
fn happy_eyeballs() -> (HappyEyeballs, Instant) {
    let start = Instant::now();
    let (first, second) = (Quic, Some(H2));
    (HappyEyeballs::new(first, second, start, seconds(3)), start)
}

#[test]
fn second_starts_after_the_head_start_or_when_the_first_has_failed() {
    let (mut late, start) = happy_eyeballs();
    assert_eq!(late.next_timeout(), Some(start + seconds(3)));
    assert_eq!(late.start_second(), Some(H2));
    assert_eq!((late.next_timeout(), late.start_second()), (None, None));
    for failure in [Unreachable, Timeout] {
        let (mut early, _) = happy_eyeballs();
        assert_eq!(early.failed(Quic, failure), Dial(H2));
        assert_eq!(early.next_timeout(), None);
        assert_eq!(early.failed(H2, failure), Exhausted);
    }
}

#[test]
fn answer_stops_the_clock_of_the_head_start_but_not_the_second_chance() {
    let (mut happy_eyeballs, _) = happy_eyeballs();
    happy_eyeballs.answered(Quic);
    assert_eq!(happy_eyeballs.next_timeout(), None);
    assert_eq!(happy_eyeballs.failed(Quic, Timeout), Dial(H2));
}

#[test]
fn definite_answer_decides() {
    for (transport, failure, decides) in [
        (Quic, HandshakeFailed, true),
        (Quic, RefusedByServer, true),
        (Quic, Unreachable, false),
        (H2, HandshakeFailed, false),
        (H2, RefusedByServer, true),
        (H2, Unreachable, false),
    ] {
        let (mut happy_eyeballs, _) = happy_eyeballs();
        happy_eyeballs.start_second();
        let action = happy_eyeballs.failed(transport, failure);
        assert_eq!(
            action == Exhausted,
            decides,
            "{transport:?} {failure:?} {action:?}"
        );
    }
}

#[test]
fn round_does_not_wait_for_the_end_of_the_second() {
    let (mut happy_eyeballs, start) = happy_eyeballs();
    happy_eyeballs.start_second();
    assert_eq!(happy_eyeballs.failed(Quic, Timeout), RoundFailed);
    assert!(happy_eyeballs.is_between_rounds());
    assert_eq!(happy_eyeballs.next_round(start + seconds(5)), Quic);
    assert!(!happy_eyeballs.is_between_rounds());
    assert_eq!(happy_eyeballs.next_timeout(), None, "the second still runs");
    assert_eq!(happy_eyeballs.failed(H2, Timeout), Wait);
    let again = Some(start + seconds(8));
    assert_eq!(
        happy_eyeballs.next_timeout(),
        again,
        "and has its turn again"
    );
    assert_eq!(happy_eyeballs.start_second(), Some(H2));
    assert_eq!(happy_eyeballs.failed(H2, Unreachable), Wait);
    assert_eq!(happy_eyeballs.next_timeout(), None, "once a round");
    assert_eq!(happy_eyeballs.failed(Quic, Timeout), Exhausted);
}

#[test]
fn second_that_fails_between_rounds_is_dialed_in_the_next() {
    let (mut happy_eyeballs, start) = happy_eyeballs();
    happy_eyeballs.start_second();
    happy_eyeballs.failed(Quic, Timeout);
    assert_eq!(happy_eyeballs.failed(H2, Timeout), Wait);
    happy_eyeballs.next_round(start + seconds(9));
    assert_eq!(happy_eyeballs.next_timeout(), Some(start + seconds(12)));
}

#[test]
fn answer_of_the_second_is_awaited() {
    let (mut happy_eyeballs, _) = happy_eyeballs();
    happy_eyeballs.start_second();
    happy_eyeballs.answered(H2);
    assert_eq!(happy_eyeballs.failed(Quic, Timeout), Wait);
    assert_eq!(happy_eyeballs.failed(H2, Timeout), Exhausted);
}

#[test]
fn single_transport_is_exhausted_with_its_failure() {
    let mut happy_eyeballs = HappyEyeballs::new(H2, None, Instant::now(), seconds(3));
    assert_eq!(happy_eyeballs.next_timeout(), None);
    assert_eq!(happy_eyeballs.start_second(), None);
    assert_eq!(happy_eyeballs.failed(H2, Timeout), Exhausted);
}
