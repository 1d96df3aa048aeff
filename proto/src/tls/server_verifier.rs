//! Verification of server certificates by a client.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor, verify_server_name,
};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::client_verifier::require_role;
use super::signatures::PublicKey;
use super::{PeerTrust, ReloadableIdentity, Trust, provider, validity};
use crate::identity::{Role, spki_sha256};

/// The verifier of a server's certificate. The dialed name counts for targets only, so any address
/// of a server works. The verifier always checks that the server holds the certificate's key.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    expected: ExpectedServer,
    algorithms: WebPkiSupportedAlgorithms,
}

/// The server that a client expects.
#[derive(Debug)]
pub(super) enum ExpectedServer {
    /// The server that this fixed trust accepts.
    Fixed(Trust),
    /// The server that the trust at the time of the handshake accepts.
    Reloadable(Arc<ReloadableIdentity>),
    /// A server that this trust between servers accepts.
    Peer(Arc<PeerTrust>),
    /// A target that this verifier accepts. Without one a target with any certificate, because other
    /// means authenticate the path to the target.
    Target(Option<Arc<WebPkiServerVerifier>>),
}

impl ServerVerifier {
    pub(super) fn new(expected: ExpectedServer) -> Arc<Self> {
        let algorithms = provider().signature_verification_algorithms;
        Arc::new(Self {
            expected,
            algorithms,
        })
    }

    fn verify_chain(
        &self,
        trust: &Trust,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let leaf = ParsedCertificate::try_from(end_entity)?;
        let roots = trust.roots(intermediates)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&leaf, &roots, intermediates, now, algorithms)?;
        match trust {
            Trust::Named(_, name) => verify_server_name(&leaf, name),
            Trust::Roots(_) | Trust::Pin(_) => {
                require_role(end_entity, |role| *role == Role::Server).map(drop)
            }
        }
    }
}

impl Trust {
    fn roots(&self, intermediates: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, Error> {
        match self {
            Self::Roots(store) | Self::Named(store, _) => Ok(store.clone()),
            Self::Pin(pin) => {
                let pinned = intermediates
                    .iter()
                    .find(|der| spki_sha256(der).is_ok_and(|hash| hash == *pin));
                let root =
                    pinned.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
                super::roots([root.clone()])
            }
        }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.expected {
            ExpectedServer::Target(None) => Ok(()),
            ExpectedServer::Target(Some(verifier)) => {
                return verifier.verify_server_cert(
                    end_entity,
                    intermediates,
                    server_name,
                    ocsp_response,
                    now,
                );
            }
            ExpectedServer::Fixed(trust) => {
                self.verify_chain(trust, end_entity, intermediates, now)
            }
            ExpectedServer::Reloadable(identity) => {
                self.verify_chain(&identity.trust(), end_entity, intermediates, now)
            }
            ExpectedServer::Peer(trust) => trust.verify_server(end_entity, intermediates, now),
        }
        .map_err(validity::remember)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match &self.expected {
            ExpectedServer::Target(_) => key_of(cert)?.verify_tls12(&self.algorithms, message, dss),
            ExpectedServer::Fixed(_) | ExpectedServer::Reloadable(_) | ExpectedServer::Peer(_) => {
                verify_tls12_signature(message, cert, dss, &self.algorithms)
            }
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match &self.expected {
            ExpectedServer::Target(_) => key_of(cert)?.verify_tls13(&self.algorithms, message, dss),
            ExpectedServer::Fixed(_) | ExpectedServer::Reloadable(_) | ExpectedServer::Peer(_) => {
                verify_tls13_signature(message, cert, dss, &self.algorithms)
            }
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn key_of<'a>(certificate: &'a CertificateDer<'_>) -> Result<PublicKey<'a>, Error> {
    PublicKey::of(certificate).ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))
}
