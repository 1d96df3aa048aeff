//! The guides for callers of CONNECT listeners as they are printed: certificates, and Prometheus with a
//! password. Each runs on a server's host of its own, in a namespace.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::fakes;
use tunnel_tests::guides::{Block, blocks, page};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::{AgentSetup, Finished, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::guides::bash;

const NODE: &str = "worker-1";
/// Address of the server for its agent.
const AGENTS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10262);
const STOP: Duration = Duration::from_secs(20);

/// The host of the server `cloud.example.com`, on which the node runs, too.
struct Host {
    scratch: ScratchDir,
    network: Namespace,
    blocks: Vec<Block>,
}

impl Host {
    fn new(guide: &str, tools: &[Tool]) -> Result<Option<Self>> {
        let scratch = ScratchDir::new()?;
        let hosts = scratch.file("hosts", "127.0.0.1 localhost cloud.example.com\n")?;
        let network = require(tools).and_then(|()| Namespace::new("guide", &hosts));
        let Some(network) = or_skip(network) else {
            return Ok(None);
        };
        Ok(Some(Self {
            scratch,
            network,
            blocks: blocks(&page(guide)?),
        }))
    }

    fn data_dir(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    /// Returns a text of the guide with the folders of this host, which has no user of a service.
    fn adapted(&self, text: &str) -> String {
        let shown = |path: PathBuf| path.to_string_lossy().into_owned();
        text.replace("/var/lib/tunnel-server", &shown(self.data_dir()))
            .replace("/etc/culvert", &shown(self.scratch.path().join("etc")))
            .replace(" -o tunnel-server", "")
    }

    /// Runs the commands of a block, in the order of the guide.
    async fn run(&self, number: usize) -> Result<String> {
        let mut commands = self.blocks.iter().filter(|block| block.is_run());
        let block = commands.nth(number).context("no such block")?;
        self.bash(&block.text).await?.ok()
    }

    async fn bash(&self, text: &str) -> Result<Finished> {
        let text = format!("set -euo pipefail\n{}", self.adapted(text));
        let bash = bash(&text, self.scratch.path(), &[])?.inside(Some(&self.network));
        let bash = bash.env("TUNNEL_SERVER_DATA_DIR", self.data_dir());
        bash.run().await
    }

    fn setup(&self) -> ServerSetup {
        let name = ["--advertise", "cloud.example.com:10262"];
        ServerSetup::new(&self.data_dir(), Some(&self.network)).args(&name)
    }

    /// Starts the server with the settings of the guide, and a node with a target at `port` and a
    /// kubelet.
    async fn start(&self, port: u16) -> Result<(Server, [Process; 2])> {
        // The target has its port before the server, which would listen on it, too.
        let [target, kubelet] = [port, 10250].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let targets = fakes::site(NODE, target, kubelet, Some(&self.network)).await?;
        let mut settings = self.blocks.iter();
        let settings = settings
            .find(|block| block.language == "yaml")
            .context("no settings")?;
        let settings = self.adapted(&settings.text);
        let settings = self.scratch.file("server.yaml", settings)?;
        let settings = settings.to_string_lossy();
        let server = self.setup().args(&["--config", &settings]).start().await?;
        let token = server.token(NODE, None).await?;
        let folder = self.scratch.path().join("agent");
        let agent = AgentSetup::new(NODE, AGENTS, &folder, Some(&self.network));
        let agent = agent.args(&["--node-ip", "127.0.0.1", "--token", &token]);
        let agent = agent.start()?;
        server.wait_until_connected(&[NODE]).await;
        Ok((server, [agent, targets]))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_guide_lets_its_caller_in_and_nobody_else() -> Result<()> {
    let guide = "docs/how-to/client-certificates.md";
    let Some(host) = Host::new(guide, &[Tool::Bash, Tool::Curl])? else {
        return Ok(());
    };
    let first = host.setup().start().await?;
    host.run(0).await?;
    first.into_process().stop(STOP).await?;
    let (_server, _node) = host.start(22).await?;
    host.run(1).await?;
    let without = "curl -fsS --cacert alice/server-ca.crt --connect-to worker-1:10250:cloud.example.com:10263 \
                   https://worker-1:10250/healthz";
    let refused = host.bash(without).await?;
    ensure!(refused.code() != Some(0), "{refused}");
    let without = "tunnel-server connect --server cloud.example.com:8131 --ca-file alice/server-ca.crt worker-1 22";
    host.bash(without).await?.ensure_failed(1, &[])?;
    // Only CONNECT listeners open the port.
    let certificate = "--cacert alice/server-ca.crt --cert alice/alice.crt --key alice/alice.key";
    let https = format!(
        "curl -sS {certificate} --connect-to worker-1:22:cloud.example.com:10263 https://worker-1:22/"
    );
    let answer = host.bash(&https).await?.ok()?;
    ensure!(
        answer.contains("port 22 is not allowed on the https listener"),
        "{answer}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_proxy_guide_lets_its_password_in_and_no_other() -> Result<()> {
    let guide = "docs/how-to/prometheus-proxy.md";
    let Some(host) = Host::new(guide, &[Tool::Bash, Tool::Curl, Tool::Openssl])? else {
        return Ok(());
    };
    host.run(0).await?;
    let (_server, _node) = host.start(9100).await?;
    let scrape = |password: &str| {
        format!(
            "curl -sS -x http://prometheus:{password}@cloud.example.com:8131 http://worker-1:9100/metrics -D -"
        )
    };
    let right = "$(cut -d: -f2 /etc/culvert/passwords)";
    let answer = host.bash(&scrape(right)).await?.ok()?;
    ensure!(answer.contains("node=\"worker-1\""), "{answer}");
    let refused = host.bash(&scrape("0123456789abcdef")).await?.ok()?;
    ensure!(refused.starts_with("HTTP/1.1 407"), "{refused}");
    // The password opens no bytes to the port, in which a caller could speak any protocol.
    let tunnel = host.bash(&format!("{} -p", scrape(right))).await?;
    ensure!(tunnel.code() != Some(0), "{tunnel}");
    ensure_contains(&tunnel.to_string(), &["403"])
}
