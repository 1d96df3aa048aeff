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
mod fallback;
mod findings;
mod flapping;
mod flow;
mod loss;
mod node_client;
mod partition;
mod path;
mod pipe;
mod plain;
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
pub use runner::{FinishedRun, Plan, RunEvent, run};
pub use table::Table;

/// One row of the matrix on one transport.
#[derive(Debug)]
pub struct Case {
    /// The row, as in F06.
    pub id: &'static str,
    /// What the agent may use.
    pub transport_mode: TransportMode,
    /// What is done to the tunnel.
    pub what: &'static str,
    /// What it needs of the machine.
    pub cost: Cost,
    /// How long it takes with full clocks.
    pub about: Duration,
    run: fn(Run) -> Running,
}

/// A run under way.
type Running = Pin<Box<dyn Future<Output = Result<Findings>> + Send>>;

/// The transports of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportMode {
    /// QUIC alone.
    Quic,
    /// h2 alone.
    H2,
    /// Whatever gets through.
    Auto,
}

/// What a case needs of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// It waits for clocks.
    Timed,
    /// It moves as much as goes and measures how much that is: few of these at once.
    Throughput,
    /// As [`Cost::Throughput`]; takes QUIC up to a minute, which no setting shortens, so it is left out with short clocks.
    SlowThroughput,
    /// It waits for minutes, and runs beside all others.
    Idle,
}

impl Case {
    /// Whether it can be run with such clocks.
    #[must_use]
    pub fn suits(&self, clocks: Clocks) -> bool {
        match (self.cost, clocks) {
            (Cost::SlowThroughput, Clocks::Short) => false,
            (Cost::SlowThroughput, Clocks::Full)
            | (Cost::Timed | Cost::Throughput | Cost::Idle, Clocks::Full | Clocks::Short) => true,
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
    transport_mode: TransportMode,
}

impl fmt::Display for TransportMode {
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
