//! The table of rights: the page for operators, and the requests that the server really sends.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_server::cluster::objects::{RIGHTS, Right, Scope, tokens_namespace};
use tunnel_tests::apiserver::Reviewing;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::cluster::Cluster;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{AgentSetup, Listener};

use super::agents::claims;
use super::authority;
use super::{ClusterEnv, FIRST, GUIDE_RECORDS};

#[test]
fn the_page_has_exactly_the_rights_of_the_table() {
    let page = include_str!("../../../docs/reference/kubernetes.md");
    let rights = page
        .split("\n## ")
        .find(|part| part.starts_with("Rights"))
        .expect("a section on rights");
    let rows: Vec<Vec<&str>> = rights
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let expected: Vec<Vec<String>> = RIGHTS.iter().map(row).collect();
    assert_eq!(rows, expected);
}

fn row(right: &Right) -> Vec<String> {
    let group = if right.group.is_empty() {
        "core"
    } else {
        right.group
    };
    let objects = match right.scope {
        Scope::Cluster => "all of the cluster".to_owned(),
        Scope::Namespace => "any in the namespace".to_owned(),
        Scope::TokensNamespace => {
            "any in the namespace of the server with the suffix `-tokens`".to_owned()
        }
        Scope::Named(flag) => format!("the one of `{flag}`"),
        Scope::AgentNamespaces => "any in the namespaces of `--agent-service-account`".to_owned(),
        Scope::Exactly(namespace, name) => format!("`{name}` in `{namespace}`"),
    };
    vec![
        group.to_owned(),
        right.resource.to_owned(),
        objects,
        right.verbs.join(", "),
        right.purpose.to_owned(),
    ]
}

/// Checks that the server uses every right and needs no other. An unused right is one too many.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_asks_for_each_right_and_is_never_refused() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let objects = cluster_env.objects();
    cluster_env.guide().await?;
    let socket = cluster_env.scratch.path().join("connect.sock");
    let callers_ca = TestCa::new("callers")?;
    let callers = cluster_env.scratch.file("callers.pem", callers_ca.pem())?;
    let signer = "kubernetes.io/kube-apiserver-client";
    // The leader removes this token.
    let old = authority::tokens::token("old000000000", 3)?;
    let namespace = tokens_namespace("kube-system");
    cluster_env
        .fake_api()?
        .put("secrets", Some(&namespace), old)?;
    let setup = cluster_env
        .setup("a")?
        .args(&["--connect-uds", &socket.to_string_lossy()])
        .args(&["--client-ca", &callers.to_string_lossy()])
        .args(&["--target-cert-signer", signer])
        .args(&["--peer-listen", "127.0.0.1:0"]);
    let server = setup.start().await?;
    server.token("worker-2", None).await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let ports = [("http-proxy-ports", "9100, nonsense")];
    objects.set_ports(&ports).await?;
    let http = server.address(Listener::Http).port();
    cluster_env.wait_for_ports(Some((9100, http))).await;
    objects.remove("worker-1").await?;
    let master = "192.168.33.220\tmaster-1";
    cluster_env.wait_for_records(FIRST, master).await;
    // The server looks up Pods for callers with delegation whose TLS handshake names no node.
    let apiserver = callers_ca.issue(&Leaf::caller("kube-apiserver-kubelet-client"))?;
    let endpoint = Endpoint::tls(
        server.address(Listener::Https),
        ClientTls::insecure("127.0.0.1", Some(apiserver.presented()?))?,
    );
    let logs = RawRequest::get("203.0.113.1:10250", "/containerLogs/default/pod/main");
    let _answer = request(endpoint, &logs).await?;

    // An older API server returns no node with its token review. The server then also gets the Pod.
    let fake_api = cluster_env.fake_api()?;
    fake_api.review_as(Reviewing::WithPods);
    let pod = json!({ "metadata": { "name": "agent" }, "spec": { "nodeName": "worker-1", "containers": [] } });
    fake_api.put("pods", Some("kube-system"), pod)?;
    let pod = fake_api.get("pods", Some("kube-system"), "agent");
    let uid = pod.context("the Pod")?["metadata"]["uid"].clone();
    let token = fake_api.sign(&claims("agent", uid.as_str().context("its uid")?));
    let token = cluster_env.scratch.file("token", token)?;
    let ca = cluster_env.scratch.path().join("a/ca.crt");
    let folder = cluster_env.scratch.path().join("agent");
    let agents = server.address(Listener::Agents);
    let _agent = AgentSetup::on_loopback("worker-1", agents, &folder)
        .args(&["--token-file", &token.to_string_lossy()])
        .args(&["--ca-file", &ca.to_string_lossy()])
        .start()?;
    server.wait_until_connected(&["worker-1"]).await;

    let user = Cluster::server_user();
    eventually("every right to be asked for", FIRST, async || {
        let requests = cluster_env.fake_api()?.requests();
        let own = requests.iter().filter(|seen| seen.user == user);
        let refused: Vec<_> = own
            .clone()
            .filter(|seen| seen.status == 403 || seen.status == 401)
            .collect();
        assert!(refused.is_empty(), "refused: {refused:?}");
        let asked: BTreeSet<_> = own
            .map(|seen| (seen.resource.clone(), seen.verb.clone()))
            .collect();
        let granted = RIGHTS.iter().flat_map(|right| {
            let verbs = right.verbs.iter();
            verbs.map(|verb| (right.resource.to_owned(), (*verb).to_owned()))
        });
        let unused: Vec<_> = granted.filter(|right| !asked.contains(right)).collect();
        ensure!(unused.is_empty(), "never asked for: {unused:?}");
        Ok(())
    })
    .await;
    Ok(())
}
