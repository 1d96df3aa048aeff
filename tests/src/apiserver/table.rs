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
    // Tests read the columns of Services only.
    let own: &[Column] = match kind.kind {
        "Service" => &[
            ("Type", |service| text(&service["spec"]["type"])),
            ("Cluster-IP", |service| text(&service["spec"]["clusterIP"])),
            ("External-IP", |_| "<none>".into()),
            ("Port(s)", ports),
        ],
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
