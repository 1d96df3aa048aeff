//! Snapshot of the last cluster state on disk. A server that starts without the API server serves
//! from it.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;

use crate::cluster::state::{ClusterState, PersistedState};
use crate::store::data_dir::DataDir;
use crate::store::snapshot::Snapshot;

/// Changes within this time are written together.
const PAUSE: Duration = Duration::from_secs(2);

/// Returns the persisted state. Returns the empty state if the file is missing or not valid,
/// because the cluster provides the state again.
pub(super) fn load(data: &DataDir) -> PersistedState {
    let path = data.cluster();
    let read = files::read(&path).map_err(|error| error.to_string());
    let persisted = read.and_then(|content| match content {
        None => Ok(PersistedState::default()),
        Some(content) => serde_json::from_slice(&content).map_err(|error| error.to_string()),
    });
    persisted.unwrap_or_else(|error| {
        warn!(error, path = %path.display(), "cannot load the persisted cluster state; waiting for the API server");
        PersistedState::default()
    })
}

/// Starts the task that persists the state soon after it changes.
pub(super) fn start(data: &DataDir, source: watch::Receiver<ClusterState>, shutdown: &Shutdown) {
    let path = data.cluster();
    let persisted = source.borrow().to_persisted();
    let snapshot = Snapshot::new("cluster state", PAUSE, Some(persisted), move |persisted| {
        save(&path, persisted)
    });
    let state = |state: &ClusterState| Some(state.to_persisted());
    // The state may change until the process stops.
    let never = CancellationToken::new();
    shutdown.spawn_service(snapshot.follow(source, state, never));
}

fn save(path: &Path, persisted: &PersistedState) -> std::io::Result<()> {
    let content = serde_json::to_vec(persisted).map_err(std::io::Error::other)?;
    files::replace(path, &content)
}
