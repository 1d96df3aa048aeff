//! The persisted rotation: both CAs with their keys and the stage, in one file or in one key of a
//! Secret. The functions that write expect the caller to hold the lock of the directory's files.

use std::io;
use std::time::{Duration, SystemTime};

use rcgen::PublicKeyData as _;
use serde::{Deserialize, Serialize};
use tunnel_process::files;
use tunnel_proto::identity::sha256;
use tunnel_store::data_dir::{DataDir, replace_changed, time_text};
use zeroize::Zeroizing;

use crate::material::{CaPem, read_key};
use crate::stage::{RotationStage, Signer};
use crate::{CaError, CaMaterial, SourceNames};

/// A rotation in progress.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rotation {
    pub(super) stage: RotationStage,
    /// Certificates that were issued at this time or later are those of the stage.
    #[serde(with = "time_text")]
    pub(super) since: SystemTime,
    /// Longest time for which a certificate that was issued before `since` is valid after it.
    pub(super) life: Duration,
    old: CaPem,
    new: CaPem,
    /// Each CA's key, signed by the other CA, as PEM. They show agents that trust one of both that
    /// the other one is its successor, or its predecessor.
    cross_signed: String,
}

impl Rotation {
    /// Creates a rotation from `old` to `new` in its first stage.
    ///
    /// # Errors
    /// Returns an error if one CA cannot sign the other.
    pub fn new(old: &CaMaterial, new: &CaMaterial, now: SystemTime) -> Result<Self, CaError> {
        let cross_signed = old.cross_sign(new, now)? + &new.cross_sign(old, now)?;
        Ok(Self {
            stage: RotationStage::Announced,
            since: now,
            life: Duration::ZERO,
            old: CaPem::of(old),
            new: CaPem::of(new),
            cross_signed,
        })
    }

    /// Returns the time at which every agent that is connected without interruption has renewed.
    pub(super) fn renewed_by(&self) -> SystemTime {
        self.since + self.life.mul_f64(RENEWED_BY)
    }

    /// Loads the rotation of a data directory, if one is in progress.
    pub(super) fn load(dir: &DataDir) -> Result<Option<Self>, CaError> {
        let path = dir.ca_rotation();
        let Some(content) = files::read_secret(&path)? else {
            return Ok(None);
        };
        Self::parse(&content, &path.display().to_string()).map(Some)
    }

    /// Parses the rotation of a Secret and checks it against the CA of that Secret. `name` and `key`
    /// name the rotation and the CA's key in errors.
    pub fn of_secret(
        content: &[u8],
        name: &str,
        key: &str,
        ca: &CaMaterial,
    ) -> Result<Self, CaError> {
        if content.len() > ROTATION_MAX_BYTES {
            let problem = format!("{} bytes, at most {ROTATION_MAX_BYTES}", content.len());
            return Err(damaged(name, problem));
        }
        let rotation = Self::parse(content, name)?;
        let (old, new) = (rotation.ca(Signer::Old)?, rotation.ca(Signer::New)?);
        if old.spki_sha256 == new.spki_sha256 {
            return Err(damaged(name, "both CAs have the same key".to_owned()));
        }
        if rotation.life > LIFE_MAX {
            return Err(damaged(name, "life is too long".to_owned()));
        }
        if !rotation.material()?.is_same(ca) {
            return Err(CaError::OtherRotation(name.to_owned(), key.to_owned()));
        }
        Ok(rotation)
    }

    fn parse(content: &[u8], name: &str) -> Result<Self, CaError> {
        serde_json::from_slice(content).map_err(|error| {
            // The text of the error may have a part of a key.
            let (line, column) = (error.line(), error.column());
            damaged(name, format!("error at line {line} column {column}"))
        })
    }

    /// Returns the persisted form.
    pub fn to_json(&self) -> Result<Zeroizing<Vec<u8>>, CaError> {
        let content = Zeroizing::new(serde_json::to_vec(self).map_err(io::Error::other)?);
        if content.len() > ROTATION_MAX_BYTES {
            let problem = "the certificates of the CA are too large to replace it in stages";
            return Err(io::Error::other(problem).into());
        }
        Ok(content)
    }

    pub(super) fn save(&self, dir: &DataDir) -> Result<(), CaError> {
        Ok(files::replace(&dir.ca_rotation(), &self.to_json()?)?)
    }

    pub(super) fn ca(&self, signer: Signer) -> Result<CaMaterial, CaError> {
        let pem = match signer {
            Signer::Old => &self.old,
            Signer::New => &self.new,
        };
        pem.material(NAMES)
    }

    /// Returns both CAs, of which the one of the stage signs.
    pub fn material(&self) -> Result<CaMaterial, CaError> {
        let (old, new) = (&self.old, &self.new);
        // The signer's own certificate comes before the one with the same key that the other signed.
        let both = [&old.certificates, &new.certificates, &self.cross_signed]
            .map(|certificates| certificates.trim_end().to_owned() + "\n")
            .concat();
        let signer = match self.stage {
            RotationStage::Announced | RotationStage::Returning => old,
            RotationStage::Issuing => new,
        };
        CaMaterial::parse(both.as_bytes(), signer.key.as_bytes(), NAMES)
    }
}

tunnel_process::partial_debug!(Rotation { stage, since });

fn damaged(name: &str, problem: String) -> CaError {
    CaError::Damaged {
        name: name.to_owned(),
        what: "rotation",
        problem,
    }
}

/// Brings the two files of the CA to the stage of the rotation in progress, if there is one.
pub(crate) fn resume(dir: &DataDir) -> Result<(), CaError> {
    let Some(rotation) = Rotation::load(dir)? else {
        return Ok(());
    };
    let key_path = dir.ca_key();
    let name = key_path.display().to_string();
    let other = || CaError::OtherRotation(dir.ca_rotation().display().to_string(), name.clone());
    // Without this check, the rotation would bring back a CA that an operator removed.
    let pem = files::read_secret(&key_path)?.ok_or_else(other)?;
    let current = sha256(&read_key(&pem, &name)?.subject_public_key_info());
    let (old, new) = (rotation.ca(Signer::Old)?, rotation.ca(Signer::New)?);
    if ![old.spki_sha256, new.spki_sha256].contains(&current) {
        return Err(other());
    }
    write_ca(dir, &rotation.material()?)
}

/// Replaces the two files of the CA if they differ. The certificates come first: those of a rotation
/// include that of either key, and after a crash between the writes of another CA the next start
/// reports a certificate without its key. A key without its certificate would become another CA.
pub(crate) fn write_ca(dir: &DataDir, material: &CaMaterial) -> Result<(), CaError> {
    replace_changed(
        &dir.ca_certificate(),
        material.certificates_pem().as_bytes(),
    )?;
    let key = material.key_pem().as_bytes();
    let stored = files::read_secret(&dir.ca_key())?;
    if stored.is_none_or(|stored| stored.as_slice() != key) {
        files::replace(&dir.ca_key(), key)?;
    }
    Ok(())
}

/// Removes the rotation, if there is one.
pub(crate) fn remove(dir: &DataDir) -> Result<(), CaError> {
    Ok(files::remove(&dir.ca_rotation())?)
}

/// Part of a certificate's lifetime after which an agent has renewed it.
const RENEWED_BY: f64 = 0.6;
/// Maximum size of a persisted rotation in bytes. Two CAs with a certificate each have about 3 KiB.
const ROTATION_MAX_BYTES: usize = 256 * 1024;
/// Maximum of [`Rotation::life`]: a hundred years, so that times can be calculated.
const LIFE_MAX: Duration = Duration::from_secs(36_525 * 24 * 60 * 60);
const NAMES: SourceNames<'_> = SourceNames {
    certificates: "the certificate in ca-rotation.json",
    key: "the key in ca-rotation.json",
};
