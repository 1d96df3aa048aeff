//! The harness of the fault matrix: tunnels on a bad network, and callers that measure them.
//!
//! The tests are in `tests/scenarios/faults`, one for each row. [`Runs`] runs the cases of a row
//! with several seeds. A [`Run`] reports the measured values and checks each against its bound.
//! The quick gear has timers that are ten times shorter than the defaults of both binaries, the full
//! gear has the defaults ([`Clocks`]).
//!
//! Nearly all cases have server, agent, targets and callers in this process ([`Site`]), with a
//! [`Link`](crate::link::Link) between server and agent. The others use the two binaries as
//! processes, with one server or three ([`Stack`], [`Replicas`]). Every byte of every stream and answer is generated from the seed and
//! hashed at both ends.

mod callers;
mod clocks;
mod flow;
mod node_client;
mod pipe;
pub mod plain;
mod replicas;
mod runs;
mod site;
mod stack;
mod watch;

pub use callers::{Call, CallerOptions, Callers, Calls};
pub use clocks::Clocks;
pub use flow::{Flow, FlowEnd, Load};
pub use node_client::{NODE, NodeClient, RequestOutcome, Requester, TimedOutcome};
pub use pipe::{Loads, Pipe};
pub use replicas::{AgentPaths, Layout, Replicas, limits};
pub use runs::{Run, Runs, TransportMode};
pub use site::Site;
pub use stack::{ProcessUsage, Stack};
pub use watch::{Measured, node_status, until};
