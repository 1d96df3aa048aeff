//! A value that may change while the process runs, as a file does.

use std::sync::Arc;

use arc_swap::ArcSwap;

/// The value of this moment. Clones share it: what one replaces, all load from then on.
#[derive(Debug, Default)]
pub struct Followed<T>(Arc<ArcSwap<T>>);

impl<T> Clone for Followed<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> From<T> for Followed<T> {
    fn from(value: T) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(value)))
    }
}

impl<T> Followed<T> {
    /// Returns the value of this moment.
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces the value for everything that loads it later.
    pub fn replace(&self, value: T) {
        self.0.store(Arc::new(value));
    }
}
