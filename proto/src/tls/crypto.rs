//! The crypto provider, and private keys in the form that rustls uses.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::{CipherSuite, Error, InconsistentKeys, NamedGroup};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

/// Returns the crypto provider of the process.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Returns a provider that supports the same, for bytes that pass no network. A classical key exchange
/// and AES-128 come first. With SHA-256 instead of SHA-384, and without ML-KEM, a handshake costs each
/// side some 60 us less (measured on a processor without instructions for SHA-512).
pub(super) fn loopback_provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider
        .kx_groups
        .sort_by_key(|group| group.name() == NamedGroup::X25519MLKEM768);
    provider.cipher_suites.sort_by_key(|suite| {
        !matches!(
            suite.suite(),
            CipherSuite::TLS13_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
        )
    });
    Arc::new(provider)
}

/// Returns a signing key for a private key. The bytes of `key` are wiped.
///
/// # Errors
/// When the kind of the key is unknown.
pub fn signing_key(key: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
    any_supported_type(&Zeroizing::new(key))
}

/// Returns a certificate chain with its private key, and checks that the key belongs to the leaf.
/// The bytes of `key` are wiped.
///
/// # Errors
/// When the key is not usable or does not belong to the leaf.
pub fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, Error> {
    let own = CertifiedKey::new(chain, signing_key(key)?);
    match own.keys_match() {
        Ok(()) | Err(Error::InconsistentKeys(InconsistentKeys::Unknown)) => Ok(Arc::new(own)),
        Err(error) => Err(error),
    }
}
