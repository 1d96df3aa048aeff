//! The guides for the host of a server, as they are printed. Each page runs on a host of its own, in a namespace
//! with files of its own.

use std::fs::{self, Permissions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::eventually;
use tunnel_tests::fakes;
use tunnel_tests::guides::{Block, blocks, page};
use tunnel_tests::manifests::documents;
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::{AgentSetup, Finished, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::ssh;
use tunnel_tests::tools::{Tool, or_skip, require};

use super::guides::bash;

const NODE: &str = "worker-1";
/// Address of the server for its agent.
const AGENTS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10262);
const STOP: Duration = Duration::from_secs(20);
const EXPORTER: u16 = 9100;
/// Settings that a server of a guide has in addition.
const METRICS: &str = "httpProxyPorts: \"9100\"\nproxyPortListen: off\n";
/// What a person types into a block, for the shell at the other end of ssh.
const TYPED: &[u8] = b"echo on $CULVERT_NODE\n";

/// The host of the server `cloud.example.com`, on which the node runs, too. Its `/etc` is a copy, and its data
/// directories are `data` and `agent` in `scratch`.
struct Host {
    scratch: ScratchDir,
    network: Namespace,
    blocks: Vec<Block>,
}

impl Host {
    fn new(guide: &str, tools: &[Tool]) -> Result<Option<Self>> {
        let scratch = ScratchDir::new()?;
        let hosts = scratch.file("hosts", "127.0.0.1 localhost cloud.example.com\n")?;
        let network = require(&[&[Tool::Bash], tools].concat())
            .and_then(|()| Namespace::new("guide", &hosts))
            .and_then(|network| {
                let folder = scratch.path().display();
                network.script(&format!("cd '{folder}'\n{OWN_FILES}"))?;
                Ok(network)
            });
        let Some(network) = or_skip(network) else {
            return Ok(None);
        };
        Ok(Some(Self {
            scratch,
            network,
            blocks: blocks(&page(guide)?),
        }))
    }

    /// Runs the commands of a block for a host, in the order of the guide.
    async fn run(&self, number: usize) -> Result<String> {
        let is_ours = |block: &&Block| block.runner() == Some("host");
        let block = self.blocks.iter().filter(is_ours).nth(number);
        self.bash(&block.context("no such block")?.text).await?.ok()
    }

    /// Runs commands until one fails. A `doctor` that ends with 1 has warnings, as about the buffers of this machine.
    async fn bash(&self, text: &str) -> Result<Finished> {
        // This host has no user of a service.
        let text = text.replace(" -o tunnel-server", "");
        let text = format!("set -uo pipefail\ntrap '{FAILED}' ERR\n{text}\ntrue");
        let bash = bash(&text, self.scratch.path(), &[])?.inside(Some(&self.network));
        let bash = bash.env("ANSIBLE_REMOTE_TMP", self.scratch.path());
        // This host has no sudo, which root does not need.
        let bash = bash.env("ANSIBLE_REMOTE_USER", "root");
        bash.run_with(TYPED).await
    }

    /// Returns the first settings that the guide has for a server.
    fn settings(&self) -> Result<&str> {
        self.settings_of("server")
    }

    fn settings_of(&self, program: &str) -> Result<&str> {
        let mut blocks = self.blocks.iter();
        let settings = blocks.find(|block| block.language == "yaml" && block.mark == program);
        Ok(&settings.context("no settings")?.text)
    }

    /// Starts an sshd on port 22, in which root logs in.
    async fn sshd(&self) -> Result<Option<Process>> {
        let (folder, address) = (self.scratch.path(), Ipv4Addr::LOCALHOST.into());
        ssh::make_keys(folder).await?;
        let sshd = ssh::configure(&self.network, folder);
        let sshd = sshd.and_then(|()| ssh::start_sshd(&self.network, address, NODE, folder));
        let Some(sshd) = or_skip(sshd) else {
            return Ok(None);
        };
        let sshd = sshd?;
        ssh::wait_for_sshd(&self.network, address).await;
        Ok(Some(sshd))
    }

    fn setup(&self) -> ServerSetup {
        let name = ["--advertise", "cloud.example.com:10262"];
        ServerSetup::new(&self.scratch.path().join("data"), Some(&self.network)).args(&name)
    }

    /// Writes a file of `/etc/culvert`.
    fn file(&self, name: &str, content: &str) -> Result<String> {
        let file = format!("/etc/culvert/{name}");
        let written = self.scratch.file(&file[1..], content)?;
        fs::set_permissions(written, Permissions::from_mode(0o600))?;
        Ok(file)
    }

    /// Starts the server with these settings, and a node with further ones, with a target at `port` and a kubelet.
    async fn start(&self, server: &str, agent: &str, port: u16) -> Result<Site> {
        // The target has its port before the server, which would listen on it, too.
        let [target, kubelet] = [port, 10250].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let targets = fakes::site(NODE, target, kubelet, Some(&self.network)).await?;
        let settings = self.file("tunnel-server.yaml", server)?;
        let server = self.setup().args(&["--config", &settings]).start().await?;
        self.file("tunnel-agent.token", &server.token(NODE, None).await?)?;
        let settings = self.file("tunnel-agent.yaml", &format!("{AGENT}{agent}"))?;
        let folder = self.scratch.path().join("agent");
        let agent = AgentSetup::new(NODE, AGENTS, &folder, Some(&self.network));
        let agent = agent.args(&["--config", &settings]).start()?;
        server.wait_until_connected(&[NODE]).await;
        Ok(Site {
            server,
            _processes: [agent, targets],
        })
    }
}

struct Site {
    server: Server,
    /// The agent and the targets.
    _processes: [Process; 2],
}

#[tokio::test(flavor = "multi_thread")]
async fn readme_reaches_a_node_by_its_name() -> Result<()> {
    let Some(host) = Host::new("README.md", &[Tool::Curl])? else {
        return Ok(());
    };
    let _site = host.start(METRICS, "", EXPORTER).await?;
    ensure_contains(&host.run(0).await?, &["node=\"worker-1\"", "connected"])
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_guide_lets_its_caller_in_and_nobody_else() -> Result<()> {
    let guide = "docs/how-to/client-certificates.md";
    let Some(host) = Host::new(guide, &[Tool::Curl])? else {
        return Ok(());
    };
    let first = host.setup().start().await?;
    host.run(0).await?;
    first.into_process().stop(STOP).await?;
    let _site = host.start(host.settings()?, "", 22).await?;
    host.run(1).await?;
    let without = "curl -fsS --cacert alice/server-ca.crt --connect-to worker-1:10250:cloud.example.com:10263 \
                   https://worker-1:10250/healthz";
    let refused = host.bash(without).await?;
    ensure!(refused.code() != Some(0), "{refused}");
    let without = "curl -sS -p -o /dev/null -w '%{http_connect}' --proxy-cacert alice/server-ca.crt \
                   -x https://cloud.example.com:8131 http://worker-1:22/";
    let refused = host.bash(without).await?;
    refused.ensure_failed(56, &["certificate required"])?;
    // Only CONNECT listeners open the port.
    let certificate = "--cacert alice/server-ca.crt --cert alice/alice.crt --key alice/alice.key";
    let https = format!(
        "curl -sS {certificate} --connect-to worker-1:22:cloud.example.com:10263 https://worker-1:22/"
    );
    let answer = host.bash(&https).await?.ok()?;
    ensure_contains(&answer, &["port 22 is not allowed on the https listener"])
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_proxy_guide_lets_its_password_in_and_no_other() -> Result<()> {
    let guide = "docs/how-to/prometheus-proxy.md";
    let Some(host) = Host::new(guide, &[Tool::Curl, Tool::Openssl])? else {
        return Ok(());
    };
    host.run(0).await?;
    let _site = host.start(host.settings()?, "", EXPORTER).await?;
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

#[tokio::test(flavor = "multi_thread")]
async fn audit_guide_finds_who_ran_something() -> Result<()> {
    let guide = "docs/how-to/audit.md";
    let Some(host) = Host::new(guide, &[Tool::Curl, Tool::Jq])? else {
        return Ok(());
    };
    let _site = host.start(host.settings()?, "", EXPORTER).await?;
    let exec = "tunnel-server ca > ca.crt; curl -sS -X POST --cacert ca.crt --connect-to worker-1:10250:127.0.0.1:10263 \
                'https://worker-1:10250/exec/ns/pod/main?command=id'";
    host.bash(exec).await?.ok()?;
    // Events are written a moment after their request.
    eventually("the event", STOP, async || {
        ensure_contains(&host.run(0).await?, &["/exec/ns/pod/main"])
    })
    .await;
    ensure_contains(&host.run(1).await?, &["\"auditID\""])
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_guide_moves_a_server_that_its_agent_finds_again() -> Result<()> {
    let Some(host) = Host::new("docs/how-to/backup.md", &[])? else {
        return Ok(());
    };
    let site = host.start("", "", EXPORTER).await?;
    host.run(0).await?;
    let setup = site.server.setup_for_restart();
    site.server.into_process().stop(STOP).await?;
    let lost = "find /var/lib/tunnel-server -mindepth 1 -delete";
    host.bash(lost).await?.ok()?;
    host.run(1).await?;
    let moved = setup.start().await?;
    moved.wait_until_connected(&[NODE]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_guide_checks_server_and_node() -> Result<()> {
    let Some(host) = Host::new("docs/how-to/doctor.md", &[])? else {
        return Ok(());
    };
    let _site = host.start("", "", EXPORTER).await?;
    let server = host.run(0).await?;
    ensure_contains(&server, &["D09 1 of 1 nodes connected", "errors: 0"])?;
    let agent = host.run(1).await?;
    ensure_contains(&agent, &["D19.tls", "errors: 0"])
}

#[tokio::test(flavor = "multi_thread")]
async fn api_server_answers_on_the_address_of_the_edge_guide() -> Result<()> {
    let guide = "docs/how-to/edge-apiserver.md";
    let Some(host) = Host::new(guide, &[Tool::Curl])? else {
        return Ok(());
    };
    let api = fakes::api_server(&host.network, "kube-system/tunnel-server").await?;
    let kubeconfig = documents(&fs::read_to_string(&api.admin)?)?;
    let address = &kubeconfig[0]["clusters"][0]["cluster"]["server"];
    let port = address.as_str().and_then(|url| url.rsplit_once(':'));
    let (_, port) = port.context("the API server has a port")?;
    let server = format!("cloudApiserver: 127.0.0.1:{port}\n");
    let agent = "cloudListen: [apiserver=127.0.0.1:10268]\n";
    let _site = host.start(&server, agent, EXPORTER).await?;
    ensure_contains(&host.run(0).await?, &["Unauthorized", "[+] session"])
}

#[tokio::test(flavor = "multi_thread")]
async fn second_server_takes_the_ca_of_the_first_one() -> Result<()> {
    let Some(host) = Host::new("docs/how-to/servers.md", &[])? else {
        return Ok(());
    };
    host.run(0).await?;
    let mut blocks = host.blocks.iter();
    let import = blocks.find(|block| block.runner() == Some("second-host"));
    let import = &import.context("no import")?.text;
    let second = format!(
        "export TUNNEL_SERVER_DATA_DIR=second\n{import}\ncmp second/ca.crt /var/lib/tunnel-server/ca.crt"
    );
    host.bash(&second).await?.ok().map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn ssh_guide_logs_in_and_ansible_reaches_the_node() -> Result<()> {
    let guide = "docs/how-to/ssh-ansible.md";
    let tools = [Tool::Ssh, Tool::SshKeygen, Tool::Sshd, Tool::Ansible];
    let Some(host) = Host::new(guide, &tools)? else {
        return Ok(());
    };
    let Some(_sshd) = host.sshd().await? else {
        return Ok(());
    };
    let _site = host.start(host.settings()?, "", EXPORTER).await?;
    ensure_contains(&host.run(0).await?, &["on worker-1"])?;
    let printed = host.run(1).await?;
    ensure_contains(&printed, &["cam-17", "pong", "revoked"])
}

/// The kubelet's script runs on the node through the tunnel, and doctor says what pods ask.
#[tokio::test(flavor = "multi_thread")]
async fn names_guide_changes_a_kubelet_through_the_tunnel() -> Result<()> {
    let guide = "docs/how-to/node-local-dns.md";
    let tools = [
        Tool::Ssh,
        Tool::SshKeygen,
        Tool::Sshd,
        Tool::Ansible,
        Tool::Dig,
    ];
    let Some(host) = Host::new(guide, &tools)? else {
        return Ok(());
    };
    let folder = host.scratch.path().display();
    let own = host
        .network
        .script(&format!("cd '{folder}'\n{OWN_KUBELET}"));
    if or_skip(own).is_none() {
        return Ok(());
    }
    let Some(_sshd) = host.sshd().await? else {
        return Ok(());
    };
    let cache = SocketAddr::from(([169, 254, 20, 10], 53));
    let render = "tunnel-agent address add 169.254.20.10\ntunnel-agent address add 169.254.20.11\n\
                  tunnel-server render node-local-dns --cluster-dns 10.96.0.10 --part kubelet > kubelet-dns.sh";
    host.bash(render).await?.ok()?;
    let _cache = fakes::resolver(Some(&host.network), cache, "answers").await?;
    let settings = format!("{}{SSH}", host.settings()?);
    let listener = host.settings_of("agent")?;
    let _site = host.start(&settings, listener, EXPORTER).await?;
    ensure_contains(
        &host.run(1).await?,
        &["10.96.0.10", "not on this node", "no name resolves"],
    )?;
    for printed in ["restart kubelet\n", ""] {
        ensure_contains(&host.run(0).await?, &["worker-1 | CHANGED"])?;
        let shown =
            "cat restarted; : > restarted; cat /etc/default/kubelet /var/lib/kubelet/config.yaml";
        let shown = host.bash(shown).await?.ok()?;
        let expected =
            "KUBELET_EXTRA_ARGS=--cluster-dns=169.254.20.10\nclusterDNS: [169.254.20.10]\n";
        ensure!(shown == format!("{printed}{expected}"), "{shown}");
    }
    let checked = host.run(1).await?;
    ensure_contains(
        &checked,
        &[
            "10.1.0.0",
            "pods ask 169.254.20.10 on this node",
            "errors: 0",
        ],
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn console_guide_lists_the_node_as_json() -> Result<()> {
    let guide = "docs/how-to/status-page.md";
    let Some(host) = Host::new(guide, &[Tool::Curl])? else {
        return Ok(());
    };
    let _site = host.start(host.settings()?, "", EXPORTER).await?;
    ensure_contains(&host.run(0).await?, &["\"worker-1\""])
}

#[tokio::test(flavor = "multi_thread")]
async fn troubleshooting_guide_asks_server_and_node() -> Result<()> {
    let guide = "docs/how-to/troubleshooting.md";
    let Some(host) = Host::new(guide, &[Tool::Curl])? else {
        return Ok(());
    };
    let _site = host.start("", "", EXPORTER).await?;
    ensure_contains(&host.run(0).await?, &["worker-1", "[+] session"])?;
    host.run(1).await?;
    let is_report = |file: &Path| file.extension().is_some_and(|end| end == "json");
    let files = fs::read_dir(host.scratch.path())?;
    let files = files.filter(|file| file.as_ref().is_ok_and(|file| is_report(&file.path())));
    ensure!(files.count() == 3, "three reports");
    Ok(())
}

/// Exits with the command that failed.
const FAILED: &str = "code=$?; case $code:$BASH_COMMAND in 1:*doctor*) ;; *) echo \"exit $code: $BASH_COMMAND\" >&2; exit $code ;; esac";

const AGENT: &str = "\
server: [cloud.example.com:10262]
nodeName: worker-1
nodeIp: 127.0.0.1
tokenFile: /etc/culvert/tunnel-agent.token
";

/// Settings by which ssh reaches nodes.
const SSH: &str = "ports: [{ number: 22, listeners: [connect] }]\n";

/// The files of a kubelet, and a systemctl that notes what it was asked for.
const OWN_KUBELET: &str = r#"
printf '#!/bin/sh\necho "$@" >> "%s"\n' "$PWD/restarted" > systemctl
chmod 755 systemctl
at=$(command -v systemctl) || { at=/usr/local/sbin/systemctl; mount -t tmpfs tmpfs /usr/local/sbin; : > "$at"; }
mount --bind systemctl "$at"
: > restarted
mkdir -p /etc/default /var/lib/kubelet
echo KUBELET_EXTRA_ARGS=--cluster-dns=10.96.0.10 > /etc/default/kubelet
printf 'clusterDNS:\n- 10.96.0.10\n' > /var/lib/kubelet/config.yaml
"#;

/// Gives a mount namespace files that commands of a guide may change.
const OWN_FILES: &str = r#"
test "$(id -u)" = 0
cp -a /etc etc
mkdir -m 700 data agent
mount --bind etc /etc
for folder in lib log; do mount -t tmpfs -o mode=755 tmpfs /var/$folder; done
mkdir -p /etc/culvert /var/log/culvert /var/lib/tunnel-server /var/lib/tunnel-agent
mount --bind data /var/lib/tunnel-server
mount --bind agent /var/lib/tunnel-agent
"#;
