//! The CONNECT listeners: kube-apiserver's egress selector, Prometheus' proxy_url, ssh and ansible.

mod callers;
mod dial_policy;
pub(crate) mod egress;
mod listener;
mod prometheus;
mod rights;
mod ssh;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustls::RootCertStore;
use tunnel_server::config::RawConfig;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{ClientTls, EgressDialer, Endpoint};
use tunnel_tests::env::TestEnv;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::FakeKubelet;

const NODE: &str = "worker-1";
/// DNS name of the CONNECT listener over TCP.
const LISTENER: &str = "tunnel.example";

/// A test environment with a CONNECT listener on a Unix socket. The dial policy also lets the
/// server dial this host's loopback directly.
struct ConnectFixture {
    env: TestEnv,
    socket: PathBuf,
    _scratch: ScratchDir,
}

impl ConnectFixture {
    async fn start() -> Result<Self> {
        Self::start_with(|_| {}).await
    }

    async fn start_with(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let socket = scratch.path().join("connect.sock");
        let env = TestEnv::start_with(|settings| {
            settings.connect_uds = Some(socket.to_string_lossy().into_owned());
            settings.connect_direct = vec!["127.0.0.0/8".to_owned()];
            change(settings);
        });
        Ok(Self {
            env: env.await?,
            socket,
            _scratch: scratch,
        })
    }

    /// Adds a CONNECT listener over TCP. The listener serves TLS as [`LISTENER`] and accepts
    /// callers with certificates of the CA in the file `callers`.
    async fn mutual(ca: &TestCa, scratch: &ScratchDir, callers: &Path) -> Result<Self> {
        let serving = ca.issue(&Leaf::target(LISTENER))?;
        let (certificate, key) = serving.write(scratch.path(), "https")?;
        Self::over_tcp(|settings| {
            settings.client_ca = text(callers);
            settings.https_cert_file = text(&certificate);
            settings.https_key_file = text(&key);
        })
        .await
    }

    /// Adds a CONNECT listener over TCP that requires the passwords in the file.
    async fn with_passwords(file: &Path) -> Result<Self> {
        Self::over_tcp(|settings| settings.connect_auth = text(file)).await
    }

    /// Adds a CONNECT listener over TCP.
    async fn over_tcp(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        Self::start_with(|settings| {
            settings.connect_listen = Some("127.0.0.1:0".to_owned());
            change(settings);
        })
        .await
    }

    /// Returns the address of the CONNECT listener over TCP.
    fn tcp(&self) -> Result<SocketAddr> {
        self.env.bound().connect.context("no CONNECT listener")
    }

    fn dialer(&self) -> EgressDialer {
        EgressDialer::uds(&self.socket)
    }

    fn tls_dialer(&self, tls: ClientTls) -> Result<EgressDialer> {
        Ok(EgressDialer::tcp(Endpoint::tls(self.tcp()?, tls)))
    }
}

/// Returns the TLS configuration of a caller with this certificate. The caller verifies the
/// server as `name` against the CA.
fn caller_tls(ca: &TestCa, name: &str, certificate: Option<&Issued>) -> Result<ClientTls> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.root().clone())?;
    let presented = certificate.map(Issued::presented).transpose()?;
    ClientTls::verifying(name, roots, presented)
}

/// Starts a kubelet of [`NODE`] with a certificate of the cluster's CA.
async fn kubelet(ca: &TestCa) -> Result<FakeKubelet> {
    let serving = ca.issue(&Leaf::target(NODE))?.serving()?;
    FakeKubelet::start_on(([127, 0, 0, 1], 0).into(), NODE, Some(serving)).await
}

fn text(path: &Path) -> Option<String> {
    Some(path.to_string_lossy().into_owned())
}

/// Returns a request that asks the target to close the connection.
fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}
