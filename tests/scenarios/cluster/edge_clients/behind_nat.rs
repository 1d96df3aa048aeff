//! kubectl in the cloud reaches an API server on an edge node by the rendered kubeconfig, through a
//! CONNECT listener.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::EgressDialer;
use tunnel_tests::cluster::{Cluster, Kind, Real, SERVICE_ACCOUNT, egress_flag};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::in_service_namespace;
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::or_skip;

use super::pods::{LIMIT, NODE, create_pod};
use super::{EdgePair, Kubectl, LONG, kubectls};

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_reaches_the_fake_api_server_behind_an_agent() -> Result<()> {
    let test =
        "cluster::edge_clients::behind_nat::kubectl_reaches_the_fake_api_server_behind_an_agent";
    in_service_namespace(test, LIMIT, async || behind_nat(Kind::FakeApiServer).await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_reaches_a_real_api_server_behind_an_agent() -> Result<()> {
    if or_skip(Real::binaries()).is_none() {
        return Ok(());
    }
    let test =
        "cluster::edge_clients::behind_nat::kubectl_reaches_a_real_api_server_behind_an_agent";
    in_service_namespace(test, LIMIT, async || behind_nat(Kind::Real).await).await
}

async fn behind_nat(kind: Kind) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let socket = scratch.path().join("egress.sock");
    let cluster = match kind {
        Kind::FakeApiServer => Cluster::start(kind).await?,
        Kind::Real => Cluster::real_with(&[egress_flag(&scratch, &socket)?]).await?,
    };
    let Some(cluster) = cluster else {
        return Ok(());
    };
    let _kubelet = create_pod(cluster.admin()).await?;
    if let Ok(fake_api) = cluster.fake_api() {
        fake_api.set_egress(&socket).await;
    }
    let admin: Value = serde_json::from_slice(&std::fs::read(cluster.admin_kubeconfig()?)?)?;
    let url = admin["clusters"][0]["cluster"]["server"].as_str();
    let port = url
        .and_then(|url| url.rsplit_once(':'))
        .context("a port")?
        .1;
    for transport in ["quic", "h2"] {
        let socket = socket.to_string_lossy();
        let server_args = [
            &["--connect-ports", port][..],
            &["--connect-listen", "127.0.0.1:0", "--connect-uds", &socket],
        ]
        .concat();
        let pair = EdgePair::start(&cluster, transport, &server_args, &[]).await?;
        let listener = pair.server.log().find(connect_listener).await;
        let allowed = rendered(&scratch, &admin, port, &listener).await?;
        let refused = rendered(&scratch, &admin, CLOSED_PORT, &listener).await?;
        for (number, file) in files.iter().enumerate() {
            let kubectl = Kubectl::new(file.clone(), allowed.clone())?;
            works(&kubectl, &format!("{transport}-{number}"))
                .await
                .with_context(|| format!("{} over {transport}", file.display()))?;
            let kubectl = Kubectl::new(file.clone(), refused.clone())?;
            let finished = kubectl.program("get configmaps").run().await?;
            finished.ensure_failed(1, &["not allowed", CLOSED_PORT, "--connect-ports"])?;
        }
        // kubectl prints the text of the status line, and not its number.
        let dialer = EgressDialer::tcp(listener.parse::<SocketAddr>()?);
        let target = format!("{NODE}:{CLOSED_PORT}");
        let error = dialer.dial(&target).await.err().context("it was dialed")?;
        ensure_contains(&error.to_string(), &["code 403", "not allowed"])?;
    }
    Ok(())
}

/// Reads, watches and writes, and runs a command in a pod.
async fn works(kubectl: &Kubectl, name: &str) -> Result<()> {
    // A new kube-apiserver grants discovery to all users some time after its port is open.
    eventually("a list", LONG, async || {
        kubectl.ok("get configmaps -o name").await
    })
    .await;
    let mut watch = kubectl.program("get configmaps --watch -o name").start()?;
    let create = format!("create configmap {name} --from-literal=a=1");
    kubectl.ok(&create).await?;
    let line = format!("configmap/{name}");
    watch
        .wait_for_line("event", LONG, |found| (found == line).then_some(()))
        .await?;
    watch.kill().await?;
    let exec = kubectl.program(&format!("exec -i -n {} web -- exit-3", SERVICE_ACCOUNT.0));
    let finished = exec.run_with(b"hello").await?;
    finished.ensure_failed(3, &["exit code 3"])?;
    ensure!(finished.out == "hello", "{finished}");
    Ok(())
}

/// Renders the kubeconfig for a port, with the CA and the user of the administrator.
async fn rendered(
    scratch: &ScratchDir,
    admin: &Value,
    port: &str,
    listener: &str,
) -> Result<std::path::PathBuf> {
    let ca = &admin["clusters"][0]["cluster"]["certificate-authority"];
    let user = &admin["users"][0]["user"];
    let render = Program::ours("tunnel-server")?.args(["render", "kubeconfig", NODE]);
    let render = render.args(["--port", port, "--proxy", listener]);
    let render = render.arg("--ca-file").arg(ca.as_str().context("a CA")?);
    let render = if let Some(token) = user["token"].as_str() {
        let file = scratch.file("token", token)?;
        render.arg("--token-file").arg(file)
    } else {
        let file = |key: &str| user[key].as_str().context("a client certificate");
        let render = render.arg("--cert-file").arg(file("client-certificate")?);
        render.arg("--key-file").arg(file("client-key")?)
    };
    let path = scratch.path().join(format!("{port}.kubeconfig"));
    render
        .arg("--force")
        .arg("-f")
        .arg(&path)
        .run()
        .await?
        .ok()?;
    verifies_the_api_server(&path)?;
    Ok(path)
}

/// Checks that the kubeconfig has a CA and the name of the API server, and skips no check.
fn verifies_the_api_server(kubeconfig: &Path) -> Result<()> {
    let text = std::fs::read_to_string(kubeconfig)?;
    let config: Value = tunnel_tests::manifests::documents(&text)?
        .pop()
        .context("a document")?;
    let cluster = &config["clusters"][0]["cluster"];
    ensure!(cluster["insecure-skip-tls-verify"] == json!(null), "{text}");
    ensure!(
        cluster["tls-server-name"] == "kubernetes.default.svc",
        "{text}"
    );
    ensure!(cluster["certificate-authority"].is_string(), "{text}");
    Ok(())
}

/// Returns the address in the line that reports the CONNECT listener over TCP.
fn connect_listener(line: &str) -> Option<String> {
    let line: Value = serde_json::from_str(line).ok()?;
    let is_it = line["message"] == "listening" && line["listener"] == "connect";
    let address = line["address"].as_str().filter(|_| is_it)?;
    // The other one is a path.
    address.contains(':').then(|| address.to_owned())
}

/// A port that callers may not reach.
const CLOSED_PORT: &str = "6444";
