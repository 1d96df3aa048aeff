//! All that decides about accesses, as one value. A change of the file replaces it at once, so that no request
//! meets the ports of one file and the rules of another one.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::caller::CallerIdentity;
use super::dry_run::Rules;
use super::ports::PortLists;
use super::{Denied, OpenedBy, PortPolicy, TargetAccess};
use crate::destination::Destination;
use crate::routes::RouteTable;

/// What decides about accesses. A request uses one value from its begin to its end.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    pub ports: PortPolicy,
    pub rules: Rules,
    /// The destinations of TCP services.
    pub services: Vec<Destination>,
    pub delegation: DelegationPolicy,
}

/// The common names of certificates whose callers have client-certificate delegation.
#[derive(Debug, Clone, Default)]
pub struct DelegationPolicy(BTreeSet<String>);

/// The policy in use. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct SharedPolicy(Arc<ArcSwap<InForce>>);

#[derive(Debug, Clone, Default)]
struct InForce {
    policy: Arc<Policy>,
    /// The lists of the file, while those of a ConfigMap replace them in the policy.
    replaced_lists: Option<PortLists>,
}

impl Policy {
    /// Checks what has to hold before the rules decide about an access, and sets what they read of its node.
    /// An access that has begun is checked again in the same way.
    ///
    /// # Errors
    /// Returns [`Denied`] if no setting opens the target, or the caller has lost its delegation.
    pub fn admit(&self, access: &mut TargetAccess, routes: &RouteTable) -> Result<(), Denied> {
        self.ports.check(access)?;
        let TargetAccess { facts, opened_by } = access;
        if let OpenedBy::Service(destination) = opened_by {
            if !self.services.contains(destination) {
                return Err(Denied::NoService);
            }
            // A caller names the port of a node with what the cluster says of it, and a service does not.
            facts.is_kubelet |= routes.kubelet_port(&destination.node) == facts.port;
        }
        // A request that has begun uses the certificate of the server to its end.
        if facts.has_delegation && !self.delegation.still_admits(&facts.identity) {
            return Err(Denied::NoDelegation);
        }
        self.rules.in_force.describe(facts, routes);
        Ok(())
    }
}

impl From<PortPolicy> for Policy {
    fn from(ports: PortPolicy) -> Self {
        Self {
            ports,
            ..Self::default()
        }
    }
}

impl InForce {
    /// Returns a policy of a file, with the lists of a ConfigMap if there is one.
    fn new(mut policy: Policy, of_cluster: Option<PortLists>) -> Self {
        let lists = &mut policy.ports.settings.lists;
        let replaced_lists = of_cluster.map(|of_cluster| std::mem::replace(lists, of_cluster));
        Self {
            policy: Arc::new(policy),
            replaced_lists,
        }
    }

    /// Returns the lists of the ConfigMap, if there is one.
    fn lists_of_cluster(&self) -> Option<&PortLists> {
        let lists = &self.policy.ports.settings.lists;
        self.replaced_lists.as_ref().map(|_of_file| lists)
    }

    /// Returns the policy of the file.
    fn of_file(&self) -> Policy {
        let mut policy = Policy::clone(&self.policy);
        if let Some(lists) = &self.replaced_lists {
            policy.ports.settings.lists = lists.clone();
        }
        policy
    }
}

impl DelegationPolicy {
    /// Creates a policy for certificates with these common names.
    pub fn named(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().collect())
    }

    /// Returns whether the caller of a verified certificate with this common name has delegation.
    pub fn has_name(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// Returns whether this caller, which had delegation in its handshake, still has it.
    pub fn still_admits(&self, identity: &CallerIdentity) -> bool {
        matches!(identity, CallerIdentity::Certificate(name) if self.has_name(name))
    }
}

impl SharedPolicy {
    pub fn load(&self) -> Arc<Policy> {
        self.0.load().policy.clone()
    }

    /// Returns whether a policy that was loaded is still the one in force.
    pub fn is_in_force(&self, policy: &Policy) -> bool {
        std::ptr::eq(policy, Arc::as_ptr(&self.0.load().policy))
    }

    /// Replaces what a file says, for later requests. The lists of a ConfigMap stay in force.
    pub fn replace(&self, policy: &Policy) {
        self.0
            .rcu(|current| InForce::new(policy.clone(), current.lists_of_cluster().cloned()));
    }

    /// Replaces the lists of the file by those of a ConfigMap, or without one makes them valid again.
    pub fn replace_lists(&self, lists: Option<&PortLists>) {
        if self.0.load().lists_of_cluster() != lists {
            self.0
                .rcu(|current| InForce::new(current.of_file(), lists.cloned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::name::Port;

    use super::*;
    use crate::policy::rules::{Effect, Rule, RuleTable};

    fn ports(http: &str) -> PortPolicy {
        PortPolicy::of_lists(lists(http), Vec::new())
    }

    fn lists(http: &str) -> PortLists {
        PortLists {
            http: http.parse().unwrap(),
            ..PortLists::default()
        }
    }

    /// Returns whether 9100 and 9200 are open, and the name of the first rule.
    fn state(policy: &SharedPolicy) -> (bool, bool, String) {
        let policy = policy.load();
        let is_open = |port| policy.ports.entry(Port::new(port).unwrap()).is_ok();
        let rule = policy.rules.in_force.rules.first();
        let rule = rule.map_or("", |rule| &rule.name);
        (is_open(9100), is_open(9200), rule.to_owned())
    }

    fn file(http: &str, rule: &str) -> Policy {
        Policy {
            rules: Rules::from(RuleTable {
                rules: vec![Rule::new(rule, Effect::Deny)],
                ..RuleTable::default()
            }),
            ..ports(http).into()
        }
    }

    #[test]
    fn lists_of_a_config_map_outlive_the_file_and_those_of_the_file_return() {
        let policy = SharedPolicy::default();
        policy.replace(&file("9100", "first"));
        assert_eq!(state(&policy), (true, false, "first".to_owned()));
        policy.replace_lists(Some(&lists("9200")));
        assert_eq!(state(&policy), (false, true, "first".to_owned()));
        policy.replace(&file("9100", "second"));
        assert_eq!(state(&policy), (false, true, "second".to_owned()));
        policy.replace_lists(Some(&lists("")));
        assert_eq!(state(&policy), (false, false, "second".to_owned()));
        policy.replace_lists(None);
        assert_eq!(state(&policy), (true, false, "second".to_owned()));
        policy.replace(&file("9200", "third"));
        assert_eq!(state(&policy), (false, true, "third".to_owned()));
    }

    /// Neither file allows port 9100: one does not list it, and the other one denies it.
    #[test]
    fn no_request_meets_the_ports_of_one_file_and_the_rules_of_another_one() {
        let policy = SharedPolicy::default();
        let files = [file("9100", "deny"), file("9200", "other")];
        policy.replace(&files[0]);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..20_000 {
                    policy.replace(&files[round % 2]);
                }
            });
            while !writer.is_finished() {
                let (is_open, _, rule) = state(&policy);
                assert!(is_open == (rule == "deny"), "{is_open} {rule}");
            }
        });
    }
}
