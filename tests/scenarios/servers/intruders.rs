//! Certificates that are not for the listener on which they are presented: the listener for other
//! servers admits servers only, and the listener for agents admits no server.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use rustls::ClientConfig;
use rustls::client::ResolvesClientCert;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_proto::tls::{self, PeerTrust, Trust};
use tunnel_proto::wire::ALPN_SESSION_TCP;
use tunnel_server::ca::{CaMaterial, LocalCa, SourceNames};
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::Listener;

use super::{CONNECT, NODE, Servers, wait_for};
use crate::scripted::issue_agent_key;

#[tokio::test(flavor = "multi_thread")]
async fn servers_and_agents_are_admitted_on_their_own_listeners_only() -> Result<()> {
    let servers = Servers::start(2, &[]).await?;
    let first = &servers.servers[0];
    let ca = ca_in(Path::new(first.data_dir()))?;
    let other_ca = CaMaterial::generate(SystemTime::now())?;
    let other_ca = Arc::new(LocalCa::new(Arc::new(other_ca))?);
    let server = peer_key(&ca, "s9")?;
    let foreign = peer_key(&other_ca, "s9")?;
    let agent = issue_agent_key(&ca, NODE)?;

    let at_peers = async |key: &Arc<CertifiedKey>| {
        let trust = PeerTrust::new(tls::roots(ca.roots())?)?;
        let own = Arc::new(SingleCertAndKey::from(key.clone()));
        greeted(servers.peers[0], tls::peer_client(own, trust)?).await
    };
    at_peers(&server).await.context("a server")?;
    for (what, key) in [("another CA's", &foreign), ("an agent's", &agent)] {
        ensure!(at_peers(key).await.is_err(), "{what} certificate passed");
    }

    let agents = first.address(Listener::Agents);
    let at_agents = async |key: &Arc<CertifiedKey>| {
        let trust = Trust::Roots(tls::roots(ca.roots())?);
        let config = tls::session_client(key.clone(), trust, ALPN_SESSION_TCP)?;
        greeted(agents, config).await
    };
    at_agents(&agent).await.context("an agent")?;
    ensure!(at_agents(&server).await.is_err(), "a server passed");

    // The connections of the servers are still there.
    wait_for(first, "tunnel_server_peers{state=\"connected\"}", 1).await;
    Ok(())
}

/// Returns the CA in a data directory.
fn ca_in(data_dir: &Path) -> Result<Arc<LocalCa>> {
    let names = SourceNames {
        certificates: "ca.crt",
        key: "ca.key",
    };
    let read = |name: &str| std::fs::read(data_dir.join(name));
    let material = CaMaterial::parse(&read(names.certificates)?, &read(names.key)?, names)?;
    Ok(Arc::new(LocalCa::new(Arc::new(material))?))
}

/// Issues a certificate for the server `name`.
fn peer_key(ca: &Arc<LocalCa>, name: &str) -> Result<Arc<CertifiedKey>> {
    let resolver = ca.peer_resolver(name.parse()?);
    resolver.resolve(&[], &[]).context("no certificate")
}

/// Connects, and waits for the first byte of the server, which follows the verification of the
/// certificate.
async fn greeted(address: SocketAddr, config: Arc<ClientConfig>) -> Result<()> {
    let tcp = TcpStream::connect(address).await?;
    let name = "tunnel-server.culvert".try_into()?;
    let mut stream = TlsConnector::from(config).connect(name, tcp).await?;
    timeout(scaled(CONNECT), stream.read_u8()).await??;
    Ok(())
}
