//! The two binaries with certificates that the operator provides: mounted by Kubernetes, written by
//! the kubelet, and files that are refused at start.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{
    AgentSetup, Listener, Program, ScratchDir, ServerSetup, Signal, stored_text,
};
use tunnel_tests::targets::Exporter;

use super::metric_at;

const START: Duration = Duration::from_secs(15);

/// A folder like a Secret that the kubelet mounts: the names are links into `..data`, and `..data`
/// is a link that the kubelet replaces.
struct Mounted {
    scratch: ScratchDir,
    generation: u32,
}

impl Mounted {
    fn new() -> Result<Self> {
        Ok(Self {
            scratch: ScratchDir::new()?,
            generation: 0,
        })
    }

    fn path(&self, name: &str) -> String {
        let path = self.scratch.path().join(name);
        path.to_string_lossy().into_owned()
    }

    /// Replaces the files by the CA and a new certificate of a server.
    fn swap(&mut self, ca: &TestCa) -> Result<()> {
        let issued = ca.issue(&Leaf::server())?;
        let files = [
            ("ca.crt", ca.pem()),
            ("tls.crt", &issued.certificate),
            ("tls.key", &issued.key),
        ];
        self.generation += 1;
        let root = self.scratch.path();
        let folder = format!("..2026_{}", self.generation);
        std::fs::create_dir(root.join(&folder))?;
        for (name, content) in files {
            let file = root.join(&folder).join(name);
            std::fs::write(&file, content)?;
            // The default mode of a projected Secret with fsGroup.
            std::fs::set_permissions(&file, Permissions::from_mode(0o640))?;
            let link = root.join(name);
            if !link.is_symlink() {
                symlink(Path::new("..data").join(name), link)?;
            }
        }
        symlink(&folder, root.join("..data_tmp"))?;
        std::fs::rename(root.join("..data_tmp"), root.join("..data"))?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_secrets_and_a_kubelet_style_pem_are_followed_by_hangup() -> Result<()> {
    let ca = TestCa::new("cluster")?;
    let (mut server_files, agent_files) = (Mounted::new()?, ScratchDir::new()?);
    let data = ScratchDir::new()?;
    server_files.swap(&ca)?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port().to_string();
    // The interval does not elapse during the test, so only the signal triggers a reload.
    let limits = data.file("limits.yaml", "limits:\n  reloadEvery: 1h\n")?;
    let limits = limits.to_string_lossy();
    let setup = ServerSetup::on_loopback(&data.path().join("server"))
        .args(&["--config", &limits])
        .args(&["--agent-ca", &server_files.path("ca.crt")])
        .args(&["--agent-cert-file", &server_files.path("tls.crt")])
        .args(&["--agent-key-file", &server_files.path("tls.key")])
        .args(&["--http-proxy-ports", &port, "--proxy-port-listen", "off"]);
    let mut server = setup.start().await?;
    let meta = server.address(Listener::Meta);
    // kubelet-client-current.pem is a link to one PEM file with certificate and key.
    let current = agent_files.path().join("kubelet-client-current.pem");
    let rotate = |round: u32| -> Result<()> {
        let issued = ca.issue(&Leaf::agent("worker-1"))?;
        let dated = format!("kubelet-client-{round}.pem");
        let dated = agent_files.path().join(dated);
        std::fs::write(&dated, format!("{}{}", issued.certificate, issued.key))?;
        std::fs::set_permissions(&dated, Permissions::from_mode(0o600))?;
        let fresh = agent_files.path().join("fresh");
        symlink(&dated, &fresh)?;
        std::fs::rename(&fresh, &current)?;
        Ok(())
    };
    rotate(0)?;
    let agent_ca = agent_files.path().join("ca.crt");
    replace(&agent_ca, ca.pem().as_bytes())?;
    let agents = server.address(Listener::Agents);
    let mut agent = AgentSetup::on_loopback("worker-1", agents, &data.path().join("agent"))
        .args(&["--config", &limits])
        .args(&["--cert-file", &current.to_string_lossy()])
        .args(&["--ca-file", &agent_ca.to_string_lossy()])
        .start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let endpoint = server.address(Listener::Http);
    let host = format!("worker-1:{port}");
    let admitted = "tunnel_server_handshakes_total{result=\"ok\"}";
    for round in 1..=3u32 {
        server_files.swap(&ca)?;
        server.process().signal(Signal::Hangup)?;
        let changed = "tunnel_server_credential_reloads_total{files=\"agent_certificate\",result=\"changed\"}";
        eventually("the server's files are in use", START, async || {
            let count = metric_at(meta, changed).await?;
            ensure!(count >= f64::from(round), "{count}");
            Ok(())
        })
        .await;
        let before = metric_at(meta, admitted).await?;
        rotate(round)?;
        agent.signal(Signal::Hangup)?;
        eventually("the agent moves to a new session", START, async || {
            let count = metric_at(meta, admitted).await?;
            ensure!(count > before, "{count}; {agent}");
            Ok(())
        })
        .await;
        let reply = request(endpoint, &RawRequest::get(&host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
    }
    agent.signal(Signal::Term)?;
    ensure!(agent.end(START).await?.success(), "{agent}");
    Ok(())
}

/// S09, at the command line: starts an agent with files of various modes. A file that others may
/// write is refused with the chmod command that fixes it. The group may write only a configuration
/// file, which a umask of 002 produces.
#[tokio::test(flavor = "multi_thread")]
async fn s09_files_that_others_may_write_are_refused_with_the_chmod() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let ca = TestCa::new("x")?;
    let issued = ca.issue(&Leaf::agent("worker-1"))?;
    let both = format!("{}{}", issued.certificate, issued.key);
    let token = format!("abcdef012345.{}.{}", "a5".repeat(24), "11".repeat(32));
    let file = |name: &str, content: &str| -> Result<String> {
        let file = scratch.file(name, content)?;
        Ok(file.to_string_lossy().into_owned())
    };
    let (own, ca) = (file("own.pem", &both)?, file("ca.pem", ca.pem())?);
    let token = file("token", &token)?;
    let config = file("agent.yaml", "logLevel: info\n")?;
    let certificate = ["--cert-file", &own, "--ca-file", &ca];
    for (flag, file, flags) in [
        ("--cert-file", &own, &certificate[..]),
        ("--ca-file", &ca, &certificate),
        ("--token-file", &token, &["--token-file", &token]),
        (
            "--config",
            &config,
            &["--config", &config, "--token-file", &token],
        ),
    ] {
        for (mode, accepted) in [
            (0o600, true),
            (0o640, true),
            (0o644, true),
            (0o660, flag == "--config"),
            (0o602, false),
        ] {
            std::fs::set_permissions(file, Permissions::from_mode(mode))?;
            let data = scratch.path().join(format!("data{flag}-{mode:o}"));
            // h2 fails at once, where QUIC waits for an answer.
            let run = "run --server 127.0.0.1:1 --node-name worker-1 --meta-listen off";
            let program = Program::ours("tunnel-agent")?.args(run.split(' '));
            let program = program.args(["--transport", "h2"]);
            let program = program.args(flags.iter().copied());
            let mut process = program.arg("--data-dir").arg(data).start()?;
            if accepted {
                let word =
                    |line: &str| (line.contains("cannot") || line.contains("enroll")).then_some(());
                process.wait_for_line("a try", START, word).await?;
                process.kill().await?;
                continue;
            }
            let status = process.end(START).await?;
            ensure!(
                status.code() == Some(64) && process.log().contains("run: chmod"),
                "{flag} {mode:o}: {status}; {process}"
            );
        }
        std::fs::set_permissions(file, Permissions::from_mode(0o600))?;
    }
    Ok(())
}

/// S07: checks settings of the server that authenticate, by flag and by variable. A listener that
/// would be open to the network without authentication is refused, and so is each file setting
/// without its counterpart.
#[tokio::test(flavor = "multi_thread")]
async fn s07_documented_settings_fail_closed() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let ca = TestCa::new("callers")?;
    let ca_file = scratch.file("ca.pem", ca.pem())?;
    let ca_file = ca_file.to_string_lossy();
    let check = async |words: &[&str], variables: &[(&str, &str)], code: i32| -> Result<()> {
        let program = Program::ours("tunnel-server")?.args([
            "check-config",
            "--settings-only",
            "--kubernetes",
            "off",
        ]);
        let program = program.args(words.iter().copied());
        let program = variables
            .iter()
            .fold(program, |program, (name, value)| program.env(name, *value));
        let finished = program.run().await?;
        ensure!(
            finished.code() == Some(code),
            "{words:?} {variables:?}: {finished}"
        );
        Ok(())
    };
    check(&["--http-listen", "0.0.0.0:0"], &[], 64).await?;
    let wide = ["--https-listen", "0.0.0.0:0"];
    check(&wide, &[], 64).await?;
    // A CA alone is no protection, because callers without a certificate are still accepted.
    let client_ca = ("TUNNEL_SERVER_CLIENT_CA", &*ca_file);
    check(&wide, &[client_ca], 64).await?;
    let mode = ("TUNNEL_SERVER_HTTPS_CLIENT_AUTH", "require");
    check(&wide, &[mode], 64).await?;
    check(&wide, &[mode, client_ca], 0).await?;
    let status = ["--status-listen", "0.0.0.0:0"];
    check(&status, &[], 64).await?;
    check(&status, &[mode], 64).await?;
    check(&status, &[client_ca], 0).await?;
    check(&["--status-listen", "127.0.0.1:0"], &[], 0).await?;
    let both = ["--https-client-auth", "require", "--client-ca", &ca_file];
    check(&[&wide[..], &both].concat(), &[], 0).await?;
    // Settings that belong together, each given alone.
    for part in [
        "--agent-ca",
        "--agent-cert-file",
        "--agent-key-file",
        "--https-cert-file",
        "--https-key-file",
    ] {
        check(&[part, &ca_file], &[], 64).await?;
        let variable = part[2..].replace('-', "_").to_uppercase();
        let variable = format!("TUNNEL_SERVER_{variable}");
        check(&[], &[(&variable, &ca_file)], 64).await?;
    }
    Ok(())
}

/// T03: revokes nodes with the subcommand, with and without a running server.
#[tokio::test(flavor = "multi_thread")]
async fn t03_revoke_command_ends_the_session_and_the_agent_logs_why() -> Result<()> {
    let data = ScratchDir::new()?;
    let setup = ServerSetup::on_loopback(&data.path().join("server"));
    let mut server = setup.start().await?;
    let token = server.token("worker-1", None).await?;
    let agents = server.address(Listener::Agents);
    let agent = AgentSetup::on_loopback("worker-1", agents, &data.path().join("agent"));
    let mut agent = agent.args(&["--token", &token]).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let revoke = server.verb(&["nodes", "revoke", "worker-1"])?;
    let printed = revoke.run().await?.ok()?;
    ensure!(printed.contains("node worker-1 revoked"), "{printed}");
    server.wait_until_connected(&[]).await;
    let reported = agent.wait_for_line("the reason", START, |line| {
        (line.contains("credential_revoked") && line.contains("fix the reported cause"))
            .then_some(())
    });
    reported.await?;
    // The subcommand also works while no server runs.
    let setup = server.setup_for_restart();
    server.process().signal(Signal::Term)?;
    server.process().end(START).await?;
    let verb = server.verb(&["nodes", "revoke", "worker-2"])?.run().await?;
    ensure!(verb.err.contains("no node of this name"), "{verb}");
    verb.ok()?;
    let server = setup.start().await?;
    let data_dir = data.path().join("server");
    eventually("both nodes on disk", START, async || {
        let persisted = stored_text(&data_dir)?;
        ensure!(persisted.contains("worker-1") && persisted.contains("worker-2"));
        anyhow::Ok(())
    })
    .await;
    let listed = server.nodes().await?;
    let node = listed.iter().find(|node| node["node"] == "worker-1");
    let node = node.context("worker-1 is not listed")?;
    ensure!(
        node["connected"] == false && node["revokedAt"].is_string(),
        "{node}"
    );
    // The certificate is accepted again after the revocation is lifted.
    let unrevoke = ["nodes", "unrevoke", "worker-1"];
    server.verb(&unrevoke)?.run().await?.ok()?;
    let again = server.verb(&unrevoke)?.run().await?;
    again.ensure_failed(1, &["not revoked: worker-1;"])?;
    agent.kill().await?;
    let agents = server.address(Listener::Agents);
    let _agent = AgentSetup::on_loopback("worker-1", agents, &data.path().join("agent")).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let revocations = server.verb(&["nodes", "revocations"])?.run().await?.ok()?;
    ensure!(
        revocations.contains("worker-2") && !revocations.contains("worker-1"),
        "{revocations}"
    );
    Ok(())
}

/// F17: a wrong clock at either end, over both transports. The agent's message names the clock.
#[tokio::test(flavor = "multi_thread")]
async fn f17_clock_messages_name_the_clock() -> Result<()> {
    let ca = TestCa::new("clocks")?;
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let day = 24 * hour;
    let times = |leaf: Leaf, from, until| Leaf {
        from,
        until,
        ..leaf
    };
    let agent = || Leaf::agent("worker-1");
    let by_host = "is the clock of this host wrong?";
    let by_server = "this node's certificate is expired or not yet valid by the server's clock";
    let server = Leaf::server;
    let future = |leaf| times(leaf, now + hour, now + day);
    let past = |leaf| times(leaf, now - 2 * day, now - day);
    for (what, server, agent, words) in [
        ("host an hour behind", future(server()), agent(), by_host),
        ("host a day ahead", past(server()), agent(), by_host),
        (
            "server an hour behind",
            server(),
            future(agent()),
            by_server,
        ),
        ("server a day ahead", server(), past(agent()), by_server),
    ] {
        let scratch = ScratchDir::new()?;
        let (server_cert, server_key) = ca.issue(&server)?.write(scratch.path(), "server")?;
        let (agent_cert, agent_key) = ca.issue(&agent)?.write(scratch.path(), "agent")?;
        let ca_file = scratch.file("ca.pem", ca.pem())?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let server = ServerSetup::on_loopback(&scratch.path().join("data"))
            .args(&["--agent-ca", &text(&ca_file)])
            .args(&["--agent-cert-file", &text(&server_cert)])
            .args(&["--agent-key-file", &text(&server_key)]);
        let server = server.start().await?;
        for transport in ["quic", "h2"] {
            let data = scratch.path().join(transport);
            let setup =
                AgentSetup::on_loopback("worker-1", server.address(Listener::Agents), &data);
            let mut agent = setup
                .args(&["--transport", transport, "--cert-file", &text(&agent_cert)])
                .args(&["--key-file", &text(&agent_key)])
                .args(&["--ca-file", &text(&ca_file)])
                .start()?;
            let line = agent.wait_for_line(words, START, |line| line.contains(words).then_some(()));
            line.await
                .with_context(|| format!("{what} over {transport}"))?;
            agent.kill().await?;
        }
    }
    Ok(())
}

/// The server's alert about an unknown CA becomes a code of its own and a text with the flags.
#[tokio::test(flavor = "multi_thread")]
async fn agent_certificate_of_another_ca_is_reported_with_its_flags() -> Result<()> {
    let (ca, other) = (TestCa::new("ours")?, TestCa::new("theirs")?);
    let scratch = ScratchDir::new()?;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let (server_cert, server_key) = ca.issue(&Leaf::server())?.write(scratch.path(), "server")?;
    let own = other.issue(&Leaf::agent("worker-1"))?;
    let (agent_cert, agent_key) = own.write(scratch.path(), "agent")?;
    let ca_file = text(&scratch.file("ca.pem", ca.pem())?);
    let server = ServerSetup::on_loopback(&scratch.path().join("data"))
        .args(&["--agent-ca", &ca_file])
        .args(&["--agent-cert-file", &text(&server_cert)])
        .args(&["--agent-key-file", &text(&server_key)]);
    let server = server.start().await?;
    for transport in ["quic", "h2"] {
        let data = scratch.path().join(transport);
        let setup = AgentSetup::on_loopback("worker-1", server.address(Listener::Agents), &data);
        let mut agent = setup
            .args(&["--transport", transport, "--ca-file", &ca_file])
            .args(&["--cert-file", &text(&agent_cert)])
            .args(&["--key-file", &text(&agent_key)])
            .start()?;
        let reported = agent.wait_for_line("the reason", START, |line| {
            let words = ["credential_untrusted", "--agent-ca", "--ca-file"];
            words.iter().all(|word| line.contains(word)).then_some(())
        });
        reported.await.with_context(|| transport.to_owned())?;
        agent.kill().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_with_the_token_of_another_server_repeats_its_line_rarely() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let path = |name: &str| scratch.path().join(name);
    let server = ServerSetup::on_loopback(&path("server")).start().await?;
    let other = ServerSetup::on_loopback(&path("other")).start().await?;
    let token = other.token("worker-1", None).await?;
    let agents = server.address(Listener::Agents);
    let agent = AgentSetup::on_loopback("worker-1", agents, &path("agent"));
    let agent = agent.args(&["--token", &token, "--log-level", "debug"]);
    let agent = agent.start()?;
    let failures = || {
        let mut lines = agent.log().lines();
        lines.retain(|line| line.contains("\"cannot enroll\""));
        lines
    };
    eventually("the agent tries again", START, async || {
        (failures().len() >= 4).then_some(())
    })
    .await;
    let mut lines = failures();
    lines.retain(|line| line.contains("WARN"));
    let [line] = &lines[..] else {
        anyhow::bail!("{lines:?}");
    };
    ensure!(line.contains("the token pins another CA"), "{line}");
    Ok(())
}
