//! A real kube-apiserver with its etcd, from binaries as `setup-envtest` brings them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::{Families, SERVICE_ACCOUNT};
use crate::eventually::eventually;
use crate::process::{Process, Program, ScratchDir};
use crate::tools::Skip;

/// A running kube-apiserver; nothing else of a control plane.
#[derive(Debug)]
pub struct Real {
    scratch: ScratchDir,
    _etcd: Process,
    _apiserver: Process,
}

impl Real {
    /// The folder with both binaries.
    ///
    /// # Errors
    /// [`Skip`] when `KUBEBUILDER_ASSETS` names none.
    pub fn binaries() -> Result<PathBuf, Skip> {
        let folder = std::env::var_os(VARIABLE).map(PathBuf::from);
        let complete = |folder: &PathBuf| {
            ["etcd", "kube-apiserver"]
                .iter()
                .all(|name| folder.join(name).is_file())
        };
        folder.filter(complete).ok_or_else(|| {
            Skip::because(format!(
                "needs etcd and kube-apiserver in the folder that {VARIABLE} names"
            ))
        })
    }

    /// Starts both, with a token for an administrator and one for the server's ServiceAccount.
    ///
    /// # Errors
    /// One of them cannot be run.
    ///
    /// # Panics
    /// When the API server does not become ready.
    pub async fn start(binaries: &Path, families: Families) -> Result<Self> {
        Self::start_with(binaries, families, &[]).await
    }

    /// The same with further flags of kube-apiserver.
    ///
    /// # Errors
    /// As [`Real::start`].
    ///
    /// # Panics
    /// As [`Real::start`].
    pub async fn start_with(binaries: &Path, families: Families, flags: &[String]) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let [clients, peers, api] = free_ports()?;
        let etcd = Program::at(&binaries.join("etcd"))
            .arg(format!(
                "--data-dir={}",
                scratch.path().join("etcd").display()
            ))
            .args([
                format!("--listen-client-urls=http://{clients}"),
                format!("--advertise-client-urls=http://{clients}"),
            ])
            .args([
                format!("--listen-peer-urls=http://{peers}"),
                format!("--initial-advertise-peer-urls=http://{peers}"),
            ])
            .args([
                format!("--initial-cluster=default=http://{peers}"),
                "--unsafe-no-fsync=true".to_owned(),
            ])
            .start()?;
        let (namespace, name) = SERVICE_ACCOUNT;
        let tokens = format!(
            "{ADMIN_TOKEN},admin,1,\"system:masters\"\n{SERVER_TOKEN},system:serviceaccount:{namespace}:{name},2,\"system:serviceaccounts,system:serviceaccounts:{namespace}\"\n"
        );
        let tokens = scratch.file("tokens.csv", tokens)?;
        let key = scratch.file("accounts.key", rcgen::KeyPair::generate()?.serialize_pem())?;
        let certificates = scratch.path().join("certificates");
        let apiserver = Program::at(&binaries.join("kube-apiserver"))
            .args([
                format!("--etcd-servers=http://{clients}"),
                format!("--secure-port={}", api.port()),
            ])
            .args([
                format!("--bind-address={}", api.ip()),
                format!("--advertise-address={}", api.ip()),
            ])
            .args([
                format!("--cert-dir={}", certificates.display()),
                format!("--token-auth-file={}", tokens.display()),
            ])
            .args([
                format!("--service-cluster-ip-range={}", families.ranges()),
                "--authorization-mode=RBAC".to_owned(),
            ])
            .args([
                "--service-account-issuer=https://kubernetes.default.svc",
                "--disable-admission-plugins=ServiceAccount",
            ])
            .args([
                format!("--service-account-key-file={}", key.display()),
                format!("--service-account-signing-key-file={}", key.display()),
            ])
            .args(flags)
            .start()?;
        let real = Self {
            scratch,
            _etcd: etcd,
            _apiserver: apiserver,
        };
        let ca = certificates.join("apiserver.crt");
        eventually("kube-apiserver's certificate", START, async || {
            ca.is_file().then_some(())
        })
        .await;
        for (file, token) in [(ADMIN_FILE, ADMIN_TOKEN), (SERVER_FILE, SERVER_TOKEN)] {
            real.write_kubeconfig(file, token, api, &ca)?;
        }
        Ok(real)
    }

    fn write_kubeconfig(&self, file: &str, token: &str, api: SocketAddr, ca: &Path) -> Result<()> {
        // Its own certificate is self-signed, for the address that it advertises.
        let cluster = json!({ "server": format!("https://{api}"), "certificate-authority": ca });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test", "namespace": SERVICE_ACCOUNT.0 } }],
        });
        self.scratch
            .file(file, config.to_string())
            .context("kubeconfig")
            .map(drop)
    }

    pub(super) fn admin_kubeconfig(&self) -> PathBuf {
        self.scratch.path().join(ADMIN_FILE)
    }

    pub(super) fn server_kubeconfig(&self) -> PathBuf {
        self.scratch.path().join(SERVER_FILE)
    }
}

/// Ports that were free a moment ago: neither program can be told to choose its own and say which.
fn free_ports<const N: usize>() -> Result<[SocketAddr; N]> {
    let listeners: Vec<_> = (0..N)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .collect::<Result<_, _>>()?;
    let ports: Vec<_> = listeners
        .iter()
        .map(TcpListener::local_addr)
        .collect::<Result<_, _>>()?;
    ports.try_into().ok().context("free ports")
}

/// A cold start of both.
pub(super) const START: Duration = Duration::from_secs(30);

const VARIABLE: &str = "KUBEBUILDER_ASSETS";
const ADMIN_TOKEN: &str = "token-of-the-administrator";
const SERVER_TOKEN: &str = "token-of-the-server";
const ADMIN_FILE: &str = "admin.kubeconfig";
const SERVER_FILE: &str = "server.kubeconfig";
