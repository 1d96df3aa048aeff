//! Bodies end to end: both directions at once, 100-continue, answers without a body, content
//! codings, and flushes.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_agent::config::TransportChoice;
use tunnel_tests::client::{BodyEnd, ByteStream, Exchange, KeepAliveClient, RawRequest, request};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::scaled;
use tunnel_tests::targets::{HostileAction, HostileTarget, RecordingTarget, deterministic_bytes};

use crate::scripted::ScriptedAgent;

/// Reads until the bytes end with `end`, and returns all of them.
async fn read_until(stream: &mut ByteStream, end: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(end) {
        bytes.push(stream.read_u8().await.context("before the end")?);
    }
    Ok(bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_pass_both_ways_at_once() -> Result<()> {
    for transport in [TransportChoice::Quic, TransportChoice::H2] {
        let site = NodeEnv::start_over(transport).await?;
        let mut stream = ByteStream::connect(site.env.http()).await?;
        let host = &site.host;
        let fields = "Transfer-Encoding: chunked\r\nConnection: close";
        let head = format!("POST /echo HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n\r\n");
        stream.send(head.as_bytes()).await?;
        // The head of the answer arrives before the body is sent. Each chunk comes back before the
        // test sends the next one.
        let answer = read_until(&mut stream, b"\r\n\r\n").await?;
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"));
        for round in 0..50 {
            let piece = format!("{:x}\r\n{}\r\n", round + 1, "x".repeat(round + 1));
            stream.send(piece.as_bytes()).await?;
            let back = stream.receive(piece.len()).await?;
            assert!(back.eq_ignore_ascii_case(piece.as_bytes()), "round {round}");
        }
        stream.send(b"0\r\n\r\n").await?;
        let reading = stream.read_to_end().await;
        assert_eq!(
            (reading.bytes.as_slice(), reading.ended),
            (b"0\r\n\r\n".as_slice(), BodyEnd::CleanClose)
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn continue_is_answered_hop_by_hop() -> Result<()> {
    let site = NodeEnv::start().await?;
    let upload = |host: &str| {
        RawRequest::new("POST", "/upload", host)
            .expecting_continue()
            .header("Connection", "close")
    };
    let body = deterministic_bytes(1, 300_000);
    let expecting = upload(&site.host).body(body.clone());
    let reply = request(site.env.http(), &expecting).await?;
    assert_eq!((reply.status, &*reply.interim), (200, &[100][..]));
    let direct = RawRequest::new("POST", "/upload", &site.host)
        .header("Connection", "close")
        .body(body.clone());
    let direct = request(site.exporter.addr(), &direct).await?;
    assert_eq!(reply.text(), direct.text());
    // The target receives no Expect field, because the listener has already answered the caller
    // with 100.
    let target = RecordingTarget::start("one").await?;
    let host = format!("worker-1:{}", target.addr().port());
    request(site.env.http(), &upload(&host).body("abc")).await?;
    let arrived = target.requests().pop().context("nothing arrived")?;
    assert_eq!(arrived.text(), "abc");
    assert_eq!(arrived.field("expect"), None);
    // The server does not ask for a body that it cannot forward.
    let nowhere = upload("nobody:9100").body(body);
    let reply = request(site.env.http(), &nowhere).await?;
    assert_eq!((reply.status, reply.interim.len()), (400, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_without_a_body_leave_the_connection_usable() -> Result<()> {
    let site = NodeEnv::start().await?;
    let mut caller = KeepAliveClient::connect(site.env.http()).await?;
    for _ in 0..5 {
        for (method, path, status, length) in [
            ("HEAD", "/size/12345", 200, Some("12345")),
            ("HEAD", "/chunked/12345", 200, None),
            ("GET", "/status/204", 204, None),
            ("GET", "/status/304", 304, None),
        ] {
            let asked = RawRequest::new(method, path, &site.host);
            let reply = caller.request(&asked).await?;
            assert_eq!((reply.status, reply.body.len()), (status, 0), "{path}");
            if method == "HEAD" {
                assert_eq!(reply.header("content-length"), length, "{path}");
            } else {
                assert_eq!(reply.header("transfer-encoding"), None, "{path}");
            }
        }
        let whole = RawRequest::new("GET", "/size/3", &site.host);
        let whole = caller.request(&whole).await?;
        assert_eq!(whole.body, deterministic_bytes(0, 3));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn content_codings_pass_untouched() -> Result<()> {
    let site = NodeEnv::start().await?;
    // The body is not valid gzip. A proxy that inspects or decodes the body fails.
    let body = deterministic_bytes(7, 100_000);
    let head = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nVary: Accept-Encoding\r\nETag: \"1\"\r\nContent-Length: 100000\r\n\r\n";
    let answer = [head.as_bytes(), &body].concat();
    let steps = vec![HostileAction::ReadHead, HostileAction::Send(answer)];
    let target = HostileTarget::start(steps).await?;
    let host = format!("worker-1:{}", target.addr().port());
    for asks in [None, Some("gzip"), Some("identity")] {
        let get = RawRequest::get(&host, "/");
        let get = asks
            .iter()
            .fold(get, |get, coding| get.header("Accept-Encoding", coding));
        let reply = request(site.env.http(), &get).await?;
        assert!(reply.body == body, "{asks:?}");
        for (name, value) in [
            ("content-encoding", "gzip"),
            ("vary", "Accept-Encoding"),
            ("etag", "\"1\""),
        ] {
            assert_eq!(reply.header(name), Some(value), "{asks:?}");
        }
    }
    Ok(())
}

/// Tests every framing: the target writes the next byte only after the caller has received the
/// previous one.
#[tokio::test(flavor = "multi_thread")]
async fn each_write_of_a_target_arrives_before_the_next() -> Result<()> {
    let env = TestEnv::start().await?;
    let agent = ScriptedAgent::connect(&env, "worker-1").await?;
    for head in [
        "HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        "HTTP/1.0 200 OK\r\n\r\n",
    ] {
        let passed = timeout(scaled(WAIT_TIMEOUT), byte_by_byte(&env, &agent, head)).await;
        passed.with_context(|| format!("{head:?}: a byte is held up"))??;
    }
    Ok(())
}

async fn byte_by_byte(env: &TestEnv, agent: &ScriptedAgent, head: &str) -> Result<()> {
    let get = RawRequest::get("worker-1:9100", "/");
    let (answer, stream) = tokio::join!(Exchange::start(env.http(), &get), async {
        let mut stream = agent.next_stream().await?;
        stream.accept("").await?;
        // The target must read the request before it answers. Otherwise hyper treats the connection
        // as broken.
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            asked.push(stream.read_u8().await?);
        }
        stream.write_all(head.as_bytes()).await?;
        stream.flush().await?;
        anyhow::Ok(stream)
    });
    let (mut answer, mut stream) = (answer?, stream?);
    let chunked = head.contains("chunked");
    for index in 0..40_u8 {
        let byte = b'a' + index % 26;
        let sent = match chunked {
            true => vec![b'1', b'\r', b'\n', byte, b'\r', b'\n'],
            false => vec![byte],
        };
        stream.write_all(&sent).await?;
        stream.flush().await?;
        let arrived = answer.data().await;
        ensure!(
            arrived.as_deref() == Some(&[byte]),
            "{head:?} {index}: {arrived:?}"
        );
    }
    if chunked {
        stream.write_all(b"0\r\n\r\n").await?;
    }
    // The server has the complete answer and may already have closed the stream.
    let _ended = stream.shutdown().await;
    let behind = answer.data().await;
    ensure!(behind.is_none(), "{head:?}: bytes behind the end");
    let ended = answer.ended();
    ensure!(ended.is_some_and(BodyEnd::is_clean), "{head:?}: {ended:?}");
    Ok(())
}
