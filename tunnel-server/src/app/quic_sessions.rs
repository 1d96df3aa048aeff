//! Agents over QUIC that an earlier process served. Their addresses are saved while the server runs,
//! because a killed process saves nothing. At start the server resets their connections, so that
//! they dial again at once.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};
use tunnel_proto::process::files;
use tunnel_proto::transport::quic::{QuicAcceptor, ResetTarget};

use super::context::ServerContext;
use crate::routing::registry::Registry;
use crate::store::data_dir::DataDir;
use crate::store::snapshot::Snapshot;

/// Agents connect and disconnect in bursts, which are written together.
const SAVE_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of saved connections. The file then has about 6 MiB.
const TARGETS_MAX: usize = 100_000;

/// Resets the connections that the data directory lists, and saves the current ones from then on.
pub(super) fn start(quic: &Arc<QuicAcceptor>, context: &ServerContext) {
    let earlier = load(&context.data).unwrap_or_else(|error| {
        warn!(%error, "cannot reset the connections of the previous process; agents over QUIC notice the restart some seconds later");
        Vec::new()
    });
    if !earlier.is_empty() {
        info!(
            count = earlier.len(),
            "resetting the QUIC connections of the previous process"
        );
        let quic = quic.clone();
        context
            .shutdown
            .spawn_service(async move { quic.reset(&earlier).await });
    }
    let (data, registry) = (context.data.clone(), context.registry.clone());
    let changed = registry.changed();
    let snapshot = Snapshot::new(
        "addresses of agents over QUIC",
        SAVE_PAUSE,
        None,
        move |targets: &Vec<ResetTarget>| save(&data, targets),
    );
    let state = move |_changes: &u64| Some(targets(&registry));
    let drain = context.shutdown.drain().clone();
    context
        .shutdown
        .spawn_service(snapshot.follow(changed, state, drain));
}

/// Removes the saved connections after all sessions were closed. Their agents need no reset.
pub(super) fn clear(data: &DataDir) {
    if let Err(error) = std::fs::remove_file(data.quic_sessions())
        && error.kind() != io::ErrorKind::NotFound
    {
        warn!(%error, "cannot remove the list of connections; the next process resets them in vain");
    }
}

/// Returns the connections of the registered sessions, which are all admitted.
fn targets(registry: &Registry) -> Vec<ResetTarget> {
    let mut targets: Vec<ResetTarget> = registry
        .all()
        .iter()
        .filter_map(|agent| agent.session.reset_target())
        .take(TARGETS_MAX)
        .collect();
    // Sessions in another order are no change.
    targets.sort_unstable();
    targets
}

fn load(data: &DataDir) -> io::Result<Vec<ResetTarget>> {
    let path = data.quic_sessions();
    let Some(content) = files::read_secret(&path)? else {
        return Ok(Vec::new());
    };
    let saved: Vec<(SocketAddr, _)> = serde_json::from_slice(&content).map_err(|error| {
        let message = format!("{} is damaged: {error}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, message)
    })?;
    let targets = saved
        .into_iter()
        .take(TARGETS_MAX)
        .map(|(remote, connection_id)| ResetTarget {
            remote,
            connection_id,
        });
    Ok(targets.collect())
}

fn save(data: &DataDir, targets: &[ResetTarget]) -> io::Result<()> {
    let saved: Vec<_> = targets
        .iter()
        .map(|target| (target.remote, target.connection_id))
        .collect();
    let content = serde_json::to_vec(&saved).map_err(io::Error::other)?;
    files::replace(&data.quic_sessions(), &content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::data_dir::testing::Scratch;

    #[test]
    fn saved_connections_are_loaded_and_a_damaged_file_is_an_error() {
        let scratch = Scratch::new();
        assert!(load(&scratch.0).unwrap().is_empty());
        let target = |remote: &str| ResetTarget {
            remote: remote.parse().unwrap(),
            connection_id: [7; 12],
        };
        let targets = [target("192.0.2.1:4433"), target("[2001:db8::1]:4433")];
        save(&scratch.0, &targets).unwrap();
        assert_eq!(load(&scratch.0).unwrap(), targets);
        clear(&scratch.0);
        assert!(load(&scratch.0).unwrap().is_empty());
        clear(&scratch.0);
        for content in [&b"["[..], br#"[["192.0.2.1:4433",[7]]]"#, br#"[["x",[]]]"#] {
            files::replace(&scratch.0.quic_sessions(), content).unwrap();
            let error = load(&scratch.0).unwrap_err().to_string();
            assert!(error.contains("quic-sessions.json is damaged"), "{error}");
        }
    }
}
