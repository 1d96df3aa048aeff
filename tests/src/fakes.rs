//! Fake servers that run as processes, so that they can be inside a namespace.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::time::interval;

use crate::apiserver::{FakeApiServer, Setup};
use crate::dns::{Behavior, FakeResolver};
use crate::netns::{EDGE_ADDRESS, Namespace, Topology};
use crate::process::{Process, Program};
use crate::targets::{Exporter, FakeKubelet, TargetTls};

/// Starts the fake targets of both edges: an exporter on port 9100 and a kubelet on port 10250.
pub async fn edge_sites(topology: &Topology) -> Result<Vec<Process>> {
    let [exporter, kubelet] =
        [EXPORTER_PORT, KUBELET_PORT].map(|port| SocketAddr::new(EDGE_ADDRESS.into(), port));
    let mut sites = Vec::new();
    for edge in topology.edges() {
        sites.push(site(edge.node_name(), exporter, kubelet, Some(edge.node())).await?);
    }
    Ok(sites)
}

/// Starts the fake targets of `node` inside `namespace`.
pub async fn site(
    node: &str,
    exporter: SocketAddr,
    kubelet: SocketAddr,
    namespace: Option<&Namespace>,
) -> Result<Process> {
    let (exporter, kubelet) = (exporter.to_string(), kubelet.to_string());
    let args = ["site", node, "--exporter", &exporter, "--kubelet", &kubelet];
    start(Program::ours(PROGRAM)?.args(args), namespace).await
}

/// Starts a resolver on `address` inside `namespace` that prints `asked NAME` for each query. The
/// resolver `answers`, or is `silent`.
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
    /// Kubeconfig of the ServiceAccount.
    pub account: PathBuf,
}

/// Starts a fake API server inside `namespace`, with a ServiceAccount written `NAMESPACE/NAME`.
pub async fn api_server(namespace: &Namespace, account: &str) -> Result<ApiServer> {
    let program = Program::ours(PROGRAM)?.args(["apiserver", account]);
    let process = start(program, Some(namespace)).await?;
    let lines = process.log().lines();
    let mut files = lines
        .iter()
        .filter_map(|line| line.strip_prefix(KUBECONFIG))
        .map(PathBuf::from);
    let files = files.next().zip(files.next());
    let (admin, account) = files.with_context(|| format!("no kubeconfigs; {process}"))?;
    Ok(ApiServer {
        process,
        admin,
        account,
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

/// Runs the fake server that the arguments of the program name.
pub async fn run(arguments: &[String]) -> Result<()> {
    let args: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *args {
        ["site", node, "--exporter", exporter, "--kubelet", kubelet] => {
            serve_site(node, exporter.parse()?, kubelet.parse()?).await
        }
        ["resolver", address, behavior] => serve_resolver(address.parse()?, behavior).await,
        ["apiserver", account] => serve_api(account).await,
        _ => bail!("unknown arguments {args:?}; expected\n{USAGE}"),
    }
}

async fn serve_site(node: &str, exporter: SocketAddr, kubelet: SocketAddr) -> Result<()> {
    let _exporter = Exporter::start_on(exporter, node, None).await?;
    let tls = TargetTls::self_signed(&[node, &kubelet.ip().to_string()])?;
    let kubelet = FakeKubelet::start_on(kubelet, node, Some(tls)).await?;
    print(READY)?;
    let mut pace = interval(LOG_PACE);
    for number in 1_u64.. {
        pace.tick().await;
        kubelet.emit(&format!("{node}: line {number}"));
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

async fn serve_api(account: &str) -> Result<()> {
    let (namespace, name) = account
        .split_once('/')
        .context("an account is NAMESPACE/NAME")?;
    let server = FakeApiServer::start(Setup {
        service_accounts: vec![(namespace.to_owned(), name.to_owned())],
        ..Setup::default()
    })?;
    let account = server.service_account_kubeconfig(namespace, name)?;
    for file in [server.admin_kubeconfig()?, account] {
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

/// Port of the exporters of [`edge_sites`].
pub const EXPORTER_PORT: u16 = 9100;
/// Port of the kubelets of [`edge_sites`].
pub const KUBELET_PORT: u16 = 10250;

/// Name of the binary that contains the fake servers.
pub const PROGRAM: &str = "fakes";

const USAGE: &str = "\
site NODE --exporter ADDR --kubelet ADDR   targets of a node
resolver ADDR answers|silent               a resolver that prints each query
apiserver NAMESPACE/ACCOUNT                an API server that prints the paths of its kubeconfigs";

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
