//! The logs of both binaries: the start line, and the access log with the types of its fields, its
//! switch and its outputs.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::checks::ensure_status;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Log, ScratchDir};

use super::{CONNECT, NODE, Stack};

#[tokio::test(flavor = "multi_thread")]
async fn fields_are_typed_and_the_same_on_refusals() -> Result<()> {
    let stack = Stack::start(&[], &[]).await?;
    let port = stack.exporter.addr().port();
    let asked = RawRequest::get(&format!("{NODE}:22"), "/");
    ensure_status(&request(stack.http(), &asked).await?, 403)?;
    for (log, code, port, has_session) in [
        (stack.server.log(), "ok", port, true),
        (stack.server.log(), "refused_by_policy", 22, false),
        (stack.agent.log(), "ok", port, true),
    ] {
        let line = eventually(code, CONNECT, async || find(log, code)).await;
        ensure!(line["node"] == NODE && line["port"] == port, "{line}");
        ensure!(line["session"].is_u64() == has_session, "{line}");
        ensure!(line["elapsed"].is_f64(), "{line}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_of_errors_alone_go_to_a_file() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.path().join("access.log");
    let path = file.to_string_lossy().into_owned();
    let errors = ["--access-log", "errors", "--access-log-output", &path];
    let stack = Stack::start(&errors, &["--access-log", "off"]).await?;
    let asked = RawRequest::get(&format!("{NODE}:22"), "/");
    ensure_status(&request(stack.http(), &asked).await?, 403)?;
    let text = eventually("the line of the refusal", CONNECT, async || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.contains("refused_by_policy").then_some(text)
    })
    .await;
    for line in text.lines() {
        let line: Value = serde_json::from_str(line)?;
        ensure!(
            line["message"] == "access" && line["code"] != "ok",
            "{line}"
        );
    }
    for log in [stack.server.log(), stack.agent.log()] {
        let lines = access_lines(log);
        ensure!(lines.is_empty(), "{lines:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn first_line_has_version_and_commit() -> Result<()> {
    let stack = Stack::start(&[], &[]).await?;
    for log in [stack.server.log(), stack.agent.log()] {
        let lines = log.lines();
        let mut lines = lines
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok());
        let is_start = |line: &Value| line["message"] == "starting";
        let line: Value = lines.find(is_start).context("no start line")?;
        ensure!(line["version"] == env!("CARGO_PKG_VERSION"), "{line}");
        ensure!(line["commit"].is_string(), "{line}");
    }
    Ok(())
}

/// Returns the last access log line with this code.
fn find(log: &Log, code: &str) -> Option<Value> {
    access_lines(log)
        .into_iter()
        .rfind(|line| line["code"] == code)
}

fn access_lines(log: &Log) -> Vec<Value> {
    let lines = log.lines();
    let lines = lines
        .iter()
        .filter_map(|line| serde_json::from_str(line).ok());
    lines
        .filter(|line: &Value| line["message"] == "access")
        .collect()
}
