//! Processing of an object before storage: defaults, validation, cluster addresses.

use std::net::IpAddr;
use std::time::SystemTime;

use rand::RngExt;
use serde_json::{Value, json};

use super::kinds::{Address, Kind};
use super::status::Status;
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

/// Checks kind, version and namespace of an object that was sent to `address`.
pub(super) fn check_frame(address: &Address, object: &mut Value) -> Result<(), Status> {
    if !object.is_object() {
        return Err(Status::bad_request("the body of the request is no object"));
    }
    let (kind, version) = (address.kind.kind, address.kind.api_version());
    for (field, expected) in [("kind", kind), ("apiVersion", version.as_str())] {
        match object[field].as_str() {
            None => object[field] = expected.into(),
            Some(found) if found == expected => {}
            Some(found) => {
                let message = format!(
                    "the object provided is unrecognized: {field} is {found:?}, expected {expected:?}"
                );
                return Err(Status::bad_request(message));
            }
        }
    }
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    if let Some(namespace) = &address.namespace {
        match object["metadata"]["namespace"].as_str() {
            None | Some("") => object["metadata"]["namespace"] = namespace.as_str().into(),
            Some(found) if found == namespace => {}
            Some(_) => {
                return Err(Status::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
        }
    }
    if let (Some(name), Some(found)) = (&address.name, object["metadata"]["name"].as_str())
        && name != found
    {
        let message =
            format!("the name of the object ({found}) does not match the name on the URL ({name})");
        return Err(Status::bad_request(message));
    }
    Ok(())
}

/// Returns the name of an object to be created. A generated name is written into the object.
pub(super) fn name_of(kind: &Kind, object: &mut Value) -> Result<String, Status> {
    let metadata = &mut object["metadata"];
    let name = match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
        (Some(name), _) if !name.is_empty() => name.to_owned(),
        (_, Some(prefix)) if !prefix.is_empty() => {
            format!("{prefix}{:05x}", rand::rng().random_range(0..0xf_ffff_u32))
        }
        _ => {
            return Err(Status::invalid(
                kind,
                "",
                "metadata.name: Required value: name or generateName is required",
            ));
        }
    };
    metadata["name"] = name.as_str().into();
    let fits = match kind.group {
        "rbac.authorization.k8s.io" => !name.contains(['/', '%']) && name != "." && name != "..",
        _ => is_subdomain(&name),
    };
    if fits {
        return Ok(name);
    }
    let problem = format!(
        "metadata.name: Invalid value: {name:?}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character"
    );
    Err(Status::invalid(kind, &name, &problem))
}

fn is_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
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

/// Fills in the defaults of the kind and refuses invalid values.
pub(super) fn complete(
    kind: &Kind,
    object: &mut Value,
    old: Option<&Value>,
    content: &Content,
    families: &[IpAddr],
) -> Result<(), Status> {
    let name = object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let problem = match kind.kind {
        "Service" => service(object, old, content, families),
        "ConfigMap" => config_map(object),
        "Secret" => secret(object),
        "Lease" => lease(object),
        "Node" => node(object),
        "Deployment" | "DaemonSet" => workload(kind, object),
        "Endpoints" => endpoints(object),
        _ => Ok(()),
    };
    problem.map_err(|problem| Status::invalid(kind, &name, &problem))
}

fn node(node: &mut Value) -> Result<(), String> {
    // On real nodes the kubelet's admission sets these.
    if node["metadata"]["labels"].is_null() {
        node["metadata"]["labels"] = json!({});
    }
    if node["spec"].is_null() {
        node["spec"] = json!({});
    }
    Ok(())
}

fn workload(kind: &Kind, workload: &mut Value) -> Result<(), String> {
    if !workload["spec"]["selector"].is_object() {
        return Err("spec.selector: Required value".to_owned());
    }
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
    Ok(())
}

fn config_map(map: &mut Value) -> Result<(), String> {
    let mut size = 0;
    for part in ["data", "binaryData"] {
        for (key, value) in map[part].as_object().into_iter().flatten() {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            if key.is_empty() || key.len() > 253 || !key.bytes().all(allowed) {
                return Err(format!(
                    "{part}[{key}]: Invalid value: {key:?}: a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
                ));
            }
            let Some(text) = value.as_str() else {
                return Err(format!("{part}[{key}]: Invalid value: must be a string"));
            };
            size += text.len();
        }
    }
    if size > LARGEST_MAP {
        return Err(format!(
            "[]: Too long: may not be more than {LARGEST_MAP} bytes"
        ));
    }
    Ok(())
}

fn secret(secret: &mut Value) -> Result<(), String> {
    if secret["type"].is_null() {
        secret["type"] = "Opaque".into();
    }
    Ok(())
}

/// Sets the defaults of `SetDefaults_Endpoints`. kubectl reports a change in each apply of a file
/// without the protocol, since subsets are replaced as a whole.
fn endpoints(endpoints: &mut Value) -> Result<(), String> {
    for subset in endpoints["subsets"].as_array_mut().into_iter().flatten() {
        for port in subset["ports"].as_array_mut().into_iter().flatten() {
            if port["protocol"].is_null() {
                port["protocol"] = "TCP".into();
            }
        }
    }
    Ok(())
}

fn lease(lease: &mut Value) -> Result<(), String> {
    for (field, least) in [("leaseDurationSeconds", 1), ("leaseTransitions", 0)] {
        if lease["spec"][field]
            .as_i64()
            .is_some_and(|value| value < least)
        {
            return Err(format!(
                "spec.{field}: Invalid value: must be greater than or equal to {least}"
            ));
        }
    }
    Ok(())
}

fn service(
    service: &mut Value,
    old: Option<&Value>,
    content: &Content,
    families: &[IpAddr],
) -> Result<(), String> {
    if !service["spec"].is_object() {
        return Err("spec.ports: Required value".to_owned());
    }
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
    let headless = spec["clusterIP"] == "None";
    ports(spec, headless)?;
    if spec["type"] == "ExternalName" {
        return Ok(());
    }
    let before = old
        .map(|old| &old["spec"])
        .filter(|before| !before["clusterIP"].is_null());
    if let Some(before) = before {
        if spec["clusterIP"].is_null() || spec["clusterIP"] == "" {
            spec["clusterIP"] = before["clusterIP"].clone();
        }
        if spec["clusterIP"] != before["clusterIP"] {
            return Err(format!(
                "spec.clusterIPs[0]: Invalid value: [{}]: may not change once set",
                spec["clusterIP"]
            ));
        }
        for field in ["clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
            if spec[field].is_null() {
                spec[field] = before[field].clone();
            }
        }
    }
    if spec["ipFamilyPolicy"].is_null() {
        spec["ipFamilyPolicy"] = "SingleStack".into();
    }
    if headless {
        spec["clusterIPs"] = json!(["None"]);
        return Ok(());
    }
    addresses(spec, &own, content, families)
}

/// Assigns addresses to a Service: one, or one of each family of the cluster.
fn addresses(
    spec: &mut Value,
    own: &(Value, Value),
    content: &Content,
    families: &[IpAddr],
) -> Result<(), String> {
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
    for ip in &chosen {
        if ip.parse::<IpAddr>().is_err() {
            return Err(format!(
                "spec.clusterIPs[0]: Invalid value: {ip:?}: must be a valid IP address"
            ));
        }
        if taken.contains(ip) {
            return Err(format!(
                "spec.clusterIPs: Invalid value: [{ip:?}]: failed to allocate IP {ip}: provided IP is already allocated"
            ));
        }
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
        chosen.push(free.ok_or("spec.clusterIPs: the range is full")?);
    }
    let family = |ip: &String| if ip.contains(':') { "IPv6" } else { "IPv4" };
    spec["ipFamilies"] = chosen.iter().map(family).collect();
    spec["clusterIP"] = chosen.first().map_or(Value::Null, |ip| ip.as_str().into());
    spec["clusterIPs"] = chosen.into();
    Ok(())
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

fn ports(spec: &mut Value, headless: bool) -> Result<(), String> {
    let count = spec["ports"].as_array().map_or(0, Vec::len);
    if count == 0 && !headless && spec["type"] != "ExternalName" {
        return Err("spec.ports: Required value".to_owned());
    }
    let (mut names, mut numbers) = (Vec::new(), Vec::new());
    for (index, port) in spec["ports"]
        .as_array_mut()
        .into_iter()
        .flatten()
        .enumerate()
    {
        let at = |field: &str| format!("spec.ports[{index}].{field}");
        if port["protocol"].is_null() {
            port["protocol"] = "TCP".into();
        }
        let number = port["port"]
            .as_i64()
            .filter(|port| (1..=65535).contains(port));
        let Some(number) = number else {
            return Err(format!(
                "{}: Invalid value: must be between 1 and 65535, inclusive",
                at("port")
            ));
        };
        if port["targetPort"].is_null() {
            port["targetPort"] = number.into();
        }
        if port["targetPort"]
            .as_i64()
            .is_some_and(|target| !(1..=65535).contains(&target))
        {
            return Err(format!(
                "{}: Invalid value: must be between 1 and 65535, inclusive",
                at("targetPort")
            ));
        }
        let name = port["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() && count > 1 {
            return Err(format!("{}: Required value", at("name")));
        }
        if name.len() > 63
            || name
                .bytes()
                .any(|byte| !(byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'))
        {
            return Err(format!("{}: Invalid value: {name:?}", at("name")));
        }
        if !name.is_empty() && names.contains(&name) {
            return Err(format!("{}: Duplicate value: {name:?}", at("name")));
        }
        let key = (number, port["protocol"].clone());
        if numbers.contains(&key) {
            return Err(format!("spec.ports[{index}]: Duplicate value: {port}"));
        }
        names.push(name);
        numbers.push(key);
    }
    Ok(())
}

/// Returns a UID for a new object.
pub(super) fn uid() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Limit of the real API server: `MaxSecretSize` and its equivalent for ConfigMaps.
const LARGEST_MAP: usize = 1024 * 1024;
