//! Many agents in one process. Their sessions are like those of real agents, with credentials from
//! the servers' own CA.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rcgen::{CertificateParams, KeyPair};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_agent::assignment::wanted_replicas;
use tunnel_agent::backoff::{Backoff, ReconnectEvent};
use tunnel_agent::distance::ZoneDistances;
use tunnel_ca::LocalCa;
use tunnel_process::host::raise_descriptor_limit;
use tunnel_proto::egress::{SocketPeer, TargetSocket, relay_socket};
use tunnel_proto::session::control;
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{
    BufferPool, ByteCount, CongestionControl, Dialer, HandshakeError, IncomingStream, Session,
    SessionSettings,
};
use tunnel_proto::wire::control::{ControlMessage, Hello, Member};
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP, VERSION_MAX, VERSION_MIN};
use tunnel_store::data_dir::DataDir;
use tunnel_tests::process::Peering;

use super::listening;
use super::transport_relay::Kind;

/// Number of first dials that run at once, because the agents of a site do not all start at one
/// moment. After a loss of a server, all its agents dial again when their backoff ends, without
/// this limit.
const FIRST_DIALS: usize = 128;
/// Time limit for a dial and for an admission, equal to the handshake timeout of real agents.
const BATCH: Duration = Duration::from_secs(5);
/// Number of failures in a row after which an agent prints its error.
const MANY: u32 = 20;

/// Keeps sessions open and dials again when one is lost, until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Agents {
    kind: Kind,
    /// Data directory of a server, for its CA.
    data: PathBuf,
    count: usize,
    /// Addresses of the servers' listeners for agents.
    #[arg(long, required = true)]
    server: Vec<SocketAddr>,
    /// Number of sessions of each agent, with a server each.
    #[arg(long, default_value_t = 1)]
    sessions: usize,
    /// Number in the name of the first agent.
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// Address to which every stream leads; without it, streams are reset.
    #[arg(long)]
    target: Option<SocketAddr>,
}

impl Agents {
    pub(crate) async fn run(self) -> Result<()> {
        // The parent process waits for this line. This process does not listen.
        listening(*self.server.first().context("no server")?)?;
        ensure!(self.sessions <= self.server.len(), "too few servers");
        raise_descriptor_limit()?;
        let ca = LocalCa::load_or_create(&DataDir::open_existing(&self.data)?)?;
        let roots = tls::roots(ca.roots().iter().cloned())?;
        // All agents have one key, because key generation is not measured.
        let key = KeyPair::generate()?;
        let csr = CertificateParams::default().serialize_request(&key)?;
        let sessions = self.count * self.sessions;
        let (events, mut event) = mpsc::channel(sessions.max(1));
        let first_dials = Arc::new(Semaphore::new(FIRST_DIALS));
        let mut agents = JoinSet::new();
        for number in self.first..self.first + self.count {
            let node: NodeName = node_name(number).parse()?;
            let issued = ca.issue_agent(csr.der(), &node)?;
            let der = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
            let own = tls::certified_key(issued.chain, der)?;
            let dialer = dialer(self.kind, own, Trust::Roots(roots.clone()))?;
            let agent = Arc::new(Agent {
                servers: self.ranked_servers(&node)?,
                node,
                instance: InstanceId::new(rand::random()),
                current: (0..self.sessions).map(AtomicUsize::new).collect(),
                target: self.target,
                dialer,
                first_dials: first_dials.clone(),
                events: events.clone(),
            });
            for session in 0..self.sessions {
                agents.spawn(agent.clone().live(session));
            }
        }
        drop(events);
        let mut tally = Tally::of(sessions);
        while let Some(event) = event.recv().await {
            if let Some(times) = tally.handle(event) {
                let mut out = std::io::stdout().lock();
                writeln!(out, "{ALL_READY}{times}")?;
                out.flush()?;
            }
        }
        bail!("all agents have ended")
    }

    /// Returns the servers in the order in which the agent of a node prefers them.
    fn ranked_servers(&self, node: &NodeName) -> Result<Vec<SocketAddr>> {
        let mut members = Vec::new();
        for number in 0..self.server.len() {
            members.push(Member {
                id: Peering::name(number).parse()?,
                addresses: Vec::new(),
                is_leaving: false,
                zone: None,
            });
        }
        let wanted = wanted_replicas(node, &members, &ZoneDistances::default(), members.len());
        let numbers = wanted
            .iter()
            .filter_map(|replica| members.iter().position(|member| member.id == *replica));
        Ok(numbers.map(|number| self.server[number]).collect())
    }
}

pub(crate) fn node_name(number: usize) -> String {
    format!("sim-{number}")
}

/// An event of one of an agent's sessions.
#[derive(Debug, Clone, Copy)]
enum AgentEvent {
    /// The session with this number, counted from 0, is ready.
    Ready(usize),
    /// The session has ended.
    Lost,
}

/// Number of agents that are ready, and of sessions that they have had. An agent with several
/// servers counts once for each.
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
    /// The preferred server first.
    servers: Vec<SocketAddr>,
    /// The server of each session, as an index in `servers`.
    current: Vec<AtomicUsize>,
    target: Option<SocketAddr>,
    dialer: Arc<dyn Dialer>,
    first_dials: Arc<Semaphore>,
    events: mpsc::Sender<AgentEvent>,
}

impl Agent {
    /// Keeps one of the agent's sessions open.
    async fn live(self: Arc<Self>, session: usize) {
        let (mut failures, mut sessions) = (0_u32, 0);
        let mut backoff = Backoff::new();
        let mut permit = self.first_dials.acquire().await.ok();
        loop {
            let server = self.current[session].load(Ordering::Relaxed);
            let event = match self.hold(&mut permit, self.servers[server], sessions).await {
                Ok(lost) => {
                    sessions += 1;
                    failures = 0;
                    lost
                }
                Err(error) => {
                    failures += 1;
                    self.move_on(session);
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

    /// Moves a session to the next server with which the agent has no other session, if there is
    /// one.
    fn move_on(&self, session: usize) {
        let current = || self.current.iter().map(|own| own.load(Ordering::Relaxed));
        let Some(failed) = current().nth(session) else {
            return;
        };
        let count = self.servers.len();
        let mut others = (failed + 1..failed + count).map(|server| server % count);
        if let Some(next) = others.find(|next| !current().any(|own| own == *next)) {
            self.current[session].store(next, Ordering::Relaxed);
        }
    }

    /// Runs one session from the dial to its end. `number` is the number of the session, counted
    /// from 0.
    async fn hold(
        &self,
        permit: &mut Option<SemaphorePermit<'_>>,
        server: SocketAddr,
        number: usize,
    ) -> Result<ReconnectEvent> {
        let remote = ServerAddr {
            name: server.to_string(),
            address: Some(server),
        };
        let session = timeout(BATCH, self.dialer.dial(&remote)).await??;
        let control = timeout(BATCH, self.admit(&*session)).await??;
        *permit = None;
        self.events.send(AgentEvent::Ready(number)).await?;
        let since = Instant::now();
        let mut serving = JoinSet::new();
        while let Ok(incoming) = session.accept().await {
            while serving.try_join_next().is_some() {}
            if let Some(target) = self.target {
                serving.spawn(serve(incoming, target));
            }
        }
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
            labels: std::collections::BTreeMap::new(),
        };
        writer.send(&ControlMessage::Hello(Box::new(hello))).await?;
        match reader.receive().await?.context("control stream ended")? {
            ControlMessage::Welcome(_) => Ok((reader, writer)),
            other => bail!("not a Welcome: {other:?}"),
        }
    }
}

/// Relays a stream to the target.
async fn serve(incoming: IncomingStream, target: SocketAddr) -> Result<()> {
    let (_header, mut stream) = incoming.header(Instant::now() + BATCH).await?;
    let socket = TcpStream::connect(target).await?;
    stream.accept("").await?;
    relay_socket(
        stream,
        TargetSocket::new(socket, ByteCount::default(), SocketPeer::Target),
    )
    .await;
    Ok(())
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
