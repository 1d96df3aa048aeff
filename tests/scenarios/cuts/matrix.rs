//! Every stream ends with its ends: for each transport, listener, cut and stalled reader, both
//! processes have no stream left, and the bytes before the cut have arrived.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tunnel_agent::config::{RawConfig as AgentRawConfig, TransportChoice};
use tunnel_proto::tcp::{abort_behind, abort_on_close};
use tunnel_proto::wire::code::CloseCode;
use tunnel_server::config::{RawConfig, RawTcpService};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::metrics::metric;
use tunnel_tests::process::{Listener, next_loopback};
use tunnel_tests::targets::deterministic_bytes;

const NODE: &str = "worker-1";
/// Bytes that one end sends before it cuts its connection.
const SENT_BYTES: usize = 200_003;
/// Length of bodies that are never complete.
const ENDLESS: u64 = 1 << 40;
/// A write that is blocked for this time is blocked by the reader at the other end.
const FULL_AFTER: Duration = Duration::from_millis(300);

/// The listener that carries the bytes of a caller.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Http,
    Connect,
    Service,
    /// From the edge to a target of the cloud.
    Cloud,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    Caller,
    Target,
    Session,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stalled {
    Nobody,
    Caller,
    Target,
}

tests_of! {
    fn http_over_quic() = every_cut(TransportChoice::Quic, Kind::Http);
    fn http_over_h2() = every_cut(TransportChoice::H2, Kind::Http);
    fn connect_over_quic() = every_cut(TransportChoice::Quic, Kind::Connect);
    fn connect_over_h2() = every_cut(TransportChoice::H2, Kind::Connect);
    fn service_over_quic() = every_cut(TransportChoice::Quic, Kind::Service);
    fn service_over_h2() = every_cut(TransportChoice::H2, Kind::Service);
    fn cloud_over_quic() = every_cut(TransportChoice::Quic, Kind::Cloud);
    fn cloud_over_h2() = every_cut(TransportChoice::H2, Kind::Cloud);
}

async fn every_cut(transport: TransportChoice, kind: Kind) -> Result<()> {
    let site = Site::start(transport, kind).await?;
    for stalled in [Stalled::Nobody, Stalled::Caller, Stalled::Target] {
        for cut in [Cut::Caller, Cut::Target, Cut::Session] {
            let cell = format!("{cut:?} cut, {stalled:?} stalled");
            site.cut(cut, stalled, &cell)
                .await
                .with_context(|| cell.clone())?;
            site.has_no_streams(&cell).await;
        }
    }
    Ok(())
}

struct Site {
    kind: Kind,
    agent: Agent,
    env: TestEnv,
    target: TcpListener,
    cloud: SocketAddr,
}

impl Site {
    async fn start(transport: TransportChoice, kind: Kind) -> Result<Self> {
        let target = TcpListener::bind("127.0.0.1:0").await?;
        let address = target.local_addr()?;
        let env = TestEnv::start_with(|settings: &mut RawConfig| {
            settings.connect_listen = Some("127.0.0.1:0".into());
            settings.allow_unauthenticated = Some("true".into());
            settings.cloud_apiserver = vec![address.to_string()];
            settings.services = vec![RawTcpService {
                name: "raw".into(),
                listen: "127.0.0.1:0".into(),
                node: NODE.into(),
                target: address.port().to_string(),
                protocol: None,
            }];
        })
        .await?;
        let cloud = Listener::Cloud.on(next_loopback());
        let mut config = env.agent_config_with(NODE, |settings: &mut AgentRawConfig| {
            settings.meta_listen = Some("127.0.0.1:0".into());
            settings.cloud_listen = vec![format!("apiserver={cloud}")];
        })?;
        config.transport = transport;
        let agent = Agent::start(config).await?;
        env.connected(NODE).await;
        Ok(Self {
            kind,
            agent,
            env,
            target,
            cloud,
        })
    }

    /// Opens a connection, and returns both ends when bytes pass in both directions.
    async fn open(&self) -> Result<(TcpStream, TcpStream)> {
        let port = self.target.local_addr()?.port();
        let bound = self.env.bound();
        let (address, head) = match self.kind {
            Kind::Http => {
                let head = format!(
                    "POST / HTTP/1.1\r\nHost: {NODE}:{port}\r\nContent-Length: {ENDLESS}\r\n\r\n"
                );
                (bound.http.context("a listener")?, head)
            }
            Kind::Connect => {
                let head = format!("CONNECT {NODE}:{port} HTTP/1.1\r\nHost: {NODE}:{port}\r\n\r\n");
                (bound.connect.context("a listener")?, head)
            }
            Kind::Service => (bound.services[0].1, String::new()),
            Kind::Cloud => (self.cloud, String::new()),
        };
        let mut caller = TcpStream::connect(address).await?;
        caller.write_all(head.as_bytes()).await?;
        let (mut target, _) = self.target.accept().await?;
        if self.kind == Kind::Http {
            read_head(&mut target).await?;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {ENDLESS}\r\n\r\n");
            target.write_all(head.as_bytes()).await?;
        }
        if !head.is_empty() {
            read_head(&mut caller).await?;
        }
        Ok((caller, target))
    }

    async fn cut(&self, cut: Cut, stalled: Stalled, cell: &str) -> Result<()> {
        // A session that was lost before is replaced.
        let opened = eventually("a stream", WAIT_TIMEOUT, async || {
            timeout(FULL_AFTER, self.open()).await?
        });
        let (mut caller, mut target) = opened.await;
        match stalled {
            Stalled::Nobody => {}
            Stalled::Caller => fill(&mut target).await?,
            Stalled::Target => fill(&mut caller).await?,
        }
        let (mut cutter, mut other) = match cut {
            Cut::Caller => (caller, target),
            Cut::Target => (target, caller),
            Cut::Session => {
                for session in self.env.registry().of_node(&NODE.parse()?) {
                    session.session.close(CloseCode::Dead, "lost").await;
                }
                return Ok(());
            }
        };
        if stalled != Stalled::Nobody {
            abort_on_close(&cutter)?;
            drop(cutter);
            // The other end is open, and reads nothing, while the streams end.
            self.has_no_streams(cell).await;
            return Ok(());
        }
        let sent = deterministic_bytes(7, SENT_BYTES);
        let cutting = async {
            cutter.write_all(&sent).await?;
            abort_behind(&cutter, WAIT_TIMEOUT).await;
            drop(cutter);
            anyhow::Ok(())
        };
        let mut got = Vec::new();
        let reading = timeout(scaled(WAIT_TIMEOUT), other.read_to_end(&mut got));
        let (cut_off, read) = tokio::join!(cutting, reading);
        cut_off?;
        let error = read?.err().context("a clean end")?;
        ensure!(
            error.kind() == std::io::ErrorKind::ConnectionReset,
            "{error}"
        );
        // A request that its caller does not complete is not worth its bytes.
        if (self.kind, cut) != (Kind::Http, Cut::Caller) {
            ensure!(got == sent, "{} of {SENT_BYTES} bytes", got.len());
        }
        Ok(())
    }

    async fn has_no_streams(&self, cell: &str) {
        let meta = self.env.bound().meta;
        let agent_meta = self.agent.meta();
        let (of_server, of_agent) = match self.kind {
            Kind::Http | Kind::Connect | Kind::Service => {
                ("tunnel_server_streams_open", "tunnel_agent_streams_open")
            }
            Kind::Cloud => (
                "tunnel_server_cloud_streams_open",
                "tunnel_agent_cloud_streams_open",
            ),
        };
        eventually(&format!("no streams: {cell}"), WAIT_TIMEOUT, async || {
            let agent_meta = agent_meta.context("a meta port")?;
            let open = (
                metric(meta, of_server).await?,
                metric(agent_meta, of_agent).await?,
            );
            ensure!(open == (0, 0), "{open:?} streams");
            anyhow::Ok(())
        })
        .await;
    }
}

/// Writes until the reader at the other end blocks the writer.
async fn fill(writer: &mut TcpStream) -> Result<()> {
    let piece = vec![7; 1 << 20];
    while let Ok(written) = timeout(FULL_AFTER, writer.write(&piece)).await {
        written?;
    }
    Ok(())
}

async fn read_head(stream: &mut TcpStream) -> Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(())
}
