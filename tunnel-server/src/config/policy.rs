//! Checks of the callers and rules that say who may do what.

use std::collections::BTreeMap;

use tunnel_process::settings::ConfigErrors;
use tunnel_proto::wire::ports::PortSet;

use super::{RawCaller, RawConfig, RawRule};
use tunnel_routing::operation::{Operation, OperationSet};
use tunnel_routing::policy::rules::{
    CALLERS_MAX, CallerClass, CallerMatch, CallerSet, DestinationKind, Effect, NamedCaller,
    NodePattern, Rule, RulePorts, RuleTable,
};
use tunnel_routing::policy::{DefaultPorts, Listener};

/// The rules in force, and where they come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicySettings {
    pub table: RuleTable,
    pub origin: RuleOrigin,
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
    /// Checks `callers:`, `rules:` and `--compat`. `ports` is what the rules that hold without a file
    /// depend on.
    pub(super) fn check(
        raw: &RawConfig,
        ports: &DefaultPorts,
        has_cluster: bool,
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
        let mut table = RuleTable {
            callers: callers(raw.callers.as_ref(), errors),
            rules: Vec::new(),
        };
        let Some(rules) = &raw.rules else {
            if !table.callers.is_empty() {
                errors.add("callers", "have no effect without rules");
            }
            let (table, origin) = if is_compatible {
                (RuleTable::yurt_tunnel(), RuleOrigin::YurtTunnel)
            } else {
                (RuleTable::defaults(ports), RuleOrigin::Defaults)
            };
            return Self { table, origin };
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
        if rules.len() > RULES_MAX {
            errors.add("rules", format!("at most {RULES_MAX} are supported"));
        }
        for rule in rules.iter().take(RULES_MAX) {
            let checked = check_rule(rule, &table, has_cluster, errors);
            if table.rules.iter().any(|other| other.name == checked.name) {
                errors.add(&format!("rules: {}", checked.name), "is in the list twice");
            }
            table.rules.push(checked);
        }
        Self {
            table,
            origin: RuleOrigin::File,
        }
    }

    /// Returns a warning if the rules allow what yurt-tunnel does.
    pub(super) fn warning(&self) -> Option<String> {
        let is_open = self.origin == RuleOrigin::YurtTunnel;
        is_open.then(|| {
            format!(
                "{COMPAT} {YURT_TUNNEL}: every caller of a listener may do everything at the listed ports, logs and shells of \
                 pods included where the kubelet agrees; replace it by rules (docs/how-to/policy.md)"
            )
        })
    }
}

fn callers(
    raw: Option<&BTreeMap<String, RawCaller>>,
    errors: &mut ConfigErrors,
) -> Vec<NamedCaller> {
    let mut callers = Vec::new();
    for (name, raw) in raw.into_iter().flatten() {
        let setting = format!("callers: {name}");
        if !is_name(name) {
            errors.add(&setting, NAME_RULE);
        }
        if CallerClass::ALL.iter().any(|class| class.name() == name) {
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
        errors.add("callers", format!("at most {CALLERS_MAX} are supported"));
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
    ];
    let mut given = given.into_iter().flatten();
    let (Some(who), None) = (given.next(), given.next()) else {
        errors.add(
            setting,
            "needs exactly one of certificate, serviceAccount, user, uid and network",
        );
        return None;
    };
    errors.ok_or_record(setting, who)
}

fn check_rule(
    raw: &RawRule,
    table: &RuleTable,
    has_cluster: bool,
    errors: &mut ConfigErrors,
) -> Rule {
    let setting = format!("rules: {}", raw.name);
    if !is_name(&raw.name) {
        errors.add(&setting, NAME_RULE);
    }
    let effect = effect(&setting, raw, has_cluster, errors);
    let operations = list(
        &setting,
        "operations",
        raw.operations.as_ref(),
        errors,
        |name| {
            let parsed: Result<OperationSet, _> = name.parse();
            parsed.map_err(|error| format!("{name:?} {error}"))
        },
    );
    let operations = operations.map(|sets| {
        let sets = sets.into_iter();
        sets.fold(OperationSet::default(), OperationSet::union)
    });
    let has_connect =
        |set: OperationSet| set.contains(Operation::Connect) && set != OperationSet::BYTES;
    if effect != Effect::Deny && operations.is_some_and(has_connect) {
        errors.add(
            &format!("{setting}: operations"),
            "nobody reads what bytes do: connect stands alone in a rule that allows, with ports and listeners",
        );
    }
    let callers = list(&setting, "callers", raw.callers.as_ref(), errors, |name| {
        let known = table.caller(name);
        known.ok_or_else(|| format!("{name:?} is neither in callers nor {}", class_names()))
    });
    let listeners = list(
        &setting,
        "listeners",
        raw.listeners.as_ref(),
        errors,
        |name| name.parse::<Listener>(),
    );
    let destinations = list(
        &setting,
        "destinations",
        raw.destinations.as_ref(),
        errors,
        |name| name.parse::<DestinationKind>(),
    );
    let nodes = list(&setting, "nodes", raw.nodes.as_ref(), errors, |name| {
        name.parse::<NodePattern>()
    });
    Rule {
        name: raw.name.as_str().into(),
        effect,
        callers: callers.map(|sets| {
            sets.into_iter()
                .fold(CallerSet::default(), CallerSet::union)
        }),
        operations,
        ports: ports(&setting, raw, errors),
        listeners: listeners.map(|listeners| listeners.into_iter().collect()),
        destinations: destinations.map(|kinds| kinds.into_iter().collect()),
        nodes: nodes.unwrap_or_default(),
    }
}

fn effect(setting: &str, raw: &RawRule, has_cluster: bool, errors: &mut ConfigErrors) -> Effect {
    let effect = match raw.effect.as_deref() {
        None | Some("allow") => Effect::Allow,
        Some("deny") => Effect::Deny,
        Some(other) => {
            errors.add(
                &format!("{setting}: effect"),
                format!("{other:?} is neither allow nor deny"),
            );
            Effect::Deny
        }
    };
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
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty()
        && text.len() <= NAME_MAX
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_object_name(text: &str) -> bool {
    text.len() <= OBJECT_NAME_MAX && text.split('.').all(is_name)
}

fn class_names() -> String {
    let names = CallerClass::ALL.map(CallerClass::name);
    names.join(", ")
}

const COMPAT: &str = "--compat";
const YURT_TUNNEL: &str = "yurt-tunnel";
/// The port of a node's kubelet, whatever its number is.
const KUBELET: &str = "kubelet";
const NAME_RULE: &str = "a name has at most 63 of a to z, 0 to 9 and -";
const NAME_MAX: usize = 63;
const OBJECT_NAME_MAX: usize = 253;
/// Rules of a file. A decision reads all of them.
const RULES_MAX: usize = 1000;

#[cfg(test)]
mod tests;
