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
pub struct Targets {
    /// What the legs are made of.
    given: Mutex<Given>,
    legs: ArcSwap<Legs>,
}

#[derive(Clone, Default)]
struct Given {
    /// Absent when certificates of targets are accepted as they are.
    roots: Option<Arc<RootCertStore>>,
    own: Option<Arc<CertifiedKey>>,
    /// Counts replacements.
    generation: u64,
}

struct Legs {
    bare: Leg,
    lending: Leg,
}

/// TLS for connections to targets on behalf of one kind of caller.
#[derive(Debug, Clone)]
pub struct Leg {
    /// The configuration.
    pub tls: Arc<ClientConfig>,
    /// Equal for legs whose connections may serve each other's requests.
    pub id: LegId,
}

/// Tells legs apart: those with the server's own certificate from those without, and both from what they were before a
/// replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegId {
    generation: u64,
    lends: bool,
}

impl Targets {
    /// With `roots`, certificates of targets have to chain to them and to be for the node's name; without, they are
    /// accepted as they are. Nothing is lent yet.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(roots: Option<Arc<RootCertStore>>) -> Result<Arc<Self>, Error> {
        let given = Given {
            roots,
            ..Given::default()
        };
        Ok(Arc::new(Self {
            legs: ArcSwap::from_pointee(given.legs()?),
            given: Mutex::new(given),
        }))
    }

    /// Takes other roots from the next connection on. Not for targets that are accepted as they are.
    ///
    /// # Errors
    /// When they cannot be used; the old ones stay.
    pub fn trust(&self, roots: Arc<RootCertStore>) -> Result<(), Error> {
        self.replace(|given| given.roots = Some(roots))
    }

    /// Lends this certificate from the next connection on.
    ///
    /// # Errors
    /// When it cannot be used; the old one stays.
    pub fn lend(&self, own: Arc<CertifiedKey>) -> Result<(), Error> {
        self.replace(|given| given.own = Some(own))
    }

    /// How to speak to a target for a caller that may, or may not, borrow the server's certificate.
    #[must_use]
    pub fn leg(&self, borrows: bool) -> Leg {
        let legs = self.legs.load();
        if borrows {
            legs.lending.clone()
        } else {
            legs.bare.clone()
        }
    }

    fn replace(&self, change: impl FnOnce(&mut Given)) -> Result<(), Error> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = given.clone();
        change(&mut next);
        next.generation += 1;
        self.legs.store(Arc::new(next.legs()?));
        *given = next;
        Ok(())
    }
}

impl Given {
    fn legs(&self) -> Result<Legs, Error> {
        let leg = |own: Option<Arc<CertifiedKey>>| {
            let lends = own.is_some();
            let tls = tls::target_client(self.roots.clone(), own)?;
            let generation = self.generation;
            let id = LegId { generation, lends };
            Ok::<_, Error>(Leg { tls, id })
        };
        Ok(Legs {
            bare: leg(None)?,
            lending: leg(self.own.clone())?,
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

impl fmt::Debug for Targets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Targets(..)")
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
    fn legs_differ_by_what_is_lent_and_by_each_replacement() {
        let targets = Targets::new(None).unwrap();
        // Nothing to lend: borrowers are as all others.
        assert_eq!(targets.leg(true).id, targets.leg(false).id);
        assert!(!targets.leg(true).tls.client_auth_cert_resolver.has_certs());
        targets.lend(own()).unwrap();
        let (bare, lending) = (targets.leg(false), targets.leg(true));
        assert_ne!(bare.id, lending.id);
        assert!(!bare.tls.client_auth_cert_resolver.has_certs());
        assert!(lending.tls.client_auth_cert_resolver.has_certs());
        targets.lend(own()).unwrap();
        assert_ne!(targets.leg(true).id, lending.id);
        assert_ne!(targets.leg(false).id, bare.id);
    }
}
