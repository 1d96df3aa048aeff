//! Every stream ends with its ends: for each transport, listener, hop, cut and stalled reader, no
//! process has a stream, a permit or memory left, the bytes before the cut have arrived, and each
//! end has one line in its access log.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::FutureExt;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tunnel_agent::config::{RawConfig as AgentRawConfig, TransportChoice};
use tunnel_proto::tcp::{abort_behind, abort_on_close};
use tunnel_proto::wire::code::CloseCode;
use tunnel_server::config::{RawConfig, RawTcpService};
use tunnel_tests::access_lines::{access_lines, collect_access_lines};
use tunnel_tests::client::{ByteStream, Endpoint, RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::link::Link;
use tunnel_tests::metrics::metric;
use tunnel_tests::process::{Listener, Peering, next_loopback};
use tunnel_tests::targets::{TargetTls, deterministic_bytes};

/// Bytes that one end sends before it cuts its connection.
const SENT_BYTES: usize = 200_003;
/// Length of bodies that are never complete.
const ENDLESS: u64 = 1 << 40;
/// A write that is blocked for this time is blocked by the reader at the other end.
const FULL_AFTER: Duration = Duration::from_millis(300);
/// Time in which nothing is left of a stream after its end.
const ENDED_WITHIN: Duration = Duration::from_secs(6);
/// The same when a reader is stalled.
const STALLED_ENDED_WITHIN: Duration = Duration::from_secs(2);
/// A port that no listener allows.
const REFUSED_PORT: u16 = 22;

/// The listener that carries the bytes of a caller.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Http,
    /// TLS of the caller ends at the server, which opens TLS to the target.
    Https,
    Connect,
    Service,
    /// From the edge to a target of the cloud.
    Cloud,
}

impl Kind {
    fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }
}

/// The servers between a caller and the agent.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Path {
    /// The caller's server holds the agent's session.
    OneServer,
    /// Another server holds it.
    Hop,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    Caller,
    Target,
    Session,
    /// The connection between the two servers is lost.
    Link,
}

impl Cut {
    /// Returns the cuts that the path can have.
    fn of(path: Path) -> &'static [Self] {
        match path {
            Path::OneServer => &[Self::Caller, Self::Target, Self::Session],
            Path::Hop => &[Self::Caller, Self::Target, Self::Session, Self::Link],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stalled {
    Nobody,
    Caller,
    Target,
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    cut: Cut,
    stalled: Stalled,
    /// Whether the end that cuts has sent everything and its FIN before. The other end is silent.
    is_half_closed: bool,
}

/// Declares the tests of all kinds of streams over both transports.
macro_rules! table {
    ($($name:ident: $kind:ident, $path:ident;)+) => {
        $(mod $name {
            use super::*;

            tests_of! {
                fn over_quic() = every_cut(TransportChoice::Quic, Kind::$kind, Path::$path);
                fn over_h2() = every_cut(TransportChoice::H2, Kind::$kind, Path::$path);
            }
        })+
    };
}

table! {
    http: Http, OneServer;
    https: Https, OneServer;
    connect: Connect, OneServer;
    service: Service, OneServer;
    http_hop: Http, Hop;
    https_hop: Https, Hop;
    connect_hop: Connect, Hop;
    service_hop: Service, Hop;
    cloud: Cloud, OneServer;
}

async fn every_cut(transport: TransportChoice, kind: Kind, path: Path) -> Result<()> {
    collect_access_lines();
    let site = Site::start(transport, kind, path).await?;
    let mut peers = Vec::new();
    let mut cells = Vec::new();
    for stalled in [Stalled::Nobody, Stalled::Caller, Stalled::Target] {
        for &cut in Cut::of(path) {
            cells.push(Cell {
                cut,
                stalled,
                is_half_closed: false,
            });
        }
    }
    // A FIN is the end of a caller of HTTP.
    if !matches!(kind, Kind::Http | Kind::Https) {
        cells.extend([Cut::Caller, Cut::Target].map(|cut| Cell {
            cut,
            stalled: Stalled::Nobody,
            is_half_closed: true,
        }));
    }
    for cell in cells {
        let ran = site.run(cell).await;
        peers.push(ran.with_context(|| format!("{cell:?}"))?);
    }
    // No line came late.
    for peer in &peers {
        let lines = site.lines_of_caller(*peer);
        // The system may give two callers the same port.
        let callers = peers.iter().filter(|other| *other == peer).count();
        ensure!(
            lines.len() == callers,
            "{callers} callers from {peer}: {lines:#?}"
        );
    }
    let count = site.lines_of_targets().len();
    ensure!(count == peers.len(), "{count} lines of targets");
    Ok(())
}

struct Site {
    kind: Kind,
    path: Path,
    node: String,
    agent: Agent,
    /// One server, or two that are connected to each other.
    servers: Vec<TestEnv>,
    /// Carries the connection over which the callers' server forwards streams to the other one.
    link: Option<Link>,
    /// Bytes that the agent's idle session reserves, because its server opens streams.
    /// Memory of the agent and of each server before the first stream.
    idle: OnceCell<Vec<u64>>,
    target: TcpListener,
    target_tls: TargetTls,
    cloud: SocketAddr,
}

/// One connection of a stream: that of the caller, or that to the target.
struct End {
    /// `None` once the connection has ended.
    socket: Option<ByteStream>,
    /// Bytes that were written and read, heads of HTTP included as the target sees them.
    written: u64,
    read: u64,
    /// The bytes that were read last, up to the reset.
    got: Vec<u8>,
}

impl Site {
    async fn start(transport: TransportChoice, kind: Kind, path: Path) -> Result<Self> {
        let node = format!("{kind:?}-{path:?}-{transport:?}").to_lowercase();
        let target = TcpListener::bind("127.0.0.1:0").await?;
        let setup = ServerSetup {
            node: node.clone(),
            kind,
            target: target.local_addr()?,
        };
        let has_hop = path == Path::Hop;
        let peering = Peering::in_process(if has_hop { 2 } else { 1 });
        let first = peering.address(0, Listener::Peers);
        let link = has_hop.then(|| Link::start(first, 1)).transpose()?;
        let servers = peering.start_in_process(|number, raw| {
            setup.apply(raw);
            if let Some(link) = &link {
                // As behind a load balancer, so that the agent stays at the first server.
                raw.advertise = vec![NOBODY.into()];
                // The second server dials the first one over the link.
                if number == 1 {
                    raw.peers[0] = format!("{}={}", Peering::name(0), link.addr());
                }
            }
        });
        let servers = servers.await?;
        let cloud = Listener::Cloud.on(next_loopback());
        let mut config = servers[0].agent_config_with(&node, |raw: &mut AgentRawConfig| {
            raw.meta_listen = Some("127.0.0.1:0".into());
            raw.replicas = Some("1".into());
            if kind == Kind::Cloud {
                raw.cloud_listen = vec![format!("apiserver={cloud}")];
            }
        })?;
        config.transport = transport;
        Ok(Self {
            kind,
            path,
            agent: Agent::start(config).await?,
            servers,
            link,
            idle: OnceCell::new(),
            target_tls: TargetTls::self_signed(&[&node])?,
            target,
            cloud,
            node,
        })
    }

    /// Returns the server that the callers use.
    fn asked(&self) -> &TestEnv {
        &self.servers[self.servers.len() - 1]
    }

    /// Waits until the agent has its session, the servers are connected to each other in both
    /// directions, and the callers' server knows where the agent is. A server reserves the first
    /// window of a connection over which another server opens streams for as long as it lasts.
    async fn is_ready(&self) {
        self.servers[0].connected(&self.node).await;
        eventually("a way to the agent", WAIT_TIMEOUT, async || {
            let meta = self.agent.meta().context("a meta port")?;
            let connected = metric(meta, "tunnel_agent_sessions{state=\"connected\"}").await?;
            ensure!(connected == 1, "{connected} sessions");
            if self.path == Path::Hop {
                let nodes = self.asked().metric("tunnel_server_directory_nodes").await?;
                ensure!(nodes == 1, "no other server has the node");
                for server in &self.servers {
                    let connected = server
                        .metric("tunnel_server_peers{state=\"connected\"}")
                        .await?;
                    ensure!(connected == 1, "the servers are not connected");
                }
            }
            anyhow::Ok(())
        })
        .await;
    }

    /// Opens a connection, and returns both ends when bytes pass in both directions. Fails if the
    /// server refuses it.
    async fn open(&self) -> Result<(End, End)> {
        let host = format!("{}:{}", self.node, self.target.local_addr()?.port());
        let bound = self.asked().bound();
        let post =
            || format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: {ENDLESS}\r\n\r\n");
        let (endpoint, head) = match self.kind {
            Kind::Http => (self.asked().http(), post()),
            Kind::Https => (self.asked().https(&self.node)?, post()),
            Kind::Connect => {
                let head = format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n");
                (Endpoint::plain(bound.connect.context("a listener")?), head)
            }
            Kind::Service => (Endpoint::plain(bound.services[0].1), String::new()),
            Kind::Cloud => (Endpoint::plain(self.cloud), String::new()),
        };
        let mut socket = endpoint.connect().await?;
        socket.write_all(head.as_bytes()).await?;
        socket.flush().await?;
        let mut target = End::new(self.accept(&mut socket).await?);
        let mut caller = End::new(socket);
        if self.kind.is_http() {
            caller.written = target.read_head().await?;
            target.read = caller.written;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {ENDLESS}\r\n\r\n");
            target.socket()?.write_all(head.as_bytes()).await?;
            target.socket()?.flush().await?;
            target.written = head.len() as u64;
            caller.read = target.written;
        }
        if head.is_empty() {
            // The stream is accepted at all servers once a byte has passed.
            target.socket()?.write_all(b".").await?;
            caller.socket()?.read_exact(&mut [0]).await?;
            (target.written, caller.read) = (1, 1);
        } else {
            caller.read_head().await?;
        }
        Ok((caller, target))
    }

    async fn accept(&self, caller: &mut ByteStream) -> Result<ByteStream> {
        let mut early = [0];
        if self.kind == Kind::Https {
            // The server may send messages of TLS at any time.
            return tokio::select! {
                biased;
                accepted = self.target.accept() => Ok(self.target_tls.accept(accepted?.0).await?),
                refused = caller.read(&mut early) => bail!("refused: {refused:?}"),
            };
        }
        let accepted = tokio::select! {
            biased;
            accepted = self.target.accept() => accepted?.0,
            refused = caller.tcp().peek(&mut early) => match self.target.accept().now_or_never() {
                Some(accepted) => accepted?.0,
                None => bail!("refused: {refused:?}"),
            },
        };
        Ok(ByteStream::plain(accepted))
    }

    /// Runs a cell, and returns the address of its caller.
    async fn run(&self, cell: Cell) -> Result<SocketAddr> {
        self.is_ready().await;
        let idle = self.buffers().await?;
        // The next session begins with as much as the first.
        let idle = self.idle.get_or_init(async || idle).await;
        let targets_before = self.lines_of_targets().len();
        let opened = eventually("a stream", WAIT_TIMEOUT, async || self.open().await);
        let (mut caller, mut target) = opened.await;
        let peer = caller.socket()?.tcp().local_addr()?;
        match cell.stalled {
            Stalled::Nobody => {}
            Stalled::Caller => target.fill().await?,
            Stalled::Target => caller.fill().await?,
        }
        let within = match cell.stalled {
            Stalled::Nobody => ENDED_WITHIN,
            Stalled::Caller | Stalled::Target => STALLED_ENDED_WITHIN,
        };
        let (cutter, mut others) = match cell.cut {
            Cut::Caller => (Some(&mut caller), vec![&mut target]),
            Cut::Target => (Some(&mut target), vec![&mut caller]),
            Cut::Session | Cut::Link => (None, vec![&mut caller, &mut target]),
        };
        match (cutter, cell.stalled) {
            (None, _) if cell.cut == Cut::Link => {
                self.link.as_ref().context("one server")?.reset_tcp();
            }
            (None, _) => {
                for session in self.servers[0].registry().of_node(&self.node.parse()?) {
                    session.session.close(CloseCode::Dead, "lost").await;
                }
            }
            (Some(cutter), Stalled::Nobody) if cell.is_half_closed => {
                let (sent, read) = tokio::join!(cutter.send_and_end(), others[0].read_to_end());
                sent?;
                read?;
                cutter.cut()?;
            }
            (Some(cutter), Stalled::Nobody) => {
                let (cut_off, reset) =
                    tokio::join!(cutter.send_and_cut(), others[0].read_to_reset());
                cut_off?;
                reset?;
            }
            (Some(cutter), Stalled::Caller | Stalled::Target) => cutter.cut()?,
        }
        // The other end is open, and reads nothing, while the streams end.
        self.has_nothing_left(within, cell, idle).await;
        for other in others {
            if cell.is_half_closed {
                // A target is gone behind its complete answer, which is no reason for a reset.
                other.is_reset(cell.cut == Cut::Caller).await?;
            } else {
                other.read_to_reset().await?;
            }
        }
        let lines = self.lines(peer, targets_before).await;
        self.check_codes(cell, &lines)?;
        check_bytes(self.kind, &lines, &caller, &target)?;
        if cell.stalled == Stalled::Nobody {
            self.check_arrived(cell.cut, &lines, &caller, &target)?;
        }
        Ok(peer)
    }

    /// Waits until no process has a stream or its memory, and the callers' server has all of its
    /// permits.
    async fn has_nothing_left(&self, within: Duration, cell: Cell, idle: &[u64]) {
        let prefix = match self.kind {
            Kind::Http | Kind::Https | Kind::Connect | Kind::Service => "",
            Kind::Cloud => "cloud_",
        };
        let what = format!("nothing is left of the stream ({cell:?})");
        eventually(&what, within, async || {
            let meta = self.agent.meta().context("a meta port")?;
            let of_agent = metric(meta, &format!("tunnel_agent_{prefix}streams_open")).await?;
            ensure!(of_agent == 0, "{of_agent} streams of the agent");
            for (number, server) in self.servers.iter().enumerate() {
                let series = format!("tunnel_server_{prefix}streams_open");
                let open = server.metric(&series).await?;
                ensure!(open == 0, "{open} streams of server {number}");
                for session in server.registry().of_node(&self.node.parse()?) {
                    let streams = session.session.stats().streams;
                    ensure!(streams == 0, "{streams} in a session of server {number}");
                }
            }
            let mut buffers = self.buffers().await?;
            // What was cut has no first window before it is there again.
            let renewed = match cell.cut {
                Cut::Session => 0..1,
                Cut::Link => 1..buffers.len(),
                Cut::Caller | Cut::Target => 0..0,
            };
            for index in renewed {
                if buffers[index] == 0 {
                    buffers[index] = idle[index];
                }
            }
            ensure!(buffers == idle, "{buffers:?} bytes, {idle:?} before");
            if self.kind != Kind::Cloud {
                // The only permit of a caller is free again.
                let refused = format!("{}:{REFUSED_PORT}", self.node);
                let http: Endpoint = self.asked().http();
                let reply = request(http, &RawRequest::get(&refused, "/")).await?;
                ensure!(reply.status == 403, "{}", reply.text());
            }
            anyhow::Ok(())
        })
        .await;
    }

    /// Returns the memory that the agent and each server have reserved for unread data.
    async fn buffers(&self) -> Result<Vec<u64>> {
        let meta = self.agent.meta().context("a meta port")?;
        let mut buffers = vec![metric(meta, "tunnel_agent_buffer_bytes").await?];
        for server in &self.servers {
            buffers.push(server.metric("tunnel_server_buffer_bytes").await?);
        }
        Ok(buffers)
    }

    /// Returns the lines of the end that has the caller at `peer`.
    fn lines_of_caller(&self, peer: SocketAddr) -> Vec<Value> {
        let mut lines = access_lines(&self.node);
        lines.retain(|line| line["peer"] == peer.to_string());
        lines
    }

    /// Returns the lines of the end that has the target.
    fn lines_of_targets(&self) -> Vec<Value> {
        let mut lines = access_lines(&self.node);
        lines.retain(|line| !line["peer"].is_string());
        lines
    }

    /// Returns the one line of each end.
    async fn lines(&self, peer: SocketAddr, targets_before: usize) -> Lines {
        let lines = eventually("a line of each end", WAIT_TIMEOUT, async || {
            let of_caller = self.lines_of_caller(peer);
            let of_target = self.lines_of_targets().split_off(targets_before);
            let counts = (of_caller.len(), of_target.len());
            ensure!(counts == (1, 1), "{counts:?} lines");
            anyhow::Ok((of_caller, of_target))
        });
        let (mut of_caller, mut of_target) = lines.await;
        Lines {
            of_caller: of_caller.remove(0),
            of_target: of_target.remove(0),
        }
    }

    fn check_codes(&self, cell: Cell, lines: &Lines) -> Result<()> {
        let of_caller = match (self.kind, cell.cut) {
            (Kind::Cloud, Cut::Target) if cell.is_half_closed => "reader_closed",
            (Kind::Cloud, Cut::Caller) => "cut_by_caller",
            (Kind::Cloud, Cut::Target | Cut::Session | Cut::Link) => "cut_by_peer",
            (_, Cut::Caller) => "caller_gone",
            // The caller has all of the answer.
            (_, Cut::Target) if cell.is_half_closed => "ok",
            (_, Cut::Target | Cut::Session | Cut::Link) => "cut",
        };
        let of_target = match cell.cut {
            Cut::Target if cell.is_half_closed => "reader_closed",
            Cut::Caller | Cut::Session | Cut::Link => "cut_by_peer",
            Cut::Target => "cut_by_target",
        };
        let codes = (&lines.of_caller["code"], &lines.of_target["code"]);
        let is_right = codes.0 == of_caller && codes.1 == of_target;
        ensure!(is_right, "{codes:?}, not {:?}", (of_caller, of_target));
        Ok(())
    }

    /// Checks that all bytes before a cut have arrived, and that both lines have them.
    fn check_arrived(&self, cut: Cut, lines: &Lines, caller: &End, target: &End) -> Result<()> {
        for (direction, read) in [(Direction::Up, target.read), (Direction::Down, caller.read)] {
            let logged = lines.bytes(direction)?;
            let is_true = logged.0 == logged.1
                && match self.kind {
                    // TLS to the target needs more bytes than were read.
                    Kind::Https => logged.1 > read,
                    Kind::Http | Kind::Connect | Kind::Service | Kind::Cloud => logged.1 == read,
                };
            ensure!(is_true, "{direction:?}: {logged:?}, {read} read");
        }
        let reader = match cut {
            Cut::Caller => target,
            Cut::Target => caller,
            Cut::Session | Cut::Link => return Ok(()),
        };
        // A request that its caller does not complete is not worth its bytes.
        if !(self.kind.is_http() && cut == Cut::Caller) {
            let arrived = reader.got.len();
            let is_whole = reader.got == deterministic_bytes(7, SENT_BYTES);
            ensure!(is_whole, "{arrived} of {SENT_BYTES} bytes");
        }
        Ok(())
    }
}

/// What the servers of a site have in common.
struct ServerSetup {
    node: String,
    kind: Kind,
    target: SocketAddr,
}

impl ServerSetup {
    fn apply(&self, raw: &mut RawConfig) {
        raw.connect_listen = Some("127.0.0.1:0".into());
        raw.allow_unauthenticated = Some("true".into());
        if self.kind == Kind::Https {
            raw.https_proxy_ports = raw.http_proxy_ports.take();
        }
        // A permit that is not released refuses the next caller.
        raw.limits = TestEnv::limits("{callersTotal: 1, callersPerSource: 1}");
        raw.services = vec![RawTcpService {
            name: "raw".into(),
            listen: "127.0.0.1:0".into(),
            node: self.node.clone(),
            target: self.target.port().to_string(),
            protocol: None,
        }];
        if self.kind == Kind::Cloud {
            raw.cloud_apiserver = vec![self.target.to_string()];
        }
    }
}

/// An address where nobody listens.
const NOBODY: &str = "127.0.0.1:1";

/// The lines of both ends of a stream.
struct Lines {
    of_caller: Value,
    of_target: Value,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    /// From the caller to the target.
    Up,
    Down,
}

impl Lines {
    /// Returns the bytes of one direction in the lines of the caller's and of the target's end.
    fn bytes(&self, direction: Direction) -> Result<(u64, u64)> {
        let (of_caller, of_target) = match direction {
            Direction::Up => ("bytes_out", "bytes_in"),
            Direction::Down => ("bytes_in", "bytes_out"),
        };
        let of_caller = self.of_caller[of_caller].as_u64();
        let of_target = self.of_target[of_target].as_u64();
        Ok((of_caller.context("bytes")?, of_target.context("bytes")?))
    }
}

/// Checks that no line has more bytes than were written, nor fewer than were read.
fn check_bytes(kind: Kind, lines: &Lines, caller: &End, target: &End) -> Result<()> {
    // TLS to the target needs more bytes than were written.
    let written = |bytes: u64| if kind == Kind::Https { u64::MAX } else { bytes };
    let (first, last) = lines.bytes(Direction::Up)?;
    let up = [written(caller.written), first, last, target.read];
    ensure!(up.is_sorted_by(|left, right| left >= right), "up: {up:?}");
    let (last, first) = lines.bytes(Direction::Down)?;
    let down = [written(target.written), first, last, caller.read];
    ensure!(
        down.is_sorted_by(|left, right| left >= right),
        "down: {down:?}"
    );
    Ok(())
}

impl End {
    fn new(socket: ByteStream) -> Self {
        Self {
            socket: Some(socket),
            written: 0,
            read: 0,
            got: Vec::new(),
        }
    }

    fn socket(&mut self) -> Result<&mut ByteStream> {
        self.socket.as_mut().context("the connection has ended")
    }

    /// Reads a head of HTTP, and returns its length.
    async fn read_head(&mut self) -> Result<u64> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.socket()?.read_u8().await?);
        }
        Ok(head.len() as u64)
    }

    /// Writes until the reader at the other end blocks the writer.
    async fn fill(&mut self) -> Result<()> {
        let piece = vec![7; 1 << 20];
        while let Ok(written) = timeout(scaled(FULL_AFTER), self.socket()?.write(&piece)).await {
            self.written += written? as u64;
        }
        Ok(())
    }

    /// Resets the connection.
    fn cut(&mut self) -> Result<()> {
        abort_on_close(self.socket()?.tcp())?;
        self.socket = None;
        Ok(())
    }

    /// Sends bytes, and resets the connection behind them.
    async fn send_and_cut(&mut self) -> Result<()> {
        let sent = deterministic_bytes(7, SENT_BYTES);
        self.socket()?.write_all(&sent).await?;
        self.socket()?.flush().await?;
        self.written += sent.len() as u64;
        abort_behind(self.socket()?.tcp(), WAIT_TIMEOUT).await;
        self.socket = None;
        Ok(())
    }

    /// Sends bytes, and ends the direction behind them.
    async fn send_and_end(&mut self) -> Result<()> {
        let sent = deterministic_bytes(7, SENT_BYTES);
        self.socket()?.write_all(&sent).await?;
        self.written += sent.len() as u64;
        Ok(self.socket()?.shutdown().await?)
    }

    /// Reads to the clean end of the other direction.
    async fn read_to_end(&mut self) -> Result<()> {
        let mut got = Vec::new();
        let reading = AsyncReadExt::read_to_end(self.socket()?, &mut got);
        timeout(scaled(WAIT_TIMEOUT), reading)
            .await
            .context("no end")??;
        self.read += got.len() as u64;
        self.got = got;
        Ok(())
    }

    /// Checks whether the connection was reset behind the end of its input.
    async fn is_reset(&mut self, expected: bool) -> Result<()> {
        let socket = self.socket.take().context("the connection has ended")?;
        if expected {
            let failed = socket.tcp().ready(tokio::io::Interest::ERROR);
            timeout(scaled(WAIT_TIMEOUT), failed)
                .await
                .context("no reset")??;
        }
        let error = socket.tcp().take_error()?;
        ensure!(error.is_some() == expected, "{error:?}");
        Ok(())
    }

    /// Reads to the reset of the connection, unless it was read before.
    async fn read_to_reset(&mut self) -> Result<()> {
        let Some(mut socket) = self.socket.take() else {
            return Ok(());
        };
        let reading = AsyncReadExt::read_to_end(&mut socket, &mut self.got);
        let ended = timeout(scaled(WAIT_TIMEOUT), reading).await;
        self.read += self.got.len() as u64;
        let error = ended.context("no end")?.err().context("a clean end")?;
        ensure!(error.kind() == ErrorKind::ConnectionReset, "{error}");
        Ok(())
    }
}
