//! Crowds of slow connections that exhaust a limit. Other callers and agents must not notice them.

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
use tunnel_tests::dns::{DnsClient, RecordType, query};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
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
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_meta_port_keep_no_probe_out() -> Result<()> {
    let env = TestEnv::start().await?;
    let meta = env.bound().meta;
    let mut crowd = slow_crowd(meta, b'G').await?;
    let probe = RawRequest::get("meta", "/livez");
    assert_eq!(request(meta, &probe).await?.status, 200);
    eventually(
        "the crowd's address is answered",
        WAIT_TIMEOUT,
        async || {
            let mut neighbor = from_crowd(meta).await?;
            let close = probe.clone().header("Connection", "close");
            neighbor.write_all(&close.bytes()).await?;
            let mut answer = Vec::new();
            neighbor.read_to_end(&mut answer).await?;
            let answer = String::from_utf8_lossy(&answer);
            ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            anyhow::Ok(())
        },
    )
    .await;
    disperses(&mut crowd).await
}

/// T09 on DNS over TCP: 5000 slow sockets are open. A source address has at most 32 connections,
/// for 5 s each, so the server answers other sources at once.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_dns_keep_no_query_out() -> Result<()> {
    let env = TestEnv::start_with(|settings| {
        settings.dns_listen = Some("127.0.0.1:0".into());
        settings.dns_answer = vec!["192.0.2.1".into()];
        settings.dns_upstream = vec!["off".into()];
    })
    .await?;
    let dns = env.bound().dns.context("no DNS")?;
    let mut crowd = slow_crowd(dns, 0).await?;
    let asked = query("worker-9", RecordType::A)?;
    let client = DnsClient::new(dns);
    let answers = client.over_tcp(std::slice::from_ref(&asked)).await?;
    assert_eq!(answers.len(), 1);
    let bytes = asked.to_vec()?;
    eventually(
        "the crowd's address is answered",
        WAIT_TIMEOUT,
        async || {
            let mut neighbor = from_crowd(dns).await?;
            neighbor.write_u16(u16::try_from(bytes.len())?).await?;
            neighbor.write_all(&bytes).await?;
            ensure!(neighbor.read_u16().await? > 12);
            anyhow::Ok(())
        },
    )
    .await;
    disperses(&mut crowd).await
}

/// Opens one unauthenticated connection fewer than the limit, as many as the limit, and one more.
/// The first row tests the limit per source, and the second row tests the limit in total. Only the
/// last connection counts as a reached limit.
#[tokio::test(flavor = "multi_thread")]
async fn pre_auth_permits_hold_for_one_below_at_and_above() -> Result<()> {
    for (limits, reached) in [
        (
            "{ preAuthPerSource: 3, preAuthTotal: 100 }",
            "preAuthPerSource",
        ),
        ("{ preAuthPerSource: 100, preAuthTotal: 3 }", "preAuthTotal"),
    ] {
        let env = TestEnv::start_with(|settings| settings.limits = TestEnv::limits(limits)).await?;
        let series = format!("tunnel_server_limits_reached_total{{limit=\"{reached}\"}}");
        let mut open_conns = Vec::new();
        for (count, expected) in [(2, 0), (3, 0), (4, 1)] {
            while open_conns.len() < count {
                open_conns.push(from_crowd(env.bound().agents).await?);
            }
            // The server may not have accepted the last connection yet. The server accepts in
            // order, so a count that is too high shows with the next connection at the latest.
            eventually("all are seen", WAIT_TIMEOUT, async || {
                let value = metric(&env, &series).await?;
                ensure!(value == expected, "{reached} is {value} for {count}");
                anyhow::Ok(())
            })
            .await;
        }
        // The server has closed either the newest or the oldest connection. Three are left.
        let mut gone = 0;
        for socket in &mut open_conns {
            let read = timeout(Duration::from_millis(200), socket.read(&mut [0; 1])).await;
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
    let env = TestEnv::start_with(|settings| {
        settings.dns_listen = Some("127.0.0.1:0".into());
        settings.dns_answer = vec!["192.0.2.1".into()];
        settings.dns_upstream = vec!["off".into()];
        settings.limits = TestEnv::limits("{ dnsConnections: 3 }");
    })
    .await?;
    let dns = env.bound().dns.context("no DNS")?;
    let bytes = query("worker-9", RecordType::A)?.to_vec()?;
    let ask = async |socket: &mut TcpStream| -> Result<()> {
        socket.write_u16(u16::try_from(bytes.len())?).await?;
        socket.write_all(&bytes).await?;
        let length = socket.read_u16().await?;
        socket.read_exact(&mut vec![0; length.into()]).await?;
        Ok(())
    };
    let waited = "tunnel_server_dns_connections_waited_total";
    let mut open_conns = Vec::new();
    for _ in 0..3 {
        let mut socket = from_crowd(dns).await?;
        ask(&mut socket).await?;
        open_conns.push(socket);
    }
    assert_eq!(metric(&env, waited).await?, 0);
    let mut fourth = from_crowd(dns).await?;
    let mut waiting = Box::pin(ask(&mut fourth));
    ensure!(
        timeout(Duration::from_millis(300), &mut waiting)
            .await
            .is_err()
    );
    assert_eq!(metric(&env, waited).await?, 1);
    open_conns.pop();
    timeout(scaled(WAIT_TIMEOUT), waiting).await??;
    Ok(())
}

async fn metric(env: &TestEnv, name: &str) -> Result<u64> {
    let metrics = request(env.bound().meta, &RawRequest::get("meta", "/metrics")).await?;
    let text = metrics.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.unwrap_or("0").trim().parse()?)
}

/// T09 on port 10262: 5000 slow sockets are open. The server limits their source to its share and
/// closes the sockets in time. Meanwhile agents connect from another address and from the crowd's
/// address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_the_agents_port_keep_no_agent_out() -> Result<()> {
    let env = Arc::new(TestEnv::start().await?);
    let exporter = Exporter::start("worker-1").await?;
    let mut crowd = slow_crowd(env.bound().agents, TLS_RECORD).await?;
    let _agent = env.agent("worker-1").await?;
    eventually("the crowd's address gets in", WAIT_TIMEOUT, async || {
        handshake_from_crowd(&env).await
    })
    .await;
    let host = format!("worker-1:{}", exporter.addr().port());
    let scrape = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
    assert_eq!(scrape.status, 200);
    eventually(
        "all above the share are evicted or refused",
        WAIT_TIMEOUT,
        async || {
            let mut gone = 0;
            for result in ["evicted", "overloaded", "timeout"] {
                let series = format!("tunnel_server_handshakes_total{{result=\"{result}\"}}");
                gone += metric(&env, &series).await?;
            }
            ensure!(
                gone >= u64::try_from(CROWD_SIZE - CONNS)?,
                "{gone} are gone"
            );
            anyhow::Ok(())
        },
    )
    .await;
    disperses(&mut crowd).await?;
    Ok(())
}

/// T09 on the HTTP and HTTPS listeners: 5000 slow sockets may take all permits. Meanwhile the
/// server serves a scrape from another address and from the crowd's address.
#[tokio::test(flavor = "multi_thread")]
async fn t09_five_thousand_slow_sockets_on_a_listener_keep_no_scrape_out() -> Result<()> {
    let limits = format!("{{ callersTotal: {CALLERS}, callersPerSource: {CALLERS} }}");
    let env = TestEnv::start_with(|settings| settings.limits = TestEnv::limits(&limits)).await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let (http, https) = (env.bound().http, env.bound().https);
    let host = format!("worker-1:{}", exporter.addr().port());
    let get = RawRequest::get(&host, "/metrics");
    // The request to the HTTPS listener names a port that the server itself refuses. The test only
    // needs an answer.
    let refused = RawRequest::get("worker-1:81", "/metrics");
    let plain = (http.context("http")?, env.http(), b'G', &get, 200);
    let secure = (
        https.context("https")?,
        env.https("worker-1")?,
        TLS_RECORD,
        &refused,
        403,
    );
    for (address, endpoint, first, asked, status) in [plain, secure] {
        let mut crowd = slow_crowd(address, first).await?;
        let scrape = request(endpoint, asked).await?;
        assert_eq!(scrape.status, status);
        let endpoint = http.context("http")?;
        eventually("the crowd's address is served", WAIT_TIMEOUT, async || {
            let mut neighbor = from_crowd(endpoint).await?;
            neighbor.write_all(&get.head_bytes()).await?;
            let mut answer = Vec::new();
            neighbor.read_to_end(&mut answer).await?;
            let answer = String::from_utf8_lossy(&answer);
            ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            anyhow::Ok(())
        })
        .await;
        disperses(&mut crowd).await?;
    }
    let evicted = metric(&env, "tunnel_server_callers_evicted_total").await?
        + metric(&env, "tunnel_server_callers_refused_total").await?;
    let least = u64::try_from(CROWD_SIZE - CALLERS)?;
    ensure!(
        evicted >= least,
        "only {evicted} callers were evicted or refused"
    );
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
