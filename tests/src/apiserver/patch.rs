//! Strategic merge patches.

use serde_json::{Map, Value};

/// Applies a strategic merge patch with the directives that kubectl writes.
pub(super) fn strategic(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            *target = without_directives(patch);
            return;
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return;
        }
        _ => {}
    }
    let target = object(target);
    if let Some(Value::Array(keep)) = patch.get("$retainKeys") {
        target.retain(|key, _| keep.iter().any(|name| name == key));
    }
    for (key, change) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(found)), Value::Array(gone)) = (target.get_mut(list), change)
            {
                found.retain(|item| !gone.contains(item));
            }
            continue;
        }
        if key.starts_with('$') {
            continue;
        }
        match (change, merge_key(key, change)) {
            (Value::Null, _) => {
                target.remove(key);
            }
            (Value::Array(items), Some(merge_key)) => {
                merge_list(
                    target
                        .entry(key.clone())
                        .or_insert_with(|| Value::Array(Vec::new())),
                    items,
                    merge_key,
                );
            }
            (Value::Array(items), None) if key == "finalizers" => {
                let found = target
                    .entry(key.clone())
                    .or_insert_with(|| Value::Array(Vec::new()));
                if let Value::Array(found) = found {
                    for item in items {
                        if !found.contains(item) {
                            found.push(item.clone());
                        }
                    }
                }
            }
            (Value::Object(_), _) => {
                strategic(target.entry(key.clone()).or_insert(Value::Null), change)
            }
            _ => {
                target.insert(key.clone(), change.clone());
            }
        }
    }
    for (key, order) in patch {
        if let (Some(list), Value::Array(order)) = (key.strip_prefix("$setElementOrder/"), order) {
            sort(target.get_mut(list), order);
        }
    }
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("just made an object"),
    }
}

fn without_directives(patch: &Map<String, Value>) -> Value {
    let plain = patch.iter().filter(|(key, _)| !key.starts_with('$'));
    Value::Object(
        plain
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    )
}

/// Returns the field that identifies the items of a list, for the served kinds; `None` if the list
/// is one value.
fn merge_key(list: &str, items: &Value) -> Option<&'static str> {
    let has = |key: &str| {
        items
            .as_array()
            .is_some_and(|items| items.iter().any(|item| item.get(key).is_some()))
    };
    Some(match list {
        "containers" | "initContainers" | "volumes" | "env" | "imagePullSecrets" | "secrets" => {
            "name"
        }
        "ports" if has("containerPort") => "containerPort",
        "ports" if has("port") => "port",
        "volumeMounts" => "mountPath",
        "addresses" | "conditions" if has("type") => "type",
        "taints" => "key",
        "ownerReferences" => "uid",
        _ => return None,
    })
}

fn merge_list(target: &mut Value, patch: &[Value], key: &str) {
    let Value::Array(target) = target else {
        *target = Value::Array(patch.to_vec());
        return;
    };
    if patch.iter().any(|item| item["$patch"] == "replace") {
        *target = patch
            .iter()
            .filter(|item| item["$patch"] != "replace")
            .cloned()
            .collect();
        return;
    }
    for item in patch {
        let found = target
            .iter()
            .position(|existing| existing[key] == item[key]);
        match (found, item["$patch"] == "delete") {
            (Some(found), true) => {
                target.remove(found);
            }
            (None, true) => {}
            (Some(found), false) => {
                if let Some(existing) = target.get_mut(found) {
                    strategic(existing, item);
                }
            }
            (None, false) => {
                let mut new = Value::Null;
                strategic(&mut new, item);
                target.push(new);
            }
        }
    }
}

/// Sorts named items into the given order. Other items follow in their current order.
fn sort(list: Option<&mut Value>, order: &[Value]) {
    let Some(Value::Array(list)) = list else {
        return;
    };
    let place = |item: &Value| {
        let named = |wanted: &Value| match wanted {
            Value::Object(keys) => keys.iter().all(|(key, value)| item[key] == *value),
            plain => plain == item,
        };
        order.iter().position(named).unwrap_or(order.len())
    };
    list.sort_by_key(place);
}
