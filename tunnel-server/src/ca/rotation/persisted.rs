//! The persisted rotation: both CAs with their keys and the stage, in one file. The functions that
//! write expect the caller to hold the lock of the directory's files.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::PublicKeyData as _;
use serde::{Deserialize, Serialize};
use tunnel_proto::identity::sha256;
use tunnel_proto::process::files;
use zeroize::Zeroizing;

use super::{RotationStage, Signer};
use crate::ca::material::read_key;
use crate::ca::{CaError, CaMaterial, SourceNames};
use crate::store::data_dir::{DataDir, time_text, wiped_text};

/// A rotation in progress.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Rotation {
    pub(super) stage: RotationStage,
    /// Certificates that were issued at this time or later are those of the stage.
    #[serde(with = "time_text")]
    pub(super) since: SystemTime,
    /// Longest time for which a certificate that was issued before `since` is valid after it.
    pub(super) life: Duration,
    old: CaPem,
    new: CaPem,
}

/// A CA as PEM.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CaPem {
    certificates: String,
    #[serde(with = "wiped_text")]
    key: Zeroizing<String>,
}

impl Rotation {
    /// Creates a rotation from `old` to `new` in its first stage.
    pub(super) fn new(old: &CaMaterial, new: &CaMaterial, now: SystemTime) -> Self {
        Self {
            stage: RotationStage::Announced,
            since: now,
            life: Duration::ZERO,
            old: CaPem::of(old),
            new: CaPem::of(new),
        }
    }

    /// Loads the rotation of a data directory, if one is in progress.
    pub(super) fn load(dir: &DataDir) -> Result<Option<Self>, CaError> {
        let path = dir.ca_rotation();
        let Some(content) = files::read_secret(&path)? else {
            return Ok(None);
        };
        let rotation = serde_json::from_slice(&content).map_err(|error| CaError::Damaged {
            name: path.display().to_string(),
            what: "rotation",
            problem: error.to_string(),
        })?;
        Ok(Some(rotation))
    }

    pub(super) fn save(&self, dir: &DataDir) -> Result<(), CaError> {
        let content = Zeroizing::new(serde_json::to_vec(self).map_err(io::Error::other)?);
        Ok(files::replace(&dir.ca_rotation(), &content)?)
    }

    pub(super) fn ca(&self, signer: Signer) -> &CaPem {
        match signer {
            Signer::Old => &self.old,
            Signer::New => &self.new,
        }
    }

    /// Returns both CAs, of which the one of the stage signs.
    pub(super) fn material(&self) -> Result<CaMaterial, CaError> {
        let (old, new) = (&self.old, &self.new);
        let both = format!("{}\n{}", old.certificates.trim_end(), new.certificates);
        let signer = match self.stage {
            RotationStage::Announced | RotationStage::Returning => old,
            RotationStage::Issuing => new,
        };
        CaMaterial::parse(both.as_bytes(), signer.key.as_bytes(), NAMES)
    }
}

impl CaPem {
    fn of(material: &CaMaterial) -> Self {
        Self {
            certificates: material.certificates_pem().to_owned(),
            key: Zeroizing::new(material.key_pem().to_owned()),
        }
    }

    pub(super) fn material(&self) -> Result<CaMaterial, CaError> {
        CaMaterial::parse(self.certificates.as_bytes(), self.key.as_bytes(), NAMES)
    }
}

/// Brings the two files of the CA to the stage of the rotation in progress, if there is one.
pub(in crate::ca) fn resume(dir: &DataDir) -> Result<(), CaError> {
    let Some(rotation) = Rotation::load(dir)? else {
        return Ok(());
    };
    let key_path = dir.ca_key();
    let name = key_path.display().to_string();
    let other = || CaError::OtherRotation(dir.ca_rotation().display().to_string(), name.clone());
    // Without this check, the rotation would bring back a CA that an operator removed.
    let pem = files::read_secret(&key_path)?.ok_or_else(other)?;
    let current = sha256(&read_key(&pem, &name)?.subject_public_key_info());
    let (old, new) = (rotation.old.material()?, rotation.new.material()?);
    if ![old.spki_sha256, new.spki_sha256].contains(&current) {
        return Err(other());
    }
    write_ca(dir, &rotation.material()?)
}

/// Replaces the two files of the CA if they differ. The certificates come first: they always
/// include that of the key.
pub(super) fn write_ca(dir: &DataDir, material: &CaMaterial) -> Result<(), CaError> {
    let certificates = material.certificates_pem().as_bytes();
    if files::read(&dir.ca_certificate())?.as_deref() != Some(certificates) {
        files::replace(&dir.ca_certificate(), certificates)?;
    }
    let key = material.key_pem().as_bytes();
    let stored = files::read_secret(&dir.ca_key())?;
    if stored.is_none_or(|stored| stored.as_slice() != key) {
        files::replace(&dir.ca_key(), key)?;
    }
    Ok(())
}

/// Removes the rotation, if there is one.
pub(in crate::ca) fn remove(dir: &DataDir) -> Result<(), CaError> {
    let path = dir.ca_rotation();
    match fs::remove_file(&path) {
        Ok(()) => {
            sync_parent(&path);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            let named = format!("{}: {error}", path.display());
            Err(io::Error::new(error.kind(), named).into())
        }
    }
}

/// Makes a removal survive a crash, if the file system can.
fn sync_parent(path: &Path) {
    if let Some(directory) = path.parent().and_then(|parent| fs::File::open(parent).ok()) {
        let _best_effort = directory.sync_all();
    }
}

const NAMES: SourceNames<'_> = SourceNames {
    certificates: "the certificate in ca-rotation.json",
    key: "the key in ca-rotation.json",
};
