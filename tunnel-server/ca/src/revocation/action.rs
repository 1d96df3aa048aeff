//! What an operator orders, and times in orders.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// What an operator orders about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OrderAction {
    /// Refuse the node until [`OrderAction::Unrevoke`].
    Revoke,
    Unrevoke,
    /// Refuse the certificates that the node has; it may enroll again.
    Reissue,
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH);
    since_epoch.unwrap_or_default().as_secs()
}

pub(super) fn time(seconds: u64) -> SystemTime {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}
