//! Test support: data directories, and what most tests name or assert.

use std::fmt::Display;

use tunnel_process::scratch::ScratchDir;
use tunnel_proto::wire::name::NodeName;

use crate::data_dir::DataDir;

/// A data directory for a test, removed on drop.
#[derive(Debug)]
pub struct Scratch(
    pub DataDir,
    #[expect(dead_code, reason = "its drop removes the directory")] ScratchDir,
);

impl Scratch {
    #[expect(
        clippy::new_without_default,
        clippy::unwrap_used,
        reason = "a test fails without its directory"
    )]
    pub fn new() -> Self {
        let scratch = ScratchDir::new().unwrap();
        Self(DataDir::open(scratch.path()).unwrap(), scratch)
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
