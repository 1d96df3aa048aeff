//! Programs run as processes: the two binaries under test, and real tools.

mod culvert;
mod fleet;
mod log;
mod loopback;
mod peering;
mod running;
mod shifted_clock;
mod terminal;

pub use culvert::{AgentSetup, Listener, Server, ServerSetup, Setup, TunnelAgent, TunnelServer};
pub use fleet::Fleet;
pub use log::Log;
pub use loopback::{next_loopback, own_loopback, stored_text};
pub use peering::{Peering, copy_ca};
pub use running::{Finished, Piped, Process, Program, Signal};
pub use shifted_clock::ShiftedClock;
pub use terminal::Terminal;
pub use tunnel_process::scratch::ScratchDir;
