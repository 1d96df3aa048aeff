//! The size of a request head, and the limits on it.

use crate::config::CONNECTION_HEAD_BYTES;

/// The size of a head as far as it was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HeadSize {
    /// Bytes of the head, with empty lines before it.
    pub(crate) bytes: usize,
    /// Header fields that have begun.
    pub(crate) fields: usize,
}

/// The limits on a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadLimits {
    pub(crate) bytes: usize,
    pub(crate) fields: usize,
}

impl HeadLimits {
    /// The limits of a check that only follows.
    pub(crate) const NONE: Self = Self {
        bytes: usize::MAX,
        fields: usize::MAX,
    };

    /// The limits while no head may follow.
    pub(crate) const NO_HEAD: Self = Self {
        bytes: 0,
        fields: 0,
    };

    /// Returns the limits on a head for which the permit of the caller's connection counts, if heads
    /// may have `bytes` bytes.
    pub(crate) fn of_connection(bytes: usize) -> Self {
        Self {
            bytes: bytes.min(CONNECTION_HEAD_BYTES),
            fields: CONNECTION_FIELDS,
        }
    }

    /// Returns the limits on a head with memory of its own, if heads may have `bytes` bytes.
    pub(crate) fn with_memory(bytes: usize) -> Self {
        Self {
            bytes,
            fields: FIELDS_MAX,
        }
    }

    /// Returns limits that are enough for a head of this size.
    pub(crate) fn enough_for(size: HeadSize) -> Self {
        Self {
            bytes: size.bytes,
            fields: size.fields,
        }
    }
}

/// The limit that a head exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadExcess {
    Target,
    Bytes,
    Fields,
}

/// Fields of a head for which the permit of a caller's connection counts. hyper has memory for as
/// many on the stack.
pub(crate) const CONNECTION_FIELDS: usize = 100;
/// Largest number of fields in a head.
pub(crate) const FIELDS_MAX: usize = 1024;
/// Longest request target, in bytes. hyper reads at most 65,534. `kubectl exec` sends a script as
/// part of the target.
pub(crate) const TARGET_MAX_BYTES: usize = 65_000;
