//! Rules that ask the cluster: RBAC on the subresources of Node decides about a reviewed ServiceAccount.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_process::yaml;
use tunnel_server::config::RawConfig;
use tunnel_tests::apiserver::TokenClaims;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::Cluster;
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::eventually;
use tunnel_tests::manifests::{documents, folder};

use super::authority::{cluster, server};

const NODE: &str = "worker-1";
const RULES: &str = "callers: { scrape: { serviceAccount: monitoring/prometheus } }\n\
                     rules: [{ name: rbac, callers: [authenticated], ports: [kubelet], authorize: kubernetes }]\n";
/// A right that is given or taken back applies within this time.
const CHANGED: Duration = Duration::from_secs(15);

/// Returns a token of a ServiceAccount in the namespace monitoring.
fn token(cluster: &Cluster, account: &str) -> Result<String> {
    let now = SystemTime::now();
    Ok(cluster.fake_api()?.sign(&TokenClaims {
        account: ("monitoring".into(), account.into()),
        audiences: vec!["https://kubernetes.default.svc.cluster.local".into()],
        pod: None,
        issued: now - Duration::from_secs(60),
        ends: Some(now + Duration::from_secs(3540)),
    }))
}

/// Gives the account prometheus these verbs on a subresource of Node.
fn grant(cluster: &Cluster, subresource: &str, verbs: &[&str]) -> Result<()> {
    let name = format!("prometheus-{subresource}");
    let role = json!({
        "metadata": { "name": name },
        "rules": [{ "apiGroups": [""], "resources": [format!("nodes/{subresource}")], "verbs": verbs }],
    });
    let binding = json!({
        "metadata": { "name": name },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring" }],
    });
    cluster.fake_api()?.put("clusterroles", None, role)?;
    cluster
        .fake_api()?
        .put("clusterrolebindings", None, binding)
}

/// Returns the status and the text of a request for the kubelet, on which nothing listens.
async fn ask(env: &TestEnv, token: &str, method: &str, path: &str) -> Result<(u16, String)> {
    let asked = RawRequest::new(method, path, &format!("{NODE}:10250"))
        .header("Authorization", &format!("Bearer {token}"));
    let reply = request(env.https(NODE)?, &asked).await?;
    Ok((reply.status, reply.text()))
}

#[tokio::test(flavor = "multi_thread")]
async fn rbac_on_subresources_of_node_decides_about_a_reviewed_account() -> Result<()> {
    let cluster = cluster().await?;
    let file = folder().join("policy/reviews.yaml");
    let reviews = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    for object in documents(&reviews)? {
        let plural = match object["kind"].as_str() {
            Some("ClusterRole") => "clusterroles",
            _ => "clusterrolebindings",
        };
        cluster.fake_api()?.put(plural, None, object)?;
    }
    grant(&cluster, "metrics", &["get"])?;
    let env = server(&cluster, |settings| {
        let file = yaml::parse::<RawConfig>(RULES).ok().flatten();
        settings.rules = None;
        *settings = file.unwrap_or_default().or(std::mem::take(settings));
    });
    let env = env.await?;
    let _agent = env.agent(NODE).await?;
    let prometheus = token(&cluster, "prometheus")?;
    let passes = async |method: &str, path: &str| -> Result<()> {
        let (status, text) = ask(&env, &prometheus, method, path).await?;
        ensure!(status != 403 && !text.contains("is starting"), "{text}");
        Ok(())
    };
    let refused = async |method: &str, path: &str, right: &str| -> Result<()> {
        let (status, text) = ask(&env, &prometheus, method, path).await?;
        ensure!(status == 403, "{status}: {text}");
        ensure_contains(
            &text,
            &[
                "rule rbac asks the cluster",
                &format!("may not {right} of {NODE}"),
            ],
        )
    };
    let (logs, exec) = ("/containerLogs/ns/pod/c", "/exec/ns/pod/c");
    let known = async || passes("GET", "/metrics/cadvisor").await;
    eventually("the nodes are known", CHANGED, known).await;
    refused("GET", logs, "get nodes/proxy").await?;
    refused("GET", "/pods", "get nodes/pods nor nodes/proxy").await?;
    refused("GET", "/logs/syslog", "get nodes/log").await?;
    refused("POST", "/metrics", "create nodes/metrics").await?;

    // nodes/proxy get reads logs and pods. exec stays create, also as GET of a WebSocket.
    grant(&cluster, "proxy", &["get"])?;
    eventually("the right for logs", CHANGED, async || {
        passes("GET", logs).await
    })
    .await;
    passes("GET", "/pods").await?;
    refused("GET", exec, "create nodes/proxy").await?;
    refused("POST", exec, "create nodes/proxy").await?;
    grant(&cluster, "proxy", &["get", "create"])?;
    eventually("the right for exec", CHANGED, async || {
        passes("GET", exec).await
    })
    .await;
    grant(&cluster, "metrics", &[])?;
    let taken_back = async || refused("GET", "/metrics", "get nodes/metrics").await;
    eventually("the end of the right", CHANGED, taken_back).await;

    // Nobody names this account, so its token is not reviewed, and its caller is anonymous.
    let other = token(&cluster, "other")?;
    let forged = format!("{}x", prometheus);
    for token in [other.as_str(), forged.as_str(), "abc"] {
        let (status, text) = ask(&env, token, "GET", "/metrics").await?;
        ensure!(status == 403, "{status}: {text}");
        ensure_contains(&text, &["no rule allows metrics"])?;
    }
    let reviews = cluster.fake_api()?.requests();
    let reviews = reviews
        .iter()
        .filter(|seen| seen.resource == "tokenreviews");
    ensure!(reviews.count() < 20, "answers are remembered");
    Ok(())
}
