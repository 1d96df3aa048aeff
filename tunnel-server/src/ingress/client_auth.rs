//! Callers on the TLS doors: the CA of their certificates, which may be replaced while the server runs, and who of them may
//! borrow the server's own identity towards targets.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::server::ResolvesServerCert;
use rustls::{Error, RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use tunnel_proto::identity::common_name;
use tunnel_proto::tls;

/// TLS of the doors. Each handshake takes the configuration of its moment.
pub struct ListenerTls {
    own: Arc<dyn ResolvesServerCert>,
    required: bool,
    config: ArcSwap<ServerConfig>,
}

impl ListenerTls {
    /// Serves with `own`; with `client_roots`, callers' certificates are verified, and needed if `required`.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(
        own: Arc<dyn ResolvesServerCert>,
        client_roots: Option<Arc<RootCertStore>>,
        required: bool,
    ) -> Result<Arc<Self>, Error> {
        let client_roots = client_roots.map(|roots| (roots, required));
        let config = tls::https_server(own.clone(), client_roots)?;
        Ok(Arc::new(Self {
            own,
            required,
            config: ArcSwap::new(config),
        }))
    }

    /// Verifies callers by other roots from the next handshake on.
    ///
    /// # Errors
    /// When they cannot be used; the old ones stay.
    pub fn trust(&self, client_roots: Arc<RootCertStore>) -> Result<(), Error> {
        let client_roots = Some((client_roots, self.required));
        self.config
            .store(tls::https_server(self.own.clone(), client_roots)?);
        Ok(())
    }

    /// For one handshake.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }
}

impl fmt::Debug for ListenerTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ListenerTls(..)")
    }
}

/// Who may borrow the server's identity: callers with a certificate of `--client-ca` for one of these common names.
#[derive(Debug, Clone, Default)]
pub struct DelegationPolicy(BTreeSet<String>);

impl DelegationPolicy {
    /// Callers with these common names.
    #[must_use]
    pub fn named(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().collect())
    }

    /// Whether the caller with this chain, leaf first and verified in its handshake, may borrow. One without a certificate
    /// may not, nor one whose certificate has no or several common names.
    #[must_use]
    pub fn admit(&self, chain: Option<&[CertificateDer<'_>]>) -> bool {
        let leaf = chain.and_then(<[_]>::first);
        let name = leaf.and_then(common_name);
        name.is_some_and(|name| self.0.contains(&name))
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn chain(name: Option<&str>) -> [CertificateDer<'static>; 1] {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(name) = name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        // Another field with the name is not the common name.
        params
            .distinguished_name
            .push(DnType::OrganizationName, "kube-apiserver-kubelet-client");
        let key = KeyPair::generate().unwrap();
        [params.self_signed(&key).unwrap().der().clone()]
    }

    #[test]
    fn only_the_named_callers_have_delegation() {
        let delegation_callers =
            DelegationPolicy::named(["kube-apiserver-kubelet-client".to_owned()]);
        let admits = |name| delegation_callers.admit(Some(&chain(name)));
        assert!(admits(Some("kube-apiserver-kubelet-client")));
        for name in [
            None,
            Some(""),
            Some("prometheus"),
            Some("Kube-apiserver-kubelet-client"),
            Some("kube-apiserver-kubelet-client "),
            Some("kube-apiserver-kubelet-client\0"),
        ] {
            assert!(!admits(name), "{name:?}");
        }
        assert!(!delegation_callers.admit(None));
        assert!(!delegation_callers.admit(Some(&[])));
        assert!(!delegation_callers.admit(Some(&[CertificateDer::from(vec![1, 2, 3])])));
        assert!(!DelegationPolicy::default().admit(Some(&chain(Some("")))));
    }
}
