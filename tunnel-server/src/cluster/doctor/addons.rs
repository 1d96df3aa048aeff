//! Objects of other programs in the cluster that decide whether edge nodes are reached: CoreDNS,
//! the Prometheus operator, YurtHub and kube-proxy; and the workloads of the server.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, PodSpec, Service, Volume};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::config::Kubeconfig;

use super::monitors::{MonitorFacts, MonitorKind};
use super::reader::{Fact, Reader};
use crate::cluster::objects::SERVICE_NAME_LABEL;

/// The objects, as the API server returned them.
#[derive(Debug)]
pub(super) struct AddonObjects {
    pub(super) dns_workloads: Fact<Vec<Workload>>,
    pub(super) dns_service: Fact<Option<Service>>,
    pub(super) dns_slices: Fact<Vec<EndpointSlice>>,
    pub(super) server_workloads: Fact<Vec<Workload>>,
    pub(super) monitors: Fact<Vec<MonitorFacts>>,
    pub(super) yurthub_pods: Fact<Vec<Pod>>,
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
        let of_dns = format!("{SERVICE_NAME_LABEL}=kube-dns");
        let (
            dns_workloads,
            dns_service,
            dns_slices,
            server_workloads,
            monitors,
            yurthub_pods,
            kube_proxy_map,
        ) = tokio::join!(
            Box::pin(read_workloads(reader, "kube-system", DNS_LABEL)),
            Box::pin(reader.get(DNS_SERVICE)),
            Box::pin(reader.list(SYSTEM_SLICES, &of_dns)),
            Box::pin(read_workloads(reader, namespace, SERVER_LABEL)),
            Box::pin(read_monitors(reader)),
            Box::pin(reader.list(SYSTEM_PODS, YURTHUB_LABEL)),
            Box::pin(reader.get(KUBE_PROXY_MAP)),
        );
        Self {
            dns_workloads,
            dns_service,
            dns_slices,
            server_workloads,
            monitors,
            yurthub_pods,
            kube_proxy_map,
        }
    }

    /// Returns what follows from the objects. `records_map` is the ConfigMap of the records.
    pub(super) fn facts(self, records_map: &str) -> AddonFacts {
        let mounts = |workloads: Vec<Workload>| {
            let mounts = workloads.iter().flat_map(|one| one.mounts(records_map));
            mounts.collect()
        };
        AddonFacts {
            records_mounts: self.dns_workloads.map(mounts),
            cluster_dns: self.dns_service.and_then(|service| match service {
                Some(service) => Ok(Some(cluster_dns(&service, &self.dns_slices?))),
                None => Ok(None),
            }),
            server_workloads: self.server_workloads.map(|server| {
                let workloads = server.into_iter().map(|one| ServerWorkload {
                    // Without the field it is ClusterFirst.
                    dns_policy: one
                        .spec
                        .dns_policy
                        .unwrap_or_else(|| "ClusterFirst".to_owned()),
                    workload: one.name,
                });
                workloads.collect()
            }),
            monitors: self.monitors,
            yurthub_nodes: self.yurthub_pods.map(|pods| {
                let nodes = pods.into_iter().filter_map(|pod| pod.spec?.node_name);
                nodes.collect()
            }),
            kube_proxy_server: (self.kube_proxy_map)
                .map(|map| server_of(map?.data?.get(KUBE_PROXY_KUBECONFIG)?)),
        }
    }
}

async fn read_workloads(reader: &Reader, namespace: &str, label: &str) -> Fact<Vec<Workload>> {
    let path = |plural: &str| format!("/apis/apps/v1/namespaces/{namespace}/{plural}");
    let (deployments, daemon_sets) = (path("deployments"), path("daemonsets"));
    let (deployments, daemon_sets) = tokio::join!(
        Box::pin(reader.list(&deployments, label)),
        Box::pin(reader.list(&daemon_sets, label)),
    );
    Ok(Workload::all(deployments?, daemon_sets?))
}

async fn read_monitors(reader: &Reader) -> Fact<Vec<MonitorFacts>> {
    let (services, pods) = tokio::join!(
        Box::pin(reader.list_served(SERVICE_MONITORS)),
        Box::pin(reader.list_served(POD_MONITORS)),
    );
    let mut monitors = MonitorFacts::all(MonitorKind::Service, &services?);
    monitors.extend(MonitorFacts::all(MonitorKind::Pod, &pods?));
    Ok(monitors)
}

/// A Deployment or a DaemonSet.
#[derive(Debug)]
pub(super) struct Workload {
    /// Kind and name, as kubectl accepts them.
    name: String,
    spec: PodSpec,
}

impl Workload {
    fn all(deployments: Vec<Deployment>, daemon_sets: Vec<DaemonSet>) -> Vec<Self> {
        let workload = |kind: &str, metadata: ObjectMeta, spec: Option<PodSpec>| {
            Some(Self {
                name: format!("{kind} {}", metadata.name?),
                spec: spec.unwrap_or_default(),
            })
        };
        let deployments = deployments.into_iter().filter_map(|one| {
            let spec = one.spec.and_then(|spec| spec.template.spec);
            workload("deployment", one.metadata, spec)
        });
        let daemon_sets = daemon_sets.into_iter().filter_map(|one| {
            let spec = one.spec.and_then(|spec| spec.template.spec);
            workload("daemonset", one.metadata, spec)
        });
        deployments.chain(daemon_sets).collect()
    }

    /// Returns the mounts of volumes of a ConfigMap.
    fn mounts(&self, config_map: &str) -> Vec<RecordsMount> {
        let volumes = self.spec.volumes.iter().flatten();
        let is_of_map = |volume: &&Volume| {
            let map = volume.config_map.as_ref();
            map.is_some_and(|map| map.name == config_map)
        };
        let volumes: Vec<_> = volumes.filter(is_of_map).collect();
        let containers = self.spec.containers.iter().enumerate();
        let mounts = containers.flat_map(|(container, spec)| {
            let mounts = spec.volume_mounts.iter().flatten().enumerate();
            mounts.map(move |(mount, spec)| (container, mount, spec))
        });
        let of_map = mounts.filter(|(_, _, mount)| {
            let mut volumes = volumes.iter();
            volumes.any(|volume| volume.name == mount.name)
        });
        let mounts = of_map.map(|(container, mount, spec)| RecordsMount {
            workload: self.name.clone(),
            container,
            mount,
            path: spec.mount_path.clone(),
            has_sub_path: spec.sub_path.is_some(),
        });
        mounts.collect()
    }
}

fn cluster_dns(service: &Service, slices: &[EndpointSlice]) -> ClusterDnsFacts {
    let has_field = service.spec.as_ref().is_some_and(|spec| {
        spec.internal_traffic_policy.as_deref() == Some("Local")
            || spec.traffic_distribution.is_some()
    });
    let annotations = service.annotations();
    let mut known = TRAFFIC_ANNOTATIONS.iter();
    let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    ClusterDnsFacts {
        has_traffic_policy: has_field || known.any(|name| annotations.contains_key(*name)),
        nodes: endpoints
            .filter_map(|endpoint| endpoint.node_name.clone())
            .collect(),
    }
}

/// Returns the address of the API server in a kubeconfig; the rest may hold secrets.
fn server_of(kubeconfig: &str) -> Option<String> {
    let clusters = Kubeconfig::from_yaml(kubeconfig).ok()?.clusters;
    clusters.into_iter().find_map(|named| named.cluster?.server)
}

/// Pods of the control plane. A static Pod has a mirror Pod here.
pub(super) const SYSTEM_PODS: &str = "/api/v1/namespaces/kube-system/pods";
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
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn object<T: DeserializeOwned>(json: Value) -> T {
        serde_json::from_value(json).unwrap()
    }

    fn objects() -> AddonObjects {
        let coredns = object(json!({
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
        }));
        let server = object(json!({"metadata": {"name": "tunnel-server"}}));
        let kubeconfig = json!({"data": {
            "kubeconfig.conf": "clusters: [{name: default, cluster: {server: 'https://192.0.2.1:6443'}}]\n",
        }});
        AddonObjects {
            dns_workloads: Ok(Workload::all(vec![coredns], Vec::new())),
            dns_service: Ok(Some(object(
                json!({"spec": {"internalTrafficPolicy": "Cluster"}}),
            ))),
            dns_slices: Ok(vec![object(json!({"endpoints": [{"nodeName": "a"}, {}]}))]),
            server_workloads: Ok(Workload::all(Vec::new(), vec![server])),
            monitors: Ok(Vec::new()),
            yurthub_pods: Ok(vec![object(json!({"spec": {"nodeName": "a"}}))]),
            kube_proxy_map: Ok(Some(object(kubeconfig))),
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
        assert_eq!(workload.workload, "daemonset tunnel-server");
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
            let facts = cluster_dns(&object(service.clone()), &[]);
            assert!(facts.has_traffic_policy, "{service}");
        }
    }

    #[test]
    fn object_that_cannot_be_read_leaves_the_others() {
        let mut objects = objects();
        objects.monitors = Err("forbidden".to_owned());
        let facts = objects.facts("yurt-tunnel-nodes");
        assert_eq!(facts.monitors.unwrap_err(), "forbidden");
        assert!(facts.cluster_dns.is_ok());
    }
}
