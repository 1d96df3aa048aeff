//! The verb `doctor` in a cluster: a healthy lab has no finding, each fault has the finding of its
//! id and no other, and the printed fix removes the finding.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Listener, Process, Program, ScratchDir, Server};
use tunnel_tests::targets::{FakeKubelet, TargetTls};
use tunnel_tests::tools::or_skip;

use super::kubectl::kubectls;
use super::{ClusterEnv, FIRST, GUIDE_IP, GUIDE_RECORDS};

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

const SYSTEM: &str = "kube-system";
const APISERVER: (&str, &str, &str) = ("pods", SYSTEM, "kube-apiserver-master-1");

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

/// A cluster with a server, an agent, its kubelet, and other programs around them.
struct Lab {
    cluster_env: ClusterEnv,
    server: Server,
    _agent: Process,
    kubelet: FakeKubelet,
    /// A kubelet whose certificate is for another name.
    unsigned: FakeKubelet,
    kubectl: PathBuf,
    home: ScratchDir,
}

impl Lab {
    async fn start(kubectl: PathBuf) -> Result<Self> {
        let cluster_env = ClusterEnv::fake().await?;
        let kubelet = FakeKubelet::start(NODE).await?;
        let other = TargetTls::self_signed(&["other"])?;
        let unsigned = FakeKubelet::start_on("127.0.0.1:0".parse()?, NODE, Some(other)).await?;
        cluster_env.create_service(GUIDE_IP).await?;
        let node = edge(NODE).with_kubelet_port(kubelet.addr().port());
        cluster_env.objects().add(&node).await?;
        let master = cloud("master-1", "192.168.33.220");
        cluster_env.objects().add(&master).await?;
        let server = cluster_env.server("a").await?;
        cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
        let folder = cluster_env.scratch.path().join("agent");
        let agent = server.agent_setup(NODE, &folder).await?.start()?;
        server.wait_until_connected(&[NODE]).await;
        let ports = [kubelet.addr().port(), unsigned.addr().port()];
        let ports = ports.map(|port| port.to_string()).join(", ");
        let lists = [("https-proxy-ports", ports.as_str())];
        cluster_env.objects().set_ports(&lists).await?;
        let lab = Self {
            cluster_env,
            server,
            _agent: agent,
            kubelet,
            unsigned,
            kubectl,
            home: ScratchDir::new()?,
        };
        let (http, https) = (Listener::Http, Listener::Https);
        let service = ("services", SYSTEM, "x-tunnel-server-internal-svc");
        lab.change(service, |service| {
            set_target(service, 10250, lab.server.address(https).port());
            set_target(service, 10255, lab.server.address(http).port());
        })?;
        lab.reset()?;
        Ok(lab)
    }

    /// Stores the objects of other programs without faults.
    fn reset(&self) -> Result<()> {
        for (plural, namespace, object) in healthy_objects() {
            let fake_api = self.cluster_env.fake_api()?;
            fake_api.put(plural, Some(namespace), object)?;
        }
        Ok(())
    }

    /// Changes a stored object.
    fn change(
        &self,
        (plural, namespace, name): (&str, &str, &str),
        change: impl FnOnce(&mut Value),
    ) -> Result<()> {
        let fake_api = self.cluster_env.fake_api()?;
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        let object = fake_api.get(plural, namespace, name);
        let mut object = object.with_context(|| format!("no {name} in {plural}"))?;
        change(&mut object);
        fake_api.put(plural, namespace, object)
    }

    /// Runs a printed command.
    async fn run(&self, command: &str) -> Result<()> {
        let folder = self.kubectl.parent().context("no folder")?;
        let inherited = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{inherited}", folder.display());
        let kubeconfig = self.cluster_env.cluster.admin_kubeconfig()?;
        let shell = Program::at("/bin/sh".as_ref())
            .args(["-ec", command])
            .env("PATH", path)
            .env("KUBECONFIG", kubeconfig)
            .env("HOME", self.home.path());
        shell.run().await?.ok().map(drop)
    }

    /// Waits until there are errors or warnings, all of them with this id. Returns the fix of the
    /// first.
    async fn wait_for_finding(&self, id: &str, settings: &[&str]) -> String {
        eventually(id, FIRST, async || {
            let faults = self.faults(settings).await?;
            let ids = || faults.iter().map(|fault| &fault["id"]);
            ensure!(
                !faults.is_empty() && ids().all(|found| found == id),
                "{faults:#?}"
            );
            let fix = faults.first().and_then(|fault| fault["fix"].as_str());
            fix.map(str::to_owned).context("no fix")
        })
        .await
    }

    /// Waits until there are neither errors nor warnings.
    async fn wait_until_healthy(&self, what: &str, settings: &[&str]) {
        eventually(what, FIRST, async || {
            let faults = self.faults(settings).await?;
            ensure!(faults.is_empty(), "{faults:#?}");
            anyhow::Ok(())
        })
        .await;
    }

    /// Returns the errors and the warnings of `doctor` with the settings of the server. D18 is the
    /// host's.
    async fn faults(&self, settings: &[&str]) -> Result<Vec<Value>> {
        let kubeconfig = self.cluster_env.cluster.admin_kubeconfig()?;
        let address = |listener| self.server.address(listener).to_string();
        let verb = self.server.verb(&["doctor", "--json", "--only", CHECKS])?;
        let verb = verb
            .args(["--kubernetes", "on", "--namespace", SYSTEM, "--kubeconfig"])
            .arg(kubeconfig)
            .args(["--agent-listen", &address(Listener::Agents)])
            .args(["--https-listen", &address(Listener::Https)])
            .args(["--http-listen", &address(Listener::Http)])
            .args(["--meta-listen", &address(Listener::Meta)])
            .args(["--dns-listen", "127.0.0.1:0", "--dns-upstream", "off"]);
        let finished = verb.args(settings.iter().copied()).run().await?;
        let Ok(document) = serde_json::from_str::<Value>(&finished.out) else {
            bail!("{finished}");
        };
        let findings = document["findings"].as_array().cloned();
        let mut findings = findings.with_context(|| format!("{finished}"))?;
        findings.retain(|finding| finding["severity"] != "info");
        Ok(findings)
    }
}

/// Returns the objects of other programs, each with its collection and namespace.
fn healthy_objects() -> Vec<(&'static str, &'static str, Value)> {
    let flags = [
        "kube-apiserver",
        "--egress-selector-config-file=/e",
        "--kubelet-certificate-authority=/ca",
    ];
    let apiserver = json!({
        "metadata": { "name": APISERVER.2, "labels": { "component": "kube-apiserver" } },
        "spec": {
            "dnsPolicy": "None",
            "dnsConfig": { "nameservers": ["10.96.0.8", "192.0.2.53"] },
            "containers": [{ "name": "kube-apiserver", "command": flags }],
        },
    });
    let corefile = ".:53 {\n    hosts /etc/edge/tunnel-nodes {\n        fallthrough\n    }\n}\n";
    let corefile = json!({ "metadata": { "name": "coredns" }, "data": { "Corefile": corefile } });
    let dns = json!({
        "metadata": { "name": "kube-dns" },
        "spec": { "clusterIP": "10.96.0.10", "internalTrafficPolicy": "Local", "ports": [{ "port": 53, "protocol": "UDP" }] },
    });
    let monitor = json!({
        "metadata": { "name": "node-exporter" },
        "spec": {
            "selector": { "matchLabels": { "app": "node-exporter" } },
            "endpoints": [{ "port": "metrics", "relabelings": [{
                "sourceLabels": ["__meta_kubernetes_pod_node_name", "__address__"],
                "regex": "(.+);.*:(.*)", "targetLabel": "__address__", "replacement": "$1:$2",
            }] }],
        },
    });
    vec![
        ("pods", SYSTEM, apiserver),
        ("configmaps", SYSTEM, corefile),
        ("deployments", SYSTEM, coredns()),
        (
            "deployments",
            SYSTEM,
            workload("tunnel-server", "app.kubernetes.io/name", "tunnel-server"),
        ),
        ("services", SYSTEM, dns),
        ("endpointslices", SYSTEM, slice("kube-dns")),
        (
            "endpointslices",
            SYSTEM,
            slice("x-tunnel-server-internal-svc"),
        ),
        ("servicemonitors", "monitoring", monitor),
    ]
}

fn coredns() -> Value {
    let mut coredns = workload("coredns", "k8s-app", "kube-dns");
    let spec = &mut coredns["spec"]["template"]["spec"];
    spec["volumes"] = json!([{ "name": "edge", "configMap": { "name": "yurt-tunnel-nodes" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "edge", "mountPath": "/etc/edge" }]);
    coredns
}

/// Returns a Deployment whose Pods resolve as their hosts do.
fn workload(name: &str, label: &str, value: &str) -> Value {
    let labels = json!({ label: value });
    json!({
        "metadata": { "name": name, "labels": labels },
        "spec": {
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "dnsPolicy": "Default",
                    "containers": [{ "name": name, "image": "example.org/x:1" }],
                },
            },
        },
    })
}

/// Returns the endpoints of a Service, one on each node.
fn slice(service: &str) -> Value {
    let endpoint = |node: &str, address: &str| json!({ "addresses": [address], "nodeName": node, "conditions": { "ready": true } });
    json!({
        "metadata": { "name": format!("{service}-x"), "labels": { "kubernetes.io/service-name": service } },
        "addressType": "IPv4",
        "endpoints": [endpoint(NODE, "10.244.1.2"), endpoint("master-1", "10.244.0.2")],
    })
}

fn set_flags(pod: &mut Value, flags: &[&str]) {
    let command: Vec<&str> = ["kube-apiserver"].iter().chain(flags).copied().collect();
    pod["spec"]["containers"][0]["command"] = json!(command);
}

fn set_kubelet_port(node: &mut Value, port: u16) {
    node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = port.into();
}

/// Sets the target of a port of a Service.
fn set_target(service: &mut Value, port: u16, target: u16) {
    let ports = service["spec"]["ports"].as_array_mut();
    for entry in ports.into_iter().flatten() {
        if entry["port"] == port {
            entry["targetPort"] = target.into();
        }
    }
}

const NODE: &str = "worker-1";
const CHECKS: &str = "D01,D02,D03,D04,D05,D06,D07,D08,D09,D10,D11,D12,D13,D14,D15,D16,D17";
