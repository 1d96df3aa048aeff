//! The snapshot of the last DNS records on disk. After a cold start the server answers from the
//! snapshot until the nodes are known again.

use std::net::IpAddr;
use std::sync::Arc;

use tracing::{info, warn};
use tunnel_dns::{Addresses, RecordSet, Records};
use tunnel_process::shutdown::Shutdown;

use tunnel_store::data_dir::DataDir;
use tunnel_store::state_store::{OnDamage, RowChange, StateStore, Table, follow};

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
    let rows = changed.map(|(record, _before, name)| {
        let addresses = record.map(|addresses| addresses.iter().collect::<Vec<_>>());
        RowChange::of(name.as_str(), addresses.as_ref())
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
    use tunnel_dns::{Node, NodeLocation};
    use tunnel_proto::wire::name::NodeName;

    use super::*;
    use crate::testing::eventually;
    use tunnel_store::data_dir::testing::Scratch;

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
