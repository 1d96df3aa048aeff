//! The stages of a rotation.

use serde::{Deserialize, Serialize};

/// The stage of a rotation in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RotationStage {
    /// The old CA signs. Agents receive the new CA with their next certificate.
    Announced,
    /// The new CA signs. Agents replace their certificates of the old CA.
    Issuing,
    /// The old CA signs again. Agents replace their certificates of the new CA.
    Returning,
}

impl RotationStage {
    /// Returns the name for operators.
    pub fn label(self) -> &'static str {
        match self {
            Self::Announced => "announced",
            Self::Issuing => "issuing",
            Self::Returning => "returning",
        }
    }
}

/// One of the two CAs of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signer {
    Old,
    New,
}
