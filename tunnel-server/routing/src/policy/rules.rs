//! The rules that say who may do what, as a table of sets: a deny wins, then any allow, and without one
//! the answer is no. All functions are pure.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use tunnel_networks::Cidr;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::ports::PortSet;

use super::caller::{CallerIdentity, UnreadToken};
use super::listener::{Listener, ListenerSet};
use crate::operation::{Operation, OperationSet};
use crate::routes::{RouteNode, RouteSource, RouteTable};

/// The callers and rules in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleTable {
    /// The callers that rules name, at most [`CALLERS_MAX`].
    pub callers: Vec<NamedCaller>,
    pub rules: Vec<Rule>,
    /// Who says what rules read of a node: the cluster, or without one the operator with join tokens.
    pub nodes_from: RouteSource,
}

/// A name for callers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedCaller {
    pub name: Box<str>,
    pub who: CallerMatch,
}

/// The callers that have a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallerMatch {
    /// The common name of a client certificate.
    Certificate(Box<str>),
    /// `NAMESPACE/NAME` of the ServiceAccount of a bearer token that the cluster has reviewed.
    ServiceAccount(Box<str>),
    /// The user of a password.
    User(Box<str>),
    /// The user at the other end of a Unix socket.
    Uid(u32),
    /// The source address of a TCP connection.
    Network(Cidr),
    /// The node of an agent, by the agent's certificate.
    Agent(NodePattern),
}

/// One rule. A set that is `None` contains everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub name: Arc<str>,
    pub effect: Effect,
    pub callers: Option<CallerSet>,
    /// A rule with operations never allows bytes, because nobody reads what they do. The exception is a
    /// rule with [`OperationSet::BYTES`], which allows nothing else.
    pub operations: Option<OperationSet>,
    pub ports: Option<RulePorts>,
    pub listeners: Option<ListenerSet>,
    pub destinations: Option<DestinationSet>,
    /// The rule applies to destinations of these nodes only, and a deny to those without a node. Empty is
    /// all.
    pub nodes: Vec<NodePattern>,
    /// The rule applies to nodes that have, or lack, the edge label, and a deny to those of which that is
    /// not known.
    pub edge: Option<bool>,
    /// The rule applies to nodes with one of these labels, and a deny to those whose labels are not known.
    /// Empty is all.
    pub labels: Vec<RuleLabel>,
}

/// A label of nodes with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleLabel {
    pub key: Box<str>,
    pub value: Box<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Allow,
    Deny,
    /// The authorization of the cluster decides, if no other rule does.
    AskCluster,
}

/// Ports of a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RulePorts {
    pub numbers: PortSet,
    /// The port of the node's kubelet, whatever its number is; in a rule that denies also the one without
    /// authentication.
    pub has_kubelet: bool,
}

tunnel_networks::named! {
    /// The kind of a destination.
    pub enum DestinationKind: ALL, label {
        /// A port of a node, which the caller names.
        Node = "node",
        /// The target of a TCP service.
        Service = "service",
        /// A target that the server dials without an agent.
        Direct = "direct",
        /// A target of the cloud, which an agent names.
        Target = "target",
    }
}

/// What is known of an access when it is decided.
#[derive(Debug, Clone)]
pub struct Facts {
    pub listener: Listener,
    pub identity: CallerIdentity,
    /// The server uses its client certificate for the caller.
    pub has_delegation: bool,
    pub token: UnreadToken,
    /// The source address of the caller, unless it has connected over a Unix socket.
    pub source: Option<IpAddr>,
    pub kind: DestinationKind,
    /// The node of the destination, if it has one.
    pub node: Option<NodeName>,
    /// The node, as the source of the table describes it. `None` if it is not known, or no rule reads it.
    pub described: Option<Arc<RouteNode>>,
    /// `None` if the target has addresses with several ports.
    pub port: Option<Port>,
    /// The port is that of the node's kubelet.
    pub is_kubelet: bool,
    pub operation: Operation,
    /// What the request is to a target that does not take it for an upgrade. Nobody knows whether one
    /// does, so a deny applies to both.
    pub without_upgrade: Operation,
}

impl Facts {
    /// Returns where the access is, for messages.
    pub fn at(&self) -> String {
        match (&self.node, self.port) {
            (Some(node), Some(port)) => format!("{node} port {port}"),
            (None, Some(port)) if self.kind == DestinationKind::Direct => {
                format!("port {port} without an agent")
            }
            (Some(_) | None, _) => "a target of the cloud".to_owned(),
        }
    }
}

/// The answer of a table, with the rule that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<'a> {
    pub verdict: Verdict,
    /// `None` if no rule allows the access.
    pub rule: Option<&'a Rule>,
}

tunnel_networks::named! {
    pub enum Verdict: ALL, label {
        Allow = "allow",
        Deny = "deny",
        /// Allow if the authorization of the cluster does.
        AskCluster = "ask_cluster",
    }
}

impl RuleTable {
    /// Sets what rules read of the node of an access.
    pub fn describe(&self, facts: &mut Facts, routes: &RouteTable) {
        let mut rules = self.rules.iter();
        let is_read = rules.any(|rule| rule.edge.is_some() || !rule.labels.is_empty());
        let node = facts.node.as_ref().filter(|_| is_read);
        let described = node.and_then(|node| routes.node(self.nodes_from, node));
        facts.described = described.cloned();
    }

    /// Decides about an access. Allocates nothing.
    pub fn decide(&self, facts: &Facts) -> Decision<'_> {
        let callers = self.callers_of(facts);
        let possible_callers = callers.union(self.accounts_of(facts.token));
        let mut allowed_by = None;
        let mut asked_by = None;
        for rule in &self.rules {
            let callers = match rule.effect {
                Effect::Deny => possible_callers,
                Effect::Allow | Effect::AskCluster => callers,
            };
            if !rule.matches(facts, callers) {
                continue;
            }
            match rule.effect {
                Effect::Deny => {
                    return Decision {
                        verdict: Verdict::Deny,
                        rule: Some(rule),
                    };
                }
                Effect::Allow => {
                    allowed_by.get_or_insert(rule);
                }
                Effect::AskCluster => {
                    asked_by.get_or_insert(rule);
                }
            }
        }
        let (verdict, rule) = match (allowed_by, asked_by) {
            (Some(rule), _) => (Verdict::Allow, Some(rule)),
            (None, Some(rule)) => (Verdict::AskCluster, Some(rule)),
            (None, None) => (Verdict::Deny, None),
        };
        Decision { verdict, rule }
    }

    /// Returns the classes and names of the caller.
    fn callers_of(&self, facts: &Facts) -> CallerSet {
        let is_anonymous = facts.identity == CallerIdentity::Anonymous;
        let mut callers = CallerSet::default();
        callers.set(CallerClass::Anonymous.bit(), is_anonymous);
        callers.set(CallerClass::Authenticated.bit(), !is_anonymous);
        callers.set(CallerClass::Delegation.bit(), facts.has_delegation);
        callers.set(CallerClass::Token.bit(), facts.token.is_token());
        let has_certificate = matches!(facts.identity, CallerIdentity::Certificate(_));
        callers.set(CallerClass::Certificate.bit(), has_certificate);
        let is_agent = matches!(facts.identity, CallerIdentity::Agent(_));
        callers.set(CallerClass::Agent.bit(), is_agent);
        for (index, caller) in self.callers.iter().enumerate().take(CALLERS_MAX) {
            callers.set(CallerClass::ALL.len() + index, caller.who.matches(facts));
        }
        callers
    }

    /// Returns what the caller may be by a token that nobody has read here: a deny applies to it.
    fn accounts_of(&self, token: UnreadToken) -> CallerSet {
        let mut possible = CallerSet::default();
        possible.set(CallerClass::Token.bit(), token != UnreadToken::None);
        if token.may_be_any_account() {
            for (index, caller) in self.callers.iter().enumerate().take(CALLERS_MAX) {
                let is_account = matches!(caller.who, CallerMatch::ServiceAccount(_));
                possible.set(CallerClass::ALL.len() + index, is_account);
            }
        }
        possible
    }

    /// Returns the set with the caller of this name, which is a class or one of the named callers.
    pub fn caller(&self, name: &str) -> Option<CallerSet> {
        let named = || {
            let mut callers = self.callers.iter().take(CALLERS_MAX);
            callers.position(|caller| &*caller.name == name)
        };
        let bit = match name.parse::<CallerClass>() {
            Ok(class) => class.bit(),
            Err(_no_class) => CallerClass::ALL.len() + named()?,
        };
        let mut set = CallerSet::default();
        set.set(bit, true);
        Some(set)
    }

    /// Returns whether a rule depends on the ServiceAccount of a token.
    pub fn names_account(&self, account: &str) -> bool {
        let mut callers = self.callers.iter();
        callers.any(|caller| matches!(&caller.who, CallerMatch::ServiceAccount(named) if **named == *account))
    }

    /// Returns whether a rule may allow agents to open streams.
    pub fn may_allow_agents(&self) -> bool {
        let mut rules = self.rules.iter();
        rules.any(|rule| {
            rule.effect == Effect::Allow
                && rule.operations.is_none_or(|set| set == OperationSet::BYTES)
                && rule
                    .listeners
                    .is_none_or(|set| set.contains(Listener::Agent))
                && rule
                    .destinations
                    .is_none_or(|set| set.contains(DestinationKind::Target))
        })
    }

    fn caller_names(&self, set: CallerSet) -> String {
        let classes = CallerClass::ALL.iter().map(|class| class.label());
        let names = classes.chain(self.callers.iter().map(|caller| &*caller.name));
        let names = names.enumerate().filter(|(bit, _)| set.has(*bit));
        names.map(|(_, name)| name).collect::<Vec<_>>().join(", ")
    }
}

impl CallerMatch {
    fn matches(&self, facts: &Facts) -> bool {
        match (self, &facts.identity) {
            (Self::Certificate(name), CallerIdentity::Certificate(own)) => **name == **own,
            (Self::User(name), CallerIdentity::User(own)) => **name == **own,
            (Self::Uid(uid), CallerIdentity::Uid(own)) => uid == own,
            (Self::ServiceAccount(name), CallerIdentity::ServiceAccount(own)) => **name == **own,
            (Self::Agent(nodes), CallerIdentity::Agent(own)) => nodes.matches(own),
            (Self::Network(network), _) => facts.source.is_some_and(|ip| network.contains(ip)),
            (
                Self::Certificate(_)
                | Self::User(_)
                | Self::Uid(_)
                | Self::ServiceAccount(_)
                | Self::Agent(_),
                CallerIdentity::Anonymous
                | CallerIdentity::Certificate(_)
                | CallerIdentity::User(_)
                | CallerIdentity::Uid(_)
                | CallerIdentity::ServiceAccount(_)
                | CallerIdentity::Agent(_),
            ) => false,
        }
    }
}

impl Rule {
    /// Returns a rule without conditions.
    pub fn new(name: &str, effect: Effect) -> Self {
        Self {
            name: name.into(),
            effect,
            callers: None,
            operations: None,
            ports: None,
            listeners: None,
            destinations: None,
            nodes: Vec::new(),
            edge: None,
            labels: Vec::new(),
        }
    }

    fn matches(&self, facts: &Facts, callers: CallerSet) -> bool {
        // The cluster has rights for kubelets alone.
        (self.effect != Effect::AskCluster || facts.is_kubelet)
            && self.callers.is_none_or(|set| set.overlaps(callers))
            && self.matches_operation(facts)
            && self
                .listeners
                .is_none_or(|set| set.contains(facts.listener))
            && self.destinations.is_none_or(|set| set.contains(facts.kind))
            && self.matches_port(facts)
            && self.matches_node(facts)
    }

    fn matches_port(&self, facts: &Facts) -> bool {
        let has = |ports: &RulePorts| match facts.port {
            Some(port) => ports.contains(port, facts.is_kubelet, self.effect),
            None => self.effect == Effect::Deny,
        };
        self.ports.as_ref().is_none_or(has)
    }

    /// Nobody knows which node a target without an agent is, nor more of a node than its source says: a deny
    /// applies to what is not known.
    fn matches_node(&self, facts: &Facts) -> bool {
        let unknown = self.effect == Effect::Deny;
        let node = facts.node.as_ref();
        let described = facts.described.as_deref();
        (self.nodes.is_empty() || node.map_or(unknown, |node| self.has_node(node)))
            && self
                .edge
                .is_none_or(|edge| described.map_or(unknown, |node| node.is_edge == edge))
            && (self.labels.is_empty() || described.map_or(unknown, |node| self.has_label(node)))
    }

    /// Nobody knows which operations bytes are: a deny applies to bytes that may be one of its operations.
    fn matches_operation(&self, facts: &Facts) -> bool {
        let Some(operations) = self.operations else {
            return true;
        };
        match (facts.operation, self.effect) {
            (Operation::Connect, Effect::Deny) => operations.may_be_bytes(facts.is_kubelet),
            (Operation::Connect, Effect::Allow | Effect::AskCluster) => {
                operations == OperationSet::BYTES
            }
            (operation, Effect::Deny) => {
                operations.contains(operation) || operations.contains(facts.without_upgrade)
            }
            (operation, Effect::Allow | Effect::AskCluster) => operations.contains(operation),
        }
    }

    fn has_node(&self, node: &NodeName) -> bool {
        self.nodes.iter().any(|pattern| pattern.matches(node))
    }

    fn has_label(&self, node: &RouteNode) -> bool {
        let mut labels = self.labels.iter();
        labels.any(|label| node.labels.get(&label.key) == Some(&label.value))
    }

    /// Returns the rule as in a file, on one line.
    pub fn show(&self, table: &RuleTable) -> String {
        let mut fields = vec![format!("name: {}", self.name)];
        match self.effect {
            Effect::Allow => {}
            Effect::Deny => fields.push("effect: deny".to_owned()),
            Effect::AskCluster => fields.push("authorize: kubernetes".to_owned()),
        }
        let mut list = |key: &str, items: Option<String>| {
            fields.extend(items.map(|items| format!("{key}: [{items}]")));
        };
        list("callers", self.callers.map(|set| table.caller_names(set)));
        list("operations", self.operations.map(|set| set.to_string()));
        list("ports", self.ports.as_ref().map(ToString::to_string));
        list("listeners", self.listeners.map(|set| set.to_string()));
        list("destinations", self.destinations.map(|set| set.to_string()));
        let nodes: Vec<_> = self
            .nodes
            .iter()
            .map(|node| format!("\"{node}\""))
            .collect();
        list("nodes", (!nodes.is_empty()).then(|| nodes.join(", ")));
        let labels: Vec<_> = self.labels.iter().map(ToString::to_string).collect();
        list("labels", (!labels.is_empty()).then(|| labels.join(", ")));
        fields.extend(self.edge.map(|edge| format!("edge: {edge}")));
        format!("{{ {} }}", fields.join(", "))
    }
}

impl RulePorts {
    /// A rule that allows what a kubelet authorizes does not mean the port without authorization.
    fn contains(&self, port: Port, is_kubelet: bool, effect: Effect) -> bool {
        let is_meant = port.get() != READ_ONLY_PORT || effect == Effect::Deny;
        let is_kubelet = is_kubelet && is_meant;
        (self.has_kubelet && is_kubelet) || self.numbers.contains(port)
    }
}

impl fmt::Display for RuleLabel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}={}", self.key, self.value)
    }
}

impl fmt::Display for RulePorts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_numbers = self.numbers.ranges().next().is_some();
        if self.has_kubelet {
            formatter.write_str(if has_numbers { "kubelet, " } else { "kubelet" })?;
        }
        self.numbers.fmt(formatter)
    }
}

tunnel_networks::named! {
    /// Callers that have a name without a line in `callers:`.
    pub enum CallerClass: ALL, label, FromStr {
        /// Without an identity.
        Anonymous = "anonymous",
        /// With an identity that this server, or the cluster, has checked.
        Authenticated = "authenticated",
        /// With client-certificate delegation.
        Delegation = "delegation",
        /// With a bearer token that passes on to the target unread.
        Token = "token",
        /// With a client certificate.
        Certificate = "certificate",
        /// The agent of a node.
        Agent = "agent",
    }
}

impl CallerClass {
    const fn bit(self) -> usize {
        self as usize
    }
}

/// Callers of `callers:` that a table can have: a set is one number, and so is compared in one step.
pub const CALLERS_MAX: usize = u128::BITS as usize - CallerClass::ALL.len();

/// A set of callers of one table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallerSet(u128);

impl CallerSet {
    pub fn of(class: CallerClass) -> Self {
        Self(1 << class.bit())
    }

    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn set(&mut self, bit: usize, is_member: bool) {
        self.0 |= u128::from(is_member) << bit;
    }

    fn has(self, bit: usize) -> bool {
        bit < u128::BITS as usize && self.0 & (1 << bit) != 0
    }

    fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// A set of kinds of destinations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DestinationSet(u8);

impl FromStr for DestinationKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.label() == name);
        found.ok_or_else(|| {
            let advice = match name {
                "pod" => {
                    "callers address no pods, and logs and exec of one are operations at its node"
                }
                _ => "use node, service, direct or target",
            };
            format!("{name:?} is no destination; {advice}")
        })
    }
}

impl FromIterator<DestinationKind> for DestinationSet {
    fn from_iter<T: IntoIterator<Item = DestinationKind>>(kinds: T) -> Self {
        Self(
            kinds
                .into_iter()
                .fold(0, |bits, kind| bits | 1 << kind as u8),
        )
    }
}

impl DestinationSet {
    fn contains(self, kind: DestinationKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }
}

impl fmt::Display for DestinationSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = DestinationKind::ALL.into_iter();
        let kinds = kinds.filter(|kind| self.contains(*kind));
        let names: Vec<_> = kinds.map(DestinationKind::label).collect();
        formatter.write_str(&names.join(", "))
    }
}

/// A node name, in which one `*` stands for any text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePattern {
    start: Box<str>,
    /// What follows the `*`, if there is one.
    end: Option<Box<str>>,
}

/// A text is not a pattern of node names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no pattern of node names; use a name, in which one * stands for any text")]
pub struct NodePatternError(String);

impl NodePattern {
    pub fn matches(&self, node: &NodeName) -> bool {
        let node = node.as_str();
        let Some(end) = &self.end else {
            return node == &*self.start;
        };
        node.len() >= self.start.len() + end.len()
            && node.starts_with(&*self.start)
            && node.ends_with(&**end)
    }
}

impl FromStr for NodePattern {
    type Err = NodePatternError;

    fn from_str(text: &str) -> Result<Self, NodePatternError> {
        let is_part = |part: &str| {
            let mut bytes = part.bytes();
            bytes.all(|byte| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte)
            })
        };
        let text = text.to_ascii_lowercase();
        let (start, end) = match text.split_once('*') {
            Some((start, end)) => (start, Some(end)),
            None => (&*text, None),
        };
        let is_pattern = is_part(start) && end.is_none_or(is_part) && text.len() <= NODE_NAME_MAX;
        if !is_pattern || text.is_empty() {
            return Err(NodePatternError(text));
        }
        Ok(Self {
            start: start.into(),
            end: end.map(Into::into),
        })
    }
}

impl fmt::Display for NodePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.start)?;
        match &self.end {
            Some(end) => write!(formatter, "*{end}"),
            None => Ok(()),
        }
    }
}

/// The kubelet's port without authentication.
const READ_ONLY_PORT: u16 = 10255;
/// Longest DNS subdomain (RFC 1123), in bytes.
const NODE_NAME_MAX: usize = 253;

#[cfg(test)]
mod tests;
