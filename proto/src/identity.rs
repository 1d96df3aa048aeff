//! The identity of a peer: the role and name in its certificate, never what the peer claims.
//!
//! Certificates of the tunnel's CA carry one SAN URI: `culvert://agent/NAME`, `culvert://server` or
//! `culvert://peer/NAME`. A generation other than 0 follows the name of an agent, as in
//! `culvert://agent/NAME/1`.
//! A kubelet with a client certificate of the cluster's CA is the agent of its node.

use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::wire::name::{NodeName, ReplicaId};

mod caller;
mod kubelet;
mod presented;

pub use caller::{CallerError, caller_name};
pub use presented::PresentedCertificate;

const SCHEME: &str = "culvert://";

/// The tunnel's CA sets `notBefore` this long before the time of issue, because clocks of edge
/// nodes may be behind by as much. Five minutes.
pub const BACKDATED: Duration = Duration::from_secs(5 * 60);

/// The domain whose CA authenticates a peer. Each domain has its own form of certificate, so a
/// certificate belongs to at most one domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrustDomain {
    /// The tunnel's CA, or the operator's CA in its place. Certificates have a SAN URI with a
    /// `culvert` role.
    Tunnel,
    /// The cluster's client CA. Certificates are kubelet client certificates without a `culvert`
    /// role.
    Cluster,
}

/// The role that a certificate of the tunnel's CA grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// An agent that serves the node of this name.
    Agent(NodeName),
    /// A server, which accepts agents.
    Server,
    /// The server of this name, towards the other servers.
    Peer(ReplicaId),
}

impl Role {
    /// Returns the SAN URI of the role.
    pub fn uri(&self) -> String {
        match self {
            Self::Agent(name) => format!("{SCHEME}agent/{name}"),
            Self::Server => format!("{SCHEME}server"),
            Self::Peer(name) => format!("{SCHEME}peer/{name}"),
        }
    }

    /// Returns the SAN URI of the role in a certificate of a generation. Only agents have one.
    pub fn uri_of_generation(&self, generation: u64) -> String {
        let uri = self.uri();
        match (self, generation) {
            (Self::Agent(_), 1..) => format!("{uri}/{generation}"),
            (Self::Agent(_), 0) | (Self::Server | Self::Peer(_), _) => uri,
        }
    }

    /// Returns the role and the generation.
    fn from_uri(uri: &str) -> Option<(Self, u64)> {
        let rest = uri.strip_prefix(SCHEME)?;
        if rest == "server" {
            return Some((Self::Server, 0));
        }
        let (role, generation) = match rest.split_once('/')? {
            ("agent", name) => {
                let (name, generation) = name.split_once('/').unwrap_or((name, "0"));
                (Self::Agent(name.parse().ok()?), generation.parse().ok()?)
            }
            ("peer", name) => (Self::Peer(name.parse().ok()?), 0),
            _ => return None,
        };
        // Accept only the canonical form, so that a certificate has exactly one interpretation.
        (role.uri_of_generation(generation) == uri).then_some((role, generation))
    }
}

/// The verified identity of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The domain whose CA authenticated the peer.
    pub domain: TrustDomain,
    /// The role in the peer's certificate.
    pub role: Role,
    /// Generation of an agent's certificate by the tunnel's CA, else 0.
    pub generation: u64,
    /// Start of the certificate's validity. The tunnel's CA issued the certificate [`BACKDATED`]
    /// later.
    pub not_before: SystemTime,
    /// End of the certificate's validity.
    pub not_after: SystemTime,
}

/// Returns the start and end of a certificate's validity.
///
/// # Errors
/// [`IdentityError::Malformed`].
pub fn validity(der: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), IdentityError> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
    Ok(validity_period(&certificate))
}

fn validity_period(certificate: &X509Certificate<'_>) -> (SystemTime, SystemTime) {
    let time = |seconds: i64| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
    };
    let validity = certificate.validity();
    (
        time(validity.not_before.timestamp()),
        time(validity.not_after.timestamp()),
    )
}

/// The reason why a certificate has no identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The peer sent no certificate.
    #[error("no certificate")]
    NoCertificate,
    /// The certificate does not parse.
    #[error("certificate is malformed")]
    Malformed,
    /// The certificate has no `culvert` SAN URI, more than one, or one that does not parse.
    #[error("certificate does not have exactly one valid culvert:// role")]
    NoRole,
}

impl PeerIdentity {
    /// Reads the identity from a certificate. The caller must have verified the chain.
    ///
    /// # Errors
    /// [`IdentityError`] when the certificate does not have exactly one `culvert` role.
    pub fn from_certificate(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
        let (role, generation) = role_of(&certificate)?.ok_or(IdentityError::NoRole)?;
        Ok(Self {
            generation,
            ..Self::new(TrustDomain::Tunnel, role, &certificate)
        })
    }

    /// Returns the identity that an agent's certificate claims. A certificate with a `culvert` role
    /// belongs to the tunnel's domain, whatever else it contains. A kubelet's certificate without
    /// such a role belongs to the cluster's domain.
    ///
    /// The caller must verify the chain against the roots of that domain, as
    /// [`crate::tls::AgentTrust`] does. After that check, the result is the agent's identity.
    ///
    /// # Errors
    /// [`IdentityError`] when the certificate has neither form.
    pub fn from_agent_certificate(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
        if let Some((role, generation)) = role_of(&certificate)? {
            return Ok(Self {
                generation,
                ..Self::new(TrustDomain::Tunnel, role, &certificate)
            });
        }
        let node = kubelet::node(&certificate).ok_or(IdentityError::NoRole)?;
        Ok(Self::new(
            TrustDomain::Cluster,
            Role::Agent(node),
            &certificate,
        ))
    }

    /// Returns the identity in a certificate of generation 0.
    fn new(domain: TrustDomain, role: Role, certificate: &X509Certificate<'_>) -> Self {
        let (not_before, not_after) = validity_period(certificate);
        Self {
            domain,
            role,
            generation: 0,
            not_before,
            not_after,
        }
    }

    /// Returns the identity of a server whose certificate was verified by its role, or by a name
    /// that the operator configured.
    ///
    /// # Errors
    /// [`IdentityError::Malformed`].
    pub fn from_server_certificate(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let (not_before, not_after) = validity(der)?;
        Ok(Self {
            domain: TrustDomain::Tunnel,
            role: Role::Server,
            generation: 0,
            not_before,
            not_after,
        })
    }

    /// Returns the node name if the peer is an agent.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.role {
            Role::Agent(name) => Some(name),
            Role::Server | Role::Peer(_) => None,
        }
    }

    /// Returns the name of the peer if it is another server.
    pub fn replica(&self) -> Option<&ReplicaId> {
        match &self.role {
            Role::Peer(name) => Some(name),
            Role::Agent(_) | Role::Server => None,
        }
    }
}

/// Returns the only `culvert` role in a certificate with its generation, or `None` if it has no
/// `culvert` URI.
fn role_of(certificate: &X509Certificate<'_>) -> Result<Option<(Role, u64)>, IdentityError> {
    let names = certificate
        .subject_alternative_name()
        .map_err(|_twice| IdentityError::Malformed)?;
    let mut ours = names
        .iter()
        .flat_map(|names| &names.value.general_names)
        .filter_map(|name| match name {
            GeneralName::URI(uri) if uri.starts_with(SCHEME) => Some(*uri),
            _ => None,
        });
    match (ours.next(), ours.next()) {
        (None, _) => Ok(None),
        (Some(uri), None) => Role::from_uri(uri).map(Some).ok_or(IdentityError::NoRole),
        (Some(_), Some(_)) => Err(IdentityError::NoRole),
    }
}

/// Returns the bits of a certificate's public key (RFC 5280, section 4.1.2.7), in the form that
/// signature verification uses.
///
/// # Errors
/// [`IdentityError::Malformed`].
pub fn public_key(der: &CertificateDer<'_>) -> Result<Vec<u8>, IdentityError> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
    Ok(certificate.public_key().subject_public_key.data.to_vec())
}

/// Returns the common name of a certificate's subject, which kube-apiserver uses as the user name.
/// Returns `None` if there are several.
pub fn common_name(der: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let (name, None) = (names.next()?, names.next()) else {
        return None;
    };
    name.as_str().ok().map(str::to_owned)
}

/// Returns the organizations of a certificate's subject, which kube-apiserver uses as groups of the user.
pub fn organizations(der: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else {
        return Vec::new();
    };
    let names = certificate.subject().iter_organization();
    names
        .filter_map(|name| name.as_str().ok().map(str::to_owned))
        .collect()
}

/// Returns the SHA-256 of a certificate's SubjectPublicKeyInfo. Join tokens pin a CA in this form
/// (as RFC 7469 does).
///
/// # Errors
/// [`IdentityError::Malformed`].
pub fn spki_sha256(der: &CertificateDer<'_>) -> Result<[u8; 32], IdentityError> {
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
    Ok(sha256(certificate.public_key().raw))
}

/// Returns the SHA-256 hash of `bytes`.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref());
    out
}

#[cfg(test)]
mod tests {
    use rcgen::string::Ia5String;
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue};
    use rcgen::{ExtendedKeyUsagePurpose, KeyPair, SanType};

    use super::*;

    pub(super) fn certificate(
        subject: Vec<(DnType, DnValue)>,
        usages: &[ExtendedKeyUsagePurpose],
        uris: &[&str],
    ) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in subject {
            params.distinguished_name.push(kind, value);
        }
        params.extended_key_usages = usages.to_vec();
        let uri = |uri: &&str| SanType::URI(Ia5String::try_from(*uri).unwrap());
        params.subject_alt_names = uris.iter().map(uri).collect();
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    fn identity(uris: &[&str]) -> Result<PeerIdentity, IdentityError> {
        PeerIdentity::from_certificate(&certificate(vec![], &[], uris))
    }

    #[test]
    fn role_is_read_from_the_single_uri() {
        let agent = identity(&["spiffe://x/y", "culvert://agent/worker-1"]).unwrap();
        assert_eq!(agent.node().unwrap().as_str(), "worker-1");
        assert_eq!(agent.generation, 0);
        let later = identity(&["culvert://agent/worker-1/12"]).unwrap();
        assert_eq!((later.role, later.generation), (agent.role, 12));
        let server = identity(&["culvert://server"]).unwrap();
        assert_eq!(server.role, Role::Server);
        let peer = identity(&["culvert://peer/server-0"]).unwrap();
        assert_eq!(peer.replica().unwrap().as_str(), "server-0");
        assert_eq!(peer.node(), None);
    }

    #[test]
    fn ambiguous_or_odd_roles_name_nobody() {
        for uris in [
            &[][..],
            &["culvert://agent/a", "culvert://agent/b"],
            &["culvert://agent/a", "culvert://server"],
            &["culvert://agent/A"],
            &["culvert://agent/a."],
            &["culvert://agent/"],
            &["culvert://agent/a/b"],
            &["culvert://agent/a/0"],
            &["culvert://agent/a/01"],
            &["culvert://agent/a/1/1"],
            &["culvert://agent/a/99999999999999999999"],
            &["culvert://peer/a/1"],
            &["culvert://peer/"],
            &["culvert://peer/A"],
            &["culvert://agent/a", "culvert://peer/a"],
            &["culvert://server/"],
            &["culvert://root"],
        ] {
            assert_eq!(identity(uris), Err(IdentityError::NoRole), "{uris:?}");
        }
    }
}
