//! Credentials that servers answer handshakes with: issued when needed, kept in memory, reissued at half life and when
//! the CA or the names have changed.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rcgen::SanType;
use rcgen::string::Ia5String;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::error;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::wire::name::NodeName;

use super::{IsKnown, IssueError, LocalCa, OnIssue, ServingNames};

/// The server's credential towards agents.
pub(super) struct ServerCertResolver {
    ca: Arc<LocalCa>,
    cached: Mutex<Option<CachedCert>>,
    on_issue: OnIssue,
}

impl ServerCertResolver {
    /// Issues the first credential at once, so that a CA that cannot sign is noticed at start.
    pub(super) fn new(ca: Arc<LocalCa>, on_issue: OnIssue) -> Self {
        let this = Self {
            ca,
            cached: Mutex::default(),
            on_issue,
        };
        this.credential(SystemTime::now());
        this
    }

    pub(super) fn credential(&self, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if !cached
            .as_ref()
            .is_some_and(|cached| cached.is_fresh(&self.ca, 0, now))
        {
            let generation = (self.ca.generation(), 0);
            let issued = self.ca.server_leaf(now);
            if issued.is_ok() {
                (self.on_issue)(now + self.ca.life());
            }
            update_cached(&mut cached, issued, generation, now);
        }
        cached.as_ref().map(|cached| cached.credential.clone())
    }
}

impl fmt::Debug for ServerCertResolver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ServerCredential")
            .field("held", &self.cached)
            .finish_non_exhaustive()
    }
}

impl ResolvesServerCert for ServerCertResolver {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.credential(SystemTime::now())
    }
}

/// Serving certificates of the TLS door.
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
    /// The nodes in the order of their first leaf; the oldest goes first.
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

    /// How many leaves of nodes are kept.
    #[cfg(test)]
    pub(super) fn cached_nodes(&self) -> usize {
        self.cache.lock().unwrap().nodes.len()
    }

    fn of_node(&self, node: NodeName, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let cached = cache.nodes.get(&node);
        if let Some(cached) = cached.filter(|cached| cached.is_fresh(&self.ca, 0, now)) {
            return Some(cached.credential.clone());
        }
        let generation = (self.ca.generation(), 0);
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
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.own.load();
        if !cache
            .default
            .as_ref()
            .is_some_and(|cached| cached.is_fresh(&self.ca, own.generation, now))
        {
            let generation = (self.ca.generation(), own.generation);
            // A name that is not ASCII cannot be in a certificate; clients send such names in another form.
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

impl fmt::Debug for ServingCertResolver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("DoorCertificates")
            .field("own", &self.own)
            .finish_non_exhaustive()
    }
}

/// A credential with the moment of its issue.
#[derive(Debug)]
struct CachedCert {
    credential: Arc<CertifiedKey>,
    issued: SystemTime,
    /// Of the CA that issued it, and of the names that it has.
    generation: (u64, u64),
}

impl CachedCert {
    /// Before half life, of the CA that signs now and with the names of now. A clock that was set back makes it stale too,
    /// since it may lie before its beginning.
    fn is_fresh(&self, ca: &LocalCa, names: u64, now: SystemTime) -> bool {
        let life = ca.life();
        self.generation == (ca.generation(), names)
            && now
                .duration_since(self.issued)
                .is_ok_and(|age| age < life / 2)
    }
}

/// Takes what was issued; when that failed, what is held serves on.
fn update_cached(
    cached: &mut Option<CachedCert>,
    issued: Result<CertifiedKey, IssueError>,
    generation: (u64, u64),
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

/// CertCache kept; each is about 1 KiB, and a dropped one costs one signature when it is asked for again.
pub(super) const CACHED_CERTS_MAX: usize = 1024;
