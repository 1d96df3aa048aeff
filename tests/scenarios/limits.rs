//! Crowds that hold on to what is scarce, and the others, who must not notice.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_proto::tls::{self, Trust};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::Exporter;
use tunnel_tests::world::{PATIENCE, World};

/// Another host's address, as far as the server can tell.
const CROWD: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const CROWD_SIZE: usize = 5000;
/// The first byte of a TLS handshake.
const TLS_RECORD: u8 = 22;
/// `limits.preAuthPerSource` by default.
const PLACES: usize = 1024;
/// `limits.preAuthTotal` by default.
const CALLERS: usize = 4096;
/// `limits.handshakeTimeout` or `requestHeadTimeout` by default, and some more.
const ALL_GONE: Duration = Duration::from_secs(15);

async fn from_crowd(to: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((CROWD, 0).into())?;
    Ok(socket.connect(to).await?)
}

/// Connections that say nothing, or one byte of what is expected there.
async fn slow_crowd(to: SocketAddr, byte: u8) -> Result<Vec<TcpStream>> {
    let mut crowd = Vec::with_capacity(CROWD_SIZE);
    for number in 0..CROWD_SIZE {
        let mut socket = from_crowd(to).await?;
        if number % 2 == 0 {
            // A socket may be evicted before it.
            let _evicted = socket.write_all(&[byte]).await;
        }
        crowd.push(socket);
    }
    Ok(crowd)
}

/// All of them are pushed out or given up in time.
async fn disperses(crowd: &mut [TcpStream]) -> Result<()> {
    let all_end = async {
        for socket in crowd {
            // An end and a reset both free the place.
            let _ended = socket.read(&mut [0; 16]).await;
        }
    };
    let ended = timeout(scaled(ALL_GONE), all_end).await;
    ended.context("some slow ones are still there")
}

/// A handshake on the agents' port, from the crowd's own address.
async fn handshake_from_crowd(world: &World) -> Result<()> {
    let socket = from_crowd(world.bound().agents).await?;
    let client = tls::enroll_client(Trust::Pin(world.ca().spki_sha256()))?;
    let name = "tunnel-server.invalid".try_into()?;
    TlsConnector::from(client).connect(name, socket).await?;
    Ok(())
}

async fn metric(world: &World, name: &str) -> Result<u64> {
    let metrics = request(world.bound().meta, &RawRequest::get("meta", "/metrics")).await?;
    let text = metrics.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.unwrap_or("0").trim().parse()?)
}

/// T09 on 10262: the slow ones are held to their share and gone in time; agents get in meanwhile, from elsewhere and from
/// the same address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_agents_port_keep_no_agent_out() -> Result<()> {
    let world = Arc::new(World::start().await?);
    let exporter = Exporter::start("worker-1").await?;
    let mut crowd = slow_crowd(world.bound().agents, TLS_RECORD).await?;
    let _agent = world.agent("worker-1").await?;
    eventually("the crowd's address gets in", PATIENCE, async || {
        handshake_from_crowd(&world).await
    })
    .await;
    let host = format!("worker-1:{}", exporter.addr().port());
    let scrape = request(world.http(), &RawRequest::get(&host, "/metrics")).await?;
    assert_eq!(scrape.status, 200);
    eventually(
        "all above the share are pushed out or turned away",
        PATIENCE,
        async || {
            let mut gone = 0;
            for result in ["evicted", "overloaded", "timeout"] {
                let series = format!("tunnel_server_handshakes_total{{result=\"{result}\"}}");
                gone += metric(&world, &series).await?;
            }
            ensure!(
                gone >= u64::try_from(CROWD_SIZE - PLACES)?,
                "{gone} are gone"
            );
            anyhow::Ok(())
        },
    )
    .await;
    disperses(&mut crowd).await?;
    Ok(())
}

/// T09 on the doors: a scrape is served meanwhile, from elsewhere and from the crowd's own address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_a_door_keep_no_scrape_out() -> Result<()> {
    let world = World::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = world.agent("worker-1").await?;
    let (http, https) = (world.bound().http, world.bound().https);
    let host = format!("worker-1:{}", exporter.addr().port());
    let get = RawRequest::get(&host, "/metrics");
    // The TLS door is asked for a port that it refuses by itself: that it answers is all that counts here.
    let refused = RawRequest::get("worker-1:81", "/metrics");
    let plain = (http.context("http")?, world.http(), b'G', &get, 200);
    let secure = (
        https.context("https")?,
        world.https("worker-1")?,
        TLS_RECORD,
        &refused,
        403,
    );
    for (address, door, first, asked, status) in [plain, secure] {
        let mut crowd = slow_crowd(address, first).await?;
        let scrape = request(door, asked).await?;
        assert_eq!(scrape.status, status);
        let door = http.context("http")?;
        eventually("the crowd's address is served", PATIENCE, async || {
            let mut neighbour = from_crowd(door).await?;
            neighbour.write_all(&get.head_bytes()).await?;
            let mut answer = Vec::new();
            neighbour.read_to_end(&mut answer).await?;
            let answer = String::from_utf8_lossy(&answer);
            ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            anyhow::Ok(())
        })
        .await;
        disperses(&mut crowd).await?;
    }
    let evicted = metric(&world, "tunnel_server_callers_evicted_total").await?;
    let least = u64::try_from(CROWD_SIZE - CALLERS)?;
    ensure!(
        evicted >= least,
        "only {evicted} gave way or were turned away"
    );
    Ok(())
}
