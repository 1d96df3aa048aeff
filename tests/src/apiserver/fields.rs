//! Field ownership for server-side apply: the field sets of `managedFields`.
//!
//! A path is a list of elements in the form of FieldsV1: `f:spec`,
//! `k:{"port":80,"protocol":"TCP"}`, `v:"item"`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// A path from the root of an object to one field or item.
pub(super) type Path = Vec<String>;

/// The fields and items that one manager set.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct FieldSet(pub(super) BTreeSet<Path>);

impl FieldSet {
    /// Returns all leaves and items of an object, without server-managed fields.
    pub(super) fn of(object: &Value) -> Self {
        let mut set = Self::default();
        collect(object, &mut Vec::new(), &mut set.0);
        set.0.retain(|path| !is_own(path));
        set
    }

    /// Returns the fields that were set or changed in `new`.
    pub(super) fn changed(old: &Value, new: &Value) -> Self {
        let paths = Self::of(new).0;
        Self(
            paths
                .into_iter()
                .filter(|path| {
                    is_item(path) && lookup(old, path).is_none()
                        || !is_item(path) && lookup(old, path) != lookup(new, path)
                })
                .collect(),
        )
    }

    pub(super) fn to_value(&self) -> Value {
        fn insert(map: &mut Map<String, Value>, path: &[String], item: bool) {
            let Some((word, rest)) = path.split_first() else {
                if item {
                    map.insert(".".to_owned(), Value::Object(Map::new()));
                }
                return;
            };
            let next = map
                .entry(word.clone())
                .or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(next) = next {
                insert(next, rest, item);
            }
        }
        let mut root = Map::new();
        for path in &self.0 {
            let item = path.last().is_some_and(|last| last.starts_with("k:"));
            insert(&mut root, path, item);
        }
        Value::Object(root)
    }

    pub(super) fn from_value(fields: &Value) -> Self {
        fn walk(fields: &Value, path: &mut Path, set: &mut BTreeSet<Path>) {
            let Value::Object(map) = fields else { return };
            if map.is_empty() {
                set.insert(path.clone());
            }
            for (word, below) in map {
                if word == "." {
                    set.insert(path.clone());
                    continue;
                }
                path.push(word.clone());
                walk(below, path, set);
                path.pop();
            }
        }
        let mut set = BTreeSet::new();
        walk(fields, &mut Vec::new(), &mut set);
        set.retain(|path| !path.is_empty());
        Self(set)
    }
}

/// Returns whether the path names an item of a list.
pub(super) fn is_item(path: &Path) -> bool {
    path.last().is_some_and(|last| !last.starts_with("f:"))
}

/// Returns whether the field has no manager.
fn is_own(path: &Path) -> bool {
    let words: Vec<&str> = path.iter().take(2).map(String::as_str).collect();
    matches!(words.as_slice(), ["f:apiVersion" | "f:kind", ..])
        || matches!(
            words.as_slice(),
            [
                "f:metadata",
                "f:name"
                    | "f:namespace"
                    | "f:uid"
                    | "f:resourceVersion"
                    | "f:creationTimestamp"
                    | "f:generation"
                    | "f:managedFields"
                    | "f:selfLink"
            ]
        )
}

fn collect(value: &Value, path: &mut Path, set: &mut BTreeSet<Path>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, below) in map {
                path.push(format!("f:{key}"));
                // The entries of `managedFields` describe ownership; they are no content.
                if !(path.len() == 2 && key == "managedFields") {
                    collect(below, path, set);
                }
                path.pop();
            }
        }
        Value::Array(items) => match list_kind(path) {
            List::Atomic => {
                set.insert(path.clone());
            }
            kind => {
                for item in items {
                    path.push(item_key(&kind, item));
                    set.insert(path.clone());
                    if item.is_object() {
                        collect(item, path, set);
                    }
                    path.pop();
                }
            }
        },
        _ => {
            set.insert(path.clone());
        }
    }
}

/// The key of a list's items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum List {
    /// The list is one value.
    Atomic,
    /// Items are identified by these fields, with the default of an absent one.
    Keyed(&'static [(&'static str, Option<&'static str>)]),
    /// Items are identified by their values.
    Set,
}

/// Returns the list type from the schemas of the served kinds.
pub(super) fn list_kind(path: &Path) -> List {
    let words: Vec<&str> = path.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["f:spec", "f:ports"] => List::Keyed(&[("port", None), ("protocol", Some("TCP"))]),
        ["f:status", "f:conditions" | "f:addresses"] => List::Keyed(&[("type", None)]),
        ["f:metadata", "f:ownerReferences"] => List::Keyed(&[("uid", None)]),
        ["f:metadata", "f:finalizers"] => List::Set,
        [.., item, "f:ports"] if item.starts_with("k:") => {
            List::Keyed(&[("containerPort", None), ("protocol", Some("TCP"))])
        }
        [
            ..,
            "f:containers" | "f:initContainers" | "f:volumes" | "f:env" | "f:imagePullSecrets",
        ] => List::Keyed(&[("name", None)]),
        [.., "f:volumeMounts"] => List::Keyed(&[("mountPath", None)]),
        _ => List::Atomic,
    }
}

/// Returns the path element of an item.
pub(super) fn item_key(kind: &List, item: &Value) -> String {
    match kind {
        List::Keyed(keys) => {
            let value = |key: &str, default: Option<&str>| match (&item[key], default) {
                (Value::Null, Some(default)) => default.into(),
                (found, _) => found.clone(),
            };
            let keys: Map<String, Value> = keys
                .iter()
                .map(|(key, default)| ((*key).to_owned(), value(key, *default)))
                .collect();
            format!("k:{}", Value::Object(keys))
        }
        List::Set | List::Atomic => format!("v:{item}"),
    }
}

/// Returns the value at `path`.
pub(super) fn lookup<'a>(object: &'a Value, path: &Path) -> Option<&'a Value> {
    let mut here = object;
    let mut walked = Vec::new();
    for word in path {
        here = match word.strip_prefix("f:") {
            Some(key) => here.get(key)?,
            None => {
                let items = here.as_array()?;
                let kind = list_kind(&walked);
                items.iter().find(|item| item_key(&kind, item) == *word)?
            }
        };
        walked.push(word.clone());
    }
    Some(here)
}

/// Removes the value at `path`, if it exists.
pub(super) fn remove(object: &mut Value, path: &Path) {
    let Some((last, above)) = path.split_last() else {
        return;
    };
    let mut here = object;
    let mut walked = Vec::new();
    for word in above {
        let next = match word.strip_prefix("f:") {
            Some(key) => here.get_mut(key),
            None => here.as_array_mut().and_then(|items| {
                let kind = list_kind(&walked);
                items.iter_mut().find(|item| item_key(&kind, item) == *word)
            }),
        };
        let Some(next) = next else { return };
        here = next;
        walked.push(word.clone());
    }
    match (here, last.strip_prefix("f:")) {
        (Value::Object(map), Some(key)) => {
            map.remove(key);
        }
        (Value::Array(items), None) => {
            let kind = list_kind(&walked);
            items.retain(|item| item_key(&kind, item) != *last);
        }
        _ => {}
    }
}
