//! A server that is short of memory for what another server sends: callers that read nothing hold it, or
//! a target that reads nothing. Other callers are served over the same connection between the servers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tunnel_tests::client::{KeepAliveClient, RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{Process, ScratchDir};
use tunnel_tests::stats::percentile;
use tunnel_tests::targets::{HostileAction, HostileTarget, SilentTarget};

use super::{CONNECT, NODE, Servers};
use crate::abuse::report_figure;

/// The agent is connected to the first server, and all callers to the second one.
struct Hop {
    servers: Servers,
    _agent: Process,
    _scratch: ScratchDir,
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_read_nothing_over_a_hop_do_not_stop_others() -> Result<()> {
    let hop = Hop::start().await?;
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n".to_vec();
    let flood = HostileTarget::start(vec![
        HostileAction::ReadHead,
        HostileAction::Send(head),
        HostileAction::Flood(vec![7; 64 << 10]),
    ])
    .await?;
    let get = RawRequest::get(&format!("{NODE}:{}", flood.addr().port()), "/").bytes();
    let before = hop.delays("before").await?;
    let mut stalled = Vec::new();
    for _ in 0..STALLED {
        let mut caller = hop.attacker().await?;
        caller.write_all(&get).await?;
        stalled.push(caller);
    }
    hop.others_are_served("callers that read nothing", before)
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_that_a_target_does_not_read_over_a_hop_do_not_stop_others() -> Result<()> {
    let hop = Hop::start().await?;
    let deaf = SilentTarget::start_deaf()?;
    let host = format!("{NODE}:{}", deaf.addr().port());
    let head = format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000000000\r\n\r\n");
    let before = hop.delays("before").await?;
    let mut stalled = JoinSet::new();
    for _ in 0..STALLED {
        let mut caller = hop.attacker().await?;
        caller.write_all(head.as_bytes()).await?;
        stalled.spawn(async move { while caller.write_all(&[7; 64 << 10]).await.is_ok() {} });
    }
    hop.others_are_served("a target that reads nothing", before)
        .await
}

impl Hop {
    async fn start() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let limits = "limits: { bufferPool: 16MiB, callersPerSource: 1000 }\n";
        let file = scratch.file("server.yaml", limits)?;
        let servers = Servers::start(2, &["--config", &file.to_string_lossy()]).await?;
        Ok(Self {
            _agent: servers.agent_at(0).await?,
            servers,
            _scratch: scratch,
        })
    }

    /// Connects a caller of another source than the others, with little in the kernel.
    async fn attacker(&self) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(ATTACKER)?;
        socket.set_recv_buffer_size(4096)?;
        socket.set_send_buffer_size(64 << 10)?;
        Ok(socket.connect(self.servers.http(1)).await?)
    }

    /// Waits until streams of the attacker are refused, and checks that others are served.
    async fn others_are_served(&self, what: &str, before: Duration) -> Result<()> {
        eventually("streams are refused", CONNECT, async || {
            let refused = self.servers.servers[1].metric(REFUSED).await?;
            ensure!(refused > 0);
            anyhow::Ok(())
        })
        .await;
        // The other server learns of the shortage first.
        eventually("others are served", CONNECT, async || {
            self.delays("at first").await
        })
        .await;
        let mut p99 = Duration::ZERO;
        for _ in 0..Gear::current().pick(2, 20) {
            p99 = p99.max(self.delays(what).await?);
        }
        report_figure(&format!(
            "hop, {what}: p99 of others {before:?} before, {p99:?} during"
        ));
        let bound = (before * 3).max(scaled(P99_MAX));
        let is_checked = Gear::current().pick(false, true);
        ensure!(!is_checked || p99 <= bound, "{p99:?}, bound {bound:?}");
        Ok(())
    }

    /// Sends requests over new connections and over one that is kept, each of which must be served.
    /// Returns the 99th percentile of their delays.
    async fn delays(&self, what: &str) -> Result<Duration> {
        let endpoint = self.servers.http(1);
        let once = RawRequest::get(&self.servers.host(), "/metrics");
        let again = RawRequest::new("GET", "/metrics", &self.servers.host());
        let mut kept_alive = KeepAliveClient::connect(endpoint).await?;
        let (mut delays, mut slowest) = (Vec::new(), [Duration::ZERO; 2]);
        for number in 0..REQUESTS {
            let sent = Instant::now();
            let reply = async {
                if number % 2 == 0 {
                    request(endpoint, &once).await
                } else {
                    kept_alive.request(&again).await
                }
            };
            let reply = timeout(scaled(CONNECT), reply).await;
            let reply = reply.with_context(|| format!("{what}: no answer to {number}"))??;
            let (status, text) = (reply.status, reply.text());
            ensure!(status == 200, "{what}: {number}: {status} {text}");
            let slowest = &mut slowest[number % 2];
            *slowest = sent.elapsed().max(*slowest);
            delays.push(sent.elapsed());
        }
        let [new, kept] = slowest;
        report_figure(&format!(
            "hop, {what}: the slowest {new:.0?} over a new connection, {kept:.0?} over one that is kept"
        ));
        delays.sort_unstable();
        Ok(percentile(&delays, 0.99))
    }
}

const ATTACKER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66)), 0);
/// Streams that hold more than the memory.
const STALLED: usize = 200;
const REQUESTS: usize = 40;
const REFUSED: &str = "tunnel_server_streams_total{result=\"too_many_streams\"}";
const P99_MAX: Duration = Duration::from_millis(50);
