//! Tests of the timetable of a link.

use super::*;

#[test]
fn actions_are_in_the_order_of_their_times() {
    let source = IpAddr::from([127, 0, 0, 2]);
    let script = Script::new()
        .at(millis(30), Action::Heal)
        .at(millis(10), Action::Rebind)
        .at(millis(30), Action::ResetTcp)
        .wait(millis(5))
        .then(Action::MoveTo(source));
    let expected = vec![
        (millis(10), Action::Rebind),
        (millis(30), Action::Heal),
        (millis(30), Action::ResetTcp),
        (millis(35), Action::MoveTo(source)),
    ];
    assert_eq!(script.actions(), expected);
    assert_eq!(script.length(), millis(35));
    assert_eq!(Script::from(expected), script);
}

#[test]
fn flapping_link_ends_working() {
    let script = Script::flapping(TrafficClass::UDP, millis(30), millis(20), 2);
    let down = || Action::Set(TrafficClass::UDP, Impairment::black_hole());
    let up = || Action::Set(TrafficClass::UDP, Impairment::default());
    let expected = [
        (millis(30), down()),
        (millis(50), up()),
        (millis(80), down()),
        (millis(100), up()),
    ];
    assert_eq!(script.actions(), expected);
}

#[tokio::test(start_paused = true)]
async fn play_returns_at_the_end_of_the_script() {
    let link = Link::start(SocketAddr::from(([127, 0, 0, 1], 9)), SEED).unwrap();
    let start = Instant::now();
    let script = Script::new()
        .at(millis(300), Action::Heal)
        .wait(millis(200));
    link.play(script).await;
    assert!((millis(500)..millis(510)).contains(&start.elapsed()));
}
