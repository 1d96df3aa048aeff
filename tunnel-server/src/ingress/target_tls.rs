//! TLS for connections to https targets: the verification of targets' certificates, and the client
//! certificate that the server uses on behalf of callers with delegation. Both can be replaced at
//! run time. Each connection uses the values that are current when the connection begins.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, Error, RootCertStore};
use rustls_pki_types::{InvalidDnsNameError, ServerName};
use tunnel_proto::tls;
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::NodeName;

/// TLS configuration for connections to https targets.
pub struct TargetTls {
    inputs: Mutex<TlsInputs>,
    tls_profiles: ArcSwap<TlsProfiles>,
}

#[derive(Clone, Default)]
struct TlsInputs {
    /// `None` if the server does not verify certificates of targets.
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
    /// Incremented by every replacement.
    generation: u64,
}

struct TlsProfiles {
    anonymous: TlsProfile,
    delegated: TlsProfile,
}

/// TLS configuration for connections to targets on behalf of one kind of caller.
#[derive(Debug, Clone)]
pub struct TlsProfile {
    /// The rustls configuration of connections that pass a network.
    pub network: Arc<ClientConfig>,
    /// The rustls configuration of connections to targets on the loopback of a node.
    pub loopback: Arc<ClientConfig>,
    /// Identifies the profile. Two requests can share a connection only if their profile ids are
    /// equal.
    pub id: TlsProfileId,
}

impl TlsProfile {
    /// Returns the rustls configuration for connections to `target`.
    pub fn config(&self, target: &Target) -> &Arc<ClientConfig> {
        match target {
            Target::Loopback(_) => &self.loopback,
            Target::Node(_) | Target::Host(..) => &self.network,
        }
    }
}

/// Identifies a [`TlsProfile`]. Profiles with the server's client certificate differ from those
/// without, and both differ from their predecessors after a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsProfileId {
    generation: u64,
    is_delegated: bool,
}

impl TargetTls {
    /// Creates the configuration without a client certificate. With `roots`, certificates of
    /// targets must chain to the roots and be valid for the node's name. Without `roots`, the
    /// server does not verify certificates of targets.
    ///
    /// # Errors
    /// Returns an error if the roots cannot be used.
    pub fn new(roots: Option<Arc<RootCertStore>>) -> Result<Arc<Self>, Error> {
        let inputs = TlsInputs {
            roots,
            ..TlsInputs::default()
        };
        Ok(Arc::new(Self {
            tls_profiles: ArcSwap::from_pointee(inputs.tls_profiles()?),
            inputs: Mutex::new(inputs),
        }))
    }

    /// Replaces the roots, starting with the next connection. Not for a configuration that does not
    /// verify targets.
    ///
    /// # Errors
    /// Returns an error if the roots cannot be used. The previous roots then stay in effect.
    pub fn trust(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.replace(|inputs| inputs.roots = Some(roots))
    }

    /// Replaces the client certificate for callers with delegation, starting with the next
    /// connection.
    ///
    /// # Errors
    /// Returns an error if the certificate cannot be used. The previous certificate then stays in
    /// effect.
    pub fn delegate(&self, own: Arc<CertifiedKey>) -> Result<(), Error> {
        self.replace(|inputs| inputs.own = Some(own))
    }

    /// Returns the profile for a caller with or without delegation.
    pub fn tls_profile(&self, has_delegation: bool) -> TlsProfile {
        let tls_profiles = self.tls_profiles.load();
        if has_delegation {
            tls_profiles.delegated.clone()
        } else {
            tls_profiles.anonymous.clone()
        }
    }

    fn replace(&self, change: impl FnOnce(&mut TlsInputs)) -> Result<(), Error> {
        let mut inputs = self.inputs.lock();
        let mut next = inputs.clone();
        change(&mut next);
        next.generation += 1;
        self.tls_profiles.store(Arc::new(next.tls_profiles()?));
        *inputs = next;
        Ok(())
    }
}

impl TlsInputs {
    fn tls_profiles(&self) -> Result<TlsProfiles, Error> {
        let tls_profile = |own: Option<Arc<CertifiedKey>>| {
            let is_delegated = own.is_some();
            let network = tls::target_client(self.roots.clone(), own.clone())?;
            let loopback = tls::loopback_target_client(self.roots.clone(), own)?;
            let generation = self.generation;
            let id = TlsProfileId {
                generation,
                is_delegated,
            };
            Ok::<_, Error>(TlsProfile {
                network,
                loopback,
                id,
            })
        };
        Ok(TlsProfiles {
            anonymous: tls_profile(None)?,
            delegated: tls_profile(self.own.clone())?,
        })
    }
}

/// Returns the server name (SNI) for the targets of a node. Verified targets need a certificate for
/// this name. TLS has no server name that ends in a number, or with a label of more than 63
/// characters. For a node with such a name, the server asks for a name in `.invalid`, which no host
/// has (RFC 6761, section 6.4). These targets are reachable if targets are not verified, and refused
/// if targets are verified.
///
/// # Errors
/// Returns an error if TLS accepts neither name.
pub fn server_name(node: &NodeName) -> Result<ServerName<'static>, InvalidDnsNameError> {
    ServerName::try_from(node.to_string())
        .or_else(|_number| ServerName::try_from(format!("{node}.invalid")))
        .or_else(|_long| ServerName::try_from(LONG_NAME))
}

/// Server name for nodes whose names are too long for TLS. It appears in the errors of TLS.
const LONG_NAME: &str = "the-name-of-the-node-is-too-long-for-dns.invalid";

tunnel_process::partial_debug!(TargetTls);

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tunnel_proto::wire::name::Port;

    use super::*;

    fn own() -> Arc<CertifiedKey> {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        let key = key.serialize_der().try_into().unwrap();
        tls::certified_key(vec![certificate.der().clone()], key).unwrap()
    }

    #[test]
    fn tls_profiles_differ_by_delegation_and_by_each_replacement() {
        let targets = TargetTls::new(None).unwrap();
        // Without a client certificate, callers with delegation share the profile of all others.
        assert_eq!(targets.tls_profile(true).id, targets.tls_profile(false).id);
        let profile = targets.tls_profile(true);
        assert!(!profile.network.client_auth_cert_resolver.has_certs());
        targets.delegate(own()).unwrap();
        let (anonymous, delegated) = (targets.tls_profile(false), targets.tls_profile(true));
        assert_ne!(anonymous.id, delegated.id);
        for target in [
            Target::Loopback(Port::new(10250).unwrap()),
            Target::Node(Port::new(10250).unwrap()),
        ] {
            let has_certificate = |profile: &TlsProfile| {
                let resolver = &profile.config(&target).client_auth_cert_resolver;
                resolver.has_certs()
            };
            assert!(!has_certificate(&anonymous), "{target}");
            assert!(has_certificate(&delegated), "{target}");
        }
        targets.delegate(own()).unwrap();
        assert_ne!(targets.tls_profile(true).id, delegated.id);
        assert_ne!(targets.tls_profile(false).id, anonymous.id);
    }
}
