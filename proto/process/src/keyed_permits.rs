//! Permits that are counted by a key, as a node or an address, and in total.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// The permits in use. A key without any needs no memory.
#[derive(Debug)]
pub struct KeyedPermits<K>(Arc<Counts<K>>);

/// The permits of all keys, and of each.
type Counts<K> = Mutex<(usize, HashMap<K, usize>)>;

/// One permit of a key. Dropping it releases it.
#[derive(Debug)]
pub struct KeyedPermit<K: Eq + Hash>(Arc<Counts<K>>, K);

/// The limit that refuses a permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// That of the key.
    Key,
    /// That of all keys together.
    Total,
}

impl<K> Default for KeyedPermits<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Clone + Eq + Hash> KeyedPermits<K> {
    /// Returns a permit, unless `key` has `per_key` in use, or all keys together have `total`.
    ///
    /// # Errors
    /// Returns the limit that is reached.
    pub fn acquire(&self, key: K, per_key: usize, total: usize) -> Result<KeyedPermit<K>, Full> {
        let mut counts = self.0.lock();
        let (all, by_key) = &mut *counts;
        let count = by_key.get(&key).copied().unwrap_or_default();
        if count >= per_key {
            return Err(Full::Key);
        }
        if *all >= total {
            return Err(Full::Total);
        }
        *all += 1;
        by_key.insert(key.clone(), count + 1);
        Ok(KeyedPermit(self.0.clone(), key))
    }

    /// Returns whether no permit is in use, and no key needs memory.
    #[cfg(any(test, feature = "test-util"))]
    pub fn is_empty(&self) -> bool {
        let counts = self.0.lock();
        counts.0 == 0 && counts.1.is_empty()
    }
}

impl<K: Eq + Hash> Drop for KeyedPermit<K> {
    fn drop(&mut self) {
        let mut counts = self.0.lock();
        let (all, by_key) = &mut *counts;
        *all -= 1;
        if let Some(count) = by_key.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                by_key.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_bounded_for_each_key_and_in_total_and_are_released() {
        let permits = KeyedPermits::default();
        let [first, second] = [(); 2].map(|()| permits.acquire("a", 2, 3).unwrap());
        assert_eq!(permits.acquire("a", 2, 3).unwrap_err(), Full::Key);
        let other = permits.acquire("b", 2, 3).unwrap();
        assert_eq!(permits.acquire("b", 2, 3).unwrap_err(), Full::Total);
        drop(first);
        let third = permits.acquire("a", 2, 3).unwrap();
        assert!(!permits.is_empty());
        drop((second, other, third));
        assert!(permits.is_empty());
    }
}
