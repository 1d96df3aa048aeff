use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Request};

use super::*;
use crate::destination::{AgentTarget, Destination};
use crate::operation::RequestedOperation;
use crate::policy::{Access, AccessCaller, Listener, PortLists, PortPolicy, Route};
use crate::testing::located;

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

fn parse(
    method: &str,
    uri: &str,
    fields: &[(&'static str, &'static str)],
) -> Result<ProxyRequest, &'static str> {
    let mut request = Request::builder().method(method).uri(uri).body(()).unwrap();
    for (name, value) in fields {
        let value = HeaderValue::from_static(value);
        request.headers_mut().append(*name, value);
    }
    ProxyRequest::of(request.method(), request.uri(), request.headers())
        .map_err(|error| error.kind())
}

#[test]
fn connect_takes_its_target_from_the_request_line_alone() {
    for (uri, expected) in [
        ("worker-1:10250", Ok("worker-1:10250")),
        ("WORKER-1.:10250", Ok("worker-1:10250")),
        ("192.0.2.1:443", Ok("192.0.2.1:443")),
        ("[2001:db8::1]:443", Ok("[2001:db8::1]:443")),
        ("worker-1", Err("bad_request")),
        ("worker-1:", Err("bad_request")),
        ("worker-1:0", Err("bad_request")),
        ("user@worker-1:10250", Err("bad_request")),
        ("http://worker-1:10250/", Err("bad_request")),
        ("/worker-1:10250", Err("bad_request")),
    ] {
        let parsed = parse("CONNECT", uri, &[("host", "whatever:1")]);
        let parsed = parsed.map(|parse| {
            assert_eq!(parse.kind, RequestKind::Connect);
            parse.to_string()
        });
        assert_eq!(parsed.as_deref(), expected.as_ref().copied(), "{uri}");
    }
    let with_body = |field| parse("CONNECT", "worker-1:1", &[field]);
    assert_eq!(with_body(("content-length", "5")), Err("bad_request"));
    assert_eq!(with_body(("content-length", "")), Err("bad_request"));
    assert!(with_body(("content-length", "0")).is_ok());
    let chunked = with_body(("transfer-encoding", "chunked"));
    assert_eq!(chunked, Err("bad_request"));
}

#[test]
fn s44_plain_requests_only_read_and_never_switch_protocols() {
    let url = "http://worker-1:9100/metrics?a=b";
    for method in ["GET", "HEAD"] {
        let parsed = parse(method, url, &[]).unwrap();
        assert_eq!(parsed.kind, RequestKind::Read);
        assert_eq!(parsed.to_string(), "worker-1:9100");
    }
    let parsed = parse("GET", "http://worker-1/", &[]).unwrap();
    assert_eq!(parsed.to_string(), "worker-1:80");
    let refused = Err("unsupported");
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
        assert_eq!(parse(method, url, &[]), refused, "{method}");
    }
    for fields in [
        &[("upgrade", "websocket"), ("connection", "Upgrade")][..],
        &[("upgrade", "SPDY/3.1")],
        &[("connection", "keep-alive, upgrade")],
        &[("connection", "x-UPGRADEs")],
    ] {
        assert_eq!(parse("GET", url, fields), refused, "{fields:?}");
    }
    for uri in [
        "https://worker-1:10250/metrics",
        "http://user:pass@worker-1:9100/",
        "/metrics",
    ] {
        let refused = Err("bad_request");
        assert_eq!(parse("GET", uri, &[]), refused, "{uri}");
    }
}

#[test]
fn names_of_other_servers_divert_nothing_that_this_server_may_dial() {
    let held = ["g1", "example.com"];
    let routes =
        RouteTable::with_held_elsewhere(Arc::new(move |name| held.contains(&name.as_str())));
    let in_cluster = ClusterNetworks {
        services: vec!["10.96.0.0/12".parse().unwrap()],
        ..ClusterNetworks::default()
    };
    for (target, cluster, is_node) in [
        ("g1:9100", &in_cluster, true),
        ("g2:9100", &in_cluster, false),
        ("example.com:443", &in_cluster, false),
        ("example.com:443", &ClusterNetworks::default(), true),
    ] {
        let request = parse("CONNECT", target, &[]).unwrap();
        let requested = request.resolve(&routes, cluster, |_| true).unwrap();
        let is_routed = matches!(requested, RequestedDestination::Node(_));
        assert_eq!(is_routed, is_node, "{target}");
    }
}

#[test]
fn nodes_go_through_their_agents_and_all_else_is_the_servers_to_dial() {
    let (edge, cloud) = (name("edge-1"), name("cloud-1"));
    let twin = name("edge-2");
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let (own, shared, far) = (ip("10.0.0.1"), ip("192.168.33.221"), ip("10.0.0.9"));
    // Kubelets can write any addresses.
    let contested = ip("10.0.0.8");
    let claimed = [own, shared, contested, ip("10.96.0.11")];
    let routes = RouteTable::new([
        (&edge, &claimed[..]),
        (&twin, &[shared][..]),
        (&cloud, &[far, contested][..]),
    ]);
    let lists = PortLists {
        http: "9100".parse().unwrap(),
        ..PortLists::default()
    };
    let policy = PortPolicy::of_lists(lists, Vec::new());
    let mut cluster = ClusterNetworks::default();
    let cloud_addresses = vec![far, contested];
    cluster.cloud_nodes.insert(cloud.clone(), cloud_addresses);
    cluster.services = vec!["10.96.0.0/12".parse().unwrap()];
    let route = |target: &str, agents: &[&NodeName]| {
        let parse = parse("CONNECT", target, &[]).unwrap();
        let requested = parse
            .resolve(&routes, &cluster, |node| agents.contains(&node))
            .map_err(|error| error.kind())?;
        let access = Access {
            caller: AccessCaller::ANONYMOUS,
            destination: requested,
            operation: RequestedOperation::Connect,
        };
        located(&policy, access).map_err(|denied| denied.kind())
    };
    let agent = |node: &NodeName, port| {
        let target = policy
            .target(Port::new(port).unwrap(), Listener::Connect)
            .unwrap();
        let node = node.clone();
        Ok(Route::Agent(AgentTarget {
            destination: Destination { node, target },
            keeps_host: false,
        }))
    };
    let direct = |addresses: &[IpAddr]| {
        let addresses = addresses.to_vec();
        Ok(Route::Direct(DialTarget::Addresses(addresses)))
    };
    let contradicting = Err("ambiguous_address");
    assert_eq!(route("edge-1:10250", &[]), agent(&edge, 10250));
    assert_eq!(route("10.0.0.1:9100", &[]), agent(&edge, 9100));
    assert_eq!(route("[::ffff:10.0.0.1]:9100", &[]), agent(&edge, 9100));
    assert_eq!(route("edge-1:22", &[]), Err("port_denied"));
    assert_eq!(route("192.168.33.221:10250", &[]), contradicting);
    assert_eq!(route("cloud-1:10250", &[]), direct(&[far, contested]));
    assert_eq!(route("10.0.0.9:10250", &[]), direct(&[far]));
    // It has an agent.
    assert_eq!(route("cloud-1:10250", &[&cloud]), agent(&cloud, 10250));
    assert_eq!(route("10.96.0.10:443", &[]), direct(&[ip("10.96.0.10")]));
    // An edge node claims the address of a node in the cloud, and a Service's address.
    assert_eq!(route("10.0.0.8:10250", &[]), contradicting);
    assert_eq!(route("10.96.0.11:10250", &[&edge]), contradicting);
    // A resolver would take it for 127.0.0.1.
    assert_eq!(route("127.1:443", &[]), Err("unknown_node"));
    let hook = DialTarget::Name(name("hook.default.svc"));
    let by_name = route("hook.default.svc:443", &[]);
    assert_eq!(by_name, Ok(Route::Direct(hook)));
}
