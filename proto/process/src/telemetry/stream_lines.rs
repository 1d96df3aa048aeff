//! The lines of one kind of streams in the access log. A stream that reached no target costs its
//! opener nothing, so the lines of such streams are limited.

use std::fmt::Display;

use super::{LineForm, LogRateLimit, SourceBudget, admits_access};

/// How far a stream came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamStage {
    /// It did not say what it wants, or nobody was there to ask. All such lines are alike.
    Unknown,
    /// It reached no target.
    Refused,
    /// It reached a target, and ended.
    Opened {
        /// Whether both sides ended cleanly.
        is_ok: bool,
    },
}

/// The limits of the lines of one kind of streams. `K` identifies a source.
pub struct StreamLines<K> {
    unknown: LogRateLimit,
    refused: SourceBudget<K>,
}

crate::partial_debug!(StreamLines<K> { refused });

impl<K: Ord + Clone + Display + Send + 'static> StreamLines<K> {
    /// Creates the limits. `unknown` and `refused` name the lines in the reports of suppressed
    /// lines.
    pub const fn new(unknown: &'static str, refused: &'static str) -> Self {
        Self {
            unknown: LogRateLimit::new(unknown),
            refused: SourceBudget::new(refused),
        }
    }

    /// Returns the form of the line of a stream with this code, or `None` if there is no line. Ask
    /// once for each stream, since the answer is counted.
    pub fn admit(
        &'static self,
        stage: StreamStage,
        code: &'static str,
        source: K,
    ) -> Option<LineForm> {
        if !admits_access(stage != StreamStage::Opened { is_ok: true }) {
            return None;
        }
        match stage {
            StreamStage::Unknown => self.unknown.admit().then_some(LineForm::Full),
            StreamStage::Refused => self.refused.admit(source, code),
            StreamStage::Opened { .. } => Some(LineForm::Full),
        }
    }
}
