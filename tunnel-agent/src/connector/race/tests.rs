use super::*;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// A race of QUIC, then h2.
fn race() -> (Race, Instant) {
    let start = Instant::now();
    let order = (Rung::Quic, Some(Rung::H2));
    (Race::new(order, start, seconds(3)), start)
}

#[test]
fn second_starts_after_the_head_start_or_when_the_first_has_failed() {
    let (mut late, start) = race();
    assert_eq!(late.due(), Some(start + seconds(3)));
    assert_eq!(late.head_start_over(), Some(Rung::H2));
    assert_eq!((late.due(), late.head_start_over()), (None, None));
    for failure in [Failure::NoWay, Failure::Silence] {
        let (mut early, _) = race();
        assert_eq!(early.failed(Rung::Quic, failure), Step::Dial(Rung::H2));
        assert_eq!(early.due(), None);
        assert_eq!(early.failed(Rung::H2, failure), Step::Over);
    }
}

#[test]
fn answer_stops_the_clock_of_the_head_start_but_not_the_second_chance() {
    let (mut race, _) = race();
    race.answered(Rung::Quic);
    assert_eq!(race.due(), None);
    assert_eq!(
        race.failed(Rung::Quic, Failure::Silence),
        Step::Dial(Rung::H2)
    );
}

#[test]
fn definite_answer_decides() {
    for (rung, failure, decides) in [
        (Rung::Quic, Failure::Alert, true),
        (Rung::Quic, Failure::Word, true),
        (Rung::Quic, Failure::NoWay, false),
        (Rung::H2, Failure::Alert, false),
        (Rung::H2, Failure::Word, true),
        (Rung::H2, Failure::NoWay, false),
    ] {
        let (mut race, _) = race();
        race.head_start_over();
        let step = race.failed(rung, failure);
        assert_eq!(step == Step::Over, decides, "{rung:?} {failure:?} {step:?}");
    }
}

#[test]
fn alert_over_remembered_h2_lets_quic_run() {
    let order = (Rung::H2, Some(Rung::Quic));
    let mut race = Race::new(order, Instant::now(), seconds(3));
    assert_eq!(
        race.failed(Rung::H2, Failure::Alert),
        Step::Dial(Rung::Quic)
    );
}

#[test]
fn round_does_not_wait_for_the_end_of_the_second() {
    let (mut race, start) = race();
    race.head_start_over();
    assert_eq!(race.failed(Rung::Quic, Failure::Silence), Step::Rest);
    assert!(race.is_resting());
    assert_eq!(race.again(start + seconds(5)), Rung::Quic);
    assert!(!race.is_resting());
    assert_eq!(race.due(), None, "the second still runs");
    assert_eq!(race.failed(Rung::H2, Failure::Silence), Step::Wait);
    assert_eq!(
        race.due(),
        Some(start + seconds(8)),
        "and has its turn again"
    );
    assert_eq!(race.head_start_over(), Some(Rung::H2));
    assert_eq!(race.failed(Rung::H2, Failure::NoWay), Step::Wait);
    assert_eq!(race.due(), None, "once a round");
    assert_eq!(race.failed(Rung::Quic, Failure::Silence), Step::Over);
}

#[test]
fn second_that_fails_between_rounds_is_dialled_in_the_next() {
    let (mut race, start) = race();
    race.head_start_over();
    race.failed(Rung::Quic, Failure::Silence);
    assert_eq!(race.failed(Rung::H2, Failure::Silence), Step::Wait);
    race.again(start + seconds(9));
    assert_eq!(race.due(), Some(start + seconds(12)));
}

#[test]
fn answer_of_the_second_is_awaited() {
    let (mut race, _) = race();
    race.head_start_over();
    race.answered(Rung::H2);
    assert_eq!(race.failed(Rung::Quic, Failure::Silence), Step::Wait);
    assert_eq!(race.failed(Rung::H2, Failure::Silence), Step::Over);
}

#[test]
fn race_of_one_is_over_with_its_failure() {
    let mut race = Race::new((Rung::H2, None), Instant::now(), seconds(3));
    assert_eq!((race.due(), race.head_start_over()), (None, None));
    assert_eq!(race.failed(Rung::H2, Failure::Silence), Step::Over);
}
