//! An agent that a test controls: real credentials and a real session, and messages of the test's
//! choice.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::BytesMut;
use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tunnel_ca::LocalCa;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{BufferPool, CongestionControl, SessionSettings, TransportKind};
use tunnel_proto::transport::{CloseReason, Dialer, Session, Stream, read_frame};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, JoinToken};
use tunnel_proto::wire::frame::ENROLL_MESSAGE_MAX;
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};
use tunnel_store::data_dir::DataDir;

use crate::env::TestEnv;

mod flood;

pub use flood::StreamFlood;

/// A session that the test controls.
pub struct ScriptedAgent {
    session: Arc<dyn Session>,
    control: (ControlReader, ControlWriter),
    _dialer: Box<dyn Dialer>,
}

/// A certificate with its key, and the CAs of the servers.
#[derive(Debug, Clone)]
pub struct AgentCredential {
    pub key: Arc<CertifiedKey>,
    pub roots: Arc<RootCertStore>,
}

impl AgentCredential {
    /// Enrolls a node at a server with a join token.
    pub async fn enroll(server: SocketAddr, token: &str, node: &str) -> Result<Self> {
        let parsed: JoinToken = token.parse()?;
        let pin = *parsed.ca_hash().context("a token without the CA")?;
        let key = KeyPair::generate()?;
        let csr = CertificateParams::default().serialize_request(&key)?;
        let request = EnrollRequest {
            token: token.to_owned().into(),
            csr: csr.der().to_vec(),
            node_name: node.parse()?,
            proof: None,
            is_known: false,
        };
        let (chain, roots) = match enroll(server, pin, &request).await? {
            EnrollReply::Issued { chain, roots } => (chain, roots),
            EnrollReply::Refused(code, detail) => bail!("not enrolled: {code} {detail}"),
        };
        let key = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
        let chain = chain.into_iter().map(CertificateDer::from).collect();
        Ok(Self {
            key: tls::certified_key(chain, key)?,
            roots: tls::roots(roots.into_iter().map(CertificateDer::from))?,
        })
    }
}

/// Sends one enrollment request to a server whose CA has this hash, and returns the reply.
pub async fn enroll(
    server: SocketAddr,
    pin: [u8; 32],
    request: &EnrollRequest,
) -> Result<EnrollReply> {
    let tcp = TcpStream::connect(server).await?;
    let config = tls::enroll_client(Trust::Pin(pin))?;
    let name = "tunnel-server.culvert".try_into()?;
    let mut stream = TlsConnector::from(config).connect(name, tcp).await?;
    let mut framed = BytesMut::new();
    request.encode(&mut framed)?;
    stream.write_all(&framed).await?;
    let reply = read_frame(&mut stream, ENROLL_MESSAGE_MAX).await?;
    Ok(EnrollReply::decode(&reply)?)
}

/// The server's answer to a Hello.
#[derive(Debug)]
pub enum Admission {
    Admitted(ScriptedAgent),
    Refused(CloseCode, String),
}

impl Admission {
    /// Returns the agent, which must be admitted.
    fn into_agent(self) -> Result<ScriptedAgent> {
        match self {
            Self::Admitted(agent) => Ok(agent),
            Self::Refused(code, detail) => bail!("not admitted: {code} {detail}"),
        }
    }
}

/// Issues an agent certificate of the environment's CA.
pub fn agent_key(env: &TestEnv, node: &str) -> Result<Arc<CertifiedKey>> {
    env.nodes().record(&node.parse()?, &[]);
    issue_agent_key(env.ca(), node)
}

/// Issues an agent certificate of a CA.
pub fn issue_agent_key(ca: &LocalCa, node: &str) -> Result<Arc<CertifiedKey>> {
    let key = KeyPair::generate()?;
    let request = CertificateParams::default().serialize_request(&key)?;
    let issued = ca.issue_agent(request.der(), &node.parse()?)?;
    let key = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
    Ok(tls::certified_key(issued.chain, key)?)
}

/// Returns an address in the form that dialers take.
pub fn remote(address: SocketAddr) -> ServerAddr {
    ServerAddr {
        name: address.to_string(),
        address: Some(address),
    }
}

/// Returns the windows and timers of scripted sessions.
pub fn settings() -> SessionSettings {
    SessionSettings {
        stream_window: 1 << 20,
        streams: 256,
        keep_alive: Some(Duration::from_secs(5)),
        idle_timeout: Duration::from_secs(30),
        congestion: CongestionControl::default(),
        pool: BufferPool::new(64 << 20),
    }
}

/// Dials the environment's server with a credential.
pub async fn dial(
    env: &TestEnv,
    key: Arc<CertifiedKey>,
) -> Result<(Arc<dyn Session>, Box<dyn Dialer>)> {
    let (server, transport) = (env.bound().agents, TransportKind::Quic);
    dial_server(server, env.roots()?, key, transport, settings()).await
}

/// Dials a server with a credential, over h2 or else over QUIC.
async fn dial_server(
    server: SocketAddr,
    roots: Arc<RootCertStore>,
    key: Arc<CertifiedKey>,
    transport: TransportKind,
    settings: SessionSettings,
) -> Result<(Arc<dyn Session>, Box<dyn Dialer>)> {
    let trust = Trust::Roots(roots);
    let dialer: Box<dyn Dialer> = if transport == TransportKind::H2 {
        let tls = tls::session_client(key, trust, ALPN_SESSION_TCP)?;
        Box::new(H2Dialer::new(tls, settings, Arc::new(Direct)))
    } else {
        let tls = tls::session_client(key, trust, ALPN_SESSION)?;
        Box::new(QuicDialer::new(tls, settings)?)
    };
    let session = dialer.dial(&remote(server)).await?;
    Ok((session, dialer))
}

pub fn hello(name: &str, instance: [u8; 16]) -> Result<Hello> {
    let node_name: NodeName = name.parse()?;
    Ok(Hello {
        versions: (1, 1),
        capabilities: vec!["from-the-future".into()],
        node_name,
        instance: InstanceId::new(instance),
        software: "scripted".into(),
        node_ip: String::new(),
        labels: std::collections::BTreeMap::new(),
    })
}

/// Sends a Hello on a session. Returns the session's control stream and the server's answer.
pub async fn exchange_hello(
    session: &dyn Session,
    hello: Hello,
) -> Result<((ControlReader, ControlWriter), ControlMessage)> {
    let incoming = session.accept().await?;
    let (_, mut stream) = incoming
        .header(Instant::now() + Duration::from_secs(30))
        .await?;
    stream.accept("").await?;
    let (mut reader, mut writer) = control::split(stream);
    writer.send(&ControlMessage::Hello(Box::new(hello))).await?;
    let answer = reader.receive().await?.context("control stream ended")?;
    Ok(((reader, writer), answer))
}

impl ScriptedAgent {
    /// Connects an agent that must be admitted.
    pub async fn connect(env: &TestEnv, node: &str) -> Result<Self> {
        let admission = Self::handshake(env, agent_key(env, node)?, node, [7; 16]);
        admission.await?.into_agent()
    }

    /// Sends a Hello with a name that may differ from the credential's.
    pub async fn handshake(
        env: &TestEnv,
        key: Arc<CertifiedKey>,
        name: &str,
        instance: [u8; 16],
    ) -> Result<Admission> {
        Self::handshake_with(env, key, hello(name, instance)?).await
    }

    /// Sends a Hello of the test's choice.
    pub async fn handshake_with(
        env: &TestEnv,
        key: Arc<CertifiedKey>,
        hello: Hello,
    ) -> Result<Admission> {
        let (session, dialer) = dial(env, key).await?;
        Self::admit(session, dialer, hello).await
    }

    /// Connects an agent to a server by the CA in the server's data directory. The agent must be
    /// admitted.
    pub async fn connect_to(
        server: SocketAddr,
        data_dir: &Path,
        node: &str,
        transport: TransportKind,
    ) -> Result<Self> {
        let ca = LocalCa::load_or_create(&DataDir::open_existing(data_dir)?)?;
        let credential = AgentCredential {
            key: issue_agent_key(&ca, node)?,
            roots: tls::roots(ca.roots())?,
        };
        Self::connect_with(server, &credential, node, transport).await
    }

    /// Connects an agent with a credential, which must be admitted.
    pub async fn connect_with(
        server: SocketAddr,
        credential: &AgentCredential,
        node: &str,
        transport: TransportKind,
    ) -> Result<Self> {
        let AgentCredential { key, roots } = credential.clone();
        // Over h2 the initial limit of the agent's end holds for its own streams, too.
        let settings = SessionSettings {
            streams: STREAMS,
            ..settings()
        };
        let (session, dialer) = dial_server(server, roots, key, transport, settings).await?;
        let admission = Self::admit(session, dialer, hello(node, [7; 16])?);
        admission.await?.into_agent()
    }

    /// Sends a Hello on a new session.
    async fn admit(
        session: Arc<dyn Session>,
        dialer: Box<dyn Dialer>,
        hello: Hello,
    ) -> Result<Admission> {
        let (control, answer) = exchange_hello(&*session, hello).await?;
        match answer {
            ControlMessage::Welcome(welcome) => {
                session.set_max_concurrent_streams(welcome.streams_per_agent + 1);
                let agent = Self {
                    session,
                    control,
                    _dialer: dialer,
                };
                Ok(Admission::Admitted(agent))
            }
            ControlMessage::NotAdmitted(code, detail) => Ok(Admission::Refused(code, detail)),
            other => bail!("unexpected {other:?}"),
        }
    }

    pub async fn send(&mut self, message: &ControlMessage) -> std::io::Result<()> {
        self.control.1.send(message).await
    }

    /// Accepts the next stream of the server and reads its header.
    pub async fn next_stream(&self) -> Result<Stream> {
        let incoming = self.session.accept().await?;
        Ok(incoming
            .header(Instant::now() + Duration::from_secs(30))
            .await?
            .1)
    }

    /// Closes the session and drops the agent.
    pub async fn leave(self) {
        let session = self.session.clone();
        session.close(CloseCode::Normal, "test").await;
    }

    /// Closes the session with a reason.
    pub async fn leave_with_reason(self, why: &str) {
        self.session.close(CloseCode::Normal, why).await;
    }

    /// Returns the reason for the end of the session.
    pub async fn closed(&self) -> CloseReason {
        self.session.closed().await
    }

    /// Closes the session with a code.
    pub async fn close_with(self, code: CloseCode, why: &str) {
        self.session.close(code, why).await;
    }

    /// Closes the session without dropping the agent.
    pub async fn close(&self) {
        self.session.close(CloseCode::Normal, "test").await;
    }
}

impl fmt::Debug for ScriptedAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut agent = f.debug_struct("ScriptedAgent");
        agent.field("session", &self.session);
        agent.finish_non_exhaustive()
    }
}

/// More streams than a server admits to targets of the cloud.
const STREAMS: u32 = 4096;
