//! Many agents in one process: sessions like those of real ones, with credentials from the server's own CA.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rcgen::{CertificateParams, KeyPair};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::tcp::{Direct, Remote};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{
    BufferPool, CongestionControl, Dialer, Session, SessionSettings, control,
};
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP, VERSION_MAX, VERSION_MIN};
use tunnel_server::data::DataDir;
use tunnel_server::issuer::LocalCa;

use super::listening;
use super::raw::Kind;

/// Dials at once; a thousand agents of one site come in such waves.
const DIALS: usize = 128;
const STEP: Duration = Duration::from_secs(20);
/// A real agent tries again at once, then after a random time of up to this.
const PAUSE: Duration = Duration::from_secs(2);

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
        let ca = LocalCa::load_or_create(&DataDir::existing(&self.data)?)?;
        let roots = tls::roots(ca.roots().iter().cloned())?;
        // One key for all: making keys is not what is measured.
        let key = KeyPair::generate()?;
        let csr = CertificateParams::default().serialize_request(&key)?;
        let ready = Arc::new(AtomicUsize::new(0));
        let (changed, mut changes) = watch::channel(());
        let dials = Arc::new(Semaphore::new(DIALS));
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
                dials: dials.clone(),
                ready: ready.clone(),
                changed: changed.clone(),
            };
            agents.spawn(agent.live());
        }
        let mut full = false;
        let mut generation = 0;
        loop {
            changes.changed().await?;
            let now = ready.load(Ordering::Acquire);
            if now == self.count && !full {
                generation += 1;
                let mut out = std::io::stdout().lock();
                writeln!(out, "{ALL_READY}{generation}")?;
                out.flush()?;
            }
            full = now == self.count;
        }
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
    dials: Arc<Semaphore>,
    ready: Arc<AtomicUsize>,
    changed: watch::Sender<()>,
}

impl Agent {
    async fn live(self) {
        let mut failures = 0_u32;
        loop {
            match self.hold().await {
                Ok(()) => failures = 0,
                Err(error) => {
                    failures += 1;
                    if failures == 10 {
                        let _nobody_reads = writeln!(std::io::stderr(), "{}: {error:#}", self.node);
                    }
                }
            }
            if failures > 0 {
                sleep(PAUSE.mul_f64(rand::random_range(0.0..1.0))).await;
            }
        }
    }

    /// One session, from the dial to its end.
    async fn hold(&self) -> Result<()> {
        let place = self.dials.acquire().await?;
        let remote = Remote {
            name: self.server.to_string(),
            address: Some(self.server),
        };
        let session = timeout(STEP, self.dialer.dial(&remote)).await??;
        let control = timeout(STEP, self.admit(&*session)).await??;
        drop(place);
        self.ready.fetch_add(1, Ordering::AcqRel);
        self.changed.send_replace(());
        let _reason = session.closed().await;
        drop(control);
        self.ready.fetch_sub(1, Ordering::AcqRel);
        self.changed.send_replace(());
        Ok(())
    }

    async fn admit(
        &self,
        session: &dyn Session,
    ) -> Result<(control::ControlReader, control::ControlWriter)> {
        let (_header, mut stream) = session
            .accept()
            .await?
            .header(Instant::now() + STEP)
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
