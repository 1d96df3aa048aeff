//! Verification of other servers' certificates: both ends of a connection between servers present a
//! certificate with the role of a peer.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::client_verifier::{ChainVerifier, check_size, require_role};
use super::provider;
use crate::identity::Role;

/// The verifier of other servers' certificates, for both ends, with replaceable roots.
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
}

impl fmt::Debug for PeerTrust {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PeerTrust(..)")
    }
}

fn require_peer(leaf: &CertificateDer<'_>) -> Result<(), Error> {
    require_role(leaf, |role| matches!(role, Role::Peer(_))).map(drop)
}

impl ClientCertVerifier for PeerTrust {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_size(end_entity, intermediates)?;
        let clients = &self.0.load().clients;
        let verified = clients
            .0
            .verify_client_cert(end_entity, intermediates, now)?;
        require_peer(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = provider().signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl ServerCertVerifier for PeerTrust {
    /// Ignores the dialed name. The caller compares the name in the certificate with the server
    /// that it expects.
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_size(end_entity, intermediates)?;
        let leaf = ParsedCertificate::try_from(end_entity)?;
        let algorithms = provider().signature_verification_algorithms.all;
        let roots = &self.0.load().roots;
        verify_server_cert_signed_by_trust_anchor(&leaf, roots, intermediates, now, algorithms)?;
        require_peer(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls12_signature(self, message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls13_signature(self, message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ClientCertVerifier::supported_verify_schemes(self)
    }
}
