//! What both ends do with a session: control messages, their sender, and liveness.

pub mod control;
mod control_sender;
mod liveness;

pub use control_sender::ControlSender;
pub use liveness::{
    Liveness, LivenessCheck, LivenessLimits, LivenessSample, LivenessState, SuspectLogThrottle,
};
