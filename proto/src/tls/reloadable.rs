//! Credentials that are replaced while they are in use. Each handshake uses the latest ones.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::Trust;

/// The certificate of an agent, and its trust in servers.
pub struct ReloadableIdentity {
    own: ArcSwap<CertifiedKey>,
    trust: ArcSwap<Trust>,
}

impl ReloadableIdentity {
    /// Creates a holder with the first identity.
    pub fn new(own: Arc<CertifiedKey>, trust: Trust) -> Arc<Self> {
        Arc::new(Self {
            own: ArcSwap::new(own),
            trust: ArcSwap::from_pointee(trust),
        })
    }

    /// Replaces the identity from the next handshake on.
    pub fn replace(&self, own: Arc<CertifiedKey>, trust: Trust) {
        self.trust.store(Arc::new(trust));
        self.own.store(own);
    }

    /// Returns the current trust.
    pub fn trust(&self) -> Arc<Trust> {
        self.trust.load_full()
    }

    /// Returns the current chain and key.
    pub fn own(&self) -> Arc<CertifiedKey> {
        self.own.load_full()
    }
}

tunnel_process::partial_debug!(ReloadableIdentity);

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

/// The chain and key of a server, also for the connections that it dials.
pub struct ReloadableKey(ArcSwap<CertifiedKey>);

impl ReloadableKey {
    /// Creates a holder with the first chain and key.
    pub fn new(own: Arc<CertifiedKey>) -> Arc<Self> {
        Arc::new(Self(ArcSwap::new(own)))
    }

    /// Replaces the chain and key from the next handshake on.
    pub fn replace(&self, own: Arc<CertifiedKey>) {
        self.0.store(own);
    }
}

tunnel_process::partial_debug!(ReloadableKey);

impl ResolvesServerCert for ReloadableKey {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl ResolvesClientCert for ReloadableKey {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
