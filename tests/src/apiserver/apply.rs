//! Server-side apply, and the field managers after any write.

use serde_json::{Map, Value, json};

use super::fields::{FieldSet, List, Path, is_item, item_key, list_kind, lookup, remove};
use super::status::Status;

/// The writer of a change, and its mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Writer {
    /// Name of the field manager.
    pub(super) name: String,
    /// Whether the write is a server-side apply.
    pub(super) applies: bool,
    /// Whether the write takes over fields of other managers.
    pub(super) force: bool,
}

/// One entry of `managedFields`.
#[derive(Debug, Clone)]
struct Manager {
    entry: Value,
    fields: FieldSet,
}

/// Returns the result of applying `wanted` to `live` without `managedFields`; `live` is `None` if
/// there is no object yet.
///
/// # Errors
/// Returns 409 if another manager set a field to a different value and `writer` does not force.
pub(super) fn apply(
    live: Option<&Value>,
    wanted: &Value,
    writer: &Writer,
) -> Result<Value, Status> {
    let fields = FieldSet::of(wanted);
    let Some(live) = live else {
        return Ok(wanted.clone());
    };
    let managers = managers(live);
    let others: Vec<&Manager> = managers
        .iter()
        .filter(|manager| !manager.is(writer))
        .collect();
    let mut conflicts = Vec::new();
    for path in fields.0.iter().filter(|path| !is_item(path)) {
        if lookup(live, path) == lookup(wanted, path) {
            continue;
        }
        let owners = others
            .iter()
            .filter(|manager| manager.fields.0.contains(path));
        conflicts.extend(owners.map(|owner| {
            (
                owner.entry["manager"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
                dotted(path),
            )
        }));
    }
    if !conflicts.is_empty() && !writer.force {
        return Err(conflict(&conflicts));
    }
    let mut merged = live.clone();
    merge(&mut merged, wanted, &mut Vec::new());
    let before = managers.iter().find(|manager| manager.is(writer));
    // Fields that this manager applied before and does not apply again are removed, unless other
    // managers own them.
    for path in before.iter().flat_map(|manager| &manager.fields.0) {
        let wanted = fields.0.iter().any(|own| own.starts_with(path));
        let shared = others
            .iter()
            .any(|manager| manager.fields.0.iter().any(|own| own.starts_with(path)));
        if !wanted && !shared {
            remove(&mut merged, path);
        }
    }
    Ok(merged)
}

/// Records the field managers in `new` after `writer` changed `old` to it. `wanted` is the applied
/// object, if there is one.
pub(super) fn note(
    old: Option<&Value>,
    new: &mut Value,
    writer: &Writer,
    wanted: Option<&Value>,
    now: &str,
) {
    let mut managers = old.map(managers).unwrap_or_default();
    let changed = FieldSet::changed(old.unwrap_or(&Value::Null), new);
    let own = wanted.map_or_else(|| changed.clone(), FieldSet::of);
    let api_version = new["apiVersion"].clone();
    for manager in &mut managers {
        if manager.is(writer) {
            if writer.applies {
                manager.fields = FieldSet::default();
            }
        } else {
            manager
                .fields
                .0
                .retain(|path| is_item(path) || !changed.0.contains(path));
        }
        manager.fields.0.retain(|path| lookup(new, path).is_some());
    }
    let operation = if writer.applies { "Apply" } else { "Update" };
    match managers.iter_mut().find(|manager| manager.is(writer)) {
        Some(manager) => {
            let before = manager.fields.0.len();
            manager.fields.0.extend(own.0);
            if before != manager.fields.0.len() || writer.applies {
                manager.entry["time"] = now.into();
            }
        }
        None if !own.0.is_empty() => {
            let entry = json!({
                "manager": writer.name, "operation": operation, "apiVersion": api_version, "time": now, "fieldsType": "FieldsV1",
            });
            managers.push(Manager { entry, fields: own });
        }
        None => {}
    }
    managers.retain(|manager| !manager.fields.0.is_empty());
    let entries = managers.into_iter().map(|manager| {
        let mut entry = manager.entry;
        entry["fieldsV1"] = manager.fields.to_value();
        entry
    });
    new["metadata"]["managedFields"] = entries.collect();
}

impl Manager {
    fn is(&self, writer: &Writer) -> bool {
        self.entry["manager"] == *writer.name
            && (self.entry["operation"] == "Apply") == writer.applies
    }
}

fn managers(object: &Value) -> Vec<Manager> {
    let entries = object["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    entries
        .into_iter()
        .map(|entry| Manager {
            fields: FieldSet::from_value(&entry["fieldsV1"]),
            entry,
        })
        .collect()
}

fn merge(live: &mut Value, wanted: &Value, path: &mut Path) {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => merge_maps(live, wanted, path),
        (Value::Array(live), Value::Array(wanted)) => match list_kind(path) {
            List::Atomic => live.clone_from(wanted),
            kind => {
                for item in wanted {
                    let word = item_key(&kind, item);
                    match live
                        .iter_mut()
                        .find(|existing| item_key(&kind, existing) == word)
                    {
                        Some(existing) => {
                            path.push(word);
                            merge(existing, item, path);
                            path.pop();
                        }
                        None => live.push(item.clone()),
                    }
                }
            }
        },
        (live, wanted) => *live = wanted.clone(),
    }
}

fn merge_maps(live: &mut Map<String, Value>, wanted: &Map<String, Value>, path: &mut Path) {
    for (key, value) in wanted {
        path.push(format!("f:{key}"));
        match live.get_mut(key) {
            Some(existing) => merge(existing, value, path),
            None => {
                live.insert(key.clone(), value.clone());
            }
        }
        path.pop();
    }
}

fn dotted(path: &Path) -> String {
    path.iter()
        .map(|word| match word.strip_prefix("f:") {
            Some(key) => format!(".{key}"),
            None => format!("[{}]", &word[2..]),
        })
        .collect()
}

fn conflict(conflicts: &[(String, String)]) -> Status {
    let each: Vec<_> = conflicts
        .iter()
        .map(|(manager, field)| format!("conflict with {manager:?}: {field}"))
        .collect();
    let message = match each.as_slice() {
        [one] => format!("Apply failed with 1 conflict: {one}"),
        many => format!(
            "Apply failed with {} conflicts: {}",
            many.len(),
            many.join("\n- ")
        ),
    };
    Status::new(409, "Conflict", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(name: &str, applies: bool, force: bool) -> Writer {
        Writer {
            name: name.into(),
            applies,
            force,
        }
    }

    fn write(live: Option<&Value>, wanted: &Value, writer: &Writer) -> Result<Value, Status> {
        let mut new = if writer.applies {
            apply(live, wanted, writer)?
        } else {
            wanted.clone()
        };
        if !writer.applies
            && let Some(live) = live
        {
            new["metadata"]["managedFields"] = live["metadata"]["managedFields"].clone();
        }
        note(
            live,
            &mut new,
            writer,
            writer.applies.then_some(wanted),
            "now",
        );
        Ok(new)
    }

    fn map(data: Value) -> Value {
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x" }, "data": data })
    }

    #[test]
    fn applied_fields_follow_their_manager_and_foreign_ones_stay() {
        let ours = writer("ours", true, false);
        let first = write(None, &map(json!({ "a": "1", "b": "2" })), &ours).unwrap();
        let mut edited = first.clone();
        edited["data"]["foreign"] = "3".into();
        let edited = write(Some(&first), &edited, &writer("kubectl", false, false)).unwrap();
        let second = write(Some(&edited), &map(json!({ "a": "4" })), &ours).unwrap();
        assert_eq!(second["data"], json!({ "a": "4", "foreign": "3" }));
    }

    #[test]
    fn a_field_of_another_manager_is_a_conflict_unless_forced() {
        let ours = writer("ours", true, false);
        let first = write(None, &map(json!({ "a": "1" })), &ours).unwrap();
        let mut edited = first.clone();
        edited["data"]["a"] = "foreign".into();
        let edited = write(Some(&first), &edited, &writer("kubectl", false, false)).unwrap();
        let refused = write(Some(&edited), &map(json!({ "a": "1" })), &ours).unwrap_err();
        assert_eq!((refused.code, refused.reason), (409, "Conflict"));
        assert!(
            refused
                .message
                .contains("conflict with \"kubectl\": .data.a"),
            "{}",
            refused.message
        );
        let forced = write(
            Some(&edited),
            &map(json!({ "a": "1" })),
            &writer("ours", true, true),
        )
        .unwrap();
        assert_eq!(forced["data"]["a"], "1");
        let managers = forced["metadata"]["managedFields"].as_array().unwrap();
        assert_eq!(managers.len(), 1, "{managers:?}");
    }

    #[test]
    fn ports_of_a_service_are_items_by_number_and_protocol() {
        let service = |ports: Value| json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "s" }, "spec": { "ports": ports } });
        let ours = writer("ours", true, false);
        let first = write(
            None,
            &service(json!([{ "name": "http", "port": 80 }])),
            &writer("kubectl", false, false),
        )
        .unwrap();
        let second = write(
            Some(&first),
            &service(json!([{ "name": "dnat-9100", "port": 9100, "protocol": "TCP" }])),
            &ours,
        )
        .unwrap();
        assert_eq!(second["spec"]["ports"].as_array().unwrap().len(), 2);
        let third = write(Some(&second), &service(json!([])), &ours).unwrap();
        assert_eq!(
            third["spec"]["ports"],
            json!([{ "name": "http", "port": 80 }])
        );
    }

    #[test]
    fn field_sets_survive_their_text_form() {
        let object = json!({ "data": { "a.b/c": "1" }, "spec": { "ports": [{ "port": 80, "name": "x" }] }, "metadata": { "finalizers": ["f"], "labels": {} } });
        let set = FieldSet::of(&object);
        assert_eq!(FieldSet::from_value(&set.to_value()), set);
    }
}
