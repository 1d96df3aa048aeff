//! A node whose address changes under a running session, while another host takes its old address,
//! and servers that report addresses which are never dialed.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::Instant;
use tunnel_tests::eventually::eventually;
use tunnel_tests::fakes::{EXPORTER_PORT, KUBELET_PORT, site};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Program, ScratchDir, Server, ServerSetup, copy_ca,
};
use tunnel_tests::tools::{Skip, Tool, or_skip, require};

use super::abuse::report_figure;
use super::namespaces::curl;

/// One network with a server, a node and a third host:
///
/// ```text
///   cloud 10.77.9.1    node 10.77.9.2, later .3    other: no address, later 10.77.9.2
///        |                   |                       |
///        +---------------- bridge -------------------+
/// ```
struct Segment {
    cloud: Namespace,
    node: Namespace,
    other: Namespace,
    scratch: ScratchDir,
}

impl Segment {
    fn new() -> Result<Self, Skip> {
        require(&[Tool::Curl])?;
        let failed = |error: std::io::Error| Skip::because(format!("cannot write hosts: {error}"));
        let scratch = ScratchDir::new().map_err(failed)?;
        let hosts = scratch.path().join("hosts");
        // Nobody has the first address of the name.
        let names = format!("127.0.0.1 localhost\n2001:db8:77::1 {NAME}\n{CLOUD} {NAME}\n");
        fs::write(&hosts, names).map_err(failed)?;
        let cloud = Namespace::new("cloud", &hosts)?;
        let node = cloud.neighbor("node", &hosts)?;
        let other = cloud.neighbor("other", &hosts)?;
        cloud.script(&format!(
            "$IP link add segment type bridge
             $IP address add {CLOUD}/24 dev segment
             $IP link set segment up
             for host in {} {}; do
               $IP link add port$host type veth peer name eth0 netns $host
               $IP link set port$host master segment up
             done",
            node.holder(),
            other.holder(),
        ))?;
        node.script(&format!(
            "$IP link set eth0 up
             $IP address add {OLD}/24 dev eth0"
        ))?;
        other.script("$IP link set eth0 up")?;
        Ok(Self {
            cloud,
            node,
            other,
            scratch,
        })
    }

    /// Moves the node to another address, and gives its old one to the other host.
    fn readdress(&self) -> Result<(), Skip> {
        self.node.script(&format!(
            "$IP address del {OLD}/24 dev eth0
             $IP address add {NEW}/24 dev eth0"
        ))?;
        self.other
            .script(&format!("$IP address add {OLD}/24 dev eth0"))?;
        Ok(())
    }

    /// Returns the number of connections that the other host has accepted.
    fn accepted_by_other(&self) -> Result<u64> {
        let counters = self.other.script("cat /proc/net/snmp")?;
        let mut tcp = counters.lines().filter(|line| line.starts_with("Tcp:"));
        let (names, values) = tcp.next().zip(tcp.next()).context("no counters of TCP")?;
        let mut fields = names.split_whitespace().zip(values.split_whitespace());
        let (_, value) = fields
            .find(|(name, _)| *name == "PassiveOpens")
            .context("no PassiveOpens")?;
        Ok(value.parse()?)
    }

    /// Counts what the node sends to the addresses of [`reported_addresses`].
    fn count_packets(&self) -> Result<(), Skip> {
        require(&[Tool::Nft])?;
        self.node.script(&format!(
            "$IP route add default via {CLOUD}
             $NFT -f - <<'RULES'
             table inet counted {{
               counter metadata {{}}
               counter loopback {{}}
               counter denied {{}}
               counter allowed {{}}
               chain sent {{
                 type filter hook output priority 0;
                 ip daddr 169.254.0.0/16 counter name metadata
                 ip6 daddr fd00:ec2::254 counter name metadata
                 meta l4proto {{ tcp, udp }} th dport 7001 counter name loopback
                 meta l4proto {{ tcp, udp }} th dport 7002 counter name denied
                 meta l4proto {{ tcp, udp }} th dport 7003 counter name allowed
               }}
             }}
RULES"
        ))?;
        Ok(())
    }

    /// Returns the value of a counter of [`Segment::count_packets`].
    fn packets(&self, counter: &str) -> Result<u64> {
        let listed = format!("$NFT list counter inet counted {counter}");
        let listed = self.node.script(&listed)?;
        let packets = listed.split("packets ").nth(1);
        let packets = packets.and_then(|rest| rest.split_whitespace().next());
        Ok(packets.context("no counter")?.parse()?)
    }

    async fn targets(&self) -> Result<[Process; 2]> {
        let [exporter, kubelet] = [EXPORTER_PORT, KUBELET_PORT].map(any);
        Ok([
            site(NODE, exporter, kubelet, Some(&self.node)).await?,
            site("other", exporter, kubelet, Some(&self.other)).await?,
        ])
    }

    async fn server(&self) -> Result<Server> {
        // A silent session is not suspect within the patience of these tests.
        let config = self.scratch.path().join("server.yaml");
        fs::write(
            &config,
            "limits: {suspectAfterBusy: 60s, suspectAfterIdle: 90s, deadAfter: 120s}\n",
        )?;
        let setup = ServerSetup::new(&self.scratch.path().join("server"), Some(&self.cloud));
        let setup = setup.args(&["--config", &config.to_string_lossy()]);
        setup.args(&["--http-proxy-ports", "9100"]).start().await
    }

    async fn agent(&self, server: &Server, arguments: &[&str]) -> Result<AgentSetup> {
        let endpoint = SocketAddr::new(CLOUD.parse()?, server.address(Listener::Agents).port());
        let token = server.token(NODE, None).await?;
        let data_dir = self.scratch.path().join("agent");
        let setup = AgentSetup::new(NODE, endpoint, &data_dir, Some(&self.node));
        Ok(setup.args(&["--token", &token]).args(arguments))
    }

    /// Requests a port of the node over HTTP, and one over HTTPS, with a credential.
    async fn request(&self, server: &Server) -> Result<[String; 2]> {
        let http = format!("http://{}/metrics", server.address(Listener::Http));
        let https = format!("https://{}/healthz", server.address(Listener::Https));
        let request = async |url: &str, port: u16| {
            let curl = curl()?
                .args(["-k", "-w", " %{http_code}"])
                .args(["-H", "Authorization: Bearer secret"])
                .args(["-H", &format!("Host: {NODE}:{port}"), url]);
            curl.inside(Some(&self.cloud)).run().await?.ok()
        };
        let (http, https) =
            tokio::join!(request(&http, EXPORTER_PORT), request(&https, KUBELET_PORT));
        Ok([http?, https?])
    }

    /// Waits until both ports of the node answer.
    async fn wait_until_answered(&self, server: &Server, agent: &Process) -> Result<()> {
        eventually("answers of the node", TIMEOUT, async || {
            let [http, https] = self.request(server).await?;
            ensure!(
                http.starts_with(&format!("# node {NODE}")),
                "{http}; {agent}"
            );
            ensure!(https.ends_with(" 200"), "{https}; {agent}");
            Ok(())
        })
        .await;
        Ok(())
    }

    /// Returns the readiness page of the agent.
    async fn readiness(&self) -> Result<String> {
        let curl = curl()?.arg("http://127.0.0.1:10266/readyz?verbose");
        curl.inside(Some(&self.node)).run().await?.ok()
    }
}

tests_of! {
    fn over_quic_a_session_outlives_the_address_and_no_other_host_gets_its_requests() =
        address_changes("quic");
    fn over_h2_another_session_follows_the_address_and_no_other_host_gets_its_requests() =
        address_changes("h2");
}

async fn address_changes(transport: &str) -> Result<()> {
    let Some(segment) = or_skip(Segment::new()) else {
        return Ok(());
    };
    let _targets = segment.targets().await?;
    let server = segment.server().await?;
    // The agent sends nothing by itself within the patience of this test.
    let config = segment.scratch.path().join("agent.yaml");
    fs::write(
        &config,
        "limits: {keepAlive: 40s, suspectAfterIdle: 90s, deadAfter: 120s}\n",
    )?;
    let setup = segment.agent(&server, &["--transport", transport]).await?;
    let setup = setup.args(&["--config", &config.to_string_lossy()]);
    let agent = setup.start()?;
    server.wait_until_connected(&[NODE]).await;
    segment.wait_until_answered(&server, &agent).await?;

    segment.readdress()?;
    let changed = Instant::now();
    segment.wait_until_answered(&server, &agent).await?;
    let seconds = changed.elapsed().as_secs_f64();
    report_figure(&format!(
        "{transport}: answers {seconds:.2} s after the change"
    ));
    ensure!(segment.accepted_by_other()? == 0, "{agent}");
    if transport == "quic" {
        let lines = agent.log().lines();
        let changes = lines.iter().filter(|line| line.contains(CHANGED)).count();
        ensure!(changes == 1, "{changes} lines; {agent}");
        let sessions = lines.iter().filter(|line| line.contains("session ready"));
        ensure!(sessions.count() == 1, "{agent}");
    }
    Ok(())
}

/// `NODE_IP` is as old as its Pod, and `--node-ip` is the operator's word.
#[tokio::test(flavor = "multi_thread")]
async fn address_that_the_host_does_not_have_is_dialed_only_where_the_operator_set_it() -> Result<()>
{
    let Some(segment) = or_skip(Segment::new()) else {
        return Ok(());
    };
    let _targets = segment.targets().await?;
    let server = segment.server().await?;
    segment.readdress()?;
    let setup = segment.agent(&server, &[]).await?;
    let agent = setup.clone().env("NODE_IP", OLD).start()?;
    server.wait_until_connected(&[NODE]).await;
    segment.wait_until_answered(&server, &agent).await?;
    ensure!(segment.accepted_by_other()? == 0, "{agent}");
    let page = segment.readiness().await?;
    let line = format!("[!] node-ip: NODE_IP {OLD} is not an address of this host");
    ensure!(page.contains(&line), "{page}");
    agent.stop(TIMEOUT).await?;

    let agent = setup.clone().args(&["--node-ip", OLD]).start()?;
    server.wait_until_connected(&[NODE]).await;
    eventually("answer of the other host", TIMEOUT, async || {
        let [http, _https] = segment.request(&server).await?;
        ensure!(http.starts_with("# node other"), "{http}; {agent}");
        Ok(())
    })
    .await;
    let page = segment.readiness().await?;
    let line = format!("[!] node-ip: --node-ip {OLD} is not an address of this host");
    ensure!(page.contains(&line), "{page}");
    agent.stop(TIMEOUT).await?;

    let second = "10.77.9.4";
    segment
        .node
        .script(&format!("$IP address add {second}/24 dev eth0"))?;
    let agent = setup.args(&["--node-ip", second]).start()?;
    server.wait_until_connected(&[NODE]).await;
    segment.wait_until_answered(&server, &agent).await?;
    let page = segment.readiness().await?;
    ensure!(!page.contains("[!] node-ip"), "{page}");
    Ok(())
}

/// The server's name has an address of IPv6 that does not answer, and the target has only IPv6.
#[tokio::test(flavor = "multi_thread")]
async fn servers_and_targets_are_found_at_the_address_of_the_other_family() -> Result<()> {
    let Some(segment) = or_skip(Segment::new()) else {
        return Ok(());
    };
    segment
        .node
        .script(&format!("$IP address add {V6}/64 dev eth0 nodad"))?;
    let [exporter, kubelet] =
        [EXPORTER_PORT, KUBELET_PORT].map(|port| SocketAddr::new(V6.into(), port));
    let _target = site(NODE, exporter, kubelet, Some(&segment.node)).await?;
    let server = segment.server().await?;
    let endpoint = format!("{NAME}:{}", server.address(Listener::Agents).port());
    let token = server.token(NODE, None).await?;
    // One address after the other would take longer than this test waits.
    let config = segment.scratch.path().join("agent.yaml");
    fs::write(&config, "limits: {handshakeTimeout: 10m}\n")?;
    let verb = |verb: &str| -> Result<Program> {
        let program = Program::ours("tunnel-agent")?
            .args([verb, "--server", &endpoint, "--node-name", NODE])
            .args(["--token", &token, "--transport", "quic"])
            .arg("--data-dir")
            .arg(segment.scratch.path().join("agent"))
            .arg("--config")
            .arg(&config);
        Ok(program.inside(Some(&segment.node)))
    };
    let agent = verb("run")?.start()?;
    server.wait_until_connected(&[NODE]).await;
    segment.wait_until_answered(&server, &agent).await?;
    // There is no default route.
    let doctor = verb("doctor")?.args(["--only", "D19.ports", "--port", "9100"]);
    doctor.run().await?.ok()?;
    Ok(())
}

/// Routers exist that drop packets whose ECN field is set.
#[tokio::test(flavor = "multi_thread")]
async fn quic_connects_over_a_path_that_drops_packets_marked_for_ecn() -> Result<()> {
    let segment = require(&[Tool::Nft]).and_then(|()| Segment::new());
    let Some(segment) = or_skip(segment) else {
        return Ok(());
    };
    let _targets = segment.targets().await?;
    let server = segment.server().await?;
    let nft = Program::tool(Tool::Nft)?.args(["-f", "-"]);
    let nft = nft.inside(Some(&segment.node));
    nft.run_with(DROP_MARKED.as_bytes()).await?.ok()?;
    let setup = segment.agent(&server, &["--transport", "quic"]).await?;
    let agent = setup.start()?;
    server.wait_until_connected(&[NODE]).await;
    segment.wait_until_answered(&server, &agent).await
}

tests_of! {
    fn over_quic_an_agent_dials_no_forbidden_address_for_a_server() = reported_addresses("quic");
    fn over_h2_an_agent_dials_no_forbidden_address_for_a_server() = reported_addresses("h2");
}

/// A second server reports addresses that an agent never dials for a caller, and one that it dials.
async fn reported_addresses(transport: &str) -> Result<()> {
    let Some(segment) = or_skip(Segment::new()) else {
        return Ok(());
    };
    if or_skip(segment.count_packets()).is_none() {
        return Ok(());
    }
    segment
        .other
        .script(&format!("$IP address add {SECOND}/24 dev eth0"))?;
    let folders = ["server", "second"].map(|name| segment.scratch.path().join(name));
    let peering = |name: &str, address: &str| {
        let listen = format!("{address}:10269");
        let peers = [("s0", CLOUD), ("s1", SECOND)]
            .map(|(name, address)| format!("{name}={address}:10269"));
        ["--replica-name", name, "--peer-listen", &listen]
            .into_iter()
            .chain(peers.iter().flat_map(|peer| ["--peer", peer.as_str()]))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let start = async |folder: &Path, namespace: &Namespace, arguments: Vec<String>| {
        let setup = ServerSetup::new(folder, Some(namespace));
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        setup.args(&arguments).start().await
    };
    let [first, second] = &folders;
    let server = start(first, &segment.cloud, peering("s0", CLOUD)).await?;
    copy_ca(first, second)?;
    let reported = [
        "169.254.169.254:80",
        "[fd00:ec2::254]:80",
        "127.0.0.1:7001",
        "[::1]:7001",
        format!("{SECOND}:7002").as_str(),
        format!("{SECOND}:7003").as_str(),
    ]
    .map(|address| ["--advertise".to_owned(), address.to_owned()]);
    let arguments = [peering("s1", SECOND), reported.concat()].concat();
    let _second = start(second, &segment.other, arguments).await?;

    let policy = ["--transport", transport, "--deny-ports", "7002"];
    let agent = segment.agent(&server, &policy).await?;
    let agent = agent.args(&["--replicas", "2"]).start()?;
    server.wait_until_connected(&[NODE]).await;
    // It is the last one of the list.
    eventually("a dial of the allowed address", TIMEOUT, async || {
        ensure!(segment.packets("allowed")? > 0, "{agent}");
        Ok(())
    })
    .await;
    for counter in ["metadata", "loopback", "denied"] {
        let packets = segment.packets(counter)?;
        ensure!(packets == 0, "{packets} packets to {counter}; {agent}");
    }
    let refused = "server reports addresses that are not dialed";
    ensure!(agent.log().contains(refused), "{agent}");
    Ok(())
}

fn any(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::from([0, 0, 0, 0]), port)
}

const DROP_MARKED: &str = "
table ip marked {
  chain sent { type filter hook output priority 0; meta l4proto udp ip ecn != not-ect drop; }
  chain received { type filter hook input priority 0; meta l4proto udp ip ecn != not-ect drop; }
}
";
const NAME: &str = "cloud.test";
const V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 2);
const NODE: &str = "worker-1";
const CLOUD: &str = "10.77.9.1";
const OLD: &str = "10.77.9.2";
const NEW: &str = "10.77.9.3";
/// Address of the second server.
const SECOND: &str = "10.77.9.4";
const CHANGED: &str = "address of the node has changed";

/// Less than the agent's keep-alive.
const TIMEOUT: Duration = Duration::from_secs(10);
