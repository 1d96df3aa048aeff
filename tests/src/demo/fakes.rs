//! Fake servers that run as processes, so that they can be inside a namespace.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::time::interval;

use crate::apiserver::{FakeApiServer, Setup};
use crate::dns::{Behavior, FakeResolver};
use crate::netns::Namespace;
use crate::process::{Process, Program};
use crate::targets::{Exporter, FakeKubelet, TargetTls};

/// Starts fake targets of `node` inside `namespace`: an exporter on the first address, a kubelet on
/// the second.
///
/// # Errors
/// Returns an error with their output if they cannot be started.
pub async fn site(
    node: &str,
    exporter: Option<SocketAddr>,
    kubelet: Option<SocketAddr>,
    namespace: Option<&Namespace>,
) -> Result<Process> {
    let mut program = Program::ours(PROGRAM)?.args(["site", node]);
    for (flag, address) in [("--exporter", exporter), ("--kubelet", kubelet)] {
        if let Some(address) = address {
            program = program.arg(flag).arg(address.to_string());
        }
    }
    start(program, namespace).await
}

/// Starts a resolver on `address` inside `namespace` that prints `asked NAME` for each query. The
/// resolver `answers`, or is `silent`.
///
/// # Errors
/// Returns an error with its output if it cannot be started.
pub async fn resolver(
    namespace: Option<&Namespace>,
    address: SocketAddr,
    behavior: &str,
) -> Result<Process> {
    let program = Program::ours(PROGRAM)?.args(["resolver", &address.to_string(), behavior]);
    start(program, namespace).await
}

/// A fake API server inside a namespace, on its loopback.
#[derive(Debug)]
pub struct ApiServer {
    /// The process, which ends on drop.
    pub process: Process,
    /// Kubeconfig with all permissions.
    pub admin: PathBuf,
    /// Kubeconfigs of the ServiceAccounts in the requested order.
    pub accounts: Vec<PathBuf>,
}

/// Starts a fake API server inside `namespace`, with ServiceAccounts written `NAMESPACE/NAME`.
///
/// # Errors
/// Returns an error with its output if it cannot be started.
pub async fn api_server(namespace: Option<&Namespace>, accounts: &[&str]) -> Result<ApiServer> {
    let program = Program::ours(PROGRAM)?
        .arg("apiserver")
        .args(accounts.to_vec());
    let process = start(program, namespace).await?;
    let mut files: Vec<PathBuf> = process
        .log()
        .lines()
        .iter()
        .filter_map(|line| line.strip_prefix(KUBECONFIG).map(PathBuf::from))
        .collect();
    ensure!(files.len() == 1 + accounts.len(), "kubeconfigs: {process}");
    let admin = files.remove(0);
    Ok(ApiServer {
        process,
        admin,
        accounts: files,
    })
}

/// Starts a fake server inside `namespace` and waits until it is ready.
async fn start(program: Program, namespace: Option<&Namespace>) -> Result<Process> {
    let mut process = program.inside(namespace).in_own_group().start()?;
    process
        .wait_for_line("readiness", START, |line| (line == READY).then_some(()))
        .await?;
    Ok(process)
}

/// Runs the fake server that the arguments name.
pub(super) async fn run(args: &[&str]) -> Result<()> {
    match *args {
        ["site", node, ref listeners @ ..] => serve_site(node, listeners).await,
        ["resolver", address, behavior] => serve_resolver(address.parse()?, behavior).await,
        ["apiserver", ref accounts @ ..] => serve_api(accounts).await,
        _ => bail!("unknown arguments {args:?}; see --help"),
    }
}

async fn serve_site(node: &str, listeners: &[&str]) -> Result<()> {
    let (mut exporters, mut kubelets) = (Vec::new(), Vec::new());
    for listener in listeners.chunks(2) {
        match *listener {
            ["--exporter", address] => {
                exporters.push(Exporter::start_on(address.parse()?, node, None).await?);
            }
            ["--kubelet", address] => {
                let address: SocketAddr = address.parse()?;
                let tls = TargetTls::self_signed(&[node, &address.ip().to_string()])?;
                kubelets.push(FakeKubelet::start_on(address, node, Some(tls)).await?);
            }
            _ => bail!("unknown arguments {listener:?}; see --help"),
        }
    }
    print(READY)?;
    let mut pace = interval(LOG_PACE);
    for number in 1_u64.. {
        pace.tick().await;
        for kubelet in &kubelets {
            kubelet.emit(&format!("{node}: line {number}"));
        }
    }
    Ok(())
}

async fn serve_resolver(address: SocketAddr, behavior: &str) -> Result<()> {
    let behavior = match behavior {
        "answers" => Behavior::Answers(1),
        "silent" => Behavior::Silent,
        other => bail!("{other} is neither answers nor silent"),
    };
    let resolver = FakeResolver::start_on(address, behavior).await?;
    print(READY)?;
    let mut reported = 0;
    let mut pace = interval(LOOK_PACE);
    loop {
        pace.tick().await;
        let asked = resolver.asked();
        for name in asked.iter().skip(reported) {
            print(&format!("asked {name}"))?;
        }
        reported = asked.len();
    }
}

async fn serve_api(accounts: &[&str]) -> Result<()> {
    let split = |account: &&str| {
        let (namespace, name) = account.split_once('/')?;
        Some((namespace.to_owned(), name.to_owned()))
    };
    let service_accounts: Option<Vec<_>> = accounts.iter().map(split).collect();
    let service_accounts = service_accounts.context("accounts are NAMESPACE/NAME")?;
    let server = FakeApiServer::start(Setup {
        service_accounts: service_accounts.clone(),
        ..Setup::default()
    })?;
    let admin = server.admin_kubeconfig()?;
    print(&format!("{KUBECONFIG}{}", admin.display()))?;
    for (namespace, name) in service_accounts {
        let file = server.service_account_kubeconfig(&namespace, &name)?;
        print(&format!("{KUBECONFIG}{}", file.display()))?;
    }
    print(READY)?;
    std::future::pending().await
}

fn print(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("print")
}

/// Name of the binary that contains the fake servers.
const PROGRAM: &str = "demo";

/// The line that a fake server prints when it serves.
const READY: &str = "ready";

/// Prefix of the line with the path of a kubeconfig.
const KUBECONFIG: &str = "kubeconfig ";

/// Time limit for the start of a fake server.
const START: Duration = Duration::from_secs(5);

/// Slow enough to read, fast enough not to wait for.
const LOG_PACE: Duration = Duration::from_millis(200);

/// Interval at which queries of the fake resolver are printed.
const LOOK_PACE: Duration = Duration::from_millis(20);
