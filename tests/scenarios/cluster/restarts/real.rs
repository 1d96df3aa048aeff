//! A rolling restart below a real kube-apiserver, which reaches the kubelets through its egress
//! selector. A balancer of Unix sockets stands for the Service of the CONNECT listeners.

mod execs;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tunnel_tests::cluster::{Cluster, Real, egress_flag};
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::Gear;
use tunnel_tests::netns::{CLOUD_ADDRESS, in_service_namespace};
use tunnel_tests::process::{Process, ScratchDir};
use tunnel_tests::targets::{FakeKubelet, TargetTls};
use tunnel_tests::tools::or_skip;

use super::super::kubectl::{Kubectl, kubectls};
use super::super::replicas::{Backend, Installation, Moment, Plan, Timing, on_own_address};
use super::super::{ClusterEnv, FIRST};
use super::{DRAIN_IS_OVER, LIMIT, agents};

/// kubectl follows logs and runs commands, and reads more logs during the restart. The callers ask
/// each node several times a second, so a node that is away for a second fails a request.
///
/// The log of the server has the reason for the end of a stream: kubectl exits with 0 if the
/// connection of a command ends without a `Status` (client-go, `remotecommand/errorstream.go`).
#[tokio::test(flavor = "multi_thread")]
async fn real_followed_logs_and_execs_last_until_the_drain_ends() -> Result<()> {
    if or_skip(Real::binaries()).is_none() {
        return Ok(());
    }
    let test = "cluster::restarts::real::real_followed_logs_and_execs_last_until_the_drain_ends";
    in_service_namespace(test, LIMIT, rolling_restart).await
}

async fn rolling_restart() -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let socket = scratch.path().join("egress.sock");
    let Some(cluster) = Cluster::real_with(&[egress_flag(&scratch, &socket)?]).await? else {
        return Ok(());
    };
    let file = files.into_iter().next().context("a kubectl")?;
    let kubectl = Kubectl::new(file, cluster.admin_kubeconfig()?)?;
    let kubelet = kubelet(agents()).await?;
    let folder = scratch.path().to_owned();
    let plan = Plan {
        cluster_env: ClusterEnv { cluster, scratch },
        servers: 3,
        agents: agents(),
        virtual_ports: None,
        launch: Box::new(|cluster_env: &ClusterEnv, _: usize, name: &str| {
            // The API accepts no loopback address in an EndpointSlice.
            let peers = format!("{CLOUD_ADDRESS}:0");
            let socket = connect_socket(cluster_env.scratch.path(), name);
            let setup = on_own_address(cluster_env, name)?.args(&["--peer-listen", &peers]);
            Ok(setup.args(&["--connect-uds", &socket.to_string_lossy()]))
        }),
    };
    let mut site = Installation::start(plan).await?;
    let _balancer = balancer(&socket, folder, site.backends.subscribe())?;
    site.settle().await;
    create_pods(&site).await?;
    let mut running = follow_logs(&kubectl).await?;
    execs::ensure_ends_are_reported(&kubectl, &pod_name(1)).await?;
    let mut execs = execs::start(&kubectl).await?;
    let callers = site.start_callers();
    site.restart_all(async |_, moment| match moment {
        Moment::Stopping => {
            let timing = Timing::current();
            let until = Instant::now() + timing.drain_delay + timing.drain_timeout / 2;
            call_until(&kubectl, until).await?;
            all_go_on(&kubelet, &running).await?;
            execs::all_go_on(&mut execs).await
        }
        Moment::Ended(old) => {
            let before = running.len() + execs.len();
            running = still_running(std::mem::take(&mut running)).await;
            execs = execs::still_running(std::mem::take(&mut execs)).await;
            let has_ended = running.len() + execs.len() < before;
            let is_over = old.server.log().contains(DRAIN_IS_OVER);
            ensure!(is_over || !has_ended, "{}", old.server.log());
            all_go_on(&kubelet, &running).await?;
            execs::all_go_on(&mut execs).await
        }
    })
    .await?;
    let open = running.len() + execs.len();
    ensure!(open == 0, "{open} on new servers");
    callers.end(100).await?.ensure_served()
}

/// Starts the kubelet of all nodes, which have the address of their agents. The namespace of the
/// test has no other program on its port.
async fn kubelet(nodes: usize) -> Result<FakeKubelet> {
    let names: Vec<_> = (1..=nodes).map(|node| format!("worker-{node}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let tls = TargetTls::self_signed(&names)?;
    FakeKubelet::start_on(([127, 0, 0, 1], KUBELET_PORT).into(), "worker", Some(tls)).await
}

/// Creates a Pod on each node.
async fn create_pods(site: &Installation) -> Result<()> {
    for (number, node) in (1..).zip(&site.nodes) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod_name(number) },
            "spec": { "nodeName": node, "containers": [{ "name": "app", "image": "none" }] },
        });
        let pods = "/api/v1/namespaces/default/pods";
        site.cluster_env.admin().create(pods, &pod).await?;
    }
    Ok(())
}

fn pod_name(number: usize) -> String {
    format!("web-{number}")
}

/// Starts commands of kubectl that follow logs, of all Pods in turn. Each prints lines until it
/// ends.
async fn follow_logs(kubectl: &Kubectl) -> Result<Vec<Process>> {
    let logs = Gear::current().pick(6, 20);
    let mut running = Vec::new();
    for pod in (1..=agents()).cycle().map(pod_name).take(logs) {
        let program = kubectl.program(&format!("logs -f {pod}"));
        running.push(program.start()?);
    }
    for process in &running {
        eventually("the first line of kubectl", FIRST, async || {
            let is_printing = !process.log().lines().is_empty();
            ensure!(is_printing, "nothing was printed");
            Ok(())
        })
        .await;
    }
    Ok(running)
}

/// Reads the logs of all Pods in turn until a moment. No call may fail.
async fn call_until(kubectl: &Kubectl, until: Instant) -> Result<()> {
    for pod in (1..=agents()).cycle().map(pod_name) {
        if Instant::now() >= until {
            break;
        }
        let log = kubectl.ok(&format!("logs {pod}")).await?;
        ensure!(log.contains(&pod), "{pod}: {log}");
    }
    Ok(())
}

/// Fails unless each command prints another line.
async fn all_go_on(kubelet: &FakeKubelet, running: &[Process]) -> Result<()> {
    let printed: Vec<_> = (running.iter())
        .map(|process| process.log().lines().len())
        .collect();
    kubelet.emit("the log goes on");
    for (process, printed) in running.iter().zip(printed) {
        eventually("another line", FIRST, async || {
            let lines = process.log().lines().len();
            ensure!(lines > printed, "{process}");
            Ok(())
        })
        .await;
    }
    Ok(())
}

/// Returns the commands that have not ended.
async fn still_running(all: Vec<Process>) -> Vec<Process> {
    let mut running = Vec::new();
    for mut process in all {
        if process.end(QUIET).await.is_err() {
            running.push(process);
        }
    }
    running
}

/// Accepts connections on `socket` and connects each with the next server that takes callers.
fn balancer(
    socket: &Path,
    folder: PathBuf,
    backends: watch::Receiver<Vec<Backend>>,
) -> Result<JoinSet<()>> {
    let listener = UnixListener::bind(socket).context("the socket of the balancer")?;
    let mut accepting = JoinSet::new();
    accepting.spawn(async move {
        let mut connections = JoinSet::new();
        let mut accepted = 0;
        while let Ok((mut caller, _)) = listener.accept().await {
            accepted += 1;
            let name = {
                let backends = backends.borrow();
                let next = backends.get(accepted % backends.len().max(1));
                next.map(|backend| backend.name.clone())
            };
            // Without a server the connection is closed.
            let Some(name) = name else { continue };
            let server = connect_socket(&folder, &name);
            connections.spawn(async move {
                if let Ok(mut server) = UnixStream::connect(server).await {
                    // The caller sees the end of the connection.
                    let _ended = tokio::io::copy_bidirectional(&mut caller, &mut server).await;
                }
            });
        }
    });
    Ok(accepting)
}

/// Returns the path of the CONNECT listener of a server.
fn connect_socket(folder: &Path, server: &str) -> PathBuf {
    folder.join(format!("{server}.sock"))
}

const KUBELET_PORT: u16 = 10250;
/// Time in which kubectl ends after its connection.
const QUIET: Duration = Duration::from_millis(500);
