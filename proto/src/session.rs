//! What both ends do with a session: control messages and liveness.

pub mod control;
mod liveness;

pub use liveness::{
    Liveness, LivenessCheck, LivenessLimits, LivenessSample, LivenessState, SuspectLogThrottle,
};
