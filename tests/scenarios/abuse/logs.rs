//! T15: text of callers, agents and targets never ends, colours or begins a line of the log.
//!
//! Logs go to the standard error of a process, so the test runs itself once more as the one that is attacked.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use tunnel_proto::process::telemetry::{self, LogFormat};
use tunnel_proto::wire::control::Hello;
use tunnel_proto::wire::name::InstanceId;
use tunnel_tests::client::{ByteStream, RawRequest, request};
use tunnel_tests::targets::{HostileTarget, Step};
use tunnel_tests::world::World;

use super::super::scripted::{Admission, ScriptedAgent, agent_key};

/// What begins a line that was never logged.
const FORGED: &str = "FORGED";

/// Set in the process that is attacked: the format of its log.
const VICTIM: &str = "CULVERT_LOG_VICTIM";

/// Ends of lines, colours, bells, a cursor that goes back, text that runs backwards, and a name that is too long.
fn evil() -> Vec<String> {
    let mut evil: Vec<String> = [
        "\n",
        "\r\n",
        "\r",
        "\x1b[31m",
        "\x1b[2K\x1b[1A",
        "\x07",
        "\x08\x08",
        "\x0b",
        "\x0c",
        "\u{85}",
        "\u{9b}31m",
        "\u{2028}",
        "\u{2029}",
        "\u{202e}",
        "\u{2066}",
        "\x7f",
        "\0",
        "\\n",
    ]
    .iter()
    .map(|piece| format!("a{piece}{FORGED} level=ERROR"))
    .collect();
    evil.push("x".repeat(100_000));
    evil
}

async fn attack() -> Result<()> {
    let world = World::start().await?;
    let _agent = world.agent("worker-1").await?;
    for (index, text) in evil().into_iter().enumerate() {
        // Callers: method, path, Host, selectors, trace ids, bytes that are no request.
        for bytes in [
            format!("GET /{text} HTTP/1.1\r\nHost: worker-1:1024\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: {text}\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: worker-1:1024\r\nTraceparent: {text}\r\n\r\n"),
            format!("GET / HTTP/1.1\r\nHost: 192.0.2.1\r\nX-Tunnel-Proxy-Host: {text}\r\n\r\n"),
            format!("{text} / HTTP/1.1\r\nHost: worker-1:1024\r\n\r\n"),
            text.clone(),
        ] {
            let mut caller = ByteStream::connect(world.http()).await?;
            // It may have been refused before all was sent.
            if caller.send(bytes.as_bytes()).await.is_ok() {
                let _cut = caller.finish().await;
                caller.read_to_end().await;
            }
        }
        // A target: the line of its status, and a field of its answer.
        let answer = format!("HTTP/1.1 200 {text}\r\nX: {text}\r\nContent-Length: {text}\r\n\r\n");
        let target = HostileTarget::start(vec![
            Step::ReadHead,
            Step::Send(answer.into_bytes()),
            Step::Hold,
        ])
        .await?;
        let host = format!("worker-1:{}", target.addr().port());
        let get = RawRequest::get(&host, "/");
        let asked = request(world.http(), &get);
        let _whatever = tokio::time::timeout(std::time::Duration::from_secs(2), asked).await;
        // An agent: what it says of itself, and why it leaves.
        let node = format!("evil-{index}");
        let hello = Hello {
            versions: (1, 1),
            capabilities: vec![text.clone()],
            node_name: node.parse()?,
            instance: InstanceId::new([7; 16]),
            software: text.clone(),
            node_ip: text.clone(),
        };
        // Too much of it ends the session instead.
        if let Ok(Admission::Admitted(agent)) =
            ScriptedAgent::say(&world, agent_key(&world, &node)?, hello).await
        {
            agent.leave_saying(&text).await;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t15_no_text_of_others_ends_or_colours_a_line_of_the_log() -> Result<()> {
    if let Ok(format) = std::env::var(VICTIM) {
        let format = format.parse().map_err(anyhow::Error::msg)?;
        let _logs = telemetry::start("debug".parse()?, format)?;
        return attack().await;
    }
    for format in [LogFormat::Text, LogFormat::Json] {
        let name = match format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let test = "abuse::logs::t15_no_text_of_others_ends_or_colours_a_line_of_the_log";
        let mut victim = Command::new(std::env::current_exe()?);
        victim
            .args(["--exact", test, "--nocapture"])
            .env(VICTIM, name);
        let output = tokio::task::spawn_blocking(move || victim.output()).await??;
        let log = String::from_utf8(output.stderr).context("the log is no text")?;
        ensure!(output.status.success(), "{}", tail(&log));
        ensure!(
            log.contains(FORGED),
            "nothing of it was logged: {}",
            tail(&log)
        );
        check(&log, format)?;
    }
    Ok(())
}

fn check(log: &str, format: LogFormat) -> Result<()> {
    let mut lines = 0;
    for line in log.split('\n').filter(|line| !line.is_empty()) {
        // What the test itself measures and tells.
        if line.starts_with("test patience") {
            continue;
        }
        lines += 1;
        if let Some(odd) = line.chars().find(|letter| is_odd(*letter)) {
            bail!("{odd:?} in {line:?}");
        }
        ensure!(
            line.len() < 32 * 1024,
            "a line of {} bytes: {:.200}",
            line.len(),
            line
        );
        match format {
            LogFormat::Json => {
                ensure!(
                    line.starts_with('{') && line.ends_with('}'),
                    "no object: {line:?}"
                );
            }
            LogFormat::Text => ensure!(!line.trim_start().starts_with(FORGED), "{line:?}"),
        }
    }
    ensure!(lines > 100, "only {lines} lines");
    Ok(())
}

fn is_odd(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn tail(log: &str) -> &str {
    let from = log.len().saturating_sub(2000);
    log.get(from..).unwrap_or(log)
}
