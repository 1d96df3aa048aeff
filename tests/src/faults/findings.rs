//! The findings of a run: measures, each with its bound.

use std::fmt;
use std::time::Duration;

use super::flow::FlowEnd;
use crate::eventually::scaled;

/// All measures of one run.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Measures in chronological order.
    pub measures: Vec<Measure>,
    /// Bytes that were hashed at both ends.
    pub hashed: u64,
}

/// One value and its bound.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// Description of the measured value.
    pub what: String,
    /// Bound of the value.
    pub bound: Bound,
    pub value: Value,
}

/// The bound of a value. Times are for the reference machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// At most this duration, times the machine's factor.
    Within(Duration),
    /// At least this share.
    AtLeast(f64),
    /// At most this count.
    AtMost(u64),
    /// The last count is at most this many times the first.
    Growth(f64),
    /// The condition must hold.
    Holds,
    /// Reported for information only.
    Nothing,
}

/// A value that a run measured.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// The event took this long.
    Took(Duration),
    /// The event had not happened after this time.
    NotAfter(Duration),
    /// One value as a share of another.
    Share(f64),
    /// A number of events or items.
    Count(u64),
    /// A count at the beginning and at the end.
    Change(u64, u64),
    Yes,
    /// The condition does not hold, with the reason.
    No(String),
}

/// The verdict on a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// There is no bound.
    Info,
    /// The value is within the bound.
    Pass,
    /// The value is within the bound of this machine, but not within that of the reference machine.
    Stretched,
    /// The value misses the bound.
    Miss,
}

impl Findings {
    /// Adds the time until an event, or the time that was waited in vain.
    pub(super) fn within(
        &mut self,
        what: impl Into<String>,
        bound: Duration,
        measured: Result<Duration, Duration>,
    ) {
        self.push(what, Bound::Within(bound), took(measured));
    }

    /// Adds a time without a bound.
    pub(super) fn observed(
        &mut self,
        what: impl Into<String>,
        measured: Result<Duration, Duration>,
    ) {
        self.push(what, Bound::Nothing, took(measured));
    }

    /// Adds a share with the lower bound `least`.
    pub(super) fn at_least(&mut self, what: impl Into<String>, least: f64, share: f64) {
        self.push(what, Bound::AtLeast(least), Value::Share(share));
    }

    /// Adds a count with the upper bound `most`.
    pub(super) fn at_most(&mut self, what: impl Into<String>, most: u64, count: u64) {
        self.push(what, Bound::AtMost(most), Value::Count(count));
    }

    /// Adds a count without a bound.
    pub(super) fn observed_count(&mut self, what: impl Into<String>, count: u64) {
        self.push(what, Bound::Nothing, Value::Count(count));
    }

    /// Adds a count at the beginning and at the end, which may grow by `factor`.
    pub(super) fn growth(&mut self, what: impl Into<String>, factor: f64, change: (u64, u64)) {
        let value = Value::Change(change.0, change.1);
        self.push(what, Bound::Growth(factor), value);
    }

    /// Adds a condition that must hold; `or` describes the failure.
    pub(super) fn holds(
        &mut self,
        what: impl Into<String>,
        is_so: bool,
        or: impl FnOnce() -> String,
    ) {
        let value = if is_so { Value::Yes } else { Value::No(or()) };
        self.push(what, Bound::Holds, value);
    }

    /// Adds streams that must have arrived complete and equal.
    pub(super) fn equal<'a>(
        &mut self,
        what: impl Into<String>,
        ends: impl IntoIterator<Item = &'a FlowEnd>,
    ) {
        self.streams(what, ends, FlowEnd::unequal);
    }

    /// Adds streams that must have arrived complete and equal, or have been cut visibly for both
    /// ends.
    pub(super) fn equal_or_reset<'a>(
        &mut self,
        what: impl Into<String>,
        ends: impl IntoIterator<Item = &'a FlowEnd>,
    ) {
        self.streams(what, ends, FlowEnd::unreported_loss);
    }

    fn streams<'a>(
        &mut self,
        what: impl Into<String>,
        ends: impl IntoIterator<Item = &'a FlowEnd>,
        wrong: impl Fn(&FlowEnd) -> Option<String>,
    ) {
        let mut wrongs = Vec::new();
        for end in ends {
            self.hashed += end.hashed();
            wrongs.extend(wrong(end));
        }
        self.holds(what, wrongs.is_empty(), || wrongs.join("; "));
    }

    fn push(&mut self, what: impl Into<String>, bound: Bound, value: Value) {
        let what = what.into();
        self.measures.push(Measure { what, bound, value });
    }
}

impl Measure {
    /// Returns whether the value is within its bound on this machine.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let is_good = match (self.bound, &self.value) {
            (Bound::Nothing, _) => return Verdict::Info,
            (Bound::Within(bound), Value::Took(took)) if *took > bound => {
                return if *took <= scaled(bound) {
                    Verdict::Stretched
                } else {
                    Verdict::Miss
                };
            }
            (Bound::Within(_), Value::Took(_)) => true,
            (Bound::AtLeast(least), Value::Share(share)) => *share >= least,
            (Bound::AtMost(most), Value::Count(count)) => *count <= most,
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            (Bound::Growth(factor), Value::Change(first, last)) => {
                *last as f64 <= *first as f64 * factor
            }
            (Bound::Holds, value) => *value == Value::Yes,
            (Bound::Within(_) | Bound::AtLeast(_) | Bound::AtMost(_) | Bound::Growth(_), _) => {
                false
            }
        };
        if is_good {
            Verdict::Pass
        } else {
            Verdict::Miss
        }
    }
}

impl Bound {
    /// Returns the bound on this machine; empty if it does not depend on the machine.
    #[must_use]
    pub fn scaled_text(&self) -> String {
        match self {
            Self::Within(bound) => format!("<= {}", seconds(scaled(*bound))),
            Self::AtLeast(_) | Self::AtMost(_) | Self::Growth(_) | Self::Holds | Self::Nothing => {
                String::new()
            }
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Within(bound) => write!(f, "<= {}", seconds(*bound)),
            Self::AtLeast(least) => write!(f, ">= {:.0} %", least * 100.0),
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::Growth(factor) if *factor <= 1.0 => f.write_str("no growth"),
            Self::Growth(factor) => write!(f, "<= +{:.0} %", (factor - 1.0) * 100.0),
            Self::Holds => f.write_str("yes"),
            Self::Nothing => f.write_str("-"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Took(took) => f.write_str(&seconds(*took)),
            Self::NotAfter(waited) => write!(f, "not in {}", seconds(*waited)),
            Self::Share(share) => write!(f, "{:.0} %", share * 100.0),
            Self::Count(count) => count.fmt(f),
            Self::Change(first, last) => write!(f, "{first} -> {last}"),
            Self::Yes => f.write_str("yes"),
            Self::No(_) => f.write_str("NO"),
        }
    }
}

fn took(measured: Result<Duration, Duration>) -> Value {
    measured.map_or_else(Value::NotAfter, Value::Took)
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_happened_is_a_miss_and_information_never_is() {
        let mut findings = Findings::default();
        let second = Duration::from_secs(1);
        findings.within("served", second, Err(second / 2));
        findings.within("served", second, Ok(second / 2));
        findings.at_least("share", 0.5, 0.49);
        findings.at_most("failed", 0, 0);
        findings.holds("same", false, || "1 -> 2".into());
        findings.observed("quiet", Err(second));
        let verdicts: Vec<_> = findings.measures.iter().map(Measure::verdict).collect();
        use Verdict::{Info, Miss, Pass};
        assert_eq!(verdicts, [Miss, Pass, Miss, Pass, Miss, Info]);
        assert_eq!(findings.measures[0].value.to_string(), "not in 0.50 s");
        assert_eq!(findings.measures[2].bound.to_string(), ">= 50 %");
    }
}
