use super::*;
use crate::admin::doctor::facts::dialed::CloudApiServer;
use crate::cluster::doctor::{
    AddressRule, EndpointFacts, MonitorFacts, MonitorKind, RecordsMount, ServerWorkload,
};

/// Returns the findings after a change of the healthy addons.
fn in_addons(change: impl FnOnce(&mut AddonFacts)) -> Vec<Finding> {
    in_cluster(|cluster| change(&mut cluster.addons))
}

/// Returns the findings with this answer of the kubelet, where kube-apiserver verifies kubelets.
fn with_answer(answer: KubeletAnswer) -> Vec<Finding> {
    findings(|facts| {
        let apiservers = &mut facts.cluster.as_mut().unwrap().apiservers;
        let apiserver = &mut apiservers.as_mut().unwrap()[0];
        apiserver.egress_selector = Some("/e".to_owned());
        apiserver.kubelet_ca = Some("/ca.crt".to_owned());
        facts.kubelets.as_mut().unwrap()[0].answer = answer;
    })
}

#[test]
fn d03_certificate_of_a_kubelet_is_for_its_node() {
    for answer in [
        KubeletAnswer::NoHandshake("unknown issuer".to_owned()),
        KubeletAnswer::Certificate { is_for_node: false },
    ] {
        ensure_only(&with_answer(answer), "D03", Severity::Error);
    }
    let unverified = findings(|facts| {
        facts.kubelets.as_mut().unwrap()[0].answer =
            KubeletAnswer::Certificate { is_for_node: false };
    });
    assert!(unverified.is_empty(), "{unverified:?}");
}

#[test]
fn d06_mount_with_sub_path_is_never_updated() {
    let findings = in_addons(|addons| {
        addons.records_mounts = Ok(vec![RecordsMount {
            workload: "deployment coredns".to_owned(),
            container: 0,
            mount: 1,
            path: "/etc/edge/tunnel-nodes".to_owned(),
            has_sub_path: true,
        }]);
    });
    ensure_only(&findings, "D06", Severity::Error);
    assert!(
        findings[0].fix.contains("\"value\":\"/etc/edge\""),
        "{findings:?}"
    );
}

#[test]
fn d09_kubelet_that_cannot_be_reached_is_found() {
    let findings = with_answer(KubeletAnswer::Unreachable("connection refused".to_owned()));
    ensure_only(&findings, "D09", Severity::Error);
}

#[test]
fn d10_endpoints_on_edge_nodes_need_a_traffic_policy() {
    let with_nodes = |nodes: &[&str], has_traffic_policy| {
        let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
        in_addons(|addons| {
            addons.cluster_dns = Ok(Some(ClusterDnsFacts {
                has_traffic_policy,
                nodes,
            }));
        })
    };
    let everywhere = with_nodes(&["a", "b"], false);
    ensure_only(&everywhere, "D10", Severity::Error);
    assert!(
        everywhere[0]
            .fix
            .contains("internalTrafficPolicy\":\"Local")
    );
    let some = with_nodes(&["a"], false);
    assert!(some[0].fix.contains("nodeAffinity"), "{some:?}");
    for healthy in [with_nodes(&["a"], true), with_nodes(&["cloud"], false)] {
        assert!(healthy.is_empty(), "{healthy:?}");
    }
}

#[test]
fn d12_monitors_need_a_proxy_or_a_safe_rule() {
    let with_endpoint = |endpoint| {
        in_addons(|addons| {
            addons.monitors = Ok(vec![MonitorFacts {
                kind: MonitorKind::Service,
                namespace: "monitoring".to_owned(),
                name: "it's".to_owned(),
                node_label: "__meta_kubernetes_pod_node_name",
                endpoints: vec![endpoint],
            }]);
        })
    };
    let rule = |regex: &str| EndpointFacts {
        has_rules: true,
        address_rules: vec![AddressRule {
            number: 2,
            regex: regex.to_owned(),
        }],
        ..EndpointFacts::default()
    };
    let absent = with_endpoint(EndpointFacts::default());
    ensure_only(&absent, "D12", Severity::Warning);
    assert!(
        absent[0]
            .fix
            .contains(r"servicemonitor 'it'\''s' --type=json")
    );
    let greedy = with_endpoint(rule("(.*);.*:(.*)"));
    ensure_only(&greedy, "D12", Severity::Warning);
    assert!(
        greedy[0]
            .fix
            .contains("/spec/endpoints/0/relabelings/2/regex")
    );
    let proxied = EndpointFacts {
        has_proxy: true,
        ..EndpointFacts::default()
    };
    for healthy in [with_endpoint(rule("(.+);.*:(.*)")), with_endpoint(proxied)] {
        assert!(healthy.is_empty(), "{healthy:?}");
    }
}

#[test]
fn d13_port_of_agents_is_reached_by_the_names_of_its_certificate() {
    let own = findings(|facts| facts.dialed.own = vec![dialed("127.0.0.1:1", Some("refused"))]);
    ensure_only(&own, "D13", Severity::Error);
    let advertised = findings(|facts| {
        facts.dialed.advertised = vec![dialed("cloud.example.com:31008", Some("refused"))];
    });
    ensure_only(&advertised, "D13", Severity::Warning);
    let uncovered = findings(|facts| facts.dialed.uncovered = Ok(vec!["other".to_owned()]));
    ensure_only(&uncovered, "D13", Severity::Error);
}

#[test]
fn d14_server_does_not_resolve_by_coredns_or_by_slow_resolvers() {
    let workload = |policy: &str| ServerWorkload {
        workload: "deployment tunnel-server".to_owned(),
        dns_policy: policy.to_owned(),
    };
    let looping = in_addons(|addons| addons.server_workloads = Ok(vec![workload("ClusterFirst")]));
    ensure_only(&looping, "D14", Severity::Error);
    let healthy = in_addons(|addons| addons.server_workloads = Ok(vec![workload("Default")]));
    assert!(healthy.is_empty(), "{healthy:?}");
    let resolver = "192.0.2.53:53".parse().unwrap();
    for (time, is_healthy) in [(None, false), (Some(900), false), (Some(9), true)] {
        let time = time.map(Duration::from_millis);
        let findings = findings(|facts| facts.dialed.resolvers = Ok(vec![(resolver, time)]));
        if is_healthy {
            assert!(findings.is_empty(), "{findings:?}");
        } else {
            ensure_only(&findings, "D14", Severity::Warning);
        }
    }
}

#[test]
fn d15_yurthub_hides_the_service_by_its_name() {
    let findings = in_cluster(|cluster| {
        cluster.addons.yurthub_nodes = Ok(BTreeSet::from(["a".to_owned()]));
        cluster.names.internal_service = "other".to_owned();
    });
    ensure_only(&findings, "D15", Severity::Warning);
    assert!(
        findings[0].fix.contains("remove --internal-service"),
        "{findings:?}"
    );
    let hidden = in_addons(|addons| {
        addons.yurthub_nodes = Ok(BTreeSet::from(["a".to_owned()]));
    });
    assert!(hidden.is_empty(), "{hidden:?}");
    let information = in_addons(|addons| {
        addons.yurthub_nodes = Ok(BTreeSet::from(["a".to_owned()]));
        addons.kube_proxy_server = Ok(Some("https://192.0.2.1:6443".to_owned()));
    });
    ensure_only(&information, "D15", Severity::Info);
}

#[test]
fn d16_api_server_of_edge_nodes_has_its_service_name() {
    for is_for_service in [Ok(false), Err("connection refused".to_owned())] {
        let findings = findings(|facts| {
            facts.dialed.apiservers = vec![CloudApiServer {
                address: "192.0.2.1:6443".to_owned(),
                is_for_service,
            }];
        });
        ensure_only(&findings, "D16", Severity::Error);
    }
}
