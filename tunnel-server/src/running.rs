//! Accesses in progress. After a change of the rules an operator can have all of them decided again, and those
//! that are refused then end.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use http::Method;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::routing::access_review::ClusterUser;
use tunnel_routing::policy::TargetAccess;

/// The accesses in progress at this server. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct RunningAccesses(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    accesses: HashMap<u64, Arc<RunningAccess>>,
    /// Number of the next access.
    next: u64,
}

/// An access that was allowed, with what a decision about it needs.
pub struct RunningAccess {
    pub access: TargetAccess,
    /// The caller as a user of the cluster.
    pub cluster_user: Option<Arc<ClusterUser>>,
    /// The method of a request.
    pub method: Option<Method>,
    /// Whether the list `cloud:` still has the target, if it is one of the cloud.
    pub offered: Option<Offered>,
    /// Wakes what carries the access, to end it.
    pub end_signal: Arc<Notify>,
    refused: OnceLock<Refused>,
}

/// Returns why the list `cloud:` has a target no more.
pub type Offered = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The decision that ends an access.
#[derive(Debug)]
pub struct Refused {
    pub reason: String,
    /// The rule that decided, if one did.
    pub rule: Option<Arc<str>>,
}

/// An access in progress, until it is dropped.
#[derive(Debug)]
pub struct RunningGuard {
    all: RunningAccesses,
    number: u64,
    access: Arc<RunningAccess>,
}

impl RunningAccess {
    /// Creates an access. What carries it ends when it is notified by `end_signal`.
    pub fn new(access: TargetAccess, end_signal: Arc<Notify>) -> Self {
        Self {
            access,
            cluster_user: None,
            method: None,
            offered: None,
            end_signal,
            refused: OnceLock::new(),
        }
    }
}

tunnel_process::partial_debug!(RunningAccess { access });

impl RunningAccesses {
    /// Adds an access that begins.
    pub fn begin(&self, access: RunningAccess) -> RunningGuard {
        let access = Arc::new(access);
        let mut table = self.0.lock();
        let number = table.next;
        table.next += 1;
        table.accesses.insert(number, access.clone());
        RunningGuard {
            all: self.clone(),
            number,
            access,
        }
    }

    /// Returns the accesses in progress, by their numbers.
    pub fn all(&self) -> Vec<(u64, Arc<RunningAccess>)> {
        let table = self.0.lock();
        let accesses = table.accesses.iter();
        accesses
            .map(|(number, access)| (*number, access.clone()))
            .collect()
    }

    /// Ends an access that is refused, if it is still in progress. Returns whether it is.
    pub fn end(&self, number: u64, refused: Refused) -> bool {
        // A connection may carry another access next, which must not end.
        let table = self.0.lock();
        let Some(access) = table.accesses.get(&number) else {
            return false;
        };
        access.refused.get_or_init(|| refused);
        access.end_signal.notify_one();
        true
    }
}

impl RunningGuard {
    pub fn access(&self) -> &Arc<RunningAccess> {
        &self.access
    }

    /// Returns why the access has to end, if it does.
    pub fn refused(&self) -> Option<&Refused> {
        self.access.refused.get()
    }
}

impl Refused {
    /// Creates the end of an access for a reason.
    pub fn new(reason: impl fmt::Display, rule: Option<&Arc<str>>) -> Self {
        Self {
            reason: format!("{reason}; {ENDED}"),
            rule: rule.cloned(),
        }
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.all.0.lock().accesses.remove(&self.number);
    }
}

/// Follows the reason in the record of an access that ends.
const ENDED: &str = "the rules have changed, and reload --end-running ends what they refuse";

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tunnel_routing::policy::access_of_agent;

    use super::*;

    #[test]
    fn access_ends_while_it_is_in_progress_and_no_later_one_of_its_connection_does() {
        let (all, end_signal) = (RunningAccesses::default(), Arc::new(Notify::new()));
        let begin = || {
            let access = access_of_agent(&"gw-1".parse().unwrap(), &[]);
            all.begin(RunningAccess::new(access, end_signal.clone()))
        };
        let denied = || Refused::new("rule a denies it", None);
        let first = begin();
        let [(number, _)] = all.all()[..] else {
            panic!("one access");
        };
        drop(first);
        let second = begin();
        assert!(!all.end(number, denied()), "it has ended");
        assert!(end_signal.notified().now_or_never().is_none());
        let [(number, _)] = all.all()[..] else {
            panic!("one access");
        };
        assert!(second.refused().is_none());
        assert!(all.end(number, denied()));
        let reason = &second.refused().unwrap().reason;
        assert!(reason.starts_with("rule a denies it; the rules"));
        assert!(end_signal.notified().now_or_never().is_some());
        drop(second);
        assert!(all.all().is_empty());
    }
}
