//! The sockets of the embedded DNS server, its start, and the snapshot of the last records on disk.
//! After a cold start the server answers from the snapshot until the nodes are known again.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};
use tunnel_proto::process::shutdown::Shutdown;

use super::limiter::Limiter;
use super::loop_detection::{LoopDetector, LoopError};
use super::server::{DnsMetrics, Server};
use super::udp::{self, DnsSocket};
use super::{
    Addresses, DnsLimits, DnsSettings, Names, RecordSet, Records, Resolvers, tcp, upstream,
};
use crate::store::data_dir::DataDir;
use crate::store::state_store::{OnDamage, RowChange, StateStore, Table, follow};

/// The UDP and TCP sockets, bound to one port.
#[derive(Debug)]
pub struct DnsSockets {
    pub udp: DnsSocket,
    pub tcp: TcpListener,
}

#[derive(Debug)]
pub struct DnsInputs<'a> {
    pub sockets: DnsSockets,
    pub settings: &'a DnsSettings,
    /// Records to answer from. The source of the nodes updates them.
    pub records: Records,
    pub limits: DnsLimits,
    pub metrics: DnsMetrics,
}

#[derive(Debug)]
pub struct Dns(Arc<Server>);

impl Dns {
    /// Serves until `shutdown` stops, because names must resolve while running requests end.
    ///
    /// Answers from `records` immediately. Fill them before the start if nodes are already known.
    /// Otherwise queries for names that may be those of nodes fail until they are.
    pub fn start(parts: DnsInputs<'_>, shutdown: &Shutdown) -> Self {
        let names = Names {
            zone: parts.settings.zone.clone(),
            clusters: parts.settings.clusters.clone(),
            default_resolvers: default_resolvers(&parts.settings.default_resolvers),
        };
        info!(
            zone = names.zone.as_ref().map(tracing::field::display),
            resolvers = ?names.default_resolvers,
            "answering DNS"
        );
        let server = Arc::new(Server {
            names,
            records: parts.records,
            limits: parts.limits,
            limiter: Limiter::new(parts.limits.per_source),
            forwards: Arc::new(Semaphore::new(parts.limits.forwards)),
            loop_detection: LoopDetector::default(),
            metrics: parts.metrics,
        });
        shutdown.spawn_listener(udp::serve(server.clone(), parts.sockets.udp));
        shutdown.spawn_listener(tcp::serve(
            server.clone(),
            parts.sockets.tcp,
            parts.limits.connections,
        ));
        Self(server)
    }

    /// Probes for forwarding loops once, then periodically until `shutdown` stops. The first probe
    /// takes as long as the slowest resolver, at most one second.
    ///
    /// # Errors
    /// Returns [`LoopError`] if a resolver forwards queries back to this server.
    pub async fn start_loop_detection(&self, shutdown: &Shutdown) -> Result<(), LoopError> {
        if !self.0.names.is_forwarding() {
            return Ok(());
        }
        self.0.loop_detection.probe(&self.0.names).await?;
        let server = self.0.clone();
        shutdown.spawn_service(async move { server.loop_detection.run(&server.names).await });
        Ok(())
    }
}

fn default_resolvers(resolvers: &Resolvers) -> Vec<SocketAddr> {
    match resolvers {
        Resolvers::These(these) => these.clone(),
        Resolvers::Host => {
            let found = upstream::host_resolvers(Path::new(RESOLV_CONF));
            let found = found.unwrap_or_else(|error| {
                debug!(%error, "cannot read {RESOLV_CONF}");
                Vec::new()
            });
            if found.is_empty() {
                warn!(
                    "{RESOLV_CONF} names no resolver; DNS queries for other names are refused; set one with \
                     --dns-upstream"
                );
            }
            found
        }
    }
}

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Key of the row that says that the records were known, also if there are none. It is no name of a
/// node.
const KNOWN: &str = ".";

/// Restores the records of the last run, unless records are already known. There may be none. Rows
/// that cannot be read are reported as a condition. Blocks the thread.
pub fn restore(data: &DataDir, records: &Records) {
    let Some(store) = store(data) else { return };
    if let Some(persisted) = persisted(&store)
        && records.known().is_none()
    {
        info!(
            records = persisted.len(),
            "serving the persisted DNS records"
        );
        records.replace(persisted);
    }
}

/// Persists the records soon after each change, for [`restore`] in the next run.
pub fn persist(data: &DataDir, records: &Records, shutdown: &Shutdown) {
    let Some(store) = store(data) else { return };
    let mut persisted = persisted(&store);
    shutdown.spawn_service(follow(
        records.changed(),
        move |records: Option<Arc<RecordSet>>| {
            if let Some(records) = records {
                let is_first = persisted.is_none();
                let mut changes = row_changes(&records, &persisted.take().unwrap_or_default());
                if is_first {
                    changes.push(RowChange::upsert(KNOWN, &Vec::<IpAddr>::new()));
                }
                store.change(Table::Records, changes);
                persisted = Some(RecordSet::clone(&records));
            }
        },
    ));
}

/// Returns the changes of the rows for other records than the persisted ones.
pub(crate) fn row_changes(records: &RecordSet, persisted: &RecordSet) -> Vec<RowChange> {
    let changed = records.changed_from(persisted).into_iter();
    let changed = changed.map(|name| (records.get(&name), persisted.get(&name), name));
    let changed = changed.filter(|(record, before, _name)| record != before);
    let rows = changed.map(|(record, _before, name)| match record {
        Some(addresses) => RowChange::upsert(name.as_str(), &addresses.iter().collect::<Vec<_>>()),
        None => RowChange::remove(name.as_str()),
    });
    rows.collect()
}

/// Returns the records of the rows, addresses by name, or `None` if records were never known.
fn persisted(store: &StateStore) -> Option<RecordSet> {
    let mut rows = store.load_observed::<Vec<IpAddr>>(Table::Records, "");
    rows.remove(KNOWN)?;
    let rows = rows.into_iter();
    Some(RecordSet::of(rows.filter_map(|(name, addresses)| {
        Some((name.parse().ok()?, Addresses::first_of(addresses)))
    })))
}

fn store(data: &DataDir) -> Option<StateStore> {
    let store = data.store(OnDamage::Stop);
    let store = store.inspect_err(|error| warn!(%error, "cannot use the persisted DNS records"));
    store.ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};
    use tunnel_proto::wire::name::NodeName;

    use super::super::{Node, NodeLocation};
    use super::*;
    use crate::store::data_dir::testing::Scratch;
    use crate::testing::eventually;

    fn records(names: &[(&str, &[&str])]) -> RecordSet {
        RecordSet::of(names.iter().map(|(name, addresses)| {
            let addresses = addresses.iter().map(|text| text.parse().unwrap());
            (name.parse().unwrap(), Addresses::first_of(addresses))
        }))
    }

    #[tokio::test]
    async fn records_outlive_the_process_and_a_new_feed_wins() {
        let scratch = Scratch::new();
        let before = Records::default();
        let shutdown = Shutdown::new();
        persist(&scratch.0, &before, &shutdown);
        let set = records(&[("a", &["10.0.0.1", "fd00::1"]), ("b", &["10.0.0.2"])]);
        before.replace(set.clone());
        let store = store(&scratch.0).unwrap();
        eventually("the rows", || persisted(&store).as_ref() == Some(&set)).await;
        drop(store);
        shutdown.finish().await;

        let after = Records::default();
        restore(&scratch.0, &after);
        assert_eq!(*after.load(), set);
        let fed = Records::default();
        fed.replace(records(&[("c", &["10.0.0.3"])]));
        restore(&scratch.0, &fed);
        assert_eq!(fed.load().len(), 1);
    }

    #[tokio::test]
    async fn records_that_are_known_to_be_empty_are_so_after_a_restart() {
        let scratch = Scratch::new();
        let unknown = Records::default();
        restore(&scratch.0, &unknown);
        assert_eq!(unknown.known(), None, "a new server");
        let before = Records::default();
        let shutdown = Shutdown::new();
        persist(&scratch.0, &before, &shutdown);
        before.replace(RecordSet::default());
        let store = store(&scratch.0).unwrap();
        eventually("the row", || persisted(&store).is_some()).await;
        drop(store);
        shutdown.finish().await;
        restore(&scratch.0, &unknown);
        assert_eq!(*unknown.known().unwrap(), RecordSet::default());
    }

    /// Random nodes and host names, persisted after some changes together.
    #[test]
    fn rows_follow_the_records_and_only_differences_are_written() {
        for seed in 0..50 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut name = |count: u32| -> NodeName {
                format!("n-{}", random.random_range(0..count))
                    .parse()
                    .unwrap()
            };
            let (mut records, mut persisted) = (RecordSet::default(), RecordSet::default());
            let mut rows = BTreeMap::new();
            for step in 0..200_u8 {
                let (node, hostname) = (name(8), name(16));
                match step % 5 {
                    0 => drop(records.remove(&node)),
                    1 if step % 40 == 1 => {
                        records.set_tunnel(Addresses::first_of([[10, 0, 0, step].into()]));
                    }
                    kind => drop(records.insert(&Node {
                        hostname: Some(hostname).filter(|hostname| *hostname != node),
                        name: node,
                        location: if kind == 2 {
                            NodeLocation::Edge
                        } else {
                            NodeLocation::Cloud(vec![[192, 0, 2, step % 7].into()])
                        },
                    })),
                }
                if step % 3 == 0 {
                    for change in row_changes(&records, &persisted) {
                        let (key, addresses) = change.decoded::<Vec<IpAddr>>();
                        let before = rows.get(&key).cloned();
                        assert_ne!(before, addresses, "seed {seed}");
                        match addresses {
                            Some(addresses) => rows.insert(key, addresses),
                            None => rows.remove(&key),
                        };
                    }
                    persisted = records.clone();
                    let expected = records.iter();
                    let expected: BTreeMap<_, _> = expected
                        .map(|(name, own)| (name.to_string(), own.iter().collect()))
                        .collect();
                    assert_eq!(rows, expected, "seed {seed}");
                }
            }
        }
    }
}
