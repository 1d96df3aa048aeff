//! The tables that `kubectl get` requests.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::kinds::Kind;

/// Returns objects as the rows of a Table; `metadata` is that of their list.
pub(super) fn table<'a>(
    kind: &Kind,
    objects: impl Iterator<Item = &'a Value>,
    metadata: Value,
) -> Value {
    let columns = columns(kind);
    let definitions: Vec<Value> = columns
        .iter()
        .map(|(name, _)| {
            let format = if *name == "Name" { "name" } else { "" };
            json!({ "name": name, "type": "string", "format": format, "description": "", "priority": 0 })
        })
        .collect();
    let rows: Vec<Value> = objects
        .map(|object| {
            let cells: Vec<String> = columns.iter().map(|(_, cell)| cell(object)).collect();
            let meta = json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] });
            json!({ "cells": cells, "object": meta })
        })
        .collect();
    json!({ "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "columnDefinitions": definitions, "rows": rows })
}

type Column = (&'static str, fn(&Value) -> String);

fn columns(kind: &Kind) -> Vec<Column> {
    let name: Column = ("Name", |object| text(&object["metadata"]["name"]));
    let age: Column = ("Age", age);
    let own: &[Column] = match kind.kind {
        "Node" => &[
            ("Status", ready),
            ("Roles", |_| "<none>".into()),
            ("Version", |node| {
                text(&node["status"]["nodeInfo"]["kubeletVersion"])
            }),
        ],
        "Service" => &[
            ("Type", |service| text(&service["spec"]["type"])),
            ("Cluster-IP", |service| text(&service["spec"]["clusterIP"])),
            ("External-IP", |_| "<none>".into()),
            ("Port(s)", ports),
        ],
        "ConfigMap" => &[("Data", |map| {
            map["data"]
                .as_object()
                .map_or(0, serde_json::Map::len)
                .to_string()
        })],
        "Secret" => &[
            ("Type", |secret| text(&secret["type"])),
            ("Data", |secret| {
                secret["data"]
                    .as_object()
                    .map_or(0, serde_json::Map::len)
                    .to_string()
            }),
        ],
        "Pod" => &[("Status", |pod| text(&pod["status"]["phase"]))],
        "Lease" => &[("Holder", |lease| text(&lease["spec"]["holderIdentity"]))],
        _ => &[],
    };
    let mut columns = vec![name];
    columns.extend_from_slice(own);
    columns.push(age);
    columns
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| "<none>".to_owned(), str::to_owned)
}

fn ready(node: &Value) -> String {
    let ready = node["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|condition| condition["type"] == "Ready");
    match ready.and_then(|condition| condition["status"].as_str()) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    }
    .to_owned()
}

fn ports(service: &Value) -> String {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    let ports: Vec<_> = ports
        .map(|port| format!("{}/{}", port["port"], text(&port["protocol"])))
        .collect();
    ports.join(",")
}

fn age(object: &Value) -> String {
    let born = object["metadata"]["creationTimestamp"]
        .as_str()
        .and_then(|text| humantime::parse_rfc3339(text).ok());
    match born.map(|born| {
        SystemTime::now()
            .duration_since(born)
            .unwrap_or_default()
            .as_secs()
    }) {
        Some(seconds) => format!("{seconds}s"),
        None => "<unknown>".to_owned(),
    }
}
