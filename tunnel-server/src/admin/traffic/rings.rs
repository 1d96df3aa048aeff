//! The history of traffic in rings of fixed size: the installation by minutes of one day, a node by
//! quarters of an hour of one day. Pure.

use std::collections::VecDeque;

use serde::Serialize;

/// What happened in the installation in one minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MinutePoint {
    /// Minutes since the Unix epoch.
    #[serde(skip)]
    pub(crate) minute: u64,
    /// Sessions of agents at the end of the minute.
    pub(crate) sessions: u64,
    /// Requests and streams of callers that ended.
    pub(crate) requests: u64,
    /// Those of them that failed.
    pub(crate) errors: u64,
    /// Payload bytes from agents.
    pub(crate) bytes_in: u64,
    /// Payload bytes to agents.
    pub(crate) bytes_out: u64,
}

/// The last 1,440 minutes of the installation. Minutes in which nothing was observed have no point.
#[derive(Debug, Default)]
pub(crate) struct MinuteRing(VecDeque<MinutePoint>);

impl MinuteRing {
    /// Adds what was observed to its minute. A clock that goes back adds to the last minute.
    pub(crate) fn add(&mut self, observed: MinutePoint) {
        match self.0.back_mut() {
            Some(last) if last.minute >= observed.minute => {
                last.sessions = observed.sessions;
                last.requests += observed.requests;
                last.errors += observed.errors;
                last.bytes_in += observed.bytes_in;
                last.bytes_out += observed.bytes_out;
            }
            Some(_) | None => {
                if self.0.len() == MINUTES {
                    self.0.pop_front();
                }
                self.0.push_back(observed);
            }
        }
    }

    /// Returns the last point whose minute is over, or the only one.
    pub(crate) fn last_minute(&self) -> Option<&MinutePoint> {
        let before_last = self.0.len().checked_sub(2).and_then(|at| self.0.get(at));
        before_last.or_else(|| self.0.back())
    }

    /// Returns `count` values of `minutes` minutes each, the last of which ends with the last point:
    /// the mean of `value` over the points in each, or `None` without one. It is rounded up, so that one
    /// failed request is not none.
    pub(crate) fn means(
        &self,
        count: usize,
        minutes: u64,
        value: impl Fn(&MinutePoint) -> u64,
    ) -> Vec<Option<u64>> {
        let mut sums = vec![(0_u64, 0_u64); count];
        let end = self.0.back().map_or(0, |last| last.minute);
        for point in self.0.iter().rev() {
            let age = usize::try_from((end - point.minute) / minutes).unwrap_or(usize::MAX);
            let Some(sum) = count.checked_sub(1 + age).and_then(|at| sums.get_mut(at)) else {
                break;
            };
            *sum = (sum.0.saturating_add(value(point)), sum.1 + 1);
        }
        let means = sums.into_iter();
        means
            .map(|(sum, points)| (points > 0).then(|| sum.div_ceil(points)))
            .collect()
    }
}

/// What happened to a node in a quarter of an hour, to three digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodePoint {
    bytes: u16,
    requests: u16,
    errors: u8,
    /// Part of the observed time with a session that answers, in 200ths; [`UNKNOWN`] if nothing was
    /// observed.
    up: u8,
}

impl NodePoint {
    const NONE: Self = Self {
        bytes: 0,
        requests: 0,
        errors: 0,
        up: UNKNOWN,
    };

    /// Returns the payload bytes in both directions.
    pub(crate) fn bytes(self) -> u64 {
        expand(self.bytes, 10)
    }

    /// Returns the number of requests, failed ones included.
    pub(crate) fn requests(self) -> u64 {
        expand(self.requests, 10)
    }

    /// Returns the number of failed requests.
    pub(crate) fn errors(self) -> u64 {
        expand(self.errors.into(), 5)
    }

    /// Returns the percentage of time with a session that answers, or `None` if nothing was observed.
    pub(crate) fn up_percent(self) -> Option<u8> {
        (self.up != UNKNOWN).then_some(self.up / 2)
    }
}

/// The quarter of an hour that is not over.
#[derive(Debug, Clone, Copy, Default)]
struct CurrentPoint {
    bytes: u64,
    requests: u32,
    errors: u32,
    observed_seconds: u16,
    up_seconds: u16,
}

/// The last 96 quarters of an hour of a node, and its bytes in the last minute: less than 700 bytes.
#[derive(Debug)]
pub(crate) struct NodeRing {
    points: [NodePoint; QUARTERS],
    /// Quarters of an hour since the Unix epoch.
    quarter: u32,
    /// The quarter of the first observation, and the seconds of it that were observed.
    first: (u32, u16),
    current: CurrentPoint,
    /// Bytes from and to the agent in each of the last ticks, in units of 8, and their sums.
    ticks: [[u32; 2]; TICKS as usize],
    sums: [u64; 2],
    tick: u8,
}

/// What was observed of a node in one tick.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NodeTick {
    /// Seconds since the last tick.
    pub(crate) seconds: u16,
    pub(crate) is_up: bool,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) requests: u32,
    pub(crate) errors: u32,
}

impl NodeRing {
    pub(crate) fn new(quarter: u32) -> Self {
        Self {
            points: [NodePoint::NONE; QUARTERS],
            quarter,
            first: (quarter, 0),
            current: CurrentPoint::default(),
            ticks: [[0; 2]; TICKS as usize],
            sums: [0; 2],
            tick: 0,
        }
    }

    /// Adds what was observed in a tick that ends in `quarter`. A clock that goes back adds to the
    /// last quarter.
    pub(crate) fn add(&mut self, quarter: u32, tick: NodeTick) {
        if quarter > self.quarter {
            let point = self.current.point();
            *self.slot(self.quarter) = point;
            for skipped in (self.quarter + 1..=quarter).rev().take(QUARTERS) {
                *self.slot(skipped) = NodePoint::NONE;
            }
            self.quarter = quarter;
            self.current = CurrentPoint::default();
        }
        let current = &mut self.current;
        current.bytes = (current.bytes).saturating_add(tick.bytes_in + tick.bytes_out);
        current.requests = current.requests.saturating_add(tick.requests);
        current.errors = current.errors.saturating_add(tick.errors);
        current.observed_seconds = current.observed_seconds.saturating_add(tick.seconds);
        if self.first.0 == self.quarter {
            self.first.1 = current.observed_seconds;
        }
        let up_seconds = if tick.is_up { tick.seconds } else { 0 };
        current.up_seconds = current.up_seconds.saturating_add(up_seconds);
        if let Some(slot) = self.ticks.get_mut(usize::from(self.tick)) {
            let before = *slot;
            *slot = [tick.bytes_in, tick.bytes_out]
                .map(|bytes| u32::try_from(bytes / 8).unwrap_or(u32::MAX));
            for ((sum, new), old) in self.sums.iter_mut().zip(*slot).zip(before) {
                *sum = *sum + u64::from(new) - u64::from(old);
            }
        }
        self.tick = (self.tick + 1) % TICKS;
    }

    fn slot(&mut self, quarter: u32) -> &mut NodePoint {
        // The remainder is below the length.
        &mut self.points[quarter as usize % QUARTERS]
    }

    /// Returns the 96 points, the current one last.
    pub(crate) fn points(&self) -> impl DoubleEndedIterator<Item = NodePoint> + '_ {
        let next = self.quarter as usize % QUARTERS + 1;
        let (newer, older) = self.points.split_at(next);
        let earlier = older
            .iter()
            .chain(newer.split_last().map_or(&[][..], |(_, newer)| newer));
        earlier.copied().chain([self.current.point()])
    }

    /// Returns the seconds of each point: those since the first observation, and those up to now.
    pub(crate) fn seconds(&self) -> impl Iterator<Item = u16> + '_ {
        let ages = (0..QUARTERS).rev();
        ages.map(|age| {
            let before = u32::try_from(age).unwrap_or(u32::MAX);
            let quarter = self.quarter.saturating_sub(before);
            if age == 0 {
                self.current.observed_seconds
            } else if quarter == self.first.0 {
                self.first.1
            } else {
                QUARTER_SECONDS
            }
        })
    }

    /// Returns the bytes from and to the agent in each second, on average over the last minute.
    pub(crate) fn bytes_per_second(&self) -> [u64; 2] {
        self.sums.map(|sum| sum * 8 / 60)
    }

    /// Returns the failed requests of the last hour, up to 15 minutes more or less.
    pub(crate) fn errors_last_hour(&self) -> u64 {
        let current = self.quarter as usize % QUARTERS;
        let earlier =
            (1..4).filter_map(|age| self.points.get((current + QUARTERS - age) % QUARTERS));
        u64::from(self.current.errors) + earlier.map(|point| point.errors()).sum::<u64>()
    }

    /// Returns whether the ring has neither a session nor a request.
    pub(crate) fn is_empty(&self) -> bool {
        let mut points = self.points();
        points.all(|point| point.requests == 0 && matches!(point.up, 0 | UNKNOWN))
    }
}

impl CurrentPoint {
    fn point(&self) -> NodePoint {
        let up = u32::from(self.up_seconds) * u32::from(UP_WHOLE);
        let up = up.checked_div(self.observed_seconds.into());
        NodePoint {
            bytes: compact(self.bytes, 10),
            requests: compact(self.requests.into(), 10),
            errors: u8::try_from(compact(self.errors.into(), 5)).unwrap_or(u8::MAX),
            up: up.and_then(|up| u8::try_from(up).ok()).unwrap_or(UNKNOWN),
        }
    }
}

/// Returns a number as its highest `digits` bits and, above them, the number of bits below these.
fn compact(value: u64, digits: u32) -> u16 {
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(digits);
    u16::try_from(u64::from(shift << digits) | (value >> shift)).unwrap_or(u16::MAX)
}

fn expand(compact: u16, digits: u32) -> u64 {
    let value = u64::from(compact) & ((1 << digits) - 1);
    value << (compact >> digits)
}

/// Minutes of the installation's history.
const MINUTES: usize = 1440;
/// Quarters of an hour of a node's history.
pub(crate) const QUARTERS: usize = 96;
const QUARTER_SECONDS: u16 = 15 * 60;
/// Ticks of a minute.
const TICKS: u8 = 6;
/// All of the observed time.
const UP_WHOLE: u8 = 200;
/// Nothing was observed.
const UNKNOWN: u8 = u8::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_fit_six_bytes_a_point() {
        assert_eq!(size_of::<NodePoint>(), 6);
        for value in [0, 1, 1023, 1024, 123_456_789, u64::MAX] {
            let shown = expand(compact(value, 10), 10);
            assert!(
                shown <= value && value - shown <= value / 512,
                "{value}: {shown}"
            );
        }
        for value in [0, 31, 32, 1000, 31 << 7] {
            let shown = expand(compact(value, 5), 5);
            assert!(
                shown <= value && value - shown <= value / 16,
                "{value}: {shown}"
            );
        }
        assert_eq!(compact(31 << 7, 5), 255);
    }

    #[test]
    fn ring_of_a_node_has_one_day_and_skips_what_was_not_observed() {
        let tick = |is_up, requests| NodeTick {
            seconds: 10,
            is_up,
            bytes_in: 3_000,
            bytes_out: 600,
            requests,
            errors: requests / 2,
        };
        let mut ring = NodeRing::new(1000);
        let shown = |ring: &NodeRing| -> Vec<_> {
            let points = ring.points();
            points
                .map(|point| (point.up_percent(), point.requests(), point.errors()))
                .collect()
        };
        assert_eq!(shown(&ring), [(None, 0, 0); QUARTERS]);
        ring.add(1000, tick(true, 10));
        assert_eq!(ring.bytes_per_second(), [50, 10], "of a whole minute");
        for _ in 1..6 {
            ring.add(1000, tick(true, 10));
        }
        assert_eq!(ring.bytes_per_second(), [300, 60]);
        ring.add(1000, tick(false, 0));
        ring.add(1000, tick(false, 0));
        assert_eq!(shown(&ring)[QUARTERS - 1], (Some(75), 60, 30));
        ring.add(1003, tick(true, 2));
        let points = shown(&ring);
        assert_eq!(
            points[QUARTERS - 4..],
            [
                (Some(75), 60, 30),
                (None, 0, 0),
                (None, 0, 0),
                (Some(100), 2, 1)
            ]
        );
        assert_eq!(ring.errors_last_hour(), 31);
        let seconds: Vec<_> = ring.seconds().collect();
        assert_eq!(seconds[QUARTERS - 5..], [900, 80, 900, 900, 10]);
        // An older time changes no earlier point.
        ring.add(1001, tick(true, 1));
        assert_eq!(shown(&ring)[QUARTERS - 1], (Some(100), 3, 1));
        ring.add(1003 + 95, tick(false, 0));
        assert_eq!(shown(&ring)[0], (Some(100), 3, 1));
        assert!(!ring.is_empty());
        ring.add(1003 + 96, tick(false, 0));
        assert!(ring.is_empty(), "the day is over");
        ring.add(u32::MAX, tick(true, 0));
        assert_eq!(shown(&ring)[..QUARTERS - 1], [(None, 0, 0); QUARTERS - 1]);
        for ticks in (0..6).rev() {
            ring.add(u32::MAX, NodeTick::default());
            assert_eq!(ring.bytes_per_second(), [50 * ticks, 10 * ticks]);
        }
    }

    #[test]
    fn memory_of_twenty_thousand_nodes_is_below_16_mib() {
        // A slot of the map at its lowest load, the box, and the padding of the allocator.
        let node = size_of::<NodeRing>() + 41 + 8 + 24;
        assert!(node * 20_000 < 16 << 20, "{node}");
    }

    #[test]
    fn ring_of_the_installation_has_the_last_day_by_minutes() {
        let mut ring = MinuteRing::default();
        assert_eq!(ring.last_minute(), None);
        assert_eq!(ring.means(2, 1, |point| point.requests), [None, None]);
        let point = |minute, requests| MinutePoint {
            minute,
            requests,
            sessions: minute,
            ..MinutePoint::default()
        };
        for minute in 0..2000 {
            ring.add(point(minute, 1));
            ring.add(point(minute, minute));
        }
        assert_eq!(ring.0.len(), 1440);
        assert_eq!(ring.last_minute().unwrap().requests, 1999);
        let requests = |point: &MinutePoint| point.requests;
        assert_eq!(
            ring.means(60, 1, requests)[57..],
            [Some(1998), Some(1999), Some(2000)]
        );
        let day = ring.means(96, 15, |point| point.sessions);
        assert_eq!((day[0], day[95]), (Some(567), Some(1992)));
        ring.add(point(5, 7));
        assert_eq!(
            ring.means(1, 1, requests),
            [Some(2007)],
            "the clock went back"
        );
        ring.add(point(2001, 1));
        ring.add(point(2002, 0));
        assert_eq!(ring.means(1, 2, requests), [Some(1)], "one is not none");
        let mut ring = MinuteRing::default();
        ring.add(point(1999, 2007));
        ring.add(point(2002, 0));
        assert_eq!(
            ring.means(4, 1, requests),
            [Some(2007), None, None, Some(0)]
        );
    }
}
