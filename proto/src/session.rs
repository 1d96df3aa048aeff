//! What both ends do with a session: control messages, their sender, and the monitor of liveness
//! and retirement.

pub mod control;
mod control_sender;
mod liveness;
mod monitor;
mod receive_reports;

pub use control_sender::ControlSender;
pub use liveness::{LivenessCheck, LivenessLimits, LivenessState, SilenceCause};
pub use monitor::{Observation, SessionMonitor, Transition};
