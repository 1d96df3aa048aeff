//! The steps in which something happens while a stream is open: UDP is blocked, and the server
//! restarts.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::NODES;

use super::demo_env::DemoEnv;
use super::folder::shell_line;
use super::output::{Tally, TourStep};
use super::terminal::Terminal;

/// Blocks UDP until a request is answered over TCP, while a body arrives over QUIC.
pub(super) async fn block_udp(
    terminal: &Terminal,
    demo_env: &DemoEnv,
    tally: &mut Tally,
) -> Result<()> {
    terminal.heading(
        "UDP is blocked in the middle of a download: new requests use TCP, and the download goes on when UDP is back",
    );
    let [node, _] = NODES;
    let host = format!("{node}:{}", demo_env.exporter_port());
    let (head, body) = (demo_env.file("head"), demo_env.file("body"));
    let files = shell_line(["-D", &head, "-o", &body, "--limit-rate", "2M"]);
    let download = demo_env.over_http("-sS", &host, "/size/30000000");
    let download = TourStep::new(format!("{download} {files}"), &[]);
    let request = demo_env.over_http("-fsS", &host, "/metrics");
    let request = TourStep::metrics(node, format!("until {request} -m 2; do sleep 0.5; done"));
    terminal.command(&format!("{} &", download.line));
    let meanwhile = async {
        wait_for_bytes(&body).await;
        terminal.message("  UDP to the server is dropped");
        demo_env.drop_udp(true)?;
        let shown = request.show(terminal, tally).await;
        terminal.message("  UDP is back");
        demo_env.drop_udp(false)?;
        shown
    };
    let (output, shown) = tokio::join!(download.run(), meanwhile);
    shown?;
    download.show_answer(&output?, terminal, tally);
    let head = fs::read_to_string(&head).with_context(|| head.clone())?;
    let digest = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("x-sha256").then(|| value.trim())
    });
    let digest = digest.context("the exporter sent no digest")?;
    let sum = format!("sha256sum <{}", shell_line([body]));
    TourStep::new(sum, &[digest]).show(terminal, tally).await
}

/// Restarts the server while a caller follows a log.
pub(super) async fn restart_server(
    terminal: &Terminal,
    demo_env: &mut DemoEnv,
    tally: &mut Tally,
) -> Result<()> {
    terminal.heading(
        "The server restarts while a log is followed: the log goes on until its reader has enough, then the next server \
         starts",
    );
    let [node, _] = NODES;
    let lines = demo_env.file("lines");
    let path = "/containerLogs/default/pod/app?follow=true";
    let follow = demo_env.over_https(&["-sN"], node, path);
    let file = shell_line([&lines]);
    let follow = format!("{follow} | sed -u {LINES}q >{file}; wc -l <{file}");
    let follow = TourStep::new(follow, &[&LINES.to_string()]);
    terminal.command(&format!("{} &", follow.line));
    let meanwhile = async {
        wait_for_bytes(&lines).await;
        demo_env.terminate_server(terminal)
    };
    let (output, stopping) = tokio::join!(follow.run(), meanwhile);
    stopping?;
    follow.show_answer(&output?, terminal, tally);
    demo_env.start_server_again(terminal).await?;
    let host = format!("{node}:{}", demo_env.exporter_port());
    let request = demo_env.over_http("-sS", &host, "/metrics");
    TourStep::metrics(node, request).show(terminal, tally).await
}

/// Waits until a file has content.
async fn wait_for_bytes(path: &str) {
    eventually(path, BEGIN, async || {
        let length = fs::metadata(path)?.len();
        ensure!(length > 0, "empty");
        Ok(())
    })
    .await;
}

/// Lines of a log that is read while the server stops: some seconds.
const LINES: usize = 20;

/// Time limit for the first bytes of an answer.
const BEGIN: Duration = Duration::from_secs(10);
