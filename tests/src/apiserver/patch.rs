//! Strategic merge patches, without the directives that delete or replace.

use serde_json::{Map, Value};

/// Applies a strategic merge patch.
pub(super) fn strategic(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let target = object(target);
    for (key, change) in patch {
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
    for item in patch {
        match target
            .iter_mut()
            .find(|existing| existing[key] == item[key])
        {
            Some(existing) => strategic(existing, item),
            None => target.push(item.clone()),
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
