//! Certificate resolvers for TLS handshakes. Certificates are issued on demand, cached in memory,
//! and reissued at half of their lifetime and after a change of the CA or the names.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rcgen::SanType;
use rcgen::string::Ia5String;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::error;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::wire::name::{NodeName, ReplicaId};

use super::{IssueError, LocalCa, ServingNames};

/// A callback that returns whether a node is known. Handshakes call it, so it must be quick.
pub type IsKnown = Arc<dyn Fn(&NodeName) -> bool + Send + Sync>;

/// A callback that receives the expiry of the certificate that was just issued.
pub type OnIssue = Box<dyn Fn(SystemTime) + Send + Sync>;

impl LocalCa {
    /// Returns a resolver for the server's credentials for agents. The certificate has the role
    /// `culvert://server`. The chain contains the root, for agents that know the root only by its
    /// hash. The resolver reissues the certificate at half of its lifetime and calls `on_issue`
    /// with the expiry of each certificate.
    pub fn server_resolver(self: &Arc<Self>, on_issue: OnIssue) -> Arc<dyn ResolvesServerCert> {
        Arc::new(RoleCertResolver::new(self.clone(), None, on_issue))
    }

    /// Returns a resolver for the server's credentials for other servers, to dial and to accept
    /// them. The certificate has the role `culvert://peer/NAME`. The resolver reissues it at half of
    /// its lifetime.
    pub fn peer_resolver(self: &Arc<Self>, replica: ReplicaId) -> Arc<RoleCertResolver> {
        let resolver = RoleCertResolver::new(self.clone(), Some(replica), Box::new(|_| {}));
        Arc::new(resolver)
    }

    /// Returns a resolver that selects serving certificates of the HTTPS listener by SNI: one per
    /// known node, and a default for the listener's own names, which also answers clients without
    /// SNI and unknown names. The certificates carry no role, so they can never identify the tunnel
    /// server to agents.
    pub fn serving_resolver(
        self: &Arc<Self>,
        is_known: IsKnown,
        own: ServingNames,
    ) -> Arc<dyn ResolvesServerCert> {
        Arc::new(ServingCertResolver::new(self.clone(), is_known, own))
    }
}

/// The server's own credentials: for agents, or for other servers.
pub struct RoleCertResolver {
    ca: Arc<LocalCa>,
    /// Name of this server in credentials for other servers. `None` means credentials for agents.
    peer: Option<ReplicaId>,
    cached: Mutex<Option<CachedCert>>,
    on_issue: OnIssue,
}

impl RoleCertResolver {
    /// Issues the first certificate at once, so that a CA that cannot sign is noticed at start.
    pub(super) fn new(ca: Arc<LocalCa>, peer: Option<ReplicaId>, on_issue: OnIssue) -> Self {
        let this = Self {
            ca,
            peer,
            cached: Mutex::default(),
            on_issue,
        };
        this.credential(SystemTime::now());
        this
    }

    pub(super) fn credential(&self, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut cached = self.cached.lock();
        let generation = Generation::new(&self.ca, 0);
        if !cached
            .as_ref()
            .is_some_and(|cached| cached.is_fresh(&self.ca, generation, now))
        {
            let issued = match &self.peer {
                Some(replica) => self.ca.peer_leaf(replica, now),
                None => self.ca.server_leaf(now),
            };
            if issued.is_ok() {
                (self.on_issue)(now + self.ca.life());
            }
            update_cached(&mut cached, issued, generation, now);
        }
        cached.as_ref().map(|cached| cached.credential.clone())
    }
}

tunnel_process::partial_debug!(RoleCertResolver { peer, cached });

impl ResolvesServerCert for RoleCertResolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.credential(SystemTime::now())
    }
}

impl ResolvesClientCert for RoleCertResolver {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.credential(SystemTime::now())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// The serving certificates of the HTTPS listener.
pub(super) struct ServingCertResolver {
    ca: Arc<LocalCa>,
    is_known: IsKnown,
    own: ServingNames,
    cache: Mutex<CertCache>,
}

#[derive(Default)]
struct CertCache {
    default: Option<CachedCert>,
    nodes: HashMap<NodeName, CachedCert>,
    /// Nodes in the order of their first certificate. The oldest is evicted first.
    order: VecDeque<NodeName>,
}

impl ServingCertResolver {
    pub(super) fn new(ca: Arc<LocalCa>, is_known: IsKnown, own: ServingNames) -> Self {
        Self {
            ca,
            is_known,
            own,
            cache: Mutex::default(),
        }
    }

    pub(super) fn certificate(
        &self,
        sni: Option<&str>,
        now: SystemTime,
    ) -> Option<Arc<CertifiedKey>> {
        let node = sni
            .filter(|name| !self.own.has(name))
            .and_then(|name| name.parse::<NodeName>().ok())
            .filter(|node| (self.is_known)(node));
        match node {
            Some(node) => self.of_node(node, now),
            None => self.default(now),
        }
    }

    #[cfg(test)]
    pub(super) fn cached_nodes(&self) -> usize {
        self.cache.lock().nodes.len()
    }

    fn of_node(&self, node: NodeName, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut cache = self.cache.lock();
        let generation = Generation::new(&self.ca, 0);
        let cached = cache.nodes.get(&node);
        if let Some(cached) = cached.filter(|cached| cached.is_fresh(&self.ca, generation, now)) {
            return Some(cached.credential.clone());
        }
        let issued = dns(node.as_str())
            .map_err(IssueError::Sign)
            .and_then(|name| self.ca.serving_leaf(node.as_str(), vec![name], now));
        let mut cached = cache.nodes.remove(&node);
        let is_new = cached.is_none();
        update_cached(&mut cached, issued, generation, now);
        let cached = cached?;
        let credential = cached.credential.clone();
        if is_new {
            if cache.order.len() >= CACHED_CERTS_MAX
                && let Some(oldest) = cache.order.pop_front()
            {
                cache.nodes.remove(&oldest);
            }
            cache.order.push_back(node.clone());
        }
        cache.nodes.insert(node, cached);
        Some(credential)
    }

    fn default(&self, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut cache = self.cache.lock();
        let own = self.own.load();
        let generation = Generation::new(&self.ca, own.generation);
        if !cache
            .default
            .as_ref()
            .is_some_and(|cached| cached.is_fresh(&self.ca, generation, now))
        {
            // A non-ASCII name cannot be in a certificate. Clients send such names in ASCII form.
            let mut names: Vec<SanType> =
                own.names.iter().filter_map(|name| dns(name).ok()).collect();
            let ips = own.addresses.iter().filter(|ip| !ip.is_unspecified());
            names.extend(ips.map(|ip| SanType::IpAddress(*ip)));
            let issued = self.ca.serving_leaf("culvert listener", names, now);
            update_cached(&mut cache.default, issued, generation, now);
        }
        cache
            .default
            .as_ref()
            .map(|cached| cached.credential.clone())
    }
}

impl ResolvesServerCert for ServingCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certificate(hello.server_name(), SystemTime::now())
    }
}

tunnel_process::partial_debug!(ServingCertResolver { own });

#[derive(Debug)]
struct CachedCert {
    credential: Arc<CertifiedKey>,
    issued: SystemTime,
    generation: Generation,
}

/// Generation of the issuing CA, and of the names in the certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Generation {
    ca: u64,
    names: u64,
}

impl Generation {
    fn new(ca: &LocalCa, names: u64) -> Self {
        let ca = ca.generation();
        Self { ca, names }
    }
}

impl CachedCert {
    /// Returns whether the certificate is younger than half of its lifetime and matches the current
    /// CA and names. If the clock was set back, the certificate is stale too, because it may not be
    /// valid yet.
    fn is_fresh(&self, ca: &LocalCa, current: Generation, now: SystemTime) -> bool {
        let life = ca.life();
        self.generation == current
            && now
                .duration_since(self.issued)
                .is_ok_and(|age| age < life / 2)
    }
}

/// Caches the issued certificate. If the issue failed, the cached certificate stays in use.
fn update_cached(
    cached: &mut Option<CachedCert>,
    issued: Result<CertifiedKey, IssueError>,
    generation: Generation,
    now: SystemTime,
) {
    match issued {
        Ok(credential) => {
            *cached = Some(CachedCert {
                credential: Arc::new(credential),
                issued: now,
                generation,
            });
        }
        Err(error) => {
            static FAILED: LogRateLimit =
                LogRateLimit::new("serving certificates cannot be issued");
            if FAILED.admit() {
                error!(%error, "cannot issue a serving certificate");
            }
        }
    }
}

fn dns(name: &str) -> Result<SanType, rcgen::Error> {
    Ia5String::try_from(name).map(SanType::DnsName)
}

/// Maximum number of cached node certificates. Each takes about 1 KiB, and an evicted one costs one
/// signature when it is requested again.
pub(super) const CACHED_CERTS_MAX: usize = 1024;
