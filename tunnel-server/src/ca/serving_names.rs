//! The names and addresses of the TLS door itself: those of this host, and those that the cluster gives it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// Names and addresses that the door's default certificate has. Clones share them.
#[derive(Debug, Clone)]
pub struct ServingNames {
    base: Arc<(Vec<String>, Vec<IpAddr>)>,
    all: Arc<ArcSwap<NameSet>>,
}

/// All of them at one moment.
#[derive(Debug)]
pub(super) struct NameSet {
    pub(super) names: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    /// Counts the changes.
    pub(super) generation: u64,
}

impl ServingNames {
    /// Those that stay for the life of the process.
    #[must_use]
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

    /// Replaces those beside the first ones. Says whether anything changed. Only one task may call this.
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

    /// Whether the name is one of the door's own, whatever its case.
    pub(super) fn has(&self, name: &str) -> bool {
        let all = self.all.load();
        all.names.iter().any(|own| own.eq_ignore_ascii_case(name))
    }

    pub(super) fn load(&self) -> Arc<NameSet> {
        self.all.load_full()
    }
}
