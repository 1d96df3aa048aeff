//! Where a real kube-scheduler puts the servers of the manifests.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Api, Cluster, Kind, Real};
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::Gear;
use tunnel_tests::manifests::{find, installed};
use tunnel_tests::tools::or_skip;

/// A host of a cluster.
#[derive(Debug, Clone, Copy)]
struct Host {
    name: &'static str,
    zone: Option<&'static str>,
    is_control_plane: bool,
}

impl Host {
    const fn worker(name: &'static str) -> Self {
        Self {
            name,
            zone: None,
            is_control_plane: false,
        }
    }

    const fn control_plane(name: &'static str) -> Self {
        Self {
            is_control_plane: true,
            ..Self::worker(name)
        }
    }

    const fn of_zone(self, zone: &'static str) -> Self {
        Self {
            zone: Some(zone),
            ..self
        }
    }

    fn object(&self) -> Value {
        let mut labels =
            json!({ "kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux" });
        if let Some(zone) = self.zone {
            labels["topology.kubernetes.io/zone"] = json!(zone);
        }
        if self.is_control_plane {
            labels[ROLE] = json!("");
        }
        let resources = json!({ "cpu": "8", "memory": "16Gi", "pods": "110" });
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": self.name, "labels": labels },
            "status": {
                "capacity": resources, "allocatable": resources,
                "conditions": [{ "type": "Ready", "status": "True" }],
            },
        })
    }

    /// Without the taint of a new Node, which the node controller takes away in a cluster.
    fn taints(&self) -> Value {
        if self.is_control_plane {
            json!([{ "key": ROLE, "effect": "NoSchedule" }])
        } else {
            json!(null)
        }
    }
}

/// A cluster, and how many servers it has.
struct Topology {
    name: &'static str,
    hosts: &'static [Host],
    servers: usize,
    /// Number of different hosts, and of different zones that servers have.
    spread: (usize, usize),
}

const WITHOUT_ZONES: [Host; 3] = [
    Host::control_plane("c1"),
    Host::worker("w1"),
    Host::worker("w2"),
];

const TOPOLOGIES: [Topology; 6] = [
    Topology {
        name: "one control plane, two workers, no zones",
        hosts: &WITHOUT_ZONES,
        servers: 2,
        spread: (2, 0),
    },
    Topology {
        name: "the same, three servers",
        hosts: &WITHOUT_ZONES,
        servers: 3,
        spread: (3, 0),
    },
    Topology {
        name: "three control planes",
        hosts: &[
            Host::control_plane("c1"),
            Host::control_plane("c2"),
            Host::control_plane("c3"),
            Host::worker("w1"),
        ],
        servers: 2,
        spread: (2, 0),
    },
    Topology {
        name: "two zones",
        hosts: &[
            Host::control_plane("c1").of_zone("a"),
            Host::worker("w1").of_zone("a"),
            Host::worker("w2").of_zone("a"),
            Host::worker("w3").of_zone("b"),
        ],
        servers: 2,
        spread: (2, 2),
    },
    Topology {
        name: "a control plane without a zone, workers with zones",
        hosts: &[
            Host::control_plane("c1"),
            Host::worker("w1").of_zone("a"),
            Host::worker("w2").of_zone("b"),
        ],
        servers: 3,
        spread: (3, 2),
    },
    Topology {
        name: "one host",
        hosts: &[Host::control_plane("c1")],
        servers: 2,
        spread: (1, 0),
    },
];

/// Servers run on different hosts, and in different zones where hosts of several are free, at first
/// and after each rollout.
#[tokio::test(flavor = "multi_thread")]
async fn real_scheduler_puts_servers_on_different_hosts() -> Result<()> {
    let Some(binaries) = or_skip(Real::binaries()) else {
        return Ok(());
    };
    let Some(cluster) = Cluster::start(Kind::Real).await? else {
        return Ok(());
    };
    let Some(scheduler) = or_skip(Real::scheduler(&binaries, &cluster.admin_kubeconfig()?)) else {
        return Ok(());
    };
    let scheduler = scheduler?;
    eventually("the priority of the pods exists", TIMEOUT, async || {
        cluster.admin().get(PRIORITY).await?.context("not yet")
    })
    .await;
    let objects = installed()?;
    let template = find(&objects, "Deployment", "tunnel-server")?["spec"]["template"].clone();
    for topology in &TOPOLOGIES {
        let placed = run(cluster.admin(), topology, &template).await;
        placed.with_context(|| format!("{}; {scheduler}", topology.name))?;
    }
    Ok(())
}

async fn run(api: &Api, topology: &Topology, template: &Value) -> Result<()> {
    for host in topology.hosts {
        api.create(NODES, &host.object()).await?;
        let taints = json!({ "spec": { "taints": host.taints() } });
        api.merge(&format!("{NODES}/{}", host.name), &taints)
            .await?;
    }
    let mut old: Vec<String> = Vec::new();
    let revisions = Gear::current().pick(4, 20);
    for revision in 0..revisions {
        let mut new = Vec::new();
        for number in 0..topology.servers {
            let name = format!("server-{revision}-{number}");
            api.create(PODS, &pod(template, &name, revision)).await?;
            new.push(host_of(api, &name).await?);
            // Each new one that is ready replaces an old one.
            if let Some(replaced) = revision.checked_sub(1) {
                remove(api, &format!("server-{replaced}-{number}")).await?;
            }
        }
        let hosts: BTreeSet<_> = new.iter().collect();
        let zones = topology
            .hosts
            .iter()
            .filter(|host| hosts.contains(&host.name.to_owned()));
        let zones: BTreeSet<_> = zones.filter_map(|host| host.zone).collect();
        ensure!(
            (hosts.len(), zones.len()) == topology.spread,
            "revision {revision}: {old:?}, then {new:?}"
        );
        old = new;
    }
    for number in 0..topology.servers {
        remove(api, &format!("server-{}-{number}", revisions - 1)).await?;
    }
    for host in topology.hosts {
        api.delete(&format!("{NODES}/{}", host.name)).await?;
    }
    Ok(())
}

/// Returns a pod as the ReplicaSet of a revision makes it.
fn pod(template: &Value, name: &str, revision: usize) -> Value {
    let mut pod = template.clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod["metadata"]["labels"]["pod-template-hash"] = json!(revision.to_string());
    pod
}

async fn host_of(api: &Api, pod: &str) -> Result<String> {
    let path = format!("{PODS}/{pod}");
    let host = eventually("the pod has a host", TIMEOUT, async || {
        let pod = api.get(&path).await?.context("no such pod")?;
        let host = pod["spec"]["nodeName"].as_str().map(str::to_owned);
        host.with_context(|| pod["status"]["conditions"].to_string())
    });
    Ok(host.await)
}

/// Removes a pod at once, as the kubelet of its host does when it has ended.
async fn remove(api: &Api, pod: &str) -> Result<()> {
    api.delete(&format!("{PODS}/{pod}?gracePeriodSeconds=0"))
        .await
}

const NAMESPACE: &str = "kube-system";
const NODES: &str = "/api/v1/nodes";
const PODS: &str = "/api/v1/namespaces/kube-system/pods";
/// kube-apiserver makes it soon after its start.
const PRIORITY: &str = "/apis/scheduling.k8s.io/v1/priorityclasses/system-cluster-critical";
const ROLE: &str = "node-role.kubernetes.io/control-plane";
const TIMEOUT: Duration = Duration::from_secs(60);
