//! Connections of agents over QUIC, in the store while their sessions are open, because a killed
//! process saves nothing. The next process resets them, so that their agents dial again at once.

use std::net::SocketAddr;

use tracing::warn;
use tunnel_proto::transport::quic::ResetTarget;
use tunnel_proto::wire::enroll::hex;

use tunnel_store::state_store::{RowChange, StateStore, Table};

/// The connections in the store of a data directory.
#[derive(Debug, Clone)]
pub(crate) struct SavedConnections(StateStore);

/// The row of a connection: address and id, by the id in hexadecimal.
type Row = (SocketAddr, [u8; 12]);

impl SavedConnections {
    /// Takes the connections that an earlier process served from the store. Blocks the thread.
    pub(crate) fn take_earlier(store: &StateStore) -> (Self, Vec<ResetTarget>) {
        let earlier = store.load_observed::<Row>(Table::Sessions, "");
        let removed = earlier.keys().map(|key| RowChange::remove(key));
        store.change(Table::Sessions, removed.collect());
        let earlier = earlier.into_values();
        let targets = earlier.map(|(remote, connection_id)| ResetTarget {
            remote,
            connection_id,
        });
        (Self(store.clone()), targets.collect())
    }

    /// Saves a connection until the value is dropped.
    pub(super) fn save(&self, target: ResetTarget) -> SavedConnection {
        let key = hex(&target.connection_id);
        let row: Row = (target.remote, target.connection_id);
        self.0
            .change(Table::Sessions, vec![RowChange::upsert(&key, &row)]);
        SavedConnection {
            store: self.0.clone(),
            key: key.into(),
        }
    }
}

/// Removes the rows that are left after all sessions were closed, and saves that. Their agents need
/// no reset. Blocks the thread, for a few seconds where the file system does not answer.
pub(crate) fn clear(store: &StateStore) {
    if let Err(error) = store.clear(Table::Sessions) {
        warn!(%error, "cannot save the last changes");
    }
}

/// A connection in the store. Dropping the value removes it.
#[derive(Debug)]
pub(super) struct SavedConnection {
    store: StateStore,
    key: Box<str>,
}

impl Drop for SavedConnection {
    fn drop(&mut self) {
        let removed = vec![RowChange::remove(&self.key)];
        self.store.change(Table::Sessions, removed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunnel_store::data_dir::testing::Scratch;
    use tunnel_store::state_store::OnDamage;

    #[test]
    fn connections_are_saved_while_their_sessions_are_open_and_taken_once() {
        let scratch = Scratch::new();
        let store = scratch.0.store(OnDamage::Stop).unwrap();
        let take = || SavedConnections::take_earlier(&store);
        let (connections, earlier) = take();
        assert!(earlier.is_empty());
        let target = |remote: &str, id| ResetTarget {
            remote: remote.parse().unwrap(),
            connection_id: [id; 12],
        };
        let targets = [target("192.0.2.1:4433", 7), target("[2001:db8::1]:4433", 8)];
        let mut open = targets.map(|target| Some(connections.save(target)));
        open[0] = None;
        let (_connections, earlier) = take();
        assert_eq!(earlier, targets[1..]);
        assert!(take().1.is_empty());
        let _saved = targets.map(|target| connections.save(target));
        clear(&store);
        assert!(take().1.is_empty());
    }
}
