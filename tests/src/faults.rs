//! The fault matrix: the tunnel's behavior on a bad network, measured against fixed bounds.
//!
//! One table of cases ([`CASES`]) has two users: `make faults` runs the table with the default
//! timers of both binaries, and the scenario `faults` runs it with timers that are ten times
//! shorter. Each case runs with several seeds. A run measures values and gives the allowed range of
//! each ([`Findings`]). A run that cannot be measured reports this and counts as a miss.
//!
//! Nearly all cases have server, agent, targets and callers in this process, with a
//! [`Link`](crate::link::Link) between server and agent. F32 and F35 use the two binaries as
//! processes. Every byte of every stream and answer is generated from the seed and hashed at both
//! ends.

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
mod node_client;
mod pipe;
pub mod plain;
mod runner;
mod runs;
mod site;
mod stack;
mod stopped;
mod table;
mod watch;

pub use cases::CASES;
pub use clocks::Clocks;
pub use findings::{Bound, Findings, Measure, Value, Verdict};
pub use flow::{Flow, FlowEnd, Load};
pub use node_client::{NODE, NodeClient, PendingRequests, RequestOutcome, Requester, TimedOutcome};
pub use pipe::{Loads, Pipe};
pub use runner::{FinishedRun, Plan, RunEvent, run};
pub use runs::{Run, Runs, TransportMode};
pub use site::Site;
pub use stack::{ProcessUsage, Stack};
pub use table::Table;
pub use watch::{node_status, until};

/// One row of the matrix on one transport.
#[derive(Debug)]
pub struct Case {
    /// Row ID, such as F06.
    pub id: &'static str,
    /// Transports that the agent may use.
    pub transport_mode: TransportMode,
    /// Description of the fault.
    pub what: &'static str,
    /// Machine resources that the case needs.
    pub cost: Cost,
    /// Duration with full timers.
    pub about: Duration,
    run: fn(Run) -> Running,
}

/// A run in progress.
type Running = Pin<Box<dyn Future<Output = Result<Findings>> + Send>>;

/// The machine resources that a case needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cost {
    /// The case waits for timers.
    Timed,
    /// The case measures maximum throughput, so only a few of these run at once.
    Throughput,
    /// Like [`Cost::Throughput`]. QUIC needs up to a minute, which no setting shortens, so short
    /// timers leave the case out.
    SlowThroughput,
    /// The case waits for minutes and runs in parallel with all others.
    Idle,
}

impl Case {
    /// Returns whether the case can run with these timers.
    #[must_use]
    pub fn suits(&self, clocks: Clocks) -> bool {
        match (self.cost, clocks) {
            (Cost::SlowThroughput, Clocks::Short) => false,
            (Cost::SlowThroughput, Clocks::Full)
            | (Cost::Timed | Cost::Throughput | Cost::Idle, Clocks::Full | Clocks::Short) => true,
        }
    }
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
