use super::*;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Returns happy eyeballs over QUIC, then h2.
fn happy_eyeballs() -> (HappyEyeballs, Instant) {
    let start = Instant::now();
    let (first, second) = (SessionTransport::Quic, Some(SessionTransport::H2));
    (HappyEyeballs::new(first, second, start, seconds(3)), start)
}

#[test]
fn second_starts_after_the_head_start_or_when_the_first_has_failed() {
    let (mut late, start) = happy_eyeballs();
    assert_eq!(late.next_timeout(), Some(start + seconds(3)));
    assert_eq!(late.start_second(), Some(SessionTransport::H2));
    assert_eq!((late.next_timeout(), late.start_second()), (None, None));
    for failure in [DialFailure::Unreachable, DialFailure::Timeout] {
        let (mut early, _) = happy_eyeballs();
        assert_eq!(
            early.failed(SessionTransport::Quic, failure),
            DialAction::Dial(SessionTransport::H2)
        );
        assert_eq!(early.next_timeout(), None);
        assert_eq!(
            early.failed(SessionTransport::H2, failure),
            DialAction::Exhausted
        );
    }
}

#[test]
fn answer_stops_the_clock_of_the_head_start_but_not_the_second_chance() {
    let (mut happy_eyeballs, _) = happy_eyeballs();
    happy_eyeballs.answered(SessionTransport::Quic);
    assert_eq!(happy_eyeballs.next_timeout(), None);
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::Quic, DialFailure::Timeout),
        DialAction::Dial(SessionTransport::H2)
    );
}

#[test]
fn definite_answer_decides() {
    for (transport, failure, decides) in [
        (SessionTransport::Quic, DialFailure::HandshakeFailed, true),
        (SessionTransport::Quic, DialFailure::RefusedByServer, true),
        (SessionTransport::Quic, DialFailure::Unreachable, false),
        (SessionTransport::H2, DialFailure::HandshakeFailed, false),
        (SessionTransport::H2, DialFailure::RefusedByServer, true),
        (SessionTransport::H2, DialFailure::Unreachable, false),
    ] {
        let (mut happy_eyeballs, _) = happy_eyeballs();
        happy_eyeballs.start_second();
        let action = happy_eyeballs.failed(transport, failure);
        assert_eq!(
            action == DialAction::Exhausted,
            decides,
            "{transport:?} {failure:?} {action:?}"
        );
    }
}

#[test]
fn alert_over_remembered_h2_lets_quic_run() {
    let (first, second) = (SessionTransport::H2, Some(SessionTransport::Quic));
    let mut happy_eyeballs = HappyEyeballs::new(first, second, Instant::now(), seconds(3));
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::HandshakeFailed),
        DialAction::Dial(SessionTransport::Quic)
    );
}

#[test]
fn round_does_not_wait_for_the_end_of_the_second() {
    let (mut happy_eyeballs, start) = happy_eyeballs();
    happy_eyeballs.start_second();
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::Quic, DialFailure::Timeout),
        DialAction::RoundFailed
    );
    assert!(happy_eyeballs.is_between_rounds());
    assert_eq!(
        happy_eyeballs.next_round(start + seconds(5)),
        SessionTransport::Quic
    );
    assert!(!happy_eyeballs.is_between_rounds());
    assert_eq!(happy_eyeballs.next_timeout(), None, "the second still runs");
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::Timeout),
        DialAction::Wait
    );
    assert_eq!(
        happy_eyeballs.next_timeout(),
        Some(start + seconds(8)),
        "and has its turn again"
    );
    assert_eq!(happy_eyeballs.start_second(), Some(SessionTransport::H2));
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::Unreachable),
        DialAction::Wait
    );
    assert_eq!(happy_eyeballs.next_timeout(), None, "once a round");
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::Quic, DialFailure::Timeout),
        DialAction::Exhausted
    );
}

#[test]
fn second_that_fails_between_rounds_is_dialed_in_the_next() {
    let (mut happy_eyeballs, start) = happy_eyeballs();
    happy_eyeballs.start_second();
    happy_eyeballs.failed(SessionTransport::Quic, DialFailure::Timeout);
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::Timeout),
        DialAction::Wait
    );
    happy_eyeballs.next_round(start + seconds(9));
    assert_eq!(happy_eyeballs.next_timeout(), Some(start + seconds(12)));
}

#[test]
fn answer_of_the_second_is_awaited() {
    let (mut happy_eyeballs, _) = happy_eyeballs();
    happy_eyeballs.start_second();
    happy_eyeballs.answered(SessionTransport::H2);
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::Quic, DialFailure::Timeout),
        DialAction::Wait
    );
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::Timeout),
        DialAction::Exhausted
    );
}

#[test]
fn single_transport_is_exhausted_with_its_failure() {
    let mut happy_eyeballs =
        HappyEyeballs::new(SessionTransport::H2, None, Instant::now(), seconds(3));
    assert_eq!(
        (happy_eyeballs.next_timeout(), happy_eyeballs.start_second()),
        (None, None)
    );
    assert_eq!(
        happy_eyeballs.failed(SessionTransport::H2, DialFailure::Timeout),
        DialAction::Exhausted
    );
}
