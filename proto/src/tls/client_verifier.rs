//! Verification of client certificates by a server, and the trust in agents' certificates. The
//! roots of each trust domain can be replaced while the server runs, and a revocation check rejects
//! certificates that are no longer accepted.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use x509_parser::parse_x509_certificate;

use super::provider;
use crate::identity::{IdentityError, PeerIdentity, Role, TrustDomain, validity};

/// A function that checks whether a certificate with a valid chain and role is still accepted.
/// Handshakes call the function, so it must be fast.
pub type RevocationCheck = Arc<dyn Fn(&PeerIdentity) -> Result<(), Revoked> + Send + Sync>;

/// The error for a certificate that an operator revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the certificate was revoked")]
pub struct Revoked;

/// The roots of agent certificates, which can be replaced, and their revocation check.
pub struct AgentTrust {
    tunnel: ArcSwap<ChainVerifier>,
    /// `None` where kubelets are not agents.
    cluster: ArcSwapOption<ChainVerifier>,
    revocation_check: RevocationCheck,
    /// Counts replacements of the roots.
    replaced: watch::Sender<u64>,
}

/// A sized wrapper for the verifier.
pub(super) struct ChainVerifier(pub(super) Arc<dyn ClientCertVerifier>);

impl AgentTrust {
    /// Accepts certificates that chain to `roots`, have the agent role, and pass
    /// `revocation_check`.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(
        roots: Arc<RootCertStore>,
        revocation_check: RevocationCheck,
    ) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            tunnel: ArcSwap::from_pointee(ChainVerifier::new(roots)?),
            cluster: ArcSwapOption::empty(),
            revocation_check,
            replaced: watch::Sender::new(0),
        }))
    }

    /// Replaces the roots of the tunnel's domain from the next handshake on.
    ///
    /// # Errors
    /// When the roots cannot be used. The previous ones stay in use.
    pub fn replace(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.tunnel.store(Arc::new(ChainVerifier::new(roots)?));
        self.replaced.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Replaces the roots of the cluster's domain from the next handshake on. Kubelets whose client
    /// certificates chain to these roots are the agents of their nodes.
    ///
    /// # Errors
    /// When the roots cannot be used. The previous ones stay in use.
    pub fn replace_cluster(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.cluster
            .store(Some(Arc::new(ChainVerifier::new(roots)?)));
        self.replaced.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns a receiver that changes after each replacement.
    pub fn replaced(&self) -> watch::Receiver<u64> {
        self.replaced.subscribe()
    }

    /// Returns whether the current roots would accept a chain that was accepted in its handshake.
    /// The check ignores the expiration of the chain, and revocation.
    pub fn still_accepts(&self, chain: &[CertificateDer<'_>]) -> bool {
        if *self.replaced.borrow() == 0 {
            return true;
        }
        let Some((leaf, intermediates)) = chain.split_first() else {
            return false;
        };
        let Ok((_, not_after)) = validity(leaf) else {
            return false;
        };
        let at = not_after.min(SystemTime::now());
        let at = at
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let at = UnixTime::since_unix_epoch(at);
        let verifier = self.chain_for(PeerIdentity::from_agent_certificate(leaf).as_ref());
        verifier.is_some_and(|chain| chain.0.verify_client_cert(leaf, intermediates, at).is_ok())
    }

    /// Verifies a chain (leaf first) outside of a handshake, at the time `at`. Revocation is
    /// checked at the current time.
    ///
    /// # Errors
    /// The error with which a handshake would fail.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        at: UnixTime,
    ) -> Result<PeerIdentity, Error> {
        let (leaf, intermediates) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.check_chain(leaf, intermediates, at)
            .map(|(identity, _)| identity)
    }

    /// Returns whether a chain (leaf first) is one of the cluster's client CA, at the time `at`. Its leaf
    /// may be that of any user of the cluster.
    pub fn is_of_cluster(&self, chain: &[CertificateDer<'_>], at: UnixTime) -> bool {
        let Some((leaf, intermediates)) = chain.split_first() else {
            return false;
        };
        let verifier = self.cluster.load_full();
        verifier.is_some_and(|roots| roots.0.verify_client_cert(leaf, intermediates, at).is_ok())
    }

    /// Selects the roots by the form of the certificate, so that no CA can certify identities of
    /// the other domain.
    fn chain_for(
        &self,
        claimed: Result<&PeerIdentity, &IdentityError>,
    ) -> Option<Arc<ChainVerifier>> {
        match claimed.map_or(TrustDomain::Tunnel, |claimed| claimed.domain) {
            TrustDomain::Tunnel => Some(self.tunnel.load_full()),
            TrustDomain::Cluster => self.cluster.load_full(),
        }
    }

    fn check_chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        at: UnixTime,
    ) -> Result<(PeerIdentity, ClientCertVerified), Error> {
        check_size(leaf, intermediates)?;
        let claimed = PeerIdentity::from_agent_certificate(leaf);
        let chain = self
            .chain_for(claimed.as_ref())
            .ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let verified = chain.0.verify_client_cert(leaf, intermediates, at)?;
        let identity = with_role(claimed, |role| matches!(role, Role::Agent(_)))?;
        (self.revocation_check)(&identity)
            .map_err(|Revoked| Error::InvalidCertificate(CertificateError::Revoked))?;
        Ok((identity, verified))
    }
}

impl ChainVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>) -> Result<Self, Error> {
        WebPkiClientVerifier::builder_with_provider(roots, provider())
            .build()
            .map(Self)
            .map_err(|error| Error::General(error.to_string()))
    }
}

tunnel_process::partial_debug!(AgentTrust);

impl ClientTrust for AgentTrust {
    fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check_chain(leaf, intermediates, now)
            .map(|(_, verified)| verified)
    }
}

/// A trust that decides which clients a server accepts.
pub(super) trait ClientTrust: fmt::Debug + Send + Sync {
    /// Verifies the chain of a client in its handshake.
    fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error>;
}

/// The verifier of a client's certificate. The trust decides about the chain, and the verifier
/// always checks that the client holds the certificate's key.
#[derive(Debug)]
pub(super) struct ClientVerifier<T> {
    trust: Arc<T>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl<T> ClientVerifier<T> {
    pub(super) fn new(trust: Arc<T>) -> Arc<Self> {
        let algorithms = provider().signature_verification_algorithms;
        Arc::new(Self { trust, algorithms })
    }
}

impl<T: ClientTrust> ClientCertVerifier for ClientVerifier<T> {
    /// Returns no hints: a client has one certificate, and replaceable roots cannot be returned by
    /// reference.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.trust.verify_client(end_entity, intermediates, now);
        verified.map_err(super::validity::remember)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Maximum number of certificates in an agent's chain: a leaf, and up to three CAs below the root.
const CHAIN_CERTIFICATES_MAX: usize = 4;
/// Maximum number of bytes of all certificates in such a chain. rustls stores the received chain
/// for as long as the connection lives.
const CHAIN_BYTES_MAX: usize = 8 << 10;

#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "certificate chain has {certificates} certificates of {bytes} bytes, at most {CHAIN_CERTIFICATES_MAX} of \
     {CHAIN_BYTES_MAX} are accepted; send the leaf and its intermediate CAs only"
)]
struct ChainTooLarge {
    certificates: usize,
    bytes: usize,
}

pub(super) fn check_size(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<(), Error> {
    let certificates = 1 + intermediates.len();
    let bytes = leaf.len() + intermediates.iter().map(|der| der.len()).sum::<usize>();
    if certificates <= CHAIN_CERTIFICATES_MAX && bytes <= CHAIN_BYTES_MAX {
        return Ok(());
    }
    let cause = ChainTooLarge {
        certificates,
        bytes,
    };
    Err(Error::InvalidCertificate(CertificateError::Other(
        OtherError(Arc::new(cause)),
    )))
}

/// Returns the leaf of `chain` and the certificates that may lead from it towards a root, by the
/// names of subject and issuer. A session stores only these, because a peer may send additional
/// ones.
pub(crate) fn issuer_path(chain: &[CertificateDer<'_>]) -> Vec<CertificateDer<'static>> {
    let parsed: Vec<_> = chain
        .iter()
        .filter_map(|der| Some((der, parse_x509_certificate(der).ok()?.1)))
        .collect();
    let mut path: Vec<_> = parsed.first().into_iter().collect();
    let mut next = 0;
    while let Some((_, issued)) = path.get(next) {
        for candidate in &parsed {
            let is_issuer = candidate.1.subject.as_raw() == issued.issuer.as_raw();
            if is_issuer && !path.iter().any(|(der, _)| der == &candidate.0) {
                path.push(candidate);
            }
        }
        next += 1;
    }
    path.into_iter()
        .map(|(der, _)| (*der).clone().into_owned())
        .collect()
}

pub(super) fn require_role(
    end_entity: &CertificateDer<'_>,
    is_allowed: impl FnOnce(&Role) -> bool,
) -> Result<PeerIdentity, Error> {
    with_role(PeerIdentity::from_certificate(end_entity), is_allowed)
}

fn with_role(
    claimed: Result<PeerIdentity, IdentityError>,
    is_allowed: impl FnOnce(&Role) -> bool,
) -> Result<PeerIdentity, Error> {
    match claimed {
        Ok(identity) if is_allowed(&identity.role) => Ok(identity),
        Ok(_) | Err(_) => Err(Error::InvalidCertificate(
            CertificateError::ApplicationVerificationFailure,
        )),
    }
}
