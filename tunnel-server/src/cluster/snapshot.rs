//! Snapshot of the last cluster state on disk. A server that starts without the API server serves
//! from it.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tracing::warn;
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;

use crate::cluster::state::{ClusterState, PersistedState};
use crate::store::data_dir::DataDir;

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
pub(super) fn start(data: &DataDir, mut world: watch::Receiver<ClusterState>, shutdown: &Shutdown) {
    let path = data.cluster();
    let mut last = world.borrow().to_persisted();
    shutdown.spawn_service(async move {
        while world.changed().await.is_ok() {
            tokio::time::sleep(PAUSE).await;
            let now = world.borrow_and_update().to_persisted();
            if now == last {
                continue;
            }
            let (path, content) = (path.clone(), now.clone());
            match tokio::task::spawn_blocking(move || save(&path, &content)).await {
                Ok(Ok(())) => last = now,
                Ok(Err(error)) => warn!(%error, "cannot persist the cluster state"),
                Err(error) => warn!(%error, "task that persists the cluster state failed"),
            }
        }
    });
}

fn save(path: &Path, persisted: &PersistedState) -> std::io::Result<()> {
    let content = serde_json::to_vec(persisted).map_err(std::io::Error::other)?;
    files::replace(path, &content)
}
