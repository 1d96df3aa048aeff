//! The Secret with the CA that the servers of a cluster share, and its rotation.

use std::fmt;
use std::sync::Arc;

use super::Rotation;
use crate::{CaError, CaMaterial};

/// The CA of a stage, and the rotation in progress.
#[derive(Debug)]
pub struct SharedCa {
    pub material: Arc<CaMaterial>,
    pub rotation: Option<Rotation>,
    /// Version of the Secret that was read. `None` for files.
    pub version: Option<String>,
}

/// The Secret. Calls block the thread.
pub trait CaSecret: fmt::Debug + Send + Sync {
    /// Reads and checks the content.
    fn read(&self) -> Result<SharedCa, CaError>;

    /// Replaces the CA and the rotation in one update. Returns `false`, without a change, if the
    /// Secret has another version than `version`.
    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<bool, CaError>;
}
