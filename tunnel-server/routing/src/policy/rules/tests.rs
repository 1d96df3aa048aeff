//! The table of rules against a model of ten lines, over random tables and facts.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

/// What the documentation says, for each rule on its own.
fn model(table: &RuleTable, facts: &Facts) -> Verdict {
    let matches = |effect: Effect| {
        let rules = table.rules.iter().filter(move |rule| rule.effect == effect);
        rules
            .into_iter()
            .any(|rule| model_matches(table, rule, facts))
    };
    match (
        matches(Effect::Deny),
        matches(Effect::Allow),
        matches(Effect::AskCluster),
    ) {
        (true, ..) => Verdict::Deny,
        (false, true, _) => Verdict::Allow,
        (false, false, true) => Verdict::AskCluster,
        (false, false, false) => Verdict::Deny,
    }
}

/// Reads the rule as it is shown in a file, without the sets of the table.
fn model_matches(table: &RuleTable, rule: &Rule, facts: &Facts) -> bool {
    let text = rule.show(table);
    let list = |key: &str| -> Option<Vec<String>> {
        let (_, after) = text.split_once(&format!("{key}: ["))?;
        let items = after.split_once(']').unwrap().0.split(", ");
        Some(
            items
                .map(|item| item.trim_matches('"').to_owned())
                .collect(),
        )
    };
    let has = |key: &str, is_one: &dyn Fn(&str) -> bool| {
        list(key).is_none_or(|items| items.iter().any(|item| is_one(item)))
    };
    let is_unread = [UnreadToken::OfAny, UnreadToken::Unclear].contains(&facts.token);
    let is_caller = |name: &str| match name {
        "anonymous" => facts.identity == CallerIdentity::Anonymous,
        "authenticated" => facts.identity != CallerIdentity::Anonymous,
        "delegation" => facts.has_delegation,
        "token" => match facts.token {
            UnreadToken::None => false,
            UnreadToken::Unclear => rule.effect == Effect::Deny,
            UnreadToken::OfOther | UnreadToken::OfAny => true,
        },
        "scrape" if is_unread && rule.effect == Effect::Deny => true,
        "scrape" => facts.identity == CallerIdentity::ServiceAccount("m/scrape".into()),
        "certificate" => matches!(facts.identity, CallerIdentity::Certificate(_)),
        "agent" => matches!(facts.identity, CallerIdentity::Agent(_)),
        "gateways" => facts.identity.to_string().starts_with("agent:gw-"),
        "office" => facts.source == Some([10, 1, 0, 1].into()),
        named => facts.identity.to_string().ends_with(&format!(":{named}")),
    };
    let is_operation = |name: &str| match (facts.operation, rule.effect) {
        (Operation::Connect, Effect::Deny) => match name {
            "connect" => true,
            "read" | "write" => !facts.is_kubelet,
            "upgrade" => true,
            _ => facts.is_kubelet,
        },
        (Operation::Connect, _) => text.contains("operations: [connect]"),
        (operation, Effect::Deny) => {
            operation.label() == name || facts.without_upgrade.label() == name
        }
        (operation, _) => operation.label() == name,
    };
    let unknown = rule.effect == Effect::Deny;
    let is_node = |pattern: &str| {
        let Some(node) = &facts.node else {
            return unknown;
        };
        match pattern.split_once('*') {
            Some((start, _)) => node.as_str().starts_with(start),
            None => node.as_str() == pattern,
        }
    };
    let has_label = |label: &str| {
        let Some(node) = &facts.described else {
            return unknown;
        };
        let mut labels = node.labels.iter();
        labels.any(|(key, value)| label == format!("{key}={value}"))
    };
    let is_edge = facts.described.as_ref().map(|node| node.is_edge);
    let edge_fits = [true, false].into_iter().all(|edge| {
        !text.contains(&format!("edge: {edge}")) || is_edge.map_or(unknown, |is| is == edge)
    });
    let asks_nothing = rule.effect == Effect::AskCluster && !facts.is_kubelet;
    !asks_nothing
        && has("callers", &is_caller)
        && has("operations", &is_operation)
        && has("ports", &|port| match facts.port {
            None => unknown,
            Some(own) => {
                port == own.to_string()
                    || (port == "kubelet" && facts.is_kubelet && (own.get() != 10255 || unknown))
            }
        })
        && has("listeners", &|name| name == facts.listener.to_string())
        && has("destinations", &|name| name == facts.kind.label())
        && has("nodes", &is_node)
        && has("labels", &has_label)
        && edge_fits
}

const TOKENS: [UnreadToken; 4] = [
    UnreadToken::None,
    UnreadToken::OfOther,
    UnreadToken::OfAny,
    UnreadToken::Unclear,
];
const NODES: [&str; 3] = ["pay-1", "pay-2", "cam-1"];
const PORTS: [u16; 5] = [10250, 10255, 22, 9100, 8080];

fn table_without_rules() -> RuleTable {
    let named = |name: &str, who| NamedCaller {
        name: name.into(),
        who,
    };
    RuleTable {
        callers: vec![
            named("apiserver", CallerMatch::Certificate("apiserver".into())),
            named("scrape", CallerMatch::ServiceAccount("m/scrape".into())),
            named("ops", CallerMatch::User("ops".into())),
            named(
                "office",
                CallerMatch::Network("10.1.0.0/16".parse().unwrap()),
            ),
            named("gateways", CallerMatch::Agent("gw-*".parse().unwrap())),
            named("0", CallerMatch::Uid(0)),
        ],
        ..RuleTable::default()
    }
}

fn random_rule(table: &RuleTable, random: &mut StdRng) -> Rule {
    let effect = *[
        Effect::Allow,
        Effect::Allow,
        Effect::Deny,
        Effect::AskCluster,
    ]
    .choose(random)
    .unwrap();
    let mut rule = Rule::new("rule", effect);
    if random.random_bool(0.6) {
        let names = [
            "anonymous",
            "authenticated",
            "delegation",
            "token",
            "certificate",
            "apiserver",
            "scrape",
            "ops",
            "office",
            "agent",
            "gateways",
            "0",
        ];
        let set = |name: &&str| table.caller(name).unwrap();
        let first = set(names.choose(random).unwrap());
        rule.callers = Some(first.union(set(names.choose(random).unwrap())));
    }
    if random.random_bool(0.5) {
        let one =
            |random: &mut StdRng| OperationSet::of(&[*Operation::ALL.choose(random).unwrap()]);
        let groups = [
            OperationSet::SHELL,
            OperationSet::OBSERVE,
            OperationSet::GENERIC,
            one(random),
        ];
        rule.operations = Some(groups.choose(random).unwrap().union(one(random)));
    }
    if random.random_bool(0.5) {
        let port = Port::new(*PORTS.choose(random).unwrap());
        rule.ports = Some(RulePorts {
            numbers: PortSet::of(port),
            has_kubelet: random.random(),
        });
    }
    if random.random_bool(0.4) {
        rule.listeners = Some(
            [*Listener::ALL.choose(random).unwrap()]
                .into_iter()
                .collect(),
        );
    }
    if random.random_bool(0.3) {
        rule.destinations = Some(
            [*DestinationKind::ALL.choose(random).unwrap()]
                .into_iter()
                .collect(),
        );
    }
    if random.random_bool(0.4) {
        rule.nodes = vec![
            ["pay-*", "cam-1", "*"]
                .choose(random)
                .unwrap()
                .parse()
                .unwrap(),
        ];
    }
    if random.random_bool(0.3) {
        rule.labels = vec![RuleLabel {
            key: "tier".into(),
            value: (*["pay", "shop"].choose(random).unwrap()).into(),
        }];
    }
    if random.random_bool(0.2) {
        rule.edge = Some(random.random());
    }
    rule
}

/// Returns what is known of a node: nothing, or its edge label with one other label or none.
fn random_description(node: &NodeName, random: &mut StdRng) -> Option<Arc<RouteNode>> {
    let tier = random.random_range(0..4);
    let labels = ["pay", "shop"]
        .get(tier)
        .map(|tier| ("tier".into(), (*tier).into()));
    let described = RouteNode {
        is_edge: random.random(),
        labels: labels.into_iter().collect(),
        ..RouteNode::edge(node.clone(), Vec::new())
    };
    (tier < 3).then(|| described.into())
}

#[test]
fn tables_decide_as_the_model_and_an_added_allow_never_loses_a_deny() {
    check_model(10_000);
}

#[test]
fn hundred_thousand_tables_decide_as_the_model() {
    check_model(100_000);
}

fn check_model(tables: usize) {
    let mut random = StdRng::seed_from_u64(43);
    let nodes = NODES.map(|name| name.parse::<NodeName>().unwrap());
    let identities = [
        CallerIdentity::Anonymous,
        CallerIdentity::Certificate("apiserver".into()),
        CallerIdentity::Certificate("other".into()),
        CallerIdentity::User("ops".into()),
        CallerIdentity::User("other".into()),
        CallerIdentity::ServiceAccount("m/scrape".into()),
        CallerIdentity::ServiceAccount("m/other".into()),
        CallerIdentity::Uid(0),
        CallerIdentity::Uid(1000),
        CallerIdentity::Agent("gw-1".parse().unwrap()),
        CallerIdentity::Agent("cam-1".parse().unwrap()),
    ];
    let mut counts = [0; 3];
    for _ in 0..tables {
        let mut table = table_without_rules();
        for _ in 0..random.random_range(0..6) {
            let rule = random_rule(&table, &mut random);
            table.rules.push(rule);
        }
        let source = *[None, Some([10, 1, 0, 1].into()), Some([10, 2, 0, 1].into())]
            .choose(&mut random)
            .unwrap();
        let node = nodes.choose(&mut random).filter(|_| source.is_some());
        let described = node.and_then(|node| random_description(node, &mut random));
        let port = Port::new(*PORTS.choose(&mut random).unwrap());
        let operation = *Operation::ALL.choose(&mut random).unwrap();
        let without_upgrade = match operation {
            Operation::Upgrade => *Operation::ALL.choose(&mut random).unwrap(),
            other => other,
        };
        let facts = Facts {
            listener: *Listener::ALL.choose(&mut random).unwrap(),
            identity: identities.choose(&mut random).unwrap().clone(),
            has_delegation: random.random(),
            token: *TOKENS.choose(&mut random).unwrap(),
            source,
            kind: *DestinationKind::ALL.choose(&mut random).unwrap(),
            node: node.cloned(),
            described,
            port: port.filter(|_| random.random_bool(0.9)),
            is_kubelet: random.random(),
            operation,
            without_upgrade,
        };
        let decided = table.decide(&facts);
        assert_eq!(
            decided.verdict,
            model(&table, &facts),
            "{table:?} {facts:?}"
        );
        counts[decided.verdict as usize] += 1;
        let is_denied = decided.verdict == Verdict::Deny && decided.rule.is_some();
        let mut more = random_rule(&table, &mut random);
        more.effect = Effect::Allow;
        let was = decided.verdict;
        let at = random.random_range(0..=table.rules.len());
        table.rules.insert(at, more);
        let now = table.decide(&facts).verdict;
        assert!(!is_denied || now == Verdict::Deny, "{table:?} {facts:?}");
        assert!(
            was != Verdict::Allow || now == Verdict::Allow,
            "{table:?} {facts:?}"
        );
    }
    assert!(
        counts.iter().all(|count| *count > tables / 100),
        "{counts:?}"
    );
}

#[test]
fn callers_of_one_name_are_told_apart_by_how_they_proved_it() {
    let table = RuleTable {
        rules: vec![Rule {
            callers: table_without_rules().caller("ops"),
            ..Rule::new("ssh", Effect::Allow)
        }],
        ..table_without_rules()
    };
    for (identity, verdict) in [
        (CallerIdentity::User("ops".into()), Verdict::Allow),
        (CallerIdentity::Certificate("ops".into()), Verdict::Deny),
        (CallerIdentity::ServiceAccount("ops".into()), Verdict::Deny),
        (CallerIdentity::User("prometheus".into()), Verdict::Deny),
        (CallerIdentity::Anonymous, Verdict::Deny),
    ] {
        let facts = Facts {
            listener: Listener::Connect,
            identity: identity.clone(),
            has_delegation: false,
            token: UnreadToken::None,
            source: None,
            kind: DestinationKind::Node,
            node: None,
            described: None,
            port: Port::new(22),
            is_kubelet: false,
            operation: Operation::Connect,
            without_upgrade: Operation::Connect,
        };
        assert_eq!(table.decide(&facts).verdict, verdict, "{identity}");
    }
}

#[test]
fn node_is_described_by_the_source_of_the_table_alone() {
    let node: NodeName = "pay-1".parse().unwrap();
    let of = |tier: &str, is_edge| RouteNode {
        is_edge,
        labels: [("tier".into(), tier.into())].into(),
        ..RouteNode::edge(node.clone(), Vec::new())
    };
    let mut routes = RouteTable::default();
    routes.replace(RouteSource::Known, &node, Some(of("pay", true)));
    let label = |tier: &str| RuleLabel {
        key: "tier".into(),
        value: tier.into(),
    };
    let decided = |nodes_from, effect, tier: &str, routes: &RouteTable| {
        let rule = Rule {
            labels: vec![label(tier)],
            ..Rule::new("labeled", effect)
        };
        let table = RuleTable {
            rules: vec![Rule::new("all", Effect::Allow), rule],
            nodes_from,
            ..RuleTable::default()
        };
        let mut facts = super::super::access_of_agent(&node, &[]).facts;
        facts.node = Some(node.clone());
        table.describe(&mut facts, routes);
        table.decide(&facts).verdict
    };
    let (known, cluster) = (RouteSource::Known, RouteSource::Cluster);
    assert_eq!(decided(known, Effect::Deny, "pay", &routes), Verdict::Deny);
    assert_eq!(
        decided(known, Effect::Deny, "shop", &routes),
        Verdict::Allow
    );
    // Without a Node object nothing is known in a cluster, whatever a join token says.
    assert_eq!(
        decided(cluster, Effect::Deny, "shop", &routes),
        Verdict::Deny
    );
    routes.replace(cluster, &node, Some(of("shop", false)));
    assert_eq!(
        decided(cluster, Effect::Deny, "pay", &routes),
        Verdict::Allow
    );
    assert_eq!(
        decided(cluster, Effect::Deny, "shop", &routes),
        Verdict::Deny
    );
    let gone = RouteTable::default();
    assert_eq!(decided(known, Effect::Deny, "pay", &gone), Verdict::Deny);
    // The node is described for a rule that reads its edge label alone, too.
    let no_edge = Rule {
        edge: Some(true),
        ..Rule::new("no-edge", Effect::Deny)
    };
    let table = RuleTable {
        rules: vec![Rule::new("all", Effect::Allow), no_edge],
        nodes_from: cluster,
        ..RuleTable::default()
    };
    let mut facts = super::super::access_of_agent(&node, &[]).facts;
    facts.node = Some(node.clone());
    table.describe(&mut facts, &routes);
    assert_eq!(table.decide(&facts).verdict, Verdict::Allow);
}

#[test]
fn patterns_of_nodes_are_names_with_one_star() {
    let matches = |pattern: &str, node: &str| {
        pattern
            .parse::<NodePattern>()
            .unwrap()
            .matches(&node.parse().unwrap())
    };
    for (pattern, node, expected) in [
        ("pay-*", "pay-1", true),
        ("pay-*", "repay-1", false),
        ("*-pay", "a-pay", true),
        ("a*a", "a", false),
        ("a*a", "aa", true),
        ("*", "x", true),
        ("Edge-1", "edge-1", true),
        ("edge-1", "edge-11", false),
    ] {
        assert_eq!(matches(pattern, node), expected, "{pattern} {node}");
    }
    for pattern in ["", "a**", "a*b*", "a b", "[ab]", "a/b"] {
        assert!(pattern.parse::<NodePattern>().is_err(), "{pattern}");
    }
}
