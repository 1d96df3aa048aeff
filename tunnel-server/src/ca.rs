//! The local CA: the CA of this installation, as opposed to one that the operator provides. The CA
//! signs the certificates of agents and of the server, and can be replaced while the server runs.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PublicKeyData,
    SanType,
};
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;
use tracing::info;
use tunnel_proto::identity::{BACKDATED, Role};
use tunnel_proto::process::files;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use zeroize::Zeroizing;

use crate::store::data_dir::{DataDir, whole_seconds};

pub mod attestation;
mod cert_resolver;
mod csr;
pub mod distrusted;
pub mod enrollment;
mod error;
mod key_binding;
mod leaf;
mod material;
pub mod renewal;
pub mod revocation;
mod serving_names;
pub mod tokens;
pub mod transfer;

pub use crate::ca::csr::AgentCsr;
pub use crate::ca::serving_names::ServingNames;
pub use cert_resolver::{IsKnown, OnIssue, RoleCertResolver};
pub use error::{CaError, IssueError};
use leaf::{LeafKey, LeafParams, uri};
pub use material::{CaMaterial, SourceNames};
use material::{common_name, serial};

/// Default lifetime of every certificate except the CA's own. `limits.certificateLife` overrides
/// it.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

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
        let (key_path, certificate_path) = (dir.ca_key(), dir.ca_certificate());
        let names = SourceNames {
            certificates: &certificate_path.display().to_string(),
            key: &key_path.display().to_string(),
        };
        let certificate = files::read(&certificate_path)?;
        let key = match files::read_secret(&key_path)? {
            Some(pem) => material::read_key(&pem, names.key)?,
            None if certificate.is_some() => {
                return Err(CaError::KeyMissing(
                    names.certificates.to_owned(),
                    names.key.to_owned(),
                ));
            }
            None => {
                let key = KeyPair::generate().map_err(CaError::Generate)?;
                files::replace(&key_path, Zeroizing::new(key.serialize_pem()).as_bytes())?;
                key
            }
        };
        let root_pem = if let Some(pem) = certificate {
            String::from_utf8_lossy(&pem).into_owned()
        } else {
            // A crash between the two writes leaves the key without its certificate.
            let pem = material::self_signed(&key, SystemTime::now())?.pem();
            files::replace(&certificate_path, pem.as_bytes())?;
            info!(path = %certificate_path.display(), "created a CA");
            pem
        };
        let material = CaMaterial::new(root_pem, key, names)?;
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

    /// Returns a receiver that is notified when the CA is replaced.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Sets the lifetime of issued certificates, instead of [`CERTIFICATE_LIFE`].
    #[must_use]
    pub fn with_life(self, life: Duration) -> Self {
        Self { life, ..self }
    }

    /// Returns the lifetime of issued certificates.
    #[must_use]
    pub fn life(&self) -> Duration {
        self.life
    }

    /// Returns every root to which certificates of this installation chain: one, or several while
    /// the CA is being replaced.
    #[must_use]
    pub fn roots(&self) -> Vec<CertificateDer<'static>> {
        self.material.load().roots.clone()
    }

    /// Returns the certificate of the signing key.
    #[must_use]
    pub fn root(&self) -> CertificateDer<'static> {
        self.material.load().root.clone()
    }

    /// Returns the roots as PEM, as in the file `ca.crt`.
    #[must_use]
    pub fn root_pem(&self) -> String {
        self.material.load().root_pem.clone()
    }

    /// Returns the SHA-256 of the CA's public key, which join tokens pin.
    #[must_use]
    pub fn spki_sha256(&self) -> [u8; 32] {
        self.material.load().spki_sha256
    }

    /// Issues a certificate for an agent. The public key is taken from the request; the names in
    /// the request are ignored.
    ///
    /// # Errors
    /// Returns an [`IssueError`].
    pub fn issue_agent(
        &self,
        csr_der: &[u8],
        node: &NodeName,
    ) -> Result<AgentCertificate, IssueError> {
        self.issue(&AgentCsr::parse(csr_der)?, node, SystemTime::now())
    }

    /// Issues a certificate like [`Self::issue_agent`] for a request that is already parsed.
    ///
    /// # Errors
    /// Returns an [`IssueError`].
    pub fn issue(
        &self,
        request: &AgentCsr,
        node: &NodeName,
        now: SystemTime,
    ) -> Result<AgentCertificate, IssueError> {
        let leaf = LeafParams {
            // A bare node name must not match a CN that is checked for callers.
            common_name: format!("culvert agent {node}"),
            names: vec![uri(&Role::Agent(node.clone()))?],
            usages: vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        let material = self.material.load();
        let (certificate, not_after) = self.sign(&material, leaf, request.public_key(), now)?;
        Ok(AgentCertificate {
            chain: vec![certificate],
            roots: material.roots.clone(),
            not_after,
        })
    }

    fn server_leaf(&self, now: SystemTime) -> Result<CertifiedKey, IssueError> {
        let leaf = LeafParams {
            common_name: "culvert server".into(),
            names: vec![uri(&Role::Server)?],
            usages: vec![ExtendedKeyUsagePurpose::ServerAuth],
        };
        self.serving(leaf, &self.server_key, now)
    }

    /// Issues a certificate with which a server both dials and accepts other servers.
    fn peer_leaf(&self, replica: &ReplicaId, now: SystemTime) -> Result<CertifiedKey, IssueError> {
        let leaf = LeafParams {
            common_name: format!("culvert peer {replica}"),
            names: vec![uri(&Role::Peer(replica.clone()))?],
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
        let (certificate, _) = self.sign(&material, leaf, &key.pair, now)?;
        Ok(CertifiedKey::new(
            vec![certificate, material.root.clone()],
            key.signing.clone(),
        ))
    }

    fn sign(
        &self,
        material: &CaMaterial,
        leaf: LeafParams,
        key: &impl PublicKeyData,
        now: SystemTime,
    ) -> Result<(CertificateDer<'static>, SystemTime), IssueError> {
        let now = whole_seconds(now);
        let not_after = now + self.life;
        let mut params = CertificateParams::default();
        params.not_before = now.checked_sub(BACKDATED).unwrap_or(now).into();
        params.not_after = not_after.into();
        params.serial_number = Some(serial().map_err(IssueError::Serial)?);
        params.distinguished_name = common_name(&leaf.common_name);
        params.subject_alt_names = leaf.names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = leaf.usages;
        params.use_authority_key_identifier_extension = true;
        let certificate = params
            .signed_by(key, &material.issuer)
            .map_err(IssueError::Sign)?;
        Ok((certificate.der().clone(), not_after))
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

#[cfg(test)]
mod tests;
