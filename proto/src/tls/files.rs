//! PEM files (RFC 7468) with certificates and keys that an operator provides.
//!
//! Symbolic links are followed, because mounted Secrets are links. Files that others can write are
//! refused. One file may contain both the chain and the key, as the kubelet's does.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::certified_key;
use crate::identity::sha256;
use tunnel_process::files;

/// Maximum number of certificates that are read from one file.
const CERTIFICATES_MAX: usize = 256;

/// The reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read, or others can write it. The text names the file.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// The file is not PEM, or does not contain the required kind of object.
    #[error("{path} holds no {what} in PEM form{found}")]
    Pem {
        /// The path of the file.
        path: PathBuf,
        /// The kind of object that the file should contain.
        what: &'static str,
        /// What the file contains instead, with the remedy, or an empty text.
        found: &'static str,
        /// The error of the parser, where the file contains nothing that is known.
        #[source]
        source: Option<pem::Error>,
    },
    /// The key cannot be used or does not belong to the certificate.
    #[error("certificate {0} and key {1} cannot be used together")]
    Pair(PathBuf, PathBuf, #[source] rustls::Error),
    /// The key belongs to a certificate of the file that is not its first.
    #[error(
        "{0}: the key belongs to certificate {1} of the file; the certificate of the key must be the first, then the one that \
         signed it"
    )]
    Order(PathBuf, usize),
    /// A CA certificate cannot be used.
    #[error("{0} holds a CA certificate that cannot be used")]
    Root(PathBuf, #[source] rustls::Error),
}

impl FileError {
    /// Returns whether the file does not exist. Any other error is about a file that exists.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Read(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns whether the content or the mode of the file is the cause, which somebody must change.
    pub fn is_in_content(&self) -> bool {
        !matches!(self, Self::Read(error) if error.kind() != io::ErrorKind::InvalidData)
    }
}

/// The files of a chain and its key. Both may be the same file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPairFiles {
    /// The file with the chain, leaf first.
    pub certificate: PathBuf,
    /// The file with the key.
    pub key: PathBuf,
}

impl KeyPairFiles {
    /// Reads the chain and the key. Blocks the thread.
    ///
    /// # Errors
    /// [`FileError`], which names the file.
    pub fn load(&self) -> Result<Arc<CertifiedKey>, FileError> {
        let certificate = files::read_operator_file(&self.certificate)?;
        let chain = chain(&certificate)
            .map_err(|source| pem_error(&self.certificate, CERTIFICATE, &certificate, source))?;
        let key = if self.key == self.certificate {
            certificate
        } else {
            files::read_operator_file(&self.key)?
        };
        let key = private_key(&key)
            .map_err(|source| pem_error(&self.key, "private key", &key, source))?;
        certified_key(chain.clone(), key.clone_key()).map_err(|error| {
            let belongs = |leaf: &CertificateDer<'static>| {
                certified_key(vec![leaf.clone()], key.clone_key()).is_ok()
            };
            match chain.iter().position(belongs) {
                Some(index) => FileError::Order(self.certificate.clone(), index + 1),
                None => FileError::Pair(self.certificate.clone(), self.key.clone(), error),
            }
        })
    }
}

/// The kind of object of a chain, in error texts.
const CERTIFICATE: &str = "certificate";

fn pem_error(path: &Path, what: &'static str, content: &[u8], source: pem::Error) -> FileError {
    let found = found_instead(content);
    FileError::Pem {
        path: path.to_owned(),
        what,
        found,
        source: found.is_empty().then_some(source),
    }
}

/// Returns what a file contains that PKI tools write in place of a PEM certificate or key.
fn found_instead(content: &[u8]) -> &'static str {
    /// Tag and length of a DER sequence of 256 to 65,535 bytes, as certificates and keys are.
    const DER: &[u8] = &[0x30, 0x82];
    let has = |label: &str| {
        let begin = format!("-----BEGIN {label}-----");
        content
            .windows(begin.len())
            .any(|window| window == begin.as_bytes())
    };
    if content.trim_ascii().is_empty() {
        ": it is empty"
    } else if content.starts_with(DER) {
        ": it is in DER form; convert it with openssl x509 -inform DER, or openssl pkey -inform DER for a key"
    } else if has("ENCRYPTED PRIVATE KEY")
        || content.windows(9).any(|window| window == b"ENCRYPTED")
    {
        ": the key is encrypted, and nobody can enter its passphrase; decrypt it with openssl pkey"
    } else if has("TRUSTED CERTIFICATE") {
        ": it is a TRUSTED CERTIFICATE of OpenSSL; convert it with openssl x509"
    } else {
        ""
    }
}

/// Reads CA certificates, at least one. Blocks the thread.
///
/// # Errors
/// [`FileError`], which names the file.
pub fn load_roots(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let content = files::read_operator_file(path)?;
    let roots = chain(&content).map_err(|source| pem_error(path, CERTIFICATE, &content, source))?;
    super::roots(roots.iter().cloned()).map_err(|error| FileError::Root(path.to_owned(), error))?;
    Ok(roots)
}

/// Returns a digest that changes with any of the certificates. A key changes only with its
/// certificate.
pub fn digest_of<'a, 'b: 'a>(
    certificates: impl IntoIterator<Item = &'a CertificateDer<'b>>,
) -> [u8; 32] {
    let bytes: Vec<u8> = certificates
        .into_iter()
        .flat_map(|der| der.to_vec())
        .collect();
    sha256(&bytes)
}

/// Returns the certificates in a PEM text, at least one. Other objects are ignored.
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

/// Returns the first private key in a PEM text.
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
    use tunnel_process::scratch::ScratchDir;

    use super::*;

    #[test]
    fn pair_is_loaded_and_mistakes_name_their_file() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let other_key = KeyPair::generate().unwrap();
        let other = CertificateParams::default().self_signed(&other_key);
        let (pem, other) = (certificate.pem(), other.unwrap().pem());
        let label = |text: &str, label: &str| {
            text.replace("BEGIN ", &format!("BEGIN {label} "))
                .replace("END ", &format!("END {label} "))
        };
        for (name, content) in [
            ("tls.crt", pem.clone()),
            ("tls.key", key.serialize_pem()),
            ("other.key", other_key.serialize_pem()),
            ("both.pem", format!("{}{pem}", key.serialize_pem())),
            ("bom.crt", format!("\u{feff}{pem}")),
            ("empty", "\n".to_owned()),
            ("trusted.crt", label(&pem, "TRUSTED")),
            ("encrypted.key", label(&key.serialize_pem(), "ENCRYPTED")),
            ("reversed.crt", other + &pem),
        ] {
            fs::write(dir.join(name), content).unwrap();
        }
        fs::write(dir.join("tls.der"), certificate.der()).unwrap();
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
        assert_eq!(load("bom.crt", "tls.key"), Ok(1));
        for (certificate, key, words) in [
            ("tls.crt", "other.key", "cannot be used together"),
            ("tls.crt", "tls.crt", "tls.crt holds no private key"),
            ("tls.key", "tls.key", "tls.key holds no certificate"),
            ("absent", "tls.key", "absent"),
            ("tls.der", "tls.key", "DER"),
            ("empty", "tls.key", "it is empty"),
            ("trusted.crt", "tls.key", "openssl x509"),
            ("tls.crt", "encrypted.key", "encrypted"),
            (
                "reversed.crt",
                "tls.key",
                "the key belongs to certificate 2",
            ),
        ] {
            let error = load(certificate, key).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(load_roots(&dir.join("both.pem")).unwrap().len(), 1);
        assert!(load_roots(&dir.join("tls.key")).is_err());
    }
}
