//! TLS towards https targets: whether their certificates are verified, and the client certificate that the server lends to
//! callers who may borrow it. Both may be replaced while the server runs; each connection takes those of its moment.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, Error, RootCertStore};
use rustls_pki_types::{InvalidDnsNameError, ServerName};
use tunnel_proto::tls;
use tunnel_proto::wire::name::NodeName;

/// How https targets are spoken to.
pub struct TargetTls {
    /// What the legs are made of.
    inputs: Mutex<TlsInputs>,
    tls_profiles: ArcSwap<TlsProfiles>,
}

#[derive(Clone, Default)]
struct TlsInputs {
    /// Absent when certificates of targets are accepted as they are.
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
    /// Counts replacements.
    generation: u64,
}

struct TlsProfiles {
    anonymous: TlsProfile,
    delegated: TlsProfile,
}

/// TLS for connections to targets on behalf of one kind of caller.
#[derive(Debug, Clone)]
pub struct TlsProfile {
    /// The configuration.
    pub tls: Arc<ClientConfig>,
    /// Equal for legs whose connections may serve each other's requests.
    pub id: TlsProfileId,
}

/// Tells legs apart: those with the server's own certificate from those without, and both from what they were before a
/// replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsProfileId {
    generation: u64,
    is_delegated: bool,
}

impl TargetTls {
    /// With `roots`, certificates of targets have to chain to them and to be for the node's name; without, they are
    /// accepted as they are. Nothing is lent yet.
    ///
    /// # Errors
    /// When the roots cannot be used.
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

    /// Takes other roots from the next connection on. Not for targets that are accepted as they are.
    ///
    /// # Errors
    /// When they cannot be used; the old ones stay.
    pub fn trust(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.replace(|inputs| inputs.roots = Some(roots))
    }

    /// Lends this certificate from the next connection on.
    ///
    /// # Errors
    /// When it cannot be used; the old one stays.
    pub fn delegate(&self, own: Arc<CertifiedKey>) -> Result<(), Error> {
        self.replace(|inputs| inputs.own = Some(own))
    }

    /// How to speak to a target for a caller that may, or may not, borrow the server's certificate.
    #[must_use]
    pub fn tls_profile(&self, has_delegation: bool) -> TlsProfile {
        let tls_profiles = self.tls_profiles.load();
        if has_delegation {
            tls_profiles.delegated.clone()
        } else {
            tls_profiles.anonymous.clone()
        }
    }

    fn replace(&self, change: impl FnOnce(&mut TlsInputs)) -> Result<(), Error> {
        let mut inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
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
            let tls = tls::target_client(self.roots.clone(), own)?;
            let generation = self.generation;
            let id = TlsProfileId {
                generation,
                is_delegated,
            };
            Ok::<_, Error>(TlsProfile { tls, id })
        };
        Ok(TlsProfiles {
            anonymous: tls_profile(None)?,
            delegated: tls_profile(self.own.clone())?,
        })
    }
}

/// The name that a node's targets are asked for (SNI), and by which they are verified if they are. A name that ends in a
/// number is none that TLS knows: its targets are asked for one that nobody has (RFC 6761, section 6.4), so they are
/// reached where they are not verified, and refused where they are.
///
/// # Errors
/// When neither is a name that TLS knows.
pub fn server_name(node: &NodeName) -> Result<ServerName<'static>, InvalidDnsNameError> {
    ServerName::try_from(node.to_string())
        .or_else(|_number| ServerName::try_from(format!("{node}.invalid")))
}

impl fmt::Debug for TargetTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TargetTls(..)")
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

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
        // Nothing to lend: borrowers are as all others.
        assert_eq!(targets.tls_profile(true).id, targets.tls_profile(false).id);
        assert!(
            !targets
                .tls_profile(true)
                .tls
                .client_auth_cert_resolver
                .has_certs()
        );
        targets.delegate(own()).unwrap();
        let (anonymous, delegated) = (targets.tls_profile(false), targets.tls_profile(true));
        assert_ne!(anonymous.id, delegated.id);
        assert!(!anonymous.tls.client_auth_cert_resolver.has_certs());
        assert!(delegated.tls.client_auth_cert_resolver.has_certs());
        targets.delegate(own()).unwrap();
        assert_ne!(targets.tls_profile(true).id, delegated.id);
        assert_ne!(targets.tls_profile(false).id, anonymous.id);
    }
}
