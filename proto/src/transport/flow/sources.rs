//! Who holds how much: unread bytes by the source of their streams.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::LazyLock;

/// Returns the number that the streams of one source have in common, see
/// [`StreamHeader`](crate::wire::header::StreamHeader). It differs from process to process, so that
/// it says nothing about the source. It is never 0, which is an unknown source.
pub fn source_number(source: &impl Hash) -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEY.hash_one(source).max(1)
}

/// Unread bytes of each source.
#[derive(Debug, Default)]
pub(super) struct SourceTotals(HashMap<u64, u64>);

impl SourceTotals {
    pub(super) fn add(&mut self, source: u64, bytes: u64) {
        let total = self.0.entry(source).or_default();
        *total = total.saturating_add(bytes);
    }

    pub(super) fn of(&self, source: u64) -> u64 {
        self.0.get(&source).copied().unwrap_or_default()
    }

    /// Returns the sources that hold the most: at least half of the mean, and at least `min` bytes. A
    /// source that holds little next to others is none of them.
    pub(super) fn heavy(&self, min: u64) -> HashSet<u64> {
        let total = self
            .0
            .values()
            .fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        let mean = total / (self.0.len() as u64).max(1);
        let is_heavy = |bytes: &u64| *bytes >= min.max(1) && bytes.saturating_mul(2) >= mean;
        self.0
            .iter()
            .filter(|(_, bytes)| is_heavy(bytes))
            .map(|(source, _)| *source)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heavy_sources_hold_half_of_the_mean_and_the_minimum() {
        let heavy = |held: &[u64]| {
            let mut totals = SourceTotals::default();
            for (source, bytes) in (1..).zip(held) {
                totals.add(source, *bytes);
            }
            let mut heavy: Vec<_> = totals.heavy(2).into_iter().collect();
            heavy.sort_unstable();
            heavy
        };
        assert_eq!(heavy(&[]), [0; 0]);
        assert_eq!(heavy(&[0, 1]), [0; 0]);
        assert_eq!(heavy(&[5]), [1]);
        assert_eq!(heavy(&[1_000, 10, 0]), [1]);
        assert_eq!(heavy(&[7, 7, 7]), [1, 2, 3]);
    }
}
