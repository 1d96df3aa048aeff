//! How far the zones of the servers are, by the round-trip times of this agent's sessions. Pure.
//!
//! Zones that are about as far are equal, so that the weights alone choose between them and the load
//! stays even. A zone in which the agent has had no session for long is as near as the nearest one, and
//! nearer than one that is far: such a zone is tried.

use std::collections::BTreeMap;
use std::time::Duration;

use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::name::ZoneName;

/// The round-trip times to the zones in which the agent has a session, or had one not long ago.
#[derive(Debug, Clone, Default)]
pub struct ZoneDistances {
    zones: BTreeMap<ZoneName, Distance>,
    /// Number of recorded round-trip times.
    records: u64,
}

#[derive(Debug, Clone)]
struct Distance {
    rtt: Duration,
    /// Number of the last record of the zone.
    recorded: u64,
    /// Number of the last round-trip times in a row that are far longer.
    longer: u32,
}

impl ZoneDistances {
    /// Records a round-trip time. Returns whether the distance of the zone has changed: at once if it
    /// is far shorter, and after several that are far longer, since a full queue lasts a while.
    pub fn record(&mut self, zone: &ZoneName, rtt: Duration) -> bool {
        self.records += 1;
        let recorded = self.records;
        if let Some(distance) = self.zones.get_mut(zone) {
            distance.recorded = recorded;
            let is_changed = distance.record(rtt);
            return self.forget_old() || is_changed;
        }
        // Servers choose the names.
        if self.zones.len() >= REPLICAS_MAX {
            self.zones.clear();
        }
        let distance = Distance {
            rtt,
            recorded,
            longer: 0,
        };
        self.zones.insert(zone.clone(), distance);
        true
    }

    /// Forgets the zones without a session for long: what made them far may be over. Returns whether
    /// there was one.
    fn forget_old(&mut self) -> bool {
        let before = self.zones.len();
        let oldest = self.records.saturating_sub(FORGOTTEN_AFTER);
        self.zones.retain(|_, distance| distance.recorded >= oldest);
        self.zones.len() < before
    }

    /// Returns the rank of each zone: 0 for the nearest one and those that are about as far, and one
    /// more for each step to zones that are far farther.
    pub(super) fn ranks(&self, zones: &[Option<&ZoneName>]) -> Vec<usize> {
        let measured = |zone: &ZoneName| self.zones.get(zone).map(|distance| distance.rtt);
        let nearest = zones
            .iter()
            .flatten()
            .filter_map(|zone| measured(zone))
            .min();
        let nearest = nearest.unwrap_or_default();
        let rtts = zones.iter().map(|zone| match zone {
            Some(zone) => measured(zone).unwrap_or_else(|| nearest.min(NEAR)),
            // The distance of an unknown zone cannot be learned.
            None => nearest,
        });
        let rtts: Vec<Duration> = rtts.collect();
        let mut sorted = rtts.clone();
        sorted.sort_unstable();
        // The shortest round-trip time of each rank.
        let mut steps: Vec<Duration> = Vec::new();
        for rtt in sorted {
            if steps.last().is_none_or(|step| is_far_longer(rtt, *step)) {
                steps.push(rtt);
            }
        }
        let rank = |rtt: &Duration| steps.iter().skip(1).filter(|step| *step <= rtt).count();
        rtts.iter().map(rank).collect()
    }
}

impl Distance {
    fn record(&mut self, rtt: Duration) -> bool {
        let is_longer = is_far_longer(rtt, self.rtt);
        self.longer = if is_longer { self.longer + 1 } else { 0 };
        let is_changed = self.longer >= LONGER_MIN || is_far_longer(self.rtt, rtt);
        if is_changed {
            self.rtt = rtt;
            self.longer = 0;
        }
        is_changed
    }
}

/// Returns whether a difference between round-trip times matters.
fn is_far_longer(one: Duration, other: Duration) -> bool {
    one > (other * 2).max(other + MARGIN)
}

/// Least difference that matters. Zones of one region are 1 to 2 ms apart.
const MARGIN: Duration = Duration::from_millis(10);
/// Round-trip time above which a zone that is not measured may be worth a session.
const NEAR: Duration = Duration::from_millis(50);
/// Records of other zones after which a zone is forgotten: an hour with two sessions.
const FORGOTTEN_AFTER: u64 = 120;
/// Round-trip times in a row that must be far longer, each a minute after the last.
const LONGER_MIN: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(name: &str) -> ZoneName {
        name.parse().unwrap()
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn zone_that_was_far_is_tried_again_after_a_while() {
        let (a, b) = (zone("a"), zone("b"));
        let mut distances = ZoneDistances::default();
        distances.record(&b, ms(200));
        distances.record(&a, ms(5));
        assert_eq!(distances.ranks(&[Some(&a), Some(&b)]), [0, 1]);
        let changes = (0..FORGOTTEN_AFTER).filter(|_| distances.record(&a, ms(5)));
        assert_eq!(changes.count(), 1);
        assert_eq!(distances.ranks(&[Some(&a), Some(&b)]), [0, 0]);
    }

    #[test]
    fn zones_that_are_about_as_far_have_one_rank() {
        for (rtts, expected) in [
            (&[][..], [0, 0, 0, 0]),
            (&[("a", 1), ("b", 2), ("c", 8)], [0, 0, 0, 0]),
            (&[("a", 5), ("b", 40), ("c", 200)], [0, 1, 2, 0]),
            (&[("a", 40), ("b", 80), ("c", 81)], [0, 0, 1, 0]),
            // A zone that is not measured is tried if the others are far.
            (&[("a", 5), ("b", 90)], [0, 1, 0, 0]),
            (&[("a", 90), ("b", 95)], [0, 0, 0, 0]),
            (&[("a", 120), ("b", 300)], [1, 2, 0, 1]),
        ] {
            let mut distances = ZoneDistances::default();
            for (name, millis) in rtts {
                assert!(distances.record(&zone(name), ms(*millis)));
            }
            let [a, b, c] = ["a", "b", "c"].map(zone);
            let ranks = distances.ranks(&[Some(&a), Some(&b), Some(&c), None]);
            assert_eq!(ranks, expected, "{rtts:?}");
        }
    }

    #[test]
    fn distance_changes_at_once_to_a_shorter_one_and_later_to_a_longer_one() {
        let mut distances = ZoneDistances::default();
        let a = zone("a");
        for (millis, is_changed) in [
            (300, true),
            (290, false),
            (150, false),
            (149, true),
            (298, false),
            (299, false),
            (299, false),
            (299, false),
            (299, false),
            // One that is not far longer begins the row again.
            (200, false),
            (299, false),
            (299, false),
            (299, false),
            (299, false),
            (299, true),
            (5, true),
            (14, false),
        ] {
            assert_eq!(distances.record(&a, ms(millis)), is_changed, "{millis}");
        }
    }

    #[test]
    fn zones_that_a_server_makes_up_are_bounded() {
        let mut distances = ZoneDistances::default();
        for number in 0..1000 {
            distances.record(&zone(&format!("z{number}")), ms(1));
            assert!(distances.zones.len() <= REPLICAS_MAX);
        }
    }
}
