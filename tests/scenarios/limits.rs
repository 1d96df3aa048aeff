//! Crowds of slow connections that exhaust a limit. Other callers and agents must not notice them.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_proto::tls::{self, Trust};
use tunnel_tests::checks::{ensure_status, get_ok};
use tunnel_tests::client::{KeepAliveClient, RawRequest, request};
use tunnel_tests::dns::{Message, RecordType, query};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::Exporter;

/// Source address of the crowd. To the server this is another host.
const CROWD: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const CROWD_SIZE: usize = 5000;
/// First byte of a TLS handshake record.
const TLS_RECORD: u8 = 22;
/// The default of `limits.preAuthPerSource`.
const CONNS: usize = 1024;
/// `limits.callersTotal` in the test of the listeners, which is smaller than the crowd.
const CALLERS: usize = 4096;
/// Time after which the server has closed every slow connection: the defaults of
/// `limits.handshakeTimeout` and `limits.requestHeadTimeout`, and a margin.
const ALL_GONE: Duration = Duration::from_secs(15);

async fn from_crowd(to: SocketAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((CROWD, 0).into())?;
    Ok(socket.connect(to).await?)
}

/// Opens connections from the crowd's address. Every second one sends the first byte of the
/// protocol, and the others send nothing.
async fn slow_crowd(to: SocketAddr, byte: u8) -> Result<Vec<TcpStream>> {
    let mut crowd = Vec::with_capacity(CROWD_SIZE);
    for number in 0..CROWD_SIZE {
        let mut socket = from_crowd(to).await?;
        if number % 2 == 0 {
            // The server may evict a socket before the test writes to it.
            let _evicted = socket.write_all(&[byte]).await;
        }
        crowd.push(socket);
    }
    Ok(crowd)
}

/// Waits until the server has closed all sockets of the crowd, by eviction or by timeout.
async fn disperses(crowd: &mut [TcpStream]) -> Result<()> {
    let all_end = async {
        for socket in crowd {
            // An end and a reset both free the permit.
            let _ended = socket.read(&mut [0; 16]).await;
        }
    };
    let ended = timeout(scaled(ALL_GONE), all_end).await;
    ended.context("some slow sockets are still open")
}

/// Sends a request from the crowd's address, which must be answered with 200.
async fn ask_from_crowd(to: SocketAddr, get: &RawRequest) -> Result<()> {
    let mut neighbor = from_crowd(to).await?;
    neighbor.write_all(&get.bytes()).await?;
    let mut answer = Vec::new();
    neighbor.read_to_end(&mut answer).await?;
    let answer = String::from_utf8_lossy(&answer);
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}

/// Sends a DNS query and reads its answer.
async fn ask_dns(socket: &mut TcpStream) -> Result<()> {
    let asked = query("worker-9", RecordType::A)?;
    let bytes = asked.to_vec()?;
    socket.write_u16(u16::try_from(bytes.len())?).await?;
    socket.write_all(&bytes).await?;
    let mut answer = vec![0; socket.read_u16().await?.into()];
    socket.read_exact(&mut answer).await?;
    let answer = Message::from_vec(&answer)?;
    ensure!(answer.metadata.id == asked.metadata.id, "{answer}");
    Ok(())
}

async fn env_with_dns(limits: &str) -> Result<TestEnv> {
    let limits = TestEnv::limits(limits);
    TestEnv::start_with(|settings| {
        settings.dns_listen = Some("127.0.0.1:0".into());
        settings.dns_answer = vec!["192.0.2.1".into()];
        settings.dns_upstream = vec!["off".into()];
        settings.limits = limits;
    })
    .await
}

/// Performs a TLS handshake on the agents' port from the crowd's address.
async fn handshake_from_crowd(env: &TestEnv) -> Result<()> {
    let socket = from_crowd(env.bound().agents).await?;
    let client = tls::enroll_client(Trust::Pin(env.ca().spki_sha256()))?;
    let name = "tunnel-server.invalid".try_into()?;
    TlsConnector::from(client).connect(name, socket).await?;
    Ok(())
}

/// T09 on the meta port: 5000 slow sockets are open. The server answers probes from another address
/// and from the crowd's address.
/// Prometheus keeps a connection for each of its targets, and the server takes fewer connections than
/// there are targets. No scrape is lost, at whatever rate: a connection between two scrapes makes
/// room at once.
#[tokio::test(flavor = "multi_thread")]
async fn kept_connections_make_room_for_others_at_any_rate() -> Result<()> {
    let limits = TestEnv::limits("{ callersTotal: 16, callersPerSource: 16 }");
    let site = NodeEnv::start_with(|settings| settings.limits = limits).await?;
    let get = RawRequest::new("GET", "/metrics", &site.host);
    let mut kept: Vec<Option<KeepAliveClient>> = (0..60).map(|_| None).collect();
    let mut opened = 0;
    for round in 0..5 {
        for (number, kept) in kept.iter_mut().enumerate() {
            let reply = match kept {
                Some(client) => client.request(&get).await.ok(),
                None => None,
            };
            let reply = match reply {
                Some(reply) => reply,
                // As Prometheus does after the end of a kept connection.
                None => {
                    opened += 1;
                    let mut client = KeepAliveClient::connect(site.env.http()).await?;
                    let reply = client.request(&get).await;
                    *kept = Some(client);
                    reply.with_context(|| format!("scrape {number} of round {round}"))?
                }
            };
            ensure_status(&reply, 200)?;
        }
    }
    ensure!(opened > 200, "only {opened} connections were evicted");
    let refused = "tunnel_server_callers_refused_total";
    ensure!(site.env.metric(refused).await? == 0, "callers were refused");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_meta_port_keep_no_probe_out() -> Result<()> {
    let env = TestEnv::start().await?;
    let meta = env.meta();
    let mut crowd = slow_crowd(meta, b'G').await?;
    get_ok(meta, "meta", "/livez").await?;
    let probe = RawRequest::get("meta", "/livez");
    eventually("the crowd's address", WAIT_TIMEOUT, async || {
        ask_from_crowd(meta, &probe).await
    })
    .await;
    disperses(&mut crowd).await
}

/// T09 on DNS over TCP: 5000 slow sockets are open. A source address has at most 32 connections,
/// for 5 s each, so the server answers other sources at once.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_dns_keep_no_query_out() -> Result<()> {
    let env = env_with_dns("{}").await?;
    let dns = env.bound().dns.context("no DNS")?;
    let mut crowd = slow_crowd(dns, 0).await?;
    ask_dns(&mut TcpStream::connect(dns).await?).await?;
    eventually("the crowd's address", WAIT_TIMEOUT, async || {
        ask_dns(&mut from_crowd(dns).await?).await
    })
    .await;
    disperses(&mut crowd).await
}

/// Opens one unauthenticated connection fewer than the limit, as many as the limit, and one more.
/// The first row tests the limit per source, and the second row tests the limit in total. Only the
/// last connection counts as a reached limit.
#[tokio::test(flavor = "multi_thread")]
async fn pre_auth_permits_hold_for_one_below_at_and_above() -> Result<()> {
    let (reached, other) = ("preAuthPerSource", "preAuthTotal");
    for (reached, other) in [(reached, other), (other, reached)] {
        let limits = TestEnv::limits(&format!("{{ {reached}: 3, {other}: 100 }}"));
        let env = TestEnv::start_with(|settings| settings.limits = limits).await?;
        let series = format!("tunnel_server_limits_reached_total{{limit=\"{reached}\"}}");
        let mut open_conns = Vec::new();
        for (count, expected) in [(2, 0), (3, 0), (4, 1)] {
            while open_conns.len() < count {
                open_conns.push(from_crowd(env.bound().agents).await?);
            }
            // The server may not have accepted the last connection yet. The server accepts in
            // order, so a count that is too high shows with the next connection at the latest.
            eventually("all are seen", WAIT_TIMEOUT, async || {
                let value = env.metric(&series).await?;
                ensure!(value == expected, "{reached} is {value} for {count}");
                anyhow::Ok(())
            })
            .await;
        }
        // The server has closed either the newest or the oldest connection. Three are left.
        let mut gone = 0;
        for socket in &mut open_conns {
            let read = timeout(scaled(Duration::from_millis(200)), socket.read(&mut [0; 1])).await;
            gone += usize::from(matches!(read, Ok(Ok(0) | Err(_))));
        }
        ensure!(gone == 1, "{gone} of 4 are gone");
    }
    Ok(())
}

/// Opens connections up to `dnsConnections` and one more. The last one waits, and the server serves
/// it when another connection ends.
#[tokio::test(flavor = "multi_thread")]
async fn dns_connections_hold_for_one_below_at_and_above() -> Result<()> {
    let env = env_with_dns("{ dnsConnections: 3 }").await?;
    let dns = env.bound().dns.context("no DNS")?;
    let waited = "tunnel_server_dns_connections_waited_total";
    let mut open_conns = Vec::new();
    for _ in 0..3 {
        let mut socket = from_crowd(dns).await?;
        ask_dns(&mut socket).await?;
        open_conns.push(socket);
    }
    assert_eq!(env.metric(waited).await?, 0);
    let mut fourth = from_crowd(dns).await?;
    let mut waiting = Box::pin(ask_dns(&mut fourth));
    let waits = eventually("the fourth connection waits", WAIT_TIMEOUT, async || {
        let count = env.metric(waited).await?;
        ensure!(count == 1, "{count}");
        anyhow::Ok(())
    });
    tokio::select! {
        biased;
        early = &mut waiting => bail!("served before another one ended: {early:?}"),
        () = waits => {}
    }
    open_conns.pop();
    timeout(scaled(WAIT_TIMEOUT), waiting).await??;
    Ok(())
}

/// T09 on port 10262: 5000 slow sockets are open. The server limits their source to its share and
/// closes the sockets in time. Meanwhile agents connect from another address and from the crowd's
/// address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_agents_port_keep_no_agent_out() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let mut crowd = slow_crowd(env.bound().agents, TLS_RECORD).await?;
    let _agent = env.agent("worker-1").await?;
    eventually("the crowd's address gets in", WAIT_TIMEOUT, async || {
        handshake_from_crowd(&env).await
    })
    .await;
    let host = format!("worker-1:{}", exporter.addr().port());
    get_ok(env.http(), &host, "/metrics").await?;
    eventually("all above the share are gone", WAIT_TIMEOUT, async || {
        let mut gone = 0;
        for result in ["evicted", "overloaded", "timeout"] {
            let series = format!("tunnel_server_handshakes_total{{result=\"{result}\"}}");
            gone += env.metric(&series).await?;
        }
        ensure!(gone >= u64::try_from(CROWD_SIZE - CONNS)?);
        anyhow::Ok(())
    })
    .await;
    disperses(&mut crowd).await
}

/// T09 on the HTTP and HTTPS listeners: 5000 slow sockets may take all permits. Meanwhile the
/// server serves a scrape from another address and from the crowd's address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_a_listener_keep_no_scrape_out() -> Result<()> {
    let limits = format!("{{ callersTotal: {CALLERS}, callersPerSource: {CALLERS} }}");
    let limits = TestEnv::limits(&limits);
    let site = NodeEnv::start_with(|settings| settings.limits = limits).await?;
    let env = &site.env;
    let http = env.bound().http.context("http")?;
    let https = env.bound().https.context("https")?;
    let get = RawRequest::get(&site.host, "/metrics");
    // The request to the HTTPS listener names a port that the server itself refuses. The test only
    // needs an answer.
    let refused = RawRequest::get("worker-1:81", "/metrics");
    let secure = env.https("worker-1")?;
    for (address, endpoint, first, asked, status) in [
        (http, env.http(), b'G', &get, 200),
        (https, secure, TLS_RECORD, &refused, 403),
    ] {
        let mut crowd = slow_crowd(address, first).await?;
        ensure_status(&request(endpoint, asked).await?, status)?;
        eventually("the crowd's address", WAIT_TIMEOUT, async || {
            ask_from_crowd(http, &get).await
        })
        .await;
        disperses(&mut crowd).await?;
    }
    let evicted = env.metric("tunnel_server_callers_evicted_total").await?;
    let refused = env.metric("tunnel_server_callers_refused_total").await?;
    ensure!(evicted + refused >= u64::try_from(CROWD_SIZE - CALLERS)?);
    Ok(())
}

/// Checks the default windows against the assembler of quinn. quinn closes the whole connection
/// when a stream has more gaps than the assembler accepts chunks. In the worst case every second
/// packet of a full window is lost.
#[test]
fn default_window_has_fewer_gaps_than_quinn_allows() {
    const PIECES: u32 = 1024;
    const SMALLEST_PACKET: u32 = 1200;
    let agent = tunnel_agent::config::Limits::default().stream_window;
    let server = tunnel_server::config::Limits::default().stream_window;
    for window in [agent, server] {
        assert!(window / SMALLEST_PACKET / 2 < PIECES, "{window}");
    }
}
