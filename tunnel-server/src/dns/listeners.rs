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
use crate::store::state_store::{OnDamage, RowSet, Table, follow};

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
    /// Data directory with the record snapshot.
    pub data: &'a DataDir,
    pub limits: DnsLimits,
    pub metrics: DnsMetrics,
}

#[derive(Debug)]
pub struct Dns(Arc<Server>);

impl Dns {
    /// Serves until `shutdown` stops, because names must resolve while running requests end.
    /// Persists the records after each change for [`super::restore`] in the next run.
    ///
    /// Answers from `records` immediately. Fill them before the start if nodes are already known.
    /// Otherwise queries for names that may be those of nodes fail until they are.
    #[must_use]
    pub fn start(parts: DnsInputs<'_>, shutdown: &Shutdown) -> Self {
        persist(parts.data, &parts.records, shutdown);
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

/// Restores the records of the last run, unless records are already known. Rows that cannot be read
/// are reported as a condition. Blocks the thread.
pub fn restore(data: &DataDir, records: &Records) {
    let Some(persisted) = rows(data) else { return };
    let persisted = persisted.values().iter().filter_map(|(name, addresses)| {
        let addresses = Addresses::first_of(addresses.iter().copied());
        Some((name.parse().ok()?, addresses))
    });
    let persisted = RecordSet::of(persisted);
    if !persisted.is_empty() && records.known().is_none() {
        info!(
            records = persisted.len(),
            "serving the persisted DNS records"
        );
        records.replace(persisted);
    }
}

/// Persists the records soon after each change.
fn persist(data: &DataDir, records: &Records, shutdown: &Shutdown) {
    let Some(mut persisted) = rows(data) else {
        return;
    };
    shutdown.spawn_service(follow(
        records.changed(),
        move |records: Option<Arc<RecordSet>>| {
            if let Some(records) = records {
                let rows = records.iter();
                let rows = rows.map(|(name, addresses)| {
                    (name.as_str().to_owned(), addresses.iter().collect())
                });
                persisted.replace(rows.collect());
            }
        },
    ));
}

/// Returns the rows of the persisted records: addresses by name.
fn rows(data: &DataDir) -> Option<RowSet<String, Vec<IpAddr>>> {
    let store = data.store(OnDamage::Stop);
    let store = store.inspect_err(|error| warn!(%error, "cannot use the persisted DNS records"));
    Some(RowSet::load(&store.ok()?, Table::Records, ""))
}

#[cfg(test)]
mod tests {
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
        let rows = || rows(&scratch.0).unwrap();
        eventually("the rows", || rows().values().len() == 2).await;
        shutdown.finish().await;

        let after = Records::default();
        restore(&scratch.0, &after);
        assert_eq!(*after.load(), set);
        let fed = Records::default();
        fed.replace(records(&[("c", &["10.0.0.3"])]));
        restore(&scratch.0, &fed);
        assert_eq!(fed.load().len(), 1);
    }
}
