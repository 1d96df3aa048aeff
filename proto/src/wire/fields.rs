//! Fields of several messages between servers: names of nodes, and times.

use std::time::{Duration, SystemTime};

use super::control::millis;
use super::frame::FrameError;
use super::name::NodeName;

pub(super) fn decode_node(node: &str) -> Result<NodeName, FrameError> {
    node.parse()
        .map_err(|_syntax| FrameError::Invalid("node name"))
}

pub(super) fn since_epoch(time: SystemTime) -> u64 {
    millis(
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

pub(super) fn decode_time(millis: u64) -> Result<SystemTime, FrameError> {
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(millis))
        .ok_or(FrameError::Invalid("time"))
}
