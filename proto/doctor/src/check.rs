//! Checks as data: pure functions from the facts of a binary to faults.

use super::{Explanation, Fact, Fault, FaultGroups, Report};

/// A check each of whose faults is a finding; or the reason why it cannot be done.
pub type Check<F> = fn(&F) -> Fact<Vec<Fault>>;
/// A check whose faults many objects have: one finding for each kind.
pub type GroupedCheck<F> = fn(&F) -> Fact<FaultGroups>;

/// What is good, with the value that was measured. `None` if it is not known.
pub type GoodValue<F> = fn(&F) -> Option<String>;

/// The checks of a binary.
#[derive(Debug)]
pub struct Checks<F: 'static> {
    /// Checks with a finding for each fault.
    pub single: &'static [(&'static Explanation, Check<F>)],
    /// Checks with a finding for each kind of fault.
    pub grouped: &'static [(&'static Explanation, GroupedCheck<F>)],
    /// Values of checks that pass.
    pub values: &'static [(&'static Explanation, GoodValue<F>)],
}

/// Does all checks and returns their results, sorted.
pub fn examine<F>(facts: &F, all: &Checks<F>) -> Report {
    let Checks {
        single: checks,
        grouped,
        values,
    } = all;
    let mut report = Report::default();
    for (explanation, check) in *checks {
        match check(facts) {
            Ok(faults) => {
                let findings = faults.into_iter().map(|fault| fault.of(explanation));
                report.findings.extend(findings);
            }
            Err(reason) => report.skip(explanation.id, reason),
        }
    }
    for (explanation, check) in *grouped {
        match check(facts) {
            Ok(groups) => report.findings.extend(groups.findings(explanation)),
            Err(reason) => report.skip(explanation.id, reason),
        }
    }
    report.sort();
    let of_single = checks.iter().map(|(explanation, _)| *explanation);
    let of_grouped = grouped.iter().map(|(explanation, _)| *explanation);
    for explanation in of_single.chain(of_grouped) {
        let of_check = values.iter().filter(|(of, _)| of.id == explanation.id);
        let found = of_check.filter_map(|(_, value)| value(facts)).collect();
        report.pass(explanation, found);
    }
    report.passed.sort_by_key(|passed| passed.id);
    report
}

#[cfg(test)]
mod tests {
    use tunnel_process::output::OutputFormat;

    use super::*;
    use crate::Severity;

    const A: Explanation = explanation("D01");
    const B: Explanation = explanation("D02");
    const C: Explanation = explanation("D03");
    const D: Explanation = explanation("D04");

    const fn explanation(id: &'static str) -> Explanation {
        Explanation {
            id,
            checks: "what it checks",
            consequence: "",
            fix: "",
            link: "",
        }
    }

    fn fault(severity: Severity) -> Fault {
        Fault {
            severity,
            place: "place".to_owned(),
            what: "what".to_owned(),
            fix: String::new(),
        }
    }

    #[test]
    fn check_without_fault_has_passed_with_its_values() {
        const CHECKS: Checks<u64> = Checks {
            single: &[
                (&A, |_| Ok(Vec::new())),
                (&B, |_| Ok(vec![fault(Severity::Warning)])),
                (&C, |_| Err("unknown".to_owned())),
                (&D, |_| Ok(vec![fault(Severity::Info)])),
                (&A, |_| Ok(Vec::new())),
            ],
            grouped: &[(&D, |_| Ok(FaultGroups::default()))],
            values: &[
                (&D, |round_trip| Some(format!("round trip {round_trip} ms"))),
                (&D, |_| None),
                (&B, |_| Some("a value next to a warning".to_owned())),
            ],
        };
        let report = examine(&12, &CHECKS);
        let mut text = Vec::new();
        report.print(OutputFormat::Table, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let good = "\u{2713} D04 round trip 12 ms\nno fault found: D01\nskipped D03: unknown\n";
        assert!(text.contains(good), "{text}");
        let passed = report.passed.iter();
        let passed: Vec<_> = passed
            .map(|passed| (passed.id, passed.value.as_deref()))
            .collect();
        assert_eq!(passed, [("D01", None), ("D04", Some("round trip 12 ms"))]);
    }
}
