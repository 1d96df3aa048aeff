//! Certificates that are not for the listener on which they are presented: the listener for other
//! servers admits servers only, and the listeners for agents and for callers admit no server.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use rustls::ClientConfig;
use rustls::client::ResolvesClientCert;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_ca::{CaMaterial, LocalCa, SourceNames};
use tunnel_proto::tls::{self, PeerTrust, Trust};
use tunnel_proto::wire::ALPN_SESSION_TCP;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::checks::{ensure_contains, ensure_refused};
use tunnel_tests::client::{ClientTls, EgressDialer, Endpoint, RawRequest, request};
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::{Listener, ScratchDir, ServerSetup};
use tunnel_tests::targets::EchoTarget;

use super::forwarded::opened;
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
        let listen = servers.peering.address(0, Listener::Peers);
        greeted(listen, tls::peer_client(own, trust)?).await
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

/// The certificates of callers and those of servers can come from one CA.
#[tokio::test(flavor = "multi_thread")]
async fn server_is_no_caller_of_the_https_and_the_connect_listener() -> Result<()> {
    let (scratch, echo) = (ScratchDir::new()?, EchoTarget::start().await?);
    let ca = TestCa::new("callers and servers")?;
    let caller = ca.issue(&Leaf::caller("s9"))?;
    let peer = ca.issue(&Leaf {
        uri: Some("culvert://peer/s9".to_owned()),
        ..Leaf::caller("s9")
    })?;
    let ca_file = scratch.file("callers.crt", ca.pem())?;
    let ca_file = ca_file.to_string_lossy();
    let data = scratch.path().join("server");
    let setup = ServerSetup::on_loopback(&data)
        .args(&[
            "--http-proxy-ports",
            "1024-65535",
            "--compat",
            "yurt-tunnel",
        ])
        .args(&["--proxy-port-listen", "off", "--client-ca", &ca_file])
        .args(&["--https-client-auth", "require"])
        .args(&["--connect-listen", "127.0.0.1:0"]);
    let mut server = setup.start().await?;
    let is_open = |line: &str| opened(line, "connect", None);
    let connect = server.process().wait_for_line("connect", CONNECT, is_open);
    let connect = connect.await?;
    let folder = scratch.path().join("agent");
    let _agent = server.agent_setup(NODE, &folder).await?.start()?;
    server.wait_until_connected(&[NODE]).await;

    let https = server.address(Listener::Https);
    let get = async |key: &Issued| {
        let page = RawRequest::get("nobody:10250", "/");
        request(as_caller(https, key)?, &page).await
    };
    ensure_refused(&get(&caller).await?, 400, "unknown_node")?;
    let refused = get(&peer).await?;
    ensure_refused(&refused, 403, "refused_by_policy")?;
    ensure_contains(&refused.text(), &[NO_CALLER])?;

    let target = format!("{NODE}:{}", echo.addr().port());
    let dial = async |key: &Issued| {
        let dialer = EgressDialer::tcp(as_caller(connect, key)?);
        dialer.dial(&target).await
    };
    dial(&caller).await.context("a caller")?;
    let Err(refused) = dial(&peer).await else {
        bail!("a server passed");
    };
    ensure_contains(&refused.to_string(), &["code 403", NO_CALLER])
}

/// Returns a listener as the owner of a certificate connects to it.
fn as_caller(listener: SocketAddr, certificate: &Issued) -> Result<Endpoint> {
    let tls = ClientTls::insecure(NODE, Some(certificate.presented()?))?;
    Ok(Endpoint::tls(listener, tls))
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

/// Part of the answer to a certificate of a server.
const NO_CALLER: &str = "belongs to a server of the tunnel";
