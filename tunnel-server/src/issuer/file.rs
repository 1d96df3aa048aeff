//! A serving credential from files, for operators who bring their own certificate.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::server::ResolvesServerCert;
use rustls::sign::SingleCertAndKey;
use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tunnel_proto::tls;

/// Why a credential cannot be taken from its files.
#[derive(Debug, thiserror::Error)]
pub enum FileCredentialError {
    /// A file cannot be read.
    #[error("cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// A file is not PEM, or holds nothing of the kind needed.
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
}

/// A certificate chain (leaf first) with its key from PEM files, loaded once. Links are followed, since mounted
/// Secrets are links.
///
/// # Errors
/// [`FileCredentialError`], naming the file.
pub fn file_resolver(
    cert_file: &Path,
    key_file: &Path,
) -> Result<Arc<dyn ResolvesServerCert>, FileCredentialError> {
    let certificates = read(cert_file)?;
    let bad_certificate = |source| FileCredentialError::Pem {
        path: cert_file.to_owned(),
        what: "certificate",
        source,
    };
    let chain = CertificateDer::pem_slice_iter(&certificates)
        .collect::<Result<Vec<_>, _>>()
        .map_err(bad_certificate)?;
    if chain.is_empty() {
        return Err(bad_certificate(pem::Error::NoItemsFound));
    }
    let key = PrivateKeyDer::from_pem_slice(&read(key_file)?).map_err(|source| {
        FileCredentialError::Pem {
            path: key_file.to_owned(),
            what: "private key",
            source,
        }
    })?;
    let credential = tls::certified_key(chain, key).map_err(|error| {
        FileCredentialError::Pair(cert_file.to_owned(), key_file.to_owned(), error)
    })?;
    Ok(Arc::new(SingleCertAndKey::from(credential)))
}

fn read(path: &Path) -> Result<Vec<u8>, FileCredentialError> {
    fs::read(path).map_err(|error| FileCredentialError::Read(path.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::data::testing::Scratch;

    #[test]
    fn pair_is_loaded_and_mistakes_name_their_file() {
        let scratch = Scratch::new();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let [cert_file, key_file, other] =
            ["tls.crt", "tls.key", "other.key"].map(|name| scratch.0.path().join(name));
        fs::write(&cert_file, certificate.pem()).unwrap();
        fs::write(&key_file, key.serialize_pem()).unwrap();
        fs::write(&other, KeyPair::generate().unwrap().serialize_pem()).unwrap();

        file_resolver(&cert_file, &key_file).unwrap();
        let message = |cert: &Path, key: &Path| file_resolver(cert, key).unwrap_err().to_string();
        assert!(message(&cert_file, &other).contains("cannot be used together"));
        assert!(message(&cert_file, &cert_file).contains("tls.crt holds no private key"));
        assert!(message(&key_file, &key_file).contains("tls.key holds no certificate"));
        assert!(message(Path::new("/nonexistent"), &key_file).contains("/nonexistent"));
    }
}
