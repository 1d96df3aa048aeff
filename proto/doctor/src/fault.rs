//! Faults, and the findings that they become.

use std::collections::BTreeMap;

use tunnel_process::name_list::NameList;

use super::{Explanation, Fact, Finding, Severity};

/// A fault in a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// How serious the fault is.
    pub severity: Severity,
    /// The object that has the fault.
    pub place: String,
    /// The fault, in one line.
    pub what: String,
    /// The command or the change that fixes it, in one line.
    pub fix: String,
}

/// What faults of one kind have in common.
#[derive(Debug, Clone)]
pub struct FaultKind {
    /// What the objects are, as in `nodes`.
    pub noun: &'static str,
    /// The fault, without what differs between the objects.
    pub what: String,
    /// The command or the change that fixes it.
    pub fix: &'static str,
}

/// Faults of which those of one kind are one finding, however many objects have them. A kind that one
/// object has is reported with the details of that object.
#[derive(Debug, Clone, Default)]
pub struct FaultGroups(BTreeMap<(Severity, String), FaultGroup>);

#[derive(Debug, Clone)]
struct FaultGroup {
    kind: FaultKind,
    first: Fault,
    names: NameList,
}

impl FaultGroups {
    /// Adds the fault of the object with this name.
    pub fn add(&mut self, kind: FaultKind, name: &str, fault: Fault) {
        let key = (fault.severity, kind.what.clone());
        let group = self.0.entry(key).or_insert_with(|| FaultGroup {
            kind,
            first: fault,
            names: NameList::default(),
        });
        group.names.push(name);
    }

    /// Adds a fault that is a finding of its own.
    pub fn add_alone(&mut self, fault: Fault) {
        let kind = FaultKind {
            noun: "faults",
            what: format!("{}: {}", fault.place, fault.what),
            fix: "",
        };
        let place = fault.place.clone();
        self.add(kind, &place, fault);
    }

    /// Returns whether there is no fault.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the faults of other groups.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// Returns the findings of a check.
    pub fn findings(&self, check: &Explanation) -> Vec<Finding> {
        let findings = self.0.values().map(|group| {
            let FaultGroup { kind, first, names } = group;
            let fault = if names.count() == 1 {
                first.clone()
            } else {
                Fault {
                    severity: first.severity,
                    place: format!("{} {}", names.count(), kind.noun),
                    what: format!("{}: {names}", kind.what),
                    fix: kind.fix.to_owned(),
                }
            };
            Finding {
                objects: names.clone(),
                ..fault.of(check)
            }
        });
        findings.collect()
    }
}

impl Fault {
    /// Returns the finding of a check.
    pub fn of(self, check: &Explanation) -> Finding {
        Finding {
            id: check.id,
            severity: self.severity,
            what: self.what,
            objects: NameList::of(&[&self.place]),
            place: self.place,
            consequence: check.consequence,
            fix: self.fix,
            link: check.link,
        }
    }
}

/// The faults that a check found, and why some of its facts are not known.
#[derive(Debug, Default)]
pub struct Found {
    /// The faults.
    pub faults: Vec<Fault>,
    /// The reasons.
    pub unknown: Vec<String>,
}

impl Found {
    /// Returns the result of the check. Without a fault it could not be done if a fact is unknown.
    ///
    /// # Errors
    /// The reasons.
    pub fn result(self) -> Fact<Vec<Fault>> {
        if self.faults.is_empty() && !self.unknown.is_empty() {
            return Err(self.unknown.join("; "));
        }
        Ok(self.faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECK: Explanation = Explanation {
        id: "D09",
        checks: "",
        consequence: "",
        fix: "",
        link: "",
    };

    #[test]
    fn fault_of_many_objects_is_one_finding_and_that_of_one_has_its_details() {
        let mut groups = FaultGroups::default();
        let away = |number: usize| Fault {
            severity: Severity::Error,
            place: format!("n{number}"),
            what: format!("no agent is connected; last seen {number}"),
            fix: format!("on n{number}"),
        };
        let kind = || FaultKind {
            noun: "nodes",
            what: "no agent is connected".to_owned(),
            fix: "on each node",
        };
        groups.add(kind(), "n0", away(0));
        let [one] = &groups.findings(&CHECK)[..] else {
            panic!("{groups:?}");
        };
        assert_eq!((one.place.as_str(), one.fix.as_str()), ("n0", "on n0"));
        assert_eq!(
            (one.objects.count(), one.objects.shown()),
            (1, &["n0".to_owned()][..])
        );
        for number in 1..20_000 {
            groups.add(kind(), &format!("n{number}"), away(number));
        }
        groups.add_alone(away(7));
        let [alone, many] = &groups.findings(&CHECK)[..] else {
            panic!("{groups:?}");
        };
        assert_eq!(
            (many.place.as_str(), many.fix.as_str()),
            ("20000 nodes", "on each node")
        );
        assert!(
            many.what.ends_with("n8, n9 and 19990 more"),
            "{}",
            many.what
        );
        assert_eq!(
            (many.objects.count(), many.objects.shown().len()),
            (20_000, 10)
        );
        assert_eq!(alone.place, "n7");
    }
}
