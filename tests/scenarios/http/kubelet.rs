//! Requests of kube-apiserver to a kubelet through the listeners, over both transports: heads,
//! streams and their ends.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::TransportChoice;
use tunnel_tests::client::{
    BodyEnd, ByteStream, Endpoint, Exchange, RawRequest, UpgradeClient, Upgraded, request,
};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::spdy::{Frame, Spdy};
use tunnel_tests::strict_http::{Parsed, StrictRequest, parse};
use tunnel_tests::targets::{FakeKubelet, RecordingTarget, deterministic_bytes};
use tunnel_tests::websocket::{Message, WebSocket};

pub(crate) mod heads;

/// A node with a kubelet that callers reach like kube-apiserver does.
struct Site {
    env: TestEnv,
    kubelet: FakeKubelet,
    host: String,
    _agent: Agent,
}

impl Site {
    async fn start(transport: TransportChoice) -> Result<Self> {
        let env = TestEnv::start().await?;
        let kubelet = FakeKubelet::start("worker-1").await?;
        let agent = env.agent_with("worker-1", |config| config.transport = transport);
        Ok(Self {
            _agent: agent.await?,
            host: format!("worker-1:{}", kubelet.addr().port()),
            env,
            kubelet,
        })
    }

    fn caller(&self) -> Caller<'_> {
        Caller {
            env: &self.env,
            kubelet: &self.kubelet,
            node: "worker-1",
            host: self.host.clone(),
            listener: None,
        }
    }
}

/// Runs a check over both transports at once.
async fn over_both(check: impl AsyncFn(&Caller<'_>) -> Result<()>) -> Result<()> {
    let [quic, h2] = [TransportChoice::Quic, TransportChoice::H2].map(Site::start);
    let (quic, h2) = (quic.await?, h2.await?);
    let (quic, h2) = (quic.caller(), h2.caller());
    tokio::try_join!(check(&quic), check(&h2)).map(drop)
}

/// A caller that reaches a kubelet like kube-apiserver does.
pub(crate) struct Caller<'a> {
    pub(crate) env: &'a TestEnv,
    pub(crate) kubelet: &'a FakeKubelet,
    /// The node for which the certificate of the listener must be valid.
    pub(crate) node: &'a str,
    pub(crate) host: String,
    /// The endpoint to connect to. By default, the HTTPS listener without a client certificate and
    /// with the node's name in TLS.
    pub(crate) listener: Option<Endpoint>,
}

impl Caller<'_> {
    fn endpoint(&self) -> Result<Endpoint> {
        match &self.listener {
            Some(listener) => Ok(listener.clone()),
            None => self.env.https(self.node),
        }
    }

    async fn spdy(&self, head: RawRequest, protocol: &str) -> Result<Spdy<ByteStream>> {
        let client = UpgradeClient::asking_for_spdy(head);
        let asked = client.connect(self.endpoint()?).await?;
        let Upgraded::Switched { headers, stream } = asked else {
            anyhow::bail!("{asked:?}");
        };
        let chosen = headers
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case("x-stream-protocol-version"));
        ensure!(
            chosen.is_some_and(|(_, value)| value == protocol),
            "{headers:?}"
        );
        Ok(Spdy::client(stream))
    }

    /// Waits until `n` connections to the kubelet are open.
    async fn has_connections(&self, n: u64) {
        let what = format!("{n} connections to the kubelet");
        eventually(&what, WAIT_TIMEOUT, async || {
            let open = self.kubelet.traffic().open();
            (open == n).then_some(()).ok_or(open)
        })
        .await;
    }
}

/// Fields that each hop sets itself (RFC 9110, section 7.6.1). Host is equal on both sides here.
const OF_THE_HOP: [&str; 2] = ["connection", "upgrade"];

#[tokio::test(flavor = "multi_thread")]
async fn each_head_of_the_apiserver_arrives_as_it_was_written() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let target = RecordingTarget::start("kubelet").await?;
    let host = format!("worker-1:{}", target.addr().port());
    for (name, head) in heads::all(&host) {
        let Ok(Parsed::Whole(written, _)) = parse(&head.bytes()) else {
            anyhow::bail!("{name} is no request");
        };
        let reply = request(env.http(), &head).await?;
        // The target answers every request with 200, and so ignores the offer of an upgrade.
        assert_eq!(reply.status, 200, "{name}");
        let arrived = target.requests().pop().context("nothing arrived")?;
        assert_eq!(arrived.method, written.method, "{name}");
        assert_eq!(arrived.target, written.target, "{name}");
        let end_to_end = |request: &StrictRequest| -> Vec<(String, String)> {
            let mut forwarded = request.fields.clone();
            forwarded.retain(|(name, _)| !OF_THE_HOP.contains(&name.to_lowercase().as_str()));
            // The sort is stable, because the order of a field's values matters.
            forwarded.sort_by_key(|(name, _)| name.to_lowercase());
            forwarded
        };
        assert_eq!(end_to_end(&arrived), end_to_end(&written), "{name}");
        assert_eq!(arrived.field("upgrade"), written.field("upgrade"), "{name}");
        let upgrades = arrived.field("connection") == Some("Upgrade");
        assert_eq!(written.field("upgrade").is_some(), upgrades, "{name}");
    }
    Ok(())
}

tests_of! {
    fn pages_of_the_kubelet_are_read() = over_both(pages);
    fn followed_logs_flush_each_line_and_hold_one_connection_each() = over_both(followed_logs);
    fn exec_over_spdy_has_all_its_streams() = over_both(commands_over_spdy);
    fn terminal_over_spdy_is_resized() = over_both(terminal_over_spdy);
    fn port_forward_carries_many_connections_in_one() = over_both(port_forward_over_spdy);
    fn exec_over_websocket_v5_is_pinged_and_closed_by_channel() =
        over_both(async |caller: &Caller<'_>| terminal_over_websocket(caller, 3).await);
}

pub(crate) async fn pages(site: &Caller<'_>) -> Result<()> {
    let node = site.node;
    for (head, expected) in [
        (
            heads::logs(&site.host, "?tailLines=3"),
            format!("{node}: log of web-0/app\n").repeat(3),
        ),
        (
            heads::node_proxy(&site.host, "GET", "/stats/summary"),
            format!("{{\"node\":{{\"nodeName\":\"{node}\"}},\"pods\":[]}}\n"),
        ),
        (
            heads::node_proxy(&site.host, "GET", "/pods"),
            format!("{{\"kind\":\"PodList\",\"node\":\"{node}\",\"items\":[]}}\n"),
        ),
        (
            heads::node_proxy(&site.host, "POST", "/checkpoint/default/web-0/app"),
            format!("{{\"items\":[\"{node}/checkpoint-web-0-app.tar\"]}}\n"),
        ),
        (
            heads::scrape(&site.host, "/metrics/cadvisor"),
            format!("# /metrics/cadvisor\ncontainer_scrape_error{{node=\"{node}\"}} 0\n"),
        ),
    ] {
        let reply = request(site.endpoint()?, &head).await?;
        assert_eq!((reply.status, reply.text()), (200, expected), "{head:?}");
        assert_eq!(reply.ended, BodyEnd::CleanLength);
    }
    Ok(())
}

pub(crate) async fn followed_logs(site: &Caller<'_>) -> Result<()> {
    let head = heads::logs(&site.host, "?follow=true&tailLines=1");
    let mut followed = Vec::new();
    for index in 1..=5 {
        let mut follow = Exchange::start(site.endpoint()?, &head).await?;
        let first = format!("{}: log of web-0/app", site.node);
        assert_eq!(follow.line().await, Some(first));
        followed.push(follow);
        site.has_connections(index).await;
    }
    for line in ["one", "two", "three"] {
        // The test writes the next line only after every caller has received this one.
        assert_eq!(site.kubelet.emit(line), 5);
        for follow in &mut followed {
            assert_eq!(follow.line().await.as_deref(), Some(line));
        }
    }
    // Ctrl-C closes the connection of this caller and no other.
    drop(followed.pop());
    site.has_connections(4).await;
    assert_eq!(site.kubelet.end_follows(), 4);
    for follow in &mut followed {
        assert_eq!(follow.line().await, None);
        assert_eq!(follow.ended(), Some(&BodyEnd::CleanChunked));
    }
    Ok(())
}

/// Opens the streams of a command in the order in which client-go opens them:
/// `staging/src/k8s.io/client-go/tools/remotecommand/v2.go` `createStreams` and `v3.go`.
async fn open_streams(spdy: &mut Spdy<ByteStream>, kinds: &[&str]) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for kind in kinds {
        ids.push(spdy.open(&[("streamType", kind)]).await?);
    }
    for id in &ids {
        assert_eq!(spdy.next().await?, Some(Frame::Reply(*id)));
    }
    Ok(ids)
}

fn data(id: u32, bytes: &[u8], fin: bool) -> Option<Frame> {
    Some(Frame::Data {
        id,
        bytes: bytes.to_vec(),
        fin,
    })
}

pub(crate) async fn commands_over_spdy(site: &Caller<'_>) -> Result<()> {
    let query = "command=cat&error=1&input=1&output=1";
    for verb in ["exec", "attach"] {
        let head = heads::command_over_spdy(&site.host, verb, query);
        let mut spdy = site.spdy(head, "v4.channel.k8s.io").await?;
        let ids = open_streams(&mut spdy, &["error", "stdin", "stdout", "stderr"]).await?;
        let [error, stdin, stdout, stderr] = *ids else {
            anyhow::bail!("{ids:?}");
        };
        site.has_connections(1).await;
        let input = deterministic_bytes(1, 256 << 10);
        for piece in input.chunks(32 << 10) {
            spdy.data(stdin, piece, false).await?;
            assert_eq!(spdy.next().await?, data(stdout, piece, false));
        }
        spdy.ping(1).await?;
        assert_eq!(spdy.next().await?, Some(Frame::Ping(1)));
        spdy.data(stdin, b"", true).await?;
        assert_eq!(spdy.next().await?, data(stderr, b"262144 bytes\n", true));
        assert_eq!(spdy.next().await?, data(stdout, b"", true));
        let success = b"{\"metadata\":{},\"status\":\"Success\"}";
        assert_eq!(spdy.next().await?, data(error, success, true));
        assert_eq!(spdy.next().await?, Some(Frame::GoAway));
        assert_eq!(spdy.next().await?, None, "the kubelet's FIN arrives as one");
        let mut stream = spdy.into_inner();
        stream.finish().await?;
        site.has_connections(0).await;
    }
    Ok(())
}

pub(crate) async fn terminal_over_spdy(site: &Caller<'_>) -> Result<()> {
    let head = heads::command_over_spdy(&site.host, "exec", "command=sh&input=1&output=1&tty=1");
    let mut spdy = site.spdy(head, "v4.channel.k8s.io").await?;
    let ids = open_streams(&mut spdy, &["error", "stdin", "stdout", "resize"]).await?;
    let [_error, stdin, stdout, resize] = *ids else {
        anyhow::bail!("{ids:?}");
    };
    spdy.data(resize, b"{\"Width\":80,\"Height\":24}\n", false)
        .await?;
    let resized = b"resized to {\"Width\":80,\"Height\":24}\r\n";
    assert_eq!(spdy.next().await?, data(stdout, resized, false));
    // Each keystroke is sent by itself.
    for key in b"ls -l\r" {
        spdy.data(stdin, &[*key], false).await?;
        assert_eq!(spdy.next().await?, data(stdout, &[*key], false));
    }
    // The user closes the terminal. The kubelet's connection closes with it.
    drop(spdy);
    site.has_connections(0).await;
    Ok(())
}

pub(crate) async fn port_forward_over_spdy(site: &Caller<'_>) -> Result<()> {
    let mut spdy = site
        .spdy(heads::port_forward(&site.host), "portforward.k8s.io")
        .await?;
    let mut pairs = Vec::new();
    for request_id in ["0", "1", "2"] {
        // portforward.go `handleConnection` opens the error stream first, and the client ends it at
        // once.
        let port = ("port", "8080");
        let fields = |kind| [("streamType", kind), port, ("requestID", request_id)];
        let error = spdy.open(&fields("error")).await?;
        spdy.data(error, b"", true).await?;
        assert_eq!(spdy.next().await?, Some(Frame::Reply(error)));
        let data = spdy.open(&fields("data")).await?;
        assert_eq!(spdy.next().await?, Some(Frame::Reply(data)));
        pairs.push((error, data));
    }
    site.has_connections(1).await;
    for (index, (error, id)) in pairs.into_iter().enumerate() {
        let bytes = deterministic_bytes(index as u64, 100_000);
        spdy.data(id, &bytes, false).await?;
        assert_eq!(spdy.next().await?, data(id, &bytes, false));
        spdy.data(id, b"", true).await?;
        assert_eq!(spdy.next().await?, data(id, b"", true));
        assert_eq!(spdy.next().await?, data(error, b"", true));
    }
    spdy.go_away().await?;
    assert_eq!(spdy.next().await?, None);
    drop(spdy);
    site.has_connections(0).await;
    Ok(())
}

/// Runs a terminal session with `pings` pings, which are 5 s apart.
pub(crate) async fn terminal_over_websocket(site: &Caller<'_>, pings: usize) -> Result<()> {
    let query = "command=sh&error=1&input=1&output=1&tty=1";
    let head = heads::command_over_websocket(&site.host, "exec", query);
    let stream = UpgradeClient::asking_for_websocket(head)
        .connect(site.endpoint()?)
        .await?
        .switched()?;
    let mut socket = WebSocket::client(stream);
    site.has_connections(1).await;
    let binary = |channel: u8, bytes: &[u8]| Message::Binary([&[channel], bytes].concat());
    socket
        .send(&binary(4, b"{\"Width\":80,\"Height\":24}"))
        .await?;
    let resized = binary(1, b"resized to {\"Width\":80,\"Height\":24}\r\n");
    ensure!(socket.next().await? == Some(resized), "no resize");
    // websocket.go `pingPeriod`: for a while the client sends only pings, and each one is answered.
    let mut period = tokio::time::interval(Duration::from_secs(5));
    for _ in 0..pings {
        period.tick().await;
        socket.send(&Message::Ping(Vec::new())).await?;
        let pong = Message::Pong(Vec::new());
        ensure!(socket.next().await? == Some(pong), "no pong");
    }
    let bytes = deterministic_bytes(2, 100_000);
    socket.send(&binary(0, &bytes)).await?;
    ensure!(socket.next().await? == Some(binary(1, &bytes)), "no echo");
    // `StreamClose`: the byte 255, followed by the channel that ends.
    socket.send(&Message::Binary(vec![255, 0])).await?;
    let stderr = binary(2, b"100000 bytes\n");
    ensure!(socket.next().await? == Some(stderr), "no stderr");
    let success = binary(3, b"{\"metadata\":{},\"status\":\"Success\"}");
    ensure!(socket.next().await? == Some(success), "no status");
    let close = Message::Close(Some(1000));
    ensure!(socket.next().await? == Some(close), "no close");
    ensure!(socket.next().await?.is_none(), "bytes behind the close");
    drop(socket);
    site.has_connections(0).await;
    Ok(())
}
