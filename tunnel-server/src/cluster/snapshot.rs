//! What the cluster said last, on disk: a server that starts without the API server serves from it.

use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tracing::warn;
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;

use crate::cluster::state::{Kept, World};
use crate::store::data_dir::DataDir;

/// Changes within this time are written together.
const PAUSE: Duration = Duration::from_secs(2);

/// What was kept; nothing when there is no file or it cannot be understood, since the cluster tells it again.
pub(super) fn load(data: &DataDir) -> Kept {
    let path = data.cluster();
    let read = files::read(&path).map_err(|error| error.to_string());
    let kept = read.and_then(|content| match content {
        None => Ok(Kept::default()),
        Some(content) => serde_json::from_slice(&content).map_err(|error| error.to_string()),
    });
    kept.unwrap_or_else(|error| {
        warn!(error, path = %path.display(), "cannot use what was kept of the cluster");
        Kept::default()
    })
}

/// Keeps what is heard, soon after it changes.
pub(super) fn start(data: &DataDir, mut world: watch::Receiver<World>, shutdown: &Shutdown) {
    let path = data.cluster();
    let mut last = world.borrow().keep();
    shutdown.spawn_service(async move {
        while world.changed().await.is_ok() {
            tokio::time::sleep(PAUSE).await;
            let now = world.borrow_and_update().keep();
            if now == last {
                continue;
            }
            let (path, content) = (path.clone(), now.clone());
            match tokio::task::spawn_blocking(move || save(&path, &content)).await {
                Ok(Ok(())) => last = now,
                Ok(Err(error)) => warn!(%error, "cannot keep what the cluster says"),
                Err(error) => warn!(%error, "keeping what the cluster says failed"),
            }
        }
    });
}

fn save(path: &Path, kept: &Kept) -> std::io::Result<()> {
    let content = serde_json::to_vec(kept).map_err(std::io::Error::other)?;
    files::replace(path, &content)
}
