//! Test support: data directories, and what most tests name or assert.

use std::fmt::Display;
use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use tunnel_proto::wire::name::NodeName;

use crate::data_dir::DataDir;

/// A data directory for a test, removed on drop.
#[derive(Debug)]
pub struct Scratch(pub DataDir);

impl Scratch {
    #[expect(
        clippy::new_without_default,
        clippy::unwrap_used,
        reason = "a test fails without its directory"
    )]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "culvert-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        let _absent = fs::remove_dir_all(&path);
        Self(DataDir::open(&path).unwrap())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir_all(self.0.path());
    }
}

/// Returns the name of the node that most tests have.
#[expect(clippy::unwrap_used, reason = "the name is valid")]
pub fn node() -> NodeName {
    "worker-1".parse().unwrap()
}

/// Checks that `text` contains `part`.
#[track_caller]
pub fn assert_contains(text: &(impl Display + ?Sized), part: &str) {
    let text = text.to_string();
    assert!(text.contains(part), "{part:?} is not in {text:?}");
}
