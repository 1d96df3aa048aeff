//! The last failures of agents, for operators: handshakes, enrollments and admissions that failed,
//! and sessions that ended early. Agents, and every client of their port, choose the texts, the
//! names before a certificate is verified, and how often they fail. Everything is bounded.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tunnel_proto::wire::name::NodeName;

/// What failed at an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Name of the failure: a label of `tunnel_server_handshakes_total` or
    /// `tunnel_server_enrollments_total`, a close code, or a constant of `failure_code`.
    pub code: &'static str,
    pub node: FailedNode,
    /// Address that the connection came from.
    pub address: SocketAddr,
    /// Reason for people. The agent may have chosen it.
    pub detail: String,
}

/// The node of a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FailedNode {
    /// The name in a certificate that was verified.
    Verified(NodeName),
    /// A name that the other end claims without a proof.
    Claimed(NodeName),
    Unknown,
}

/// Equal failures: those of a code and a verified name, or of a code, a claimed name and a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: &'static str,
    pub node: FailedNode,
    /// Number of failures.
    pub count: u64,
    pub first: SystemTime,
    pub last: SystemTime,
    /// Address of the last one.
    pub address: SocketAddr,
    /// Reason of the last one, at most 200 visible or hidden characters.
    pub detail: String,
}

/// The failures that this process remembers.
#[derive(Debug)]
pub struct Failures {
    /// Those of verified names. One agent has at most as many as there are codes.
    verified: Mutex<Table>,
    others: Mutex<Table>,
}

impl Default for Failures {
    fn default() -> Self {
        Self {
            verified: Mutex::new(Table::new(VERIFIED_MAX, PER_NODE_MAX)),
            others: Mutex::new(Table::new(OTHERS_MAX, PER_SITE_MAX)),
        }
    }
}

impl Failures {
    /// Records a failure at this time. Where there are too many, the oldest failure of the same node
    /// or site is forgotten, else the oldest one.
    pub fn record(&self, attempt: Attempt, now: SystemTime) {
        let table = match attempt.node {
            FailedNode::Verified(_) => &self.verified,
            FailedNode::Claimed(_) | FailedNode::Unknown => &self.others,
        };
        table.lock().record(attempt, now);
    }

    /// Returns all failures, the last one first.
    pub fn all(&self) -> Vec<Failure> {
        let mut all = self.verified.lock().all();
        all.extend(self.others.lock().all());
        all.sort_by_key(|failure| std::cmp::Reverse(failure.last));
        all
    }

    /// Returns the failures of verified names with one of these codes since a time, the last one
    /// first.
    pub fn verified_since(&self, codes: &[&str], since: SystemTime) -> Vec<Failure> {
        let mut recent = self.verified.lock().all();
        recent.retain(|failure| codes.contains(&failure.code) && failure.last >= since);
        recent.sort_by_key(|failure| std::cmp::Reverse(failure.last));
        recent
    }
}

/// What makes failures equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    code: &'static str,
    owner: Owner,
    claimed: Option<NodeName>,
    /// The /24 or /64 of the source, unless the owner is a node.
    network: Option<IpAddr>,
}

/// Who is charged for a failure.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Owner {
    Node(NodeName),
    /// A /24 of IPv4, or a /48 of IPv6: a customer may have that many /64 (RFC 6177).
    Site(IpAddr),
}

#[derive(Debug)]
struct Table {
    limit: usize,
    per_owner: usize,
    entries: HashMap<Key, (u64, Failure)>,
    /// Keys by the number of their last failure.
    by_number: BTreeMap<u64, Key>,
    owners: HashMap<Owner, usize>,
    next_number: u64,
}

impl Table {
    fn new(limit: usize, per_owner: usize) -> Self {
        Self {
            limit,
            per_owner,
            entries: HashMap::new(),
            by_number: BTreeMap::new(),
            owners: HashMap::new(),
            next_number: 0,
        }
    }

    fn record(&mut self, attempt: Attempt, now: SystemTime) {
        let key = key(&attempt);
        let number = self.next_number;
        self.next_number += 1;
        let earlier = self.remove(&key);
        let detail = attempt.detail.chars().take(DETAIL_MAX).collect();
        let failure = Failure {
            code: attempt.code,
            node: attempt.node,
            count: earlier.as_ref().map_or(1, |earlier| earlier.count + 1),
            first: earlier.map_or(now, |earlier| earlier.first),
            last: now,
            address: attempt.address,
            detail,
        };
        if self.owners.get(&key.owner).copied().unwrap_or(0) >= self.per_owner {
            let mut keys = self.by_number.values();
            let oldest = keys.find(|other| other.owner == key.owner).cloned();
            if let Some(oldest) = oldest {
                self.remove(&oldest);
            }
        } else if self.entries.len() >= self.limit
            && let Some(oldest) = self.by_number.values().next().cloned()
        {
            self.remove(&oldest);
        }
        *self.owners.entry(key.owner.clone()).or_default() += 1;
        self.by_number.insert(number, key.clone());
        self.entries.insert(key, (number, failure));
    }

    fn remove(&mut self, key: &Key) -> Option<Failure> {
        let (number, failure) = self.entries.remove(key)?;
        self.by_number.remove(&number);
        if let Some(count) = self.owners.get_mut(&key.owner) {
            *count -= 1;
            if *count == 0 {
                self.owners.remove(&key.owner);
            }
        }
        Some(failure)
    }

    fn all(&self) -> Vec<Failure> {
        let entries = self.entries.values();
        entries.map(|(_, failure)| failure.clone()).collect()
    }
}

fn key(attempt: &Attempt) -> Key {
    let (address, code) = (attempt.address, attempt.code);
    let of_site = |claimed| Key {
        code,
        owner: site(address),
        claimed,
        network: Some(network(address.ip())),
    };
    match &attempt.node {
        FailedNode::Verified(node) => Key {
            code,
            owner: Owner::Node(node.clone()),
            claimed: None,
            network: None,
        },
        FailedNode::Claimed(node) => of_site(Some(node.clone())),
        FailedNode::Unknown => of_site(None),
    }
}

fn site(address: SocketAddr) -> Owner {
    Owner::Site(match address.ip().to_canonical() {
        IpAddr::V4(address) => network(address.into()),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 80)).into(),
    })
}

/// Returns the first address of the /24 of an IPv4 address, or of the /64 of an IPv6 address.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << 8)).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
    }
}

/// Life below which a session counts as a failure.
pub const SHORT_SESSION: Duration = Duration::from_secs(30);
/// Number of failures of verified names, and of others. Together they take about 600 KB.
const VERIFIED_MAX: usize = 500;
const OTHERS_MAX: usize = 500;
/// Number of failures of one verified name.
const PER_NODE_MAX: usize = 8;
/// Number of failures of one site, whatever names it claims.
const PER_SITE_MAX: usize = 24;
/// Number of characters of a reason that are stored.
const DETAIL_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn attempt(code: &'static str, node: FailedNode, address: &str) -> Attempt {
        Attempt {
            code,
            node,
            address: SocketAddr::new(address.parse().unwrap(), 4000),
            detail: String::new(),
        }
    }

    fn claimed(name: &str) -> FailedNode {
        FailedNode::Claimed(name.parse().unwrap())
    }

    fn verified(name: &str) -> FailedNode {
        FailedNode::Verified(name.parse().unwrap())
    }

    #[test]
    fn equal_failures_are_one_with_count_and_times() {
        let failures = Failures::default();
        let detail = |text: &str| text.to_owned();
        for (seconds, address) in [(1, "192.0.2.1"), (5, "192.0.2.77")] {
            let mut failed = attempt("timeout", FailedNode::Unknown, address);
            failed.detail = detail(address);
            failures.record(failed, at(seconds));
        }
        let all = failures.all();
        let [failure] = &all[..] else {
            panic!("{all:?}")
        };
        assert_eq!(
            (failure.count, failure.first, failure.last),
            (2, at(1), at(5))
        );
        assert_eq!(failure.address.ip().to_string(), failure.detail);
        assert_eq!(failure.detail, "192.0.2.77", "the last one");
        for other in [
            attempt("not_tls", FailedNode::Unknown, "192.0.2.1"),
            attempt("timeout", FailedNode::Unknown, "192.0.3.1"),
            attempt("timeout", FailedNode::Unknown, "2001:db8::1"),
            attempt("timeout", FailedNode::Unknown, "2001:db8:0:1::1"),
            attempt("timeout", claimed("a"), "192.0.2.1"),
            attempt("timeout", claimed("b"), "192.0.2.1"),
            attempt("timeout", verified("a"), "192.0.2.1"),
        ] {
            let before = failures.all().len();
            failures.record(other.clone(), at(6));
            assert_eq!(failures.all().len(), before + 1, "{other:?}");
        }
        let before = failures.all().len();
        failures.record(attempt("timeout", verified("a"), "198.51.100.1"), at(7));
        assert_eq!(failures.all().len(), before, "an agent that moves is one");
        assert_eq!(failures.all()[0].last, at(7), "the last one is first");
    }

    #[test]
    fn flood_of_one_site_evicts_no_failure_of_others() {
        let failures = Failures::default();
        failures.record(
            attempt("bad_token", claimed("worker-1"), "192.0.2.1"),
            at(0),
        );
        failures.record(
            attempt("name_in_use", verified("worker-2"), "192.0.2.1"),
            at(0),
        );
        for number in 0..20_000_u32 {
            let name = claimed(&format!("n{number}"));
            let address = format!("198.51.100.{}", number % 256);
            failures.record(attempt("bad_token", name, &address), at(1));
            let address = format!("2001:db8:0:{:x}::1", number % 0xffff);
            failures.record(attempt("timeout", FailedNode::Unknown, &address), at(1));
        }
        let all = failures.all();
        assert!(all.len() <= 2 * PER_SITE_MAX + 2, "{}", all.len());
        let names = all.iter().filter(|failure| failure.last == at(0));
        assert_eq!(names.count(), 2, "those of the others");
    }

    #[test]
    fn flood_of_many_sites_is_bounded_and_evicts_no_verified_name() {
        let failures = Failures::default();
        failures.record(
            attempt("name_in_use", verified("worker-1"), "192.0.2.1"),
            at(0),
        );
        for number in 0..20_000_u32 {
            let address = IpAddr::from((0x0a00_0000 | (number << 8)).to_be_bytes());
            let mut failed = attempt("timeout", FailedNode::Unknown, &address.to_string());
            failed.detail = "ä\n\u{202e}".repeat(5_000);
            failures.record(failed, at(u64::from(number)));
        }
        let all = failures.all();
        assert_eq!(all.len(), OTHERS_MAX + 1);
        assert!(all.iter().any(|failure| failure.code == "name_in_use"));
        assert!(
            all.iter()
                .all(|failure| failure.detail.chars().count() <= DETAIL_MAX)
        );
        let others = failures.others.lock();
        let bounded = [
            others.by_number.len(),
            others.entries.len(),
            others.owners.len(),
        ];
        assert_eq!(bounded, [OTHERS_MAX; 3]);
    }

    #[test]
    fn only_recent_failures_of_verified_names_are_selected() {
        let failures = Failures::default();
        failures.record(attempt("name_in_use", verified("a"), "192.0.2.1"), at(1));
        failures.record(attempt("name_in_use", verified("b"), "192.0.2.1"), at(5));
        failures.record(attempt("version", verified("c"), "192.0.2.1"), at(5));
        failures.record(attempt("name_in_use", claimed("d"), "192.0.2.1"), at(5));
        let recent = failures.verified_since(&["name_in_use"], at(5));
        let nodes: Vec<_> = recent.into_iter().map(|failure| failure.node).collect();
        assert_eq!(nodes, [verified("b")]);
    }
}
