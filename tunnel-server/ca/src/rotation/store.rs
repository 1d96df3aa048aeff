//! Where the CA and its rotation are: the files of a standalone server, or the Secret that the servers
//! of a cluster share.

use std::fmt;
use std::sync::Arc;

use tunnel_store::data_dir::DataDir;

use crate::persisted_rotation::{self, Rotation};
use crate::{CaError, CaMaterial, LocalCa};

/// The CA of a stage, and the rotation in progress.
#[derive(Debug)]
pub struct SharedCa {
    pub material: Arc<CaMaterial>,
    pub rotation: Option<Rotation>,
    /// Version of the Secret that was read. `None` for files.
    pub version: Option<String>,
}

/// A store of the CA and its rotation. Calls block the thread.
pub trait CaStore: fmt::Debug + Send + Sync {
    /// Reads and checks the content.
    fn read(&self) -> Result<SharedCa, CaError>;

    /// Replaces the CA and the rotation. Returns `false`, without a change, if the store has another
    /// version than `version`.
    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<bool, CaError>;
}

/// The files of a standalone server, and the CA in use.
#[derive(Debug)]
pub(super) struct CaFiles {
    pub(super) ca: Arc<LocalCa>,
    pub(super) dir: DataDir,
}

impl CaStore for CaFiles {
    fn read(&self) -> Result<SharedCa, CaError> {
        Ok(SharedCa {
            material: self.ca.material.load_full(),
            rotation: Rotation::load(&self.dir)?,
            version: None,
        })
    }

    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        _version: Option<String>,
    ) -> Result<bool, CaError> {
        let _changing = self.dir.lock_files()?;
        match rotation {
            Some(rotation) => {
                rotation.save(&self.dir)?;
                // The stage is persisted, so its CA signs even if the next files cannot be written.
                self.ca.replace(material.clone());
                persisted_rotation::write_ca(&self.dir, &material)?;
            }
            None => {
                persisted_rotation::write_ca(&self.dir, &material)?;
                persisted_rotation::remove(&self.dir)?;
            }
        }
        Ok(true)
    }
}
