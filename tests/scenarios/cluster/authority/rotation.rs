//! F20: the CA of the tunnel and the serving certificate of the HTTPS listener are replaced during
//! a running exec, and no connection is cut.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use serde_json::{Value, json};
use tunnel_proto::identity::PeerIdentity;
use tunnel_server::ca::CaMaterial;
use tunnel_server::cluster::objects::NAMES_ANNOTATION;
use tunnel_tests::client::{ByteStream, ClientTls, Endpoint};
use tunnel_tests::cluster::{Objects, edge};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::load::Load;
use tunnel_tests::process::{Listener, Server};
use tunnel_tests::targets::FakeKubelet;

use super::super::{ClusterEnv, GUIDE_IP, Site};
use super::restart::kill;
use super::{Exec, ca_secret, cluster, server, set_ca};

/// Agents renew certificates of this lifetime about every three seconds. With a renewal they also
/// receive a new CA.
const LIFE: &str = "certificateLife: 6s";
const RENEWAL: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn f20_our_ca_is_replaced_old_both_new_under_a_running_exec() -> Result<()> {
    let cluster = cluster().await?;
    let limits = || TestEnv::limits(LIFE);
    let servers = [
        server(&cluster, |settings| settings.limits = limits()).await?,
        server(&cluster, |settings| settings.limits = limits()).await?,
    ];
    let [one, other] = &servers;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = one.agent("worker-1").await?;
    let mut exec = Exec::start(one.https("worker-1")?, kubelet.addr().port()).await?;
    exec.goes_on().await?;

    let old = cluster.objects().secret(&ca_secret()).await?;
    let next = CaMaterial::generate(SystemTime::now())?;
    let both = format!("{}{}", old["ca.crt"], next.certificates_pem());
    let adopted = async |what: &str, text: &str| {
        eventually(what, WAIT_TIMEOUT, async || {
            let all = servers.iter().all(|server| server.ca().root_pem() == text);
            ensure!(all, "not adopted");
            ensure!(cluster.objects().bundle().await? == text, "bundle");
            Ok(())
        })
        .await;
    };
    let known = one.path().join("agent-worker-1").join("ca.crt");
    let certificate = one.path().join("agent-worker-1").join("agent.crt");

    // Both CAs are trusted, and the old one signs. Agents receive both with their next certificate.
    set_ca(&cluster, "ca.crt", &both).await?;
    adopted("both roots", &both).await;
    exec.goes_on().await?;
    eventually("the agent to know both", RENEWAL, async || {
        let known = std::fs::read_to_string(&known)?;
        let roots = known.matches("BEGIN CERTIFICATE").count();
        ensure!(roots == 2, "{roots} roots");
        Ok(())
    })
    .await;

    let signed_by = one.ca().spki_sha256();
    // The new CA signs, and certificates of the old one are valid.
    set_ca(&cluster, "ca.key", next.key_pem()).await?;
    eventually("the new CA to sign", WAIT_TIMEOUT, async || {
        let mut signers = servers.iter().map(|server| server.ca().spki_sha256());
        signers.all(|signer| signer != signed_by).then_some(())
    })
    .await;
    exec.goes_on().await?;
    let _late = other.agent("worker-2").await?;
    let changed = SystemTime::now();
    eventually("a certificate of the new CA", RENEWAL, async || {
        let pem = std::fs::read(&certificate)?;
        let chain = tunnel_proto::tls::files::chain(&pem)?;
        let leaf = PeerIdentity::from_certificate(chain.first().context("no leaf")?)?;
        // The validity of a certificate begins some minutes before it is issued.
        let issued = leaf.not_after - Duration::from_secs(6);
        ensure!(issued > changed, "still an old one");
        Ok(())
    })
    .await;

    // The old CA is removed.
    let new = next.certificates_pem();
    set_ca(&cluster, "ca.crt", new).await?;
    adopted("the new root alone", new).await;
    exec.goes_on().await?;
    let mut again = Exec::start(one.https("worker-1")?, kubelet.addr().port()).await?;
    again.goes_on().await?;
    exec.goes_on().await?;
    let sessions = one.registry().of_node(&"worker-1".parse()?);
    ensure!(sessions.iter().any(|session| !session.is_withdrawn()));
    Ok(())
}

/// The server is killed and loses its disk in each step, before the agent has renewed. The next
/// process continues with the step of the Secret.
#[tokio::test(flavor = "multi_thread")]
async fn f20_replacement_of_the_secrets_ca_resumes_in_each_step_without_a_failed_request()
-> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    let limits = "limits: { certificateLife: 12s }\n";
    let limits = cluster_env.scratch.file("limits.yaml", limits)?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let setup = setup.args(&["--config", &limits.to_string_lossy()]);
    let mut server = setup.start().await?;
    let site = Site::serving(&cluster_env, &server).await?;
    let cluster = &cluster_env.cluster;
    let old = cluster.objects().secret(&ca_secret()).await?;
    let next = CaMaterial::generate(SystemTime::now())?;
    let both = format!("{}{}", old["ca.crt"], next.certificates_pem());
    let known = cluster_env.scratch.path().join("agent-worker-1/ca.crt");
    for (key, text, roots) in [
        ("ca.crt", both.as_str(), 2),
        ("ca.key", next.key_pem(), 2),
        ("ca.crt", next.certificates_pem(), 1),
    ] {
        let load = loaded(&server, &site).await?;
        set_ca(cluster, key, text).await?;
        answers(&load).await;
        load.end().await?.check()?;

        let setup = kill(server).await?;
        std::fs::remove_dir_all(cluster_env.scratch.path().join("a"))?;
        server = setup.start().await?;
        server.wait_until_connected(&["worker-1"]).await;
        let load = loaded(&server, &site).await?;
        let before = renewal(&server).await?;
        eventually("the agent has renewed", RENEWAL, async || {
            // While two CAs are trusted, an agent connects again with its new certificate.
            let now = renewal(&server).await?;
            let is_renewed = roots == 1 || (now[0] != before[0] && now[1] != before[1]);
            let known = std::fs::read_to_string(&known)?;
            let known = known.matches("BEGIN CERTIFICATE").count();
            ensure!(
                is_renewed && known == roots,
                "renewed: {is_renewed}, {known} roots"
            );
            Ok(())
        })
        .await;
        answers(&load).await;
        load.end().await?.check()?;
    }
    Ok(())
}

/// Returns the end of the agent's certificate, and the begin of its session.
async fn renewal(server: &Server) -> Result<[Value; 2]> {
    let nodes = server.nodes().await?;
    let node = nodes.iter().find(|node| node["node"] == "worker-1");
    let node = node.context("no node")?;
    Ok(["certificateNotAfter", "connectedSince"].map(|field| node[field].clone()))
}

/// Starts load once the server answers for the site.
async fn loaded(server: &Server, site: &Site) -> Result<Load> {
    eventually("the site", WAIT_TIMEOUT, async || site.serves(server).await).await;
    Load::start(server.address(Listener::Http).into(), &[site.host()], 2).await
}

/// Waits until 20 more requests have been answered.
async fn answers(load: &Load) {
    let before = load.answered();
    eventually("requests go on", WAIT_TIMEOUT, async || {
        (load.answered() > before + 20).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_the_https_listener_follow_the_service_and_cut_no_exec() -> Result<()> {
    let cluster = cluster().await?;
    let objects = cluster.objects();
    let service = |service: &mut Value| service["spec"]["clusterIP"] = GUIDE_IP.into();
    objects.create_service(service).await?;
    objects.add(&edge("worker-1")).await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let port = kubelet.addr().port();
    let server = server(&cluster, |settings| {
        settings.http_proxy_ports = None;
        settings.https_proxy_ports = Some(port.to_string());
        settings.https_name = vec!["tunnel.example".into(), "192.0.2.7".into()];
    })
    .await?;
    let _agent = server.agent("worker-1").await?;
    let mut exec = Exec::start(server.https("worker-1")?, port).await?;
    exec.goes_on().await?;
    let endpoint = async |name: &str| shakes_hands(&server, name).await;
    let at_start = [
        "x-tunnel-server-internal-svc",
        "x-tunnel-server-internal-svc.kube-system",
        "x-tunnel-server-internal-svc.kube-system.svc",
        "x-tunnel-server-internal-svc.kube-system.svc.cluster.local",
        GUIDE_IP,
        "tunnel.example",
        "192.0.2.7",
        "worker-1",
    ];
    for name in at_start {
        eventually(name, WAIT_TIMEOUT, async || endpoint(name).await).await;
    }
    ensure!(endpoint("later.example").await.is_err());

    let path = Objects::path("services", "x-tunnel-server-internal-svc");
    let change = json!({
        "metadata": { "annotations": { NAMES_ANNOTATION: "later.example, 203.0.113.9" } },
        "spec": { "externalIPs": ["198.51.100.4"] },
    });
    cluster.admin().merge(&path, &change).await?;
    for name in ["later.example", "203.0.113.9", "198.51.100.4", GUIDE_IP] {
        eventually(name, WAIT_TIMEOUT, async || endpoint(name).await).await;
    }
    exec.goes_on().await?;
    let back = json!({ "metadata": { "annotations": { NAMES_ANNOTATION: null } } });
    cluster.admin().merge(&path, &back).await?;
    eventually("the name to be gone", WAIT_TIMEOUT, async || {
        ensure!(endpoint("later.example").await.is_err());
        Ok(())
    })
    .await;
    exec.goes_on().await
}

/// Performs a TLS handshake as a caller that trusts the CA and verifies the listener as `name`.
async fn shakes_hands(server: &TestEnv, name: &str) -> Result<()> {
    let address = server.bound().https.context("no HTTPS listener")?;
    let roots = RootCertStore::clone(&*server.roots()?);
    let endpoint = Endpoint::tls(address, ClientTls::verifying(name, roots, None)?);
    let stream = ByteStream::connect(endpoint).await?;
    ensure!(stream.peer_certificate().is_some(), "no certificate");
    Ok(())
}
