//! The crypto provider, and private keys in the form that rustls uses.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::{Error, InconsistentKeys};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

/// Returns the crypto provider of the process.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
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
