//! TLS: the only module that builds rustls configurations, and the verifiers that map a certificate
//! chain to a role.
//!
//! Sessions between agent and server use TLS 1.3. There is one crypto provider (aws-lc-rs), and
//! hybrid post-quantum key exchange is preferred wherever bytes pass a network. Resumption is
//! disabled where client certificates matter, because a resumed session would skip the verifier.
#![expect(
    clippy::disallowed_methods,
    reason = "this is the one place where rustls configurations are built"
)]

use std::sync::Arc;

use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, Error, RootCertStore, ServerConfig};

use crate::wire::{ALPN_ENROLL, ALPN_PEER};

mod alerts;
mod client_verifier;
mod crypto;
pub mod files;
mod peer;
mod proof;
mod reloadable;
mod server_verifier;
mod signatures;
mod trust;
mod unsupported;
mod validity;

pub(crate) use alerts::{
    CERTIFICATE_EXPIRED, CLOCK_HINT, UNKNOWN_CA, is_tls_error, received_alert, usage_hint,
};
pub use alerts::{
    CertificateAlert, CertificateRejection, alert_meaning, describe, is_certificate_rejection,
    is_unknown_issuer, text,
};
use client_verifier::ClientVerifier;
pub(crate) use client_verifier::issuer_path;
pub use client_verifier::{AgentTrust, RevocationCheck, Revoked};
use crypto::loopback_provider;
pub use crypto::{certified_key, provider, signing_key};
pub use peer::PeerTrust;
pub use proof::{ProofError, sign_proof, verify_proof};
pub use reloadable::{ReloadableIdentity, ReloadableKey};
use server_verifier::{ExpectedServer, ServerVerifier};
pub use signatures::{is_ca_signed_by, is_signed_by};
pub use trust::{Trust, roots};
pub use unsupported::unsupported;
pub(crate) use validity::with_dates;

/// Returns the server's configuration for sessions over the transport of `alpn`. The server
/// requires a client certificate that chains to the roots of `trust`, has the agent role and is not
/// revoked.
///
/// # Errors
/// When the provider cannot be used.
pub fn session_server(
    own: Arc<dyn ResolvesServerCert>,
    trust: Arc<AgentTrust>,
    alpn: &[u8],
) -> Result<Arc<ServerConfig>, Error> {
    server(own, ClientVerifier::new(trust), alpn)
}

/// Returns a configuration like [`session_server`] does, with roots that stay and without
/// revocation.
///
/// # Errors
/// When the roots or the key cannot be used.
#[cfg(any(test, feature = "test-util"))]
pub fn session_server_of_roots(
    own: Arc<dyn ResolvesServerCert>,
    agent_roots: Arc<RootCertStore>,
    alpn: &[u8],
) -> Result<Arc<ServerConfig>, Error> {
    let never_revoked: RevocationCheck = Arc::new(|_peer| Ok(()));
    session_server(own, AgentTrust::new(agent_roots, never_revoked)?, alpn)
}

/// Returns the server's configuration for enrollment: no client certificate, and the only ALPN id
/// on its connection.
///
/// # Errors
/// When the key cannot be used.
pub fn enroll_server(own: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, Error> {
    server(own, WebPkiClientVerifier::no_client_auth(), ALPN_ENROLL)
}

/// Returns the configuration of the HTTPS listener for callers, HTTP/1.1 only (no ALPN `h2`). With
/// `client_roots` the server verifies a caller's certificate. `required` refuses callers without
/// one.
///
/// # Errors
/// When the roots cannot be used.
pub fn https_server(
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
    disable_resumption(&mut config);
    Ok(Arc::new(config))
}

/// Returns the agent's configuration for sessions over the transport of `alpn`. The agent presents
/// `own` and requires a server with the server role under `trust`.
///
/// # Errors
/// When the provider cannot be used.
pub fn session_client(
    own: Arc<CertifiedKey>,
    trust: Trust,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, Error> {
    session_client_with_identity(ReloadableIdentity::new(own, trust), alpn)
}

/// Returns a configuration like [`session_client`] does, with a replaceable identity. Each
/// handshake uses the latest identity.
///
/// # Errors
/// When the provider cannot be used.
pub fn session_client_with_identity(
    identity: Arc<ReloadableIdentity>,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, Error> {
    let expected = ExpectedServer::Reloadable(identity.clone());
    client(expected, Some(identity), alpn)
}

/// Returns the agent's configuration for enrollment: as in [`session_client`], but without a client
/// certificate.
///
/// # Errors
/// When the provider cannot be used.
pub fn enroll_client(trust: Trust) -> Result<Arc<ClientConfig>, Error> {
    client(ExpectedServer::Fixed(trust), None, ALPN_ENROLL)
}

/// Returns the configuration of a server that accepts connections of other servers.
///
/// # Errors
/// When the provider cannot be used.
pub fn peer_server(
    own: Arc<dyn ResolvesServerCert>,
    trust: Arc<PeerTrust>,
) -> Result<Arc<ServerConfig>, Error> {
    server(own, ClientVerifier::new(trust), ALPN_PEER)
}

/// Returns the configuration of a server that dials other servers.
///
/// # Errors
/// When the provider cannot be used.
pub fn peer_client(
    own: Arc<dyn ResolvesClientCert>,
    trust: Arc<PeerTrust>,
) -> Result<Arc<ClientConfig>, Error> {
    client(ExpectedServer::Peer(trust), Some(own), ALPN_PEER)
}

/// Returns the configuration of a caller of the CONNECT listener. The caller presents `own` and
/// requires a server certificate for the dialed name.
///
/// # Errors
/// When the roots or the provider cannot be used.
pub fn caller_client(
    own: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns the server's configuration for HTTPS targets behind agents.
///
/// With `roots`, a target's certificate must chain to them and be valid for the dialed name.
/// Without `roots`, any certificate is accepted whose key the target holds, whatever its version and
/// extensions are, because the agent's certificate authenticates the path to the node. The server
/// presents `own` to targets that request a certificate. A target whose certificate was rejected never
/// receives it.
///
/// # Errors
/// When the roots cannot be used.
pub fn target_client(
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
) -> Result<Arc<ClientConfig>, Error> {
    target(provider(), roots, own)
}

/// Returns a configuration like [`target_client`] does, for targets on the loopback of a node. Their
/// bytes pass a session and no other network, so that nobody can record them: a key exchange and a
/// cipher that resist a quantum computer are offered behind cheaper ones.
///
/// # Errors
/// When the roots cannot be used.
pub fn loopback_target_client(
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
) -> Result<Arc<ClientConfig>, Error> {
    target(loopback_provider(), roots, own)
}

fn target(
    offered: Arc<CryptoProvider>,
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
) -> Result<Arc<ClientConfig>, Error> {
    let by_roots = |roots| {
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
        verifier.map_err(|error| Error::General(error.to_string()))
    };
    let verifier = ServerVerifier::new(ExpectedServer::Target(roots.map(by_roots).transpose()?));
    let builder = ClientConfig::builder_with_provider(offered)
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let own = SingleCertAndKey::from(CertifiedKey::clone(&own));
            builder.with_client_cert_resolver(Arc::new(own))
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns the configuration of a client that only looks at the certificate of a server: it accepts
/// any, presents none of its own, and sends nothing else.
///
/// # Errors
/// When the provider cannot be used.
pub fn inspecting_client(alpn: &[u8]) -> Result<Arc<ClientConfig>, Error> {
    let mut config = ClientConfig::clone(&*target_client(None, None)?);
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(Arc::new(config))
}

/// Returns the configuration of a server for connections of this installation.
fn server(
    own: Arc<dyn ResolvesServerCert>,
    clients: Arc<dyn ClientCertVerifier>,
    alpn: &[u8],
) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(own);
    config.alpn_protocols = vec![alpn.to_vec()];
    disable_resumption(&mut config);
    Ok(Arc::new(config))
}

/// Returns the configuration of a client for connections of this installation. Without `own` the
/// client presents no certificate.
fn client(
    expected: ExpectedServer,
    own: Option<Arc<dyn ResolvesClientCert>>,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, Error> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(ServerVerifier::new(expected));
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => builder.with_client_cert_resolver(own),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn disable_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
}

#[cfg(test)]
pub(crate) mod test_ca;

#[cfg(test)]
mod tests;
