use tunnel_proto::wire::header::Target;

use super::*;
use crate::destination::Destination;
use crate::policy::{AccessCaller, PortLists, PortPolicy};
use crate::routes::RouteNode;
use crate::testing::located_node;

fn routes() -> RouteTable {
    let [one, two, three]: [NodeName; 3] =
        ["worker-1", "worker-2", "edge.site-3"].map(|text| text.parse().unwrap());
    let [shared, own] = ["192.168.33.221", "10.0.0.3"].map(|text| [text.parse().unwrap()]);
    RouteTable::new([(&one, &shared[..]), (&two, &shared[..]), (&three, &own[..])])
}

fn policy() -> PortPolicy {
    let lists = PortLists {
        http: "9100, 80".parse().unwrap(),
        https: "9443".parse().unwrap(),
        localhost: "10266, 10267".parse().unwrap(),
    };
    let own = [10264, 10262].map(|port| Port::new(port).unwrap());
    PortPolicy::of_lists(lists, own.to_vec())
}

/// Returns the destination that the policy allows, or the kind of the error.
fn authorized(decided: Result<RequestedNode, DecisionError>) -> Result<Destination, &'static str> {
    let requested = decided.map_err(|error| error.kind())?;
    let target = located_node(&policy(), AccessCaller::ANONYMOUS, requested);
    match target {
        Ok(target) => Ok(target.destination),
        Err(denied) => Err(denied.kind()),
    }
}

/// Returns the decision as "node target" or as the error code. `fields` are `Host` and selectors.
fn answer(request: &str, fields: &[(&str, &str)], scheme: Scheme, implied: Option<u16>) -> String {
    let (method, uri) = request.split_once(' ').unwrap();
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let name = HeaderName::try_from(*name).unwrap();
        headers.append(name, HeaderValue::from_str(value).unwrap());
    }
    let (method, uri) = (method.parse().unwrap(), uri.parse().unwrap());
    let implied_port = implied.and_then(Port::new);
    let facts = RequestFacts {
        method: &method,
        uri: &uri,
        headers: &headers,
        scheme,
        implied_port,
    };
    let destination = authorized(decide(&facts, &routes()));
    destination.map_or_else(str::to_owned, |destination| destination.to_string())
}

fn plain(fields: &[(&str, &str)]) -> String {
    answer("GET /metrics", fields, Scheme::Http, None)
}

#[test]
fn host_by_name_or_unique_address_chooses_the_node() {
    for (host, expected) in [
        ("worker-1:9100", "worker-1 node:9100"),
        ("WORKER-1.:9100", "worker-1 node:9100"),
        ("edge.site-3:10250", "edge.site-3 node:10250"),
        ("10.0.0.3:9100", "edge.site-3 node:9100"),
        ("[::ffff:10.0.0.3]:9100", "edge.site-3 node:9100"),
        ("worker-1:10266", "worker-1 loopback:10266"),
        ("worker-1", "worker-1 node:80"),
        ("192.168.33.221:9100", "ambiguous_address"),
        ("10.0.0.4:9100", "unknown_node"),
        ("[fd00::1]:9100", "unknown_node"),
        ("worker-3:9100", "unknown_node"),
        ("1:9100", "unknown_node"),
        ("worker-1:22", "port_denied"),
        ("worker-1:10264", "port_denied"),
        ("worker-1:", "worker-1 node:80"),
        ("[::ffff:10.0.0.3]:", "edge.site-3 node:80"),
        (":9100", "bad_request"),
        (":", "bad_request"),
        ("worker-1:0", "bad_request"),
        ("worker-1:99999", "bad_request"),
        ("worker-1:9100:1", "bad_request"),
        ("::1", "bad_request"),
        ("[::1", "bad_request"),
        ("[::1]x", "bad_request"),
        ("worker_1", "bad_request"),
        ("user@worker-1", "bad_request"),
        ("0x7f.1", "unknown_node"),
        ("127.1:9100", "unknown_node"),
        ("", "bad_request"),
    ] {
        assert_eq!(plain(&[("host", host)]), expected, "{host:?}");
    }
    assert_eq!(plain(&[]), "bad_request");
    let host = ("host", "worker-1:9100");
    assert_eq!(plain(&[host, host]), "bad_request");
}

/// edgecore's kubelet listens on 10350, as its Node object says.
#[test]
fn port_of_the_kubelet_is_allowed_at_its_node_alone() {
    let node = |name: &str, kubelet: u16| RouteNode {
        kubelet_port: Port::new(kubelet),
        ..RouteNode::edge(name.parse().unwrap(), Vec::new())
    };
    let routes = RouteTable::merge(&[node("worker-1", 10350), node("worker-2", 10250)]);
    for (host, expected) in [
        ("worker-1:10350", "worker-1 node:10350"),
        ("worker-1:10250", "worker-1 node:10250"),
        ("worker-2:10350", "port_denied"),
    ] {
        let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
        let facts = RequestFacts {
            method: &Method::GET,
            uri: &"/".parse().unwrap(),
            headers: &headers,
            scheme: Scheme::Https,
            implied_port: None,
        };
        let destination = authorized(decide(&facts, &routes));
        let answer = destination.map_or_else(str::to_owned, |destination| destination.to_string());
        assert_eq!(answer, expected, "{host}");
    }
}

#[test]
fn selectors_must_agree_with_a_name_and_decide_for_an_address() {
    // Host, both selectors and the decision.
    for (host, by_host, by_dest, expected) in [
        ("worker-1:9100", "Worker-1", "", "worker-1 node:9100"),
        ("worker-1:9100", "worker-2", "", "bad_request"),
        ("worker-1:9100", "", "worker-1:10250", "worker-1 node:10250"),
        ("worker-1:9100", "", "worker-2:9100", "bad_request"),
        ("worker-1:9100", "", "192.168.33.221:9100", "bad_request"),
        ("edge.site-3", "", "10.0.0.3:9100", "edge.site-3 node:9100"),
        ("worker-1:9100", "", "worker-1", "bad_request"),
        ("10.9.9.9:9100", "worker-2", "", "worker-2 node:9100"),
        ("10.9.9.9:10264", "", "worker-2:9100", "worker-2 node:9100"),
        ("10.9.9.9", "", "10.0.0.3:9100", "edge.site-3 node:9100"),
        ("10.9.9.9", "", "192.168.33.221:9100", "ambiguous_address"),
        ("10.9.9.9", "worker-2", "worker-1:9100", "bad_request"),
        ("10.9.9.9:9100", "worker-9", "", "unknown_node"),
        ("10.9.9.9:9100", "a b", "", "bad_request"),
    ] {
        let selectors = [
            ("x-tunnel-proxy-host", by_host),
            ("x-tunnel-proxy-dest", by_dest),
        ];
        let selectors = selectors.into_iter().filter(|(_, value)| !value.is_empty());
        let fields: Vec<_> = [("host", host)].into_iter().chain(selectors).collect();
        assert_eq!(plain(&fields), expected, "{fields:?}");
    }
    let by_address = ("host", "10.9.9.9:9100");
    let by_name = ("x-tunnel-proxy-host", "worker-2");
    let shared = ("x-tunnel-proxy-dest", "192.168.33.221:9100");
    assert_eq!(plain(&[by_address, by_name, shared]), "worker-2 node:9100");
    let twice = ("x-tunnel-proxy-host", "worker-1");
    assert_eq!(plain(&[by_address, twice, twice]), "bad_request");
    let two = ("x-tunnel-proxy-dest", "worker-1:9100, worker-2:9100");
    assert_eq!(plain(&[by_address, two]), "bad_request");
}

#[test]
fn port_comes_from_host_then_from_the_listener_then_from_the_scheme() {
    for (host, scheme, implied, expected) in [
        ("worker-1", Scheme::Http, Some(9100), "worker-1 node:9100"),
        (
            "worker-1:9443",
            Scheme::Http,
            Some(9100),
            "worker-1 node:9443",
        ),
        // Port 443 is in no list.
        ("worker-1", Scheme::Https, None, "port_denied"),
    ] {
        let answer = answer("GET /", &[("host", host)], scheme, implied);
        assert_eq!(answer, expected, "{host}");
    }
}

#[test]
fn request_target_is_a_path_or_a_url_of_plain_http_whose_authority_replaces_host() {
    for (request, expected) in [
        ("GET http://worker-2:9100/metrics", "worker-2 node:9100"),
        ("GET HTTP://worker-2:9100", "worker-2 node:9100"),
        ("GET http://10.0.0.3/", "edge.site-3 node:80"),
        ("GET http://worker-3:9100/", "unknown_node"),
        ("GET http://user@worker-2:9100/", "bad_request"),
        ("GET https://worker-1:9443/", "bad_request"),
        ("GET ftp://worker-1:9100/", "bad_request"),
        ("GET worker-1:9100", "bad_request"),
        ("CONNECT worker-1:9100", "bad_request"),
        ("OPTIONS *", "bad_request"),
    ] {
        let host = &[("host", "worker-1:9100")];
        let answer = answer(request, host, Scheme::Http, None);
        assert_eq!(answer, expected, "{request}");
    }
    let url = "GET http://worker-1:9443/";
    let host = ("host", "worker-1:9443");
    assert_eq!(answer(url, &[host], Scheme::Https, None), "bad_request");
    let url = "GET http://worker-1:9100/";
    assert_eq!(answer(url, &[], Scheme::Http, None), "bad_request");
    assert_eq!(
        answer(url, &[host, host], Scheme::Http, None),
        "bad_request"
    );
    let selected = ("x-tunnel-proxy-host", "worker-2");
    let answer = answer(url, &[host, selected], Scheme::Http, None);
    assert_eq!(answer, "bad_request", "the selector names another node");
}

#[test]
fn host_field_towards_the_target() {
    let node: NodeName = "worker-1".parse().unwrap();
    let port = Port::new(9100).unwrap();
    for (target, expected) in [
        (Target::Node(port), "worker-1:9100"),
        (Target::Loopback(port), "127.0.0.1:9100"),
    ] {
        let node = node.clone();
        let destination = Destination { node, target };
        assert_eq!(destination.host_field(), expected);
        assert!(destination.is_host_field(expected));
        let (host, port) = expected.split_once(':').unwrap();
        for other in ["9101", "09100", "+9100", "9100 ", ""] {
            assert!(!destination.is_host_field(&format!("{host}:{other}")));
        }
        assert!(!destination.is_host_field(host));
        assert!(!destination.is_host_field(&format!("{host}.:{port}")));
    }
}
