//! The fault matrix: what a tunnel does on a bad network, measured against the bounds of the contract.
//!
//! One table of cases ([`CASES`]) with two users: `make faults` runs it with the clocks of the contract, the scenario
//! `faults` with clocks that are ten times shorter. Each case is run with several seeds. A run measures things and says
//! of each what it may be ([`Findings`]); a run that cannot be measured says so and counts as a miss.
//!
//! Nearly all cases have server, agent, targets and callers in this process, with a [`Link`](crate::link::Link) between
//! server and agent; F32 and F35 use the two binaries as processes. Every byte of every stream and answer is made from the
//! seed and hashed at both ends.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Result;
use tokio_util::task::AbortOnDropHandle;

mod cases;
mod clocks;
pub mod command;
mod findings;
mod flapping;
mod flow;
mod ladder;
mod loss;
mod partition;
mod path;
mod pipe;
mod plain;
mod reach;
mod runner;
mod site;
mod size;
mod stack;
mod stopped;
mod table;
mod watch;

pub use cases::CASES;
pub use clocks::Clocks;
pub use findings::{Bound, Findings, Measure, Value, Verdict};
pub use runner::{Done, News, Plan, run};
pub use table::Table;

/// One row of the matrix on one transport.
#[derive(Debug)]
pub struct Case {
    /// The row, as in F06.
    pub id: &'static str,
    /// What the agent may use.
    pub carrier: Carrier,
    /// What is done to the tunnel.
    pub what: &'static str,
    /// What it needs of the machine.
    pub weight: Weight,
    /// How long it takes with full clocks.
    pub about: Duration,
    run: fn(Run) -> Running,
}

/// A run under way.
type Running = Pin<Box<dyn Future<Output = Result<Findings>> + Send>>;

/// The transports of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// QUIC alone.
    Quic,
    /// h2 alone.
    H2,
    /// Whatever gets through.
    Auto,
}

/// What a case needs of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// It waits for clocks.
    Waits,
    /// It moves as much as goes and measures how much that is: few of these at once.
    Works,
    /// As [`Weight::Works`]; takes QUIC up to a minute, which no setting shortens, so it is left out with short clocks.
    Drags,
    /// It waits for minutes, and runs beside all others.
    Idles,
}

impl Case {
    /// Whether it can be run with such clocks.
    #[must_use]
    pub fn suits(&self, clocks: Clocks) -> bool {
        match (self.weight, clocks) {
            (Weight::Drags, Clocks::Short) => false,
            (Weight::Drags, Clocks::Full)
            | (Weight::Waits | Weight::Works | Weight::Idles, Clocks::Full | Clocks::Short) => true,
        }
    }
}

/// One run of a case.
#[derive(Debug, Clone, Copy)]
struct Run {
    seed: u64,
    /// Of faults and bounds.
    clocks: Clocks,
    /// Of both programs.
    limits: Clocks,
    carrier: Carrier,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.setting())
    }
}

#[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(tokio::spawn(future))
}
