use std::net::IpAddr;

use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Method, Uri};

use super::*;
use crate::destination::{AgentTarget, Scheme};
use crate::policy::{AccessCaller, PortLists, PortPolicy};
use crate::routes::RouteNode;
use crate::testing::{assert_contains, located_node};

const WITHOUT: &str = "bad_request: --kubelet-certificate-authority";
/// Node argument for requests that must not cause a lookup.
const NO_QUESTION: &str = "";

fn node(text: &str) -> NodeName {
    text.parse().unwrap()
}

/// Two edge nodes that share an address and have one more each, and the node of kube-apiserver,
/// which also has an agent. The first edge node has a host name and a different kubelet port.
fn routes() -> RouteTable {
    let route = |name: &str, hostname: Option<&str>, addresses: &[&str], port: Option<u16>| {
        let addresses = addresses.iter().map(|text| text.parse::<IpAddr>().unwrap());
        RouteNode {
            hostname: hostname.map(node),
            kubelet_port: port.and_then(Port::new),
            ..RouteNode::edge(node(name), addresses.collect())
        }
    };
    let shared = "192.168.33.221";
    RouteTable::merge(&[
        route("edge-1", Some("host-1"), &[shared, "10.0.0.1"], Some(10350)),
        route("edge-2", Some("twin"), &[shared, "10.0.0.2"], None),
        route("master-1", Some("twin"), &["10.77.100.3"], None),
    ])
}

fn policy() -> PortPolicy {
    let lists = PortLists {
        http: "9100".parse().unwrap(),
        https: "9443".parse().unwrap(),
        localhost: "10266".parse().unwrap(),
    };
    PortPolicy::of_lists(lists, Vec::new())
}

/// Returns the target that the policy allows a caller with delegation.
fn authorized(requested: RequestedNode) -> Result<AgentTarget, &'static str> {
    let caller = AccessCaller {
        has_delegation: true,
        ..AccessCaller::ANONYMOUS
    };
    located_node(&policy(), caller, requested).map_err(|denied| denied.kind())
}

/// A request: method and path, the server name in TLS (`-` for none), and Host.
type Asked<'a> = (&'a str, &'a str, &'a str);

/// Returns a request at the HTTPS listener without a server name in TLS.
fn request_without_name<'a>(
    method: &'a Method,
    uri: &'a Uri,
    headers: &'a HeaderMap,
) -> DelegatedRequest<'a> {
    DelegatedRequest {
        facts: RequestFacts {
            method,
            uri,
            headers,
            scheme: Scheme::Https,
            implied_port: None,
        },
        server_name: None,
    }
}

/// Returns `node target`, followed by `, own Host` if the server sets the target's Host. On failure
/// returns the code and, after a colon, the expected part of the text. `on` is the node that the
/// cluster returns for a Pod.
fn answer(asked: Asked<'_>, fields: &[(&str, &str)], on: &str) -> String {
    let (request, server_name, host) = asked;
    let (method, path) = request.split_once(' ').unwrap();
    let mut headers = HeaderMap::new();
    for (name, value) in [&[("host", host)][..], fields].concat() {
        let name = http::HeaderName::try_from(name).unwrap();
        headers.append(name, HeaderValue::from_str(value).unwrap());
    }
    let (method, uri): (Method, Uri) = (method.parse().unwrap(), path.parse().unwrap());
    let server_name = (server_name != "-").then(|| node(server_name));
    let request = DelegatedRequest {
        server_name: server_name.as_ref(),
        ..request_without_name(&method, &uri, &headers)
    };
    let routes = routes();
    let decided = match decide(&request, &routes) {
        Ok(Decision::Node(requested)) => Ok(requested),
        Ok(Decision::LookUp(_)) if on == NO_QUESTION => return "asked".to_owned(),
        Ok(Decision::LookUp(pod)) => decide_by_pod(&request, &pod, Ok(node(on)), &routes),
        Err(failure) => Err(failure),
    };
    let requested = match decided {
        Ok(requested) => requested,
        Err(error)
            if error
                .to_string()
                .contains("--kubelet-certificate-authority") =>
        {
            return format!("{}: --kubelet-certificate-authority", error.kind());
        }
        Err(error) => return error.kind().to_owned(),
    };
    match authorized(requested) {
        Ok(addressed) if addressed.keeps_host => addressed.destination.to_string(),
        Ok(addressed) => format!("{}, own Host", addressed.destination),
        Err(kind) => kind.to_owned(),
    }
}

const SPDY: &[(&str, &str)] = &[("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
const WEBSOCKET: &[(&str, &str)] = &[("connection", "Upgrade"), ("upgrade", "websocket")];
/// Values of Host that users send: the API server by a Node's address or name, by other names, and
/// values that try to select another node.
const HOSTS: &[&str] = &[
    "10.77.100.3:6443",
    "master-1:6443",
    "10.0.0.2:6443",
    "10.0.0.2:10250",
    "10.0.0.2",
    "192.168.33.221:6443",
    "edge-2:10250",
    "edge-2",
    "localhost:16443",
    "kubernetes.default.svc",
    "[fd00::3]:6443",
    "my_api:6443",
    "203.0.113.9:10250",
];

#[test]
fn streams_go_to_the_node_by_tls_else_of_the_pod_whatever_host_says() {
    for (request, fields) in [
        ("GET /exec/default/web-0/app?command=sh", WEBSOCKET),
        ("GET /attach/default/web-0/app", WEBSOCKET),
        ("GET /portForward/default/web-0", WEBSOCKET),
        ("POST /exec/default/web-0/app", SPDY),
        ("POST /attach/default/web-0/0a1b/app", SPDY),
        ("POST /portForward/default/web-0", SPDY),
    ] {
        for &host in HOSTS {
            for server_name in ["edge-1", "host-1"] {
                let by_tls = answer((request, server_name, host), fields, NO_QUESTION);
                assert_eq!(by_tls, "edge-1 node:10350", "{request} {host}");
            }
            for server_name in ["-", "tunnel-server.example"] {
                let by_pod = answer((request, server_name, host), fields, "edge-1");
                assert_eq!(by_pod, "edge-1 node:10350", "{request} {host}");
            }
        }
    }
    let logs = "GET /containerLogs/default/web-0/app";
    for &host in HOSTS {
        let by_pod = answer((logs, "-", host), &[], "edge-2");
        assert_eq!(by_pod, "edge-2 node:10250", "{host}");
    }
}

/// kube-apiserver can listen on a port of a node with an agent. That port is in no list, and the
/// path is a kubelet's path.
#[test]
fn port_of_host_counts_where_host_names_the_node_and_leads_somewhere() {
    let exec = "POST /exec/default/web-0/app";
    for (server_name, host, on, expected) in [
        ("-", "10.77.100.3:6443", "master-1", "master-1 node:10250"),
        ("master-1", "master-1:6443", "", "master-1 node:10250"),
        ("master-1", "master-1", "", "master-1 node:10250"),
        // Requests of API servers before 1.36.
        ("-", "edge-1:10350", "edge-1", "edge-1 node:10350"),
        ("-", "edge-2:10250", "edge-2", "edge-2 node:10250"),
        ("edge-2", "EDGE-2.:10250", "", "edge-2 node:10250"),
    ] {
        let asked = (exec, server_name, host);
        assert_eq!(answer(asked, SPDY, on), expected, "{asked:?}");
    }
    for (server_name, host, expected) in [
        ("edge-1", "edge-1:9100", "edge-1 node:9100, own Host"),
        ("edge-1", "host-1:9443", "edge-1 node:9443, own Host"),
        ("edge-1", "10.0.0.1:9100", "edge-1 node:9100, own Host"),
        ("edge-1", "edge-1:10266", "edge-1 loopback:10266, own Host"),
        ("edge-1", "edge-1:22", "port_denied"),
        ("-", "edge-1:9100", "edge-1 node:9100, own Host"),
        ("-", "edge-1:22", "port_denied"),
        ("-", "edge-1", "port_denied"),
        ("-", "192.168.33.221:9100", "ambiguous_address"),
        ("-", "my_api:9100", "bad_request"),
        ("-", "10.0.0.1:6443", "port_denied"),
        // The node proxy, also from an API server on the node itself.
        ("master-1", "10.77.100.3:6443", "master-1 node:10250"),
        ("edge-1", "10.0.0.1:6443", "edge-1 node:10350"),
        ("edge-1", "10.0.0.1", "edge-1 node:10350"),
        ("edge-1", "10.77.100.3:6443", "edge-1 node:10350"),
        ("edge-1", "edge-2:9100", "edge-1 node:10350"),
        ("edge-1", "my_api:6443", "edge-1 node:10350"),
    ] {
        let asked = ("GET /metrics", server_name, host);
        assert_eq!(answer(asked, &[], NO_QUESTION), expected, "{asked:?}");
    }
}

/// A user cannot select another node with Host, Connection or selectors.
#[test]
fn upgrades_without_a_node_by_tls_are_never_judged_by_host() {
    let own: &[&[(&str, &str)]] = &[
        SPDY,
        WEBSOCKET,
        &[("connection", "Upgrade")],
        &[("upgrade", "websocket")],
        // kube-apiserver looks for the word anywhere in the field.
        &[("connection", "keep-alive"), ("connection", "x-UPGRADEs")],
    ];
    for fields in own {
        for &host in HOSTS {
            for request in ["GET /metrics", "POST /run/default/web-0/app", "GET /"] {
                for server_name in ["-", "tunnel-server.example"] {
                    let asked = (request, server_name, host);
                    assert_eq!(answer(asked, fields, NO_QUESTION), WITHOUT, "{asked:?}");
                }
            }
        }
    }
    for request in [
        "GET /exec",
        "GET /exec/default",
        "GET /exec/../web-0/app",
        "GET /exec/NS/web-0/app",
    ] {
        let asked = (request, "-", "edge-2:10250");
        assert_eq!(answer(asked, &[], NO_QUESTION), "bad_request", "{request}");
    }
}

#[test]
fn selectors_are_not_read() {
    let selectors = [
        ("x-tunnel-proxy-host", "edge-2"),
        ("x-tunnel-proxy-host", "a b"),
        ("x-tunnel-proxy-dest", "edge-2:10250"),
        ("x-tunnel-proxy-dest", ""),
    ];
    let exec = ("GET /exec/ns/pod/c", "-", "edge-2:10250");
    for (asked, fields, on) in [
        (exec, WEBSOCKET, "edge-1"),
        (("GET /pods", "edge-1", "10.77.100.3:6443"), &[][..], ""),
        (("GET /pods", "-", "edge-1:10350"), &[][..], ""),
    ] {
        let fields = [fields, &selectors].concat();
        assert_eq!(answer(asked, &fields, on), "edge-1 node:10350", "{asked:?}");
    }
}

#[test]
fn failed_lookup_is_the_answer_and_host_is_not() {
    let (method, uri) = (Method::GET, Uri::from_static("/exec/default/web-0/app"));
    let host = HeaderValue::from_static("edge-2:10250");
    let headers = HeaderMap::from_iter([(HOST, host)]);
    let request = request_without_name(&method, &uri, &headers);
    let routes = routes();
    let Ok(Decision::LookUp(pod)) = decide(&request, &routes) else {
        panic!("no question");
    };
    for (found, says) in [
        (Err(PodLookupError::NotFound), "no such pod"),
        (Err(PodLookupError::Unbound), "no node"),
        (Err(PodLookupError::Forbidden), "the right 'pods get'"),
        (Err(PodLookupError::Timeout), "within 10 s"),
        (Err(PodLookupError::Unavailable("away".into())), "away"),
        (Ok(node("edge-9")), "on edge-9, which is not a known node"),
        // The host name of another node.
        (Ok(node("host-1")), "on host-1, which is not a known node"),
    ] {
        let failure = decide_by_pod(&request, &pod, found, &routes).unwrap_err();
        assert_eq!(failure.kind(), "unknown_pod");
        assert_contains(&failure, "pod default/web-0");
        assert_contains(&failure, says);
    }
}

/// Covers `--pod-lookup=false`, and a server outside a cluster.
#[test]
fn without_lookups_logs_go_by_host_and_upgrades_are_refused() {
    let method = Method::GET;
    let uri = Uri::from_static("/containerLogs/default/web-0/app");
    let mut headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static("edge-2:10250"))]);
    let routes = routes();
    let ask = |headers: &HeaderMap| {
        let request = request_without_name(&method, &uri, headers);
        decide_by_host(&request, &routes)
    };
    let addressed = authorized(ask(&headers).unwrap()).unwrap();
    assert_eq!(addressed.destination.to_string(), "edge-2 node:10250");
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    let failure = ask(&headers).unwrap_err();
    assert_contains(&failure, "--pod-lookup");
}

#[test]
fn form_of_a_request_is_judged_as_that_of_any_other() {
    for (request, fields) in [
        ("GET http://edge-1:10250/pods", &[][..]),
        ("GET /pods", &[("host", "edge-1:10250")][..]),
        ("GET /pods", &[("transfer-encoding", "gzip")][..]),
    ] {
        let asked = (request, "edge-1", "edge-1:10250");
        let answer = answer(asked, fields, NO_QUESTION);
        assert_eq!(answer, "bad_request", "{request}");
    }
}

#[test]
fn name_in_tls_that_several_nodes_share_is_never_judged_by_host() {
    for request in ["GET /pods/", "GET /exec/ns/pod/container"] {
        let answer = answer((request, "twin", "edge-2:10250"), &[], NO_QUESTION);
        assert!(answer.starts_with("ambiguous_address"), "{answer}");
    }
}
