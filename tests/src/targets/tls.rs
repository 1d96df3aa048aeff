//! TLS of the fake targets.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{DistinguishedName, Error, ServerConfig, SupportedProtocolVersion};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::byte_stream::ByteStream;

/// A serving certificate with its key. The target requests a client certificate, and clients may
/// present any or none.
#[derive(Debug, Clone)]
pub struct TargetTls {
    config: Arc<ServerConfig>,
}

impl TargetTls {
    /// Creates a self-signed certificate for `names` (DNS names or IP addresses).
    pub fn self_signed(names: &[&str]) -> Result<Self> {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).context("self-signed certificate")?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        Self::new(vec![made.cert.into()], key.into())
    }

    /// Uses the given chain and key in PEM.
    pub fn from_pem(chain: &str, key: &str) -> Result<Self> {
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<Vec<_>, _>>();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).context("key of the target")?;
        Self::new(chain.context("certificate of the target")?, key)
    }

    /// Uses the given chain, leaf first, and key.
    #[expect(
        clippy::disallowed_methods,
        reason = "a target is not the tunnel and needs settings the tunnel must not have"
    )]
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = AnyClient {
            provider: Arc::clone(&provider),
            presented: Presented::default(),
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("TLS versions of the target")?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(chain, key)
            .context("certificate and key of the target")?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
        })
    }

    /// Like [`Self::new`], with only the given versions of TLS. Records each certificate that a
    /// client presents.
    #[expect(
        clippy::disallowed_methods,
        reason = "a target is not the tunnel and needs settings the tunnel must not have"
    )]
    pub(crate) fn recording_clients(
        own: &Arc<CertifiedKey>,
        versions: &[&'static SupportedProtocolVersion],
        presented: Presented,
    ) -> Result<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = AnyClient {
            provider: Arc::clone(&provider),
            presented,
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .context("TLS versions of the target")?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(CertifiedKey::clone(own))));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
        })
    }

    /// Accepts TLS on a connection.
    pub async fn accept(&self, tcp: TcpStream) -> io::Result<ByteStream> {
        Ok(ByteStream::tls(self.acceptor().accept(tcp).await?))
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}

/// Requests a certificate and accepts any, as long as the client has its key.
#[derive(Debug)]
struct AnyClient {
    provider: Arc<CryptoProvider>,
    presented: Presented,
}

/// The certificates that clients presented, in order.
pub(crate) type Presented = Arc<Mutex<Vec<CertificateDer<'static>>>>;

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let mut presented = self
            .presented
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        presented.push(end_entity.clone().into_owned());
        Ok(ClientCertVerified::assertion())
    }

    signatures_by!(provider);
}

/// Implements the methods about signatures of a verifier whose field `$provider` has the algorithms.
macro_rules! signatures_by {
    ($provider:tt) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &rustls_pki_types::CertificateDer<'_>,
            dss: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            let algorithms = &self.$provider.signature_verification_algorithms;
            rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &rustls_pki_types::CertificateDer<'_>,
            dss: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            let algorithms = &self.$provider.signature_verification_algorithms;
            rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            let algorithms = &self.$provider.signature_verification_algorithms;
            algorithms.supported_schemes()
        }
    };
}
pub(crate) use signatures_by;
