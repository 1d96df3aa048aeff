use std::collections::{BTreeMap, BTreeSet};

use tunnel_doctor::{Finding, HostFacts, UdpBuffer};
use tunnel_process::output::OutputFormat;

use super::*;
use crate::admin::doctor::facts::agents::AgentReport;
use crate::admin::doctor::facts::dialed::{Dialed, DialedFacts};
use crate::admin::doctor::facts::kubelets::{KubeletAnswer, KubeletProbe};
use crate::admin::doctor::survey::{NodeSurvey, SurveySettings};
use crate::admin::failures::FailureStatus;
use crate::admin::status::{NodeStatus, VersionSkew};
use crate::cluster::doctor::{
    AddonFacts, ApiServerFacts, ClusterDnsFacts, ClusterFacts, Corefile, NodesFacts,
    PortListsFacts, RecordsFacts, ReportedNode, ServiceFacts,
};
use crate::config::ObjectNames;
use tunnel_store::known_nodes::EnrollmentKind;

mod addons;

const NOW: &str = "2026-01-01T00:00:00Z";

fn node(name: &str) -> NodeStatus {
    NodeStatus {
        node: name.to_owned(),
        connected: true,
        is_edge: true,
        state: Some("live".to_owned()),
        rtt_millis: Some(20),
        certificate_not_after: Some("2026-01-21T00:00:00Z".to_owned()),
        ..NodeStatus::default()
    }
}

/// Returns what a server with these nodes answers.
fn answer(nodes: &[NodeStatus]) -> ServerAnswer {
    answer_with(nodes, &[])
}

/// Returns what a server with these nodes and failures answers.
fn answer_with(nodes: &[NodeStatus], failures: &[FailureStatus]) -> ServerAnswer {
    let mut survey = NodeSurvey::new(SurveySettings {
        only_nodes: Vec::new(),
        renewal_margin: Duration::from_secs(7 * 24 * 60 * 60),
        now: humantime::parse_rfc3339(NOW).unwrap(),
    });
    for failure in failures {
        survey.add_failure(failure);
    }
    for node in nodes {
        survey.add(node);
    }
    ServerAnswer::Nodes(survey)
}

fn corefile(config_map: &str, text: &str) -> Corefile {
    Corefile {
        config_map: config_map.to_owned(),
        text: text.to_owned(),
    }
}

fn reported(name: &str, address: &str) -> ReportedNode {
    ReportedNode {
        name: name.to_owned(),
        hostname: Some(name.to_owned()),
        internal: vec![address.parse().unwrap()],
        is_edge: true,
        kubelet_port: None,
    }
}

fn dialed(address: &str, error: Option<&str>) -> Dialed {
    Dialed {
        address: address.to_owned(),
        error: error.map(str::to_owned),
    }
}

/// A cluster without faults. Its kube-apiserver dials by name.
fn healthy_cluster() -> ClusterFacts {
    let ports = BTreeMap::from([(10250, 10263), (10255, 10264), (9100, 10264)]);
    ClusterFacts {
        namespace: "kube-system".to_owned(),
        names: ObjectNames::default(),
        clock_ahead: Ok(1),
        nodes: Ok(NodesFacts {
            nodes: vec![reported("a", "192.0.2.1"), reported("b", "192.0.2.2")],
            refused: Vec::new(),
        }),
        service_names: Ok(vec!["kubernetes.default".to_owned()]),
        service: Ok(Some(ServiceFacts {
            addresses: vec!["10.96.0.7".parse().unwrap()],
            ports: ports
                .iter()
                .map(|(port, target)| (*port, Some(*target)))
                .collect(),
            expected: ports,
        })),
        ready_endpoints: Ok(2),
        ready_dns_endpoints: Ok(Some(2)),
        records: Ok(RecordsFacts {
            expected: "10.96.0.7\ta\n10.96.0.7\tb".to_owned(),
            written: Some("10.96.0.7\ta\n10.96.0.7\tb".to_owned()),
        }),
        port_lists: Ok(Some(PortListsFacts::default())),
        denied: Ok(Vec::new()),
        apiservers: Ok(vec![ApiServerFacts {
            pod: "kube-apiserver-a".to_owned(),
            address_types: Some("Hostname,InternalIP".to_owned()),
            dns_policy: "None".to_owned(),
            nameservers: vec!["10.96.0.8".to_owned(), "192.0.2.53".to_owned()],
            ..ApiServerFacts::default()
        }]),
        corefiles: Ok(vec![corefile(
            "coredns",
            ".:53 {\n    forward . 10.96.0.8\n}\n",
        )]),
        addons: AddonFacts {
            records_mounts: Ok(Vec::new()),
            cluster_dns: Ok(Some(ClusterDnsFacts::default())),
            server_workloads: Ok(Vec::new()),
            monitors: Ok(Vec::new()),
            yurthub_nodes: Ok(BTreeSet::new()),
            kube_proxy_server: Ok(None),
        },
    }
}

fn healthy() -> Facts {
    let buffer = |setting| UdpBuffer {
        setting,
        bytes: Ok(UDP_BUFFER_BYTES as u64),
    };
    Facts {
        only_nodes: Vec::new(),
        data_dir: "/data".into(),
        server: answer(&[node("a"), node("b")]),
        readiness: Ok(vec!["[+] nodes".to_owned(), "ok".to_owned()]),
        is_pod: true,
        links: vec![Link {
            name: "eth0".to_owned(),
            mtu: MTU_MIN_BYTES,
        }],
        descriptors: Ok(DESCRIPTORS_MIN),
        capacity: String::new(),
        host: HostFacts {
            buffers: vec![buffer("net.core.rmem_max"), buffer("net.core.wmem_max")],
            disk: Ok(None),
            buffer_pool: None,
        },
        credentials: Ok(()),
        cluster: Ok(healthy_cluster()),
        kubelets: Ok(vec![KubeletProbe {
            node: "a".to_owned(),
            port: 10250,
            answer: KubeletAnswer::Certificate { is_for_node: true },
        }]),
        agents: vec![report("a", &[])],
        dialed: DialedFacts {
            own: vec![dialed("127.0.0.1:10262", None)],
            advertised: Vec::new(),
            uncovered: Ok(Vec::new()),
            apiservers: Vec::new(),
            resolvers: Ok(Vec::new()),
            has_dns: true,
        },
    }
}

fn report(node: &str, conditions: &[&str]) -> AgentReport {
    AgentReport {
        node: node.to_owned(),
        conditions: conditions.iter().map(|text| (*text).to_owned()).collect(),
    }
}

#[test]
fn conditions_of_agents_are_named_with_their_nodes() {
    let full = "disk: the disk is full; free some space";
    let found = findings(|facts| facts.agents = vec![report("a", &[full])]);
    ensure_only(&found, "D09", Severity::Warning);
    let text = format!("{found:?}");
    assert!(
        text.contains("the agent reports disk: the disk is full"),
        "{text}"
    );
    assert!(text.contains("tunnel-server diag --node a"), "{text}");
    let both = vec![report("a", &[full]), report("b", &[full])];
    let found = findings(|facts| facts.agents = both);
    ensure_only(&found, "D09", Severity::Warning);
}

/// Returns the findings after a change of the healthy facts.
fn findings(change: impl FnOnce(&mut Facts)) -> Vec<Finding> {
    let mut facts = healthy();
    change(&mut facts);
    examine(&facts).findings
}

/// Returns the findings after a change of the healthy cluster.
fn in_cluster(change: impl FnOnce(&mut ClusterFacts)) -> Vec<Finding> {
    findings(|facts| change(facts.cluster.as_mut().unwrap()))
}

/// Returns the findings after a change of the first node.
fn of_node(change: impl FnOnce(&mut NodeStatus)) -> Vec<Finding> {
    findings(|facts| {
        let mut first = node("a");
        change(&mut first);
        facts.server = answer(&[first, node("b")]);
    })
}

fn ensure_only(findings: &[Finding], id: &str, severity: Severity) {
    assert!(!findings.is_empty(), "{id} is not found");
    for finding in findings {
        assert_eq!(
            (finding.id, finding.severity),
            (id, severity),
            "{finding:?}"
        );
    }
}

#[test]
fn healthy_installation_has_no_finding() {
    let report = examine(&healthy());
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    for (id, text) in [
        (
            "D09",
            "2 of 2 nodes connected; slowest round trip 20 ms (b); first certificate to end in 20 days (a)",
        ),
        ("D22", "no agent failed to connect"),
    ] {
        let mut passed = report.passed.iter();
        let passed = passed.find(|passed| passed.id == id).unwrap();
        let value = passed.value.as_deref().unwrap_or_default();
        assert!(value.contains(text), "{passed:?}");
    }
}

#[test]
fn d22_failures_of_agents_are_found_until_they_are_over() {
    let failure = FailureStatus {
        code: "name_in_use".to_owned(),
        node: Some("a".to_owned()),
        is_verified: true,
        source: "192.0.2.0/24".to_owned(),
        address: "192.0.2.1:5".to_owned(),
        count: 7,
        first: "2025-12-31T23:00:00Z".to_owned(),
        last: "2025-12-31T23:59:00Z".to_owned(),
        detail: "another live agent serves a".to_owned(),
        remedy: "two running agents have this name".to_owned(),
        ..FailureStatus::default()
    };
    let found = |change: &dyn Fn(&mut FailureStatus)| {
        let mut changed = failure.clone();
        change(&mut changed);
        findings(|facts| facts.server = answer_with(&[node("a"), node("b")], &[changed]))
    };
    let cloned = found(&|_| {});
    ensure_only(&cloned, "D22", Severity::Error);
    assert_eq!(cloned[0].place, "a");
    assert!(cloned[0].what.contains("count 7"), "{cloned:?}");
    assert_eq!(cloned[0].fix, failure.remedy);
    ensure_only(
        &found(&|it| it.is_verified = false),
        "D22",
        Severity::Warning,
    );
    let scanner = found(&|it| (it.is_verified, it.is_noise, it.node) = (false, true, None));
    ensure_only(&scanner, "D22", Severity::Info);
    assert_eq!(scanner[0].place, "192.0.2.0/24");
    assert!(found(&|it| it.is_over = true).is_empty());
    assert!(found(&|it| it.last = "2025-12-31T22:00:00Z".to_owned()).is_empty());
    let others = findings(|facts| {
        let failures = (0..500).map(|number| FailureStatus {
            node: Some(format!("n{number}")),
            ..failure.clone()
        });
        facts.server = answer_with(&[], &failures.collect::<Vec<_>>());
    });
    assert_eq!(others.len(), 1, "{others:?}");
    assert_eq!(others[0].objects.count(), 500);
}

/// An operator at the server learns whether the node reaches it at all.
#[test]
fn d09_node_that_is_away_says_whether_connections_of_it_arrive() {
    let away = NodeStatus {
        connected: false,
        last_seen: Some("2025-12-31T23:00:00Z".to_owned()),
        ..node("a")
    };
    let failure = FailureStatus {
        code: "server_untrusted".to_owned(),
        source: "192.0.2.0/24".to_owned(),
        last: "2025-12-31T23:59:00Z".to_owned(),
        nodes_from_address: vec!["a".to_owned()],
        ..FailureStatus::default()
    };
    let health_check = FailureStatus {
        code: "not_tls".to_owned(),
        is_noise: true,
        ..failure.clone()
    };
    let nothing = (
        "no connection with its name has arrived since",
        "its DNS, a proxy or a firewall",
    );
    for (failures, what, fix) in [
        (&[][..], nothing.0, nothing.1),
        (&[health_check][..], nothing.0, nothing.1),
        (&[failure][..], "see D22", "tunnel-server nodes --failed a"),
    ] {
        let found =
            findings(|facts| facts.server = answer_with(std::slice::from_ref(&away), failures));
        let found = found.iter().find(|finding| finding.id == "D09").unwrap();
        assert!(
            found.what.contains(what) && found.fix.contains(fix),
            "{found:?}"
        );
    }
    let pending = findings(|facts| {
        let unused = NodeStatus {
            is_pending: true,
            connected: false,
            ..node("a")
        };
        facts.server = answer(&[unused]);
    });
    ensure_only(&pending, "D09", Severity::Info);
}

#[test]
fn installation_without_a_cluster_skips_what_needs_one() {
    let mut facts = healthy();
    facts.cluster = Err("no cluster".to_owned());
    let report = examine(&facts);
    assert!(report.findings.is_empty(), "{report:?}");
    let ids: Vec<&str> = report.skipped.iter().map(|skipped| skipped.id).collect();
    let expected = [
        "D01", "D02", "D03", "D04", "D05", "D06", "D06", "D07", "D08", "D10", "D11", "D12", "D15",
        "D18",
    ];
    assert_eq!(ids, expected);
}

#[test]
fn conditions_of_the_server_count_where_there_is_no_api_server() {
    for (line, id) in [
        ("[!] service: Service s is missing", "D04"),
        ("[!] writing records: 403", "D05"),
        ("[!] port lists: \"x\" is no port", "D07"),
        ("[!] node names: node \"X\"", "D08"),
    ] {
        let findings = findings(|facts| {
            facts.cluster = Err("refused".to_owned());
            facts.readiness = Ok(vec![line.to_owned()]);
        });
        ensure_only(&findings, id, Severity::Warning);
    }
}

#[test]
fn d01_path_by_address_does_not_lead_to_the_tunnel() {
    let first = |cluster: &mut ClusterFacts, change: fn(&mut ApiServerFacts)| {
        change(&mut cluster.apiservers.as_mut().unwrap()[0]);
    };
    let by_address = in_cluster(|cluster| {
        first(cluster, |it| {
            it.address_types = Some("InternalIP".to_owned())
        });
    });
    ensure_only(&by_address, "D01", Severity::Error);
    let (_, types) = by_address[0]
        .fix
        .split_once("--kubelet-preferred-address-types=")
        .unwrap();
    let fixed = in_cluster(|cluster| {
        cluster.apiservers.as_mut().unwrap()[0].address_types = Some(types.to_owned());
    });
    assert!(fixed.is_empty(), "{fixed:?}");
    let egress = in_cluster(|cluster| {
        first(cluster, |it| {
            it.address_types = Some("InternalIP".to_owned())
        });
        first(cluster, |it| it.egress_selector = Some("/e".to_owned()));
    });
    assert!(egress.is_empty(), "{egress:?}");
}

#[test]
fn d02_resolver_is_none_of_the_host_and_none_of_the_cluster() {
    // The healthy kube-apiserver has what the texts ask for.
    let none = "dnsPolicy: None, and dnsConfig.nameservers with";
    for (policy, servers, fix) in [
        ("ClusterFirstWithHostNet", 2, none),
        ("ClusterFirst", 2, none),
        ("None", 1, "add a second address to dnsConfig.nameservers"),
    ] {
        let findings = in_cluster(|cluster| {
            let apiserver = &mut cluster.apiservers.as_mut().unwrap()[0];
            apiserver.dns_policy = policy.to_owned();
            apiserver.nameservers.truncate(servers);
        });
        ensure_only(&findings, "D02", Severity::Warning);
        assert!(findings[0].fix.starts_with(fix), "{findings:?}");
    }
}

#[test]
fn d03_kubelet_ca_is_pointed_out() {
    let findings = in_cluster(|cluster| {
        cluster.apiservers.as_mut().unwrap()[0].kubelet_ca = Some("/ca.crt".to_owned());
    });
    ensure_only(&findings, "D03", Severity::Info);
}

#[test]
fn d04_service_has_to_lead_to_a_server() {
    let change = |change: fn(&mut ServiceFacts)| {
        in_cluster(|cluster| change(cluster.service.as_mut().unwrap().as_mut().unwrap()))
    };
    for findings in [
        in_cluster(|cluster| cluster.service = Ok(None)),
        in_cluster(|cluster| cluster.ready_endpoints = Ok(0)),
        in_cluster(|cluster| cluster.ready_dns_endpoints = Ok(Some(0))),
        change(|service| service.addresses.clear()),
        change(|service| {
            service.ports.remove(&9100);
        }),
        change(|service| {
            service.ports.insert(10250, Some(1));
        }),
    ] {
        ensure_only(&findings, "D04", Severity::Error);
    }
    let named = change(|service| {
        service.ports.insert(10250, None);
    });
    assert!(named.is_empty(), "{named:?}");
    let without_dns = in_cluster(|cluster| cluster.ready_dns_endpoints = Ok(None));
    assert!(without_dns.is_empty(), "{without_dns:?}");
}

#[test]
fn conditions_of_the_server_count_where_its_objects_cannot_be_read() {
    for (line, id) in [
        ("[!] service: Service s is missing", "D04"),
        ("[!] port lists: \"x\" is no port", "D07"),
    ] {
        let findings = findings(|facts| {
            let cluster = facts.cluster.as_mut().unwrap();
            cluster.service = Err("forbidden".to_owned());
            cluster.port_lists = Err("forbidden".to_owned());
            facts.readiness = Ok(vec![line.to_owned()]);
        });
        ensure_only(&findings, id, Severity::Warning);
    }
}

#[test]
fn kubeconfig_of_an_operator_needs_no_server_on_the_host() {
    let mut facts = healthy();
    facts.server = ServerAnswer::NotRunning;
    facts.readiness = Err("refused".to_owned());
    facts.is_pod = false;
    facts.descriptors = Ok(1024);
    let report = examine(&facts);
    assert!(report.findings.is_empty(), "{report:?}");
    let reasons = report.skipped.iter().map(|skipped| &skipped.reason);
    let elsewhere = reasons.filter(|reason| reason.contains("/data, so the server is elsewhere"));
    assert_eq!(elsewhere.count(), 2, "{report:?}");
    facts.cluster = Err("refused".to_owned());
    let report = examine(&facts);
    assert!(
        report.findings.iter().any(|finding| finding.id == "D09"),
        "{report:?}"
    );
}

#[test]
fn d05_records_are_missing_stale_or_repeated() {
    for (written, what) in [
        (None, "has no records"),
        (Some("10.96.0.7\ta"), "missing: 1 (10.96.0.7 b)"),
        (Some("10.96.0.7\ta\n10.96.0.7\tb\n10.96.0.6\tc"), "stale: 1"),
        (Some("10.96.0.7\ta\n10.96.0.7\ta\n10.96.0.7\tb"), "twice: 1"),
    ] {
        let findings = in_cluster(|cluster| {
            cluster.records.as_mut().unwrap().written = written.map(str::to_owned);
        });
        ensure_only(&findings, "D05", Severity::Error);
        assert!(findings[0].what.contains(what), "{findings:?}");
    }
}

#[test]
fn d06_hosts_block_needs_fallthrough() {
    for (map, line, fix) in [
        ("coredns", "ttl 5", "kubectl replace"),
        (
            "coredns",
            "fallthrough cluster.local",
            "edit configmap coredns",
        ),
        ("rke2-coredns-rke2-coredns", "ttl 5", "HelmChartConfig"),
        ("coredns-custom", "ttl 5", "edit configmap coredns-custom"),
    ] {
        let text =
            format!(".:53 {{\n    hosts /etc/edge/tunnel-nodes {{\n        {line}\n    }}\n}}\n");
        let findings = in_cluster(|cluster| cluster.corefiles = Ok(vec![corefile(map, &text)]));
        ensure_only(&findings, "D06", Severity::Error);
        assert!(findings[0].fix.contains(fix), "{findings:?}");
        assert!(findings[0].place.ends_with(map), "{findings:?}");
    }
}

/// Nothing that cannot be read is "0 errors".
#[test]
fn d11_kubeconfig_that_cannot_be_read_is_an_error() {
    let unreadable = findings(|facts| {
        facts.credentials = Err("--kubeconfig: /x: not YAML".to_owned());
        facts.cluster = Err("--kubeconfig: /x: not YAML".to_owned());
    });
    ensure_only(&unreadable, "D11", Severity::Error);
}

#[test]
fn d07_mistakes_and_ports_in_both_lists_are_found() {
    for lists in [
        PortListsFacts {
            mistakes: vec!["\"x\" is not a port".to_owned()],
            ..PortListsFacts::default()
        },
        PortListsFacts {
            in_both: vec![9100],
            ..PortListsFacts::default()
        },
    ] {
        let findings = in_cluster(|cluster| cluster.port_lists = Ok(Some(lists)));
        ensure_only(&findings, "D07", Severity::Warning);
    }
}

#[test]
fn d08_shared_addresses_and_names_are_found() {
    let change =
        |change: fn(&mut NodesFacts)| in_cluster(|cluster| change(cluster.nodes.as_mut().unwrap()));
    let shared = change(|nodes| nodes.nodes.push(reported("c", "192.0.2.1")));
    ensure_only(&shared, "D08", Severity::Info);
    assert!(shared[0].what.ends_with("a, c"), "{shared:?}");
    let by_address = in_cluster(|cluster| {
        let nodes = cluster.nodes.as_mut().unwrap();
        nodes.nodes.push(reported("c", "192.0.2.1"));
        let apiserver = &mut cluster.apiservers.as_mut().unwrap()[0];
        apiserver.address_types = Some("InternalIP".to_owned());
    });
    let of_address = by_address.iter().find(|finding| finding.id == "D08");
    assert_eq!(
        of_address.unwrap().severity,
        Severity::Warning,
        "{by_address:?}"
    );
    let refused = change(|nodes| nodes.refused.push("node \"X\"".to_owned()));
    ensure_only(&refused, "D08", Severity::Warning);
    let hostname = change(|nodes| nodes.nodes[0].hostname = Some("x".to_owned()));
    ensure_only(&hostname, "D08", Severity::Info);
    let service = in_cluster(|cluster| {
        cluster.service_names = Ok(vec!["a.default".to_owned()]);
    });
    ensure_only(&service, "D08", Severity::Warning);
    let other = findings(|facts| {
        facts.only_nodes = vec!["b".parse().unwrap()];
        let nodes = facts.cluster.as_mut().unwrap().nodes.as_mut().unwrap();
        nodes.nodes.push(reported("c", "192.0.2.1"));
    });
    assert!(other.is_empty(), "{other:?}");
}

#[test]
fn d09_agents_that_are_away_or_ill_are_found() {
    for (findings, severity) in [
        (of_node(|node| node.connected = false), Severity::Error),
        (
            of_node(|node| node.state = Some("suspect".to_owned())),
            Severity::Error,
        ),
        (
            of_node(|node| node.rtt_millis = Some(1500)),
            Severity::Warning,
        ),
        (
            of_node(|node| node.version_skew = Some(VersionSkew::Unsupported)),
            Severity::Warning,
        ),
        (
            of_node(|node| node.certificate_not_after = Some("2026-01-05T00:00:00Z".to_owned())),
            Severity::Warning,
        ),
        (
            of_node(|node| node.certificate_not_after = Some("2025-12-31T00:00:00Z".to_owned())),
            Severity::Error,
        ),
        (
            of_node(|node| {
                node.connected = false;
                node.revoked_at = Some(NOW.to_owned());
            }),
            Severity::Info,
        ),
    ] {
        ensure_only(&findings, "D09", severity);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].place, "a");
    }
    let enrolled = of_node(|node| {
        node.connected = false;
        node.enrollment = Some(EnrollmentKind::JoinToken);
        node.last_seen = None;
    });
    assert!(
        enrolled[0].fix.contains("a disk that is full"),
        "{enrolled:?}"
    );
    let cloud = of_node(|node| {
        node.connected = false;
        node.is_edge = false;
    });
    assert!(cloud.is_empty(), "{cloud:?}");
}

#[test]
fn d09_server_that_is_absent_silent_or_not_ready_is_found() {
    for server in [
        ServerAnswer::NotRunning,
        ServerAnswer::NoAnswer("no answer in time".to_owned()),
    ] {
        let findings = findings(|facts| facts.server = server);
        ensure_only(&findings, "D09", Severity::Error);
    }
    let waiting = findings(|facts| facts.readiness = Ok(vec!["[-] listeners".to_owned()]));
    ensure_only(&waiting, "D09", Severity::Error);
    let condition = findings(|facts| facts.readiness = Ok(vec!["[!] ca: expired".to_owned()]));
    ensure_only(&condition, "D09", Severity::Warning);
    let unknown = findings(|facts| facts.only_nodes = vec!["x".parse().unwrap()]);
    ensure_only(&unknown, "D09", Severity::Error);
}

#[test]
fn faults_of_twenty_thousand_nodes_are_a_few_lines_with_counts() {
    let report = {
        let mut facts = healthy();
        let numbers = 0..20_000;
        let away = numbers.clone().map(|number| NodeStatus {
            connected: false,
            ..node(&format!("n{number:05}"))
        });
        facts.server = answer(&away.collect::<Vec<_>>());
        let nodes = facts.cluster.as_mut().unwrap().nodes.as_mut().unwrap();
        nodes.nodes = numbers
            .clone()
            .map(|number| ReportedNode {
                hostname: Some("other".to_owned()),
                ..reported(&format!("n{number:05}"), "192.0.2.1")
            })
            .collect();
        nodes.refused = numbers
            .map(|number| format!("node \"N{number}\": capital"))
            .collect();
        examine(&facts)
    };
    let mut text = Vec::new();
    report.print(OutputFormat::Table, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.lines().count() < 40, "{text}");
    assert!(
        text.contains("error D09 20000 nodes: no agent is connected; never seen: n00000, n00001, "),
        "{text}"
    );
    assert!(text.contains("n00009 and 19990 more"), "{text}");
    let mut json = Vec::new();
    report.print(OutputFormat::Json, &mut json).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let findings = document["findings"].as_array().unwrap();
    let agents = findings
        .iter()
        .find(|finding| finding["id"] == "D09")
        .unwrap();
    assert_eq!(agents["count"], 20_000);
    assert_eq!(agents["names"].as_array().unwrap().len(), 10);
    assert_eq!(agents["names"][9], "n00009");
    let of_names = findings.iter().filter(|finding| finding["id"] == "D08");
    let mut counts: Vec<_> = of_names
        .map(|finding| finding["count"].as_u64().unwrap())
        .collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 20_000, 20_000], "an address, names, host names");
}

#[test]
fn socket_of_another_user_is_no_fault() {
    let mut facts = healthy();
    facts.server = ServerAnswer::Unknown("permission denied".to_owned());
    let report = examine(&facts);
    assert!(report.findings.is_empty(), "{report:?}");
    assert_eq!(report.skipped[0].id, "D09");
}

#[test]
fn d11_missing_rights_are_found() {
    let findings = in_cluster(|cluster| cluster.denied = Ok(vec!["list nodes".to_owned()]));
    ensure_only(&findings, "D11", Severity::Error);
}

#[test]
fn d17_servers_without_connection_are_found() {
    for (line, severity) in [
        ("[!] peers: 1 of 2 connected, none to b", Severity::Warning),
        ("[!] peers: 0 of 2 connected, none to b, c", Severity::Error),
    ] {
        let findings = findings(|facts| facts.readiness = Ok(vec![line.to_owned()]));
        ensure_only(&findings, "D17", severity);
    }
}

#[test]
fn d18_host_is_checked() {
    let buffers = findings(|facts| facts.host.buffers[0].bytes = Ok(212_992));
    ensure_only(&buffers, "D18", Severity::Warning);
    for (is_pod, severity) in [(true, Severity::Info), (false, Severity::Warning)] {
        let descriptors = findings(|facts| {
            facts.is_pod = is_pod;
            facts.descriptors = Ok(1024);
        });
        ensure_only(&descriptors, "D18", severity);
    }
    let disk = findings(|facts| facts.host.disk = Ok(Some("the disk is full".to_owned())));
    ensure_only(&disk, "D18", Severity::Error);
    let pool = findings(|facts| facts.host.buffer_pool = Some("too large".to_owned()));
    ensure_only(&pool, "D18", Severity::Warning);
    let link = findings(|facts| facts.links[0].mtu = 1200);
    ensure_only(&link, "D18", Severity::Warning);
    let condition = findings(|facts| facts.readiness = Ok(vec!["[!] disk: full".to_owned()]));
    ensure_only(&condition, "D18", Severity::Error);
    let clock = in_cluster(|cluster| cluster.clock_ahead = Ok(-3600));
    ensure_only(&clock, "D18", Severity::Warning);
    assert!(clock[0].what.contains("1h behind"), "{clock:?}");
}
