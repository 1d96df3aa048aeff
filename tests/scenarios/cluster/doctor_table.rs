//! The verb `doctor` in a cluster: a healthy lab has no finding, each fault has the finding of its
//! id and no other, and the printed fix removes the finding.

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

use self::lab::{APISERVER, Lab, NODE, SYSTEM, set_target, slice};
use super::FIRST;
use super::kubectl::kubectls;

/// A fault, and how the finding's fix is applied.
struct Row {
    id: &'static str,
    /// The object that has the fault.
    object: (&'static str, &'static str, &'static str),
    breaks: fn(&mut Value, &Lab),
    fix: Fix,
}

/// How the printed fix is applied.
#[derive(Clone, Copy)]
enum Fix {
    /// By a shell, as printed.
    Run,
    /// By hand: the text is a change of a file on a node.
    Edit(fn(&mut Value, &Lab, &str)),
}

const ROWS: &[Row] = &[
    Row {
        id: "D01",
        object: APISERVER,
        breaks: |pod, _lab| set_flags(pod, &["--kubelet-preferred-address-types=InternalIP"]),
        fix: Fix::Edit(|pod, _lab, fix| {
            let flag = fix.split_whitespace().last().unwrap_or_default();
            set_flags(pod, &[flag]);
        }),
    },
    Row {
        id: "D02",
        object: APISERVER,
        breaks: |pod, _lab| {
            set_flags(pod, &["--kubelet-preferred-address-types=Hostname"]);
            pod["spec"]["dnsPolicy"] = "ClusterFirstWithHostNet".into();
        },
        fix: Fix::Edit(|pod, _lab, fix| {
            let policy = fix.strip_prefix("dnsPolicy: ").unwrap_or_default();
            pod["spec"]["dnsPolicy"] = policy.split(',').next().unwrap_or_default().into();
            pod["spec"]["dnsConfig"] = json!({ "nameservers": ["10.96.0.8", "192.0.2.53"] });
        }),
    },
    Row {
        id: "D03",
        object: ("nodes", "", NODE),
        breaks: |node, lab| set_kubelet_port(node, lab.unsigned.addr().port()),
        fix: Fix::Edit(|node, lab, _fix| set_kubelet_port(node, lab.kubelet.addr().port())),
    },
    Row {
        id: "D04",
        object: ("services", SYSTEM, "x-tunnel-server-internal-svc"),
        breaks: |service, _lab| set_target(service, 10250, 1),
        fix: Fix::Run,
    },
    Row {
        id: "D04",
        object: ("endpointslices", SYSTEM, "tunnel-dns-x"),
        breaks: |endpoints, _lab| endpoints["endpoints"] = json!([]),
        fix: Fix::Edit(|endpoints, _lab, _fix| *endpoints = slice("tunnel-dns")),
    },
    Row {
        id: "D06",
        object: ("configmaps", SYSTEM, "coredns"),
        breaks: |map, _lab| {
            let corefile = map["data"]["Corefile"].as_str().unwrap_or_default();
            let broken = corefile.replace("        fallthrough\n", "");
            map["data"]["Corefile"] = broken.into();
        },
        fix: Fix::Run,
    },
    Row {
        id: "D06",
        object: ("deployments", SYSTEM, "coredns"),
        breaks: |coredns, _lab| {
            let spec = &mut coredns["spec"]["template"]["spec"];
            spec["containers"][0]["volumeMounts"][0] = json!({
                "name": "edge", "mountPath": "/etc/edge/tunnel-nodes", "subPath": "tunnel-nodes",
            });
        },
        fix: Fix::Run,
    },
    Row {
        id: "D07",
        object: ("configmaps", SYSTEM, "yurt-tunnel-server-cfg"),
        breaks: |map, _lab| {
            let https = map["data"]["https-proxy-ports"].clone();
            map["data"]["http-proxy-ports"] = https;
        },
        fix: Fix::Run,
    },
    Row {
        id: "D08",
        object: ("nodes", "", NODE),
        breaks: |node, _lab| set_hostname(node, Some("-bad-")),
        fix: Fix::Edit(|node, _lab, _fix| set_hostname(node, None)),
    },
    Row {
        id: "D10",
        object: ("services", SYSTEM, "kube-dns"),
        breaks: |service, _lab| service["spec"]["internalTrafficPolicy"] = "Cluster".into(),
        fix: Fix::Run,
    },
    Row {
        id: "D12",
        object: ("servicemonitors", "monitoring", "node-exporter"),
        breaks: |monitor, _lab| monitor["spec"]["endpoints"] = json!([{ "port": "metrics" }]),
        fix: Fix::Run,
    },
    Row {
        id: "D12",
        object: ("servicemonitors", "monitoring", "node-exporter"),
        breaks: |monitor, _lab| {
            let rule = &mut monitor["spec"]["endpoints"][0]["relabelings"][0];
            rule["regex"] = "(.*);.*:(.*)".into();
        },
        fix: Fix::Run,
    },
    Row {
        id: "D14",
        object: ("deployments", SYSTEM, "tunnel-server"),
        breaks: |server, _lab| {
            server["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst".into();
        },
        fix: Fix::Run,
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_has_the_finding_of_its_id_and_the_printed_fix_removes_it() -> Result<()> {
    let Some(kubectls) = or_skip(kubectls()) else {
        return Ok(());
    };
    let kubectl = kubectls.into_iter().next().context("no kubectl")?;
    let lab = Lab::start(kubectl).await?;
    lab.wait_until_healthy("the lab", &[]).await;
    for row in ROWS {
        lab.change(row.object, |object| (row.breaks)(object, &lab))?;
        let fix = lab.wait_for_finding(row.id, &[]).await;
        match row.fix {
            Fix::Run => lab.run(&fix).await?,
            Fix::Edit(edit) => lab.change(row.object, |object| edit(object, &lab, &fix))?,
        }
        lab.wait_until_healthy(&format!("{}, fixed by {fix}", row.id), &[])
            .await;
        lab.reset()?;
    }
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
async fn rights_and_programs_that_are_missing_have_findings() -> Result<()> {
    let mut lab = Lab::start(PathBuf::new()).await?;
    lab.wait_until_healthy("the lab", &[]).await;

    let agent = lab.agent.take().context("no agent")?;
    agent.stop(FIRST).await?;
    let fix = lab.wait_for_finding("D09", &[]).await;
    ensure!(fix.contains("tunnel-agent status"), "{fix}");
    lab.start_agent().await?;
    lab.wait_until_healthy("the started agent", &[]).await;

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

#[tokio::test(flavor = "multi_thread")]
async fn service_that_yurthub_does_not_hide_has_a_finding() -> Result<()> {
    let lab = Lab::start(PathBuf::new()).await?;
    let fake_api = lab.cluster_env.fake_api()?;
    let labels = json!({ "k8s-app": "yurt-hub" });
    let yurthub = json!({
        "metadata": { "name": "yurt-hub-worker-1", "labels": labels },
        "spec": { "nodeName": NODE, "containers": [{ "name": "yurt-hub", "image": "example.org/x:1" }] },
    });
    fake_api.put("pods", Some(SYSTEM), yurthub)?;
    lab.wait_until_healthy("YurtHub", &[]).await;
    let service = fake_api.get("services", Some(SYSTEM), "x-tunnel-server-internal-svc");
    let mut service = service.context("no Service")?;
    service["metadata"]["name"] = "other".into();
    fake_api.put("services", Some(SYSTEM), service)?;
    fake_api.put("endpointslices", Some(SYSTEM), slice("other"))?;
    let other = ["--internal-service", "other"];
    let fix = lab.wait_for_finding("D15", &other).await;
    ensure!(fix.contains("remove --internal-service"), "{fix}");
    lab.wait_until_healthy("without the flag", &[]).await;
    Ok(())
}

fn set_flags(pod: &mut Value, flags: &[&str]) {
    let command: Vec<&str> = ["kube-apiserver"].iter().chain(flags).copied().collect();
    pod["spec"]["containers"][0]["command"] = json!(command);
}

fn set_kubelet_port(node: &mut Value, port: u16) {
    node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = port.into();
}

fn set_hostname(node: &mut Value, hostname: Option<&str>) {
    if let Some(addresses) = node["status"]["addresses"].as_array_mut() {
        addresses.retain(|address| address["type"] != "Hostname");
        let added = hostname.map(|name| json!({ "type": "Hostname", "address": name }));
        addresses.extend(added);
    }
}
