//! Each alert of `deploy/monitoring` in a real Prometheus: it fires with its fault and ends after
//! it.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::process::{
    AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup, Signal, next_loopback,
};
use tunnel_tests::prometheus::{Prometheus, alerts, shortened_rules};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::{NODE, Servers, follow, wait_for, wait_for_route};

/// An alert without a fault here fails the test.
#[tokio::test(flavor = "multi_thread")]
async fn each_alert_fires_with_its_fault_and_ends_after_it() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let mut monitored = Monitored::start().await?;
    monitored.block_udp_and_kill_the_agent().await?;
    monitored.kill_a_server().await?;
    monitored.reach_limits().await?;
    monitored.expire_and_break_certificate_files().await?;
    monitored.clone_refuse_and_cut_agents().await?;
    let alerts = alerts()?;
    let names = alerts.iter().filter_map(|alert| alert["alert"].as_str());
    let names: BTreeSet<_> = names.collect();
    let fired = &monitored.fired;
    ensure!(*fired == names, "{fired:?} fired, not {names:?}");
    Ok(())
}

/// Two servers with an agent, and a server and an agent with certificate files, all scraped.
struct Monitored {
    servers: Servers,
    /// Connects the agent to the first server. UDP is blocked at first.
    link: Link,
    setup: AgentSetup,
    agent: Process,
    operated: Operated,
    prometheus: Prometheus,
    fired: BTreeSet<&'static str>,
    _scratch: ScratchDir,
}

impl Monitored {
    async fn start() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let limits = scratch.file("server.yaml", "limits:\n  peerStreams: 1\n")?;
        let servers = Servers::start(2, &["--config", &limits.to_string_lossy()]).await?;
        let first = &servers.servers[0];
        let link = Link::start(first.address(Listener::Agents), SEED)?;
        link.set(TrafficClass::UDP, Impairment::black_hole());
        let limits = scratch.file("agent.yaml", "limits:\n  streamsPerAgent: 1\n")?;
        let (token, address) = (first.token(NODE, None).await?, next_loopback());
        let folder = scratch.path().join("agent");
        let setup = AgentSetup::on_address(NODE, link.addr(), &folder, address)
            .args(&["--token", &token, "--replicas", "1"])
            .args(&["--config", &limits.to_string_lossy()]);
        let operated = Operated::start().await?;
        let metas = servers.servers.iter();
        let metas = metas.map(|server| (SERVER, server.address(Listener::Meta)));
        let mut targets: Vec<_> = metas.collect();
        targets.extend([
            (AGENT, Listener::Meta.on(address)),
            (OPERATED_SERVER, operated.server.address(Listener::Meta)),
            (OPERATED_AGENT, operated.agent_meta),
        ]);
        Ok(Self {
            servers,
            link,
            agent: setup.start()?,
            setup,
            operated,
            prometheus: Prometheus::start(&targets, &shortened_rules()?)?,
            fired: BTreeSet::new(),
            _scratch: scratch,
        })
    }

    /// Waits until exactly these alerts fire. Each has its job.
    async fn fires(&mut self, alerts: &[Firing]) {
        let prometheus = &self.prometheus;
        let what = format!("alerts {alerts:?}");
        eventually(&what, ALERT, async || check(prometheus, alerts).await).await;
        self.fired.extend(alerts.iter().map(|alert| alert.0));
    }

    /// The agent falls back to h2. The end of its process ends its TCP connections at once.
    async fn block_udp_and_kill_the_agent(&mut self) -> Result<()> {
        self.fires(&[("CulvertFallback", SERVER)]).await;
        self.agent.signal(Signal::Kill)?;
        self.fires(&[("CulvertNodeGone", SERVER)]).await;
        self.link.heal();
        self.agent = self.setup.start()?;
        self.fires(&[]).await;
        Ok(())
    }

    async fn kill_a_server(&mut self) -> Result<()> {
        let other = &mut self.servers.servers[1];
        let setup = other.setup_for_restart();
        other.process().signal(Signal::Kill)?;
        let lost = ["CulvertPeerLost", "CulvertServerAlone"];
        self.fires(&lost.map(|alert| (alert, SERVER))).await;
        self.servers.servers[1] = setup.start().await?;
        self.fires(&[]).await;
        Ok(())
    }

    /// The second server reaches its limit of streams to the first one, and the agent its own.
    async fn reach_limits(&mut self) -> Result<()> {
        let servers = &self.servers;
        wait_for(&servers.servers[1], "tunnel_server_directory_nodes", 1).await;
        wait_for_route(servers.http(1).into()).await;
        let mut followed = follow(servers, 1).await?;
        let get = RawRequest::get(&servers.host(), "/metrics");
        let prometheus = &self.prometheus;
        let reached = [AGENT, SERVER].map(|job| ("CulvertLimitReached", job));
        // An increase is visible after the first scrape only, so the requests go on until the alert.
        eventually("the alerts of limits", ALERT, async || {
            for server in 0..2 {
                let reply = request(servers.http(server), &get).await?;
                ensure!(reply.status == 503, "{}: {}", reply.status, reply.text());
            }
            check(prometheus, &reached).await
        })
        .await;
        self.fires(&reached).await;
        self.servers.kubelet.end_follows();
        followed.finish().await?;
        self.fires(&[]).await;
        Ok(())
    }

    async fn expire_and_break_certificate_files(&mut self) -> Result<()> {
        let expiring = [
            ("CulvertCertificateExpires", OPERATED_AGENT),
            ("CulvertCertificateExpires", OPERATED_SERVER),
            ("CulvertKubeletCertificateExpires", OPERATED_SERVER),
        ];
        self.operated.issue(1)?;
        self.fires(&expiring).await;
        for name in ["agent.crt", "https.crt"] {
            replace(&self.operated.scratch.path().join(name), b"no certificate")?;
        }
        let unusable = [OPERATED_AGENT, OPERATED_SERVER].map(|job| ("CulvertCondition", job));
        self.fires(&[&expiring[..], &unusable].concat()).await;
        self.operated.issue(30)?;
        self.fires(&[]).await;
        Ok(())
    }
}

impl Monitored {
    /// Two more agents have the certificate of one that is connected, others trust another CA, and one
    /// is killed whenever it has a session over TCP.
    async fn clone_refuse_and_cut_agents(&mut self) -> Result<()> {
        let expected = [
            "CulvertAgentsRefused",
            "CulvertCondition",
            "CulvertNameInUse",
            "CulvertSessionsShort",
        ];
        let operated = &self.operated;
        let leaf = operated.agents.issue(&Leaf::agent(CUT_NODE))?;
        leaf.write(operated.scratch.path(), "cut")?;
        let start = |node, certificate, ca, number: u32| -> Result<Process> {
            let folder = operated.scratch.path().join(format!("agent-{number}"));
            operated.agent(node, certificate, ca, &folder, next_loopback())
        };
        let mut others = Vec::new();
        for number in 0..2 {
            others.push(start(OPERATED_NODE, "agent", "agents-ca.crt", number)?);
        }
        for number in 2..6 {
            others.push(start(OPERATED_NODE, "agent", "callers-ca.crt", number)?);
        }
        let (prometheus, number) = (&self.prometheus, Cell::new(6));
        let fired = expected.map(|alert| (alert, OPERATED_SERVER));
        eventually("the alerts of agents", ALERT, async || {
            // The limit of the alerts is within a window of seconds.
            for _ in 0..4 {
                number.set(number.get() + 1);
                let cut = start(CUT_NODE, "cut", "agents-ca.crt", number.get())?;
                operated
                    .server
                    .wait_until_connected(&[OPERATED_NODE, CUT_NODE])
                    .await;
                cut.signal(Signal::Kill)?;
            }
            check(prometheus, &fired).await
        })
        .await;
        self.fires(&fired).await;
        Ok(())
    }
}

/// A server and an agent with certificate files of an operator.
struct Operated {
    agents: TestCa,
    callers: TestCa,
    server: Server,
    _agent: Process,
    agent_meta: SocketAddr,
    scratch: ScratchDir,
}

impl Operated {
    async fn start() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let (agents, callers) = (TestCa::new("agents")?, TestCa::new("callers")?);
        scratch.file("agents-ca.crt", agents.pem())?;
        scratch.file("callers-ca.crt", callers.pem())?;
        issue(&agents, &callers, &scratch, 30)?;
        scratch.file("limits.yaml", "limits:\n  reloadEvery: 100ms\n")?;
        let file = |name: &str| scratch.path().join(name).to_string_lossy().into_owned();
        let folder = scratch.path().join("server");
        let server = ServerSetup::on_loopback(&folder)
            .args(&["--config", &file("limits.yaml")])
            .args(&["--agent-ca", &file("agents-ca.crt")])
            .args(&["--agent-cert-file", &file("server.crt")])
            .args(&["--agent-key-file", &file("server.key")])
            .args(&["--https-cert-file", &file("https.crt")])
            .args(&["--https-key-file", &file("https.key")])
            .args(&["--client-ca", &file("callers-ca.crt")])
            .args(&["--target-cert-file", &file("client.crt")])
            .args(&["--target-key-file", &file("client.key")])
            .start()
            .await?;
        let (agents_at, address) = (server.address(Listener::Agents), next_loopback());
        let folder = scratch.path().join("agent");
        let agent = AgentSetup::on_address(OPERATED_NODE, agents_at, &folder, address)
            .args(&["--config", &file("limits.yaml")])
            .args(&["--cert-file", &file("agent.crt")])
            .args(&["--key-file", &file("agent.key")])
            .args(&["--ca-file", &file("agents-ca.crt"), "--transport", "quic"])
            .start()?;
        server.wait_until_connected(&[OPERATED_NODE]).await;
        Ok(Self {
            agents,
            callers,
            server,
            _agent: agent,
            agent_meta: Listener::Meta.on(address),
            scratch,
        })
    }

    /// Starts another agent over TCP, with one of the certificates and of the CAs.
    fn agent(
        &self,
        node: &str,
        certificate: &str,
        ca: &str,
        folder: &Path,
        address: Ipv4Addr,
    ) -> Result<Process> {
        let file = |name: &str| {
            self.scratch
                .path()
                .join(name)
                .to_string_lossy()
                .into_owned()
        };
        AgentSetup::on_address(node, self.server.address(Listener::Agents), folder, address)
            .args(&["--cert-file", &file(&format!("{certificate}.crt"))])
            .args(&["--key-file", &file(&format!("{certificate}.key"))])
            .args(&["--ca-file", &file(ca), "--transport", "h2"])
            .start()
    }

    /// Replaces all certificates by others that are valid for so many days.
    fn issue(&self, days: u64) -> Result<()> {
        issue(&self.agents, &self.callers, &self.scratch, days)
    }
}

/// Writes all certificates, which are valid for so many days.
fn issue(agents: &TestCa, callers: &TestCa, scratch: &ScratchDir, days: u64) -> Result<()> {
    let until = SystemTime::now() + Duration::from_secs(days * 86400);
    for (ca, name, leaf) in [
        (agents, "server", Leaf::server()),
        (agents, "agent", Leaf::agent(OPERATED_NODE)),
        (callers, "https", Leaf::target(OPERATED_NODE)),
        (callers, "client", Leaf::caller("server")),
    ] {
        let leaf = Leaf { until, ..leaf };
        ca.issue(&leaf)?.write(scratch.path(), name)?;
    }
    Ok(())
}

/// Fails unless exactly these alerts fire.
async fn check(prometheus: &Prometheus, alerts: &[Firing]) -> Result<()> {
    let firing = prometheus.firing().await?;
    let expected = alerts.iter().copied().collect::<BTreeSet<_>>();
    let found = firing.iter().map(|(alert, job)| (&**alert, &**job));
    let is_right = found.eq(expected);
    ensure!(is_right, "{firing:?} fire; {}", prometheus.process());
    Ok(())
}

/// The name and the job of an alert that fires.
type Firing = (&'static str, &'static str);

const SERVER: &str = "tunnel-server";
const AGENT: &str = "tunnel-agent";
const OPERATED_SERVER: &str = "operated-server";
const OPERATED_AGENT: &str = "operated-agent";
const OPERATED_NODE: &str = "worker-2";
/// A node whose agent is killed again and again.
const CUT_NODE: &str = "worker-3";

const SEED: u64 = 1;

/// Time limit for a fault to be scraped and evaluated, and for the window of limits.
const ALERT: Duration = Duration::from_secs(45);
