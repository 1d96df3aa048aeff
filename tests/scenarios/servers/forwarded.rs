//! Streams of every listener that pass one hop: the agent is connected to the first server only,
//! and the callers are connected to the second one.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_tests::audit_events::{AuditEvent, AuditEvents};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_reset, ensure_status};
use tunnel_tests::client::{
    BodyEnd, ByteStream, EgressDialer, Exchange, KeepAliveClient, RawRequest, UpgradeClient,
    request,
};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{Process, ScratchDir};
use tunnel_tests::targets::{
    EchoTarget, HalfCloseTarget, ResetTarget, deterministic_bytes, sha256_hex,
};

use super::{AGENTS, CONNECT, NODE, Servers};

tests_of! {
    fn streams_of_every_listener_pass_a_hop_over_quic() = every_listener("quic");
    fn streams_of_every_listener_pass_a_hop_over_h2() = every_listener("h2");
}

async fn every_listener(transport: &str) -> Result<()> {
    let hop = Hop::start(transport).await?;
    services_pass(&hop).await.context("TCP services")?;
    connect_passes(&hop).await.context("CONNECT")?;
    upgrades_pass(&hop).await.context("upgrades")?;
    refusals_pass(&hop).await.context("refusals")?;
    many_pass(&hop).await.context("many at once")?;
    let second = &hop.servers.servers[1];
    ensure!(second.metric(AGENTS).await? == 0, "a session of its own");
    let listed = second.nodes().await?;
    ensure!(listed[0]["server"] == "s0", "{listed:?}");
    eventually("the access log", CONNECT, async || {
        let lines = second.log().lines();
        let forwarded = lines.iter().filter_map(|line| fields(line));
        let listeners: BTreeSet<_> = forwarded
            .filter(|entry| entry["message"] == "access" && entry["via"] == "s0")
            .map(|entry| entry["listener"].to_string())
            .collect();
        ensure!(listeners.len() >= 3, "{listeners:?}");
        Ok(())
    })
    .await;
    eventually("an event of each stream at each end", CONNECT, async || {
        events_agree(&hop)
    })
    .await;
    Ok(())
}

/// Checks that each stream has one event at the server that its caller asked, at the one with the
/// session, and at the agent, with one id, and that the latter two name the caller that the header names.
fn events_agree(hop: &Hop) -> Result<()> {
    let ended = |events: &AuditEvents| {
        let events = events.all().into_iter();
        events.filter(AuditEvent::is_complete).collect::<Vec<_>>()
    };
    let [first, second] = [0, 1].map(|server| ended(hop.servers.servers[server].audit()));
    let agent = ended(hop.agent.audit());
    let mut opened: Vec<_> = (second.iter())
        .filter(|event| event.annotation("hop-to") == "s0" && event.annotation("stream").is_empty())
        .collect();
    let listeners: BTreeSet<_> = opened
        .iter()
        .map(|event| event.annotation("listener"))
        .collect();
    ensure!(listeners == BTreeSet::from(["connect", "http", "service"]));
    for event in &opened {
        let same = |events: &[AuditEvent]| {
            let mut events = events
                .iter()
                .filter(|other| other.audit_id == event.audit_id);
            let one = events
                .next()
                .cloned()
                .with_context(|| format!("no other of {event:?}"))?;
            ensure!(events.next().is_none(), "two others of {event:?}");
            Ok(one)
        };
        let (forwarded, dialed) = (same(&first)?, same(&agent)?);
        ensure!(forwarded.annotation("hop-from") == "s1", "{forwarded:?}");
        for claimed in [&forwarded, &dialed] {
            let user = claimed.user.username.as_deref();
            ensure!(user == Some("system:anonymous"), "{claimed:?}");
        }
        ensure!(
            forwarded.annotation("user-claimed-by") == "s1",
            "{forwarded:?}"
        );
        ensure!(
            dialed.annotation("user-claimed-by") == "server",
            "{dialed:?}"
        );
    }
    opened.retain(|event| event.annotation("end") != "ok");
    let ends: BTreeSet<_> = opened.iter().map(|event| event.annotation("end")).collect();
    ensure!(ends.len() >= 2, "refused and cut: {ends:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_stream_yields_over_a_hop_and_callers_without_a_certificate_leave_a_quarter()
-> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("server.yaml", "limits:\n  streamsPerAgent: 8\n")?;
    let file = file.to_string_lossy();
    let servers = Servers::start(2, &["--config", &file]).await?;
    let _agent = servers.agent_at(0).await?;
    let (host, endpoint) = (servers.host(), servers.http(1));
    let mut open = Vec::new();
    for _ in 0..5 {
        follow_one_more(&servers, &mut open).await?;
    }
    let mut kept_alive = KeepAliveClient::connect(endpoint).await?;
    let page = RawRequest::new("GET", "/metrics", &host);
    ensure_status(&kept_alive.request(&page).await?, 200)?;
    // For a second, the idle stream has the last permit for streams over other servers.
    follow_one_more(&servers, &mut open).await?;
    let refused = request(endpoint, &RawRequest::get(&host, "/metrics")).await?;
    ensure_refused(&refused, 503, "too_many_streams")?;
    let retry_after = refused.header("retry-after");
    ensure!(retry_after.is_some(), "{}", refused.text());
    // Callers without a certificate have one share at both servers.
    let page = RawRequest::get(&host, "/metrics");
    let refused = request(servers.http(0), &page).await?;
    ensure_refused(&refused, 503, "too_many_streams")?;
    let text = refused.text();
    ensure!(
        text.contains("callers without a client certificate"),
        "{text}"
    );
    Ok(())
}

/// The server with the agent asks its own lists, whatever another one allows its callers.
#[tokio::test(flavor = "multi_thread")]
async fn forwarded_stream_is_subject_to_the_lists_of_the_server_with_the_agent() -> Result<()> {
    let target = EchoTarget::start().await?;
    let servers = Servers::start_with_ports(&["10250", "1024-65535"]).await?;
    let _agent = servers.agent_at(0).await?;
    let host = format!("{NODE}:{}", target.addr().port());
    let page = RawRequest::get(&host, "/");
    for server in [0, 1] {
        let refused = request(servers.http(server), &page).await?;
        ensure_refused(&refused, 403, "refused_by_policy").context(server)?;
    }
    ensure!(target.traffic().accepted() == 0, "was dialed");
    Ok(())
}

async fn follow_one_more(servers: &Servers, open: &mut Vec<Exchange>) -> Result<()> {
    let page = RawRequest::get(&servers.host(), "/follow");
    open.push(Exchange::start(servers.http(1), &page).await?);
    let followers = open.len();
    eventually("the follower", CONNECT, async || {
        ensure!(servers.kubelet.followers() == followers);
        Ok(())
    })
    .await;
    Ok(())
}

/// Two servers, and an agent that has one session, with the first server. The second one has TCP
/// services and a CONNECT listener.
struct Hop {
    servers: Servers,
    echo: EchoTarget,
    half_close: HalfCloseTarget,
    /// A target that the agent's dial policy forbids.
    denied: EchoTarget,
    agent: Process,
    _reset: ResetTarget,
    _scratch: ScratchDir,
}

impl Hop {
    async fn start(transport: &str) -> Result<Self> {
        let (echo, denied) = (EchoTarget::start().await?, EchoTarget::start().await?);
        let half_close = HalfCloseTarget::start(BYTES as u64).await?;
        let reset = ResetTarget::start_waiting(BYTES as u64).await?;
        let denied_port = denied.addr().port();
        let services = [
            ("echo", echo.addr().port()),
            ("half-close", half_close.addr().port()),
            ("reset", reset.addr().port()),
            ("denied", denied_port),
        ];
        let services = services.map(|(name, port)| {
            format!(
                "  - name: {name}\n    listen: \"127.0.0.1:0\"\n    node: {NODE}\n    \
                 target: \"{port}\"\n"
            )
        });
        let scratch = ScratchDir::new()?;
        let file = scratch.file("server.yaml", format!("services:\n{}", services.concat()))?;
        let file = file.to_string_lossy();
        let connect = ["--config", &file, "--connect-listen", "127.0.0.1:0"];
        let servers = Servers::start(2, &connect).await?;
        let denied_port = denied_port.to_string();
        let policy = ["--transport", transport, "--deny-ports", &denied_port];
        let agent = servers.agent_with(0, &policy).await?;
        Ok(Self {
            servers,
            echo,
            half_close,
            denied,
            agent,
            _reset: reset,
            _scratch: scratch,
        })
    }

    /// Returns the address of a listener of the second server, as its log has it.
    async fn address(&self, listener: &str, service: Option<&str>) -> Result<SocketAddr> {
        let log = self.servers.servers[1].log();
        let opened = log.find(|line| opened(line, listener, service));
        let opened = timeout(scaled(CONNECT), opened).await;
        opened.with_context(|| format!("no listener {listener} {service:?}"))
    }

    async fn service(&self, name: &str) -> Result<ByteStream> {
        ByteStream::connect(self.address("service", Some(name)).await?).await
    }

    fn denied_host(&self) -> String {
        format!("{NODE}:{}", self.denied.addr().port())
    }
}

/// Returns the address in a line of the log if the line reports that this listener is open.
pub(super) fn opened(line: &str, listener: &str, service: Option<&str>) -> Option<SocketAddr> {
    let fields = fields(line)?;
    let is_wanted = fields["message"] == "listening"
        && fields["listener"] == listener
        && fields["service"].as_str() == service;
    let address = fields["address"].as_str().filter(|_| is_wanted)?;
    address.parse().ok()
}

/// Returns the fields of a line of the log.
fn fields(line: &str) -> Option<Value> {
    let line: Value = serde_json::from_str(line).ok()?;
    Some(line.get("fields").cloned().unwrap_or(line))
}

async fn services_pass(hop: &Hop) -> Result<()> {
    let stream = hop.service("half-close").await?;
    let reading = stream.talk(&deterministic_bytes(3, BYTES)).await?;
    ensure!(reading.ended == BodyEnd::CleanClose, "{:?}", reading.ended);
    let received = reading.bytes.len();
    ensure!(
        reading.bytes == deterministic_bytes(0, BYTES),
        "{received} bytes"
    );
    let sent = hop.half_close.traffic().bytes_in();
    ensure!(sent == BYTES as u64, "{sent} bytes at the target");
    // A target's reset reaches the caller.
    let mut stream = hop.service("reset").await?;
    stream.send(b"x").await?;
    ensure_reset(&stream.read_to_end().await.ended)?;
    // A caller's reset reaches the target.
    let mut stream = hop.service("echo").await?;
    stream.send(b"hello").await?;
    ensure!(stream.receive(5).await? == b"hello");
    stream.reset().await?;
    eventually("the end of the target's connection", CONNECT, async || {
        (hop.echo.traffic().open() == 0).then_some(())
    })
    .await;
    Ok(())
}

async fn connect_passes(hop: &Hop) -> Result<()> {
    let dialer = EgressDialer::tcp(hop.address("connect", None).await?);
    let target = format!("{NODE}:{}", hop.echo.addr().port());
    let mut tunnel = dialer.dial(&target).await?;
    tunnel.write_all(b"hello").await?;
    let mut echoed = [0; 5];
    tunnel.read_exact(&mut echoed).await?;
    ensure!(&echoed == b"hello", "{echoed:?}");
    tunnel.shutdown().await?;
    let ended = tunnel.read(&mut echoed).await?;
    ensure!(ended == 0, "{ended} bytes behind the end");
    let refusal = dialer.dial(&hop.denied_host()).await.err();
    let refusal = refusal.context("was dialed")?.to_string();
    ensure_contains(&refusal, &["code 403", "--deny-ports"])
}

async fn upgrades_pass(hop: &Hop) -> Result<()> {
    let (host, endpoint) = (hop.servers.host(), hop.servers.http(1));
    let path = format!("/exec/default/pod/c?script=sink-then-send&bytes={BYTES}");
    let clients = [
        UpgradeClient::spdy(&host, &path),
        UpgradeClient::websocket(&host, &path),
    ];
    for client in clients {
        let stream = client.connect(endpoint).await?.switched()?;
        let stdin = deterministic_bytes(3, 100_000);
        let reading = stream.talk(&stdin).await?;
        ensure!(reading.ended == BodyEnd::CleanClose, "{:?}", reading.ended);
        let mut expected = format!("{}\n", sha256_hex(&stdin)).into_bytes();
        expected.extend(deterministic_bytes(0, BYTES));
        let received = reading.bytes.len();
        ensure!(reading.bytes == expected, "{received} bytes");
    }
    let client = UpgradeClient::spdy(&host, "/exec/default/pod/c?script=reset");
    let mut stream = client.connect(endpoint).await?.switched()?;
    stream.send(b"x").await?;
    ensure_reset(&stream.read_to_end().await.ended)?;
    let short = request(endpoint, &RawRequest::get(&host, "/short")).await?;
    ensure_reset(&short.ended)
}

/// Checks that the agent's refusals arrive with their code and text, also behind data that was sent
/// before the refusal.
async fn refusals_pass(hop: &Hop) -> Result<()> {
    let denied = hop.denied_host();
    let upload = RawRequest::new("POST", "/upload", &denied)
        .header("Connection", "close")
        .body(vec![7; 64 << 10]);
    for page in [RawRequest::get(&denied, "/"), upload] {
        let reply = request(hop.servers.http(1), &page).await?;
        ensure_refused(&reply, 403, "refused_by_policy")?;
        ensure_contains(&reply.text(), &["agent's --deny-ports lists"])?;
    }
    let mut stream = hop.service("denied").await?;
    ensure_reset(&stream.read_to_end().await.ended)?;
    ensure!(hop.denied.traffic().accepted() == 0, "was dialed");
    Ok(())
}

async fn many_pass(hop: &Hop) -> Result<()> {
    let (host, endpoint) = (hop.servers.host(), hop.servers.http(1));
    for wave in 0..Gear::current().pick(1, 5) {
        let replies = (0..STREAMS).map(|stream| {
            let seed = wave * STREAMS + stream;
            let page = RawRequest::get(&host, &format!("/size/20000?seed={seed}"));
            async move {
                let reply = request(endpoint, &page).await?;
                ensure_status(&reply, 200)?;
                let sent = reply.header("x-sha256");
                ensure!(sent == Some(reply.sha256().as_str()), "seed {seed} differs");
                anyhow::Ok(())
            }
        });
        try_join_all(replies).await?;
    }
    Ok(())
}

const BYTES: usize = 1 << 20;

/// Streams at once, below the share of `limits.streamsPerAgent` that one server has (192).
const STREAMS: u64 = 150;
