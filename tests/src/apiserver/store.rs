//! Objects in memory with a history, like in etcd: revisions, snapshots of the past, compaction.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;

/// The key of an object: kind, namespace (empty for cluster-scoped objects), name. Collections list
/// in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) storage: &'static str,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// One change of one object.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) revision: u64,
    pub(super) key: Key,
    /// State after the change; `None` for a deletion.
    pub(super) after: Option<Arc<Value>>,
    /// State before the change; `None` for a creation.
    pub(super) before: Option<Arc<Value>>,
}

/// All objects. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Store {
    content: Arc<Mutex<Content>>,
    changed: watch::Sender<u64>,
}

/// The content of the store while it is locked.
#[derive(Debug)]
pub(super) struct Content {
    revision: u64,
    /// Changes up to this revision are compacted.
    compacted: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: VecDeque<Change>,
}

impl Store {
    pub(super) fn new() -> Self {
        let content = Content {
            revision: 1,
            compacted: 0,
            objects: BTreeMap::new(),
            history: VecDeque::new(),
        };
        Self {
            content: Arc::new(Mutex::new(content)),
            changed: watch::Sender::new(1),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read<T>(&self, look: impl FnOnce(&Content) -> T) -> T {
        look(&self.lock())
    }

    /// Changes the content under an exclusive lock.
    pub(super) fn write<T>(&self, change: impl FnOnce(&mut Content) -> T) -> T {
        let mut content = self.lock();
        let result = change(&mut content);
        self.changed.send_replace(content.revision);
        result
    }

    /// Returns a watch of the newest revision.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Compacts the history: watches and lists from before are answered with 410.
    pub(super) fn compact(&self) {
        let mut content = self.lock();
        content.compacted = content.revision;
        content.history.clear();
    }
}

impl Content {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the oldest revision from which changes are known.
    pub(super) fn compacted(&self) -> u64 {
        self.compacted
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// Stores `object` with a new revision, and returns it as stored.
    pub(super) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        let object = Arc::new(object);
        let before = self.objects.insert(key.clone(), Arc::clone(&object));
        let after = Some(Arc::clone(&object));
        self.history.push_back(Change {
            revision: self.revision,
            key,
            after,
            before,
        });
        object
    }

    /// Removes the object and returns its last state.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Value> {
        let before = self.objects.remove(key)?;
        self.revision += 1;
        let last = Value::clone(&before);
        self.history.push_back(Change {
            revision: self.revision,
            key: key.clone(),
            after: None,
            before: Some(before),
        });
        Some(last)
    }

    /// Returns the objects of one kind, in one namespace or in all.
    pub(super) fn collection(
        &self,
        storage: &'static str,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        let namespace = namespace.map(str::to_owned);
        let first = Key {
            storage,
            namespace: namespace.clone().unwrap_or_default(),
            name: String::new(),
        };
        let inside = move |key: &Key| {
            key.storage == storage
                && namespace
                    .as_ref()
                    .is_none_or(|namespace| *namespace == key.namespace)
        };
        self.objects
            .range(first..)
            .take_while(move |(key, _)| inside(key))
    }

    /// Returns the collection at `revision`, which must not be compacted.
    pub(super) fn collection_at(
        &self,
        storage: &'static str,
        namespace: Option<&str>,
        revision: u64,
    ) -> BTreeMap<Key, Arc<Value>> {
        let mut objects: BTreeMap<_, _> = self
            .collection(storage, namespace)
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect();
        for change in self
            .history
            .iter()
            .rev()
            .take_while(|change| change.revision > revision)
        {
            let inside = change.key.storage == storage
                && namespace.is_none_or(|namespace| namespace == change.key.namespace);
            if !inside {
                continue;
            }
            match &change.before {
                Some(before) => objects.insert(change.key.clone(), Arc::clone(before)),
                None => objects.remove(&change.key),
            };
        }
        objects
    }

    /// Returns the changes after `revision`, or `None` if some of them are compacted.
    pub(super) fn changes_after(&self, revision: u64) -> Option<impl Iterator<Item = &Change>> {
        if revision < self.compacted {
            return None;
        }
        let first = self
            .history
            .partition_point(|change| change.revision <= revision);
        Some(self.history.range(first..))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: &str) -> Key {
        Key {
            storage: "nodes",
            namespace: String::new(),
            name: name.into(),
        }
    }

    #[test]
    fn past_collections_are_as_they_were() {
        let store = Store::new();
        let at = store.write(|content| {
            content.put(key("a"), json!({ "metadata": {} }));
            content.put(key("b"), json!({ "metadata": {} }));
            content.revision()
        });
        store.write(|content| {
            content.remove(&key("a"));
            content.put(key("c"), json!({ "metadata": {} }));
            content.put(key("b"), json!({ "metadata": {}, "new": true }));
        });
        store.read(|content| {
            let then = content.collection_at("nodes", None, at);
            assert!(then.keys().eq([&key("a"), &key("b")]), "{then:?}");
            assert!(then[&key("b")]["new"].is_null());
            assert_eq!(content.collection("nodes", None).count(), 2);
        });
    }
}
