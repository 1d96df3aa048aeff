//! The cluster in which faults are set up.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Finished, Listener, Process, Program, ScratchDir, Server};
use tunnel_tests::targets::{FakeKubelet, TargetTls};

use crate::cluster::{ClusterEnv, FIRST, GUIDE_IP, GUIDE_RECORDS};

/// A cluster with a server, an agent, its kubelet, and other programs around them.
pub(super) struct Lab {
    pub(super) cluster_env: ClusterEnv,
    pub(super) server: Server,
    _agent: Process,
    /// The kubeconfig of the command.
    pub(super) kubeconfig: PathBuf,
    pub(super) kubelet: FakeKubelet,
    /// A kubelet whose certificate is for another name.
    pub(super) unsigned: FakeKubelet,
    kubectl: PathBuf,
    home: ScratchDir,
}

impl Lab {
    pub(super) async fn start(kubectl: PathBuf) -> Result<Self> {
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
        let ports = [kubelet.addr().port(), unsigned.addr().port()];
        let ports = ports.map(|port| port.to_string()).join(", ");
        let lists = [("https-proxy-ports", ports.as_str())];
        cluster_env.objects().set_ports(&lists).await?;
        let folder = cluster_env.scratch.path().join("agent");
        let agent = server.agent_setup(NODE, &folder).await?.start()?;
        server.wait_until_connected(&[NODE]).await;
        let lab = Self {
            kubeconfig: cluster_env.cluster.admin_kubeconfig()?,
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
    pub(super) fn reset(&self) -> Result<()> {
        for (plural, namespace, object) in healthy_objects() {
            let fake_api = self.cluster_env.fake_api()?;
            fake_api.put(plural, Some(namespace), object)?;
        }
        Ok(())
    }

    /// Changes a stored object.
    pub(super) fn change(
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

    /// Sets what the server may do with an object, or with all of a resource. Returns what it could.
    pub(super) fn set_verbs(&self, name: &str, verbs: &Value) -> Result<Value> {
        let mut before = Value::Null;
        self.change(("roles", SYSTEM, "tunnel-server"), |role| {
            let rules = role["rules"].as_array_mut().into_iter().flatten();
            for rule in rules {
                if rule["resourceNames"][0] == name || rule["resources"][0] == name {
                    before = std::mem::replace(&mut rule["verbs"], verbs.clone());
                }
            }
        })?;
        ensure!(before.is_array(), "no rule for {name}");
        Ok(before)
    }

    /// Runs a printed command.
    pub(super) async fn run(&self, command: &str) -> Result<()> {
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
    pub(super) async fn wait_for_finding(&self, id: &str, settings: &[&str]) -> String {
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
    pub(super) async fn wait_until_healthy(&self, what: &str, settings: &[&str]) {
        eventually(what, FIRST, async || {
            let faults = self.faults(settings).await?;
            ensure!(faults.is_empty(), "{faults:#?}");
            anyhow::Ok(())
        })
        .await;
    }

    /// Runs all checks on a host without a server.
    pub(super) async fn remote(&self, settings: &[&str]) -> Result<Finished> {
        let verb = Program::ours("tunnel-server")?.args(["doctor", "--data-dir"]);
        let verb = self.of_cluster(verb.arg(self.home.path().join("none")));
        verb.args(settings.iter().copied()).run().await
    }

    /// Adds the settings of the server that concern the cluster.
    fn of_cluster(&self, verb: Program) -> Program {
        let address = |listener| self.server.address(listener).to_string();
        verb.args(["--kubernetes", "on", "--namespace", SYSTEM, "--kubeconfig"])
            .arg(&self.kubeconfig)
            .args(["--agent-listen", &address(Listener::Agents)])
            .args(["--https-listen", &address(Listener::Https)])
            .args(["--http-listen", &address(Listener::Http)])
            .args(["--meta-listen", &address(Listener::Meta)])
    }

    /// Returns the errors and the warnings of `doctor` with the settings of the server. D18 is the
    /// host's.
    async fn faults(&self, settings: &[&str]) -> Result<Vec<Value>> {
        let verb = self
            .server
            .verb(&["doctor", "-o", "json", "--only", CHECKS])?;
        let verb = self.of_cluster(verb);
        let verb = verb.args(["--dns-listen", "127.0.0.1:0", "--dns-upstream", "off"]);
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
        ("endpointslices", SYSTEM, slice("tunnel-dns")),
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

pub(super) fn set_target(service: &mut Value, port: u16, target: u16) {
    let ports = service["spec"]["ports"].as_array_mut();
    for entry in ports.into_iter().flatten() {
        if entry["port"] == port {
            entry["targetPort"] = target.into();
        }
    }
}

pub(super) const NODE: &str = "worker-1";
pub(super) const SYSTEM: &str = "kube-system";
const APISERVER: (&str, &str, &str) = ("pods", SYSTEM, "kube-apiserver-master-1");
const CHECKS: &str = "D01,D02,D03,D04,D05,D06,D07,D08,D09,D10,D11,D12,D13,D14,D15,D16,D17";
