//! TLS of the test clients.

use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{ClientConfig, Error, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::TlsConnector;

use crate::targets::signatures_by;

/// A client configuration, and the name to send (SNI) and to verify.
#[derive(Debug, Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: ServerName<'static>,
}

/// A client certificate: the chain, leaf first, and the key.
pub type ClientCertificate = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl ClientTls {
    /// Accepts any server certificate.
    pub fn insecure(server_name: &str, certificate: Option<ClientCertificate>) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        Self::build(server_name, Arc::new(AnyServer(provider)), certificate)
    }

    /// Verifies the server's chain against `roots` and its name.
    pub fn verifying(
        server_name: &str,
        roots: RootCertStore,
        certificate: Option<ClientCertificate>,
    ) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier =
            rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .context("verifier of the client")?;
        Self::build(server_name, verifier, certificate)
    }

    /// Uses any other configuration.
    pub fn from_config(server_name: &str, config: Arc<ClientConfig>) -> Result<Self> {
        let server_name = ServerName::try_from(server_name.to_owned());
        Ok(Self {
            config,
            server_name: server_name.context("server name")?,
        })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a test client is not the tunnel and needs settings the tunnel must not have"
    )]
    fn build(
        server_name: &str,
        verifier: Arc<dyn ServerCertVerifier>,
        certificate: Option<ClientCertificate>,
    ) -> Result<Self> {
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS versions of the client")?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let config = match certificate {
            Some((chain, key)) => builder
                .with_client_auth_cert(chain, key)
                .context("client certificate")?,
            None => builder.with_no_client_auth(),
        };
        Self::from_config(server_name, Arc::new(config))
    }

    /// Returns the first message of a handshake as sent on the wire.
    pub fn hello(&self) -> Result<Vec<u8>> {
        let mut client =
            rustls::ClientConnection::new(Arc::clone(&self.config), self.server_name())?;
        let mut hello = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut hello)?;
        }
        Ok(hello)
    }

    pub(crate) fn connector(&self) -> TlsConnector {
        TlsConnector::from(Arc::clone(&self.config))
    }

    pub(crate) fn server_name(&self) -> ServerName<'static> {
        self.server_name.clone()
    }
}

/// Accepts every certificate, as long as the server has its key.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    signatures_by!(0);
}
