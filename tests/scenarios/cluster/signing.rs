//! The server's client certificate for kubelets from a CertificateSigningRequest: the request, the
//! approval by an operator, and the delegation to callers.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustls_pki_types::CertificateDer;
use serde_json::{Value, json};
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::cluster::edge;
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::repository;
use tunnel_tests::process::{AgentSetup, Listener, Process, Program, Server, ServerSetup};
use tunnel_tests::targets::{Access, FakeKubelet, TargetTls, sha256_hex};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::kubectl::kustomizers;
use super::{ClusterEnv, FIRST, READYZ, fetch_text, wait_for_text, wait_until_gone};

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// Longest wait for the effect of a poll. The server polls every 5 s.
const LOOK: Duration = Duration::from_secs(15);

/// Returns the setup of a server that requests its client certificate. `callers` is the CA of the
/// API server, to which the server may delegate the certificate.
fn setup(cluster_env: &ClusterEnv, kubelet: &FakeKubelet, callers: &TestCa) -> Result<ServerSetup> {
    let ca = cluster_env.scratch.file("callers.pem", callers.pem())?;
    Ok(cluster_env.setup("a")?.args(&[
        "--client-ca",
        &ca.to_string_lossy(),
        "--target-cert-signer",
        "kubernetes.io/kube-apiserver-client",
        "--https-proxy-ports",
        &kubelet.addr().port().to_string(),
    ]))
}

/// Adds worker-1 and starts its kubelet, which accepts the server's certificate of this CA.
async fn kubelet(
    cluster_env: &ClusterEnv,
    client_ca: &CertificateDer<'static>,
) -> Result<FakeKubelet> {
    cluster_env.objects().add(&edge("worker-1")).await?;
    let access = Access::new(client_ca, &["culvert-tunnel-server"])?;
    let tls = TargetTls::self_signed(&["worker-1"])?;
    FakeKubelet::guarded("worker-1", tls, access).await
}

async fn agent(cluster_env: &ClusterEnv, server: &Server) -> Result<Process> {
    let token = server.token("worker-1", None).await?;
    let folder = cluster_env.scratch.path().join("agent");
    let setup = AgentSetup::on_loopback("worker-1", server.address(Listener::Agents), &folder);
    let agent = setup.args(&["--token", &token]).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    Ok(agent)
}

async fn is_ready(server: &Server) -> Result<()> {
    let meta = server.address(Listener::Meta);
    let ready = request(meta, &RawRequest::get("meta", "/readyz")).await?;
    ensure!(ready.status == 200, "{}", ready.text());
    Ok(())
}

/// Returns the pending request of the server.
async fn asked(cluster_env: &ClusterEnv) -> Result<Value> {
    let list = cluster_env.admin().list(REQUESTS).await?;
    ensure!(list.len() == 1, "{} requests", list.len());
    list.into_iter().next().context("no request")
}

/// Approves or denies a request like `kubectl certificate approve` and `kubectl certificate deny`.
async fn decide(cluster_env: &ClusterEnv, mut object: Value, decision: &str) -> Result<()> {
    let name = object["metadata"]["name"].as_str().context("no name")?;
    let path = format!("{REQUESTS}/{name}/approval");
    let reason = format!("Kubectl{decision}");
    object["status"] =
        json!({ "conditions": [{ "type": decision, "status": "True", "reason": reason }] });
    cluster_env.admin().replace(&path, &object).await?;
    Ok(())
}

async fn page(server: &Server, kubelet: &FakeKubelet, caller: &Issued) -> Result<(u16, String)> {
    let tls = ClientTls::insecure("worker-1", Some(caller.presented()?))?;
    let endpoint = Endpoint::tls(server.address(Listener::Https), tls);
    let host = format!("worker-1:{}", kubelet.addr().port());
    let reply = request(endpoint, &RawRequest::get(&host, "/client-certificate")).await?;
    Ok((reply.status, reply.text().trim().to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_is_requested_approved_and_delegated_also_after_a_restart() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let fake_api = cluster_env.fake_api()?;
    let kubelet = kubelet(&cluster_env, &fake_api.client_ca()).await?;
    let callers = TestCa::new("callers")?;
    let apiserver = callers.issue(&Leaf::caller("kube-apiserver-kubelet-client"))?;
    let server = setup(&cluster_env, &kubelet, &callers)?.start().await?;
    let _agent = agent(&cluster_env, &server).await?;
    let object = eventually("a request", FIRST, async || asked(&cluster_env).await).await;
    let name = object["metadata"]["name"].as_str().context("no name")?;
    // Before the approval, the server is ready, reports the command to run, and does not delegate.
    let command = format!("kubectl certificate approve {name}");
    wait_for_text(&server, READYZ, FIRST, &command).await;
    is_ready(&server).await?;
    assert_eq!(page(&server, &kubelet, &apiserver).await?.0, 401);
    decide(&cluster_env, object.clone(), "Approved").await?;
    let signed = fake_api.sign_request(name)?;
    let expected = (200, sha256_hex(&signed));
    eventually("the certificate is delegated", LOOK, async || {
        let shown = page(&server, &kubelet, &apiserver).await?;
        ensure!(shown == expected, "{shown:?}");
        Ok(())
    })
    .await;
    wait_until_gone(&server, READYZ, LOOK, "certificate approve").await;
    // The next process loads the certificate from its disk, because the request may be gone by
    // then.
    let path = format!("{REQUESTS}/{name}");
    cluster_env.admin().delete(&path).await?;
    let again = server.setup_for_restart();
    server.into_process().stop(FIRST).await?;
    let server = again.start().await?;
    server.wait_until_connected(&["worker-1"]).await;
    assert_eq!(page(&server, &kubelet, &apiserver).await?, expected);
    ensure!(cluster_env.admin().list(REQUESTS).await?.is_empty());
    Ok(())
}

/// Tests a Secret that is mounted as optional and created after the server has started.
#[tokio::test(flavor = "multi_thread")]
async fn certificate_of_a_secret_that_comes_later_is_delegated_without_a_restart() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let clients = TestCa::new("clients of kubelets")?;
    let kubelet = kubelet(&cluster_env, clients.root()).await?;
    let callers = TestCa::new("callers")?;
    let apiserver = callers.issue(&Leaf::caller("kube-apiserver-kubelet-client"))?;
    let ca = cluster_env.scratch.file("callers.pem", callers.pem())?;
    let mounted = cluster_env.scratch.path().join("mounted");
    std::fs::create_dir(&mounted)?;
    let file = |end| mounted.join(format!("tls.{end}"));
    let limits = "limits: { reloadEvery: 50ms }\n";
    let settings = cluster_env.scratch.file("limits.yaml", limits)?;
    let port = kubelet.addr().port().to_string();
    let server = cluster_env
        .setup("a")?
        .args(&["--config", &settings.to_string_lossy()])
        .args(&["--client-ca", &ca.to_string_lossy()])
        .args(&["--target-cert-file", &file("crt").to_string_lossy()])
        .args(&["--target-key-file", &file("key").to_string_lossy()])
        .args(&["--https-proxy-ports", &port]);
    let server = server.start().await?;
    let _agent = agent(&cluster_env, &server).await?;
    let condition = "[!] kubelet certificate: no client certificate for delegation";
    let shown = fetch_text(&server, READYZ).await?;
    ensure!(
        shown.contains(condition) && shown.contains("tls.crt"),
        "{shown}"
    );
    is_ready(&server).await?;
    assert_eq!(page(&server, &kubelet, &apiserver).await?.0, 401);
    let own = clients.issue(&Leaf::caller("culvert-tunnel-server"))?;
    own.write(&mounted, "tls")?;
    let expected = (200, sha256_hex(&own.own.cert[0]));
    eventually("the certificate is delegated", FIRST, async || {
        let shown = page(&server, &kubelet, &apiserver).await?;
        ensure!(shown == expected, "{shown:?}");
        let shown = fetch_text(&server, READYZ).await?;
        ensure!(!shown.contains(condition), "{shown}");
        Ok(())
    })
    .await;
    // From here on, a missing file is an error, and the server keeps the last valid certificate.
    std::fs::remove_file(file("crt"))?;
    let failed =
        "tunnel_server_credential_reloads_total{files=\"target_certificate\",result=\"failed\"} 1";
    wait_for_text(&server, "/metrics", FIRST, failed).await;
    assert_eq!(page(&server, &kubelet, &apiserver).await?, expected);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn denied_request_is_reported_and_the_server_stays_ready() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let tls = TargetTls::self_signed(&["worker-1"])?;
    let kubelet = FakeKubelet::start_on("127.0.0.1:0".parse()?, "worker-1", Some(tls)).await?;
    let setup = setup(&cluster_env, &kubelet, &TestCa::new("callers")?)?;
    let server = setup.start().await?;
    let object = eventually("a request", FIRST, async || asked(&cluster_env).await).await;
    decide(&cluster_env, object.clone(), "Denied").await?;
    wait_for_text(&server, READYZ, LOOK, "was denied: KubectlDenied").await;
    is_ready(&server).await?;
    assert_eq!(
        asked(&cluster_env).await?["metadata"]["uid"],
        object["metadata"]["uid"]
    );
    Ok(())
}

on_both!(certificate_of_the_script_can_call_kubelets_and_nothing_else);

/// Runs `deploy/kubelet-certificate.sh`, and asks the API server what the user of its certificate
/// may do.
async fn certificate_of_the_script_can_call_kubelets_and_nothing_else(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let needs = require(&[Tool::Bash, Tool::Openssl]);
    let Some(files) = or_skip(needs.and_then(|()| kustomizers())) else {
        return Ok(());
    };
    let kubectl = files.first().context("one at least")?;
    let script = Program::tool(Tool::Bash)?
        .arg(repository().join("deploy/kubelet-certificate.sh"))
        .env("KUBECTL", kubectl)
        .env("KUBECONFIG", cluster_env.cluster.admin_kubeconfig()?)
        .env("HOME", cluster_env.scratch.path());
    let finished = tokio::select! {
        finished = script.run() => finished?,
        never = cluster_env.cluster.sign_for_kubelets() => match never {},
    };
    finished.ok()?;
    cluster_env.cluster.check_kubelet_client().await
}
