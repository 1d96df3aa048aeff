//! Client authentication on TLS listeners: the CA for callers' certificates, which can be replaced
//! at run time, and which callers have client-certificate delegation.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::server::ResolvesServerCert;
use rustls::{Error, RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use tunnel_proto::identity::common_name;
use tunnel_proto::tls;
use tunnel_routing::policy::DelegationPolicy;

/// The TLS configuration of a listener. Each handshake uses the configuration that is current when
/// the handshake begins.
pub struct ListenerTls {
    own: Arc<dyn ResolvesServerCert>,
    required: bool,
    config: ArcSwap<ServerConfig>,
}

impl ListenerTls {
    /// Creates a configuration with the serving certificate `own`. With `client_roots`, callers'
    /// certificates are verified. With `required` as well, a caller must present a certificate.
    ///
    /// # Errors
    /// Returns an error if the roots cannot be used.
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

    /// Replaces the roots for callers' certificates, starting with the next handshake.
    ///
    /// # Errors
    /// Returns an error if the roots cannot be used. The previous roots then stay in effect.
    pub fn trust(&self, client_roots: Arc<RootCertStore>) -> Result<(), Error> {
        let client_roots = Some((client_roots, self.required));
        self.config
            .store(tls::https_server(self.own.clone(), client_roots)?);
        Ok(())
    }

    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }
}

tunnel_process::partial_debug!(ListenerTls);

/// Returns whether the caller with this certificate chain has client-certificate delegation. The chain begins
/// with the leaf and was verified in the handshake against `--client-ca`. A caller without a certificate has no
/// delegation, and neither has one whose certificate has no common name or several.
pub fn has_delegation(policy: &DelegationPolicy, chain: Option<&[CertificateDer<'_>]>) -> bool {
    let leaf = chain.and_then(<[_]>::first);
    let name = leaf.and_then(common_name);
    name.is_some_and(|name| policy.has_name(&name))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};
    use tunnel_routing::policy::CallerIdentity;

    use super::*;

    fn chain(name: Option<&str>) -> [CertificateDer<'static>; 1] {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        if let Some(name) = name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        // Another field with the same value is not the common name.
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
        let admits = |name| has_delegation(&delegation_callers, Some(&chain(name)));
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
        let garbage = [CertificateDer::from(vec![1, 2, 3])];
        for chain in [None, Some(&[][..]), Some(&garbage[..])] {
            assert!(!has_delegation(&delegation_callers, chain));
        }
        assert!(!has_delegation(
            &DelegationPolicy::default(),
            Some(&chain(Some("")))
        ));
        for (identity, still) in [
            (
                CallerIdentity::Certificate("kube-apiserver-kubelet-client".into()),
                true,
            ),
            (CallerIdentity::Certificate("prometheus".into()), false),
            (
                CallerIdentity::User("kube-apiserver-kubelet-client".into()),
                false,
            ),
            (CallerIdentity::Anonymous, false),
        ] {
            assert_eq!(
                delegation_callers.still_admits(&identity),
                still,
                "{identity}"
            );
        }
    }
}
