//! Connections: the server routes each request by itself, reuses connections to targets where that
//! is safe, and closes both ends together.

use std::collections::BTreeSet;

use anyhow::Result;
use tokio::io::AsyncWriteExt;
use tunnel_tests::client::{ByteStream, KeepAliveClient, RawRequest};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{Exporter, RecordedInput, RecordingTarget, Traffic};

use super::table::TwoNodes;

fn get(node: &str, port: u16, path: &str) -> RawRequest {
    RawRequest::new("GET", path, &format!("{node}:{port}"))
}

/// Waits until no connection to a target is open.
async fn are_closed(what: &str, traffic: &Traffic) {
    let closed = async || (traffic.open() == 0).then_some(());
    eventually(what, WAIT_TIMEOUT, closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn target_connection_is_used_again_by_its_caller_alone() -> Result<()> {
    let site = TwoNodes::start().await?;
    let target = RecordingTarget::start("one").await?;
    let port = target.addr().port();
    for callers in 1..=3 {
        let mut caller = KeepAliveClient::connect(site.env.http()).await?;
        for round in 0..50 {
            let path = format!("/{callers}/{round}");
            let reply = caller.request(&get("worker-1", port, &path)).await?;
            assert_eq!(reply.text(), format!("GET {path} by one\n"));
        }
        let accepted = target.traffic().accepted();
        assert_eq!(accepted, callers, "one connection for each caller");
        drop(caller);
        are_closed("it closes with its caller", target.traffic()).await;
    }
    // No connection carried the requests of two callers.
    for recorded in target.recorded() {
        let RecordedInput::Request(connection, request) = recorded else {
            anyhow::bail!("{recorded:?}");
        };
        assert!(
            request.target.starts_with(&format!("/{}/", connection + 1)),
            "{request:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn target_connection_is_never_shared_by_two_credentials() -> Result<()> {
    let site = TwoNodes::start().await?;
    let target = RecordingTarget::start("one").await?;
    let mut caller = KeepAliveClient::connect(site.env.http()).await?;
    for round in 0..20 {
        let asked = get("worker-1", target.addr().port(), "/");
        let asked = match round % 3 {
            0 => asked,
            token => asked.header("Authorization", &format!("Bearer {token}")),
        };
        assert_eq!(caller.request(&asked).await?.status, 200);
    }
    let mut used = BTreeSet::new();
    for recorded in target.recorded() {
        if let RecordedInput::Request(connection, request) = recorded {
            let credential = request.field("authorization").map(str::to_owned);
            used.insert((connection, credential));
        }
    }
    let connections: BTreeSet<_> = used.iter().map(|(connection, _)| *connection).collect();
    assert_eq!(connections.len(), used.len(), "{used:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_one_connection_go_each_to_its_node_and_port() -> Result<()> {
    let site = TwoNodes::start().await?;
    let targets = [
        ("worker-1", RecordingTarget::start("a").await?, "a"),
        ("worker-2", RecordingTarget::start("b").await?, "b"),
        ("worker-1", RecordingTarget::start("c").await?, "c"),
    ];
    let mut caller = KeepAliveClient::connect(site.env.http()).await?;
    for round in 0..90 {
        // The sequence repeats targets and changes between any two of them.
        let (node, target, name) = &targets[(round / 2 + round / 7) % 3];
        let path = format!("/{round}");
        let asked = match round % 5 {
            0 => RawRequest::new("POST", &path, &format!("{node}:{}", target.addr().port()))
                .body("abc"),
            _ => get(node, target.addr().port(), &path),
        };
        let reply = caller.request(&asked).await?;
        assert!(
            reply.text().ends_with(&format!("/{round} by {name}\n")),
            "{}",
            reply.text()
        );
        assert_eq!(reply.header("x-tunnel-error"), None);
        // An answer of the server itself leaves the connection usable.
        let unknown = caller.request(&get("nobody", 9100, "/")).await?;
        assert_eq!(unknown.header("x-tunnel-error"), Some("unknown_node"));
    }
    let arrived: usize = targets
        .iter()
        .map(|(_, target, _)| target.requests().len())
        .sum();
    assert_eq!(arrived, 90);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_are_answered_in_their_order() -> Result<()> {
    let site = TwoNodes::start().await?;
    let targets = [
        ("worker-1", RecordingTarget::start("one").await?, "one"),
        ("worker-2", RecordingTarget::start("two").await?, "two"),
    ];
    let (mut sent, mut expected) = (String::new(), Vec::new());
    for round in 0..200 {
        let (node, target, name) = &targets[usize::from(round % 3 == 0)];
        let host = format!("{node}:{}", target.addr().port());
        let close = "Connection: close\r\n";
        let last = if round == 199 { close } else { "" };
        let (method, body) = match round % 4 {
            1 => ("POST", "Content-Length: 3\r\n\r\nabc"),
            2 => (
                "PUT",
                "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            ),
            _ => ("GET", "\r\n"),
        };
        sent.push_str(&format!(
            "{method} /{round} HTTP/1.1\r\nHost: {host}\r\n{last}{body}"
        ));
        expected.push(format!("{method} /{round} by {name}"));
    }
    let stream = ByteStream::connect(site.env.http()).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut answers = Vec::new();
    let (written, read) = tokio::join!(
        writer.write_all(sent.as_bytes()),
        tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut answers)
    );
    written?;
    read?;
    let answers = String::from_utf8(answers)?;
    let bodies = answers.lines().filter(|line| line.contains(" by "));
    let bodies: Vec<_> = bodies.collect();
    assert_eq!(bodies, expected);
    Ok(())
}

/// Tests that the server notices a caller that leaves. The cases include those that hyper cannot
/// see: pipelined requests, or a body that is not read.
#[tokio::test(flavor = "multi_thread")]
async fn caller_that_leaves_is_noticed_behind_waiting_bytes() -> Result<()> {
    let site = TwoNodes::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let host = format!("Host: worker-1:{}\r\n", exporter.addr().port());
    let waiting = format!("GET /slow-head HTTP/1.1\r\n{host}\r\n");
    let follow = format!("GET /follow HTTP/1.1\r\n{host}\r\n");
    let next = format!("GET /metrics HTTP/1.1\r\n{host}\r\n");
    let half_a_body = format!("POST /slow-head HTTP/1.1\r\n{host}Content-Length: 100\r\n\r\nabc");
    for (name, sent) in [
        ("nothing", waiting.clone()),
        ("one request", format!("{waiting}{next}")),
        ("many requests", format!("{waiting}{}", next.repeat(1000))),
        ("half a head", format!("{waiting}GET /metr")),
        ("half a body", half_a_body),
        ("a stream that is followed", follow.clone()),
        (
            "many behind a stream",
            format!("{follow}{}", next.repeat(1000)),
        ),
    ] {
        for by_reset in [false, true] {
            let served = exporter.traffic().requests();
            let mut stream = ByteStream::connect(site.env.http()).await?;
            stream.send(sent.as_bytes()).await?;
            eventually("the target answers", WAIT_TIMEOUT, async || {
                (exporter.waiting() + exporter.followers() == 1).then_some(())
            })
            .await;
            if by_reset {
                stream.reset().await?;
            } else {
                stream.finish().await?;
            }
            let what = format!("{name}: the target's side closes, reset {by_reset}");
            are_closed(&what, exporter.traffic()).await;
            let requests = exporter.traffic().requests();
            assert_eq!(
                requests,
                served + 1,
                "{name}: a request of a caller who had left was sent"
            );
        }
    }
    Ok(())
}
