//! Agents over QUIC that an earlier process served. Their addresses are saved while the server runs,
//! because a killed process saves nothing. At start the server resets their connections, so that
//! they dial again at once.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::de::IgnoredAny;
use tracing::{info, warn};
use tunnel_proto::transport::quic::{QuicAcceptor, ResetTarget};
use tunnel_proto::wire::enroll::hex;

use super::context::ServerContext;
use crate::routing::registry::Registry;
use crate::store::state_store::{RowChange, RowSet, StateStore, Table, follow};

/// Maximum number of saved connections. They then have about 10 MiB.
const TARGETS_MAX: usize = 100_000;

/// The saved connections by their ids in hexadecimal.
type SavedTargets = RowSet<String, (SocketAddr, [u8; 12])>;

/// Resets the connections that the store lists, and saves the current ones from then on.
pub(super) fn start(quic: &Arc<QuicAcceptor>, context: &ServerContext) {
    let mut saved = SavedTargets::load(&context.store, Table::Sessions, "");
    let earlier = targets_of(&saved);
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
    let registry = context.registry.clone();
    let changed = registry.changed();
    context
        .shutdown
        .spawn_service(follow(changed, move |_changes| {
            save(&mut saved, &targets(&registry));
        }));
}

/// Removes the saved connections after all sessions were closed. Their agents need no reset.
pub(super) fn clear(store: &StateStore) {
    let saved = store.load_observed::<IgnoredAny>(Table::Sessions, "");
    let removed = saved.keys().map(|key| RowChange::remove(key));
    store.change(Table::Sessions, removed.collect());
    if let Err(error) = store.flush(Table::Sessions) {
        warn!(%error, "cannot save the last changes");
    }
}

/// Returns the connections of the registered sessions, which are all admitted.
fn targets(registry: &Registry) -> Vec<ResetTarget> {
    let agents = registry.all();
    let targets = agents
        .iter()
        .filter_map(|agent| agent.session.reset_target());
    targets.take(TARGETS_MAX).collect()
}

fn targets_of(saved: &SavedTargets) -> Vec<ResetTarget> {
    let saved = saved.values().values().take(TARGETS_MAX);
    let targets = saved.map(|(remote, connection_id)| ResetTarget {
        remote: *remote,
        connection_id: *connection_id,
    });
    targets.collect()
}

fn save(saved: &mut SavedTargets, targets: &[ResetTarget]) {
    let rows = targets.iter().map(|target| {
        let key = hex(&target.connection_id);
        (key, (target.remote, target.connection_id))
    });
    saved.replace(rows.collect());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::data_dir::testing::Scratch;
    use crate::store::state_store::OnDamage;

    #[test]
    fn saved_connections_are_loaded_until_they_are_cleared() {
        let scratch = Scratch::new();
        let store = scratch.0.store(OnDamage::Stop).unwrap();
        let load = || SavedTargets::load(&store, Table::Sessions, "");
        assert!(targets_of(&load()).is_empty());
        let target = |remote: &str, id| ResetTarget {
            remote: remote.parse().unwrap(),
            connection_id: [id; 12],
        };
        let targets = [target("192.0.2.1:4433", 7), target("[2001:db8::1]:4433", 8)];
        save(&mut load(), &targets);
        assert_eq!(targets_of(&load()), targets);
        save(&mut load(), &targets[1..]);
        assert_eq!(targets_of(&load()), targets[1..]);
        clear(&store);
        assert!(targets_of(&load()).is_empty());
    }
}
