//! The page `/readyz?verbose` of a running process.

use super::{Fault, Severity};

/// A condition of the running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition<'a> {
    /// The part of the process that has the condition.
    pub component: &'a str,
    /// What an operator should fix.
    pub text: &'a str,
}

impl Condition<'_> {
    /// Returns the fault that the condition describes.
    pub fn fault(&self, severity: Severity) -> Fault {
        Fault {
            severity,
            place: format!("condition {}", self.component),
            what: self.text.to_owned(),
            fix: "docs/how-to/troubleshooting.md has the conditions and their causes".to_owned(),
        }
    }
}

/// Returns the conditions in the lines of the page.
pub fn conditions(page: &[String]) -> impl Iterator<Item = Condition<'_>> {
    page.iter().filter_map(|line| {
        let (component, text) = line.strip_prefix("[!] ")?.split_once(": ")?;
        Some(Condition { component, text })
    })
}

/// Returns the components in the lines of the page for which the process waits before it is ready.
pub fn waits_for<'a>(page: impl Iterator<Item = &'a str>) -> impl Iterator<Item = &'a str> {
    page.filter_map(|line| line.strip_prefix("[-] "))
}
