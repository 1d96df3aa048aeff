//! The access logs of both binaries: the types of their fields.

use anyhow::{Result, ensure};
use serde_json::Value;
use tunnel_tests::checks::ensure_status;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Log;

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

/// Returns the last access log line with this code.
fn find(log: &Log, code: &str) -> Option<Value> {
    access_lines(log)
        .into_iter()
        .rfind(|line| line["code"] == code)
}

fn access_lines(log: &Log) -> Vec<Value> {
    let lines = log.lines();
    let lines = lines.iter().filter_map(|line| serde_json::from_str(line).ok());
    lines
        .filter(|line: &Value| line["message"] == "access")
        .collect()
}
