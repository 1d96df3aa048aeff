//! Tests of decisions, without sockets.

use super::super::decide::{Delivery, PacketDecider};
use super::*;

const PACKETS: usize = 20_000;
const LEN: usize = 1200;

#[test]
fn same_seed_decides_the_same() {
    let messy = || {
        Impairment::lossy(0.1)
            .with_duplicate(0.1)
            .with_corrupt(0.1)
            .with_reorder(0.1, millis(5))
            .with_delay(millis(20))
    };
    assert_eq!(fates(SEED, 0, messy()), fates(SEED, 0, messy()));
    assert_ne!(fates(SEED, 0, messy()), fates(SEED + 1, 0, messy()));
    assert_ne!(fates(SEED, 0, messy()), fates(SEED, 1, messy()));
}

#[test]
fn decisions_do_not_depend_on_other_impairments_or_on_the_past() {
    let lost = |fates: Vec<Option<Delivery>>| -> Vec<bool> {
        fates.into_iter().map(|fate| fate.is_none()).collect()
    };
    let plain = lost(fates(SEED, 0, Impairment::lossy(0.1)));
    let corrupted = Impairment::lossy(0.1)
        .with_delay(millis(3))
        .with_corrupt(0.5);
    assert_eq!(lost(fates(SEED, 0, corrupted)), plain);

    let now = Instant::now();
    let mut decider = PacketDecider::new(SEED, 0);
    let mut late = Vec::new();
    for number in 0..PACKETS {
        if number == 100 {
            decider.set(Impairment::lossy(0.1));
        }
        late.push(decider.datagram(now, LEN).is_none());
    }
    assert!(late[..100].iter().all(|lost| !lost));
    assert_eq!(late[100..], plain[100..]);
}

#[test]
fn shares_are_near_what_was_asked() {
    let mut decider = PacketDecider::new(SEED, 0);
    let now = Instant::now();
    decider.set(
        Impairment::lossy(0.05)
            .with_duplicate(0.1)
            .with_corrupt(0.01)
            .with_reorder(0.25, millis(1)),
    );
    for _ in 0..PACKETS {
        decider.datagram(now, LEN);
    }
    let count = decider.count;
    let share = |part: u64, of: u64| part as f64 / of as f64;
    let passed = count.received.packets - count.lost;
    assert!((0.045..0.055).contains(&share(count.lost, count.received.packets)));
    assert!((0.09..0.11).contains(&share(count.duplicated, passed)));
    assert!((0.007..0.013).contains(&share(count.corrupted, passed)));
    assert!((0.24..0.26).contains(&share(count.reordered, passed)));
    assert_eq!(count.dropped.packets, count.lost);
    assert_eq!(count.dropped.bytes, count.lost * LEN as u64);
}

#[test]
fn later_packets_overtake_those_held_back() {
    let start = Instant::now();
    let mut decider = PacketDecider::new(SEED, 0);
    decider.set(Impairment::default().with_reorder(0.25, millis(10)));
    let dues = (0..1000).map(|number| decider.datagram(start + millis(number), LEN).unwrap().due);
    let dues: Vec<_> = dues.collect();
    let overtaken = dues.windows(2).filter(|pair| pair[1] < pair[0]).count();
    assert!(overtaken > 100, "{overtaken}");
    for (number, due) in (0..).zip(dues) {
        let after = due - (start + millis(number));
        assert!(after == Duration::ZERO || after == millis(10), "{after:?}");
    }
}

#[test]
fn rate_spaces_packets_and_its_queue_overflows() {
    let now = Instant::now();
    let mut decider = PacketDecider::new(SEED, 0);
    decider.set(Impairment::limited(100_000).with_queue(5000));
    let dues = (0..10).map(|_| {
        decider
            .datagram(now, 1000)
            .map(|delivery| delivery.due - now)
    });
    let dues: Vec<_> = dues.collect();
    let expected = (1..=5).map(|number| Some(millis(10 * number)));
    assert_eq!(dues[..5], expected.collect::<Vec<_>>());
    assert_eq!(dues[5..], [None; 5]);
    assert_eq!(decider.count.overflowed, 5);
    assert!(decider.datagram(now + millis(10), 1000).is_some());
}

#[test]
fn lost_segment_costs_a_retransmission() {
    let now = Instant::now();
    let mut decider = PacketDecider::new(SEED, 2);
    decider.set(Impairment::lossy(0.1).with_delay(millis(10)));
    for _ in 0..1000 {
        let under_way = decider.piece(now, 1000) - now;
        assert!(under_way == millis(10) || under_way == millis(210));
    }
    let lost = decider.count.lost;
    assert!((70..130).contains(&lost), "{lost}");
    assert_eq!(decider.count.dropped.packets, 0);
}

/// Returns the decisions on a sequence of packets, one per millisecond.
fn fates(seed: u64, direction: u64, impairment: Impairment) -> Vec<Option<Delivery>> {
    // Instants of one process are comparable only to each other.
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    let mut decider = PacketDecider::new(seed, direction);
    decider.set(impairment);
    (0..PACKETS as u64)
        .map(|number| decider.datagram(start + millis(number), LEN))
        .collect()
}
