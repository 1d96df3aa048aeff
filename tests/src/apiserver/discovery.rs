//! Discovery documents of the API.

use serde_json::{Value, json};

use super::kinds::{KINDS, VERSION, groups};

/// Returns the document of `/api`.
pub(super) fn versions() -> Value {
    json!({ "kind": "APIVersions", "versions": [VERSION], "serverAddressByClientCIDRs": [] })
}

/// Returns the document of `/apis`.
pub(super) fn group_list() -> Value {
    let groups: Vec<Value> = groups().into_iter().map(described).collect();
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
}

fn described(group: &str) -> Value {
    let version = json!({ "groupVersion": format!("{group}/{VERSION}"), "version": VERSION });
    json!({ "name": group, "versions": [version], "preferredVersion": version })
}

/// Returns the resources of a group version, such as `/api/v1` or `/apis/apps/v1`.
pub(super) fn resources(group: &str) -> Value {
    let mut resources = Vec::new();
    for kind in KINDS.iter().filter(|kind| kind.group == group) {
        let verbs: &[&str] = if kind.is_review() {
            &["create"]
        } else {
            &[
                "create", "delete", "get", "list", "patch", "update", "watch",
            ]
        };
        resources.push(json!({
            "name": kind.plural, "singularName": kind.kind.to_lowercase(), "namespaced": kind.namespaced,
            "kind": kind.kind, "verbs": verbs, "shortNames": kind.short.as_slice(),
        }));
        if kind.has_status {
            resources.push(json!({
                "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced,
                "kind": kind.kind, "verbs": ["get", "patch", "update"],
            }));
        }
    }
    let version = if group.is_empty() {
        VERSION.to_owned()
    } else {
        format!("{group}/{VERSION}")
    };
    json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources })
}

/// Returns `/version`: the Kubernetes version of the types that the server is built with.
pub(super) fn version() -> Value {
    json!({
        "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "0000000000000000000000000000000000000000",
        "gitTreeState": "clean", "buildDate": "2025-04-23T00:00:00Z", "goVersion": "go1.24.2", "compiler": "gc",
        "platform": "linux/amd64",
    })
}

/// Media type of `/openapi/v2`, the protobuf form that kubectl requests. kubectl does not validate
/// objects of kinds without a definition, and the document has none (field 1, `swagger`).
pub(super) const OPENAPI: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
