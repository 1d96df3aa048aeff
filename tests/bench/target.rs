//! Targets for figures, and the check whether a figure meets its target.

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

impl Bound {
    pub(crate) fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(least) => write!(formatter, "at least {least}"),
            Self::AtMost(most) => write!(formatter, "at most {most}"),
        }
    }
}

impl std::fmt::Display for Of {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Itself => Ok(()),
            Self::Ratio(other) => write!(formatter, " of {other}"),
            Self::Above(other) => write!(formatter, " above {other}"),
        }
    }
}
