//! The agent's key and certificate in its data directory: `agent.key`, `agent.crt` (PEM, leaf first) and `ca.crt`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::RootCertStore;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tunnel_proto::identity::PeerIdentity;
use tunnel_proto::process::files;
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;

use crate::config::{TokenSource, parse_token};

/// What the agent proves itself with, and what it trusts.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    /// Chain and key.
    pub(crate) own: Arc<CertifiedKey>,
    /// What servers must chain to.
    pub(crate) roots: Arc<RootCertStore>,
    /// When the certificate ends.
    pub(crate) not_after: SystemTime,
}

/// Why there are no usable credentials.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialError {
    /// The directory or a file in it cannot be used.
    #[error(
        "data directory {dir} cannot be used; give --data-dir or run as a user who may write there"
    )]
    Storage {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file is there and makes no sense.
    #[error("{path} {problem}; remove it and enrol again with a new join token")]
    Damaged { path: PathBuf, problem: String },
    /// The certificate is for another node.
    #[error(
        "--node-name is {configured} but must equal the credential's name, {stored} (certificate in {dir}); \
         give --node-name {stored}, or remove agent.crt there and enrol as {configured}"
    )]
    OtherName {
        configured: NodeName,
        stored: NodeName,
        dir: PathBuf,
    },
    /// The certificate is over and there is no token.
    #[error(
        "certificate in {dir} ended at {ended}; enrol again with --token and a new join token \
         (tunnel-server token create --node {node})"
    )]
    Expired {
        dir: PathBuf,
        ended: String,
        node: NodeName,
    },
    /// Nothing to begin with.
    #[error(
        "no certificate in {dir} and no --token; create one where the server runs: tunnel-server token create --node {node}"
    )]
    NoToken { dir: PathBuf, node: NodeName },
    /// The token's file cannot be read.
    #[error("--token-file {path}")]
    TokenFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The token is none.
    #[error("--token-file {path}: {problem}")]
    BadToken { path: PathBuf, problem: String },
}

impl CredentialError {
    /// Whether the configuration has to change (exit code 64).
    pub(crate) fn is_usage(&self) -> bool {
        match self {
            Self::OtherName { .. }
            | Self::NoToken { .. }
            | Self::TokenFile { .. }
            | Self::BadToken { .. } => true,
            Self::Storage { .. } | Self::Damaged { .. } | Self::Expired { .. } => false,
        }
    }
}

/// What the data directory holds for a node.
#[derive(Debug)]
pub(crate) enum Stored {
    /// A certificate that may be used.
    Valid(Box<Credentials>),
    /// One that ended at the given time.
    Expired(SystemTime),
    /// None.
    Nothing,
}

/// The data directory.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    dir: PathBuf,
}

impl Store {
    /// Makes the directory unless it is there.
    pub(crate) fn open(dir: &Path) -> Result<Self, CredentialError> {
        let store = Self {
            dir: dir.to_owned(),
        };
        files::make_private_dir(dir).map_err(|source| store.storage(source))?;
        Ok(store)
    }

    /// Reads the certificate of `node`; `ca` replaces the stored roots.
    pub(crate) fn load(
        &self,
        node: &NodeName,
        ca: Option<&[CertificateDer<'static>]>,
        now: SystemTime,
    ) -> Result<Stored, CredentialError> {
        let Some(chain) = self.certificates(CERTIFICATE)? else {
            return Ok(Stored::Nothing);
        };
        let damaged = |problem: &str| self.damaged(CERTIFICATE, problem);
        let leaf = chain
            .first()
            .ok_or_else(|| damaged("holds no certificate"))?;
        let identity = PeerIdentity::from_certificate(leaf)
            .map_err(|error| damaged(&format!("is not usable: {error}")))?;
        let stored = identity
            .node()
            .ok_or_else(|| damaged("is not an agent's certificate"))?;
        if stored != node {
            return Err(CredentialError::OtherName {
                configured: node.clone(),
                stored: stored.clone(),
                dir: self.dir.clone(),
            });
        }
        if identity.not_after <= now {
            return Ok(Stored::Expired(identity.not_after));
        }
        let key = self
            .read(KEY)?
            .ok_or_else(|| damaged("has no agent.key beside it"))?;
        let key = PrivateKeyDer::from_pem_slice(&key)
            .map_err(|error| self.damaged(KEY, &format!("is not a private key: {error:?}")))?;
        let own = tls::certified_key(chain, key)
            .map_err(|error| damaged(&format!("does not belong to agent.key: {error}")))?;
        let roots = match ca {
            Some(given) => tls::roots(given.iter().cloned()),
            None => {
                let kept = self.certificates(CA)?;
                tls::roots(kept.ok_or_else(|| damaged("has no ca.crt beside it"))?)
            }
        };
        let roots = roots.map_err(|error| self.damaged(CA, &format!("is not usable: {error}")))?;
        Ok(Stored::Valid(Box::new(Credentials {
            own,
            roots,
            not_after: identity.not_after,
        })))
    }

    /// The agent's key, made when there is none: stored before its first use, so that a lost answer can be asked for
    /// again with the same key.
    pub(crate) fn key(&self) -> Result<KeyPair, CredentialError> {
        let generated = |error: rcgen::Error| self.storage(io::Error::other(error));
        match self.read(KEY)? {
            Some(pem) => {
                let text = String::from_utf8_lossy(&pem);
                KeyPair::from_pem(&text)
                    .map_err(|error| self.damaged(KEY, &format!("is not a usable key: {error}")))
            }
            None => {
                let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(generated)?;
                self.replace(KEY, key.serialize_pem().as_bytes())?;
                Ok(key)
            }
        }
    }

    /// Stores what was issued; the certificate last, since it is what says that all is there.
    pub(crate) fn keep(&self, chain: &[Vec<u8>], roots: &[Vec<u8>]) -> Result<(), CredentialError> {
        self.replace(CA, pem_certificates(roots).as_bytes())?;
        self.replace(CERTIFICATE, pem_certificates(chain).as_bytes())
    }

    /// Takes the lock under which one process enrols; `None` while another one does.
    pub(crate) fn lock(&self) -> Result<Option<std::fs::File>, CredentialError> {
        files::try_lock(&self.dir.join("enrol.lock")).map_err(|source| self.storage(source))
    }

    /// Where this is, for messages.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    fn certificates(
        &self,
        name: &str,
    ) -> Result<Option<Vec<CertificateDer<'static>>>, CredentialError> {
        let Some(pem) = self.read(name)? else {
            return Ok(None);
        };
        CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map(Some)
            .map_err(|error| self.damaged(name, &format!("is not PEM: {error:?}")))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, CredentialError> {
        files::read(&self.dir.join(name)).map_err(|source| self.storage(source))
    }

    fn replace(&self, name: &str, content: &[u8]) -> Result<(), CredentialError> {
        files::replace(&self.dir.join(name), content).map_err(|source| self.storage(source))
    }

    fn storage(&self, source: io::Error) -> CredentialError {
        CredentialError::Storage {
            dir: self.dir.clone(),
            source,
        }
    }

    fn damaged(&self, name: &str, problem: &str) -> CredentialError {
        CredentialError::Damaged {
            path: self.dir.join(name),
            problem: problem.to_owned(),
        }
    }
}

/// The join token, read from its file when that is where it is.
pub(crate) fn read_token(source: &TokenSource) -> Result<JoinToken, CredentialError> {
    match source {
        TokenSource::Given(token) => Ok(token.clone()),
        TokenSource::File(path) => {
            let text =
                std::fs::read_to_string(path).map_err(|source| CredentialError::TokenFile {
                    path: path.clone(),
                    source,
                })?;
            parse_token(&text).map_err(|problem| CredentialError::BadToken {
                path: path.clone(),
                problem,
            })
        }
    }
}

/// Certificates in PEM (RFC 7468).
fn pem_certificates(certificates: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for der in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        // 48 bytes are 64 characters.
        for line in der.chunks(48) {
            text.push_str(&base64(line));
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

/// Base64 with padding (RFC 4648, section 4).
pub(crate) fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let three = group
            .iter()
            .fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        for place in 0..4 {
            if place <= group.len() {
                let index = three >> (18 - 6 * place) & 0x3f;
                text.push(char::from(ALPHABET[index as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

const KEY: &str = "agent.key";
const CERTIFICATE: &str = "agent.crt";
const CA: &str = "ca.crt";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use super::*;
    use crate::testing::{Ca, Scratch};

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn filled(scratch: &Scratch, ca: &Ca) -> Store {
        let store = Store::open(scratch.path()).unwrap();
        let key = store.key().unwrap();
        let leaf = ca.issue(&key, "culvert://agent/worker-1");
        store.keep(&[leaf.to_vec()], &[ca.der().to_vec()]).unwrap();
        store
    }

    #[test]
    fn stored_credentials_are_private_and_come_back() {
        let (scratch, ca) = (Scratch::new(), Ca::new());
        let store = filled(&scratch, &ca);
        let now = SystemTime::now();
        let Stored::Valid(credentials) = store.load(&node("worker-1"), None, now).unwrap() else {
            panic!("not valid")
        };
        assert!(credentials.not_after > now);
        for name in [KEY, CERTIFICATE, CA] {
            let mode = std::fs::metadata(scratch.path().join(name)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let later = now + Duration::from_secs(3000 * 365 * 86400);
        assert!(matches!(
            store.load(&node("worker-1"), None, later).unwrap(),
            Stored::Expired(_)
        ));
    }

    #[test]
    fn key_is_made_once() {
        let scratch = Scratch::new();
        let store = Store::open(scratch.path()).unwrap();
        let first = store.key().unwrap().serialize_pem();
        assert_eq!(store.key().unwrap().serialize_pem(), first);
    }

    #[test]
    fn other_name_is_a_usage_error_that_says_what_to_do() {
        let (scratch, ca) = (Scratch::new(), Ca::new());
        let store = filled(&scratch, &ca);
        let error = store
            .load(&node("worker-2"), None, SystemTime::now())
            .unwrap_err();
        assert!(error.is_usage());
        assert!(
            error
                .to_string()
                .contains("must equal the credential's name, worker-1")
        );
    }

    #[test]
    fn key_of_another_certificate_is_noticed() {
        let (scratch, ca) = (Scratch::new(), Ca::new());
        let store = filled(&scratch, &ca);
        std::fs::remove_file(scratch.path().join(KEY)).unwrap();
        store.key().unwrap();
        let error = store
            .load(&node("worker-1"), None, SystemTime::now())
            .unwrap_err();
        assert!(
            error.to_string().contains("does not belong to agent.key"),
            "{error}"
        );
        assert!(!error.is_usage());
    }

    #[test]
    fn base64_is_that_of_the_standard() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
            // RFC 7617, section 2.
            ("Aladdin:open sesame", "QWxhZGRpbjpvcGVuIHNlc2FtZQ=="),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }
}
