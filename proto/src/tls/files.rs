//! Certificates and keys in PEM files (RFC 7468) that an operator brings.
//!
//! Links are followed, since mounted Secrets are links; what others may write is refused. One file may hold both the
//! chain and the key, as the kubelet's does.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::certified_key;
use crate::process::files;

/// Certificates of one file that are looked at.
const CERTIFICATES_MAX: usize = 256;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read, or others may write it; the text names it.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// It is not PEM, or holds nothing of the kind needed.
    #[error("{path} holds no {what} in PEM form")]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// The parser's view.
        #[source]
        source: pem::Error,
    },
    /// The key cannot be used or is not the certificate's.
    #[error("certificate {0} and key {1} cannot be used together")]
    Pair(PathBuf, PathBuf, #[source] rustls::Error),
    /// A CA certificate cannot be used.
    #[error("{0} holds a CA certificate that cannot be used")]
    Root(PathBuf, #[source] rustls::Error),
}

impl FileError {
    /// Whether there is no such file; anything else is a mistake in one that is there.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Read(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// The files of a chain and its key; they may be the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPairFiles {
    /// The chain, leaf first.
    pub certificate: PathBuf,
    /// The key.
    pub key: PathBuf,
}

impl KeyPairFiles {
    /// Reads both. Blocks the thread.
    ///
    /// # Errors
    /// [`FileError`], naming the file.
    pub fn load(&self) -> Result<Arc<CertifiedKey>, FileError> {
        let certificate = files::read_operator_file(&self.certificate)?;
        let chain = chain(&certificate).map_err(|source| FileError::Pem {
            path: self.certificate.clone(),
            what: "certificate",
            source,
        })?;
        let key = if self.key == self.certificate {
            certificate
        } else {
            files::read_operator_file(&self.key)?
        };
        let key = private_key(&key).map_err(|source| FileError::Pem {
            path: self.key.clone(),
            what: "private key",
            source,
        })?;
        certified_key(chain, key)
            .map_err(|error| FileError::Pair(self.certificate.clone(), self.key.clone(), error))
    }
}

/// Reads CA certificates, at least one. Blocks the thread.
///
/// # Errors
/// [`FileError`], naming the file.
pub fn load_roots(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let content = files::read_operator_file(path)?;
    let roots = chain(&content).map_err(|source| FileError::Pem {
        path: path.to_owned(),
        what: "certificate",
        source,
    })?;
    super::roots(roots.iter().cloned()).map_err(|error| FileError::Root(path.to_owned(), error))?;
    Ok(roots)
}

/// The certificates of a text, at least one; other parts of it are passed over.
///
/// # Errors
/// [`pem::Error`].
pub fn chain(content: &[u8]) -> Result<Vec<CertificateDer<'static>>, pem::Error> {
    let certificates = CertificateDer::pem_slice_iter(content)
        .take(CERTIFICATES_MAX)
        .collect::<Result<Vec<_>, _>>()?;
    if certificates.is_empty() {
        return Err(pem::Error::NoItemsFound);
    }
    Ok(certificates)
}

/// The first private key of a text.
///
/// # Errors
/// [`pem::Error`].
pub fn private_key(content: &[u8]) -> Result<PrivateKeyDer<'static>, pem::Error> {
    PrivateKeyDer::from_pem_slice(content)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn pair_is_loaded_and_mistakes_name_their_file() {
        let dir = std::env::temp_dir().join(format!("culvert-pem-{}", std::process::id()));
        let _absent = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let other_key = KeyPair::generate().unwrap();
        let both = format!("{}{}", key.serialize_pem(), certificate.pem());
        for (name, content) in [
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
            ("other.key", other_key.serialize_pem()),
            ("both.pem", both),
        ] {
            fs::write(dir.join(name), content).unwrap();
        }
        let load = |certificate: &str, key: &str| {
            let pair = KeyPairFiles {
                certificate: dir.join(certificate),
                key: dir.join(key),
            };
            pair.load()
                .map(|own| own.cert.len())
                .map_err(|error| error.to_string())
        };
        assert_eq!(load("tls.crt", "tls.key"), Ok(1));
        assert_eq!(load("both.pem", "both.pem"), Ok(1));
        for (certificate, key, words) in [
            ("tls.crt", "other.key", "cannot be used together"),
            ("tls.crt", "tls.crt", "tls.crt holds no private key"),
            ("tls.key", "tls.key", "tls.key holds no certificate"),
            ("absent", "tls.key", "absent"),
        ] {
            let error = load(certificate, key).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(load_roots(&dir.join("both.pem")).unwrap().len(), 1);
        assert!(load_roots(&dir.join("tls.key")).is_err());
        fs::remove_dir_all(dir).unwrap();
    }
}
