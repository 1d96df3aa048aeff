//! The local CA: the CA of this installation, as opposed to one that the operator provides. The CA
//! signs the certificates of agents and of the server, and can be replaced while the server runs.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use aws_lc_rs::hmac;
use rcgen::{ExtendedKeyUsagePurpose, SanType};
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tunnel_proto::identity::Role;
use tunnel_proto::transport::quic::QuicKeys;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_store::data_dir::DataDir;
#[cfg(feature = "test-util")]
use tunnel_store::state_store::check_value;

pub mod attestation;
mod cert_resolver;
pub mod client;
mod csr;
pub mod enrollment;
mod error;
mod key_binding;
mod leaf;
mod material;
mod persisted_rotation;
pub mod renewal;
pub mod revocation;
pub mod rotation;
mod serving_names;
mod stage;
pub mod tokens;
pub mod transfer;

pub use cert_resolver::{IsKnown, OnIssue, RoleCertResolver};
pub use csr::AgentCsr;
pub use error::{CaError, IssueError};
use leaf::{LeafKey, LeafParams, uri};
pub use material::{CaMaterial, CaPem, SourceNames};
pub use serving_names::ServingNames;

/// Default lifetime of every certificate except the CA's own. `limits.certificateLife` overrides
/// it.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Length of a tag of HMAC-SHA-256.
const SHA256_BYTES: usize = 32;

/// The CA of an installation whose operator does not provide one. A standalone server stores it in
/// its data directory. The servers of a cluster share one CA, which a Secret holds.
pub struct LocalCa {
    material: ArcSwap<CaMaterial>,
    /// Number of replacements so far. Receivers are notified of each replacement.
    generation: watch::Sender<u64>,
    life: Duration,
    /// Key of the server's credentials for agents. The key exists only in memory.
    server_key: LeafKey,
    /// Key of the server's credentials for other servers. The key exists only in memory.
    peer_key: LeafKey,
    /// Key of all serving certificates of the HTTPS listener. The key exists only in memory.
    serving_key: LeafKey,
}

#[derive(Debug, Clone)]
pub struct AgentCertificate {
    /// Chain with the leaf first. The root is not included.
    pub chain: Vec<CertificateDer<'static>>,
    /// Roots at the time of issue.
    pub roots: Vec<CertificateDer<'static>>,
    /// Time at which the leaf expires.
    pub not_after: SystemTime,
}

impl LocalCa {
    /// Loads the CA from the data directory, or creates one there. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`CaError`] that names the file.
    pub fn load_or_create(dir: &DataDir) -> Result<Self, CaError> {
        let _changing = dir.lock_files()?;
        persisted_rotation::resume(dir)?;
        let material =
            CaMaterial::load_or_create(&dir.ca_certificate(), &dir.ca_key(), material::CA_NAME)?;
        Self::new(Arc::new(material))
    }

    /// Creates a CA that signs with `material`.
    ///
    /// # Errors
    /// Returns an error if one of the server's own keys cannot be generated.
    pub fn new(material: Arc<CaMaterial>) -> Result<Self, CaError> {
        Ok(Self {
            material: ArcSwap::new(material),
            generation: watch::Sender::new(0),
            life: CERTIFICATE_LIFE,
            server_key: LeafKey::generate()?,
            peer_key: LeafKey::generate()?,
            serving_key: LeafKey::generate()?,
        })
    }

    /// Replaces the CA for certificates issued from now on. Certificates that were already issued
    /// are not affected. Returns `false` if `material` is unchanged.
    pub fn replace(&self, material: Arc<CaMaterial>) -> bool {
        if self.material.load().is_same(&material) {
            return false;
        }
        self.material.store(material);
        self.generation.send_modify(|generation| *generation += 1);
        true
    }

    /// Returns QUIC's reset and connection-id keys for the only server that uses the CA. They are
    /// derived from the private key, so that a server that lost its data directory has the same ones.
    pub fn quic_keys(&self) -> QuicKeys {
        let mut bytes = [0; QuicKeys::LEN];
        for (number, chunk) in (0_u8..).zip(bytes.chunks_mut(SHA256_BYTES)) {
            let tag = self.tag("quic keys", &[&[number]]);
            chunk.copy_from_slice(&tag.as_ref()[..chunk.len()]);
        }
        QuicKeys::from_bytes(&bytes)
    }

    /// Returns the authentication code of a purpose and of data, by the CA's private key.
    fn tag(&self, purpose: &str, data: &[&[u8]]) -> hmac::Tag {
        let material = self.material.load();
        let key = hmac::Key::new(hmac::HMAC_SHA256, material.key_pem().as_bytes());
        let mut context = hmac::Context::with_key(&key);
        context.update(b"culvert ");
        context.update(purpose.as_bytes());
        for part in data {
            context.update(&[0]);
            context.update(part);
        }
        context.sign()
    }

    /// Returns a receiver that is notified when the CA is replaced.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Sets the lifetime of issued certificates, instead of [`CERTIFICATE_LIFE`].
    pub fn with_life(self, life: Duration) -> Self {
        Self { life, ..self }
    }

    /// Returns the lifetime of issued certificates.
    pub fn life(&self) -> Duration {
        self.life
    }

    /// Returns every root to which certificates of this installation chain: one, or several while
    /// the CA is being replaced.
    pub fn roots(&self) -> Vec<CertificateDer<'static>> {
        self.material.load().roots.clone()
    }

    /// Returns the certificate of the signing key.
    pub fn root(&self) -> CertificateDer<'static> {
        self.material.load().root.clone()
    }

    /// Returns the roots as PEM, as in the file `ca.crt`.
    pub fn root_pem(&self) -> String {
        self.material.load().root_pem.clone()
    }

    /// Returns a digest of the key that signs and of the trusted certificates.
    pub fn digest(&self) -> [u8; 32] {
        self.material.load().digest()
    }

    /// Returns the SHA-256 of the CA's public key, which join tokens pin.
    pub fn spki_sha256(&self) -> [u8; 32] {
        self.material.load().spki_sha256
    }

    /// Issues a certificate of generation 0 for a request that is not parsed, like [`Self::issue`].
    ///
    /// # Errors
    /// Returns an [`IssueError`].
    #[cfg(any(test, feature = "test-util"))]
    pub fn issue_agent(
        &self,
        csr_der: &[u8],
        node: &NodeName,
    ) -> Result<AgentCertificate, IssueError> {
        self.issue(&AgentCsr::parse(csr_der)?, node, 0, SystemTime::now())
    }

    /// Issues a certificate of a generation for an agent. The public key is taken from the request; the
    /// names in the request are ignored.
    ///
    /// # Errors
    /// Returns an [`IssueError`].
    pub fn issue(
        &self,
        request: &AgentCsr,
        node: &NodeName,
        generation: u64,
        now: SystemTime,
    ) -> Result<AgentCertificate, IssueError> {
        let leaf = LeafParams {
            // A bare node name must not match a CN that is checked for callers.
            common_name: format!("culvert agent {node}"),
            names: vec![uri(Role::Agent(node.clone()).uri_of_generation(generation))?],
            usages: vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        let material = self.material.load();
        let (certificate, not_after) =
            leaf.sign(&material, request.public_key(), self.life, now)?;
        Ok(AgentCertificate {
            chain: vec![certificate.der().clone()],
            roots: material.roots.clone(),
            not_after,
        })
    }

    fn server_leaf(&self, now: SystemTime) -> Result<CertifiedKey, IssueError> {
        let leaf = LeafParams {
            common_name: "culvert server".into(),
            names: vec![uri(Role::Server.uri())?],
            usages: vec![ExtendedKeyUsagePurpose::ServerAuth],
        };
        self.serving(leaf, &self.server_key, now)
    }

    /// Issues a certificate with which a server both dials and accepts other servers.
    fn peer_leaf(&self, replica: &ReplicaId, now: SystemTime) -> Result<CertifiedKey, IssueError> {
        let leaf = LeafParams {
            common_name: format!("culvert peer {replica}"),
            names: vec![uri(Role::Peer(replica.clone()).uri())?],
            usages: vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
        };
        self.serving(leaf, &self.peer_key, now)
    }

    fn serving_leaf(
        &self,
        common_name: &str,
        names: Vec<SanType>,
        now: SystemTime,
    ) -> Result<CertifiedKey, IssueError> {
        let leaf = LeafParams {
            common_name: common_name.to_owned(),
            names,
            usages: vec![ExtendedKeyUsagePurpose::ServerAuth],
        };
        self.serving(leaf, &self.serving_key, now)
    }

    fn serving(
        &self,
        leaf: LeafParams,
        key: &LeafKey,
        now: SystemTime,
    ) -> Result<CertifiedKey, IssueError> {
        // Load the CA once: another thread may replace it in the meantime.
        let material = self.material.load();
        let (certificate, _) = leaf.sign(&material, &key.pair, self.life, now)?;
        Ok(CertifiedKey::new(
            vec![certificate.der().clone(), material.root.clone()],
            key.signing.clone(),
        ))
    }
}

impl fmt::Debug for LocalCa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LocalCa")
            .field("material", &self.material.load())
            .finish_non_exhaustive()
    }
}

/// Reads a value of the store as the kinds of rows of this crate, for a fuzz target.
#[cfg(feature = "test-util")]
pub fn check_rows(content: &[u8]) {
    check_value::<revocation::OrderRow>(content);
    check_value::<tokens::StoredToken>(content);
}

#[cfg(test)]
mod tests;
