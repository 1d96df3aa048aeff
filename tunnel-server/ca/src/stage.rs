//! The stages of a rotation.

use serde::{Deserialize, Serialize};

tunnel_process::named! {
    /// The stage of a rotation in progress, with its name for operators.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "camelCase")]
    pub enum RotationStage: label {
        /// The old CA signs. Agents receive the new CA with their next certificate.
        Announced = "announced",
        /// The new CA signs. Agents replace their certificates of the old CA.
        Issuing = "issuing",
        /// The old CA signs again. Agents replace their certificates of the new CA.
        Returning = "returning",
    }
}

/// One of the two CAs of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signer {
    Old,
    New,
}
