//! Tables with shared structure: a clone costs nothing, and a change costs the logarithm of the
//! size, however many clones there are.
//!
//! Readers hold a clone and take no lock. A task that follows a [`VersionedMap`] asks which keys have
//! changed since the clone that it has handled, so its work is in proportion to the change.

use std::borrow::Borrow;
use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::atomic::{AtomicU64, Ordering};

use rpds::RedBlackTreeMapSync;

/// An ordered map whose clones share their entries.
#[derive(Clone)]
pub struct SharedMap<K: Ord, V>(RedBlackTreeMapSync<K, V>);

/// An ordered set whose clones share their entries.
pub type SharedSet<K> = SharedMap<K, ()>;

impl<K: Ord + Clone, V: Clone> SharedMap<K, V> {
    /// Returns the value before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let before = self.get(&key).cloned();
        self.0.insert_mut(key, value);
        before
    }

    /// Returns the value before.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let before = self.get(key).cloned()?;
        self.0.remove_mut(key);
        Some(before)
    }
}

impl<K: Ord, V> SharedMap<K, V> {
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        visits::add_one();
        self.0.get(key)
    }

    /// Returns the key of the map that equals `key`.
    pub fn get_key<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&K>
    where
        K: Borrow<Q>,
    {
        visits::add_one();
        self.0.get_key_value(key).map(|(key, _value)| key)
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// Returns the entry with the smallest key.
    pub fn first(&self) -> Option<(&K, &V)> {
        visits::add_one();
        self.0.first()
    }

    /// Returns the entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().inspect(|_entry| visits::add_one())
    }

    /// Returns the entries with these keys, in their order.
    pub fn range<Q: Ord + ?Sized>(
        &self,
        keys: impl RangeBounds<Q>,
    ) -> impl Iterator<Item = (&K, &V)>
    where
        K: Borrow<Q>,
    {
        self.0.range(keys).inspect(|_entry| visits::add_one())
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _value)| key)
    }

    pub fn len(&self) -> usize {
        self.0.size()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<V> SharedMap<u64, V> {
    fn after(&self, key: u64) -> impl Iterator<Item = &V> {
        let after = (Bound::Excluded(key), Bound::<u64>::Unbounded);
        self.range(after).map(|(_key, value)| value)
    }
}

impl<K: Ord, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self(RedBlackTreeMapSync::default())
    }
}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self.0.iter()).finish()
    }
}

impl<K: Ord, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl<K: Ord, V: Eq> Eq for SharedMap<K, V> {}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        for (key, value) in entries {
            map.0.insert_mut(key, value);
        }
        map
    }
}

/// A map of which a clone says what has changed since an older clone.
#[derive(Debug, Clone)]
pub struct VersionedMap<K: Ord, V> {
    /// Distinguishes the map and its clones from others, whose versions mean nothing to it.
    id: u64,
    /// The values, each with the version of its last change.
    entries: SharedMap<K, (u64, V)>,
    /// The keys of `entries`, by that version.
    changed: SharedMap<u64, K>,
    /// Keys that were removed, each with the version of its removal.
    removed: SharedMap<K, u64>,
    removed_at: SharedMap<u64, K>,
    /// Version of the last change.
    version: u64,
    /// Removals up to this version may be forgotten.
    forgotten: u64,
}

impl<K: Ord + Clone, V: Clone> VersionedMap<K, V> {
    pub fn insert(&mut self, key: K, value: V) {
        self.version += 1;
        if let Some(version) = self.removed.remove(&key) {
            self.removed_at.remove(&version);
        }
        if let Some((version, _value)) = self.entries.insert(key.clone(), (self.version, value)) {
            self.changed.remove(&version);
        }
        self.changed.insert(self.version, key);
    }

    /// Returns the value before.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (version, value) = self.entries.remove(key)?;
        self.changed.remove(&version);
        self.version += 1;
        self.removed.insert(key.clone(), self.version);
        self.removed_at.insert(self.version, key.clone());
        if self.removed.len() > REMOVED_MAX
            && let Some((&version, oldest)) = self.removed_at.first()
        {
            self.removed.remove(&oldest.clone());
            self.removed_at.remove(&version);
            self.forgotten = version;
        }
        Some(value)
    }
}

impl<K: Ord, V> VersionedMap<K, V> {
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(_version, value)| value)
    }

    /// Returns the entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let entries = self.entries.iter();
        entries.map(|(key, (_version, value))| (key, value))
    }

    pub fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Returns the entries with these keys, in their order.
    pub fn range(&self, keys: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        let entries = self.entries.range(keys);
        entries.map(|(key, (_version, value))| (key, value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the keys whose values may differ from those of `older`, each once. Among the clones of
    /// one map they are those of the changes in between; otherwise they are all keys of both.
    pub fn changed_from<'a>(&'a self, older: &'a Self) -> Vec<&'a K> {
        let changed = self.changed_since(older.version);
        if let Some(changed) = changed.filter(|_| self.id == older.id) {
            return changed.collect();
        }
        let gone = older.entries.keys().filter(|key| !self.contains_key(key));
        gone.chain(self.entries.keys()).collect()
    }

    /// Returns the version of the last change, 0 for a map without any.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the keys that were changed or removed since `version` of this map, each once. Returns
    /// `None` if removals since then are forgotten: any key may have changed.
    pub fn changed_since(&self, version: u64) -> Option<impl Iterator<Item = &K>> {
        let is_known = version >= self.forgotten;
        is_known.then(|| {
            let changed = self.changed.after(version);
            changed.chain(self.removed_at.after(version))
        })
    }
}

impl<K: Ord, V> Default for VersionedMap<K, V> {
    fn default() -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            entries: SharedMap::default(),
            changed: SharedMap::default(),
            removed: SharedMap::default(),
            removed_at: SharedMap::default(),
            version: 0,
            forgotten: 0,
        }
    }
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// Removals that a map remembers. Readers are a moment behind, not thousands of removals.
const REMOVED_MAX: usize = 8192;

/// Counts the entries that are looked up, compared and iterated, so that tests can compare the work
/// of one change at several sizes. Only debug builds count.
pub mod visits {
    #[cfg(not(debug_assertions))]
    pub(super) fn add_one() {}

    #[cfg(debug_assertions)]
    pub(super) fn add_one() {
        VISITS.with(|visits| visits.set(visits.get() + 1));
    }

    /// Returns the number of entries that this thread has visited in all tables.
    #[cfg(debug_assertions)]
    pub fn count() -> u64 {
        VISITS.with(std::cell::Cell::get)
    }

    #[cfg(debug_assertions)]
    thread_local! {
        static VISITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    /// Random changes, followed by a reader that misses most of the states in between.
    #[test]
    fn reader_that_handles_what_changed_has_the_map() {
        for seed in 0..50 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut map = VersionedMap::default();
            let (mut expected, mut handled) = (BTreeMap::new(), BTreeMap::new());
            let mut version = map.version();
            for step in 0..500 {
                let key = random.random_range(0..20_u32);
                if random.random_bool(0.6) {
                    map.insert(key, step);
                    expected.insert(key, step);
                } else {
                    assert_eq!(map.remove(&key), expected.remove(&key));
                }
                if random.random_bool(0.1) {
                    let changed: Vec<u32> = map.changed_since(version).unwrap().copied().collect();
                    let once: BTreeSet<u32> = changed.iter().copied().collect();
                    assert_eq!(once.len(), changed.len());
                    for key in changed {
                        match map.get(&key) {
                            Some(value) => handled.insert(key, *value),
                            None => handled.remove(&key),
                        };
                    }
                    version = map.version();
                    assert_eq!(handled, expected, "seed {seed}");
                }
            }
            let entries: Vec<_> = map.iter().map(|(key, value)| (*key, *value)).collect();
            assert_eq!(entries, expected.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn older_clones_stay_as_they_are() {
        let mut map: SharedMap<u32, u32> = (0..100).map(|number| (number, number)).collect();
        let older = map.clone();
        for number in 0..100 {
            map.insert(number, 0);
        }
        map.remove(&7);
        assert!(older.iter().all(|(key, value)| key == value));
        assert_eq!((older.len(), map.len()), (100, 99));
        assert!(map != older && older == older.clone());
    }

    #[test]
    fn forgotten_removals_are_not_taken_for_none() {
        let mut map = VersionedMap::default();
        let count = u32::try_from(REMOVED_MAX).unwrap() + 1;
        for key in 0..count {
            map.insert(key, ());
        }
        let filled = map.version();
        for key in 0..count - 1 {
            map.remove(&key);
        }
        assert_eq!(map.changed_since(filled).unwrap().count(), REMOVED_MAX);
        map.remove(&(count - 1));
        assert!(map.changed_since(filled).is_none());
        assert_eq!(map.changed_since(filled + 1).unwrap().count(), REMOVED_MAX);
        assert_eq!(map.removed.len(), map.removed_at.len());
    }

    #[test]
    fn changes_from_another_map_or_from_a_forgotten_version_are_all_keys_of_both() {
        let map = |keys: std::ops::Range<u32>| {
            let mut map = VersionedMap::default();
            keys.for_each(|key| map.insert(key, ()));
            map
        };
        let older = map(0..3);
        let mut newer = older.clone();
        assert!(newer.changed_from(&older).is_empty());
        newer.insert(7, ());
        newer.remove(&1);
        assert_eq!(newer.changed_from(&older), [&7, &1]);
        assert_eq!(newer.changed_from(&map(4..6)), [&4, &5, &0, &2, &7]);
        for key in 10..20_000 {
            newer.insert(key, ());
            newer.remove(&key);
        }
        assert_eq!(newer.changed_from(&older), [&1, &0, &2, &7]);
    }

    #[test]
    fn change_of_a_large_map_visits_as_many_entries_as_that_of_a_small_one() {
        let visits = |entries: u32| {
            let mut map = VersionedMap::default();
            for key in 0..entries {
                map.insert(key, 0);
            }
            let (clone, version, before) = (map.clone(), map.version(), visits::count());
            map.insert(7, 1);
            let changed: Vec<_> = map.changed_since(version).unwrap().collect();
            assert_eq!((changed, clone.get(&7)), (vec![&7], Some(&0)));
            visits::count() - before
        };
        assert_eq!(visits(1000), visits(20_000));
    }
}
