//! A real kube-apiserver with its etcd, from binaries as `setup-envtest` installs them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::{Families, SERVICE_ACCOUNT};
use crate::apiserver::kubeconfig;
use crate::netns::Namespace;
use crate::process::{Log, Process, Program, ScratchDir, Signal};
use crate::tools::Skip;

/// A running kube-apiserver, without the rest of a control plane.
#[derive(Debug)]
pub struct Real {
    scratch: ScratchDir,
    _etcd: Process,
    etcd: SocketAddr,
    program: Program,
    apiserver: Process,
}

impl Real {
    /// Returns the directory with both binaries.
    ///
    /// # Errors
    /// Returns [`Skip`] if `KUBEBUILDER_ASSETS` is not set to such a directory.
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
    /// Returns an error if one of them cannot be run or kube-apiserver does not serve, with the end
    /// of its log.
    pub async fn start(binaries: &Path, families: Families) -> Result<Self> {
        Self::start_with(binaries, families, &[], None).await
    }

    /// Like [`Real::start`], with further flags of kube-apiserver, and in a namespace if given.
    pub async fn start_with(
        binaries: &Path,
        families: Families,
        flags: &[String],
        inside: Option<&Namespace>,
    ) -> Result<Self> {
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
            .inside(inside)
            .start()?;
        let (namespace, name) = SERVICE_ACCOUNT;
        let tokens = format!(
            "{ADMIN_TOKEN},admin,1,\"system:masters\"\n{SERVER_TOKEN},system:serviceaccount:{namespace}:{name},2,\"system:serviceaccounts,system:serviceaccounts:{namespace}\"\n"
        );
        let tokens = scratch.file("tokens.csv", tokens)?;
        // Tokens are signed with the private key and verified with the public key: kube-apiserver
        // accepts no private key for the latter.
        let accounts = rcgen::KeyPair::generate()?;
        let private = scratch.file("accounts.key", accounts.serialize_pem())?;
        let public = scratch.file("accounts.pub", accounts.public_key_pem())?;
        let certificates = scratch.path().join("certificates");
        let program = Program::at(&binaries.join("kube-apiserver"))
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
                format!("--service-account-key-file={}", public.display()),
                format!("--service-account-signing-key-file={}", private.display()),
            ])
            .args(flags)
            .inside(inside);
        let apiserver = serving(&program).await?;
        let real = Self {
            scratch,
            _etcd: etcd,
            etcd: clients,
            program,
            apiserver,
        };
        // Self-signed for the address that kube-apiserver advertises, and written before it serves.
        let ca = certificates.join("apiserver.crt");
        // The namespaces match those of the fake API server.
        for (file, token, namespace) in [
            (ADMIN_FILE, ADMIN_TOKEN, "default"),
            (SERVER_FILE, SERVER_TOKEN, SERVICE_ACCOUNT.0),
        ] {
            let config = kubeconfig(api, &ca, &json!({ "token": token }), namespace);
            real.scratch
                .file(file, config.to_string())
                .context("kubeconfig")?;
        }
        Ok(real)
    }

    /// Starts the kube-scheduler next to kube-apiserver.
    ///
    /// # Errors
    /// Returns [`Skip`] in the outer result if the directory has none.
    pub fn scheduler(binaries: &Path, kubeconfig: &Path) -> Result<Result<Process>, Skip> {
        let file = binaries.join("kube-scheduler");
        if !file.is_file() {
            return Err(Skip::because("needs kube-scheduler next to kube-apiserver"));
        }
        let program = Program::at(&file)
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .args(["--leader-elect=false", "--secure-port=0"]);
        Ok(program.start())
    }

    /// Kills kube-apiserver and starts it again, until its port is open. etcd continues to run.
    pub(super) async fn restart(&mut self) -> Result<()> {
        self.apiserver.signal(Signal::Kill)?;
        self.apiserver.end(START).await?;
        self.apiserver = serving(&self.program).await?;
        Ok(())
    }

    /// Returns the address at which etcd serves clients, and its metrics.
    pub(super) fn etcd(&self) -> SocketAddr {
        self.etcd
    }

    /// Returns the log of kube-apiserver.
    pub(super) fn log(&self) -> &Log {
        self.apiserver.log()
    }

    /// Returns a kubeconfig with all permissions.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.scratch.path().join(ADMIN_FILE)
    }

    pub(super) fn server_kubeconfig(&self) -> PathBuf {
        self.scratch.path().join(SERVER_FILE)
    }
}

/// Returns the flag of kube-apiserver that sends the connections to kubelets through the CONNECT
/// listener on `socket`.
pub fn egress_flag(scratch: &ScratchDir, socket: &Path) -> Result<String> {
    let selector = json!({
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{ "name": "cluster", "connection": {
            "proxyProtocol": "HTTPConnect",
            "transport": { "uds": { "udsName": socket } },
        } }],
    });
    let file = scratch.file("egress.yaml", selector.to_string())?;
    Ok(format!("--egress-selector-config-file={}", file.display()))
}

async fn serving(program: &Program) -> Result<Process> {
    let mut apiserver = program.clone().start()?;
    let serving = |line: &str| line.contains(SERVING).then_some(());
    apiserver.wait_for_line(SERVING, START, serving).await?;
    Ok(apiserver)
}

/// Returns ports that were free a moment ago. Neither program can choose its own port and report
/// it.
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

/// Time limit for a cold start of both.
pub(super) const START: Duration = Duration::from_secs(30);

/// Log line of kube-apiserver when its port is open
/// (`k8s.io/apiserver/pkg/server/secure_serving.go`).
const SERVING: &str = "Serving securely";

const VARIABLE: &str = "KUBEBUILDER_ASSETS";
const ADMIN_TOKEN: &str = "token-of-the-administrator";
const SERVER_TOKEN: &str = "token-of-the-server";
const ADMIN_FILE: &str = "admin.kubeconfig";
const SERVER_FILE: &str = "server.kubeconfig";
