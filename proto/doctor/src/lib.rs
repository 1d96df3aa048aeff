//! What the verb `doctor` of both binaries has in common. Facts are gathered first; a check is a pure
//! function from facts to faults, a table has all checks of a binary, and a report has their findings.
//! The crate knows neither the wire nor the facts of a binary.

#![warn(missing_docs)]

mod check;
mod fact;
mod fault;
mod host;
mod readiness;
mod report;

pub use check::{Check, Checks, GoodValue, GroupedCheck, examine};
pub use fact::{Fact, NO_ANSWER, time_for_facts, within};
pub use fault::{Fault, FaultGroups, FaultKind, Found};
pub use host::{HostFacts, UdpBuffer};
pub use readiness::{Condition, conditions, waits_for};
pub use report::{Explanation, Finding, Passed, Report, Severity, Skipped};
