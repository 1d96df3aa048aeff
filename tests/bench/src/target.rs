//! Targets for figures. `report.py` checks whether a figure meets its target.

use crate::metric::Metric;

/// A target of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) system: &'static str,
    pub(crate) metric: &'static Metric,
    pub(crate) of: Of,
    pub(crate) bound: Bound,
}

/// The value that is compared with the bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Of {
    /// The figure without a reference.
    Itself,
    /// The figure divided by that of another system in the same round.
    Ratio(&'static str),
    /// The figure minus that of another system in the same round.
    Above(&'static str),
}

/// Limit for the compared value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    pub(crate) const fn new(
        system: &'static str,
        metric: &'static Metric,
        of: Of,
        bound: Bound,
    ) -> Self {
        Self {
            system,
            metric,
            of,
            bound,
        }
    }
}
