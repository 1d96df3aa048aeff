//! The verb `doctor` of the server: a healthy pair, an agent that is away, no server, and a server
//! that hangs.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::{Finished, Listener, Program, ScratchDir, Server, ServerSetup, Signal};

use super::{CONNECT, NODE};

/// The limit of the verb, and the start of its process.
const LIMIT: Duration = Duration::from_secs(32);

#[tokio::test(flavor = "multi_thread")]
async fn agent_that_is_away_is_found_and_a_healthy_pair_has_no_finding() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = server.start().await?;
    let agent_dir = scratch.path().join("agent");
    let agent = server.agent_setup(NODE, &agent_dir).await?.start()?;
    server.wait_until_connected(&[NODE]).await;
    let healthy = doctor(&server, &[]).await?;
    ensure!(healthy.code() == Some(0), "{healthy}");
    let document: Value = serde_json::from_str(&healthy.out)?;
    ensure!(document["schemaVersion"] == 1, "{healthy}");
    let capacity = document["capacity"].as_str().unwrap_or_default();
    ensure_contains(capacity, &["memory limit ", " sessions (", "buffer pool "])?;
    for list in ["findings", "skipped"] {
        let entries = document[list].as_array().map(Vec::len);
        ensure!(entries == Some(0), "{healthy}");
    }
    let unknown = doctor(&server, &["--node", "worker-99"]).await?;
    ensure!(unknown.code() == Some(2), "{unknown}");

    agent.stop(CONNECT).await?;
    server.wait_until_connected(&[]).await;
    let away = doctor(&server, &[]).await?;
    ensure!(away.code() == Some(2), "{away}");
    let document: Value = serde_json::from_str(&away.out)?;
    let finding = &document["findings"][0];
    ensure!(finding["id"] == "D09" && finding["place"] == NODE, "{away}");
    ensure!(finding["severity"] == "error", "{away}");
    for field in ["what", "consequence", "fix", "link"] {
        let text = finding[field].as_str().unwrap_or_default();
        ensure!(!text.is_empty(), "{field}: {away}");
    }
    ensure!(document["findings"][1].is_null(), "{away}");

    let _agent = server.agent_setup(NODE, &agent_dir).await?.start()?;
    server.wait_until_connected(&[NODE]).await;
    let back = doctor(&server, &[]).await?;
    ensure!(back.code() == Some(0), "{back}");
    Ok(())
}

#[tokio::test]
async fn server_that_does_not_run_is_reported() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let started = Instant::now();
    let program = Program::ours("tunnel-server")?
        .args([
            "doctor",
            "--kubernetes",
            "off",
            "--meta-listen",
            "127.0.0.1:1",
        ])
        .arg("--data-dir");
    let finished = program.arg(scratch.path().join("absent")).run().await?;
    ensure!(finished.code() == Some(2), "{finished}");
    let expected = ["error D09", "no tunnel-server runs", "skipped D17", "fix: "];
    ensure_contains(&finished.out, &expected)?;
    ensure!(started.elapsed() < scaled(LIMIT), "{:?}", started.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_hangs_is_reported_within_the_limit() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
    let mut server = setup.start().await?;
    server.process().signal(Signal::Stop)?;
    let started = Instant::now();
    let hanging = doctor(&server, &["--timeout", "4s"]).await?;
    server.process().signal(Signal::Cont)?;
    ensure!(hanging.code() == Some(2), "{hanging}");
    ensure_contains(&hanging.out, &["gives no answer", "\"skipped\""])?;
    ensure!(started.elapsed() < scaled(LIMIT), "{:?}", started.elapsed());
    Ok(())
}

#[tokio::test]
async fn fix_of_a_check_is_explained_and_unknown_checks_are_refused() -> Result<()> {
    let explain = |id: &str| -> Result<Program> {
        Ok(Program::ours("tunnel-server")?.args(["doctor", "--explain", id]))
    };
    let explained = explain("D09")?.run().await?.ok()?;
    ensure_contains(&explained, &["D09: ", "consequence: ", "fix:", "see: "])?;
    let refused = explain("D99")?.run().await?;
    refused.ensure_failed(64, &["no check has this id", "D18"])
}

/// Runs the checks of agents and servers.
async fn doctor(server: &Server, more: &[&str]) -> Result<Finished> {
    let meta = server.address(Listener::Meta).to_string();
    let verb = [
        "doctor",
        "-o",
        "json",
        "--only",
        "D09,D17",
        "--kubernetes",
        "off",
    ];
    let verb = server.verb(&verb)?.args(["--meta-listen", &meta]);
    verb.args(more.iter().copied()).run().await
}
