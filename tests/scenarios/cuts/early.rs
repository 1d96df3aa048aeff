//! Targets that answer before the request has ended, with a socket that they close as plain servers
//! do.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{interval, timeout};
use tokio_util::task::AbortOnDropHandle;
use tunnel_agent::config::TransportChoice;
use tunnel_proto::tcp::abort_behind;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{HttpReply, RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::{Gear, rounds};
use tunnel_tests::targets::deterministic_bytes;

use super::env_with_service;
use crate::abuse::report_figure;

const NODE: &str = "worker-1";
const KIB: usize = 1 << 10;
/// Bytes of an answer of a byte protocol.
const ANSWER_BYTES: usize = 200_003;

tests_of! {
    fn answer_before_a_reset_arrives_over_quic() = refused_uploads(TransportChoice::Quic);
    fn answer_before_a_reset_arrives_over_h2() = refused_uploads(TransportChoice::H2);
    fn bytes_before_a_reset_arrive_over_quic() = cut_answers(TransportChoice::Quic);
    fn bytes_before_a_reset_arrive_over_h2() = cut_answers(TransportChoice::H2);
    fn tunnel_over_quic_loses_no_more_answers_than_a_direct_connection()
        = compared(TransportChoice::Quic);
    fn tunnel_over_h2_loses_no_more_answers_than_a_direct_connection()
        = compared(TransportChoice::H2);
}

/// How a target closes its socket after the answer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Closing {
    /// When all of the answer was received.
    Behind,
    /// At once, as plain servers do. The kernel then drops what it has not sent.
    AtOnce,
}

/// Starts a target that reads the head of each request, writes `answer`, and closes with unread
/// input, which is a reset (RFC 9293, section 3.6.1).
async fn closing_target(
    answer: Vec<u8>,
    closing: Closing,
) -> Result<(SocketAddr, AbortOnDropHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    #[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
    let accepting = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut first = [0; 16];
            if stream.read_exact(&mut first).await.is_ok()
                && stream.write_all(&answer).await.is_ok()
                && closing == Closing::Behind
            {
                abort_behind(&stream, WAIT_TIMEOUT).await;
            }
        }
    });
    Ok((address, AbortOnDropHandle::new(accepting)))
}

async fn refused_uploads(transport: TransportChoice) -> Result<()> {
    let env = TestEnv::start().await?;
    let (address, _target) = closing_target(TOO_LARGE.to_vec(), Closing::Behind).await?;
    let _agent = env
        .agent_with(NODE, |config| config.transport = transport)
        .await?;
    for length in [20 * KIB, 200 * KIB, 20 * KIB * KIB] {
        let upload = upload(address, length);
        for round in 0..rounds() {
            let reply = request(env.http(), &upload).await?;
            ensure!(
                is_too_large(&reply),
                "{length} bytes, round {round}: {} {}",
                reply.status,
                reply.text()
            );
        }
    }
    Ok(())
}

async fn cut_answers(transport: TransportChoice) -> Result<()> {
    let answer = deterministic_bytes(4, ANSWER_BYTES);
    let (address, _target) = closing_target(answer.clone(), Closing::Behind).await?;
    let (env, _endpoint) = env_with_service(address.port()).await?;
    let service = env.bound().services[0].1;
    let _agent = env
        .agent_with(NODE, |config| config.transport = transport)
        .await?;
    for round in 0..rounds() {
        let (got, kind) = talk_to_reset(service).await?;
        let is_reset = kind == std::io::ErrorKind::ConnectionReset;
        ensure!(is_reset, "round {round}: {kind}");
        ensure!(got == answer, "round {round}: {} bytes", got.len());
    }
    Ok(())
}

/// Uploads without end, and reads to the reset. Returns what was read, and the error.
async fn talk_to_reset(address: SocketAddr) -> Result<(Vec<u8>, std::io::ErrorKind)> {
    let caller = TcpStream::connect(address).await?;
    let (mut reader, mut writer) = caller.into_split();
    let mut got = Vec::new();
    let upload = vec![7; 64 * KIB];
    let uploading = async {
        loop {
            if let Err(error) = writer.write_all(&upload).await {
                break error;
            }
        }
    };
    let (read, error) = tokio::join!(
        timeout(scaled(WAIT_TIMEOUT), reader.read_to_end(&mut got)),
        uploading
    );
    // The kernel reports the reset once, to the reader or to the writer.
    let kind = read?
        .err()
        .map_or_else(|| error.kind(), |error| error.kind());
    Ok((got, kind))
}

fn upload(target: SocketAddr, length: usize) -> RawRequest {
    RawRequest::new("POST", "/upload", &format!("{NODE}:{}", target.port()))
        .header("Connection", "close")
        .body(vec![7; length])
}

fn is_too_large(reply: &HttpReply) -> bool {
    reply.status == 413 && reply.body == b"large"
}

const TOO_LARGE: &[u8] = b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge";

/// Answers that were lost, of those through the tunnel and of those of direct connections.
#[derive(Debug, Default)]
struct Losses {
    tunnel: usize,
    direct: usize,
}

/// The two ways to a target take turns, so that both see the same machine.
async fn compared(transport: TransportChoice) -> Result<()> {
    let answer = deterministic_bytes(4, ANSWER_BYTES);
    let runs = Gear::current().pick(3, 30);
    let mut cells = Vec::new();
    for closing in [Closing::Behind, Closing::AtOnce] {
        let (web, _web) = closing_target(TOO_LARGE.to_vec(), closing).await?;
        let (raw, _raw) = closing_target(answer.clone(), closing).await?;
        let (env, _endpoint) = env_with_service(raw.port()).await?;
        let _agent = env
            .agent_with(NODE, |config| config.transport = transport)
            .await?;
        for length in [20_000, 200_000, 20_000_000] {
            let upload = upload(web, length);
            let mut losses = Losses::default();
            for _ in 0..runs {
                let is_lost =
                    |reply: Result<HttpReply>| !reply.is_ok_and(|reply| is_too_large(&reply));
                losses.direct += usize::from(is_lost(request(web, &upload).await));
                losses.tunnel += usize::from(is_lost(request(env.http(), &upload).await));
            }
            cells.push((format!("{closing:?}, upload of {length} bytes"), losses));
        }
        let service = env.bound().services[0].1;
        let mut losses = Losses::default();
        for _ in 0..runs {
            losses.direct += usize::from(talk_to_reset(raw).await?.0 != answer);
            losses.tunnel += usize::from(talk_to_reset(service).await?.0 != answer);
        }
        cells.push((format!("{closing:?}, {ANSWER_BYTES} bytes"), losses));
    }
    for (cell, losses) in &cells {
        let Losses { tunnel, direct } = losses;
        report_figure(&format!(
            "{transport:?}, {cell}: of {runs} answers {tunnel} lost, {direct} by direct connections"
        ));
    }
    for (cell, losses) in &cells {
        ensure!(losses.tunnel <= losses.direct, "{cell}: {losses:?}");
    }
    Ok(())
}

/// The upload takes longer than the time in which a connection without a request is closed.
#[tokio::test(flavor = "multi_thread")]
async fn upload_goes_on_after_a_complete_answer() -> Result<()> {
    const PIECES: usize = 16;
    let env = TestEnv::start().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let _agent = env.agent(NODE).await?;
    let bound = env.bound().http.context("an HTTP listener")?;
    let mut caller = TcpStream::connect(bound).await?;
    let body = deterministic_bytes(2, PIECES * 64 * KIB);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: {NODE}:{port}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    caller.write_all(head.as_bytes()).await?;
    let (mut target, _) = listener.accept().await?;
    read_head(&mut target).await?;
    target
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await?;
    read_head(&mut caller).await?;
    let mut answer = [0; 2];
    caller.read_exact(&mut answer).await?;
    let ended = "tunnel_server_streams_total";
    ensure!(env.metric(ended).await? == 0, "the upload has not ended");
    let mut paced = interval(Duration::from_millis(100));
    let mut got = vec![0; body.len()];
    let (sent, received) = tokio::join!(
        async {
            for piece in body.chunks(64 * KIB) {
                paced.tick().await;
                caller.write_all(piece).await?;
            }
            anyhow::Ok(())
        },
        target.read_exact(&mut got)
    );
    sent.context("the caller's side")?;
    received.context("the target's side")?;
    ensure!(got == body);
    eventually("one record, with all bytes", WAIT_TIMEOUT, async || {
        ensure!(env.metric(ended).await? == 1);
        let bytes = env
            .metric("tunnel_server_stream_bytes_total{direction=\"out\"}")
            .await?;
        ensure!(bytes >= body.len() as u64, "{bytes} bytes");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// A FIN during a plain request means that the caller is gone. It gets no clean end.
#[tokio::test(flavor = "multi_thread")]
async fn caller_that_half_closes_gets_a_reset_and_a_record() -> Result<()> {
    let env = TestEnv::start().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let _agent = env.agent(NODE).await?;
    let bound = env.bound().http.context("an HTTP listener")?;
    for (number, method) in (1..).zip(["GET", "POST"]) {
        let mut caller = TcpStream::connect(bound).await?;
        let head =
            format!("{method} / HTTP/1.1\r\nHost: {NODE}:{port}\r\nContent-Length: 0\r\n\r\n");
        caller.write_all(head.as_bytes()).await?;
        let (mut target, _) = listener.accept().await?;
        read_head(&mut target).await?;
        caller.shutdown().await?;
        let mut got = Vec::new();
        let read = timeout(scaled(WAIT_TIMEOUT), caller.read_to_end(&mut got)).await?;
        let kind = read.err().context("a clean end")?.kind();
        ensure!(
            kind == std::io::ErrorKind::ConnectionReset,
            "{method}: {kind}"
        );
        let gone = "tunnel_server_streams_total{result=\"caller_gone\"}";
        eventually("a record", WAIT_TIMEOUT, async || {
            let records = env.metric(gone).await?;
            ensure!(records == number, "{records} records");
            anyhow::Ok(())
        })
        .await;
    }
    Ok(())
}

/// curl --http2 and Java's client offer HTTP/2 on each plain connection.
#[tokio::test(flavor = "multi_thread")]
async fn offer_of_http2_is_between_the_caller_and_the_server() -> Result<()> {
    let env = TestEnv::start().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let _agent = env.agent(NODE).await?;
    let post = RawRequest::new("POST", "/", &format!("{NODE}:{port}"))
        .header("Connection", "Upgrade, HTTP2-Settings")
        .header("Upgrade", "h2c")
        .header("HTTP2-Settings", "AAMAAABkAAQCAAAAAAIAAAAA")
        .body(b"hello".to_vec());
    let (reply, head) = tokio::join!(request(env.http(), &post), async {
        let (mut target, _) = listener.accept().await?;
        let head = read_head(&mut target).await?;
        target
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .await?;
        anyhow::Ok((head, target))
    });
    let (head, _target) = head?;
    let head = String::from_utf8(head)?.to_lowercase();
    ensure!(
        !head.contains("upgrade") && !head.contains("http2"),
        "{head}"
    );
    let reply = reply?;
    ensure!(reply.status == 200, "{}", reply.text());
    ensure_contains(&reply.text(), &["ok"])
}

async fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}
