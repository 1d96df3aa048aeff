//! Checks of the callers and rules that say who may do what.

use std::collections::BTreeMap;

use tunnel_process::settings::ConfigErrors;
use tunnel_proto::wire::ports::PortSet;

use super::kubernetes::KubernetesSettings;
use super::label_key::is_object_name;
use super::node_label::NodeLabel;
use super::{RawCaller, RawConfig, RawRule};
use tunnel_routing::operation::{Operation, OperationSet};
use tunnel_routing::policy::rules::{
    CALLERS_MAX, CallerClass, CallerMatch, CallerSet, DestinationKind, Effect, NamedCaller,
    NodePattern, Rule, RuleLabel, RulePorts, RuleTable,
};
use tunnel_routing::policy::{DefaultPorts, Listener, Rules};
use tunnel_routing::routes::RouteSource;

/// The rules in force, and where they come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicySettings {
    pub table: RuleTable,
    pub origin: RuleOrigin,
    /// Rules that are tried.
    pub dry_run: Option<RuleTable>,
}

/// The source of the rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RuleOrigin {
    /// Without `rules:`.
    #[default]
    Defaults,
    /// `rules:`, which replace the defaults.
    File,
    /// `--compat yurt-tunnel`.
    YurtTunnel,
}

impl PolicySettings {
    /// Checks `callers:`, `rules:`, `dryRun:` and `--compat`. `ports` is what the rules that hold without a
    /// file depend on.
    pub(super) fn check(
        raw: &RawConfig,
        ports: &DefaultPorts,
        kubernetes: Option<&KubernetesSettings>,
        errors: &mut ConfigErrors,
    ) -> Self {
        let is_compatible = match raw.compat.as_deref() {
            None => false,
            Some(YURT_TUNNEL) => true,
            Some(other) => {
                errors.add(COMPAT, format!("{other:?} is unknown; use {YURT_TUNNEL}"));
                false
            }
        };
        let nodes = NodeFacts {
            kubernetes,
            has_peers: !raw.peers.is_empty(),
        };
        let callers = callers("", raw.callers.as_ref(), errors);
        let dry_run = raw.dry_run.as_ref().map(|tried| {
            let callers = match &tried.callers {
                Some(own) => self::callers(DRY_RUN, Some(own), errors),
                None => callers.clone(),
            };
            table(DRY_RUN, callers, &tried.rules, nodes, errors)
        });
        let Some(rules) = &raw.rules else {
            if !callers.is_empty() && dry_run.is_none() {
                errors.add("callers", "have no effect without rules");
            }
            let (table, origin) = if is_compatible {
                (RuleTable::yurt_tunnel(), RuleOrigin::YurtTunnel)
            } else {
                (RuleTable::defaults(ports), RuleOrigin::Defaults)
            };
            return Self {
                table,
                origin,
                dry_run,
            };
        };
        if is_compatible {
            errors.add(COMPAT, "has no effect with rules; leave one of them out");
        }
        for port in ports.operations.keys() {
            errors.add(
                &format!("ports: {port}: operations"),
                "have no effect with rules; say the operations in a rule",
            );
        }
        Self {
            table: table("", callers, rules, nodes, errors),
            origin: RuleOrigin::File,
            dry_run,
        }
    }

    /// Returns the rules in force, and those that are tried.
    pub fn rules(&self) -> Rules {
        Rules {
            in_force: self.table.clone(),
            dry_run: self.dry_run.clone(),
        }
    }

    /// Returns warnings if the rules allow what yurt-tunnel does, or refuse all targets of the cloud.
    pub(super) fn warnings(&self, has_cloud: bool) -> impl Iterator<Item = String> {
        let is_open = self.origin == RuleOrigin::YurtTunnel;
        let open = is_open.then(|| {
            format!(
                "{COMPAT} {YURT_TUNNEL}: every caller of a listener may do everything at the listed ports, logs and shells of \
                 pods included where the kubelet agrees; replace it by rules (docs/how-to/policy.md)"
            )
        });
        let has_no_way = has_cloud && !self.table.may_allow_agents();
        let refused = has_no_way.then(|| {
            "rules: no rule allows agents to open streams, so they reach no target of \"cloud\" and --cloud-apiserver; add one \
             with listeners: [agent]"
                .to_owned()
        });
        open.into_iter().chain(refused)
    }
}

/// What rules may read of nodes.
#[derive(Debug, Clone, Copy)]
struct NodeFacts<'a> {
    kubernetes: Option<&'a KubernetesSettings>,
    has_peers: bool,
}

/// Checks rules. `prefix` begins the names of their settings.
fn table(
    prefix: &str,
    callers: Vec<NamedCaller>,
    rules: &[RawRule],
    nodes: NodeFacts<'_>,
    errors: &mut ConfigErrors,
) -> RuleTable {
    let mut table = RuleTable {
        callers,
        nodes_from: match nodes.kubernetes {
            Some(_) => RouteSource::Cluster,
            None => RouteSource::Known,
        },
        ..RuleTable::default()
    };
    if rules.len() > RULES_MAX {
        let setting = format!("{prefix}rules");
        errors.add(&setting, format!("at most {RULES_MAX} are supported"));
    }
    for rule in rules.iter().take(RULES_MAX) {
        let setting = format!("{prefix}rules: {}", rule.name);
        let checked = check_rule(&setting, rule, &table, nodes, errors);
        if table.rules.iter().any(|other| other.name == checked.name) {
            errors.add(&setting, "is in the list twice");
        }
        table.rules.push(checked);
    }
    table
}

fn callers(
    prefix: &str,
    raw: Option<&BTreeMap<String, RawCaller>>,
    errors: &mut ConfigErrors,
) -> Vec<NamedCaller> {
    let mut callers = Vec::new();
    for (name, raw) in raw.into_iter().flatten() {
        let setting = format!("{prefix}callers: {name}");
        if !is_name(name) {
            errors.add(&setting, NAME_RULE);
        }
        if name.parse::<CallerClass>().is_ok() {
            errors.add(
                &setting,
                "is the name of a class of callers that always exists",
            );
        }
        if let Some(who) = check_caller(&setting, raw, errors) {
            callers.push(NamedCaller {
                name: name.as_str().into(),
                who,
            });
        }
    }
    if callers.len() > CALLERS_MAX {
        let setting = format!("{prefix}callers");
        errors.add(&setting, format!("at most {CALLERS_MAX} are supported"));
    }
    callers
}

fn check_caller(setting: &str, raw: &RawCaller, errors: &mut ConfigErrors) -> Option<CallerMatch> {
    let account = raw.service_account.as_deref().map(|account| {
        let is_account = account
            .split_once('/')
            .is_some_and(|(namespace, name)| is_name(namespace) && is_object_name(name));
        is_account
            .then(|| CallerMatch::ServiceAccount(account.into()))
            .ok_or_else(|| format!("serviceAccount: {account:?} is not NAMESPACE/NAME"))
    });
    let network = raw.network.as_deref().map(|network| {
        let network = network.parse();
        network
            .map(CallerMatch::Network)
            .map_err(|error| format!("network: {error}"))
    });
    let uid = raw.uid.as_deref().map(|uid| {
        let uid = uid.parse();
        uid.map(CallerMatch::Uid)
            .map_err(|_syntax| "uid: is not the number of a user".to_owned())
    });
    let agent = raw.agent.as_deref().map(|agent| {
        let agent = agent.parse::<NodePattern>();
        agent
            .map(CallerMatch::Agent)
            .map_err(|error| format!("agent: {error}"))
    });
    let text = |text: &Option<String>, who: fn(Box<str>) -> CallerMatch| {
        text.as_deref().map(|text| match text {
            "" => Err("is empty".to_owned()),
            text => Ok(who(text.into())),
        })
    };
    let given = [
        text(&raw.certificate, CallerMatch::Certificate),
        text(&raw.user, CallerMatch::User),
        account,
        network,
        uid,
        agent,
    ];
    let mut given = given.into_iter().flatten();
    let (Some(who), None) = (given.next(), given.next()) else {
        errors.add(
            setting,
            "needs exactly one of certificate, serviceAccount, user, uid, network and agent",
        );
        return None;
    };
    errors.ok_or_record(setting, who)
}

fn check_rule(
    setting: &str,
    raw: &RawRule,
    table: &RuleTable,
    facts: NodeFacts<'_>,
    errors: &mut ConfigErrors,
) -> Rule {
    if !is_name(&raw.name) {
        errors.add(setting, NAME_RULE);
    }
    let effect = effect(setting, raw, facts.kubernetes.is_some(), errors);
    let callers = list(setting, "callers", raw.callers.as_ref(), errors, |name| {
        let known = table.caller(name);
        known.ok_or_else(|| format!("{name:?} is neither in callers nor {}", class_names()))
    });
    let listeners = raw.listeners.as_ref();
    let listeners = list(
        setting,
        "listeners",
        listeners,
        errors,
        str::parse::<Listener>,
    );
    let kinds = raw.destinations.as_ref();
    let kinds = list(
        setting,
        "destinations",
        kinds,
        errors,
        str::parse::<DestinationKind>,
    );
    let nodes = raw.nodes.as_ref();
    let nodes = list(setting, "nodes", nodes, errors, str::parse::<NodePattern>);
    let labels = list(setting, "labels", raw.labels.as_ref(), errors, |text| {
        let label = text.parse()?;
        facts.check_label(&label).map(|()| RuleLabel {
            key: label.key().into(),
            value: label.value().into(),
        })
    });
    let edge = raw.edge.as_deref().map(|text| {
        let edge = text.parse::<bool>();
        let edge = edge.map_err(|_syntax| format!("{text:?} is neither true nor false"))?;
        facts.check_edge().map(|()| edge)
    });
    Rule {
        name: raw.name.as_str().into(),
        effect,
        callers: callers.map(|sets| {
            sets.into_iter()
                .fold(CallerSet::default(), CallerSet::union)
        }),
        operations: operations(setting, raw, effect, errors),
        ports: ports(setting, raw, errors),
        listeners: listeners.map(|listeners| listeners.into_iter().collect()),
        destinations: kinds.map(|kinds| kinds.into_iter().collect()),
        nodes: nodes.unwrap_or_default(),
        edge: edge.and_then(|edge| errors.ok_or_record(&format!("{setting}: edge"), edge)),
        labels: labels.unwrap_or_default(),
    }
}

impl NodeFacts<'_> {
    /// Returns an error if a node can have the label by its own word, or if this server may not know it.
    fn check_label(&self, label: &NodeLabel) -> Result<(), String> {
        let key = label.key();
        let Some(kubernetes) = self.kubernetes else {
            return if self.has_peers {
                let text = "the label of a join token is at the server that created it alone; with --peer name nodes";
                Err(text.to_owned())
            } else {
                Ok(())
            };
        };
        label.check_restricted("decide what rules say about itself")?;
        let mut followed = kubernetes.node_labels.iter();
        if followed.any(|followed| followed.as_str() == key) {
            return Ok(());
        }
        Err(format!(
            "{key} is not stored; add it to --node-label and restart"
        ))
    }

    /// Returns an error if a node can say itself whether it is an edge node.
    fn check_edge(&self) -> Result<(), String> {
        let kubernetes = self.kubernetes.ok_or(
            "needs a cluster, whose edge Nodes have --edge-label; without one all nodes are edge nodes",
        )?;
        let label: NodeLabel = format!("{}=true", kubernetes.edge_label).parse()?;
        label.check_restricted("decide what rules say about itself")
    }
}

fn operations(
    setting: &str,
    raw: &RawRule,
    effect: Effect,
    errors: &mut ConfigErrors,
) -> Option<OperationSet> {
    let named = raw.operations.as_ref();
    let sets = list(setting, "operations", named, errors, |name| {
        let parsed = name.parse::<OperationSet>();
        parsed.map_err(|error| format!("{name:?} {error}"))
    });
    let sets = sets?.into_iter();
    let operations = sets.fold(OperationSet::default(), OperationSet::union);
    let has_more = operations.contains(Operation::Connect) && operations != OperationSet::BYTES;
    if effect != Effect::Deny && has_more {
        errors.add(
            &format!("{setting}: operations"),
            "nobody reads what bytes do: connect stands alone in a rule that allows, with ports and listeners",
        );
    }
    Some(operations)
}

fn effect(setting: &str, raw: &RawRule, has_cluster: bool, errors: &mut ConfigErrors) -> Effect {
    let effect = errors.one_of(
        &format!("{setting}: effect"),
        raw.effect.as_deref().unwrap_or("allow"),
        &[("allow", Effect::Allow), ("deny", Effect::Deny)],
    );
    let effect = effect.unwrap_or(Effect::Deny);
    let Some(authorizer) = raw.authorize.as_deref() else {
        return effect;
    };
    let setting = format!("{setting}: authorize");
    if authorizer != "kubernetes" {
        errors.add(
            &setting,
            format!("{authorizer:?} is unknown; use kubernetes"),
        );
    }
    if effect == Effect::Deny {
        errors.add(&setting, "a rule that denies asks nobody");
    }
    if !has_cluster {
        errors.add(&setting, "needs a cluster (--kubernetes)");
    }
    Effect::AskCluster
}

fn ports(setting: &str, raw: &RawRule, errors: &mut ConfigErrors) -> Option<RulePorts> {
    let parsed = list(setting, "ports", raw.ports.as_ref(), errors, |text| {
        let has_kubelet = text == KUBELET;
        let numbers = if has_kubelet { "" } else { text };
        let numbers: Result<PortSet, String> = numbers.parse();
        numbers.map(|numbers| RulePorts {
            numbers,
            has_kubelet,
        })
    });
    let union = |all: RulePorts, one: RulePorts| RulePorts {
        numbers: all.numbers.union(&one.numbers),
        has_kubelet: all.has_kubelet || one.has_kubelet,
    };
    parsed.map(|parsed| parsed.into_iter().fold(RulePorts::default(), union))
}

/// Checks a list of a rule. A list that is empty would say either everything or nothing.
fn list<T, E: std::fmt::Display>(
    setting: &str,
    key: &str,
    texts: Option<&Vec<String>>,
    errors: &mut ConfigErrors,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Option<Vec<T>> {
    let texts = texts?;
    let setting = format!("{setting}: {key}");
    if texts.is_empty() {
        errors.add(&setting, "is empty; leave it out, which means all");
    }
    Some(errors.parse_list(&setting, texts, parse))
}

/// Returns whether a text is a name of callers, rules and namespaces: a DNS label.
fn is_name(text: &str) -> bool {
    text.len() <= NAME_MAX && !text.contains('.') && is_object_name(text)
}

fn class_names() -> String {
    let names = CallerClass::ALL.map(CallerClass::label);
    names.join(", ")
}

const COMPAT: &str = "--compat";
/// Begins the settings of a dry run.
const DRY_RUN: &str = "dryRun: ";
const YURT_TUNNEL: &str = "yurt-tunnel";
/// The port of a node's kubelet, whatever its number is.
const KUBELET: &str = "kubelet";
const NAME_RULE: &str = "a name has at most 63 of a to z, 0 to 9 and -";
const NAME_MAX: usize = 63;
/// Rules of a file. A decision reads all of them.
const RULES_MAX: usize = 1000;

#[cfg(test)]
mod tests;
