//! Limits on what a caller may send, and bytes that never leave the server: split and slow handshakes
//! (S37), line ends inside values (S36).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tunnel_tests::client::{BodyEnd, ByteStream, ClientTls};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::scaled;
use tunnel_tests::targets::{RecordedInput, RecordingTarget};

#[tokio::test(flavor = "multi_thread")]
async fn s37_client_hello_may_be_split_at_every_byte() -> Result<()> {
    let env = TestEnv::start().await?;
    let address = env.bound().https.expect("HTTPS listener");
    let tls = ClientTls::insecure("worker-1", None)?;
    let hello = tls.hello()?;
    assert!(hello.len() > 200, "{} bytes", hello.len());
    for split in 1..hello.len() {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (first, second) = hello.split_at(split);
        stream.write_all(first).await?;
        tokio::task::yield_now().await;
        stream.write_all(second).await?;
        let mut record = [0; 6];
        stream.read_exact(&mut record).await?;
        // The record is a handshake record that begins with ServerHello.
        assert_eq!((record[0], record[5]), (22, 2), "split at {split}");
    }
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    for byte in &hello {
        stream.write_all(&[*byte]).await?;
        tokio::task::yield_now().await;
    }
    let mut record = [0; 6];
    stream.read_exact(&mut record).await?;
    assert_eq!((record[0], record[5]), (22, 2), "byte by byte");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn s37_slow_client_hello_ends_with_its_time() -> Result<()> {
    let limit = Duration::from_secs(1);
    let env =
        TestEnv::start_with(|settings| settings.limits = TestEnv::limits("handshakeTimeout: 1s"))
            .await?;
    let address = env.bound().https.expect("HTTPS listener");
    let hello = ClientTls::insecure("worker-1", None)?.hello()?;
    for sent in [0, 1, 5, 6, hello.len() / 2, hello.len() - 1] {
        let began = tokio::time::Instant::now();
        let mut stream = ByteStream::connect(address).await?;
        stream.send(&hello[..sent]).await?;
        let reading = tokio::time::timeout(scaled(WAIT_TIMEOUT), stream.read_to_end()).await?;
        let took = began.elapsed();
        assert!(reading.bytes.is_empty(), "{:?}", reading.bytes);
        assert!(took >= limit, "{sent} bytes: {took:?}");
        let most = limit + scaled(Duration::from_secs(2));
        assert!(took < most, "{sent} bytes: {took:?}");
    }
    Ok(())
}

/// Sends random hostile heads. No head that the server sends to a target or to a caller has a line
/// that the server did not intend.
#[tokio::test(flavor = "multi_thread")]
async fn s36_no_value_brings_a_line_end_into_a_head() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let target = RecordingTarget::start("own").await?;
    let own = format!("worker-1:{}", target.addr().port());
    let seed = rand::random();
    let mut random = StdRng::seed_from_u64(seed);
    for round in 0..2000 {
        let mut evil = |at_most: usize| -> Vec<u8> {
            let pieces = random.random_range(0..=at_most);
            (0..pieces)
                .flat_map(|_| PIECES[random.random_range(0..PIECES.len())].to_vec())
                .collect()
        };
        let mut target = evil(3);
        if !target.is_ascii() {
            target.clear();
        }
        let mut bytes = [b"GET /".as_slice(), &target, b" HTTP/1.1\r\nHost: "].concat();
        if round % 2 == 0 {
            bytes.extend_from_slice(own.as_bytes());
        }
        bytes.extend(if round % 4 < 2 { evil(1) } else { Vec::new() });
        for name in [
            "\r\nX-Tunnel-Proxy-Host: worker-1",
            "\r\nX-A: ",
            "\r\nX-B: c",
            "\r\nTraceparent: ",
        ] {
            if round % 3 > 0 || !name.contains("Proxy") {
                bytes.extend_from_slice(name.as_bytes());
                bytes.extend(evil(2));
            }
        }
        bytes.extend_from_slice(b"\r\nConnection: close\r\n\r\n");
        let mut stream = ByteStream::connect(env.http()).await?;
        stream.send(&bytes).await?;
        let reading = stream.read_to_end().await;
        let shown = String::from_utf8_lossy(&bytes);
        check_answer(&reading.bytes).with_context(|| format!("seed {seed}: {shown:?}"))?;
        assert_eq!(reading.ended, BodyEnd::CleanClose, "seed {seed}: {shown:?}");
    }
    for recorded in target.recorded() {
        let RecordedInput::Request(_, request) = recorded else {
            panic!("seed {seed}: {recorded:?}");
        };
        assert_eq!(request.field("Injected"), None, "seed {seed}: {request:?}");
    }
    // The server refuses most requests. The accepted ones show that the checks cover real requests.
    let accepted = target.requests().len();
    assert!(accepted > 20, "{accepted} got through");
    Ok(())
}

const PIECES: [&[u8]; 18] = [
    b"\r\nFine: 1",
    b"\nFine: 2",
    b"\rInjected: 1",
    b"%0d%0aInjected: 1",
    b"\\r\\nInjected: 1",
    b"\0",
    b"\x0b",
    b"\x0c",
    b"\xc2\x85",
    b"\xe2\x80\xa8",
    b"\xe5\x98\x8a\xe5\x98\x8d",
    b"\xff",
    b"a",
    b" ",
    b"\t",
    b":",
    b"\r\n Folded: 1",
    b"\x7f",
];

/// Checks that an answer has only fields of these names, and no line end in any of them.
fn check_answer(bytes: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(bytes);
    let parts = text.split_once("\r\n\r\n");
    let (head, body) = parts.with_context(|| format!("no head: {text:?}"))?;
    for line in head.split("\r\n").skip(1) {
        let name = line.split(':').next().unwrap_or_default().to_lowercase();
        let known = [
            "content-length",
            "content-type",
            "connection",
            "x-tunnel-error",
            "date",
        ];
        ensure!(known.contains(&name.as_str()), "field {line:?}");
        ensure!(!line.contains(['\r', '\n', '\0']), "line end in {line:?}");
    }
    ensure!(body.lines().count() <= 1, "body {body:?}");
    Ok(())
}
