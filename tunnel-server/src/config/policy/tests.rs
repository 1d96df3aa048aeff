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
        "rules: c: destinations: \"pod\"",
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
