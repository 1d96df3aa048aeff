//! Credentials that are replaced while they are in use: each handshake takes the latest.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::Trust;

/// What an agent proves itself with, and what it trusts.
pub struct ReloadableIdentity {
    own: ArcSwap<CertifiedKey>,
    trust: ArcSwap<Trust>,
}

impl ReloadableIdentity {
    /// Holds a first identity.
    #[must_use]
    pub fn new(own: Arc<CertifiedKey>, trust: Trust) -> Arc<Self> {
        Arc::new(Self {
            own: ArcSwap::new(own),
            trust: ArcSwap::from_pointee(trust),
        })
    }

    /// Holds another one from the next handshake on.
    pub fn replace(&self, own: Arc<CertifiedKey>, trust: Trust) {
        self.trust.store(Arc::new(trust));
        self.own.store(own);
    }

    /// What is trusted at this moment.
    #[must_use]
    pub fn trust(&self) -> Arc<Trust> {
        self.trust.load_full()
    }

    /// The chain and key of this moment.
    #[must_use]
    pub fn own(&self) -> Arc<CertifiedKey> {
        self.own.load_full()
    }
}

impl fmt::Debug for ReloadableIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ReloadableIdentity(..)")
    }
}

impl ResolvesClientCert for ReloadableIdentity {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        Some(self.own())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// A server's chain and key.
pub struct ReloadableKey(ArcSwap<CertifiedKey>);

impl ReloadableKey {
    /// Holds a first credential.
    #[must_use]
    pub fn new(own: Arc<CertifiedKey>) -> Arc<Self> {
        Arc::new(Self(ArcSwap::new(own)))
    }

    /// Holds another one from the next handshake on.
    pub fn replace(&self, own: Arc<CertifiedKey>) {
        self.0.store(own);
    }
}

impl fmt::Debug for ReloadableKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ReloadableKey(..)")
    }
}

impl ResolvesServerCert for ReloadableKey {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}
