//! Processing of an object before storage: server-managed fields, defaults, cluster addresses.

use std::net::IpAddr;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::kinds::{Address, Kind};
use super::store::{Content, Key};
use crate::manifests::items;

/// Returns the key of an object.
pub(super) fn key(kind: &Kind, namespace: Option<&str>, name: &str) -> Key {
    Key {
        storage: kind.storage(),
        namespace: namespace.unwrap_or_default().to_owned(),
        name: name.to_owned(),
    }
}

/// Returns the current time. Objects contain whole seconds only.
pub(super) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Sets kind, version, namespace and name of an object that was sent to `address`.
pub(super) fn set_address(address: &Address, object: &mut Value) {
    object["kind"] = address.kind.kind.into();
    object["apiVersion"] = address.kind.api_version().into();
    if let Some(namespace) = &address.namespace {
        object["metadata"]["namespace"] = namespace.as_str().into();
    }
    if let Some(name) = &address.name {
        object["metadata"]["name"] = name.as_str().into();
    }
}

/// Sets the server-managed fields of a new object.
pub(super) fn born(kind: &Kind, object: &mut Value) {
    let metadata = &mut object["metadata"];
    for own in ["resourceVersion", "selfLink", "deletionTimestamp"] {
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.remove(own);
        }
    }
    metadata["uid"] = uid().into();
    metadata["creationTimestamp"] = now().into();
    if kind.has_generation {
        metadata["generation"] = 1.into();
    }
    // A kubelet creates its Node with a status. All other objects begin without one.
    if kind.has_status && kind.kind != "Node" {
        object["status"] = match kind.kind {
            "Service" => json!({ "loadBalancer": {} }),
            "Pod" => json!({ "phase": "Pending", "qosClass": "BestEffort" }),
            "Namespace" => json!({ "phase": "Active" }),
            _ => json!({}),
        };
    }
}

/// Restores the server-managed fields of a changed object.
pub(super) fn preserve_server_fields(
    kind: &Kind,
    old: &Value,
    new: &mut Value,
    subresource: Option<&str>,
) {
    if kind.has_status {
        match subresource {
            Some("status") => {
                let status = new["status"].take();
                *new = old.clone();
                new["status"] = status;
            }
            Some("approval") => {
                let conditions = new["status"]["conditions"].take();
                *new = old.clone();
                new["status"]["conditions"] = conditions;
            }
            _ => new["status"] = old["status"].clone(),
        }
    }
    for own in [
        "uid",
        "creationTimestamp",
        "generation",
        "deletionTimestamp",
        "resourceVersion",
    ] {
        match &old["metadata"][own] {
            Value::Null => {
                if let Some(metadata) = new["metadata"].as_object_mut() {
                    metadata.remove(own);
                }
            }
            value => new["metadata"][own] = value.clone(),
        }
    }
    if kind.has_generation && old["spec"] != new["spec"] {
        new["metadata"]["generation"] =
            (old["metadata"]["generation"].as_u64().unwrap_or(0) + 1).into();
    }
    if let Some(object) = new.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
}

/// Fills in the defaults of the kind. Invalid values are stored.
pub(super) fn complete(
    kind: &Kind,
    object: &mut Value,
    old: Option<&Value>,
    content: &Content,
    families: &[IpAddr],
) {
    match kind.kind {
        "Service" => service(object, old, content, families),
        "Secret" if object["type"].is_null() => object["type"] = "Opaque".into(),
        "Node" => node(object),
        "Deployment" | "DaemonSet" => workload(kind, object),
        _ => {}
    }
}

fn node(node: &mut Value) {
    // On real nodes the kubelet's admission sets these.
    if node["metadata"]["labels"].is_null() {
        node["metadata"]["labels"] = json!({});
    }
    if node["spec"].is_null() {
        node["spec"] = json!({});
    }
}

fn workload(kind: &Kind, workload: &mut Value) {
    let (field, strategy) = if kind.kind == "Deployment" {
        if workload["spec"]["replicas"].is_null() {
            workload["spec"]["replicas"] = 1.into();
        }
        (
            "strategy",
            json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": "25%", "maxUnavailable": "25%" } }),
        )
    } else {
        (
            "updateStrategy",
            json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 0, "maxUnavailable": 1 } }),
        )
    };
    if workload["spec"][field].is_null() {
        workload["spec"][field] = strategy;
    }
}

fn service(service: &mut Value, old: Option<&Value>, content: &Content, families: &[IpAddr]) {
    let own = (
        service["metadata"]["namespace"].clone(),
        service["metadata"]["name"].clone(),
    );
    let spec = &mut service["spec"];
    for (field, default) in [
        ("type", "ClusterIP"),
        ("sessionAffinity", "None"),
        ("internalTrafficPolicy", "Cluster"),
    ] {
        if spec[field].is_null() {
            spec[field] = default.into();
        }
    }
    for port in spec["ports"].as_array_mut().into_iter().flatten() {
        if port["protocol"].is_null() {
            port["protocol"] = "TCP".into();
        }
        if port["targetPort"].is_null() {
            port["targetPort"] = port["port"].clone();
        }
    }
    let before = old
        .map(|old| &old["spec"])
        .filter(|before| !before["clusterIP"].is_null());
    if let Some(before) = before {
        for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
            if spec[field].is_null() {
                spec[field] = before[field].clone();
            }
        }
    }
    if spec["ipFamilyPolicy"].is_null() {
        spec["ipFamilyPolicy"] = "SingleStack".into();
    }
    if spec["clusterIP"] == "None" {
        spec["clusterIPs"] = json!(["None"]);
    } else {
        addresses(spec, &own, content, families);
    }
}

/// Assigns addresses to a Service: one, or one of each family of the cluster.
fn addresses(spec: &mut Value, own: &(Value, Value), content: &Content, families: &[IpAddr]) {
    let dual =
        spec["ipFamilyPolicy"] == "PreferDualStack" || spec["ipFamilyPolicy"] == "RequireDualStack";
    let mut wanted: Vec<IpAddr> = families
        .iter()
        .take(if dual { families.len() } else { 1 })
        .copied()
        .collect();
    if let Some(named) = spec["ipFamilies"].as_array() {
        let is_v4 = |family: &Value| family == "IPv4";
        let of_family = |family: &Value| {
            families
                .iter()
                .find(|base| base.is_ipv4() == is_v4(family))
                .copied()
        };
        let mut bases: Vec<_> = named.iter().filter_map(of_family).collect();
        bases.extend(
            wanted
                .iter()
                .filter(|_| dual)
                .filter(|base| !named.iter().any(|family| is_v4(family) == base.is_ipv4())),
        );
        wanted = bases;
    }
    let taken: Vec<String> = content
        .collection("services", None)
        .filter(|(_, other)| {
            (&other["metadata"]["namespace"], &other["metadata"]["name"]) != (&own.0, &own.1)
        })
        .flat_map(|(_, other)| strings(&other["spec"]["clusterIPs"]))
        .collect();
    let mut chosen: Vec<String> = strings(&spec["clusterIPs"]).collect();
    if chosen.is_empty() {
        chosen.extend(
            spec["clusterIP"]
                .as_str()
                .filter(|ip| !ip.is_empty())
                .map(str::to_owned),
        );
    }
    for base in wanted {
        let has = |ip: &String| {
            ip.parse::<IpAddr>()
                .is_ok_and(|ip| ip.is_ipv4() == base.is_ipv4())
        };
        if chosen.iter().any(has) {
            continue;
        }
        let free = (1..u32::from(u16::MAX))
            .map(|offset| offset_from(base, offset).to_string())
            .find(|ip| !taken.contains(ip));
        chosen.extend(free);
    }
    let family = |ip: &String| if ip.contains(':') { "IPv6" } else { "IPv4" };
    spec["ipFamilies"] = chosen.iter().map(family).collect();
    spec["clusterIP"] = chosen.first().map_or(Value::Null, |ip| ip.as_str().into());
    spec["clusterIPs"] = chosen.into();
}

fn strings(list: &Value) -> impl Iterator<Item = String> {
    items(list).filter_map(|item| item.as_str().map(str::to_owned))
}

fn offset_from(base: IpAddr, offset: u32) -> IpAddr {
    match base {
        IpAddr::V4(base) => IpAddr::V4((u32::from(base) + offset).into()),
        IpAddr::V6(base) => IpAddr::V6((u128::from(base) + u128::from(offset)).into()),
    }
}

/// Returns a UID for a new object.
pub(super) fn uid() -> String {
    format!("{:032x}", rand::random::<u128>())
}
