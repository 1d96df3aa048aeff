//! TLS: the only place that builds rustls configurations, and the verifiers that tie a chain to a role.
//!
//! TLS 1.3 between agent and server, one crypto provider (aws-lc-rs), hybrid post-quantum key exchange preferred. No
//! resumption where client certificates count: a resumed session would skip the verifier.
#![expect(
    clippy::disallowed_methods,
    reason = "this is the one place where rustls configurations are built"
)]

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use crate::identity::{PeerIdentity, Role, spki_sha256};
use crate::wire::ALPN_ENROLL;

/// How a client knows the CA of its server.
#[derive(Debug, Clone)]
pub enum Trust {
    /// The roots themselves.
    Roots(Arc<RootCertStore>),
    /// SHA-256 of the public key of a root that the server sends along.
    Pin([u8; 32]),
}

/// The process's crypto provider.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// A chain with its private key, checked to belong together.
///
/// # Errors
/// When the key is not usable or is not the leaf's.
pub fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, Error> {
    CertifiedKey::from_der(chain, key, &provider()).map(Arc::new)
}

/// A store of the given roots.
///
/// # Errors
/// When one of them is not a usable certificate, or there is none.
pub fn roots<'a>(
    certificates: impl IntoIterator<Item = CertificateDer<'a>>,
) -> Result<Arc<RootCertStore>, Error> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        store.add(certificate.into_owned())?;
    }
    if store.is_empty() {
        return Err(Error::General("no CA certificate given".into()));
    }
    Ok(Arc::new(store))
}

/// The server's side of sessions over the transport of `alpn`: requires a client certificate that chains to `agent_roots` and has the agent role.
///
/// # Errors
/// When the roots or the key cannot be used.
pub fn session_server(
    own: Arc<dyn ResolvesServerCert>,
    agent_roots: Arc<RootCertStore>,
    alpn: &[u8],
) -> Result<Arc<ServerConfig>, Error> {
    let chain = WebPkiClientVerifier::builder_with_provider(agent_roots, provider())
        .build()
        .map_err(|error| Error::General(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(AgentVerifier { chain }))
        .with_cert_resolver(own);
    config.alpn_protocols = vec![alpn.to_vec()];
    without_resumption(&mut config);
    Ok(Arc::new(config))
}

/// The server's side of enrolment: no client certificate, and the only ALPN id on its connection.
///
/// # Errors
/// When the key cannot be used.
pub fn enroll_server(own: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(own);
    config.alpn_protocols = vec![ALPN_ENROLL.to_vec()];
    without_resumption(&mut config);
    Ok(Arc::new(config))
}

/// The TLS door for callers, HTTP/1.1 only (no ALPN `h2`). With `client_roots` a caller's certificate is verified;
/// `required` refuses callers without one.
///
/// # Errors
/// When the roots cannot be used.
pub fn door_server(
    own: Arc<dyn ResolvesServerCert>,
    client_roots: Option<(Arc<RootCertStore>, bool)>,
) -> Result<Arc<ServerConfig>, Error> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?;
    let builder = match client_roots {
        None => builder.with_no_client_auth(),
        Some((roots, required)) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = if required {
                verifier
            } else {
                verifier.allow_unauthenticated()
            };
            builder.with_client_cert_verifier(
                verifier
                    .build()
                    .map_err(|error| Error::General(error.to_string()))?,
            )
        }
    };
    let mut config = builder.with_cert_resolver(own);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    without_resumption(&mut config);
    Ok(Arc::new(config))
}

/// The agent's side of sessions over the transport of `alpn`: its own certificate, and a server with the server role under `trust`.
///
/// # Errors
/// When the provider cannot be used.
pub fn session_client(
    own: Arc<CertifiedKey>,
    trust: Trust,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(ServerVerifier::new(Expected::ServerRole(trust)))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// The agent's side of enrolment: as [`session_client`] without an own certificate.
///
/// # Errors
/// When the provider cannot be used.
pub fn enroll_client(trust: Trust) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(ServerVerifier::new(Expected::ServerRole(trust)))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_ENROLL.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// The server's side towards an https target behind an agent, mode `tunnel`: the path to the node is authenticated by
/// the agent's certificate, the target's own certificate is accepted as it is. Carries no credential.
///
/// # Errors
/// When the provider cannot be used.
pub fn target_client() -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .dangerous()
        .with_custom_certificate_verifier(ServerVerifier::new(Expected::Anything))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn without_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
}

fn require_role(
    end_entity: &CertificateDer<'_>,
    is_right: impl FnOnce(&Role) -> bool,
) -> Result<(), Error> {
    match PeerIdentity::from_certificate(end_entity) {
        Ok(identity) if is_right(&identity.role) => Ok(()),
        Ok(_) | Err(_) => Err(Error::InvalidCertificate(
            CertificateError::ApplicationVerificationFailure,
        )),
    }
}

/// Chain by webpki, then the agent role, so that a wrong role fails in the handshake.
#[derive(Debug)]
struct AgentVerifier {
    chain: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for AgentVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now)?;
        require_role(end_entity, |role| matches!(role, Role::Agent(_)))?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Judges a server's certificate; the dialled name plays no part, so any address works. Always checks that the server
/// holds the certificate's key.
#[derive(Debug)]
struct ServerVerifier {
    expected: Expected,
    algorithms: WebPkiSupportedAlgorithms,
}

/// What a server has to be.
#[derive(Debug)]
enum Expected {
    /// A chain to the trusted root, and the server role.
    ServerRole(Trust),
    /// Whatever it shows: the path to it is authenticated otherwise.
    Anything,
}

impl ServerVerifier {
    fn new(expected: Expected) -> Arc<Self> {
        let algorithms = provider().signature_verification_algorithms;
        Arc::new(Self {
            expected,
            algorithms,
        })
    }
}

impl Trust {
    fn roots(&self, intermediates: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, Error> {
        match self {
            Self::Roots(store) => Ok(store.clone()),
            Self::Pin(pin) => {
                let pinned = intermediates
                    .iter()
                    .find(|der| spki_sha256(der).is_ok_and(|hash| hash == *pin));
                let root =
                    pinned.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
                roots([root.clone()])
            }
        }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Expected::ServerRole(trust) = &self.expected {
            let leaf = ParsedCertificate::try_from(end_entity)?;
            let roots = trust.roots(intermediates)?;
            let algorithms = self.algorithms.all;
            verify_server_cert_signed_by_trust_anchor(
                &leaf,
                &roots,
                intermediates,
                now,
                algorithms,
            )?;
            require_role(end_entity, |role| *role == Role::Server)?;
        }
        Ok(ServerCertVerified::assertion())
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

#[cfg(test)]
pub(crate) mod test_ca;

#[cfg(test)]
mod tests;
