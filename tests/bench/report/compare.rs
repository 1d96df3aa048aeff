//! Comparison of two reports: finds the figures that became worse, among those that the load of the
//! machine hardly changes.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;

use super::summary::verdict;
use super::{Report, Stat, Summary};
use crate::cases::CASES;
use crate::metric::{ALL, Better, Metric};

/// A figure that became worse.
#[derive(Debug, PartialEq)]
pub(crate) struct Regression {
    pub(crate) case: u8,
    pub(crate) system: &'static str,
    pub(crate) metric: &'static Metric,
    pub(crate) base: f64,
    pub(crate) new: f64,
}

/// Prints the figures that became worse. Fails if there is one, or if there is nothing to compare.
pub(crate) fn run(base: &Report, new: &Report) -> Result<ExitCode> {
    let (worse, compared) = regressions(&Summary::of(base), &Summary::of(new));
    let mut text = format!(
        "{} against {}: {compared} figures compared, {} worse\n",
        new.commit,
        base.commit,
        worse.len()
    );
    for Regression {
        case,
        system,
        metric,
        base,
        new,
    } in &worse
    {
        let (name, unit) = (metric.name, metric.unit);
        writeln!(
            text,
            "case {case}, {system}, {name}: {base:.2} -> {new:.2} {unit}"
        )?;
    }
    for line in lost_targets(&Summary::of(base), &Summary::of(new)) {
        writeln!(text, "{line}")?;
    }
    if compared == 0 {
        text.push_str("nothing to compare: no case was run in both\n");
    }
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(if worse.is_empty() && compared > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the figures that became worse by more than their gate, and how many were compared.
pub(crate) fn regressions(base: &Summary, new: &Summary) -> (Vec<Regression>, usize) {
    let (mut worse, mut compared) = (Vec::new(), 0);
    for case in CASES {
        for metric in ALL {
            let Some(gate) = metric.gate else { continue };
            for system in new.systems(case.number, metric) {
                let found = |summary: &Summary| summary.stat(case.number, system, metric);
                let (Some(before), Some(after)) = (found(base), found(new)) else {
                    continue;
                };
                compared += 1;
                if is_worse(metric, gate, before, after) {
                    worse.push(Regression {
                        case: case.number,
                        system,
                        metric,
                        base: before.median,
                        new: after.median,
                    });
                }
            }
        }
    }
    (worse, compared)
}

/// Returns whether a figure became worse: its median is beyond the gate, and even its best round is
/// worse than the median of the base. One bad round is noise. Counts have no noise.
fn is_worse(metric: &Metric, gate: f64, before: Stat, after: Stat) -> bool {
    if gate == 0.0 {
        return after.most > before.most;
    }
    match metric.better {
        Better::Lower => after.median > before.median * (1.0 + gate) && after.least > before.median,
        Better::Higher => after.median < before.median * (1.0 - gate) && after.most < before.median,
    }
}

/// Returns a line for each target that the base meets and the new report misses. These lines do not
/// fail the comparison, because some targets are ratios of wall times.
fn lost_targets(base: &Summary, new: &Summary) -> Vec<String> {
    let before = base.targets();
    let mut lines = Vec::new();
    for (case, target, found) in new.targets() {
        let was = before.iter().find(|(_, old, _)| std::ptr::eq(*old, target));
        let was_met = was.is_some_and(|(_, old, found)| verdict(old, *found) == "met");
        if was_met && verdict(target, found) == "missed" {
            let (system, name, of) = (target.system, target.metric.name, target.of);
            lines.push(format!(
                "no longer met: case {case}, {system}, {name}{of} {}",
                target.bound
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::DOWN_CPU;
    use crate::report::json::tests::report;

    fn with(cpu: [f64; 3]) -> Summary {
        let mut report = report();
        let costs = report
            .samples
            .iter_mut()
            .filter(|sample| *sample.metric == DOWN_CPU);
        costs.zip(cpu).for_each(|(sample, cpu)| sample.value = cpu);
        Summary::of(&report)
    }

    #[test]
    fn cost_beyond_the_gate_in_all_rounds_is_a_regression() {
        let (worse, compared) = regressions(&with([0.8, 0.8, 0.8]), &with([0.9, 0.9, 1.0]));
        assert_eq!((worse.len(), compared), (1, 1));
        assert_eq!((worse[0].base, worse[0].new), (0.8, 0.9));
    }

    #[test]
    fn one_bad_round_and_small_changes_are_none() {
        for after in [[0.8, 0.79, 3.0], [0.87, 0.87, 0.87], [0.79, 1.0, 1.0]] {
            assert!(
                regressions(&with([0.8, 0.8, 0.8]), &with(after))
                    .0
                    .is_empty()
            );
        }
    }

    #[test]
    fn rates_of_a_slower_machine_are_none() {
        let base = report();
        let mut slow = report();
        slow.samples
            .iter_mut()
            .filter(|sample| *sample.metric != DOWN_CPU)
            .for_each(|sample| {
                sample.value /= 10.0;
            });
        assert!(
            regressions(&Summary::of(&base), &Summary::of(&slow))
                .0
                .is_empty()
        );
    }
}
