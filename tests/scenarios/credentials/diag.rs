//! T21: the documents of `diag` have the facts of both processes, and no secret; `doctor` prints
//! none.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tunnel_tests::checks::{ensure_contains, ensure_status};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::process::{AgentSetup, Listener, Program, ScratchDir, ServerSetup};

use super::secrets::lines_of_key;

const NODE: &str = "worker-1";
const BEARER: &str = "bearer-of-a-caller-31d0aa";
const USER: &str = "user:password-of-a-proxy-5be2";
const CONNECT: Duration = Duration::from_secs(15);

#[tokio::test(flavor = "multi_thread")]
async fn t21_no_secret_is_in_the_documents_of_diag() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let [data, agent_data] = ["server", "agent"].map(|name| scratch.path().join(name));
    let server = ServerSetup::on_loopback(&data).start().await?;
    let token = server.token(NODE, None).await?;
    let agents = server.address(Listener::Agents);
    let setup = AgentSetup::on_loopback(NODE, agents, &agent_data).args(&["--token", &token]);
    let mut agent = setup.start()?;
    server.wait_until_connected(&[NODE]).await;
    let head = RawRequest::get(&format!("{NODE}:22"), "/")
        .header("Authorization", &format!("Bearer {BEARER}"));
    ensure_status(&request(server.address(Listener::Http), &head).await?, 403)?;

    let of_server = scratch.path().join("server.json");
    let meta = server.address(Listener::Meta).to_string();
    let verb = ["diag", "--kubernetes", "off", "--meta-listen", &meta];
    let verb = server.verb(&verb)?.arg("--file").arg(&of_server);
    let printed = verb.clone().run().await?.ok()?;
    ensure!(Path::new(printed.trim()) == of_server, "{printed}");
    let again = verb.run().await?;
    again.ensure_failed(1, &["server.json"])?;

    let of_agent = scratch.path().join("agent.json");
    let opened = |line: &str| Listener::Meta.opened(line);
    let meta = agent.wait_for_line("meta port", CONNECT, opened).await?;
    let proxy = format!("http://{USER}@127.0.0.1:1");
    let verb = Program::ours("tunnel-agent")?
        .args(["diag", "--server", "127.0.0.1:1", "--node-name", NODE])
        .args(["--token", &token, "--proxy", &proxy])
        .args(["--meta-listen", &meta.to_string(), "--data-dir"])
        .arg(&agent_data)
        .arg("--file");
    verb.arg(&of_agent).run().await?.ok()?;

    let secret = token.split('.').nth(1).context("no secret")?.to_owned();
    let mut secrets = vec![secret, BEARER.into(), USER.into(), STANDARD.encode(USER)];
    for key in [data.join("ca.key"), agent_data.join("agent.key")] {
        secrets.extend(lines_of_key(&key)?);
    }
    let server_facts = [
        "settings",
        "conditions",
        "metrics",
        "running",
        "nodes",
        "files",
    ];
    let document = checked(&of_server, &server_facts, &secrets)?;
    ensure!(document["nodes"][0]["node"] == NODE, "{document}");
    let log = document["running"]["log"].as_array().context("no log")?;
    let mut lines = log.iter().filter_map(Value::as_str);
    let has_agent = lines.clone().any(|line| line.contains("agent connected"));
    ensure!(has_agent, "{log:?}");
    let has_access_log = lines.any(|line| line.contains("\"access\""));
    ensure!(!has_access_log, "{log:?}");
    ensure!(document["files"].to_string().contains("ca.key"));
    let document = checked(&of_agent, &server_facts[..3], &secrets)?;
    let settings = document["settings"].to_string();
    ensure!(settings.contains("Secret(..)"), "{settings}");
    ensure!(document["files"].to_string().contains("agent.key"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t21_doctor_of_the_agent_names_the_proxy_and_prints_no_secret() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let server = ServerSetup::on_loopback(&scratch.path().join("server"));
    let token = server.start().await?.token(NODE, None).await?;
    let secret = token.split('.').nth(1).context("no secret")?.to_owned();
    let secrets = [secret, USER.to_owned(), STANDARD.encode(USER)];
    let proxy = format!("http://{USER}@127.0.0.1:1");
    for verb in ["doctor", "doctor -o json"] {
        let verb = Program::ours("tunnel-agent")?
            .args(verb.split_whitespace())
            .args(["--server", "127.0.0.1:2", "--node-name", NODE])
            .args(["--token", &token, "--proxy", &proxy])
            .args(["--meta-listen", "127.0.0.1:1", "--data-dir"]);
        let finished = verb.arg(scratch.path().join("agent")).run().await?;
        let (code, printed) = (finished.code(), finished.out + &finished.err);
        for secret in &secrets {
            ensure!(!printed.contains(secret), "{secret} is in:\n{printed}");
        }
        ensure!(code == Some(2), "{code:?}: {printed}");
        ensure_contains(
            &printed,
            &["D19.proxy", "127.0.0.1:2 through proxy 127.0.0.1:1"],
        )?;
    }
    Ok(())
}

#[tokio::test]
async fn facts_that_cannot_be_had_are_errors_in_their_place() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let absent = scratch.path().join("absent");
    for (binary, missing) in [
        ("tunnel-server", &["running", "nodes", "files"][..]),
        ("tunnel-agent", &["settings", "log", "files"][..]),
    ] {
        let verb = Program::ours(binary)?
            .args(["diag", "-f", "-", "--meta-listen", "127.0.0.1:1"])
            .arg("--data-dir");
        let printed = verb.arg(&absent).run().await?.ok()?;
        let document: Value = serde_json::from_str(&printed)?;
        for fact in missing.iter().chain(&["conditions", "metrics"]) {
            ensure!(document[fact]["error"].is_string(), "{fact}: {document}");
        }
        ensure!(document["program"]["name"] == binary, "{document}");
    }
    Ok(())
}

/// Returns the document in a file of its owner, which has these facts and none of the secrets.
fn checked(path: &Path, facts: &[&str], secrets: &[String]) -> Result<Value> {
    let mode = std::fs::metadata(path)?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    let text = std::fs::read_to_string(path)?;
    for secret in secrets {
        ensure!(!text.contains(secret), "{secret} is in:\n{text}");
    }
    let document: Value = serde_json::from_str(&text)?;
    for fact in facts {
        let value = &document[fact];
        ensure!(
            !value.is_null() && value["error"].is_null(),
            "{fact}: {value}"
        );
    }
    Ok(document)
}
