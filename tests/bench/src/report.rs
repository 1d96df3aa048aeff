//! The definitions and the samples of `report.json`. `report.py` makes tables and plots of a report,
//! and compares two reports.

use serde_json::{Value, json};

use crate::bench::Sample;
use crate::cases::CASES;
use crate::metric::{ALL, Better, Gate};
use crate::systems::FLOOR;
use crate::target::{Bound, Of, Target};

/// Returns the metrics in the order of reports.
pub(crate) fn metrics() -> Vec<Value> {
    ALL.iter()
        .map(|metric| {
            let better = match metric.better {
                Better::Lower => "lower",
                Better::Higher => "higher",
            };
            let (gate, gate_of) = match metric.gate {
                Gate::Off => (None, None),
                Gate::Itself(share) => (Some(share), None),
                Gate::OfFloor(share) => (Some(share), Some(FLOOR)),
            };
            json!({
                "name": metric.name,
                "unit": metric.unit,
                "better": better,
                "gate": gate,
                "gateOf": gate_of,
            })
        })
        .collect()
}

/// Returns the cases with their targets.
pub(crate) fn cases() -> Vec<Value> {
    CASES
        .iter()
        .map(|case| {
            let targets: Vec<_> = case.targets.iter().map(target_value).collect();
            json!({"number": case.number, "title": case.title, "targets": targets})
        })
        .collect()
}

fn target_value(target: &Target) -> Value {
    let (ratio_to, above) = match target.of {
        Of::Itself => (None, None),
        Of::Ratio(other) => (Some(other), None),
        Of::Above(other) => (None, Some(other)),
    };
    let (at_least, at_most) = match target.bound {
        Bound::AtLeast(least) => (Some(least), None),
        Bound::AtMost(most) => (None, Some(most)),
    };
    json!({
        "system": target.system,
        "metric": target.metric.name,
        "ratioTo": ratio_to,
        "above": above,
        "atLeast": at_least,
        "atMost": at_most,
    })
}

/// Returns the value of a sample, without the definition of its metric.
pub(crate) fn sample_value(sample: &Sample) -> Value {
    json!({
        "case": sample.case,
        "system": sample.system,
        "round": sample.round,
        "metric": sample.metric.name,
        "value": sample.value,
        "foreign": sample.foreign,
    })
}
