//! R11: the first writer creates the CA, all other servers adopt it, and no server creates another
//! one.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use tunnel_ca::CaMaterial;
use tunnel_proto::wire::enroll::hex;
use tunnel_server::cluster::objects::REPLACES_CA_ANNOTATION;
use tunnel_tests::apiserver::Fault;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Objects, empty_secrets};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Program;
use tunnel_tests::targets::FakeKubelet;
use tunnel_tests::tools::or_skip;

use super::super::kubectl::{Kubectl, kubectls};
use super::super::{ClusterEnv, FIRST, READYZ};
use super::{Exec, SECRETS, ca_secret, cluster, server, set_ca};

/// Number of seeds of a plain run. `R11_SEEDS` requests more.
const SEEDS: u64 = 50;
/// Number of clusters that run concurrently.
const AT_ONCE: usize = 4;
const SERVERS: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn r11_five_servers_that_start_at_once_have_one_ca() -> Result<()> {
    let asked = std::env::var("R11_SEEDS").ok();
    let seeds = asked.map_or(Ok(SEEDS), |text| text.parse())?;
    stream::iter(0..seeds)
        .map(|seed| async move { one_ca(seed).await.with_context(|| format!("seed {seed}")) })
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await
}

async fn one_ca(seed: u64) -> Result<()> {
    let cluster = cluster().await?;
    let fake_api = cluster.fake_api()?;
    let mut random = SmallRng::seed_from_u64(seed);
    // Some writes get a conflict, and some answers arrive after others have moved on.
    let conflicts = random.random_range(0..4);
    fake_api.fault(Fault::conflict().of("secrets").times(conflicts));
    for verbs in [["get"], ["update"]] {
        let delay = Duration::from_millis(random.random_range(0..20));
        let count = random.random_range(0..8);
        fake_api.fault(Fault::delay(delay).of("secrets").verbs(&verbs).times(count));
    }
    // The list has few ports. A list of 64,000 takes most of the start-up time and does not affect
    // the CA.
    let starting = (0..SERVERS).map(|_| {
        server(&cluster, |settings| {
            settings.http_proxy_ports = Some("9100".into());
        })
    });
    let mut servers = try_join_all(starting).await?;
    let secret = cluster.objects().secret(&ca_secret()).await?;
    for server in &servers {
        ensure!(server.ca().root_pem() == secret["ca.crt"], "another CA");
    }
    let history = fake_api.history("secrets", Some("kube-system"), &ca_secret());
    let made: BTreeSet<_> = history
        .iter()
        .filter_map(|(_, state)| state.as_ref()?["data"]["ca.key"].as_str())
        .collect();
    ensure!(made.len() == 1, "{} CAs were written", made.len());
    eventually("the certificates for agents", WAIT_TIMEOUT, async || {
        let bundle = cluster.objects().bundle().await?;
        ensure!(bundle == secret["ca.crt"], "another bundle");
        Ok(())
    })
    .await;
    try_join_all(servers.iter_mut().map(TestEnv::stop_server)).await?;
    Ok(())
}

/// Tests a missing Secret: the server reports it, creates no other CA, and continues by itself when
/// the Secret exists.
#[tokio::test(flavor = "multi_thread")]
async fn r11_a_missing_secret_is_reported_and_waited_for_and_no_other_ca_is_made() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let path = Objects::path("secrets", &ca_secret());
    cluster_env.admin().delete(&path).await?;
    let setup = cluster_env.setup("a")?;
    let run = Program::ours("tunnel-server")?.args(["run", "--log-format", "json"]);
    let mut process = run.args(setup.arguments().to_vec()).start()?;
    let meta = process.wait_for_line("the meta port", FIRST, |line| {
        let line: Value = serde_json::from_str(line).ok()?;
        let fields = line.get("fields").unwrap_or(&line);
        let waits = fields["message"]
            .as_str()?
            .starts_with("waiting for the CA");
        let address = fields["address"].as_str()?.parse().ok()?;
        waits.then_some(address)
    });
    let meta: std::net::SocketAddr = meta.await?;
    eventually("the condition to be reported", FIRST, async || {
        let reply = request(meta, &RawRequest::get("meta", READYZ)).await?;
        let text = reply.text();
        ensure!(reply.status == 503, "{}", reply.status);
        ensure!(
            text.contains("[!] ca: Secret kube-system/tunnel-server-ca cannot be used")
                && text.contains("kubectl -n kube-system create secret generic tunnel-server-ca"),
            "{text}"
        );
        Ok(())
    })
    .await;
    let live = request(meta, &RawRequest::get("meta", "/livez")).await?;
    ensure!(live.status == 200);
    let folder = cluster_env.scratch.path().join("a");
    ensure!(!folder.join("ca.key").exists() && !folder.join("ca.crt").exists());

    let [secret, ..] = empty_secrets();
    cluster_env.admin().create(SECRETS, &secret).await?;
    eventually("the server to be ready", FIRST, async || {
        let reply = request(meta, &RawRequest::get("meta", "/readyz")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        Ok(())
    })
    .await;
    let secret = cluster_env.objects().secret(&ca_secret()).await?;
    eventually("the certificates on disk", FIRST, async || {
        let persisted = std::fs::read_to_string(folder.join("ca.crt"))?;
        ensure!(persisted == secret["ca.crt"], "{persisted}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Tests a second apply of the manifests. They ship the Secrets without data, so the apply owns
/// none of the data.
#[tokio::test(flavor = "multi_thread")]
async fn r11_applying_the_manifests_again_keeps_ca_and_tokens() -> Result<()> {
    let Some(programs) = or_skip(kubectls()) else {
        return Ok(());
    };
    for program in programs {
        let cluster = cluster().await?;
        let kubectl = Kubectl::new(program, cluster.admin_kubeconfig()?)?;
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": empty_secrets() });
        let list = list.to_string();
        kubectl.apply("", &list).await?;
        let server = server(&cluster, |_| {}).await?;
        let _token = server.token("worker-1", &[])?;
        let stored = async || -> Result<_> {
            let objects = cluster.objects();
            let ca = objects.secret(&ca_secret()).await?;
            Ok((ca, server.tokens().list(SystemTime::now())?))
        };
        let before = stored().await?;
        ensure!(before.0.len() == 2 && before.1.len() == 1, "{before:?}");
        kubectl.apply("", &list).await?;
        let forced = "--server-side --force-conflicts";
        kubectl.apply(forced, &list).await?;
        let after = stored().await?;
        ensure!(after.0 == before.0, "the CA has changed");
        ensure!(after.1 == before.1, "tokens have changed");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r11_an_emptied_secret_gets_the_same_ca_again_and_a_damaged_one_is_left_alone() -> Result<()>
{
    let cluster = cluster().await?;
    let server = server(&cluster, |_| {}).await?;
    let first = cluster.objects().secret(&ca_secret()).await?;
    let path = Objects::path("secrets", &ca_secret());
    cluster.admin().delete(&path).await?;
    let [secret, ..] = empty_secrets();
    cluster.admin().create(SECRETS, &secret).await?;
    eventually("the same CA", WAIT_TIMEOUT, async || {
        let now = cluster.objects().secret(&ca_secret()).await?;
        ensure!(now == first, "not yet");
        Ok(())
    })
    .await;
    // The server also repairs the agents' copy.
    let bundle = Objects::bundle_path();
    let edit = json!({ "data": { "ca.crt": "nonsense" } });
    cluster.admin().merge(&bundle, &edit).await?;
    eventually("repaired certificates", WAIT_TIMEOUT, async || {
        ensure!(cluster.objects().bundle().await? == first["ca.crt"]);
        Ok(())
    })
    .await;

    set_ca(&cluster, "ca.key", "nonsense").await?;
    eventually("the damage to be reported", WAIT_TIMEOUT, async || {
        let reply = request(server.meta(), &RawRequest::get("meta", READYZ)).await?;
        let text = reply.text();
        let damage = "key ca.key holds no usable private key";
        ensure!(reply.status == 200 && text.contains(damage), "{text}");
        Ok(())
    })
    .await;
    ensure!(cluster.objects().secret(&ca_secret()).await?["ca.key"] == "nonsense");
    ensure!(server.ca().root_pem() == first["ca.crt"]);
    Ok(())
}

/// Tests a Secret that was restored from elsewhere: tunnels go on until an operator confirms the
/// other CA.
#[tokio::test(flavor = "multi_thread")]
async fn other_ca_in_the_secret_ends_no_tunnel_until_an_operator_confirms_it() -> Result<()> {
    let cluster = cluster().await?;
    let server = server(&cluster, |_| {}).await?;
    let used = server.ca().root_pem();
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = server.agent("worker-1").await?;
    eventually("a server that knows its nodes", WAIT_TIMEOUT, async || {
        let reply = request(server.meta(), &RawRequest::get("meta", READYZ)).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        Ok(())
    })
    .await;
    let mut exec = Exec::start(server.https("worker-1")?, kubelet.addr().port()).await?;
    exec.goes_on().await?;

    let other = CaMaterial::generate(SystemTime::now())?;
    let (certificates, key) = (other.certificates_pem(), other.key_pem());
    let values = [("ca.crt", certificates), ("ca.key", key)];
    cluster.objects().set_secret(&ca_secret(), &values).await?;
    eventually("the condition", WAIT_TIMEOUT, async || {
        let reply = request(server.meta(), &RawRequest::get("meta", READYZ)).await?;
        ensure_contains(&reply.text(), &["does not continue the CA in use"])
    })
    .await;
    exec.goes_on().await?;
    ensure!(server.ca().root_pem() == used, "the other CA is in use");

    let replaces = json!({ "metadata": { "annotations": {
        REPLACES_CA_ANNOTATION: hex(&server.ca().spki_sha256()),
    } } });
    let path = Objects::path("secrets", &ca_secret());
    cluster.admin().merge(&path, &replaces).await?;
    eventually("the other CA", WAIT_TIMEOUT, async || {
        (server.ca().root_pem() == certificates).then_some(())
    })
    .await;
    Ok(())
}
