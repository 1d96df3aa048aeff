//! The agent's key and certificate in its data directory: `agent.key`, `agent.crt` (PEM, leaf
//! first) and `ca.crt`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustls::RootCertStore;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tunnel_process::files;
use tunnel_proto::identity::{BACKDATED, PeerIdentity, sha256, spki_sha256, validity};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::wire::enroll::{JoinToken, is_service_account_token};
use tunnel_proto::wire::name::NodeName;
use zeroize::Zeroizing;

use crate::config::{NO_CA, Secret, TokenSource, parse_token};

mod ca_file;
mod credential_files;
mod disk;
mod error;
mod rotation;
mod succession;

pub(crate) use ca_file::CaFile;
use disk::{DiskContent, DiskWrite, OnDisk, StoredPair};
pub(crate) use error::CredentialError;
pub(crate) use rotation::{Refusal, RotatingCredentials};
pub(crate) use succession::succeed;

/// The agent's identity and trust roots.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    pub(crate) own: Arc<CertifiedKey>,
    /// Roots that came with the certificate. Those of --ca-file replace them in use, see
    /// [`Self::trust`].
    pub(crate) roots: TrustRoots,
    /// Name that a server's certificate must be valid for, instead of the server role.
    pub(crate) server_name: Option<ServerName<'static>>,
    /// Key for requesting the next certificate, if the agent renews its own.
    pub(crate) signer: Option<Arc<KeyPair>>,
    pub(crate) issued: SystemTime,
    pub(crate) not_after: SystemTime,
}

/// CA certificates, as they are stored and as handshakes use them.
#[derive(Debug, Clone)]
pub(crate) struct TrustRoots {
    certificates: Vec<CertificateDer<'static>>,
    store: Arc<RootCertStore>,
}

impl TrustRoots {
    /// Creates the store of these certificates.
    ///
    /// # Errors
    /// Returns an error if there is no certificate, or an unusable one.
    pub(crate) fn new(certificates: Vec<CertificateDer<'static>>) -> Result<Self, rustls::Error> {
        Ok(Self {
            store: tls::roots(certificates.iter().cloned())?,
            certificates,
        })
    }

    pub(crate) fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.certificates
    }
}

impl Credentials {
    /// Creates credentials from a certificate that a server issued to `signer`, with the server's
    /// roots.
    ///
    /// # Errors
    /// Returns a message for the operator if the certificate is unusable.
    pub(crate) fn issued(
        signer: Arc<KeyPair>,
        chain: &[Vec<u8>],
        roots: &[Vec<u8>],
    ) -> Result<Self, String> {
        let chain = certificates(chain);
        let leaf = chain.first().ok_or("answer has no certificate")?;
        let (not_before, not_after) = validity(leaf).map_err(|error| error.to_string())?;
        let key = PrivateKeyDer::Pkcs8(signer.serialize_der().into());
        let own = tls::certified_key(chain, key).map_err(|error| error.to_string())?;
        Ok(Self {
            own,
            roots: TrustRoots::new(certificates(roots)).map_err(|error| error.to_string())?,
            server_name: None,
            signer: Some(signer),
            issued: not_before + BACKDATED,
            not_after,
        })
    }

    /// Returns the trust in servers. `ca` are the roots of --ca-file, if they replace those that
    /// came with the certificate.
    pub(crate) fn trust(&self, ca: Option<&TrustRoots>) -> Trust {
        let roots = ca.unwrap_or(&self.roots).store.clone();
        match &self.server_name {
            Some(name) => Trust::Named(roots, name.clone()),
            None => Trust::Roots(roots),
        }
    }

    /// Returns what the files of these credentials have, except the key.
    fn files(&self) -> StoredPair {
        StoredPair {
            chain: self.own.cert.clone(),
            roots: self.roots.certificates.clone(),
        }
    }
}

fn certificates(list: &[Vec<u8>]) -> Vec<CertificateDer<'static>> {
    list.iter().cloned().map(CertificateDer::from).collect()
}

#[derive(Debug)]
pub(crate) enum Stored {
    Valid(Box<Credentials>),
    /// A certificate that expired at the given time, and its credentials if the key is present.
    Expired(SystemTime, Option<Box<Credentials>>),
    /// The directory contains no certificate.
    Missing,
}

/// The data directory of an agent.
#[derive(Debug, Clone)]
pub(crate) struct CredentialStore {
    dir: PathBuf,
}

impl CredentialStore {
    /// Opens the directory and creates it if it does not exist.
    pub(crate) fn open(dir: &Path) -> Result<Self, CredentialError> {
        let store = Self::at(dir);
        files::make_private_dir(dir).map_err(|source| store.storage(source))?;
        Ok(store)
    }

    /// Returns the store of a directory that need not exist, for reading. Creates nothing.
    pub(crate) fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// Reads the certificate of `node`; `ca` replaces stored roots that are missing or damaged.
    pub(crate) fn load(
        &self,
        node: &NodeName,
        ca: Option<&[CertificateDer<'static>]>,
        now: SystemTime,
    ) -> Result<Stored, CredentialError> {
        let Some(chain) = self.certificates(CERTIFICATE)? else {
            return Ok(Stored::Missing);
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
            return Err(CredentialError::StoredNodeMismatch {
                configured: node.clone(),
                stored: stored.clone(),
                dir: self.dir.clone(),
            });
        }
        let not_after = identity.not_after;
        let loaded = self.load_pair(CURRENT, &identity, chain, ca);
        match loaded {
            Ok(credentials) if not_after <= now => {
                Ok(Stored::Expired(not_after, Some(Box::new(credentials))))
            }
            // A new certificate is needed in any case.
            Err(_) if not_after <= now => Ok(Stored::Expired(not_after, None)),
            loaded => Ok(Stored::Valid(Box::new(loaded?))),
        }
    }

    /// Returns the certificate of `node` before the stored one, if it exists and is usable.
    pub(crate) fn previous(
        &self,
        node: &NodeName,
        ca: Option<&[CertificateDer<'static>]>,
    ) -> Option<Credentials> {
        let chain = self.certificates(PREVIOUS.certificate).ok()??;
        let identity = PeerIdentity::from_certificate(chain.first()?).ok()?;
        if identity.node() != Some(node) {
            return None;
        }
        self.load_pair(PREVIOUS, &identity, chain, ca).ok()
    }

    /// Removes the previous certificate and its roots.
    fn remove_previous(&self) -> Result<(), CredentialError> {
        for name in [PREVIOUS.certificate, PREVIOUS.ca] {
            files::remove(&self.dir.join(name)).map_err(|source| self.storage(source))?;
        }
        Ok(())
    }

    /// Loads the key and the roots of a stored certificate.
    fn load_pair(
        &self,
        pair: CertificateFiles,
        identity: &PeerIdentity,
        chain: Vec<CertificateDer<'static>>,
        ca: Option<&[CertificateDer<'static>]>,
    ) -> Result<Credentials, CredentialError> {
        let damaged = |problem: &str| self.damaged(pair.certificate, problem);
        let pem = self
            .read_key()?
            .ok_or_else(|| damaged("has no agent.key next to it"))?;
        let signer = self.key_pair(&pem)?;
        let key = PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|error| self.damaged(KEY, &format!("is not a private key: {error:?}")))?;
        let own = tls::certified_key(chain, key)
            .map_err(|error| damaged(&format!("does not belong to agent.key: {error}")))?;
        let roots = match (self.stored_roots(pair), ca) {
            (Err(_unused), Some(ca)) => TrustRoots::new(ca.to_vec())
                .map_err(|error| damaged(&format!("has no usable CA: {error}")))?,
            (stored, _) => stored?,
        };
        Ok(Credentials {
            own,
            roots,
            server_name: None,
            signer: Some(Arc::new(signer)),
            issued: identity.not_before + BACKDATED,
            not_after: identity.not_after,
        })
    }

    fn stored_roots(&self, pair: CertificateFiles) -> Result<TrustRoots, CredentialError> {
        let missing = || self.damaged(pair.certificate, &format!("has no {} next to it", pair.ca));
        let stored = self.certificates(pair.ca)?.ok_or_else(missing)?;
        TrustRoots::new(stored)
            .map_err(|error| self.damaged(pair.ca, &format!("is not usable: {error}")))
    }

    /// Returns the agent's key, generated if there is none. The key is stored before its first use,
    /// so that the agent can repeat the request with the same key after a lost answer.
    pub(crate) fn key(&self) -> Result<KeyPair, CredentialError> {
        let generated = |error: rcgen::Error| self.storage(io::Error::other(error));
        let stored = self.read_key()?.map(|pem| self.key_pair(&pem));
        match stored {
            Some(Ok(key)) => Ok(key),
            // A key that cannot be used is worth nothing.
            Some(Err(_)) | None => {
                let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(generated)?;
                self.replace(KEY, Zeroizing::new(key.serialize_pem()).as_bytes())?;
                Ok(key)
            }
        }
    }

    /// Stores the key again if its file is gone, so that the next start finds it.
    fn restore_key(&self, key: &KeyPair) -> Result<(), CredentialError> {
        if self.read_key()?.is_some() {
            return Ok(());
        }
        self.replace(KEY, Zeroizing::new(key.serialize_pem()).as_bytes())
    }

    fn key_pair(&self, pem: &[u8]) -> Result<KeyPair, CredentialError> {
        let text = String::from_utf8_lossy(pem);
        KeyPair::from_pem(&text)
            .map_err(|error| self.damaged(KEY, &format!("is not a usable key: {error}")))
    }

    fn read_key(&self) -> Result<Option<Zeroizing<Vec<u8>>>, CredentialError> {
        let read =
            files::read_secret(&self.dir.join(KEY)).map_err(|source| self.storage(source))?;
        Ok(read.filter(|pem| !is_lost(pem)))
    }

    /// Stores a first certificate and its roots, and forgets all earlier ones.
    pub(crate) fn save(&self, first: &Credentials) -> Result<(), CredentialError> {
        self.remove_previous()?;
        self.write_pair(CURRENT, &first.files())
    }

    /// Makes the directory have `wanted`, and `key`.
    fn write(
        &self,
        on_disk: &mut OnDisk,
        wanted: DiskContent,
        key: Option<&KeyPair>,
    ) -> Result<(), CredentialError> {
        let writes = on_disk.writes(&wanted);
        on_disk.begin_write();
        for write in writes {
            match (write, &wanted.previous) {
                (DiskWrite::Current, _) => {
                    self.write_pair(CURRENT, &wanted.current)?;
                    key.map_or(Ok(()), |key| self.restore_key(key))?;
                }
                (DiskWrite::Previous, Some(previous)) => self.write_pair(PREVIOUS, previous)?,
                (DiskWrite::Previous, None) => self.remove_previous()?,
            }
        }
        *on_disk = OnDisk::complete(wanted);
        Ok(())
    }

    /// Writes the certificate last, since its presence marks the pair as complete.
    fn write_pair(
        &self,
        files: CertificateFiles,
        pair: &StoredPair,
    ) -> Result<(), CredentialError> {
        self.replace_certificates(files.ca, &pair.roots)?;
        self.replace_certificates(files.certificate, &pair.chain)
    }

    /// Takes the lock under which one process enrolls. Returns `None` while another process holds
    /// it.
    pub(crate) fn lock(&self) -> Result<Option<std::fs::File>, CredentialError> {
        files::try_lock(&self.dir.join("enrol.lock")).map_err(|source| self.storage(source))
    }

    /// Returns the path of the directory, for messages.
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
        let read = files::read(&self.dir.join(name)).map_err(|source| self.storage(source))?;
        Ok(read.filter(|content| !is_lost(content)))
    }

    fn replace(&self, name: &str, content: &[u8]) -> Result<(), CredentialError> {
        files::replace(&self.dir.join(name), content).map_err(|source| self.storage(source))
    }

    fn replace_certificates(
        &self,
        name: &str,
        certificates: &[CertificateDer<'_>],
    ) -> Result<(), CredentialError> {
        self.replace(name, pem_certificates(certificates).as_bytes())
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

/// Returns whether a file has lost its content, as after a loss of power: it is as if it were absent.
fn is_lost(content: &[u8]) -> bool {
    content.iter().all(|byte| *byte == 0)
}

#[derive(Debug, Clone)]
pub(crate) enum Token {
    Join(JoinToken),
    /// A ServiceAccount token, as the kubelet wrote it last.
    ServiceAccount(Secret),
}

/// Reads the token, from its file if configured so. A ServiceAccount token needs the CA of
/// --ca-file. Blocks the thread.
pub(crate) fn read_token(source: &TokenSource, has_ca: bool) -> Result<Token, CredentialError> {
    let path = match source {
        TokenSource::Inline(token) => return Ok(Token::Join(token.clone())),
        TokenSource::File(path) => path,
    };
    let text = read_text(path)?;
    let bad = |problem| CredentialError::BadToken {
        path: path.clone(),
        problem,
    };
    if !is_service_account_token(&text) {
        return parse_token(&text).map(Token::Join).map_err(bad);
    }
    if !has_ca {
        return Err(bad(NO_CA.to_owned()));
    }
    Ok(Token::ServiceAccount(Secret(text.trim().to_owned())))
}

/// Checks that a chain is for the agent's key and name.
pub(crate) fn check_issued(
    node: &NodeName,
    key: &KeyPair,
    chain: &[Vec<u8>],
) -> Result<(), &'static str> {
    let leaf = CertificateDer::from(chain.first().ok_or("answer has no certificate")?.as_slice());
    let identity =
        PeerIdentity::from_certificate(&leaf).map_err(|_why| "certificate has no identity")?;
    if identity.node() != Some(node) {
        return Err("certificate is for another node");
    }
    let ours = sha256(&key.subject_public_key_info());
    if spki_sha256(&leaf).map_err(|_why| "certificate is malformed")? != ours {
        return Err("certificate is for another key");
    }
    Ok(())
}

fn read_text(path: &Path) -> Result<Zeroizing<String>, CredentialError> {
    let content = files::read_operator_file(path).map_err(|source| CredentialError::TokenFile {
        path: path.to_owned(),
        source,
    })?;
    Ok(String::from_utf8_lossy(&content).into_owned().into())
}

#[derive(Debug, Clone, Copy)]
struct CertificateFiles {
    certificate: &'static str,
    ca: &'static str,
}

const KEY: &str = "agent.key";
pub(crate) const CERTIFICATE: &str = "agent.crt";
const CA: &str = "ca.crt";
/// Files of the pair in use.
const CURRENT: CertificateFiles = CertificateFiles {
    certificate: CERTIFICATE,
    ca: CA,
};
/// Files of the previous pair, until it expires.
const PREVIOUS: CertificateFiles = CertificateFiles {
    certificate: "agent.crt.previous",
    ca: "ca.crt.previous",
};

/// Encodes certificates in PEM (RFC 7468).
fn pem_certificates(certificates: &[CertificateDer<'_>]) -> String {
    let mut text = String::new();
    for der in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        // 48 bytes become 64 characters.
        for line in der.chunks(48) {
            BASE64_STANDARD.encode_string(line, &mut text);
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    use super::*;
    use crate::testing::{Ca, ScratchDir, stored};

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn filled(scratch: &ScratchDir, ca: &Ca) -> CredentialStore {
        let store = CredentialStore::open(scratch.path()).unwrap();
        let key = store.key().unwrap();
        let leaf = ca.issue(&key, "culvert://agent/worker-1");
        let (chain, roots) = ([leaf.to_vec()], [ca.der().to_vec()]);
        let first = Credentials::issued(Arc::new(key), &chain, &roots).unwrap();
        store.save(&first).unwrap();
        store
    }

    #[test]
    fn stored_credentials_are_private_and_come_back() {
        let (scratch, ca) = (ScratchDir::new().unwrap(), Ca::new());
        let store = filled(&scratch, &ca);
        let now = SystemTime::now();
        assert!(stored(scratch.path()).not_after > now);
        for name in [KEY, CERTIFICATE, CA] {
            let mode = std::fs::metadata(scratch.path().join(name)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let later = now + Duration::from_secs(3000 * 365 * 86400);
        let expired = store.load(&node("worker-1"), None, later).unwrap();
        assert!(matches!(expired, Stored::Expired(_, Some(_))));
    }

    #[test]
    fn other_name_is_a_usage_error_that_says_what_to_do() {
        let (scratch, ca) = (ScratchDir::new().unwrap(), Ca::new());
        let store = filled(&scratch, &ca);
        let loaded = store.load(&node("worker-2"), None, SystemTime::now());
        let error = loaded.unwrap_err();
        assert!(error.is_usage());
        let text = error.to_string();
        assert!(text.contains("must equal the credential's name, worker-1"));
    }

    #[test]
    fn key_of_another_certificate_is_noticed() {
        let (scratch, ca) = (ScratchDir::new().unwrap(), Ca::new());
        let store = filled(&scratch, &ca);
        std::fs::remove_file(scratch.path().join(KEY)).unwrap();
        store.key().unwrap();
        let loaded = store.load(&node("worker-1"), None, SystemTime::now());
        let error = loaded.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("does not belong to agent.key"), "{text}");
        assert!(!error.is_usage());
    }
}
