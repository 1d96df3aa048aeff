//! Faults of the listeners for targets of the cloud, and of what leads pods to them.

use super::*;
use crate::doctor::cloud::{CloudFacts, ListenerAnswer, ListenerFacts, RuleFacts, RuleTable};

const PODS: &str = "169.254.2.1:10268";

#[test]
fn fault_of_a_listener_for_the_cloud_is_found() {
    let cases: &[Case] = &[
        (
            |facts| {
                let line = format!("[!] cloud listeners: cannot listen on {PODS}: in use");
                running_agent(facts).readiness.push(line);
            },
            "D16.listen",
            Severity::Error,
            "in use",
        ),
        (
            |facts| pods(facts).answer = ListenerAnswer::Failed("refused".to_owned()),
            "D16.listen",
            Severity::Error,
            "no program listens",
        ),
        (
            |facts| pods(facts).is_on_interface = Some(false),
            "D16.address",
            Severity::Error,
            "so that pods do not reach it",
        ),
        (
            |facts| {
                pods(facts).listener = "dns=169.254.20.11:1053".parse().unwrap();
                pods(facts).answer = ListenerAnswer::Connected;
                pods(facts).is_on_interface = Some(false);
                facts.cloud.rules.table = Ok(None);
            },
            "D16.address",
            Severity::Error,
            "so that the cache of this node does not reach it",
        ),
        (
            |facts| {
                facts.cloud.rules.table = Ok(None);
                pods(facts).answer = ListenerAnswer::Certificate { has_address: false };
            },
            "D16.san",
            Severity::Warning,
            "no SAN 169.254.2.1",
        ),
        (
            |facts| {
                facts.cloud.rules.table = Err("nft: not permitted".to_owned());
                pods(facts).answer = ListenerAnswer::Certificate { has_address: false };
            },
            "D16.san",
            Severity::Info,
            "no SAN 169.254.2.1",
        ),
    ];
    check_cases(cases);
}

#[test]
fn fault_of_the_rules_for_pods_is_found() {
    let cases: &[Case] = &[
        (
            |facts| {
                facts.cloud.rules.is_expected = true;
                facts.cloud.rules.table = Ok(None);
            },
            "D16.nft",
            Severity::Error,
            "the table is missing",
        ),
        (
            |facts| table(facts).chains.truncate(1),
            "D16.nft",
            Severity::Error,
            "no chain is called in output",
        ),
        (
            |facts| table(facts).chains[0].priority = -100,
            "D16.nft",
            Severity::Error,
            "priority -100 in prerouting",
        ),
        (
            |facts| table(facts).chains[1].targets.clear(),
            "D16.nft",
            Severity::Error,
            "output redirects nothing",
        ),
        (
            |facts| table(facts).chains[1].targets[0].set_port(1),
            "D16.nft",
            Severity::Error,
            "output redirects to 169.254.2.1:1, which is not in --cloud-listen",
        ),
        (
            |facts| facts.cloud.data_path = Some("Cilium"),
            "D16.datapath",
            Severity::Warning,
            "Cilium runs on this node",
        ),
    ];
    check_cases(cases);
}

/// Before the first start, another program may have the port.
#[test]
fn program_on_the_address_while_no_agent_runs_is_another_one() {
    let mut facts = healthy();
    facts.agent.answer = AgentAnswer::NotRunning;
    let report = examine(&facts);
    let listen = report
        .findings
        .iter()
        .filter(|found| found.id == "D16.listen");
    assert_eq!(listen.count(), 2, "{:?}", report.findings);
    for listener in &mut facts.cloud.listeners {
        listener.answer = ListenerAnswer::Failed("refused".to_owned());
    }
    let ids: Vec<&str> = examine(&facts)
        .findings
        .iter()
        .map(|found| found.id)
        .collect();
    assert_eq!(ids, ["D20"]);
}

#[test]
fn rules_that_cannot_be_listed_and_a_certificate_that_is_not_seen_are_skipped() {
    let mut facts = healthy();
    facts.cloud.rules = RuleFacts {
        is_expected: true,
        table: Err("nft: not permitted".to_owned()),
    };
    pods(&mut facts).answer = ListenerAnswer::NoCertificate("reset".to_owned());
    let report = examine(&facts);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    let ids: Vec<&str> = report.skipped.iter().map(|skipped| skipped.id).collect();
    assert_eq!(ids, ["D16.nft", "D16.san"]);
}

/// The facts of a node with a listener for programs, one for pods, and the rendered rules.
pub(super) fn healthy_cloud() -> CloudFacts {
    let listener = |address: &str| ListenerFacts {
        listener: format!("apiserver={address}").parse().unwrap(),
        is_on_interface: Some(true),
        answer: ListenerAnswer::Certificate { has_address: false },
    };
    let chain =
        |hook: &str| serde_json::json!({ "chain": { "name": hook, "hook": hook, "prio": -101 } });
    let rule = |chain: &str| {
        let dnat = serde_json::json!({ "dnat": { "addr": "169.254.2.1", "port": 10268 } });
        serde_json::json!({ "rule": { "chain": chain, "expr": [dnat] } })
    };
    let entries = [
        chain("prerouting"),
        chain("output"),
        rule("prerouting"),
        rule("output"),
    ];
    let listed = serde_json::json!({ "nftables": entries }).to_string();
    CloudFacts {
        listeners: vec![listener("127.0.0.1:10268"), listener(PODS)],
        rules: RuleFacts {
            is_expected: false,
            table: RuleTable::parse(listed.as_bytes()).map(Some),
        },
        data_path: None,
    }
}

fn pods(facts: &mut Facts) -> &mut ListenerFacts {
    &mut facts.cloud.listeners[1]
}

fn table(facts: &mut Facts) -> &mut RuleTable {
    facts.cloud.rules.table.as_mut().unwrap().as_mut().unwrap()
}
