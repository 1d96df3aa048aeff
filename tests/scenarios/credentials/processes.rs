//! The two binaries with certificates that the operator provides: mounted by Kubernetes, written by
//! the kubelet, and files that are refused at start.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{AgentSetup, Listener, Program, ScratchDir, Server, ServerSetup, Signal};
use tunnel_tests::targets::Exporter;

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
        self.scratch
            .path()
            .join(name)
            .to_string_lossy()
            .into_owned()
    }

    fn swap(&mut self, files: &[(&str, &str)]) -> Result<()> {
        self.generation += 1;
        let root = self.scratch.path();
        let folder = format!("..2026_{}", self.generation);
        std::fs::create_dir(root.join(&folder))?;
        for (name, content) in files {
            let file = root.join(&folder).join(name);
            std::fs::write(&file, content)?;
            // The default mode of a projected Secret with fsGroup.
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640))?;
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

async fn metric(server: &Server, name: &str) -> Result<f64> {
    let meta = server.address(Listener::Meta);
    let shown = request(meta, &RawRequest::get("meta", "/metrics")).await?;
    let text = shown.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.map_or(Ok(0.0), |value| value.trim().parse())?)
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_secrets_and_a_kubelet_style_pem_are_followed_by_hangup() -> Result<()> {
    let ca = TestCa::new("cluster")?;
    let (mut server_files, agent_files) = (Mounted::new()?, ScratchDir::new()?);
    let data = ScratchDir::new()?;
    let issued = ca.issue(&Leaf::server())?;
    let bundle = ca.pem().to_owned();
    server_files.swap(&[
        ("ca.crt", &bundle),
        ("tls.crt", &issued.certificate),
        ("tls.key", &issued.key),
    ])?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port().to_string();
    // The interval does not elapse during the test, so only the signal triggers a reload.
    let limits = data.file("server.yaml", "limits:\n  reloadEvery: 1h\n")?;
    let setup = ServerSetup::on_loopback(&data.path().join("server")).args(&[
        "--config",
        &limits.to_string_lossy(),
        "--agent-ca",
        &server_files.path("ca.crt"),
        "--agent-cert-file",
        &server_files.path("tls.crt"),
        "--agent-key-file",
        &server_files.path("tls.key"),
        "--http-proxy-ports",
        &port,
        "--proxy-port-listen",
        "off",
    ]);
    let mut server = setup.start().await?;
    // kubelet-client-current.pem is a link to one PEM file with certificate and key.
    let current = agent_files.path().join("kubelet-client-current.pem");
    let rotate = |round: u32| -> Result<()> {
        let issued = ca.issue(&Leaf::agent("worker-1"))?;
        let dated = agent_files
            .path()
            .join(format!("kubelet-client-{round}.pem"));
        std::fs::write(&dated, format!("{}{}", issued.certificate, issued.key))?;
        std::fs::set_permissions(&dated, std::fs::Permissions::from_mode(0o600))?;
        let fresh = agent_files.path().join("fresh");
        symlink(&dated, &fresh)?;
        std::fs::rename(&fresh, &current)?;
        Ok(())
    };
    rotate(0)?;
    let agent_ca = agent_files.path().join("ca.crt");
    replace(&agent_ca, bundle.as_bytes())?;
    let agents = server.address(Listener::Agents);
    let agent_limits = data.file("agent.yaml", "limits:\n  reloadEvery: 1h\n")?;
    let mut agent = AgentSetup::on_loopback("worker-1", agents, &data.path().join("agent"))
        .args(&[
            "--config",
            &agent_limits.to_string_lossy(),
            "--cert-file",
            &current.to_string_lossy(),
            "--ca-file",
            &agent_ca.to_string_lossy(),
        ])
        .start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let endpoint = server.address(Listener::Http);
    let host = format!("worker-1:{port}");
    for round in 1..=3u32 {
        let issued = ca.issue(&Leaf::server())?;
        server_files.swap(&[
            ("ca.crt", &bundle),
            ("tls.crt", &issued.certificate),
            ("tls.key", &issued.key),
        ])?;
        server.process().signal(Signal::Hangup)?;
        let changed = "tunnel_server_credential_reloads_total{files=\"agent_certificate\",result=\"changed\"}";
        eventually("the server's files are in use", START, async || {
            let count = metric(&server, changed).await?;
            ensure!(count >= f64::from(round), "{count}");
            Ok(())
        })
        .await;
        let before = metric(&server, "tunnel_server_handshakes_total{result=\"ok\"}").await?;
        rotate(round)?;
        agent.signal(Signal::Hangup)?;
        eventually("the agent moves to a new session", START, async || {
            let count = metric(&server, "tunnel_server_handshakes_total{result=\"ok\"}").await?;
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
    let cases = [
        ("--cert-file", "own.pem", both.as_str()),
        ("--ca-file", "ca.pem", ca.pem()),
        ("--token-file", "token", token.as_str()),
        ("--config", "agent.yaml", "logLevel: info\n"),
    ];
    let mut files = Vec::new();
    for (_, name, content) in cases {
        files.push(scratch.file(name, content)?);
    }
    for (index, (flag, name, _)) in cases.iter().enumerate() {
        for (mode, accepted) in [
            (0o600, true),
            (0o640, true),
            (0o644, true),
            (0o660, *flag == "--config"),
            (0o602, false),
        ] {
            std::fs::set_permissions(&files[index], std::fs::Permissions::from_mode(mode))?;
            let data = scratch.path().join(format!("data-{index}-{mode:o}"));
            let mut words = vec![
                "run",
                "--server",
                "127.0.0.1:1",
                "--node-name",
                "worker-1",
                "--meta-listen",
                "off",
                // Fails at once, where QUIC waits for an answer.
                "--transport",
                "h2",
            ];
            let paths: Vec<String> = files
                .iter()
                .map(|file| file.to_string_lossy().into_owned())
                .collect();
            let flag_value = match *flag {
                "--cert-file" | "--ca-file" => {
                    vec!["--cert-file", &paths[0], "--ca-file", &paths[1]]
                }
                "--token-file" => vec!["--token-file", &paths[2]],
                _ => vec!["--config", &paths[3], "--token-file", &paths[2]],
            };
            words.extend(flag_value);
            let data = data.to_string_lossy().into_owned();
            words.extend(["--data-dir", &data]);
            let mut process = Program::ours("tunnel-agent")?.args(words).start()?;
            if accepted {
                let word =
                    |line: &str| (line.contains("cannot") || line.contains("enroll")).then_some(());
                process.wait_for_line("a try", START, word).await?;
                process.kill().await?;
                continue;
            }
            let status = process.end(START).await?;
            ensure!(
                status.code() == Some(64),
                "{name} {mode:o}: {status}; {process}"
            );
            ensure!(
                process.log().contains("run: chmod"),
                "{name} {mode:o}: {process}"
            );
        }
        std::fs::set_permissions(&files[index], std::fs::Permissions::from_mode(0o600))?;
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
    let ca_file = scratch
        .file("ca.pem", ca.pem())?
        .to_string_lossy()
        .into_owned();
    let check = async |words: &[&str], variables: &[(&str, &str)]| -> Result<Option<i32>> {
        let mut program =
            Program::ours("tunnel-server")?.args(["check-config", "--kubernetes", "off"]);
        program = program.args(words.iter().copied());
        for (name, value) in variables {
            program = program.env(name, *value);
        }
        Ok(program.run().await?.code())
    };
    for wide in ["--https-listen", "--http-listen"] {
        ensure!(
            check(&[wide, "0.0.0.0:0"], &[]).await? == Some(64),
            "{wide} open"
        );
    }
    let wide = ["--https-listen", "0.0.0.0:0"];
    // A CA alone is no protection, because callers without a certificate are still accepted.
    ensure!(check(&wide, &[("TUNNEL_SERVER_CLIENT_CA", &ca_file)]).await? == Some(64));
    let mode = ("TUNNEL_SERVER_HTTPS_CLIENT_AUTH", "require");
    ensure!(
        check(&wide, &[mode]).await? == Some(64),
        "require without a CA"
    );
    ensure!(check(&wide, &[mode, ("TUNNEL_SERVER_CLIENT_CA", &ca_file)]).await? == Some(0));
    let both = ["--https-client-auth", "require", "--client-ca", &ca_file];
    ensure!(check(&[&wide[..], &both].concat(), &[]).await? == Some(0));
    // Settings that belong together, each given alone.
    for part in [
        "--agent-ca",
        "--agent-cert-file",
        "--agent-key-file",
        "--https-cert-file",
        "--https-key-file",
    ] {
        ensure!(
            check(&[part, &ca_file], &[]).await? == Some(64),
            "{part} alone"
        );
        let variable = format!(
            "TUNNEL_SERVER_{}",
            part[2..].replace('-', "_").to_uppercase()
        );
        ensure!(
            check(&[], &[(&variable, &ca_file)]).await? == Some(64),
            "{variable} alone"
        );
    }
    Ok(())
}

/// T03: revokes nodes with the subcommand, with and without a running server.
#[tokio::test(flavor = "multi_thread")]
async fn t03_revoke_command_ends_the_session_and_the_agent_logs_why() -> Result<()> {
    let data = ScratchDir::new()?;
    let mut server = ServerSetup::on_loopback(&data.path().join("server"))
        .start()
        .await?;
    let token = server.token("worker-1", None).await?;
    let agents = server.address(Listener::Agents);
    let agent = AgentSetup::on_loopback("worker-1", agents, &data.path().join("agent"));
    let mut agent = agent.args(&["--token", &token]).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let printed = server
        .verb(&["nodes", "revoke", "worker-1"])?
        .run()
        .await?
        .ok()?;
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
    let persisted = std::fs::read_to_string(data.path().join("server").join("revoked.json"))?;
    ensure!(
        persisted.contains("worker-1") && persisted.contains("worker-2"),
        "{persisted}"
    );
    let listed = server.nodes().await?;
    let node = listed.iter().find(|node| node["node"] == "worker-1");
    ensure!(node.context("worker-1 is not listed")?["connected"] == false);
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
    for (what, server, agent, words) in [
        (
            "host an hour behind",
            times(Leaf::server(), now + hour, now + day),
            agent(),
            by_host,
        ),
        (
            "host a day ahead",
            times(Leaf::server(), now - 2 * day, now - day),
            agent(),
            by_host,
        ),
        (
            "server an hour behind",
            Leaf::server(),
            times(agent(), now + hour, now + day),
            by_server,
        ),
        (
            "server a day ahead",
            Leaf::server(),
            times(agent(), now - 2 * day, now - day),
            by_server,
        ),
    ] {
        let scratch = ScratchDir::new()?;
        let (server_cert, server_key) = ca.issue(&server)?.write(scratch.path(), "server")?;
        let (agent_cert, agent_key) = ca.issue(&agent)?.write(scratch.path(), "agent")?;
        let ca_file = scratch.file("ca.pem", ca.pem())?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let server = ServerSetup::on_loopback(&scratch.path().join("data")).args(&[
            "--agent-ca",
            &text(&ca_file),
            "--agent-cert-file",
            &text(&server_cert),
            "--agent-key-file",
            &text(&server_key),
        ]);
        let server = server.start().await?;
        for transport in ["quic", "h2"] {
            let data = scratch.path().join(transport);
            let setup =
                AgentSetup::on_loopback("worker-1", server.address(Listener::Agents), &data);
            let mut agent = setup
                .args(&["--transport", transport, "--cert-file", &text(&agent_cert)])
                .args(&[
                    "--key-file",
                    &text(&agent_key),
                    "--ca-file",
                    &text(&ca_file),
                ])
                .start()?;
            let line = agent.wait_for_line(words, START, |line| line.contains(words).then_some(()));
            line.await
                .with_context(|| format!("{what} over {transport}"))?;
            agent.kill().await?;
        }
    }
    Ok(())
}
