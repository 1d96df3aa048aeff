//! An agent that a test controls: real credentials and a real session, and messages of the test's
//! choice.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rcgen::{CertificateParams, KeyPair};
use rustls::sign::CertifiedKey;
use std::net::SocketAddr;
use tokio::time::Instant;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{BufferPool, CongestionControl, SessionSettings};
use tunnel_proto::transport::{CloseReason, Dialer as _, Session, Stream};
use tunnel_proto::wire::ALPN_SESSION;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Hello};
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_server::ca::LocalCa;
use tunnel_tests::env::TestEnv;

/// A session that the test controls.
pub(crate) struct ScriptedAgent {
    session: Arc<dyn Session>,
    control: (ControlReader, ControlWriter),
    _dialer: QuicDialer,
}

/// The server's answer to a Hello.
pub(crate) enum Admission {
    Admitted(ScriptedAgent),
    Refused(CloseCode, String),
}

/// Issues an agent certificate of the environment's CA.
pub(crate) fn agent_key(env: &TestEnv, node: &str) -> Result<Arc<CertifiedKey>> {
    env.nodes().record(&node.parse()?, &[]);
    issue_agent_key(env.ca(), node)
}

/// Issues an agent certificate of a CA.
pub(crate) fn issue_agent_key(ca: &LocalCa, node: &str) -> Result<Arc<CertifiedKey>> {
    let key = KeyPair::generate()?;
    let request = CertificateParams::default().serialize_request(&key)?;
    let issued = ca.issue_agent(request.der(), &node.parse()?)?;
    let key = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
    Ok(tls::certified_key(issued.chain, key)?)
}

/// Returns an address in the form that dialers take.
pub(crate) fn remote(address: SocketAddr) -> ServerAddr {
    ServerAddr {
        name: address.to_string(),
        address: Some(address),
    }
}

/// Returns the windows and timers of scripted sessions.
pub(crate) fn settings() -> SessionSettings {
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
pub(crate) async fn dial(
    env: &TestEnv,
    key: Arc<CertifiedKey>,
) -> Result<(Arc<dyn Session>, QuicDialer)> {
    let settings = settings();
    let tls = tls::session_client(key, Trust::Roots(env.roots()?), ALPN_SESSION)?;
    let dialer = QuicDialer::new(tls, settings)?;
    let session = dialer.dial(&remote(env.bound().agents)).await?;
    Ok((session, dialer))
}

/// Returns a Hello of `name`.
pub(crate) fn hello(name: &str, instance: [u8; 16]) -> Result<Hello> {
    let node_name: NodeName = name.parse()?;
    Ok(Hello {
        versions: (1, 1),
        capabilities: vec!["from-the-future".into()],
        node_name,
        instance: InstanceId::new(instance),
        software: "scripted".into(),
        node_ip: String::new(),
    })
}

/// Sends a Hello on a session. Returns the session's control stream and the server's answer.
pub(crate) async fn exchange_hello(
    session: &dyn Session,
    hello: Hello,
) -> Result<((ControlReader, ControlWriter), ControlMessage)> {
    let incoming = session.accept().await?;
    let (_, mut stream) = incoming
        .header(Instant::now() + Duration::from_secs(30))
        .await?;
    stream.accept("").await?;
    let (mut reader, mut writer) = control::split(stream);
    writer.send(&ControlMessage::Hello(hello)).await?;
    let answer = reader.receive().await?.context("control stream ended")?;
    Ok(((reader, writer), answer))
}

impl ScriptedAgent {
    /// Connects an agent that must be admitted.
    pub(crate) async fn connect(env: &TestEnv, node: &str) -> Result<Self> {
        match Self::handshake(env, agent_key(env, node)?, node, [7; 16]).await? {
            Admission::Admitted(agent) => Ok(agent),
            Admission::Refused(code, detail) => bail!("not admitted: {code} {detail}"),
        }
    }

    /// Sends a Hello with a name that may differ from the credential's.
    pub(crate) async fn handshake(
        env: &TestEnv,
        key: Arc<CertifiedKey>,
        name: &str,
        instance: [u8; 16],
    ) -> Result<Admission> {
        Self::handshake_with(env, key, hello(name, instance)?).await
    }

    /// Sends a Hello of the test's choice.
    pub(crate) async fn handshake_with(
        env: &TestEnv,
        key: Arc<CertifiedKey>,
        hello: Hello,
    ) -> Result<Admission> {
        let (session, dialer) = dial(env, key).await?;
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

    pub(crate) async fn send(&mut self, message: &ControlMessage) -> std::io::Result<()> {
        self.control.1.send(message).await
    }

    /// Accepts the next stream of the server and reads its header.
    pub(crate) async fn next_stream(&self) -> Result<Stream> {
        let incoming = self.session.accept().await?;
        Ok(incoming
            .header(Instant::now() + Duration::from_secs(30))
            .await?
            .1)
    }

    /// Closes the session and drops the agent.
    pub(crate) async fn leave(self) {
        let session = self.session.clone();
        session.close(CloseCode::Normal, "test").await;
    }

    /// Closes the session with a reason.
    pub(crate) async fn leave_with_reason(self, why: &str) {
        self.session.close(CloseCode::Normal, why).await;
    }

    /// Returns the reason for the end of the session.
    pub(crate) async fn closed(&self) -> CloseReason {
        self.session.closed().await
    }

    /// Closes the session without dropping the agent.
    pub(crate) async fn close(&self) {
        self.session.close(CloseCode::Normal, "test").await;
    }
}
