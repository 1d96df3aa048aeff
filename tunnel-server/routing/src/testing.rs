//! Assertions of the tests.

use std::fmt::Display;

/// Checks that `text` contains `part`.
#[track_caller]
pub(crate) fn assert_contains(text: &(impl Display + ?Sized), part: &str) {
    let text = text.to_string();
    assert!(text.contains(part), "{part:?} is not in {text:?}");
}
