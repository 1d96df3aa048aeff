//! The CONNECT listeners: kube-apiserver's egress selector, Prometheus' proxy_url, ssh and ansible.

mod callers;
mod dial_policy;
mod egress;
mod listener;
mod prometheus;
mod rights;
mod ssh;
mod stalls;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tunnel_server::config::RawConfig;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{ClientCertificate, ClientTls, EgressDialer};
use tunnel_tests::env::TestEnv;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::{FakeKubelet, TargetTls};

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
    /// callers with certificates of the CA in the file `ca`.
    async fn mutual(pki: &Pki, scratch: &ScratchDir, ca: &Path) -> Result<Self> {
        let serving = pki.ca.issue(&Leaf {
            uri: None,
            dns: Some(LISTENER.to_owned()),
            ..Leaf::server()
        })?;
        let (certificate, key) = serving.write(scratch.path(), "https")?;
        let text = |path: &Path| Some(path.to_string_lossy().into_owned());
        Self::start_with(|settings| {
            settings.connect_listen = Some("127.0.0.1:0".to_owned());
            settings.client_ca = text(ca);
            settings.https_cert_file = text(&certificate);
            settings.https_key_file = text(&key);
        })
        .await
    }

    fn dialer(&self) -> EgressDialer {
        EgressDialer::uds(&self.socket)
    }
}

/// The CA of a cluster, which issues kubelets' serving certificates and callers' certificates.
struct Pki {
    ca: TestCa,
}

impl Pki {
    fn new() -> Result<Self> {
        Ok(Self {
            ca: TestCa::new("cluster")?,
        })
    }

    fn serving(&self, dns: &str) -> Result<TargetTls> {
        let issued = self.ca.issue(&Leaf {
            uri: None,
            dns: Some(dns.to_owned()),
            ..Leaf::server()
        })?;
        TargetTls::from_pem(&issued.certificate, &issued.key)
    }

    fn client(&self) -> Result<Issued> {
        self.ca.issue(&Leaf {
            uri: None,
            ..Leaf::agent("")
        })
    }

    /// Returns the TLS configuration of a caller with this certificate. The caller verifies the
    /// server as `name` against the CA.
    fn tls(&self, name: &str, certificate: Option<&Issued>) -> Result<ClientTls> {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.root().clone())?;
        ClientTls::verifying(
            name,
            roots,
            certificate.map(client_certificate).transpose()?,
        )
    }
}

fn client_certificate(issued: &Issued) -> Result<ClientCertificate> {
    let chain = CertificateDer::from_pem_slice(issued.certificate.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes())?;
    Ok((vec![chain], key))
}

/// Starts a kubelet of [`NODE`] with a certificate of the cluster's CA.
async fn kubelet(pki: &Pki) -> Result<FakeKubelet> {
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    FakeKubelet::start_on(any, NODE, Some(pki.serving(NODE)?)).await
}

/// Returns a request that asks the target to close the connection.
fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}
