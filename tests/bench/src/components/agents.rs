//! Many agents in one process. Their sessions are like those of real agents, with credentials from
//! the server's own CA.

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
use tunnel_proto::session::control;
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{
    BufferPool, CongestionControl, Dialer, HandshakeError, Session, SessionSettings,
};
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP, VERSION_MAX, VERSION_MIN};
use tunnel_server::ca::LocalCa;
use tunnel_server::store::data_dir::DataDir;

use super::listening;
use super::transport_relay::Kind;

/// Number of first dials that run at once, because the agents of a site do not all start at one
/// moment. After a loss of the server, all agents dial again when their backoff ends, without this
/// limit.
const FIRST_DIALS: usize = 128;
/// Time limit for a dial and for an admission, equal to the handshake timeout of real agents.
const BATCH: Duration = Duration::from_secs(5);
/// Number of failures in a row after which an agent prints its error.
const MANY: u32 = 20;

/// Keeps sessions open and dials again when one is lost, until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Agents {
    kind: Kind,
    /// Address of the server's listener for agents.
    server: SocketAddr,
    /// Data directory of the server, for its CA.
    data: PathBuf,
    count: usize,
}

impl Agents {
    pub(crate) async fn run(self) -> Result<()> {
        // The parent process waits for this line. This process does not listen.
        listening(self.server)?;
        let ca = LocalCa::load_or_create(&DataDir::open_existing(&self.data)?)?;
        let roots = tls::roots(ca.roots().iter().cloned())?;
        // All agents have one key, because key generation is not measured.
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

/// An event of an agent.
#[derive(Debug, Clone, Copy)]
enum AgentEvent {
    /// The session with this number, counted from 0, is ready.
    Ready(usize),
    /// The session has ended.
    Lost,
}

/// Number of agents that are ready, and of sessions that they have had.
#[derive(Debug)]
struct Tally {
    count: usize,
    ready: usize,
    /// Number of agents that have had a session with the number of the index.
    had: Vec<usize>,
    /// How often all agents were ready.
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

    /// Counts an event. Returns how often all agents were ready, if they are all ready again and
    /// each has another session than the last time. Over QUIC each agent notices a restart of the
    /// server on its own, so some agents are ready again before others have lost their session.
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

/// Beginning of the line that the process prints when all agents are ready. The number of times
/// follows.
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

    /// Runs one session from the dial to its end. `number` is the number of the session, counted
    /// from 0.
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
            other => bail!("not a Welcome: {other:?}"),
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
