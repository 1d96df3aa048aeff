//! Medians and spread over the accepted rounds, and ratios within each round.

use std::collections::{BTreeMap, BTreeSet};

use super::Report;
use crate::bench::Sample;
use crate::cases::CASES;
use crate::metric::Metric;
use crate::target::{Of, Target};

/// Median and spread of one figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Stat {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    /// Number of rounds that have the figure.
    pub(crate) rounds: usize,
    /// Number of accepted rounds of the case.
    pub(crate) of: usize,
}

impl Stat {
    /// Returns the median and the spread of the finite values, `None` if there are none.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.retain(|value| value.is_finite());
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let (low, high) = (
            values.get((values.len() - 1) / 2)?,
            values.get(values.len() / 2)?,
        );
        Some(Self {
            median: f64::midpoint(*low, *high),
            least,
            most,
            rounds: values.len(),
            of: values.len(),
        })
    }
}

type Key = (u8, String, &'static str);

/// Figures of a report by case, system and metric.
#[derive(Debug)]
pub(crate) struct Summary {
    /// Values of the accepted rounds.
    accepted: BTreeMap<Key, BTreeMap<u32, Vec<f64>>>,
    /// Rounds that are dropped, by case.
    pub(crate) dropped: BTreeMap<u8, BTreeSet<u32>>,
    /// Rounds that were run, by case.
    pub(crate) run: BTreeMap<u8, BTreeSet<u32>>,
}

impl Summary {
    pub(crate) fn of(report: &Report) -> Self {
        let mut dropped: BTreeMap<u8, BTreeSet<u32>> = BTreeMap::new();
        let mut run: BTreeMap<u8, BTreeSet<u32>> = BTreeMap::new();
        for sample in &report.samples {
            run.entry(sample.case).or_default().insert(sample.round);
            if sample.foreign > report.foreign_most {
                dropped.entry(sample.case).or_default().insert(sample.round);
            }
        }
        let counts = |sample: &&Sample| {
            let rounds = dropped.get(&sample.case);
            !rounds.is_some_and(|rounds| rounds.contains(&sample.round))
        };
        let mut accepted: BTreeMap<Key, BTreeMap<u32, Vec<f64>>> = BTreeMap::new();
        for sample in report.samples.iter().filter(counts) {
            let key = (sample.case, sample.system.clone(), sample.metric.name);
            accepted
                .entry(key)
                .or_default()
                .entry(sample.round)
                .or_default()
                .push(sample.value);
        }
        Self {
            accepted,
            dropped,
            run,
        }
    }

    /// Returns the cases that have samples.
    pub(crate) fn cases(&self) -> impl Iterator<Item = u8> {
        self.run.keys().copied()
    }

    /// Returns the systems that have this figure, in the order of reports.
    pub(crate) fn systems(&self, case: u8, metric: &Metric) -> Vec<&'static str> {
        let has = |name: &&str| self.rounds(case, name, metric).is_some();
        crate::systems::NAMES.into_iter().filter(has).collect()
    }

    fn rounds(&self, case: u8, system: &str, metric: &Metric) -> Option<&BTreeMap<u32, Vec<f64>>> {
        self.accepted.get(&(case, system.to_owned(), metric.name))
    }

    /// Returns one value for each round. If a round has several, counts are added, and the largest
    /// of other figures is taken.
    fn values(&self, case: u8, system: &str, metric: &Metric) -> BTreeMap<u32, f64> {
        let one = |values: &[f64]| {
            if metric.gate == Some(0.0) {
                values.iter().sum::<f64>()
            } else {
                values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
            }
        };
        let rounds = self.rounds(case, system, metric).into_iter().flatten();
        rounds
            .map(|(round, values)| (*round, one(values.as_slice())))
            .collect()
    }

    /// Returns the figure over all rounds.
    pub(crate) fn stat(&self, case: u8, system: &str, metric: &Metric) -> Option<Stat> {
        let values = self.values(case, system, metric);
        self.stat_of(case, values.into_values().collect())
    }

    fn stat_of(&self, case: u8, values: Vec<f64>) -> Option<Stat> {
        let count = |of: &BTreeMap<u8, BTreeSet<u32>>| of.get(&case).map_or(0, BTreeSet::len);
        let of = count(&self.run) - count(&self.dropped);
        Stat::of(values).map(|stat| Stat { of, ..stat })
    }

    /// Returns the figure in relation to another system, round by round.
    pub(crate) fn related(&self, case: u8, system: &str, metric: &Metric, of: Of) -> Option<Stat> {
        let own = self.values(case, system, metric);
        let (other, divide) = match of {
            Of::Itself => return self.stat(case, system, metric),
            Of::Ratio(other) => (other, true),
            Of::Above(other) => (other, false),
        };
        let other = self.values(case, other, metric);
        let pairs = own
            .iter()
            .filter_map(|(round, own)| Some((own, other.get(round)?)));
        self.stat_of(
            case,
            pairs
                .map(|(own, other)| if divide { own / other } else { own - other })
                .collect(),
        )
    }

    /// Returns the targets of the cases that were run, with the figure for each.
    pub(crate) fn targets(&self) -> Vec<(u8, &'static Target, Option<Stat>)> {
        let mut all = Vec::new();
        for case in CASES
            .iter()
            .filter(|case| self.run.contains_key(&case.number))
        {
            for target in case.targets {
                let found = self.related(case.number, target.system, target.metric, target.of);
                all.push((case.number, target, found));
            }
        }
        all
    }
}

/// Returns whether a target is met, missed or not measured. Counts are judged by their worst round.
pub(crate) fn verdict(target: &Target, found: Option<Stat>) -> &'static str {
    let Some(found) = found else {
        return "not measured";
    };
    let value = if target.metric.gate == Some(0.0) {
        found.most
    } else {
        found.median
    };
    if target.bound.holds(value) {
        "met"
    } else {
        "missed"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::{DOWN, FAILED};
    use crate::report::json::tests::report;

    #[test]
    fn rounds_with_much_foreign_work_are_dropped_and_counted() {
        let mut report = report();
        report
            .samples
            .iter_mut()
            .filter(|sample| sample.round == 1)
            .for_each(|sample| {
                sample.foreign = 0.31;
                sample.value *= 100.0;
            });
        let summary = Summary::of(&report);
        assert_eq!(summary.dropped[&1].len(), 1);
        let stat = summary.stat(1, "direct", &DOWN).unwrap();
        assert_eq!((stat.median, stat.rounds), (1000.0, 2));
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let summary = Summary::of(&report());
        let ratio = summary
            .related(1, "floor", &DOWN, Of::Ratio("direct"))
            .unwrap();
        assert_eq!((ratio.least, ratio.median, ratio.most), (0.5, 0.5, 0.5));
        assert!(
            summary
                .related(1, "floor", &DOWN, Of::Ratio("rathole"))
                .is_none()
        );
    }

    #[test]
    fn a_failure_in_one_round_misses_a_target_of_none() {
        let target = Target::new(
            "floor",
            &FAILED,
            Of::Itself,
            crate::target::Bound::AtMost(0.0),
        );
        let once = Stat::of(vec![0.0, 0.0, 1.0]);
        assert_eq!(verdict(&target, once), "missed");
        assert_eq!(verdict(&target, Stat::of(vec![0.0])), "met");
        assert_eq!(verdict(&target, None), "not measured");
    }
}
