//! F20: the CA of the tunnel and the serving certificate of the HTTPS listener are replaced during
//! a running exec, and no connection is cut.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use serde_json::{Value, json};
use tunnel_ca::{CaMaterial, SourceNames};
use tunnel_proto::identity::PeerIdentity;
use tunnel_server::cluster::objects::{CA_ROTATION_KEY, NAMES_ANNOTATION};
use tunnel_tests::client::{ByteStream, ClientTls, Endpoint};
use tunnel_tests::cluster::{Objects, edge};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::load::Load;
use tunnel_tests::process::{Listener, Server};
use tunnel_tests::targets::FakeKubelet;

use super::super::{ClusterEnv, FIRST, GUIDE_IP, READYZ, Site, wait_for_text};
use super::restart::kill;
use super::{Exec, ca_secret, cluster, server, set_ca};
use crate::credentials::ca_rotation::{STAGES, is_of, renewed, rotation_status, trusts_only};

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
    let names = SourceNames {
        certificates: "ca.crt",
        key: "ca.key",
    };
    let current = CaMaterial::parse(old["ca.crt"].as_bytes(), old["ca.key"].as_bytes(), names)?;
    let now = SystemTime::now();
    let signed = current.cross_sign(&next, now)? + &next.cross_sign(&current, now)?;
    let both = format!("{}{}{signed}", old["ca.crt"], next.certificates_pem());
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

    // Both CAs are trusted, and each signs the other. Agents receive both with their next certificate.
    set_ca(&cluster, "ca.crt", &both).await?;
    adopted("both roots", &both).await;
    exec.goes_on().await?;
    eventually("the agent to know both", RENEWAL, async || {
        let known = std::fs::read_to_string(&known)?;
        let roots = known.matches("BEGIN CERTIFICATE").count();
        ensure!(roots == 4, "{roots} roots");
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

/// The server is killed and loses its disk in each stage, before the agent has renewed. The next
/// process continues with the stage of the Secret.
#[tokio::test(flavor = "multi_thread")]
async fn f20_ca_rotate_in_a_cluster_resumes_in_each_stage_without_a_failed_request() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    let limits = "limits: { certificateLife: 12s }\n";
    let limits = cluster_env.scratch.file("limits.yaml", limits)?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let setup = setup.args(&["--config", &limits.to_string_lossy()]);
    let mut server = setup.start().await?;
    let site = Site::serving(&cluster_env, &server).await?;
    let secret = async || cluster_env.objects().secret(&ca_secret()).await;
    let old = secret().await?;
    for (command, stage) in STAGES {
        let load = loaded(&server, &site).await?;
        let printed = verb(&server, command).await?;
        ensure!(printed.contains(stage), "{printed}");
        answers(&load).await;
        load.end().await?.check()?;

        let setup = kill(server).await?;
        std::fs::remove_dir_all(cluster_env.scratch.path().join("a"))?;
        server = setup.start().await?;
        server.wait_until_connected(&["worker-1"]).await;
        let load = loaded(&server, &site).await?;
        let status = rotation_status(&server).await?;
        ensure!(status.contains(stage), "{status}");
        if stage != "stage: none" {
            renewed(&server).await;
        }
        answers(&load).await;
        load.end().await?.check()?;
    }
    let new = secret().await?;
    ensure!(!new.contains_key(CA_ROTATION_KEY), "the rotation remains");
    let [old, new] = [&old["ca.crt"], &new["ca.crt"]].map(|pem| pem.as_bytes());
    let files = cluster_env.scratch.path().join("agent-worker-1");
    trusts_only(&files.join("ca.crt"), new).await;
    let leaf = std::fs::read(files.join("agent.crt"))?;
    ensure!(is_of(&leaf, new)?, "the agent's certificate is not new");
    ensure!(!is_of(&leaf, old)?, "the agent's certificate is old");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_servers_show_one_stage_and_keep_their_ca_if_the_rotation_is_damaged() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let (one, other) = (
        cluster_env.server("a").await?,
        cluster_env.server("b").await?,
    );
    let secret = async || cluster_env.objects().secret(&ca_secret()).await;
    let followed = async || {
        eventually("both servers follow", WAIT_TIMEOUT, async || {
            let secret = secret().await?;
            let certificates = &secret["ca.crt"];
            for server in [&one, &other] {
                let printed = verb(server, &["ca"]).await?;
                ensure!(printed.trim() == certificates.trim(), "{printed}");
            }
            let bundle = cluster_env.objects().bundle().await?;
            ensure!(bundle == *certificates, "{bundle}");
            Ok(())
        })
        .await;
    };
    let old = secret().await?;
    verb(&one, &["ca", "rotate"]).await?;
    for server in [&one, &other] {
        let status = rotation_status(server).await?;
        ensure!(status.contains("stage: announced"), "{status}");
    }
    followed().await;
    let announced = secret().await?;
    ensure!(announced["ca.crt"].matches("BEGIN CERTIFICATE").count() == 4);

    let next = CaMaterial::generate(SystemTime::now())?;
    let hostile = [
        (CA_ROTATION_KEY, "{}"),
        ("ca.crt", next.certificates_pem()),
        ("ca.key", next.key_pem()),
    ];
    let objects = cluster_env.objects();
    objects.set_secret(&ca_secret(), &hostile).await?;
    for server in [&one, &other] {
        let condition = "ca-rotation.json holds no usable rotation";
        wait_for_text(server, READYZ, FIRST, condition).await;
        let printed = verb(server, &["ca"]).await?;
        ensure!(printed.trim() == announced["ca.crt"].trim(), "{printed}");
    }
    let values = ["ca.crt", "ca.key", CA_ROTATION_KEY].map(|key| (key, announced[key].as_str()));
    objects.set_secret(&ca_secret(), &values).await?;
    verb(&other, &["ca", "rotate", "--abort"]).await?;
    followed().await;
    ensure!(secret().await? == old, "not the old CA alone");
    let status = rotation_status(&one).await?;
    ensure!(status.contains("stage: none"), "{status}");
    Ok(())
}

async fn verb(server: &Server, arguments: &[&str]) -> Result<String> {
    server.verb(arguments)?.run().await?.ok()
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
