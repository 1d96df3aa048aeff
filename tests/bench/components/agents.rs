//! Many agents in one process: sessions like those of real ones, with credentials from the server's own CA.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rcgen::{CertificateParams, KeyPair};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_agent::backoff::{Backoff, ReconnectEvent};
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{
    BufferPool, CongestionControl, Dialer, HandshakeError, Session, SessionSettings, control,
};
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP, VERSION_MAX, VERSION_MIN};
use tunnel_server::ca::LocalCa;
use tunnel_server::store::data_dir::DataDir;

use super::listening;
use super::raw::Kind;

/// First dials at once, since a site's agents are not started in one moment. A server that went away is dialed again by
/// all of them, when their plans say so.
const FIRST_DIALS: usize = 128;
/// As the handshake timeout of agents.
const BATCH: Duration = Duration::from_secs(5);
/// An agent that fails so often in a row says why.
const MANY: u32 = 20;

/// Holds sessions and dials lost ones again, until it is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Agents {
    kind: Kind,
    /// The server's port for agents.
    server: SocketAddr,
    /// The server's data folder, for its CA.
    data: PathBuf,
    /// How many.
    count: usize,
}

impl Agents {
    pub(crate) async fn run(self) -> Result<()> {
        // One line for whoever starts it; nothing listens.
        listening(self.server)?;
        let ca = LocalCa::load_or_create(&DataDir::open_existing(&self.data)?)?;
        let roots = tls::roots(ca.roots().iter().cloned())?;
        // One key for all: making keys is not what is measured.
        let key = KeyPair::generate()?;
        let csr = CertificateParams::default().serialize_request(&key)?;
        let (events, mut event) = mpsc::channel(self.count.max(1));
        let first_dials = Arc::new(Semaphore::new(FIRST_DIALS));
        let mut agents = JoinSet::new();
        for number in 0..self.count {
            let node: NodeName = format!("sim-{number}").parse()?;
            let issued = ca.issue_agent(csr.der(), &node)?;
            let der = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
            let own = tls::certified_key(issued.chain, der)?;
            let dialer = dialer(self.kind, own, Trust::Roots(roots.clone()))?;
            let agent = Agent {
                node,
                instance: InstanceId::new(rand::random()),
                server: self.server,
                dialer,
                first_dials: first_dials.clone(),
                events: events.clone(),
            };
            agents.spawn(agent.live());
        }
        drop(events);
        let mut tally = Tally::of(self.count);
        while let Some(event) = event.recv().await {
            if let Some(times) = tally.handle(event) {
                let mut out = std::io::stdout().lock();
                writeln!(out, "{ALL_READY}{times}")?;
                out.flush()?;
            }
        }
        bail!("all agents have ended")
    }
}

/// What an agent tells.
#[derive(Debug, Clone, Copy)]
enum AgentEvent {
    /// Its session of this number, counted from 0, is ready.
    Ready(usize),
    /// It has ended.
    Lost,
}

/// How many agents are ready, and how often each has been.
#[derive(Debug)]
struct Tally {
    count: usize,
    ready: usize,
    /// How many agents have had a session of this number.
    had: Vec<usize>,
    /// How often all of them were ready.
    times: usize,
}

impl Tally {
    fn of(count: usize) -> Self {
        Self {
            count,
            ready: 0,
            had: Vec::new(),
            times: 0,
        }
    }

    /// Tells when all agents are ready once more: each over another session than the last time. Over QUIC each notices by
    /// itself that the server was restarted, so some are back before others are gone.
    fn handle(&mut self, event: AgentEvent) -> Option<usize> {
        match event {
            AgentEvent::Ready(number) => {
                self.ready += 1;
                if self.had.len() <= number {
                    self.had.resize(number + 1, 0);
                }
                self.had[number] += 1;
            }
            AgentEvent::Lost => self.ready -= 1,
        }
        let all = self.ready == self.count && self.had.get(self.times) == Some(&self.count);
        all.then(|| {
            self.times += 1;
            self.times
        })
    }
}

/// What it prints when all are ready, followed by how often that has happened.
pub(crate) const ALL_READY: &str = "all ready ";

fn dialer(
    kind: Kind,
    own: Arc<rustls::sign::CertifiedKey>,
    trust: Trust,
) -> Result<Arc<dyn Dialer>> {
    let settings = SessionSettings {
        stream_window: 2 << 20,
        streams: 513,
        keep_alive: Some(Duration::from_secs(5)),
        idle_timeout: Duration::from_secs(75),
        congestion: CongestionControl::default(),
        pool: BufferPool::new(128 << 20),
    };
    Ok(match kind {
        Kind::Quic => {
            let tls = tls::session_client(own, trust, ALPN_SESSION)?;
            Arc::new(QuicDialer::new(tls, settings)?)
        }
        Kind::H2 => {
            let tls = tls::session_client(own, trust, ALPN_SESSION_TCP)?;
            Arc::new(H2Dialer::new(tls, settings, Arc::new(Direct)))
        }
    })
}

struct Agent {
    node: NodeName,
    instance: InstanceId,
    server: SocketAddr,
    dialer: Arc<dyn Dialer>,
    first_dials: Arc<Semaphore>,
    events: mpsc::Sender<AgentEvent>,
}

impl Agent {
    async fn live(self) {
        let (mut failures, mut sessions) = (0_u32, 0);
        let mut backoff = Backoff::new();
        let mut permit = self.first_dials.acquire().await.ok();
        loop {
            let event = match self.hold(&mut permit, sessions).await {
                Ok(lost) => {
                    sessions += 1;
                    failures = 0;
                    lost
                }
                Err(error) => {
                    failures += 1;
                    if failures == MANY {
                        let _nobody_reads = writeln!(std::io::stderr(), "{}: {error:#}", self.node);
                    }
                    let handshake_error = error.downcast_ref::<HandshakeError>();
                    ReconnectEvent::Failed(handshake_error.and_then(HandshakeError::code))
                }
            };
            sleep(backoff.next(event, Instant::now(), rand::random())).await;
        }
    }

    /// One session, the one of this number, from the dial to its end.
    async fn hold(
        &self,
        permit: &mut Option<SemaphorePermit<'_>>,
        number: usize,
    ) -> Result<ReconnectEvent> {
        let remote = ServerAddr {
            name: self.server.to_string(),
            address: Some(self.server),
        };
        let session = timeout(BATCH, self.dialer.dial(&remote)).await??;
        let control = timeout(BATCH, self.admit(&*session)).await??;
        *permit = None;
        self.events.send(AgentEvent::Ready(number)).await?;
        let since = Instant::now();
        let reason = session.closed().await;
        drop(control);
        self.events.send(AgentEvent::Lost).await?;
        Ok(ReconnectEvent::Lost {
            ready_for: since.elapsed(),
            code: reason.code,
        })
    }

    async fn admit(
        &self,
        session: &dyn Session,
    ) -> Result<(control::ControlReader, control::ControlWriter)> {
        let (_header, mut stream) = session
            .accept()
            .await?
            .header(Instant::now() + BATCH)
            .await?;
        stream.accept("").await?;
        let (mut reader, mut writer) = control::split(stream);
        let hello = Hello {
            versions: (VERSION_MIN, VERSION_MAX),
            capabilities: Vec::new(),
            node_name: self.node.clone(),
            instance: self.instance,
            software: "bench".to_owned(),
            node_ip: "127.0.0.1".to_owned(),
        };
        writer.send(&ControlMessage::Hello(hello)).await?;
        match reader.receive().await?.context("control stream ended")? {
            ControlMessage::Welcome(_) => Ok((reader, writer)),
            other => bail!("not welcome: {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_ready_again_only_after_the_last_has_noticed() {
        let mut tally = Tally::of(2);
        assert_eq!(tally.handle(AgentEvent::Ready(0)), None);
        assert_eq!(tally.handle(AgentEvent::Ready(0)), Some(1));
        for event in [AgentEvent::Lost, AgentEvent::Ready(1), AgentEvent::Lost] {
            assert_eq!(tally.handle(event), None, "{event:?}");
        }
        assert_eq!(tally.handle(AgentEvent::Ready(1)), Some(2));
    }
}
