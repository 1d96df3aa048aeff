use serde_json::json;

use super::*;
use crate::config::{Environment, RawConfig};

fn config() -> Config {
    Config::check(&RawConfig::default(), Environment { in_cluster: true }).unwrap()
}

fn node(name: &str, address: &str, edge: &str) -> NodeObject {
    let object = json!({
        "metadata": {"name": name, "labels": {"openyurt.io/is-edge-worker": edge}},
        "status": {"addresses": [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": name},
        ]},
    });
    serde_json::from_value(object).unwrap()
}

#[test]
fn host_name_that_is_refused_reaches_doctor() {
    let object = json!({
        "metadata": {"name": "a"},
        "status": {"addresses": [{"type": "Hostname", "address": "-bad-"}]},
    });
    let refused = serde_json::from_value(object).unwrap();
    let facts = facts(
        ClusterObjects {
            nodes: Ok(vec![refused]),
            ..objects()
        },
        &[],
    );
    assert_eq!(facts.nodes.unwrap().refused.len(), 1);
}

fn config_map(key: &str, value: &str) -> ConfigMap {
    serde_json::from_value(json!({"data": {key: value}})).unwrap()
}

fn objects() -> ClusterObjects {
    let service = json!({"spec": {
        "clusterIP": "10.96.0.7",
        "ports": [
            {"port": 10250, "targetPort": 10263},
            {"port": 10255, "targetPort": "http"},
            {"port": 53, "protocol": "UDP"},
        ],
    }});
    let slice = json!({"endpoints": [
        {"conditions": {"ready": true}},
        {"conditions": {"ready": false}},
        {},
    ]});
    ClusterObjects {
        namespace: "kube-system".into(),
        clock_ahead: Ok(0),
        nodes: Ok(vec![
            node("a", "192.0.2.1", "true"),
            node("b", "192.0.2.2", "false"),
        ]),
        services: Ok(vec![json!({"metadata": {"name": "s", "namespace": "n"}})]),
        service: Ok(Some(service)),
        endpoint_slices: Ok(vec![slice]),
        dns_slices: Ok(Vec::new()),
        records_map: Ok(Some(config_map(RECORDS_KEY, "10.96.0.7\ta"))),
        ports_map: Ok(Some(ConfigMap {
            data: Some(BTreeMap::from([
                ("http-proxy-ports".to_owned(), "9100, x".to_owned()),
                ("https-proxy-ports".to_owned(), "9100".to_owned()),
            ])),
            ..ConfigMap::default()
        })),
        denied: Ok(Vec::new()),
        apiserver_pods: Ok(Vec::new()),
        coredns_maps: Ok(vec![
            config_map("Corefile", ".:53 {}"),
            config_map("a.server", "hosts /x"),
        ]),
        addons: AddonObjects {
            dns_workloads: Ok(Vec::new()),
            dns_service: Ok(None),
            dns_slices: Ok(Vec::new()),
            server_workloads: Ok(Vec::new()),
            monitors: Ok(Vec::new()),
            yurthub_pods: Ok(Vec::new()),
            kube_proxy_map: Ok(None),
        },
    }
}

fn facts(objects: ClusterObjects, agents: &[&str]) -> ClusterFacts {
    let config = config();
    let settings = config.kubernetes.clone().unwrap();
    objects.facts(&config, &settings, |node| agents.contains(&node.as_str()))
}

#[test]
fn facts_follow_from_the_objects() {
    let facts = facts(objects(), &[]);
    let records = facts.records.unwrap();
    assert_eq!(records.expected, "10.96.0.7\ta\n192.0.2.2\tb");
    assert_eq!(records.written.as_deref(), Some("10.96.0.7\ta"));
    let service = facts.service.unwrap().unwrap();
    let ports = BTreeMap::from([(10250, Some(10263)), (10255, None)]);
    assert_eq!(service.ports, ports);
    assert_eq!(service.expected.get(&9100), Some(&10263));
    assert_eq!(facts.ready_endpoints, Ok(2));
    let lists = facts.port_lists.unwrap().unwrap();
    assert_eq!(lists.in_both, [9100]);
    assert_eq!(lists.mistakes.len(), 1);
    let corrected = BTreeMap::from([
        ("http-proxy-ports", String::new()),
        ("https-proxy-ports", "9100".to_owned()),
    ]);
    assert_eq!(lists.corrected, corrected);
    let nodes = facts.nodes.unwrap().nodes;
    assert_eq!((nodes[0].is_edge, nodes[1].is_edge), (true, false));
    assert_eq!(nodes[0].hostname.as_deref(), Some("a"));
    assert_eq!(facts.service_names, Ok(vec!["s.n".to_owned()]));
    let corefiles = facts.corefiles.unwrap();
    let texts: Vec<&str> = corefiles.iter().map(|file| file.text.as_str()).collect();
    assert_eq!(texts, [".:53 {}", "hosts /x"]);
}

#[test]
fn dns_of_the_servers_counts_its_ready_endpoints_where_it_has_any() {
    assert_eq!(facts(objects(), &[]).ready_dns_endpoints, Ok(None));
    for (is_ready, count) in [(false, 0), (true, 1)] {
        let slice = json!({"endpoints": [{"conditions": {"ready": is_ready}}]});
        let mut objects = objects();
        objects.dns_slices = Ok(vec![slice]);
        assert_eq!(facts(objects, &[]).ready_dns_endpoints, Ok(Some(count)));
    }
}

#[test]
fn agents_make_edge_nodes_only_with_the_setting() {
    let config = config();
    let mut settings = config.kubernetes.clone().unwrap();
    settings.edge_by_agent = true;
    let facts = objects().facts(&config, &settings, |node| node.as_str() == "b");
    let expected = "10.96.0.7\ta\n10.96.0.7\tb";
    assert_eq!(facts.records.unwrap().expected, expected);
}

#[test]
fn object_that_cannot_be_read_leaves_the_others() {
    let mut objects = objects();
    objects.nodes = Err("forbidden".to_owned());
    let facts = facts(objects, &["a"]);
    assert_eq!(facts.records.unwrap_err(), "forbidden");
    assert!(facts.nodes.is_err());
    assert!(facts.service.is_ok());
}
