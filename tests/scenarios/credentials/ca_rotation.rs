//! F20: `ca rotate` under requests. The server is restarted in each stage, and the rotation resumes.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_proto::tls::files::chain;
use tunnel_proto::tls::{AgentTrust, roots};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::load::Load;
use tunnel_tests::process::{Listener, ScratchDir, Server, ServerSetup, Signal};
use tunnel_tests::targets::Exporter;

const START: Duration = Duration::from_secs(15);
/// Certificates of 12 s are renewed after about 6 s. Each stage waits for one renewal.
const RENEWAL: Duration = Duration::from_secs(40);
/// The commands of a rotation, and the stage that each enters.
pub(crate) const STAGES: [(&[&str], &str); 3] = [
    (&["ca", "rotate"], "stage: announced"),
    (&["ca", "rotate", "--next"], "stage: issuing"),
    (&["ca", "rotate", "--next"], "stage: none"),
];

#[tokio::test(flavor = "multi_thread")]
async fn f20_ca_rotate_under_requests_resumes_in_each_stage() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let limits = scratch.file("limits.yaml", "limits:\n  certificateLife: 12s\n")?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port().to_string();
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"))
        .args(&["--config", &limits.to_string_lossy()])
        .args(&["--http-proxy-ports", &port, "--proxy-port-listen", "off"]);
    let mut server = setup.start().await?;
    let files = scratch.path().join("agent");
    let _agent = server.agent_setup("worker-1", &files).await?.start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let old = std::fs::read(scratch.path().join("server/ca.crt"))?;
    // The commands of the guide are those of the stages.
    let guide = blocks(&page("docs/how-to/replace-ca.md")?).into_iter();
    let guide = guide.filter(|block| block.runner() == Some("rotation"));
    let guide: String = guide.map(|block| block.text).collect();
    let commands = STAGES.map(|(words, _)| format!("tunnel-server {}\n", words.join(" ")));
    let guide = guide.replace("tunnel-server ca rotate --status\n", "");
    ensure!(guide == commands.concat(), "{guide}");
    let host = format!("worker-1:{port}");
    for (verb, stage) in STAGES {
        answered(server.address(Listener::Http), &host).await;
        let hosts = [host.clone()];
        let load = Load::start(server.address(Listener::Http).into(), &hosts, 2).await?;
        let printed = server.verb(verb)?.run().await?.ok()?;
        ensure!(printed.contains(stage), "{printed}");
        let before = load.answered();
        eventually("requests go on", START, async || {
            (load.answered() > before + 20).then_some(())
        })
        .await;
        if stage != "stage: none" {
            renewed(&server).await;
        }
        load.end().await?.check()?;
        server = restart(server).await?;
        let status = rotation_status(&server).await?;
        ensure!(status.contains(stage), "{status}");
        server.wait_until_connected(&["worker-1"]).await;
    }
    answered(server.address(Listener::Http), &host).await;
    let new = std::fs::read(scratch.path().join("server/ca.crt"))?;
    ensure!(chain(&new)?.len() == 1 && new != old, "not the new CA");
    let leaf = std::fs::read(files.join("agent.crt"))?;
    ensure!(is_of(&leaf, &new)?, "the agent's certificate is not new");
    ensure!(!is_of(&leaf, &old)?, "the agent's certificate is old");
    trusts_only(&files.join("ca.crt"), &new).await;
    Ok(())
}

/// Restarts the server with its ports.
async fn restart(mut server: Server) -> Result<Server> {
    let setup = server.setup_for_restart();
    server.process().signal(Signal::Term)?;
    server.process().end(START).await?;
    setup.start().await
}

/// Waits until a request is answered.
async fn answered(endpoint: SocketAddr, host: &str) {
    eventually("a request is answered", START, async || {
        let reply = request(endpoint, &RawRequest::get(host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        Ok(())
    })
    .await;
}

pub(crate) async fn rotation_status(server: &Server) -> Result<String> {
    let status = server.verb(&["ca", "rotate", "--status"])?;
    status.run().await?.ok()
}

/// Waits until the agent has a certificate of the stage.
pub(crate) async fn renewed(server: &Server) {
    eventually("the agent has renewed", RENEWAL, async || {
        let status = rotation_status(server).await?;
        let is_done = status.contains("1 renewed since then, 0 pending");
        ensure!(is_done, "{status}");
        Ok(())
    })
    .await;
}

/// Waits until a file has only these certificates.
pub(crate) async fn trusts_only(file: &Path, pem: &[u8]) {
    eventually("the agent trusts only the new CA", RENEWAL, async || {
        let known = chain(&std::fs::read(file)?)?;
        ensure!(known == chain(pem)?, "{} roots", known.len());
        Ok(())
    })
    .await;
}

/// Returns whether a certificate of an agent is of this CA.
pub(crate) fn is_of(leaf: &[u8], ca: &[u8]) -> Result<bool> {
    let roots = roots(chain(ca)?)?;
    let trust = AgentTrust::new(roots.clone(), Arc::new(|_| Ok(())))?;
    // Without a replacement, the check is left to the handshake.
    trust.replace(roots)?;
    Ok(trust.still_accepts(&chain(leaf)?))
}
