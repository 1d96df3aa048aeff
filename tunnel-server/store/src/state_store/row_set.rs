//! Rows that follow values in memory.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::rows::{RowChange, Table};
use super::{StateStore, block_current_thread};

/// The rows of a table whose keys begin with a prefix. Only differences are written.
#[derive(Debug)]
pub struct RowSet<K, T> {
    store: StateStore,
    table: Table,
    prefix: &'static str,
    /// The values in the store, by key without the prefix.
    stored: BTreeMap<K, T>,
}

impl<K, T> RowSet<K, T>
where
    K: Ord + AsRef<str> + From<String>,
    T: PartialEq + Serialize + DeserializeOwned,
{
    /// Loads the rows. Those that cannot be read are missing, and reported as a condition. Blocks
    /// the thread.
    pub fn load(store: &StateStore, table: Table, prefix: &'static str) -> Self {
        let stored = store.load_observed(table, prefix).into_iter();
        Self {
            store: store.clone(),
            table,
            prefix,
            stored: stored.map(|(key, value)| (key.into(), value)).collect(),
        }
    }

    pub fn values(&self) -> &BTreeMap<K, T> {
        &self.stored
    }

    /// Makes the rows follow `values`. Does not wait for the disk.
    pub fn replace(&mut self, values: BTreeMap<K, T>) {
        let key = |key: &K| format!("{}{}", self.prefix, key.as_ref());
        let gone = self.stored.keys().filter(|key| !values.contains_key(*key));
        let mut changes: Vec<_> = gone.map(|gone| RowChange::remove(&key(gone))).collect();
        let changed = values
            .iter()
            .filter(|(key, value)| self.stored.get(*key) != Some(value));
        changes.extend(changed.map(|(changed, value)| RowChange::upsert(&key(changed), value)));
        self.store.change(self.table, changes);
        self.stored = values;
    }
}

/// Calls `apply`, which may take some time, for the value now and soon after each change.
pub async fn follow<S: Clone>(mut source: watch::Receiver<S>, mut apply: impl FnMut(S) + Send) {
    loop {
        let current = source.borrow_and_update().clone();
        block_current_thread(|| apply(current));
        if source.changed().await.is_err() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Changes within this time are compared with the rows together.
const PAUSE: Duration = Duration::from_secs(1);
