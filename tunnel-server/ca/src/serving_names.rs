//! Names and addresses of the HTTPS listener: those of this host, and those that the cluster
//! assigns.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// The names and addresses in the listener's default certificate. Clones share them.
#[derive(Debug, Clone)]
pub struct ServingNames {
    base: Arc<(Vec<String>, Vec<IpAddr>)>,
    all: Arc<ArcSwap<NameSet>>,
}

#[derive(Debug)]
pub(super) struct NameSet {
    pub(super) names: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    /// Number of changes so far.
    pub(super) generation: u64,
}

impl ServingNames {
    /// Creates the set with names and addresses that stay for the life of the process.
    pub fn new(names: Vec<String>, addresses: Vec<IpAddr>) -> Self {
        let own = NameSet {
            names: names.clone(),
            addresses: addresses.clone(),
            generation: 0,
        };
        Self {
            base: Arc::new((names, addresses)),
            all: Arc::new(ArcSwap::from_pointee(own)),
        }
    }

    /// Replaces the names and addresses in addition to the initial ones. Returns `false` if nothing
    /// changed. Only one task may call this.
    pub fn set_additional(&self, names: &BTreeSet<String>, addresses: &BTreeSet<IpAddr>) -> bool {
        let (base_names, base_addresses) = &*self.base;
        let additional = names.iter().filter(|name| !base_names.contains(name));
        let names: Vec<String> = base_names.iter().chain(additional).cloned().collect();
        let additional = addresses.iter().filter(|ip| !base_addresses.contains(ip));
        let addresses: Vec<IpAddr> = base_addresses.iter().chain(additional).copied().collect();
        let last = self.all.load();
        if last.names == names && last.addresses == addresses {
            return false;
        }
        self.all.store(Arc::new(NameSet {
            names,
            addresses,
            generation: last.generation + 1,
        }));
        true
    }

    /// Returns whether the name is one of the listener's own names, ignoring case.
    pub(super) fn has(&self, name: &str) -> bool {
        let all = self.all.load();
        all.names.iter().any(|own| own.eq_ignore_ascii_case(name))
    }

    pub(super) fn load(&self) -> Arc<NameSet> {
        self.all.load_full()
    }
}
