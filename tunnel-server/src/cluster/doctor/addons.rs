//! Objects of other programs in the cluster that decide whether edge nodes are reached: CoreDNS,
//! the Prometheus operator, YurtHub and kube-proxy; and the workloads of the server.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;

use super::monitors::{MonitorFacts, MonitorKind};
use super::reader::{Fact, Reader};
use crate::cluster::objects::SERVICE_NAME_LABEL;

/// The objects, as the API server returned them.
#[derive(Debug)]
pub(super) struct AddonObjects {
    pub(super) dns_deployments: Fact<Vec<Value>>,
    pub(super) dns_daemon_sets: Fact<Vec<Value>>,
    pub(super) dns_service: Fact<Option<Value>>,
    pub(super) dns_slices: Fact<Vec<Value>>,
    pub(super) server_deployments: Fact<Vec<Value>>,
    pub(super) server_daemon_sets: Fact<Vec<Value>>,
    pub(super) service_monitors: Fact<Vec<Value>>,
    pub(super) pod_monitors: Fact<Vec<Value>>,
    pub(super) yurthub_pods: Fact<Vec<Value>>,
    pub(super) kube_proxy_map: Fact<Option<ConfigMap>>,
}

/// What follows from the objects.
#[derive(Debug, Clone)]
pub(crate) struct AddonFacts {
    /// Mounts of the ConfigMap of the records in Pods of CoreDNS.
    pub(crate) records_mounts: Fact<Vec<RecordsMount>>,
    /// The Service of CoreDNS. `None` if it does not exist.
    pub(crate) cluster_dns: Fact<Option<ClusterDnsFacts>>,
    pub(crate) server_workloads: Fact<Vec<ServerWorkload>>,
    /// Monitors of kubelets and node exporters.
    pub(crate) monitors: Fact<Vec<MonitorFacts>>,
    /// Nodes on which YurtHub runs.
    pub(crate) yurthub_nodes: Fact<BTreeSet<String>>,
    /// The API server from which kube-proxy has the endpoints of Services.
    pub(crate) kube_proxy_server: Fact<Option<String>>,
}

/// A mount of the ConfigMap of the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordsMount {
    /// The workload, as in `deployment coredns`.
    pub(crate) workload: String,
    /// Number of the container.
    pub(crate) container: usize,
    /// Number of the mount in the container.
    pub(crate) mount: usize,
    pub(crate) path: String,
    pub(crate) has_sub_path: bool,
}

/// What the Service `kube-dns` and its endpoints say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClusterDnsFacts {
    /// Whether a field or an annotation prefers near endpoints.
    pub(crate) has_traffic_policy: bool,
    /// Nodes with an endpoint.
    pub(crate) nodes: BTreeSet<String>,
}

/// A Deployment or DaemonSet of the server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerWorkload {
    /// The workload, as in `deployment tunnel-server`.
    pub(crate) workload: String,
    pub(crate) dns_policy: String,
}

impl AddonObjects {
    /// Reads the objects, all at the same time.
    pub(super) async fn read(reader: &Reader, namespace: &str) -> Self {
        let of_server = |plural: &str| format!("/apis/apps/v1/namespaces/{namespace}/{plural}");
        let of_dns = format!("{SERVICE_NAME_LABEL}=kube-dns");
        let (deployments, daemon_sets) = (of_server("deployments"), of_server("daemonsets"));
        let (
            dns_deployments,
            dns_daemon_sets,
            dns_service,
            dns_slices,
            server_deployments,
            server_daemon_sets,
            service_monitors,
            pod_monitors,
            yurthub_pods,
            kube_proxy_map,
        ) = tokio::join!(
            Box::pin(reader.list(SYSTEM_DEPLOYMENTS, DNS_LABEL)),
            Box::pin(reader.list(SYSTEM_DAEMON_SETS, DNS_LABEL)),
            Box::pin(reader.get(DNS_SERVICE)),
            Box::pin(reader.list(SYSTEM_SLICES, &of_dns)),
            Box::pin(reader.list(&deployments, SERVER_LABEL)),
            Box::pin(reader.list(&daemon_sets, SERVER_LABEL)),
            Box::pin(reader.list_served(SERVICE_MONITORS)),
            Box::pin(reader.list_served(POD_MONITORS)),
            Box::pin(reader.list(SYSTEM_PODS, YURTHUB_LABEL)),
            Box::pin(reader.get(KUBE_PROXY_MAP)),
        );
        Self {
            dns_deployments,
            dns_daemon_sets,
            dns_service,
            dns_slices,
            server_deployments,
            server_daemon_sets,
            service_monitors,
            pod_monitors,
            yurthub_pods,
            kube_proxy_map,
        }
    }

    /// Returns what follows from the objects. `records_map` is the ConfigMap of the records.
    pub(super) fn facts(self, records_map: &str) -> AddonFacts {
        let dns = workloads(self.dns_deployments, self.dns_daemon_sets);
        let server = workloads(self.server_deployments, self.server_daemon_sets);
        let monitors = self.service_monitors.and_then(|services| {
            let services = MonitorFacts::all(MonitorKind::Service, &services);
            let pods = MonitorFacts::all(MonitorKind::Pod, &self.pod_monitors?);
            Ok(services.into_iter().chain(pods).collect())
        });
        AddonFacts {
            records_mounts: dns.map(|dns| {
                let mounts = dns.iter().flat_map(|one| one.mounts(records_map));
                mounts.collect()
            }),
            cluster_dns: self.dns_service.and_then(|service| match service {
                Some(service) => Ok(Some(cluster_dns(&service, &self.dns_slices?))),
                None => Ok(None),
            }),
            server_workloads: server.map(|server| {
                let workloads = server.iter().map(|one| ServerWorkload {
                    workload: one.name.clone(),
                    dns_policy: one.dns_policy().to_owned(),
                });
                workloads.collect()
            }),
            monitors,
            yurthub_nodes: self.yurthub_pods.map(|pods| {
                let nodes = pods
                    .iter()
                    .filter_map(|pod| pod["spec"]["nodeName"].as_str());
                nodes.map(str::to_owned).collect()
            }),
            kube_proxy_server: (self.kube_proxy_map)
                .map(|map| server_of(&map?.data?.remove(KUBE_PROXY_KUBECONFIG)?)),
        }
    }
}

/// A Deployment or a DaemonSet.
struct Workload {
    /// Kind and name, as kubectl accepts them.
    name: String,
    object: Value,
}

impl Workload {
    fn spec(&self) -> &Value {
        &self.object["spec"]["template"]["spec"]
    }

    fn dns_policy(&self) -> &str {
        // Without the field it is ClusterFirst.
        self.spec()["dnsPolicy"].as_str().unwrap_or("ClusterFirst")
    }

    /// Returns the mounts of volumes of a ConfigMap.
    fn mounts(&self, config_map: &str) -> Vec<RecordsMount> {
        let volumes = self.spec()["volumes"].as_array().into_iter().flatten();
        let names: BTreeSet<&str> = volumes
            .filter(|volume| volume["configMap"]["name"] == config_map)
            .filter_map(|volume| volume["name"].as_str())
            .collect();
        let containers = self.spec()["containers"].as_array().into_iter().flatten();
        let mounts = containers.enumerate().flat_map(|(container, spec)| {
            let mounts = spec["volumeMounts"].as_array().into_iter().flatten();
            mounts
                .enumerate()
                .map(move |(mount, spec)| (container, mount, spec))
        });
        mounts
            .filter(|(_, _, spec)| {
                spec["name"]
                    .as_str()
                    .is_some_and(|name| names.contains(name))
            })
            .filter_map(|(container, mount, spec)| {
                Some(RecordsMount {
                    workload: self.name.clone(),
                    container,
                    mount,
                    path: spec["mountPath"].as_str()?.to_owned(),
                    has_sub_path: !spec["subPath"].is_null(),
                })
            })
            .collect()
    }
}

fn workloads(deployments: Fact<Vec<Value>>, daemon_sets: Fact<Vec<Value>>) -> Fact<Vec<Workload>> {
    let kinds = [("deployment", deployments?), ("daemonset", daemon_sets?)];
    let workloads = kinds.into_iter().flat_map(|(kind, objects)| {
        objects.into_iter().filter_map(move |object| {
            let name = format!("{kind} {}", object["metadata"]["name"].as_str()?);
            Some(Workload { name, object })
        })
    });
    Ok(workloads.collect())
}

fn cluster_dns(service: &Value, slices: &[Value]) -> ClusterDnsFacts {
    let spec = &service["spec"];
    let annotations = &service["metadata"]["annotations"];
    let endpoints = slices
        .iter()
        .filter_map(|slice| slice["endpoints"].as_array())
        .flatten();
    let nodes = endpoints.filter_map(|endpoint| endpoint["nodeName"].as_str());
    ClusterDnsFacts {
        has_traffic_policy: spec["internalTrafficPolicy"] == "Local"
            || !spec["trafficDistribution"].is_null()
            || TRAFFIC_ANNOTATIONS
                .iter()
                .any(|name| !annotations[*name].is_null()),
        nodes: nodes.map(str::to_owned).collect(),
    }
}

/// Returns the address of the API server in a kubeconfig; the rest may hold secrets.
fn server_of(kubeconfig: &str) -> Option<String> {
    let mut lines = kubeconfig.lines().map(str::trim);
    let server = lines.find_map(|line| line.strip_prefix("server:"))?;
    Some(server.trim().to_owned())
}

/// Pods of the control plane. A static Pod has a mirror Pod here.
pub(super) const SYSTEM_PODS: &str = "/api/v1/namespaces/kube-system/pods";
const SYSTEM_DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/kube-system/deployments";
const SYSTEM_DAEMON_SETS: &str = "/apis/apps/v1/namespaces/kube-system/daemonsets";
const SYSTEM_SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";
const DNS_SERVICE: &str = "/api/v1/namespaces/kube-system/services/kube-dns";
/// Label of CoreDNS in every cluster, for compatibility with its predecessor.
const DNS_LABEL: &str = "k8s-app=kube-dns";
/// Label of the server's workloads in the manifests.
const SERVER_LABEL: &str = "app.kubernetes.io/name=tunnel-server";
const SERVICE_MONITORS: &str = "/apis/monitoring.coreos.com/v1/servicemonitors";
const POD_MONITORS: &str = "/apis/monitoring.coreos.com/v1/podmonitors";
const YURTHUB_LABEL: &str = "k8s-app=yurt-hub";
/// kubeadm's ConfigMap of kube-proxy.
const KUBE_PROXY_MAP: &str = "/api/v1/namespaces/kube-system/configmaps/kube-proxy";
const KUBE_PROXY_KUBECONFIG: &str = "kubeconfig.conf";
/// Annotations with which Kubernetes and OpenYurt prefer near endpoints.
const TRAFFIC_ANNOTATIONS: [&str; 3] = [
    "service.kubernetes.io/topology-mode",
    "service.kubernetes.io/topology-aware-hints",
    "openyurt.io/topologyKeys",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn objects() -> AddonObjects {
        let coredns = json!({
            "metadata": {"name": "coredns"},
            "spec": {"template": {"spec": {
                "volumes": [
                    {"name": "config", "configMap": {"name": "coredns"}},
                    {"name": "edge", "configMap": {"name": "yurt-tunnel-nodes"}},
                ],
                "containers": [{"name": "coredns", "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/coredns"},
                    {"name": "edge", "mountPath": "/etc/edge/tunnel-nodes", "subPath": "tunnel-nodes"},
                ]}],
            }}},
        });
        let kubeconfig = json!({"data": {
            "kubeconfig.conf": "clusters:\n- cluster:\n    server: https://192.0.2.1:6443\n",
        }});
        AddonObjects {
            dns_deployments: Ok(vec![coredns]),
            dns_daemon_sets: Ok(Vec::new()),
            dns_service: Ok(Some(json!({"spec": {"internalTrafficPolicy": "Cluster"}}))),
            dns_slices: Ok(vec![json!({"endpoints": [{"nodeName": "a"}, {}]})]),
            server_deployments: Ok(vec![json!({"metadata": {"name": "tunnel-server"}})]),
            server_daemon_sets: Ok(Vec::new()),
            service_monitors: Ok(Vec::new()),
            pod_monitors: Ok(Vec::new()),
            yurthub_pods: Ok(vec![json!({"spec": {"nodeName": "a"}})]),
            kube_proxy_map: Ok(Some(serde_json::from_value(kubeconfig).unwrap())),
        }
    }

    #[test]
    fn facts_follow_from_the_objects() {
        let facts = objects().facts("yurt-tunnel-nodes");
        let mount = RecordsMount {
            workload: "deployment coredns".to_owned(),
            container: 0,
            mount: 1,
            path: "/etc/edge/tunnel-nodes".to_owned(),
            has_sub_path: true,
        };
        assert_eq!(facts.records_mounts, Ok(vec![mount]));
        let dns = facts.cluster_dns.unwrap().unwrap();
        assert!(!dns.has_traffic_policy);
        assert_eq!(dns.nodes, BTreeSet::from(["a".to_owned()]));
        let workload = &facts.server_workloads.unwrap()[0];
        assert_eq!(workload.dns_policy, "ClusterFirst");
        assert_eq!(facts.yurthub_nodes.unwrap().len(), 1);
        let server = facts.kube_proxy_server.unwrap();
        assert_eq!(server.as_deref(), Some("https://192.0.2.1:6443"));
    }

    #[test]
    fn traffic_policy_is_a_field_or_an_annotation() {
        for service in [
            json!({"spec": {"internalTrafficPolicy": "Local"}}),
            json!({"spec": {"trafficDistribution": "PreferSameNode"}}),
            json!({"metadata": {"annotations": {"openyurt.io/topologyKeys": "openyurt.io/nodepool"}}}),
        ] {
            assert!(cluster_dns(&service, &[]).has_traffic_policy, "{service}");
        }
    }

    #[test]
    fn object_that_cannot_be_read_leaves_the_others() {
        let mut objects = objects();
        objects.pod_monitors = Err("forbidden".to_owned());
        let facts = objects.facts("yurt-tunnel-nodes");
        assert_eq!(facts.monitors.unwrap_err(), "forbidden");
        assert!(facts.cluster_dns.is_ok());
    }
}
