//! Heads of requests as far as they decide the node, answers of HTTP proxies, and Node objects.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use tunnel_agent::proxy_answer;
use tunnel_proto::wire::name::NodeName;
use tunnel_routing::decision::{RequestFacts, decide};
use tunnel_routing::destination::Scheme;
use tunnel_server::cluster::fuzz::{observe, restore};
use tunnel_server::ingress::fuzz::{head_error, proxy_target};
use tunnel_server::routing::routes::RouteTable;

pub(super) fn heads() -> Result<Vec<Vec<u8>>> {
    Ok([
        "GET /metrics HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n",
        "POST /a?b=c HTTP/1.1\r\nHost: WORKER-2.:9100\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: 192.0.2.1:9100\r\nX-Tunnel-Proxy-Host: worker-2\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: [2001:db8::1]\r\nX-Tunnel-Proxy-Dest: worker-2:9100\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: worker-1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        "CONNECT worker-1:10250 HTTP/1.1\r\nHost: worker-1:10250\r\n\r\n",
        "CONNECT [2001:db8::1]:443 HTTP/1.0\r\nProxy-Authorization: Basic dTpw\r\n\r\n",
        "GET http://worker-1:9100/metrics HTTP/1.1\nHost: worker-1\n\n",
    ]
    .map(|head| head.as_bytes().to_vec())
    .into())
}

/// The check of heads does not depend on how they arrive. The node of a request that is not refused
/// is one of the table; the port of a request to a proxy is that of its target.
pub(super) fn check_head(input: &[u8]) -> Result<()> {
    let error = head_error(input, input.len());
    for length in [1, 7] {
        let in_pieces = head_error(input, length);
        ensure!(in_pieces == error, "{in_pieces:?}, and {error:?} at once");
    }
    let Some((method, uri, headers)) = parse(input) else {
        return Ok(());
    };
    let names: [NodeName; 2] = ["worker-1".parse()?, "worker-2".parse()?];
    let address: IpAddr = "192.0.2.1".parse()?;
    let table = RouteTable::new([(&names[0], &[address][..]), (&names[1], &[][..])]);
    let facts = RequestFacts {
        method: &method,
        uri: &uri,
        headers: &headers,
        scheme: Scheme::Http,
        implied_port: None,
    };
    if let Ok(requested) = decide(&facts, &table) {
        let node = requested.node;
        ensure!(names.contains(&node), "{node} is not in the table");
    }
    if let Some((host, port)) = proxy_target(&method, &uri, &headers) {
        let own = uri.port_u16();
        ensure!(
            own.is_none_or(|own| own == port.get()),
            "{uri} leads to {host}:{port}"
        );
    }
    Ok(())
}

/// Returns method, target and fields of a head. hyper, which parses heads, is stricter.
fn parse(head: &[u8]) -> Option<(Method, Uri, HeaderMap)> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let mut words = lines.next()?.split(|byte| *byte == b' ');
    let method = Method::from_bytes(words.next()?).ok()?;
    let uri = Uri::try_from(words.next()?).ok()?;
    let mut headers = HeaderMap::new();
    for line in lines {
        let mut sides = line.splitn(2, |byte| *byte == b':');
        let name = sides.next().map(HeaderName::from_bytes);
        let value = sides.next().unwrap_or_default().trim_ascii();
        if let (Some(Ok(name)), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    Some((method, uri, headers))
}

pub(super) fn answers() -> Result<Vec<Vec<u8>>> {
    Ok([
        "HTTP/1.1 200 Connection established\r\n\r\n\u{16}\u{3}\u{1}",
        "HTTP/1.0 200\r\nVia: 1.1 proxy\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\n\n",
        "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n",
    ]
    .map(|answer| answer.as_bytes().to_vec())
    .into())
}

/// An accepted head ends with an empty line, and its reason is a line for a log.
pub(super) fn check_answer(input: &[u8]) -> Result<()> {
    let Some((head, code, reason)) = proxy_answer(input) else {
        return Ok(());
    };
    ensure!(head.starts_with(b"HTTP/1."), "no head of HTTP/1.x");
    ensure!(
        head.ends_with(b"\n\n") || head.ends_with(b"\n\r\n"),
        "a head without its end"
    );
    ensure!((100..1000).contains(&code), "code {code}");
    let is_long = reason.chars().count() > 120;
    ensure!(!is_long && !reason.contains(char::is_control), "{reason:?}");
    Ok(())
}

pub(super) fn cluster_nodes() -> Result<Vec<Vec<u8>>> {
    let node = |name: &str, hostname: &str, network: &str| {
        serde_json::json!({
            "metadata": {
                "name": name,
                "creationTimestamp": "2026-01-02T03:04:05Z",
                "labels": { "openyurt.io/is-edge-worker": "true" },
            },
            "spec": { "podCIDRs": [network] },
            "status": {
                "addresses": [
                    { "type": "InternalIP", "address": "192.0.2.1" },
                    { "type": "ExternalIP", "address": "2001:db8::1" },
                    { "type": "Hostname", "address": hostname },
                ],
                "daemonEndpoints": { "kubeletEndpoint": { "Port": 10250 } },
            },
        })
    };
    let nodes = [
        node("worker-1", "worker-1.site.example", "10.244.1.0/24"),
        node("worker-2.site.example", "worker-2", "fd00:244::/64"),
        node("worker-1.site.example", "worker-1", "0.0.0.0/0"),
        node("worker-3", "169.254.169.254", "127.0.0.0/8"),
    ];
    let persisted = serde_json::json!({
        "worker-1": {
            "facts": { "hostname": "worker-1.site", "internal": ["192.0.2.1"], "isEdge": true },
            "alias": "worker-1.site",
        },
        "worker-2": { "facts": { "external": ["2001:db8::1"], "kubeletPort": 10250 } },
    });
    let mut corpus = vec![serde_json::to_vec(&nodes)?, serde_json::to_vec(&persisted)?];
    for pair in nodes.windows(2) {
        corpus.push(serde_json::to_vec(pair)?);
    }
    Ok(corpus)
}

/// Each name and alias belongs to one node, and Pod networks pass the check of claimed networks.
pub(super) fn check_cluster_nodes(input: &[u8]) -> Result<()> {
    for (routes, networks) in [observe(input), restore(input)].into_iter().flatten() {
        let mut names = BTreeSet::new();
        for route in &routes {
            for name in [Some(&route.name), route.hostname.as_ref()]
                .into_iter()
                .flatten()
            {
                ensure!(names.insert(name), "two nodes are named {name}");
            }
        }
        for (node, pods) in networks.pods.iter() {
            for network in pods {
                let checked = network.check_claimed();
                checked.with_context(|| format!("Pods of {node}"))?;
            }
        }
        let _merged = RouteTable::merge(&routes);
    }
    Ok(())
}
