//! The verb `doctor` in a cluster: a healthy lab has no finding, a fault has the finding of its id
//! and no other, and the printed command removes the finding. Tests of tunnel-server have the rules.

mod lab;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::cluster::edge;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Listener;
use tunnel_tests::targets::{FakeKubelet, TargetTls};
use tunnel_tests::tools::or_skip;

use self::lab::{Lab, NODE, SYSTEM, set_target};
use super::FIRST;
use super::kubectl::kubectls;

/// A fault whose fix is a command.
struct Row {
    id: &'static str,
    /// The object that has the fault.
    object: (&'static str, &'static str, &'static str),
    breaks: fn(&mut Value),
}

const ROWS: &[Row] = &[
    Row {
        id: "D04",
        object: ("services", SYSTEM, "x-tunnel-server-internal-svc"),
        breaks: |service| set_target(service, 10250, 1),
    },
    Row {
        id: "D06",
        object: ("configmaps", SYSTEM, "coredns"),
        breaks: |map| {
            let corefile = map["data"]["Corefile"].as_str().unwrap_or_default();
            let broken = corefile.replace("        fallthrough\n", "");
            map["data"]["Corefile"] = broken.into();
        },
    },
    Row {
        id: "D06",
        object: ("deployments", SYSTEM, "coredns"),
        breaks: |coredns| {
            let spec = &mut coredns["spec"]["template"]["spec"];
            spec["containers"][0]["volumeMounts"][0] = json!({
                "name": "edge", "mountPath": "/etc/edge/tunnel-nodes", "subPath": "tunnel-nodes",
            });
        },
    },
    Row {
        id: "D07",
        object: ("configmaps", SYSTEM, "yurt-tunnel-server-cfg"),
        breaks: |map| {
            let https = map["data"]["https-proxy-ports"].clone();
            map["data"]["http-proxy-ports"] = https;
        },
    },
    Row {
        id: "D10",
        object: ("services", SYSTEM, "kube-dns"),
        breaks: |service| service["spec"]["internalTrafficPolicy"] = "Cluster".into(),
    },
    Row {
        id: "D12",
        object: ("servicemonitors", "monitoring", "node-exporter"),
        breaks: |monitor| monitor["spec"]["endpoints"] = json!([{ "port": "metrics" }]),
    },
    Row {
        id: "D12",
        object: ("servicemonitors", "monitoring", "node-exporter"),
        breaks: |monitor| {
            let rule = &mut monitor["spec"]["endpoints"][0]["relabelings"][0];
            rule["regex"] = "(.*);.*:(.*)".into();
        },
    },
    Row {
        id: "D14",
        object: ("deployments", SYSTEM, "tunnel-server"),
        breaks: |server| {
            server["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst".into();
        },
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn printed_commands_remove_their_findings() -> Result<()> {
    let Some(kubectls) = or_skip(kubectls()) else {
        return Ok(());
    };
    let kubectl = kubectls.into_iter().next().context("no kubectl")?;
    let lab = Lab::start(kubectl).await?;
    lab.wait_until_healthy("the lab", &[]).await;
    for row in ROWS {
        lab.change(row.object, row.breaks)?;
        let fix = lab.wait_for_finding(row.id, &[]).await;
        lab.run(&fix).await?;
        lab.wait_until_healthy(&format!("{}, fixed by {fix}", row.id), &[])
            .await;
        lab.reset()?;
    }
    let node = ("nodes", "", NODE);
    lab.change(node, |node| set_kubelet_port(node, &lab.unsigned))?;
    lab.wait_for_finding("D03", &[]).await;
    lab.change(node, |node| set_kubelet_port(node, &lab.kubelet))?;
    lab.wait_until_healthy("the certificate of the node", &[])
        .await;
    Ok(())
}

/// The main case: many nodes have one address. The operator is on a workstation.
#[tokio::test(flavor = "multi_thread")]
async fn operator_with_a_kubeconfig_alone_ends_with_0_and_learns_of_shared_addresses() -> Result<()>
{
    let lab = Lab::start(PathBuf::new()).await?;
    for name in ["worker-7", "worker-8"] {
        lab.cluster_env.objects().add(&edge(name)).await?;
    }
    eventually("a healthy cluster", FIRST, async || {
        let finished = lab.remote(&[]).await?;
        ensure!(finished.code() == Some(0), "{finished}");
        let shared = "info D08 address 192.168.33.221: several nodes have it";
        ensure_contains(&finished.out, &[shared, "so the server is elsewhere"])?;
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_port_lists_are_found_with_the_rights_of_the_server() -> Result<()> {
    let mut lab = Lab::start(PathBuf::new()).await?;
    lab.kubeconfig = lab.cluster_env.cluster.server_kubeconfig()?;
    lab.wait_until_healthy("the server's own rights", &[]).await;
    let lists = ("configmaps", SYSTEM, "yurt-tunnel-server-cfg");
    lab.change(lists, |map| {
        map["data"]["http-proxy-ports"] = "9100, 9l00, 99999, 9100;9200".into();
    })?;
    let fix = lab.wait_for_finding("D07", &[]).await;
    ensure!(fix.contains("patch configmap"), "{fix}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_keep_agents_and_edge_nodes_away_have_findings() -> Result<()> {
    let lab = Lab::start(PathBuf::new()).await?;
    let served = TargetTls::self_signed(&["kubernetes.default.svc"])?;
    let served = FakeKubelet::start_on("127.0.0.1:0".parse()?, NODE, Some(served)).await?;
    let agents = lab.server.address(Listener::Agents).to_string();
    let (right, wrong) = (served.addr().to_string(), lab.unsigned.addr().to_string());
    for (id, flag, wrong, right, text) in [
        ("D13", "--advertise", "127.0.0.1:1", &*agents, "--advertise"),
        ("D16", "--cloud-apiserver", &*wrong, &*right, "certSANs"),
    ] {
        let fix = lab.wait_for_finding(id, &[flag, wrong]).await;
        ensure!(fix.contains(text), "{fix}");
        lab.wait_until_healthy(flag, &[flag, right]).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rights_that_are_missing_have_findings() -> Result<()> {
    let mut lab = Lab::start(PathBuf::new()).await?;
    lab.wait_until_healthy("the lab", &[]).await;

    // The server may not repair its records.
    let granted = lab.set_verbs("yurt-tunnel-nodes", &json!(["get", "list", "watch"]))?;
    let records = ("configmaps", SYSTEM, "yurt-tunnel-nodes");
    lab.change(records, |map| {
        map["data"]["tunnel-nodes"] = "192.0.2.1\tworker-1\n".into();
    })?;
    lab.wait_for_finding("D05", &[]).await;
    lab.set_verbs("yurt-tunnel-nodes", &granted)?;
    lab.wait_until_healthy("the granted right", &[]).await;

    // Another administrator's rights are no concern of the check.
    lab.kubeconfig = lab.cluster_env.cluster.server_kubeconfig()?;
    lab.wait_until_healthy("the server's own rights", &[]).await;
    let granted = lab.set_verbs("events", &json!([]))?;
    let fix = lab.wait_for_finding("D11", &[]).await;
    ensure!(fix.contains("kubectl apply"), "{fix}");
    lab.set_verbs("events", &granted)?;
    lab.wait_until_healthy("all rights", &[]).await;
    Ok(())
}

fn set_kubelet_port(node: &mut Value, kubelet: &FakeKubelet) {
    node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = kubelet.addr().port().into();
}
