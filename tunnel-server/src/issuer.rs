//! The local CA: made once in the data directory, signs agents' certificates and the server's own.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls::server::ResolvesServerCert;
use rustls::sign::{CertifiedKey, SigningKey};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tracing::info;
use tunnel_proto::identity::{BACKDATED, Role, sha256, spki_sha256};
use tunnel_proto::process::files;
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::hex;
use tunnel_proto::wire::name::NodeName;

use crate::data::{DataDir, random, whole_seconds};

mod request;
mod resolver;

pub use request::AgentRequest;

/// Life of every certificate but the CA's own, unless `limits.certificateLife` says another.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The CA of an installation without a CA of its own.
pub struct LocalCa {
    /// The certificate of the key that signs.
    root: CertificateDer<'static>,
    /// All of `ca.crt`: while a CA is being replaced, the old and the new one.
    roots: Vec<CertificateDer<'static>>,
    root_pem: String,
    life: Duration,
    spki_sha256: [u8; 32],
    issuer: Issuer<'static, KeyPair>,
    /// Key of the server's credential towards agents; only in memory.
    server_key: LeafKey,
    /// Key of all serving certificates of the TLS door; only in memory.
    door_key: LeafKey,
}

/// Why the CA cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file cannot be read or made; the text names it.
    #[error("{0}")]
    File(#[from] io::Error),
    /// There is a certificate, but no key that could sign.
    #[error("{0} is there, but its key {1} is missing; restore it, or remove both to begin anew")]
    KeyMissing(PathBuf, PathBuf),
    /// A file does not hold what its name says.
    #[error("{path} holds no usable {what}: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// Key and certificate are not a pair.
    #[error("{0} and {1} do not belong together")]
    Mismatch(PathBuf, PathBuf),
    /// A new key or certificate cannot be made.
    #[error("cannot make a key or certificate")]
    Make(#[source] rcgen::Error),
    /// TLS does not take the new key.
    #[error("cannot use a new key for TLS")]
    Tls(#[source] rustls::Error),
}

/// A certificate for an agent.
#[derive(Debug, Clone)]
pub struct Issued {
    /// Leaf first; the root is not in it.
    pub chain: Vec<CertificateDer<'static>>,
    /// When the leaf ends.
    pub not_after: SystemTime,
}

/// Why no certificate is issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// The request does not parse, is not signed by its own key, or asks for extensions that we do not know.
    #[error("certificate request is malformed or not signed by its own key")]
    Request(#[source] rcgen::Error),
    /// The key is none of those that we sign.
    #[error("key is not P-256, P-384, Ed25519 or RSA of at least 2048 bits")]
    Key,
    /// Signing failed.
    #[error("cannot sign a certificate")]
    Sign(#[source] rcgen::Error),
    /// The system gives no random serial number.
    #[error("cannot make a serial number")]
    Serial(#[source] io::Error),
}

impl LocalCa {
    /// Loads the CA from the data directory, or makes one there. Blocks the thread.
    ///
    /// # Errors
    /// [`CaError`], naming the file.
    pub fn load_or_create(dir: &DataDir) -> Result<Self, CaError> {
        let _changing = dir.lock_files()?;
        let (key_path, certificate_path) = (dir.ca_key(), dir.ca_certificate());
        let certificate = files::read(&certificate_path)?;
        let key = match files::read_secret(&key_path)? {
            Some(pem) => read_key(&pem, key_path.clone())?,
            None if certificate.is_some() => {
                return Err(CaError::KeyMissing(certificate_path, key_path));
            }
            None => {
                let key = KeyPair::generate().map_err(CaError::Make)?;
                files::replace(&key_path, key.serialize_pem().as_bytes())?;
                key
            }
        };
        let root_pem = if let Some(pem) = certificate {
            String::from_utf8_lossy(&pem).into_owned()
        } else {
            // The key may be here without its certificate: a crash between the two files.
            let pem = self_signed(&key, SystemTime::now())?.pem();
            files::replace(&certificate_path, pem.as_bytes())?;
            info!(path = %certificate_path.display(), "made a CA");
            pem
        };
        let roots = tls::files::chain(root_pem.as_bytes()).map_err(|problem| CaError::Damaged {
            path: certificate_path.clone(),
            what: "certificate",
            problem: problem.to_string(),
        })?;
        let spki = sha256(&key.subject_public_key_info());
        let signing = roots
            .iter()
            .find(|root| spki_sha256(root).ok() == Some(spki));
        let Some(root) = signing.cloned() else {
            return Err(CaError::Mismatch(certificate_path, key_path));
        };
        let issuer = Issuer::from_ca_cert_der(&root, key).map_err(CaError::Make)?;
        Ok(Self {
            root,
            roots,
            root_pem,
            life: CERTIFICATE_LIFE,
            spki_sha256: spki,
            issuer,
            server_key: LeafKey::generate()?,
            door_key: LeafKey::generate()?,
        })
    }

    /// Issues certificates of this life instead of [`CERTIFICATE_LIFE`].
    #[must_use]
    pub fn with_life(self, life: Duration) -> Self {
        Self { life, ..self }
    }

    /// Life of the certificates that it issues.
    #[must_use]
    pub fn life(&self) -> Duration {
        self.life
    }

    /// Every root that certificates of this installation chain to: one, or more while the CA is being replaced.
    #[must_use]
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// The certificate of the key that signs.
    #[must_use]
    pub fn root(&self) -> &CertificateDer<'static> {
        &self.root
    }

    /// The roots as PEM, as in the file `ca.crt`.
    #[must_use]
    pub fn root_pem(&self) -> String {
        self.root_pem.clone()
    }

    /// SHA-256 of the CA's public key, which join tokens pin.
    #[must_use]
    pub fn spki_sha256(&self) -> [u8; 32] {
        self.spki_sha256
    }

    /// Issues a certificate for an agent. Only the public key of the request counts; its names are overwritten.
    ///
    /// # Errors
    /// [`IssueError`].
    pub fn issue_agent(&self, csr_der: &[u8], node: &NodeName) -> Result<Issued, IssueError> {
        self.issue(&AgentRequest::parse(csr_der)?, node, SystemTime::now())
    }

    /// As [`Self::issue_agent`] for a request that was checked before.
    ///
    /// # Errors
    /// [`IssueError`].
    pub fn issue(
        &self,
        request: &AgentRequest,
        node: &NodeName,
        now: SystemTime,
    ) -> Result<Issued, IssueError> {
        let leaf = Leaf {
            // Never the bare name: a name of a node must not read as the CN that a caller's check looks for.
            common_name: format!("culvert agent {node}"),
            names: vec![uri(&Role::Agent(node.clone()))?],
            usage: ExtendedKeyUsagePurpose::ClientAuth,
        };
        let (certificate, not_after) = self.sign(leaf, request.public_key(), now)?;
        Ok(Issued {
            chain: vec![certificate],
            not_after,
        })
    }

    /// The server's credential towards agents: the role `culvert://server`, with the root in the chain for agents that
    /// know it by hash only. Reissued at half life; `on_issue` hears the end of each.
    #[must_use]
    pub fn server_resolver(self: &Arc<Self>, on_issue: OnIssue) -> Arc<dyn ResolvesServerCert> {
        Arc::new(resolver::ServerCredential::new(self.clone(), on_issue))
    }

    /// Serving certificates of the TLS door by SNI: one per known node, and a default for `own_names` and `own_ips`,
    /// which also answers clients without SNI and unknown names. They carry no role: they can never act as the tunnel
    /// server towards agents.
    #[must_use]
    pub fn door_resolver(
        self: &Arc<Self>,
        is_known: IsKnown,
        own_names: Vec<String>,
        own_ips: Vec<IpAddr>,
    ) -> Arc<dyn ResolvesServerCert> {
        Arc::new(resolver::DoorCertificates::new(
            self.clone(),
            is_known,
            own_names,
            own_ips,
        ))
    }

    fn server_leaf(&self, now: SystemTime) -> Result<CertifiedKey, IssueError> {
        let leaf = Leaf {
            common_name: "culvert server".into(),
            names: vec![uri(&Role::Server)?],
            usage: ExtendedKeyUsagePurpose::ServerAuth,
        };
        self.serving(leaf, &self.server_key, now)
    }

    fn door_leaf(
        &self,
        common_name: &str,
        names: Vec<SanType>,
        now: SystemTime,
    ) -> Result<CertifiedKey, IssueError> {
        let leaf = Leaf {
            common_name: common_name.to_owned(),
            names,
            usage: ExtendedKeyUsagePurpose::ServerAuth,
        };
        self.serving(leaf, &self.door_key, now)
    }

    fn serving(
        &self,
        leaf: Leaf,
        key: &LeafKey,
        now: SystemTime,
    ) -> Result<CertifiedKey, IssueError> {
        let (certificate, _) = self.sign(leaf, &key.pair, now)?;
        Ok(CertifiedKey::new(
            vec![certificate, self.root.clone()],
            key.signing.clone(),
        ))
    }

    fn sign(
        &self,
        leaf: Leaf,
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
        params.extended_key_usages = vec![leaf.usage];
        params.use_authority_key_identifier_extension = true;
        let certificate = params
            .signed_by(key, &self.issuer)
            .map_err(IssueError::Sign)?;
        Ok((certificate.der().clone(), not_after))
    }
}

impl fmt::Debug for LocalCa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LocalCa")
            .field("spki_sha256", &hex(&self.spki_sha256))
            .finish_non_exhaustive()
    }
}

/// Asks whether a node is known; called in handshakes, so it must be quick.
pub type IsKnown = Arc<dyn Fn(&NodeName) -> bool + Send + Sync>;

/// Hears when the certificate that was just issued ends.
pub type OnIssue = Box<dyn Fn(SystemTime) + Send + Sync>;

/// What differs between the certificates that the CA signs.
struct Leaf {
    common_name: String,
    names: Vec<SanType>,
    usage: ExtendedKeyUsagePurpose,
}

/// A key in the two forms that signing a certificate and answering a handshake need.
struct LeafKey {
    pair: KeyPair,
    signing: Arc<dyn SigningKey>,
}

impl LeafKey {
    fn generate() -> Result<Self, CaError> {
        let pair = KeyPair::generate().map_err(CaError::Make)?;
        let private = PrivateKeyDer::Pkcs8(pair.serialize_der().into());
        let signing = tls::provider()
            .key_provider
            .load_private_key(private)
            .map_err(CaError::Tls)?;
        Ok(Self { pair, signing })
    }
}

fn read_key(pem: &[u8], path: PathBuf) -> Result<KeyPair, CaError> {
    std::str::from_utf8(pem)
        .map_err(|error| error.to_string())
        .and_then(|text| KeyPair::from_pem(text).map_err(|error| error.to_string()))
        .map_err(|problem| CaError::Damaged {
            path,
            what: "private key",
            problem,
        })
}

fn self_signed(key: &KeyPair, now: SystemTime) -> Result<rcgen::Certificate, CaError> {
    let now = whole_seconds(now);
    let hash = hex(&sha256(&key.subject_public_key_info()));
    let mut params = CertificateParams::default();
    params.not_before = now.checked_sub(BACKDATED).unwrap_or(now).into();
    params.not_after = (now + CA_LIFE).into();
    params.serial_number = Some(serial()?);
    params.distinguished_name = common_name(&format!("culvert CA {}", &hash[..8]));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.self_signed(key).map_err(CaError::Make)
}

/// A positive random number of 16 bytes (RFC 5280, section 4.1.2.2: at most 20).
fn serial() -> io::Result<SerialNumber> {
    let mut bytes = random::<16>()?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn common_name(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    let fits: String = text.chars().take(COMMON_NAME_MAX).collect();
    name.push(DnType::CommonName, fits);
    name
}

fn uri(role: &Role) -> Result<SanType, IssueError> {
    Ia5String::try_from(role.uri())
        .map(SanType::URI)
        .map_err(IssueError::Sign)
}

/// Life of the CA itself: 10 years.
const CA_LIFE: Duration = Duration::from_secs(3653 * 24 * 60 * 60);
/// Longest common name (RFC 5280, appendix A, ub-common-name).
const COMMON_NAME_MAX: usize = 64;

#[cfg(test)]
mod tests;
