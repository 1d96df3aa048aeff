//! Snapshot of the last records on disk. After a cold start the server answers from it until the
//! nodes are known again.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::name::NodeName;

use super::{Addresses, RecordSet, Records};
use crate::store::data_dir::DataDir;
use crate::store::snapshot::Snapshot;

/// Restores the records of the last run, unless records are already present. A damaged file is
/// logged and stays in the directory until the next change replaces it. Blocks the thread.
pub fn restore(data: &DataDir, records: &Records) {
    match read(data) {
        Ok(Some(persisted)) if records.load().is_empty() => {
            info!(
                records = persisted.len(),
                "serving the persisted DNS records"
            );
            records.replace(persisted);
        }
        Ok(_) => {}
        Err(error) => warn!(%error, "cannot load the persisted DNS records"),
    }
}

/// Writes the records to disk soon after each change, and once more when the drain begins.
pub(super) fn persist(data: &DataDir, records: &Records, shutdown: &Shutdown) {
    let persisted = read(data).ok().flatten().unwrap_or_default();
    let data = data.clone();
    let snapshot = Snapshot::new(
        "DNS records",
        SAVE_PAUSE,
        Some(Arc::new(persisted)),
        move |records| write(&data, records),
    );
    let state = |records: &Arc<RecordSet>| Some(records.clone());
    let drain = shutdown.drain().clone();
    shutdown.spawn_service(snapshot.follow(records.changed(), state, drain));
}

fn read(data: &DataDir) -> io::Result<Option<RecordSet>> {
    let path = data.dns_records();
    let Some(content) = files::read(&path)? else {
        return Ok(None);
    };
    let damaged = |why: String| {
        let message = format!("{} is damaged: {why}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, message)
    };
    let persisted: BTreeMap<String, Vec<IpAddr>> =
        serde_json::from_slice(&content).map_err(|error| damaged(error.to_string()))?;
    let mut records = Vec::with_capacity(persisted.len());
    for (name, addresses) in persisted {
        let parsed = name.parse::<NodeName>();
        let name = parsed.map_err(|error| damaged(format!("{name:?}: {error}")))?;
        records.push((name, Addresses::first_of(addresses)));
    }
    Ok(Some(RecordSet::of(records)))
}

fn write(data: &DataDir, records: &RecordSet) -> io::Result<()> {
    let persisted: BTreeMap<&str, Vec<IpAddr>> = records
        .iter()
        .map(|(name, addresses)| (name.as_str(), addresses.iter().collect()))
        .collect();
    let content = serde_json::to_vec(&persisted).map_err(io::Error::other)?;
    files::replace(&data.dns_records(), &content)
}

/// Nodes change in bursts, which are written together.
const SAVE_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::data_dir::testing::Scratch;

    fn records(names: &[(&str, &[&str])]) -> RecordSet {
        RecordSet::of(names.iter().map(|(name, addresses)| {
            let addresses = addresses.iter().map(|text| text.parse().unwrap());
            (name.parse().unwrap(), Addresses::first_of(addresses))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn records_outlive_the_process_and_a_new_feed_wins() {
        let scratch = Scratch::new();
        let before = Records::default();
        let shutdown = Shutdown::new();
        persist(&scratch.0, &before, &shutdown);
        let set = records(&[("a", &["10.0.0.1", "fd00::1"]), ("b", &["10.0.0.2"])]);
        before.replace(set.clone());
        shutdown.drain().cancel();
        shutdown.drain_within(Duration::from_secs(1)).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        shutdown.finish().await;

        let after = Records::default();
        restore(&scratch.0, &after);
        assert_eq!(*after.load(), set);
        let fed = Records::default();
        fed.replace(records(&[("c", &["10.0.0.3"])]));
        restore(&scratch.0, &fed);
        assert_eq!(fed.load().len(), 1);
    }

    #[test]
    fn damaged_files_are_no_records() {
        let scratch = Scratch::new();
        for content in [&b"{"[..], br#"{"a b":["10.0.0.1"]}"#, br#"{"a":["x"]}"#] {
            files::replace(&scratch.0.dns_records(), content).unwrap();
            let error = read(&scratch.0).unwrap_err().to_string();
            assert!(error.contains("dns-records.json is damaged"), "{error}");
            let records = Records::default();
            restore(&scratch.0, &records);
            assert!(records.load().is_empty());
        }
        std::fs::remove_file(scratch.0.dns_records()).unwrap();
        assert!(read(&scratch.0).unwrap().is_none());
    }
}
