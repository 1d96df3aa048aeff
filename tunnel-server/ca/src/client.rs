//! The client CA: signs the certificates of callers. The local CA signs those of agents and servers,
//! so a listener that trusted it for callers would admit every agent.

use std::str::FromStr;
use std::time::{Duration, SystemTime};

use rcgen::{ExtendedKeyUsagePurpose, KeyPair};
use tunnel_store::data_dir::DataDir;
use zeroize::Zeroizing;

use super::leaf::LeafParams;
use super::material::{COMMON_NAME_MAX, CaMaterial};
use super::{CaError, IssueError};

/// The name of a caller, which is the common name of its certificate and the name of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallerName(String);

/// The reason why a text is not the name of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a caller's name has 1 to {} letters, digits and the characters - _ . @, and begins with a letter or a digit",
    COMMON_NAME_MAX
)]
pub struct CallerNameError;

/// A caller's certificate with its key, both PEM.
pub struct ClientCertificate {
    pub certificate: String,
    pub key: Zeroizing<String>,
    /// Time at which the certificate expires.
    pub not_after: SystemTime,
}

tunnel_process::partial_debug!(ClientCertificate { not_after });

/// The CA of callers' certificates, in the data directory.
#[derive(Debug)]
pub struct ClientCa(CaMaterial);

impl ClientCa {
    /// Loads the client CA from the data directory, or creates one there. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`CaError`] that names the file.
    pub fn load_or_create(dir: &DataDir) -> Result<Self, CaError> {
        let _changing = dir.lock_files()?;
        let (certificate, key) = (dir.client_ca_certificate(), dir.client_ca_key());
        Ok(Self(CaMaterial::load_or_create(
            &certificate,
            &key,
            CLIENT_CA_NAME,
        )?))
    }

    /// Issues a certificate with a new key that is valid for `life`.
    ///
    /// # Errors
    /// Returns an [`IssueError`].
    pub fn issue(
        &self,
        name: &CallerName,
        life: Duration,
        now: SystemTime,
    ) -> Result<ClientCertificate, IssueError> {
        let key = KeyPair::generate().map_err(IssueError::Sign)?;
        let leaf = LeafParams {
            common_name: name.as_str().to_owned(),
            names: Vec::new(),
            usages: vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        let (certificate, not_after) = leaf.sign(&self.0, &key, life, now)?;
        Ok(ClientCertificate {
            certificate: certificate.pem(),
            key: Zeroizing::new(key.serialize_pem()),
            not_after,
        })
    }
}

impl CallerName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for CallerName {
    type Err = CallerNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
        let begins_well = text.starts_with(|first: char| first.is_ascii_alphanumeric());
        if begins_well && text.len() <= COMMON_NAME_MAX && text.bytes().all(is_plain) {
            Ok(Self(text.to_owned()))
        } else {
            Err(CallerNameError)
        }
    }
}

/// Beginning of the client CA's common name.
const CLIENT_CA_NAME: &str = "culvert client CA";

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::RootCertStore;
    use rustls::server::WebPkiClientVerifier;
    use rustls_pki_types::{CertificateDer, UnixTime};
    use tunnel_proto::identity::caller_name;
    use tunnel_proto::tls;
    use tunnel_store::testing::Scratch;

    use super::*;
    use crate::LocalCa;

    const DAY: Duration = Duration::from_secs(86_400);

    fn chain(pem: &str) -> Vec<CertificateDer<'static>> {
        tls::files::chain(pem.as_bytes()).unwrap()
    }

    fn is_accepted(roots: Arc<RootCertStore>, leaf: &CertificateDer<'_>) -> bool {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, tls::provider());
        let verifier = verifier.build().unwrap();
        let verified = verifier.verify_client_cert(leaf, &[], UnixTime::now());
        verified.is_ok()
    }

    #[test]
    fn certificate_names_its_caller_and_is_of_the_client_ca_only() {
        let scratch = Scratch::new();
        let local = LocalCa::load_or_create(&scratch.0).unwrap();
        let now = SystemTime::now();
        let name: CallerName = "alice@example.com".parse().unwrap();
        let ca = ClientCa::load_or_create(&scratch.0).unwrap();
        let issued = ca.issue(&name, DAY, now).unwrap();
        let leaf = &chain(&issued.certificate)[0];
        assert_eq!(caller_name(leaf).unwrap(), "alice@example.com");
        assert!(issued.not_after > now && issued.not_after <= now + DAY);

        // The CA is created once.
        let again = ClientCa::load_or_create(&scratch.0).unwrap();
        let pem = std::fs::read_to_string(scratch.0.client_ca_certificate()).unwrap();
        assert_eq!(pem, again.0.certificates_pem());
        assert!(is_accepted(tls::roots(chain(&pem)).unwrap(), leaf));
        assert!(!is_accepted(tls::roots(local.roots()).unwrap(), leaf));
    }

    #[test]
    fn names_that_are_no_file_names_are_refused() {
        for name in ["prometheus", "a", "alice.b_c-d@example.com", "9"] {
            assert_eq!(name.parse::<CallerName>().unwrap().as_str(), name);
        }
        let long = "x".repeat(COMMON_NAME_MAX + 1);
        for name in [
            "",
            ".",
            "-o",
            "../x",
            "a/b",
            "a b",
            "system:node:x",
            "ü",
            &long,
        ] {
            assert_eq!(name.parse::<CallerName>(), Err(CallerNameError), "{name}");
        }
    }
}
