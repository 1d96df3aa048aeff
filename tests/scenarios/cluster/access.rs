//! Rules that ask the cluster: RBAC on the subresources of Node decides about a reviewed ServiceAccount that
//! calls the kubelet's port of the HTTPS listener.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_process::yaml;
use tunnel_server::admin::AdminClient;
use tunnel_server::config::RawConfig;
use tunnel_store::data_dir::DataDir;
use tunnel_tests::apiserver::TokenClaims;
use tunnel_tests::checks::{ensure_contains, ensure_reset};
use tunnel_tests::client::{RawRequest, UpgradeClient, request};
use tunnel_tests::cluster::{Cluster, Kind, Kubelet, KubeletCallers, KubeletHost, Real, is_status};
use tunnel_tests::env::{Agent, TestEnv};
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::{documents, folder};
use tunnel_tests::netns::{CLOUD_ADDRESS, in_service_namespace};
use tunnel_tests::process::next_loopback;
use tunnel_tests::targets::{FakeKubelet, TargetTls};
use tunnel_tests::tools::or_skip;

use super::ClusterEnv;
use super::authority::server;
use super::kubelet::{pod, web};

const NODE: &str = "worker-1";
const HOST: &str = "worker-1:10250";
const RULES: &str = "callers: { scrape: { serviceAccount: monitoring/prometheus } }\n\
                     rules: [{ name: rbac, callers: [authenticated], ports: [kubelet], authorize: kubernetes }]\n";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
/// A right that is given or taken back applies within this time.
const CHANGED: Duration = Duration::from_secs(15);
const METRICS: &str = "/metrics/cadvisor";
const LOGS: &str = "/containerLogs/default/web/app";
const EXEC: &str = "/exec/default/web/app?command=echo&command=hello&output=1";
/// The start of a real kubelet and its first pod.
const START: Duration = Duration::from_secs(90);
const LIMIT: Duration = Duration::from_secs(240);
/// A remote command of a fake kubelet that sends back what it receives.
const ECHO: &str = "/exec/ns/pod/c?script=echo";

on_both!(
    observer_gets_metrics_and_neither_logs_nor_exec_until_rbac_says_so,
    forged_tokens_of_a_source_keep_no_good_token_of_it_waiting,
    exec_in_progress_ends_with_its_right_if_asked,
);

/// A server that asks the cluster about callers, and an agent on the host of the kubelet.
struct Site {
    cluster: Cluster,
    env: TestEnv,
    prometheus: String,
    _agent: Agent,
}

impl Site {
    async fn start(cluster: Cluster, kubelet: Ipv4Addr) -> Result<Self> {
        create(&cluster, "/api/v1/namespaces", "monitoring").await?;
        let accounts = "/api/v1/namespaces/monitoring/serviceaccounts";
        for account in ["prometheus", "other"] {
            create(&cluster, accounts, account).await?;
        }
        let file = folder().join("policy/reviews.yaml");
        let reviews = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        for object in documents(&reviews)? {
            let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
            let path = format!("{RBAC}/{kind}s");
            cluster.admin().create(&path, &object).await?;
        }
        let env = server(&cluster, |settings| {
            let file = yaml::parse::<RawConfig>(RULES).ok().flatten();
            settings.rules = None;
            *settings = file.unwrap_or_default().or(std::mem::take(settings));
        });
        let env = env.await?;
        let config = env.agent_config_with(NODE, |config| {
            config.node_ip = Some(kubelet.to_string());
        });
        let agent = Agent::start(config?).await?;
        env.connected(NODE).await;
        Ok(Self {
            prometheus: token(&cluster, "prometheus").await?,
            cluster,
            env,
            _agent: agent,
        })
    }

    /// Gives the account prometheus these verbs on a subresource of Node, and no others.
    async fn grant(&self, subresource: &str, verbs: &[&str]) -> Result<()> {
        let admin = self.cluster.admin();
        let name = format!("prometheus-{subresource}");
        let rules = json!([{ "apiGroups": [""], "resources": [format!("nodes/{subresource}")], "verbs": verbs }]);
        let path = format!("{RBAC}/clusterroles/{name}");
        if admin.get(&path).await?.is_some() {
            // RBAC has no rule without a verb.
            let rules = if verbs.is_empty() { json!([]) } else { rules };
            return admin
                .merge(&path, &json!({ "rules": rules }))
                .await
                .map(drop);
        }
        let role = json!({ "metadata": { "name": name }, "rules": rules });
        admin.create(&format!("{RBAC}/clusterroles"), &role).await?;
        let binding = json!({
            "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring" }],
        });
        let bindings = format!("{RBAC}/clusterrolebindings");
        admin.create(&bindings, &binding).await.map(drop)
    }

    /// Returns the status and the text of a request for the kubelet.
    async fn ask(&self, token: &str, method: &str, path: &str) -> Result<(u16, String)> {
        let asked = RawRequest::new(method, path, HOST);
        let asked = asked.header("Authorization", &format!("Bearer {token}"));
        let reply = request(self.env.https(NODE)?, &asked).await?;
        Ok((reply.status, reply.text()))
    }

    async fn passes(&self, method: &str, path: &str) -> Result<()> {
        let (status, text) = self.ask(&self.prometheus, method, path).await?;
        ensure!(status == 200, "{method} {path}: {status}: {text}");
        Ok(())
    }

    async fn refused(&self, method: &str, path: &str, right: &str) -> Result<()> {
        let (status, text) = self.ask(&self.prometheus, method, path).await?;
        ensure!(status == 403, "{method} {path}: {status}: {text}");
        let reason = format!("may not {right} of {NODE}");
        ensure_contains(&text, &["rule rbac asks the cluster", &reason])
    }

    /// Returns the status of exec by WebSocket (GET) and by SPDY (POST and GET).
    async fn execs(&self) -> Result<[u16; 3]> {
        let bearer = format!("Bearer {}", self.prometheus);
        let spdy = RawRequest::new("GET", EXEC, HOST)
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1")
            .header("X-Stream-Protocol-Version", "v4.channel.k8s.io");
        let clients = [
            UpgradeClient::websocket(HOST, EXEC),
            UpgradeClient::spdy(HOST, EXEC),
            UpgradeClient::asking_for_spdy(spdy),
        ];
        let mut statuses = [0; 3];
        for (client, status) in clients.into_iter().zip(&mut statuses) {
            let client = client.header("Authorization", &bearer);
            let upgraded = client.connect(self.env.https(NODE)?).await?;
            *status = upgraded.refused().map_or(101, |reply| reply.status);
        }
        Ok(statuses)
    }

    /// Waits until exec has this status in all its forms.
    async fn execs_are(&self, status: u16, what: &str) {
        eventually(what, CHANGED, async || {
            let statuses = self.execs().await?;
            ensure!(statuses == [status; 3], "{statuses:?}");
            Ok(())
        })
        .await;
    }
}

/// Creates an object that has only a name. It may exist.
async fn create(cluster: &Cluster, collection: &str, name: &str) -> Result<()> {
    let object = json!({ "metadata": { "name": name } });
    match cluster.admin().create(collection, &object).await {
        Err(error) if !is_status(&error, 409) => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns a token of a ServiceAccount in the namespace monitoring.
async fn token(cluster: &Cluster, account: &str) -> Result<String> {
    if let Ok(fake_api) = cluster.fake_api() {
        let now = SystemTime::now();
        return Ok(fake_api.sign(&TokenClaims {
            account: ("monitoring".into(), account.into()),
            audiences: vec!["https://kubernetes.default.svc.cluster.local".into()],
            pod: None,
            issued: now - Duration::from_secs(60),
            ends: Some(now + Duration::from_secs(3540)),
        }));
    }
    let path = format!("/api/v1/namespaces/monitoring/serviceaccounts/{account}/token");
    let asked = json!({ "spec": { "expirationSeconds": 3600 } });
    let answer = cluster.admin().create(&path, &asked).await?;
    let token = answer["status"]["token"].as_str().context("no token")?;
    Ok(token.to_owned())
}

/// Starts a kubelet that asks for nothing, and the site.
async fn start_fake(cluster_env: ClusterEnv) -> Result<(FakeKubelet, Site)> {
    let address: Ipv4Addr = next_loopback();
    let tls = TargetTls::self_signed(&[NODE])?;
    let kubelet = FakeKubelet::start_on((address, 10250).into(), NODE, Some(tls)).await?;
    let site = Site::start(cluster_env.cluster, address).await?;
    Ok((kubelet, site))
}

async fn observer_gets_metrics_and_neither_logs_nor_exec_until_rbac_says_so(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let (_kubelet, site) = start_fake(cluster_env).await?;
    rights_are_followed(&site).await
}

/// The kubelet reviews tokens and rights itself, as with kubeadm. It remembers a right for five minutes, the
/// server for less than 15 s.
#[tokio::test(flavor = "multi_thread")]
async fn real_kubelet_gives_an_observer_metrics_and_neither_logs_nor_exec_until_rbac_says_so()
-> Result<()> {
    let programs = Real::binaries().and_then(|folder| Kubelet::binary(&folder));
    let Some(program) = or_skip(programs) else {
        return Ok(());
    };
    let test = "cluster::access::real_kubelet_gives_an_observer_metrics_and_neither_logs_nor_exec_until_rbac_says_so";
    in_service_namespace(test, LIMIT, async || observed_kubelet(&program).await).await
}

async fn observed_kubelet(program: &Path) -> Result<()> {
    let Some(cluster) = Cluster::start(Kind::Real).await? else {
        return Ok(());
    };
    let host = KubeletHost {
        node: NODE,
        ip: CLOUD_ADDRESS,
        namespace: None,
        callers: KubeletCallers::Reviewed,
    };
    let _kubelet = Kubelet::start(program, &host, &cluster.admin_kubeconfig()?).await?;
    let pods = "/api/v1/namespaces/default/pods";
    cluster
        .admin()
        .create(pods, &pod("web", NODE, &web()))
        .await?;
    eventually("the pod to run", START, async || {
        let pod = cluster.admin().get(&format!("{pods}/web")).await?;
        let status = &pod.context("no pod")?["status"];
        ensure!(status["phase"] == "Running", "{status}");
        Ok(())
    })
    .await;
    let site = Site::start(cluster, CLOUD_ADDRESS).await?;
    rights_are_followed(&site).await?;

    // What passes is the kubelet's own answer.
    site.grant("proxy", &["get", "create"]).await?;
    site.execs_are(101, "the right for exec again").await;
    let (_, metrics) = site.ask(&site.prometheus, "GET", METRICS).await?;
    ensure_contains(&metrics, &["container_cpu_usage_seconds_total{"])?;
    let (_, log) = site.ask(&site.prometheus, "GET", LOGS).await?;
    ensure!(log == "started\n", "{log}");
    let exec = UpgradeClient::websocket(HOST, EXEC)
        .header("Authorization", &format!("Bearer {}", site.prometheus));
    let mut exec = exec.connect(site.env.https(NODE)?).await?.switched()?;
    let printed = exec.read_to_end().await.bytes;
    ensure_contains(&String::from_utf8_lossy(&printed), &["hello\n", "Success"])
}

async fn rights_are_followed(site: &Site) -> Result<()> {
    site.grant("metrics", &["get"]).await?;
    let known = async || site.passes("GET", METRICS).await;
    eventually("the right for metrics", CHANGED, known).await;
    for (method, path, right) in [
        ("GET", LOGS, "get nodes/proxy"),
        ("POST", LOGS, "create nodes/proxy"),
        ("GET", "/pods", "get nodes/pods nor nodes/proxy"),
        ("GET", "/logs/syslog", "get nodes/log"),
        ("POST", "/metrics", "create nodes/metrics"),
        ("GET", EXEC, "create nodes/proxy"),
        ("POST", EXEC, "create nodes/proxy"),
    ] {
        site.refused(method, path, right).await?;
    }
    ensure!(site.execs().await? == [403; 3]);

    // nodes/proxy get reads logs and pods. exec stays create, also as GET of a WebSocket.
    site.grant("proxy", &["get"]).await?;
    eventually("the right for logs", CHANGED, async || {
        site.passes("GET", LOGS).await
    })
    .await;
    site.passes("GET", "/pods").await?;
    site.refused("GET", EXEC, "create nodes/proxy").await?;
    ensure!(site.execs().await? == [403; 3]);
    site.grant("proxy", &["get", "create"]).await?;
    site.execs_are(101, "the right for exec").await;
    site.grant("proxy", &[]).await?;
    site.execs_are(403, "the end of the right for exec").await;
    let taken_back = async || site.refused("GET", LOGS, "get nodes/proxy").await;
    eventually("the end of the right for logs", CHANGED, taken_back).await;
    site.passes("GET", METRICS).await?;

    // Nobody names this account, so its token is not reviewed, and its caller is anonymous.
    let other = token(&site.cluster, "other").await?;
    let forged = format!("{}x", site.prometheus);
    for token in [other.as_str(), forged.as_str(), "abc"] {
        let (status, text) = site.ask(token, "GET", METRICS).await?;
        ensure!(status == 403, "{status}: {text}");
        ensure_contains(&text, &["no rule allows metrics"])?;
    }
    if let Ok(fake_api) = site.cluster.fake_api() {
        let reviews = fake_api.requests();
        let reviews = reviews
            .iter()
            .filter(|seen| seen.resource == "tokenreviews");
        ensure!(reviews.count() < 20, "answers are remembered");
    }
    Ok(())
}

async fn forged_tokens_of_a_source_keep_no_good_token_of_it_waiting(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let (_kubelet, site) = start_fake(cluster_env).await?;
    site.grant("metrics", &["get"]).await?;
    let known = async || site.passes("GET", METRICS).await;
    eventually("the right for metrics", CHANGED, known).await;
    let forging = async {
        for number in 0_u32.. {
            let forged = format!("{}{number}", site.prometheus);
            let (status, text) = site.ask(&forged, "GET", METRICS).await?;
            ensure!(status == 403, "{status}: {text}");
        }
        anyhow::Ok(())
    };
    let scraping = async {
        // Longer than an answer about a token lasts, so that the good one is reviewed meanwhile.
        let end = tokio::time::Instant::now() + Duration::from_secs(12);
        while tokio::time::Instant::now() < end {
            site.passes("GET", METRICS).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        forged = forging => forged,
        scraped = scraping => scraped,
    }
}

/// The answer that allowed the exec is remembered for 10 s, and must not keep it.
async fn exec_in_progress_ends_with_its_right_if_asked(cluster_env: ClusterEnv) -> Result<()> {
    let (_kubelet, site) = start_fake(cluster_env).await?;
    site.grant("proxy", &["get", "create"]).await?;
    site.execs_are(101, "the right for exec").await;
    let bearer = format!("Bearer {}", site.prometheus);
    let client = UpgradeClient::spdy(HOST, ECHO).header("Authorization", &bearer);
    let mut exec = client.connect(site.env.https(NODE)?).await?.switched()?;
    let mut echoed = async |bytes: &'static [u8]| {
        exec.send(bytes).await?;
        ensure!(exec.receive(bytes.len()).await? == bytes);
        anyhow::Ok(())
    };
    echoed(b"before").await?;
    let dir = DataDir::open_existing(&site.env.path().join("server"))?;
    let server = AdminClient::connect(&dir).await?;
    let server = server.context("no admin socket")?;
    ensure!(server.end_running().await? == 0, "the right is there");
    echoed(b"allowed").await?;
    site.grant("proxy", &[]).await?;
    let ended = async || {
        let ended = server.end_running().await?;
        ensure!(ended == 1, "{ended}");
        anyhow::Ok(())
    };
    if site.cluster.fake_api().is_ok() {
        ended().await?;
    } else {
        // A kube-apiserver knows the change a moment later.
        eventually("the end of the exec", CHANGED, ended).await;
    }
    ensure_reset(&exec.read_to_end().await.ended)?;
    ensure!(server.end_running().await? == 0, "it has ended");
    Ok(())
}
