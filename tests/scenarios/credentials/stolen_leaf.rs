//! Who holds the certificate and key of one server, but not the CA, between an agent and its server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tunnel_agent::config::TransportChoice;
use tunnel_ca::{CaMaterial, LocalCa};
use tunnel_proto::identity::common_name;
use tunnel_proto::session::control;
use tunnel_proto::tls::{self, files::chain};
use tunnel_proto::transport::h2;
use tunnel_proto::wire::control::{CAPABILITY_RENEW, ControlMessage, Welcome};
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::SessionId;
use tunnel_proto::wire::{ALPN_SESSION_TCP, VERSION_MAX, VERSION_MIN};
use tunnel_tests::env::{Agent, TestEnv};
use tunnel_tests::eventually::scaled;

use super::super::scripted::settings;
use super::short_lives;

/// The thief answers a renewal with a CA of its own next to the true one. The agent takes nothing of
/// it, and the true server has the agent again.
#[tokio::test(flavor = "multi_thread")]
async fn thief_of_a_servers_leaf_moves_no_agent_to_another_ca() -> Result<()> {
    let env = short_lives(10).await?;
    let h2 = |config: &mut tunnel_agent::config::Config| config.transport = TransportChoice::H2;
    env.agent_with("worker-1", h2).await?.stop().await?;

    let thief = Thief::start(&env).await?;
    let servers = vec![thief.address.to_string(), env.bound().agents.to_string()];
    let mut config = env.agent_config_with("worker-1", |settings| settings.server = servers)?;
    h2(&mut config);
    let _agent = Agent::start(config).await?;
    // A session, an answered renewal, and then another renewal or, with a certificate of the thief,
    // another session.
    thief.has_acted(3).await?;
    drop(thief);

    env.connected("worker-1").await;
    let trusted = std::fs::read(env.path().join("agent-worker-1/ca.crt"))?;
    ensure!(chain(&trusted)? == [env.ca().root()], "another CA");
    Ok(())
}

/// A server with a stolen certificate. Its sessions end with the value.
struct Thief {
    address: SocketAddr,
    /// Number of admitted sessions and answered renewals.
    acted: watch::Receiver<usize>,
    _serving: JoinSet<()>,
}

impl Thief {
    async fn start(env: &TestEnv) -> Result<Self> {
        let own = LocalCa::new(Arc::new(CaMaterial::generate(SystemTime::now())?))?;
        let roots = [env.ca().root(), own.root()];
        let trusted = tls::roots(roots.iter().cloned())?;
        let tls = tls::session_server_of_roots(Arc::new(stolen(env)?), trusted, ALPN_SESSION_TCP)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (acts, acted) = watch::channel(0);
        let answering = Arc::new(Answering {
            own,
            roots: roots.iter().map(|root| root.to_vec()).collect(),
            acts,
        });
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut sessions = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (answering, tls) = (answering.clone(), TlsAcceptor::from(tls.clone()));
                // A session ends when the agent leaves.
                sessions.spawn(async move { answering.serve(socket, tls).await });
            }
        });
        Ok(Self {
            address,
            acted,
            _serving: serving,
        })
    }

    /// Waits until the thief has admitted sessions and answered renewals so often.
    async fn has_acted(&self, times: usize) -> Result<()> {
        let mut acted = self.acted.clone();
        let waited = acted.wait_for(|count| *count >= times);
        timeout(scaled(TIMEOUT), waited).await??;
        Ok(())
    }
}

/// How the thief answers agents.
struct Answering {
    own: LocalCa,
    /// Those of the true CA and of the thief's own.
    roots: Vec<Vec<u8>>,
    acts: watch::Sender<usize>,
}

impl Answering {
    async fn serve(&self, socket: TcpStream, tls: TlsAcceptor) -> Result<()> {
        let stream = tls.accept(h2::ReadAhead::new(socket)).await?;
        let session = h2::accept(stream, &settings()).await?;
        let kind = StreamKind::Control {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
        };
        let stream = session.open(&StreamHeader::new(kind), TIMEOUT).await?;
        let (mut reader, mut writer) = control::split(stream);
        let hello = reader.receive().await?;
        ensure!(matches!(hello, Some(ControlMessage::Hello(_))), "{hello:?}");
        writer.send(&ControlMessage::Welcome(welcome()?)).await?;
        self.acts.send_modify(|count| *count += 1);
        while let Some(message) = reader.receive().await? {
            let ControlMessage::Renew(csr) = message else {
                continue;
            };
            let chain = self.own.issue_agent(&csr, &"worker-1".parse()?)?.chain;
            let reply = EnrollReply::Issued {
                chain: chain.iter().map(|der| der.to_vec()).collect(),
                roots: self.roots.clone(),
            };
            writer.send(&ControlMessage::Renewed(reply)).await?;
            self.acts.send_modify(|count| *count += 1);
        }
        Ok(())
    }
}

fn welcome() -> Result<Welcome> {
    Ok(Welcome {
        version: 1,
        session: SessionId(1),
        capabilities: vec![CAPABILITY_RENEW.to_owned()],
        streams_per_agent: 64,
        target_dial_timeout: TIMEOUT,
        replica_id: "server".parse()?,
        members: Vec::new(),
    })
}

/// Returns a server's certificate of the environment's CA with its key.
fn stolen(env: &TestEnv) -> Result<SingleCertAndKey> {
    let ca_key = std::fs::read_to_string(env.path().join("server/ca.key"))?;
    let name = common_name(&env.ca().root()).context("name of the CA")?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let issuer = Issuer::new(params, KeyPair::from_pem(&ca_key)?);
    let mut leaf = CertificateParams::default();
    leaf.subject_alt_names = vec![SanType::URI(Ia5String::try_from("culvert://server")?)];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let chain = vec![leaf.signed_by(&key, &issuer)?.der().clone()];
    let key = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
    Ok(SingleCertAndKey::from(CertifiedKey::clone(
        &*tls::certified_key(chain, key)?,
    )))
}

/// Longer than half of a certificate's life, and than the wait for another request.
const TIMEOUT: Duration = Duration::from_secs(40);
