//! S02, S05: lengths and numbers at their bounds, from unauthenticated peers and from peers with
//! credentials.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::wire::control::Hello;
use tunnel_proto::wire::frame::CONTROL_MESSAGE_MAX;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::scaled;

use super::super::scripted::{Admission, ScriptedAgent, agent_key, dial, hello};

/// Lengths that are announced without the data: around the maximum size of a frame, and around the
/// limits of 32 and 64 bits.
const LENGTHS: [u64; 9] = [
    16 * 1024 + 1,
    64 * 1024 + 1,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    1 << 32,
    (1 << 32) + 16,
    i64::MAX as u64,
    u64::MAX - 1,
    u64::MAX,
];

/// Returns a length in the encoding of frames (a varint), followed by 100 bytes of a message.
fn announced(mut length: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while length >= 0x80 {
        bytes.push(0x80 | u8::try_from(length & 0x7f).unwrap_or_default());
        length >>= 7;
    }
    bytes.push(u8::try_from(length).unwrap_or_default());
    bytes.extend_from_slice(&[0; 100]);
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn s02_enrollment_that_announces_4_gib_ends_within_a_second() -> Result<()> {
    let env = TestEnv::start().await?;
    for length in LENGTHS {
        let tcp = TcpStream::connect(env.bound().agents).await?;
        let client = tls::enroll_client(Trust::Pin(env.ca().spki_sha256()))?;
        let name = "tunnel-server.invalid".try_into()?;
        let mut stream = TlsConnector::from(client).connect(name, tcp).await?;
        let began = Instant::now();
        stream.write_all(&announced(length)).await?;
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let _cut = timeout(scaled(Duration::from_secs(1)), read)
            .await
            .with_context(|| format!("{length}: still open after {:?}", began.elapsed()))?;
        ensure!(answer.len() < 1024, "{length}: {} bytes", answer.len());
    }
    Ok(())
}

/// Announces lengths above the maximum in the first control message of an agent: the server closes
/// the session within a second. Then announces each length in an agent's reply on a stream: the
/// caller receives 502.
#[tokio::test(flavor = "multi_thread")]
async fn s02_agent_that_announces_4_gib_is_cut_within_a_second() -> Result<()> {
    let env = TestEnv::start().await?;
    let too_long = |length: &u64| *length > CONTROL_MESSAGE_MAX as u64;
    for length in LENGTHS.into_iter().filter(too_long) {
        let (session, _dialer) = dial(&env, agent_key(&env, "worker-1")?).await?;
        let incoming = session.accept().await?;
        let (_, mut control) = incoming.header(Instant::now() + WAIT_TIMEOUT).await?;
        control.accept("").await?;
        control.write_all(&announced(length)).await?;
        let closed = timeout(scaled(Duration::from_secs(1)), session.closed()).await;
        closed.with_context(|| format!("{length}: the session is still open"))?;
    }
    let get = RawRequest::get("worker-1:9100", "/metrics");
    for length in LENGTHS {
        let agent = ScriptedAgent::connect(&env, "worker-1").await?;
        env.connected("worker-1").await;
        let asked = request(env.http(), &get);
        let lies = async {
            let mut stream = agent.next_stream().await?;
            stream.write_all(&announced(length)).await?;
            // The agent keeps the stream open, so only the server can end it.
            let mut rest = Vec::new();
            let _cut = stream.read_to_end(&mut rest).await;
            anyhow::Ok(())
        };
        let both = async { tokio::join!(asked, lies) };
        let (answer, lied) = timeout(scaled(Duration::from_secs(2)), both)
            .await
            .with_context(|| format!("{length}: no answer"))?;
        lied?;
        ensure!(answer?.status == 502, "{length}");
        agent.leave().await;
    }
    Ok(())
}

/// S05: sends a Hello with versions at the bounds of their type. The server admits an agent whose
/// range includes version 1 and refuses any other.
#[tokio::test(flavor = "multi_thread")]
async fn s05_versions_at_the_bounds_of_their_type_are_checked() -> Result<()> {
    let env = TestEnv::start().await?;
    let bounds = [0, 1, 2, 0x7fff_ffff, 0x8000_0000, u32::MAX - 1, u32::MAX];
    let mut instance = 0;
    for low in bounds {
        for high in bounds {
            instance += 1;
            let node = format!("worker-{instance}");
            let hello = Hello {
                versions: (low, high),
                capabilities: vec![String::new(), "x".repeat(1000)],
                software: String::new(),
                node_ip: "999.999.999.999".into(),
                ..hello(&node, [instance; 16])?
            };
            let key = agent_key(&env, &node)?;
            let answer = ScriptedAgent::handshake_with(&env, key, hello).await?;
            let admitted = matches!(answer, Admission::Admitted(_));
            let is_within = low <= 1 && high >= 1;
            ensure!(admitted == is_within, "versions {low} to {high}");
        }
    }
    Ok(())
}
