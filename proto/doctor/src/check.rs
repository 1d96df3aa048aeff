//! Checks as data: pure functions from the facts of a binary to faults.

use super::{Explanation, Fact, Fault, FaultGroups, Report};

/// A check each of whose faults is a finding; or the reason why it cannot be done.
pub type Check<F> = fn(&F) -> Fact<Vec<Fault>>;
/// A check whose faults many objects have: one finding for each kind.
pub type GroupedCheck<F> = fn(&F) -> Fact<FaultGroups>;

/// Does all checks and returns their results, sorted.
pub fn examine<F>(
    facts: &F,
    checks: &[(&Explanation, Check<F>)],
    grouped: &[(&Explanation, GroupedCheck<F>)],
) -> Report {
    let mut report = Report::default();
    for (explanation, check) in checks {
        match check(facts) {
            Ok(faults) => {
                let findings = faults.into_iter().map(|fault| fault.of(explanation));
                report.findings.extend(findings);
            }
            Err(reason) => report.skip(explanation.id, reason),
        }
    }
    for (explanation, check) in grouped {
        match check(facts) {
            Ok(groups) => report.findings.extend(groups.findings(explanation)),
            Err(reason) => report.skip(explanation.id, reason),
        }
    }
    report.sort();
    report
}
