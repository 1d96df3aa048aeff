//! The CAs that an end trusts.

use std::sync::Arc;

use rustls::{Error, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName};

/// The way in which a client authenticates the CA of its server.
#[derive(Debug, Clone)]
pub enum Trust {
    /// The client accepts a chain to one of these roots.
    Roots(Arc<RootCertStore>),
    /// The client accepts the root whose public key has this SHA-256 hash. The server sends the
    /// root in its chain.
    Pin([u8; 32]),
    /// The client accepts a chain to one of these roots if the certificate has this name. The
    /// server role is not required. For certificates that the operator provides.
    Named(Arc<RootCertStore>, ServerName<'static>),
}

/// Returns a store of the given roots.
///
/// # Errors
/// When one of the certificates is not usable, or there is none.
pub fn roots<'a>(
    certificates: impl IntoIterator<Item = CertificateDer<'a>>,
) -> Result<Arc<RootCertStore>, Error> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        store.add(certificate.into_owned())?;
    }
    if store.is_empty() {
        return Err(Error::General(
            "no CA certificate; at least one is required".into(),
        ));
    }
    Ok(Arc::new(store))
}
