//! Verification of other servers' certificates: both ends of a connection between servers present a
//! certificate with the role of a peer.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::server::ParsedCertificate;
use rustls::server::danger::ClientCertVerified;
use rustls::{Error, RootCertStore};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::client_verifier::{ChainVerifier, ClientTrust, check_size, require_role};
use super::provider;
use crate::identity::Role;

/// The roots of other servers' certificates, for both ends. The roots can be replaced.
pub struct PeerTrust(ArcSwap<PeerRoots>);

struct PeerRoots {
    roots: Arc<RootCertStore>,
    /// Verifies the chains of dialing servers.
    clients: ChainVerifier,
}

impl PeerRoots {
    fn new(roots: Arc<RootCertStore>) -> Result<Self, Error> {
        Ok(Self {
            clients: ChainVerifier::new(roots.clone())?,
            roots,
        })
    }
}

impl PeerTrust {
    /// Accepts certificates that chain to `roots` and have the role of a peer.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(roots: Arc<RootCertStore>) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self(ArcSwap::from_pointee(PeerRoots::new(
            roots,
        )?))))
    }

    /// Replaces the roots from the next handshake on.
    ///
    /// # Errors
    /// When the roots cannot be used. The previous ones stay in use.
    pub fn replace(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.0.store(Arc::new(PeerRoots::new(roots)?));
        Ok(())
    }

    /// Verifies the chain of a dialed server. The dialed name is ignored, because the caller
    /// compares the name in the certificate with the server that it expects.
    pub(super) fn verify_server(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        check_size(end_entity, intermediates)?;
        let leaf = ParsedCertificate::try_from(end_entity)?;
        let algorithms = provider().signature_verification_algorithms.all;
        let roots = &self.0.load().roots;
        verify_server_cert_signed_by_trust_anchor(&leaf, roots, intermediates, now, algorithms)?;
        require_peer(end_entity)
    }
}

tunnel_process::partial_debug!(PeerTrust);

fn require_peer(leaf: &CertificateDer<'_>) -> Result<(), Error> {
    require_role(leaf, |role| matches!(role, Role::Peer(_))).map(drop)
}

impl ClientTrust for PeerTrust {
    fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_size(leaf, intermediates)?;
        let clients = &self.0.load().clients;
        let verified = clients.0.verify_client_cert(leaf, intermediates, now)?;
        require_peer(leaf)?;
        Ok(verified)
    }
}
