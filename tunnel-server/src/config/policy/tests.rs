//! Rules of a file, and the mistakes in them.

use super::*;
use crate::config::Config;
use crate::config::tests::yaml;

fn policy(text: &str) -> PolicySettings {
    yaml(text).unwrap().policy
}

/// Returns the rules as `policy show` prints them.
fn shown(policy: &PolicySettings) -> Vec<String> {
    let rules = policy.table.rules.iter();
    rules.map(|rule| rule.show(&policy.table)).collect()
}

#[test]
fn rules_of_a_file_are_read_as_they_are_shown() {
    let rules = [
        "{ name: no-shell, effect: deny, operations: [exec, attach, portforward, run], nodes: [\"pay-*\"] }",
        "{ name: scrape, callers: [scrape], operations: [metrics, stats, healthz, read], ports: [kubelet, 9100] }",
        "{ name: ssh, callers: [office, ops], ports: [22], listeners: [connect], destinations: [node] }",
        "{ name: all, callers: [authenticated, delegation] }",
    ];
    let callers = "callers:\n  apiserver: { certificate: kube-apiserver-kubelet-client }\n  \
        office: { network: 10.1.0.0/16 }\n  ops: { user: ops }\n  root: { uid: 0 }\n  \
        scrape: { serviceAccount: monitoring/prometheus-k8s }\n";
    let text = format!("{callers}rules:\n- {}\n", rules.join("\n- "));
    let policy = policy(&text);
    assert_eq!(policy.origin, RuleOrigin::File);
    assert_eq!(shown(&policy), rules);
    let short = text.replace("[exec, attach, portforward, run]", "[shell]");
    let short = short.replace("[metrics, stats, healthz, read]", "[observe, read]");
    assert_eq!(shown(&self::policy(&short)), rules);
}

#[test]
fn without_rules_the_defaults_hold_and_compat_opens_everything_with_a_warning() {
    let defaults = policy("{}");
    assert_eq!(defaults.origin, RuleOrigin::Defaults);
    assert_eq!(
        defaults.table,
        RuleTable::defaults(&DefaultPorts::default())
    );
    let config = yaml("compat: yurt-tunnel").unwrap();
    assert_eq!(shown(&config.policy), ["{ name: compat-yurt-tunnel }"]);
    let warns = |config: &Config| config.warnings.iter().any(|text| text.contains("--compat"));
    assert!(warns(&config) && !warns(&yaml("{}").unwrap()));
    assert!(
        policy("rules: []").table.rules.is_empty(),
        "nothing is allowed"
    );
}

#[test]
fn every_mistake_in_the_rules_is_reported() {
    let text = "compat: frp\ncallers:\n  Ops: { user: ops }\n  token: { user: a }\n  two: { user: a, uid: 1 }\n  \
        none: {}\n  empty: { user: '' }\n  account: { serviceAccount: default }\n  net: { network: 10.0.0.1/8 }\n  \
        uid: { uid: root }\n\
        rules:\n- { name: a, effect: refuse }\n- { name: a }\n- { name: b c }\n\
        - { name: c, callers: [nobody], operations: [logs], ports: [ssh], listeners: [udp], destinations: [pod], nodes: ['a**'] }\n\
        - { name: d, operations: [connect, read] }\n- { name: e, callers: [] }\n\
        - { name: f, authorize: opa }\n- { name: g, authorize: kubernetes, effect: deny }\n";
    let error = yaml(text).unwrap_err();
    for expected in [
        "--compat: \"frp\"",
        "callers: Ops: a name has",
        "callers: token: is the name of a class",
        "callers: two: needs exactly one",
        "callers: none: needs exactly one",
        "callers: empty: is empty",
        "callers: account: serviceAccount: \"default\" is not NAMESPACE/NAME",
        "callers: net: network: the network begins at 10.0.0.0",
        "callers: uid: uid: is not the number",
        "rules: a: effect: \"refuse\"",
        "rules: a: is in the list twice",
        "rules: b c: a name has",
        "rules: c: callers: \"nobody\" is neither in callers nor anonymous",
        "rules: c: operations: \"logs\" is no operation",
        "rules: c: ports: \"ssh\"",
        "rules: c: listeners: \"udp\"",
        "rules: c: destinations: \"pod\" is no destination; callers address no pods",
        "rules: c: nodes: \"a**\"",
        "rules: d: operations: nobody reads what bytes do",
        "rules: e: callers: is empty",
        "rules: f: authorize: \"opa\"",
        "rules: f: authorize: needs a cluster",
        "rules: g: authorize: a rule that denies asks nobody",
    ] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    for (text, expected) in [
        (
            "callers: { a: { user: a } }",
            "callers: have no effect without rules",
        ),
        (
            "{ compat: yurt-tunnel, rules: [{ name: a }] }",
            "--compat: has no effect with rules",
        ),
        ("rules: [{ name: a, action: deny }]", "action"),
    ] {
        let error = yaml(text).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

fn in_cluster(text: &str) -> Result<Config, String> {
    let text = format!("kubeconfig: /etc/kubeconfig\n{text}");
    yaml(&text)
}

#[test]
fn label_that_a_node_can_choose_is_a_mistake_in_a_rule() {
    let rule = |condition: &str| format!("rules: [{{ name: a, effect: deny, {condition} }}]\n");
    let label = "labels: [node-restriction.kubernetes.io/tier=pay]";
    let followed = "nodeLabels: [node-restriction.kubernetes.io/tier, tier]\n";
    let edge = "edgeLabel: node-restriction.kubernetes.io/edge\n";
    let shown_in = |config: Result<Config, String>| shown(&config.unwrap().policy);
    let in_file = format!("{{ name: a, effect: deny, {label} }}");
    assert_eq!(
        shown_in(in_cluster(&(rule(label) + followed))),
        [in_file.as_str()]
    );
    let edges = shown_in(in_cluster(&(rule("edge: true") + edge)));
    assert_eq!(edges, ["{ name: a, effect: deny, edge: true }"]);
    let own = shown_in(yaml(&rule("labels: [tier=pay]")));
    assert_eq!(own, ["{ name: a, effect: deny, labels: [tier=pay] }"]);
    for (config, expected) in [
        (
            in_cluster(&(rule("labels: [tier=pay]") + followed)),
            "rules: a: labels: a kubelet may be able to set tier on its own Node",
        ),
        (
            in_cluster(&rule(label)),
            "node-restriction.kubernetes.io/tier is not stored; add it to --node-label",
        ),
        (
            in_cluster(&rule("edge: true")),
            "rules: a: edge: a kubelet may be able to set openyurt.io/is-edge-worker",
        ),
        (yaml(&rule("edge: true")), "rules: a: edge: needs a cluster"),
        (
            yaml(&rule("edge: perhaps")),
            "\"perhaps\" is neither true nor false",
        ),
        (yaml(&rule("labels: [tier]")), "is not KEY=VALUE"),
        (
            yaml(&(rule("labels: [tier=pay]") + "peers: ['b=127.0.0.1:10269']\n")),
            "rules: a: labels: the label of a join token is at the server that created it",
        ),
    ] {
        let error = config.unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn rules_of_a_dry_run_are_checked_and_have_the_callers_of_the_file_or_their_own() {
    let dry_run = |text: &str| {
        let table = policy(text).dry_run.unwrap();
        let rules = table.rules.iter().map(|rule| rule.show(&table));
        rules.collect::<Vec<_>>()
    };
    let rules = "rules: [{ name: a, callers: [ops] }]";
    let shown = ["{ name: a, callers: [ops] }"];
    let callers = "callers: { ops: { user: ops } }";
    assert_eq!(dry_run(&format!("{callers}\ndryRun: {{ {rules} }}")), shown);
    assert_eq!(dry_run(&format!("dryRun: {{ {callers}, {rules} }}")), shown);
    assert_eq!(policy("{}").dry_run, None);
    let error = yaml(&format!("dryRun: {{ {rules} }}")).unwrap_err();
    assert!(
        error.contains("dryRun: rules: a: callers: \"ops\""),
        "{error}"
    );
    assert!(yaml("dryRun: { callers: {} }").is_err(), "without rules");
}

#[test]
fn rules_that_let_no_agent_reach_the_targets_of_the_cloud_are_a_warning() {
    let warns = |rules: &str| {
        let config = yaml(&format!("cloudApiserver: 'a:6443'\n{rules}")).unwrap();
        config
            .warnings
            .iter()
            .any(|text| text.contains("listeners: [agent]"))
    };
    assert!(!warns("") && !warns("rules: [{ name: a, listeners: [agent] }]"));
    assert!(warns("rules: [{ name: a, listeners: [http] }]"));
    assert!(warns("rules: [{ name: a, operations: [read] }]"));
}
