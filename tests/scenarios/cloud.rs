//! Targets of the cloud: a client on the edge node reaches them over the session of its agent.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::audit_events::AuditEvents;
use tunnel_tests::checks::{ensure_contains, get_ok};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{
    Listener, Log, Process, Program, ScratchDir, Server, ServerSetup, next_loopback,
};
use tunnel_tests::targets::Exporter;

mod flood;
mod names;
mod redirected;

const NODE: &str = "worker-1";
/// Name of the target in the host fields of requests.
const HOST: &str = "apiserver";
/// Port of the agent's second listener, below those that the system assigns.
const UNKNOWN_PORT: u16 = 21267;
/// Exit code for configuration errors.
const USAGE: i32 = 64;
/// Time limit for enrollment and for the records of streams.
const CONNECT: Duration = Duration::from_secs(15);

tests_of! {
    fn client_on_the_edge_reaches_a_target_of_the_cloud_over_quic() = edge_to_cloud("quic");
    fn client_on_the_edge_reaches_a_target_of_the_cloud_over_h2() = edge_to_cloud("h2");
    fn unknown_target_is_refused_in_both_logs_over_quic() = unknown_target("quic");
    fn unknown_target_is_refused_in_both_logs_over_h2() = unknown_target("h2");
}

/// A server that offers one target, and an agent with a listener for the target and one for a name
/// that the server does not have.
struct Edge {
    agent: Process,
    server: Server,
    target: Exporter,
    local: SocketAddr,
    unknown: SocketAddr,
    _scratch: ScratchDir,
}

impl Edge {
    async fn start(transport: &str) -> Result<Self> {
        Self::start_with(transport, &[]).await
    }

    /// Like [`Edge::start`], with more arguments of the server.
    async fn start_with(transport: &str, arguments: &[&str]) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let target = Exporter::start(HOST).await?;
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
        let setup = setup.args(&["--cloud-apiserver", &target.addr().to_string()]);
        let server = setup.audited().args(arguments).start().await?;
        let address = next_loopback();
        let local = Listener::Cloud.on(address);
        let unknown = SocketAddr::from((address, UNKNOWN_PORT));
        let folder = scratch.path().join("agent");
        let agent = (server.agent_setup(NODE, &folder).await?)
            .audited()
            .args(&["--transport", transport])
            .args(&["--cloud-listen", &format!("apiserver={local}")])
            .args(&["--cloud-listen", &format!("registry={unknown}")])
            .start()?;
        server.wait_until_connected(&[NODE]).await;
        let edge = Self {
            agent,
            server,
            target,
            local,
            unknown,
            _scratch: scratch,
        };
        eventually("the first answer", CONNECT, async || {
            get_ok(edge.local, HOST, "/metrics").await
        })
        .await;
        Ok(edge)
    }
}

async fn edge_to_cloud(transport: &str) -> Result<()> {
    let edge = Edge::start(transport).await?;
    let reply = get_ok(edge.local, HOST, "/size/3000000").await?;
    ensure!(reply.header("x-sha256") == Some(reply.sha256().as_str()));
    let line = access_line(edge.server.log(), "ok").await;
    ensure!(
        line["direction"] == "edge" && line["node"] == NODE,
        "{line}"
    );
    ensure!(line["target"] == "apiserver", "{line}");
    let dialed = edge.target.addr().to_string();
    ensure!(line["dialed"] == dialed.as_str(), "{line}");
    ensure!(!edge.agent.log().contains(&dialed), "{}", edge.agent);
    eventually("the event of each end", CONNECT, async || {
        let event = |events: &AuditEvents| {
            let events = events.all().into_iter();
            let mut events = events.filter(|event| event.is_complete());
            events.rfind(|event| event.annotation("end") == "ok")
        };
        let of_agent = event(edge.agent.audit()).context("no event of the agent")?;
        let of_server = event(edge.server.audit()).context("no event of the server")?;
        ensure!(
            of_agent.audit_id == of_server.audit_id,
            "{of_agent:?} {of_server:?}"
        );
        let user = of_server.user.username.as_deref();
        ensure!(user == Some("agent:worker-1"), "{of_server:?}");
        ensure!(of_server.annotation("target") == "apiserver" && of_server.verb == "connect");
        ensure!(of_server.object_ref.is_none(), "{of_server:?}");
        Ok(())
    })
    .await;
    let streams = "tunnel_server_cloud_streams_total{result=\"ok\"}";
    ensure!(edge.server.metric(streams).await? >= 1);
    Ok(())
}

async fn unknown_target(transport: &str) -> Result<()> {
    let edge = Edge::start(transport).await?;
    let answer = request(edge.unknown, &RawRequest::get(HOST, "/")).await;
    ensure!(answer.is_err(), "{answer:?}");
    let line = access_line(edge.server.log(), "unknown_target").await;
    ensure!(line["target"] == "registry", "{line}");
    let line = access_line(edge.agent.log(), "unknown_target").await;
    ensure!(line["node"] == NODE, "{line}");
    // The other listener is not affected.
    get_ok(edge.local, HOST, "/metrics").await?;
    Ok(())
}

#[tokio::test]
async fn server_does_not_start_with_its_own_listener_as_a_target() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let setup = ServerSetup::on_address(scratch.path(), next_loopback());
    let flag = setup.arguments().iter();
    let mut value = flag.skip_while(|word| *word != "--http-listen").skip(1);
    let own = value.next().context("no HTTP listener")?.clone();
    let run = Program::ours("tunnel-server")?.arg("run");
    let run = run
        .args(setup.arguments())
        .args(["--cloud-apiserver", &own]);
    let text = format!("cloud target apiserver: {own} is a listener of this server");
    run.run().await?.ensure_failed(USAGE, &[&text])
}

#[tokio::test]
async fn server_outside_a_cluster_asks_for_the_address_of_the_api_server() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let check = Program::ours("tunnel-server")?.arg("check-config");
    let check = check.arg("--data-dir").arg(scratch.path());
    let check = check.args(["--kubernetes", "off", "--cloud-apiserver"]);
    let finished = check.run().await?;
    finished.ensure_failed(USAGE, &["--cloud-apiserver"])?;
    ensure_contains(
        &finished.err,
        &["KUBERNETES_SERVICE_HOST", "give HOST:PORT"],
    )
}

/// Waits for an access log line of a stream to the cloud with this code, and returns it.
async fn access_line(log: &Log, code: &str) -> Value {
    eventually(code, CONNECT, async || {
        let lines = log.lines();
        let mut lines = lines
            .iter()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["message"] == "access" && line["code"] == code)
    })
    .await
}
