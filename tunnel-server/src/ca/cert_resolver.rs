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
use tunnel_proto::process::telemetry::LineLimit;
use tunnel_proto::wire::name::NodeName;

use super::{DoorNames, IsKnown, IssueError, LocalCa, OnIssue};

/// The server's credential towards agents.
pub(super) struct ServerCredential {
    ca: Arc<LocalCa>,
    held: Mutex<Option<Held>>,
    on_issue: OnIssue,
}

impl ServerCredential {
    /// Issues the first credential at once, so that a CA that cannot sign is noticed at start.
    pub(super) fn new(ca: Arc<LocalCa>, on_issue: OnIssue) -> Self {
        let this = Self {
            ca,
            held: Mutex::default(),
            on_issue,
        };
        this.credential(SystemTime::now());
        this
    }

    pub(super) fn credential(&self, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held
            .as_ref()
            .is_some_and(|held| held.is_fresh(&self.ca, 0, now))
        {
            let generation = (self.ca.generation(), 0);
            let issued = self.ca.server_leaf(now);
            if issued.is_ok() {
                (self.on_issue)(now + self.ca.life());
            }
            renew(&mut held, issued, generation, now);
        }
        held.as_ref().map(|held| held.credential.clone())
    }
}

impl fmt::Debug for ServerCredential {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ServerCredential")
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl ResolvesServerCert for ServerCredential {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.credential(SystemTime::now())
    }
}

/// Serving certificates of the TLS door.
pub(super) struct DoorCertificates {
    ca: Arc<LocalCa>,
    is_known: IsKnown,
    own: DoorNames,
    leaves: Mutex<Leaves>,
}

#[derive(Default)]
struct Leaves {
    default: Option<Held>,
    nodes: HashMap<NodeName, Held>,
    /// The nodes in the order of their first leaf; the oldest goes first.
    order: VecDeque<NodeName>,
}

impl DoorCertificates {
    pub(super) fn new(ca: Arc<LocalCa>, is_known: IsKnown, own: DoorNames) -> Self {
        Self {
            ca,
            is_known,
            own,
            leaves: Mutex::default(),
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
    pub(super) fn kept(&self) -> usize {
        self.leaves.lock().unwrap().nodes.len()
    }

    fn of_node(&self, node: NodeName, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        let held = leaves.nodes.get(&node);
        if let Some(held) = held.filter(|held| held.is_fresh(&self.ca, 0, now)) {
            return Some(held.credential.clone());
        }
        let generation = (self.ca.generation(), 0);
        let issued = dns(node.as_str())
            .map_err(IssueError::Sign)
            .and_then(|name| self.ca.door_leaf(node.as_str(), vec![name], now));
        let mut held = leaves.nodes.remove(&node);
        let is_new = held.is_none();
        renew(&mut held, issued, generation, now);
        let held = held?;
        let credential = held.credential.clone();
        if is_new {
            if leaves.order.len() >= LEAVES_MAX
                && let Some(oldest) = leaves.order.pop_front()
            {
                leaves.nodes.remove(&oldest);
            }
            leaves.order.push_back(node.clone());
        }
        leaves.nodes.insert(node, held);
        Some(credential)
    }

    fn default(&self, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.own.load();
        if !leaves
            .default
            .as_ref()
            .is_some_and(|held| held.is_fresh(&self.ca, own.generation, now))
        {
            let generation = (self.ca.generation(), own.generation);
            // A name that is not ASCII cannot be in a certificate; clients send such names in another form.
            let mut names: Vec<SanType> =
                own.names.iter().filter_map(|name| dns(name).ok()).collect();
            let ips = own.addresses.iter().filter(|ip| !ip.is_unspecified());
            names.extend(ips.map(|ip| SanType::IpAddress(*ip)));
            let issued = self.ca.door_leaf("culvert door", names, now);
            renew(&mut leaves.default, issued, generation, now);
        }
        leaves.default.as_ref().map(|held| held.credential.clone())
    }
}

impl ResolvesServerCert for DoorCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certificate(hello.server_name(), SystemTime::now())
    }
}

impl fmt::Debug for DoorCertificates {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("DoorCertificates")
            .field("own", &self.own)
            .finish_non_exhaustive()
    }
}

/// A credential with the moment of its issue.
#[derive(Debug)]
struct Held {
    credential: Arc<CertifiedKey>,
    issued: SystemTime,
    /// Of the CA that issued it, and of the names that it has.
    generation: (u64, u64),
}

impl Held {
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
fn renew(
    held: &mut Option<Held>,
    issued: Result<CertifiedKey, IssueError>,
    generation: (u64, u64),
    now: SystemTime,
) {
    match issued {
        Ok(credential) => {
            *held = Some(Held {
                credential: Arc::new(credential),
                issued: now,
                generation,
            });
        }
        Err(error) => {
            static FAILED: LineLimit = LineLimit::new("serving certificates cannot be issued");
            if FAILED.admit() {
                error!(%error, "cannot issue a serving certificate");
            }
        }
    }
}

fn dns(name: &str) -> Result<SanType, rcgen::Error> {
    Ia5String::try_from(name).map(SanType::DnsName)
}

/// Leaves kept; each is about 1 KiB, and a dropped one costs one signature when it is asked for again.
pub(super) const LEAVES_MAX: usize = 1024;
