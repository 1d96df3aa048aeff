//! Faults that are planted between an agent and its server, each named by the server alone, in the words
//! that the page about troubleshooting has: by `doctor`, `nodes --failed`, `nodes` and the conditions.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use tunnel_proto::tls;
use tunnel_proto::wire::ALPN_SESSION_TCP;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::guides::page;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Program, ScratchDir, Server, ServerSetup, ShiftedClock, Signal,
};
use tunnel_tests::tools::or_skip;

use super::{CONNECT, NODE};
use crate::credentials::disk::SmallDisk;

/// A server, and the data directory of an agent that has been connected.
struct Planted {
    server: Server,
    scratch: ScratchDir,
}

impl Planted {
    async fn start(settings: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let file = scratch.file("server.yaml", settings)?;
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
        let setup = setup.args(&["--config", &file.to_string_lossy()]);
        let server = setup.start().await?;
        Ok(Self { server, scratch })
    }

    /// Enrolls an agent, waits until it is connected, and stops it. Returns its data directory.
    async fn enroll(&self, node: &str) -> Result<PathBuf> {
        let folder = self.scratch.path().join(node);
        let agent = self.server.agent_setup(node, &folder).await?.start()?;
        self.server.wait_until_connected(&[node]).await;
        agent.stop(CONNECT).await?;
        self.server.wait_until_connected(&[]).await;
        Ok(folder)
    }

    fn agents(&self) -> SocketAddr {
        self.server.address(Listener::Agents)
    }

    /// Waits until the server says of its nodes what the page has for a fault.
    async fn names(&self, fault: &str) -> Result<String> {
        let words = words_of(fault)?;
        Ok(self.says(&words).await)
    }

    /// Waits until all that the server says about its nodes contains these texts, and returns it. No
    /// advice destroys an identity.
    async fn says(&self, texts: &[impl AsRef<str>]) -> String {
        let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
        let meta = self.server.address(Listener::Meta).to_string();
        let doctor = [
            "doctor",
            "--only",
            "D09,D18,D22",
            "--kubernetes",
            "off",
            "--meta-listen",
            meta.as_str(),
        ];
        let verbs = [&["nodes"][..], &["nodes", "--failed"], &doctor];
        let what = format!("{texts:?}");
        let said = eventually(&what, SAID, async || {
            let mut said = String::new();
            for verb in verbs {
                said.push_str(&self.server.verb(verb)?.run().await?.out);
            }
            ensure_contains(&said, &texts)?;
            anyhow::Ok(said)
        });
        let said = said.await;
        assert!(
            !said.contains("rm ") && !said.contains("agent.key"),
            "{said}"
        );
        said
    }
}

fn start(node: &str, server: SocketAddr, folder: &Path, more: &[&str]) -> Result<Process> {
    AgentSetup::on_loopback(node, server, folder)
        .args(more)
        .start()
}

/// What an operator asks about a node that is connected, without a shell on it.
#[tokio::test(flavor = "multi_thread")]
async fn node_is_pinged_and_its_agent_sends_facts_unless_it_refuses() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let agent = start(NODE, planted.agents(), &folder, &[])?;
    planted.server.wait_until_connected(&[NODE]).await;
    let verb = |words: &[&str]| planted.server.verb(words);
    let pinged = verb(&["ping", NODE])?.run().await?.ok()?;
    ensure_contains(
        &pinged,
        &["worker-1: answered in ", " ms over ", "round trip "],
    )?;
    let closed = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let closed = verb(&["ping", NODE, &closed.to_string(), "-o", "json"])?
        .run()
        .await?;
    closed.ensure_failed(1, &["worker-1 does not answer"])?;
    let document: Value = serde_json::from_str(&closed.out)?;
    let error = document["target"]["error"].as_str().unwrap_or_default();
    ensure!(
        !error.is_empty() && document["schemaVersion"] == 1,
        "{closed}"
    );
    verb(&["ping", "worker-99"])?
        .run()
        .await?
        .ensure_failed(1, &["no node has the name"])?;

    let diag = verb(&["diag", "--node", NODE, "-f", "-"])?
        .run()
        .await?
        .ok()?;
    let document: Value = serde_json::from_str(&diag)?;
    ensure!(document["node"]["node"] == NODE, "{diag}");
    let facts = &document["agent"];
    ensure!(facts["program"]["name"] == "tunnel-agent", "{diag}");
    let log = facts["log"].to_string();
    ensure_contains(&log, &["session ready", "an operator asked for"])?;
    agent.stop(CONNECT).await?;
    planted.server.wait_until_connected(&[]).await;

    let _refusing = start(NODE, planted.agents(), &folder, &["--remote-diag", "off"])?;
    planted.server.wait_until_connected(&[NODE]).await;
    let diag = verb(&["diag", "--node", NODE, "-f", "-"])?
        .run()
        .await?
        .ok()?;
    ensure_contains(&diag, &["--remote-diag off", "\"error\""])?;
    Ok(())
}

/// Returns what the server says of a fault, as the page about troubleshooting has it.
fn words_of(fault: &str) -> Result<Vec<String>> {
    let page = page("docs/how-to/troubleshooting.md")?;
    let begin = format!("| {fault} | ");
    let row = page.lines().find_map(|line| line.strip_prefix(&begin));
    let row = row.with_context(|| format!("no row of {fault:?}"))?;
    // What is between a pair of backticks.
    Ok(row
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn udp_that_is_blocked_is_named_with_the_node() -> Result<()> {
    let planted = Planted::start("").await?;
    let link = Link::start(planted.agents(), 1)?;
    link.set(TrafficClass::UDP, Impairment::black_hole());
    let folder = planted.enroll(NODE).await?;
    let _agent = start(NODE, link.addr(), &folder, &[])?;
    planted.names("UDP to the server is blocked").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_gone_is_named_by_its_verbs() -> Result<()> {
    let mut planted = Planted::start("").await?;
    planted.server.process().signal(Signal::Kill)?;
    planted.server.process().end(CONNECT).await?;
    let verb = |words: &[&str]| planted.server.verb(words);
    let doctor = verb(&["doctor", "--kubernetes", "off"])?.run().await?;
    doctor.ensure_failed(2, &[])?;
    let said = words_of("the server does not run")?;
    let said: Vec<&str> = said.iter().map(String::as_str).collect();
    ensure_contains(&doctor.out, &said)?;
    for words in [&["nodes", "--failed"][..], &["ping", NODE]] {
        let failed = verb(words)?.run().await?;
        failed.ensure_failed(1, &said)?;
    }
    Ok(())
}

/// The agent has the CA of a server whose data directory is lost.
#[tokio::test(flavor = "multi_thread")]
async fn agent_of_another_ca_is_named_by_its_address() -> Result<()> {
    let (lost, planted) = (Planted::start("").await?, Planted::start("").await?);
    let folder = lost.enroll(NODE).await?;
    let _agent = start(NODE, planted.agents(), &folder, &[])?;
    let said = planted.names("the agent knows another CA").await?;
    ensure_contains(&said, &["127.0.0.0/24", "warning D22"])?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_node_is_named_as_revoked() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    planted
        .server
        .verb(&["nodes", "revoke", NODE])?
        .run()
        .await?
        .ok()?;
    let _agent = start(NODE, planted.agents(), &folder, &[])?;
    planted.names("the node is revoked").await?;
    Ok(())
}

/// A cloned disk: two agents with one name and one certificate.
#[tokio::test(flavor = "multi_thread")]
async fn cloned_disk_is_named_within_10_s_with_the_node_and_a_condition() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let clone = planted.scratch.path().join("clone");
    copy_folder(&folder, &clone)?;
    let _agent = start(NODE, planted.agents(), &folder, &[])?;
    planted.server.wait_until_connected(&[NODE]).await;
    let _clone = start(NODE, planted.agents(), &clone, &[])?;
    let named = async {
        planted.names("two machines have one name").await?;
        eventually("the condition", CONNECT, async || {
            let page = planted.server.verb(&["diag", "-f", "-"])?;
            let meta = planted.server.address(Listener::Meta).to_string();
            let page = page
                .args(["--meta-listen", meta.as_str()])
                .run()
                .await?
                .ok()?;
            ensure_contains(&page, &["[!] agents: name_in_use: worker-1"])
        })
        .await;
        anyhow::Ok(())
    };
    timeout(scaled(Duration::from_secs(10)), named).await??;
    let agents = "tunnel_server_agent_failures_total{code=\"name_in_use\"}";
    ensure!(planted.server.metric(agents).await? >= 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn clock_of_a_node_that_is_wrong_is_named() -> Result<()> {
    let planted = Planted::start("").await?;
    let Some(clock) = or_skip(ShiftedClock::build(planted.scratch.path())) else {
        return Ok(());
    };
    let folder = planted.enroll(NODE).await?;
    let setup = AgentSetup::on_loopback(NODE, planted.agents(), &folder);
    // The agent's own certificate is valid, and the server's ends before by this clock.
    let _agent = clock.agent(setup, 20 * 365 * 86_400).start()?;
    planted.names("the clock of the node is wrong").await?;
    Ok(())
}

/// A certificate of an operator that was not replaced in time.
#[tokio::test(flavor = "multi_thread")]
async fn certificate_that_has_ended_is_named() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let ca = TestCa::new("agents")?;
    scratch.file("ca.crt", ca.pem())?;
    ca.issue(&Leaf::server())?.write(scratch.path(), "server")?;
    let soon = Leaf {
        until: SystemTime::now() + scaled(Duration::from_secs(5)),
        ..Leaf::agent(NODE)
    };
    ca.issue(&soon)?.write(scratch.path(), "agent")?;
    let file = |name: &str| scratch.path().join(name).to_string_lossy().into_owned();
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"))
        .args(&["--agent-ca", &file("ca.crt")])
        .args(&["--agent-cert-file", &file("server.crt")])
        .args(&["--agent-key-file", &file("server.key")]);
    let server = setup.start().await?;
    let agents = server.address(Listener::Agents);
    let folder = scratch.path().join("agent-data");
    let _agent = AgentSetup::on_loopback(NODE, agents, &folder)
        .args(&[
            "--cert-file",
            &file("agent.crt"),
            "--key-file",
            &file("agent.key"),
        ])
        .args(&["--ca-file", &file("ca.crt")])
        .start()?;
    let planted = Planted { server, scratch };
    // The session continues for 30 s, in case the clocks differ.
    planted.names("the agent's certificate has ended").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn name_that_does_not_resolve_is_a_node_of_which_nothing_arrives() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let program = Program::ours("tunnel-agent")?
        .args(["run", "--node-name", NODE, "--meta-listen", "127.0.0.1:0"])
        .args(["--server", "cloud.invalid:10262", "--data-dir"]);
    let _agent = program.arg(&folder).start()?;
    let fault = "the server's name does not resolve on the node";
    planted.names(fault).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_that_wants_a_password_or_hangs_is_a_node_of_which_nothing_arrives() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let refused = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: NTLM\r\n\r\n";
    for (fault, answer) in [
        ("the node's proxy wants a password", Some(&refused[..])),
        ("the node's proxy does not answer", None),
    ] {
        let (proxy, _serving) = http_proxy(answer).await?;
        let proxy = format!("http://{proxy}");
        let mut agent = start(NODE, planted.agents(), &folder, &["--proxy", &proxy])?;
        let says = if answer.is_some() {
            "NTLM"
        } else {
            "through proxy"
        };
        let look = |line: &str| line.contains(says).then_some(());
        agent.wait_for_line(says, CONNECT, look).await?;
        planted.names(fault).await?;
        agent.stop(CONNECT).await?;
    }
    Ok(())
}

/// A firewall opens TLS towards the server first, and then presents a certificate of its own.
#[tokio::test(flavor = "multi_thread")]
async fn firewall_that_opens_tls_is_named_with_the_node() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let (firewall, _serving) = tls_inspection(planted.agents()).await?;
    let agent = start(NODE, firewall, &folder, &["--transport", "h2"])?;
    planted.names("a firewall opens TLS").await?;
    agent.stop(CONNECT).await?;
    ensure!(folder.join("agent.key").exists(), "the identity is there");
    Ok(())
}

/// A proxy that cuts each connection.
#[tokio::test(flavor = "multi_thread")]
async fn node_whose_sessions_are_cut_is_named_with_their_number() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.enroll(NODE).await?;
    let (cutter, _serving) = cutting_relay(planted.agents()).await?;
    let _agent = start(NODE, cutter, &folder, &["--transport", "h2"])?;
    planted.names("sessions are cut").await?;
    eventually("the history", CONNECT, async || {
        let named = planted.server.verb(&["nodes", NODE])?.run().await?.ok()?;
        ensure_contains(&named, &["reconnects: ", "sessions ended: "])
    })
    .await;
    Ok(())
}

/// The agent goes on with what it has in memory, and says so when the server asks.
#[tokio::test(flavor = "multi_thread")]
async fn full_disk_of_a_node_is_named_with_the_node() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.scratch.path().join(NODE);
    let Some(disk) = or_skip(SmallDisk::new(&folder, 64)) else {
        return Ok(());
    };
    let folder = planted.enroll(NODE).await?;
    let filler = disk.fill();
    let _agent = start(NODE, planted.agents(), &folder, &[])?;
    planted.names("the disk of the node is full").await?;
    std::fs::remove_file(filler)?;
    Ok(())
}

/// The key is stored before the token is used, so that the token is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn disk_that_is_full_while_a_node_enrolls_costs_no_token_and_is_named() -> Result<()> {
    let planted = Planted::start("").await?;
    let folder = planted.scratch.path().join(NODE);
    let Some(disk) = or_skip(SmallDisk::new(&folder, 64)) else {
        return Ok(());
    };
    let filler = disk.fill();
    let agent = planted.server.agent_setup(NODE, &folder).await?;
    let mut refused = agent.start()?;
    ensure!(refused.end(CONNECT).await?.code() == Some(1), "{refused}");
    let log = refused.log().lines().concat();
    ensure_contains(&log, &["make space on its file system"])?;
    let expected = ["info D09 worker-1: no agent has ever connected, and no token was used"];
    planted.says(&expected).await;
    std::fs::remove_file(filler)?;
    let _agent = agent.start()?;
    planted.server.wait_until_connected(&[NODE]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_of_the_server_is_named() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let folder = scratch.path().join("server");
    let Some(disk) = or_skip(SmallDisk::new(&folder, 512)) else {
        return Ok(());
    };
    let server = ServerSetup::on_loopback(&folder).start().await?;
    let planted = Planted { server, scratch };
    let filler = disk.fill();
    planted.names("the disk of the server is full").await?;
    std::fs::remove_file(filler)?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Time for a fault to be named: an agent tries each second or two at the beginning of an outage.
const SAID: Duration = Duration::from_secs(30);

type Relay = (SocketAddr, AbortOnDropHandle<()>);

/// Accepts connections and serves each.
async fn relay<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> Result<Relay>
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let accepting = async move {
        let mut serving = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            serving.spawn(serve(socket));
            while serving.try_join_next().is_some() {}
        }
    };
    let task = tokio_util::task::TaskTracker::new().spawn(accepting);
    Ok((address, AbortOnDropHandle::new(task)))
}

/// An HTTP proxy that answers each CONNECT with these bytes, or not at all.
async fn http_proxy(answer: Option<&'static [u8]>) -> Result<Relay> {
    relay(move |mut socket| async move {
        let mut head = [0; 4096];
        let _request = socket.read(&mut head).await;
        match answer {
            Some(answer) => drop(socket.write_all(answer).await),
            None => std::future::pending().await,
        }
    })
    .await
}

/// A firewall that opens TLS with a certificate that it makes.
async fn tls_inspection(server: SocketAddr) -> Result<Relay> {
    let made = tunnel_tests::targets::TargetTls::self_signed(&["inspection.example"])?;
    relay(move |socket| {
        let made = made.clone();
        async move {
            let inspect = async {
                let config = tls::inspecting_client(ALPN_SESSION_TCP)?;
                let upstream = TcpStream::connect(server).await?;
                let name = ServerName::try_from("tunnel-server").context("no name")?;
                let upstream = TlsConnector::from(config).connect(name, upstream).await;
                let opened = made.accept(socket).await;
                // In TLS 1.3 the server judges the missing certificate after the handshake.
                if let Ok(mut upstream) = upstream {
                    let _alert = upstream.read(&mut [0]).await;
                }
                opened.map(drop).map_err(anyhow::Error::from)
            };
            let _closed = inspect.await;
        }
    })
    .await
}

/// A relay that cuts each connection after a second, when an agent has its session.
async fn cutting_relay(server: SocketAddr) -> Result<Relay> {
    relay(move |mut socket| async move {
        if let Ok(mut upstream) = TcpStream::connect(server).await {
            let relaying = copy_bidirectional(&mut socket, &mut upstream);
            let _cut = timeout(scaled(Duration::from_secs(1)), relaying).await;
        }
    })
    .await
}
