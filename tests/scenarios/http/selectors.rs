//! The node that a request selects: one decision for routing and policy, and never "first wins"
//! (R10, S06).

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use tunnel_agent::config::{Config, NodeIpSetting};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv};
use tunnel_tests::targets::RecordingTarget;

/// Two nodes, each with a target on the same two ports of its own address, and with addresses that
/// only the operator assigned.
struct Site {
    env: TestEnv,
    /// The targets by node and port.
    targets: [[RecordingTarget; 2]; 2],
    ports: [u16; 2],
    _agents: [Agent; 2],
}

/// Addresses of only the first node, of only the second node, of both nodes, and of no node.
const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "10.0.0.12", "10.0.0.9"];

impl Site {
    async fn start() -> Result<Self> {
        let env = TestEnv::start().await?;
        let agent = async |node: &str, address: &str| -> Result<Agent> {
            let address: IpAddr = address.parse()?;
            let own = |config: &mut Config| config.node_ip = NodeIpSetting::Fixed(address);
            env.agent_with(node, own).await
        };
        let agents = [
            agent("worker-1", "127.0.0.2").await?,
            agent("worker-2", "127.0.0.3").await?,
        ];
        let shared: IpAddr = ADDRESSES[2].parse()?;
        for (node, address) in ["worker-1", "worker-2"].iter().zip(ADDRESSES) {
            env.token(node, &[address.parse()?, shared])?;
        }
        let [first, second] = [pair().await?, pair().await?];
        let ports = [first[0].addr().port(), second[0].addr().port()];
        let ([a, b], [c, d]) = (first, second);
        Ok(Self {
            env,
            targets: [[a, c], [b, d]],
            ports,
            _agents: agents,
        })
    }
}

/// Starts targets of both nodes on one port.
async fn pair() -> Result<[RecordingTarget; 2]> {
    loop {
        let one = RecordingTarget::start_on("127.0.0.2:0".parse()?, "worker-1").await?;
        let same = SocketAddr::new("127.0.0.3".parse()?, one.addr().port());
        // Another test may have that port on the other address.
        if let Ok(two) = RecordingTarget::start_on(same, "worker-2").await {
            return Ok([one, two]);
        }
    }
}

/// A host with a port, as in Host and in X-Tunnel-Proxy-Dest, with the nodes that it may mean and
/// the index of the port.
#[derive(Clone, Copy, Debug)]
struct Selector {
    text: &'static str,
    is_name: bool,
    /// Indexes of the nodes that the host may mean.
    nodes: &'static [usize],
    port: usize,
}

const fn form(text: &'static str, is_name: bool, nodes: &'static [usize], port: usize) -> Selector {
    Selector {
        text,
        is_name,
        nodes,
        port,
    }
}

const SELECTORS: [Selector; 9] = [
    form("worker-1", true, &[0], 0),
    form("worker-2", true, &[1], 0),
    form("WORKER-1.", true, &[0], 1),
    form("worker-2", true, &[1], 1),
    form(ADDRESSES[0], false, &[0], 0),
    form(ADDRESSES[1], false, &[1], 0),
    form(ADDRESSES[2], false, &[0, 1], 1),
    form(ADDRESSES[3], false, &[], 0),
    form("nobody", true, &[], 0),
];

const NODES: [(&str, &[usize]); 4] = [
    ("worker-1", &[0]),
    ("WORKER-2.", &[1]),
    ("nobody", &[]),
    ("worker-2", &[1]),
];

/// Returns the node and the port's index that the contract specifies, or `None` for a refusal. The
/// code is independent of the server's.
fn expected(
    host: Selector,
    node: Option<(&str, &[usize])>,
    dest: Option<Selector>,
) -> Option<(usize, usize)> {
    let port = dest.map_or(host.port, |dest| dest.port);
    let only = |nodes: &[usize]| match nodes {
        [node] => Some(*node),
        _ => None,
    };
    let chosen = match (host.is_name, node, dest) {
        // A name in Host decides. The selectors may only agree with it.
        (true, node, dest) => {
            let named = only(host.nodes)?;
            let same = |nodes: &[usize]| only(nodes) == Some(named);
            let agree = node.is_none_or(|(_, nodes)| same(nodes))
                && dest.is_none_or(|dest| same(dest.nodes));
            agree.then_some(named)?
        }
        // An address in Host may be the server's own, so the selectors decide. They must not
        // contradict each other. Dest may be an address of several nodes if the chosen one is among
        // them, or an address of no known node.
        (false, Some((_, nodes)), dest) => {
            let named = only(nodes)?;
            let agree = dest.is_none_or(|dest| {
                dest.nodes.contains(&named) || (!dest.is_name && dest.nodes.is_empty())
            });
            agree.then_some(named)?
        }
        (false, None, Some(dest)) => only(dest.nodes)?,
        (false, None, None) => only(host.nodes)?,
    };
    Some((chosen, port))
}

#[tokio::test(flavor = "multi_thread")]
async fn s06_r10_every_pair_of_selectors_is_one_node_or_400() -> Result<()> {
    let site = Site::start().await?;
    let mut wrong = Vec::new();
    let nodes: Vec<_> = std::iter::once(None).chain(NODES.map(Some)).collect();
    let dests: Vec<_> = std::iter::once(None).chain(SELECTORS.map(Some)).collect();
    let mut asked = 0;
    for host in SELECTORS {
        for node in &nodes {
            for dest in &dests {
                let at = |form: Selector| format!("{}:{}", form.text, site.ports[form.port]);
                let mut get = RawRequest::new("GET", &format!("/{asked}"), &at(host))
                    .header("Connection", "close");
                if let Some((name, _)) = node {
                    get = get.header("X-Tunnel-Proxy-Host", name);
                }
                if let Some(dest) = dest {
                    get = get.header("x-tunnel-proxy-dest", &at(*dest));
                }
                let reply = request(site.env.http(), &get).await?;
                let reached: Vec<_> = (0..2)
                    .flat_map(|node| (0..2).map(move |port| (node, port)))
                    .filter(|(node, port)| {
                        let requests = site.targets[*node][*port].requests();
                        let path = format!("/{asked}");
                        requests.iter().any(|request| request.target == path)
                    })
                    .collect();
                let expected: Vec<_> = expected(host, *node, *dest).into_iter().collect();
                let status = if expected.is_empty() { 400 } else { 200 };
                if reached != expected || reply.status != status {
                    let (got, text) = (reply.status, reply.text());
                    wrong.push(format!("Host {host:?}, {node:?}, {dest:?}: {got} {reached:?}, not {expected:?}: {text}"));
                }
                asked += 1;
            }
        }
    }
    assert_eq!(asked, 9 * 5 * 10);
    assert!(
        wrong.is_empty(),
        "{} of {asked}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    // The selectors are for the server. No target receives them.
    for target in site.targets.iter().flatten() {
        for recorded in target.requests() {
            let names = recorded.fields.iter().map(|(name, _)| name.to_lowercase());
            let selectors: Vec<_> = names.filter(|name| name.starts_with("x-tunnel")).collect();
            assert!(selectors.is_empty(), "{selectors:?}");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn s06_r10_selectors_given_twice_or_malformed_are_400() -> Result<()> {
    let site = Site::start().await?;
    let port = site.ports[0];
    let own = format!("worker-1:{port}");
    let (node, dest) = ("X-Tunnel-Proxy-Host", "X-Tunnel-Proxy-Dest");
    let other = format!("worker-2:{port}");
    let address = format!("{}:{port}", ADDRESSES[0]);
    let mut cases: Vec<Vec<(&str, String)>> = Vec::new();
    for pair in [
        ["worker-1", "worker-1"],
        ["worker-1", "worker-2"],
        ["worker-2", "worker-1"],
        ["worker-1", ""],
    ] {
        cases.push(pair.map(|value| (node, value.to_owned())).to_vec());
    }
    for pair in [
        [&own, &own],
        [&own, &other],
        [&other, &own],
        [&own, &address],
        [&address, &own],
    ] {
        cases.push(pair.map(|value| (dest, value.clone())).to_vec());
    }
    for value in [
        "",
        "worker-1, worker-2",
        "worker-1 worker-2",
        "worker_1",
        "worker-1/",
        "-",
        "\u{e9}",
        &own,
    ] {
        cases.push(vec![(node, value.to_owned())]);
    }
    for value in [
        "",
        "worker-1",
        "worker-1:",
        "worker-1:0",
        "worker-1:x",
        "worker-1:99999",
        ":80",
        "http://worker-1:80",
        "[::1",
        "worker-1:80:80",
    ] {
        cases.push(vec![(dest, value.to_owned())]);
    }
    for host in [&own, &address] {
        for case in &cases {
            let mut get = RawRequest::new("GET", "/", host).header("Connection", "close");
            for (name, value) in case {
                get = get.header(name, value);
            }
            let reply = request(site.env.http(), &get).await?;
            let (code, text) = (reply.header("x-tunnel-error"), reply.text());
            assert_eq!(reply.status, 400, "{host} {case:?}: {text}");
            assert_eq!(code, Some("bad_request"), "{host} {case:?}: {text}");
        }
    }
    let mut targets = site.targets.iter().flatten();
    assert!(targets.all(|target| target.recorded().is_empty()));
    Ok(())
}
