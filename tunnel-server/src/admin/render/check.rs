//! Compares a file with a rendered text. The file may have more than the text: other keys, other
//! list entries, other lines.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::cluster::doctor::command_words;

/// The format of a rendered text, which decides what a difference is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Yaml,
    /// Lines in a fixed order; comments begin with `#`.
    Lines,
}

/// Returns what the file lacks, one line for each value: `@` a path, `-` the file's value, `+` the
/// rendered value. The list is empty if the file has all of the rendered text.
///
/// # Errors
/// When the file is not valid YAML.
pub(super) fn differences(
    format: Format,
    file: &str,
    rendered: &str,
) -> Result<Vec<String>, serde_saphyr::Error> {
    match format {
        Format::Yaml => {
            let mut found = Vec::new();
            for expected in documents(rendered) {
                found.extend(missing_in_file(&expected, file)?);
            }
            Ok(found)
        }
        Format::Lines => {
            let (expected, actual) = (lines(rendered), lines(file));
            let missing = missing_in_order(&expected, &actual);
            Ok(missing.iter().map(|line| format!("+ {line}")).collect())
        }
    }
}

/// Returns what the closest document of a YAML file lacks of a rendered one.
fn missing_in_file(rendered: &str, file: &str) -> Result<Vec<String>, serde_saphyr::Error> {
    let mut expected = serde_saphyr::from_str(rendered)?;
    make_comparable(&mut expected);
    let mut fewest = missing(&expected, None);
    for document in documents(file) {
        let mut actual = serde_saphyr::from_str(&document)?;
        make_comparable(&mut actual);
        let found = missing(&expected, Some(&actual));
        if found.is_empty() {
            return Ok(found);
        }
        // A document of another kind lacks more.
        if found.len() <= fewest.len() || fewest.iter().all(|line| !line.starts_with('-')) {
            fewest = found;
        }
    }
    Ok(fewest)
}

/// Gives the same Pods the same value: a volume of the host has the name of its path, and commands are
/// the words of [`command_words`].
fn make_comparable(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(make_comparable),
        Value::Object(fields) => {
            for (key, value) in fields {
                make_comparable(value);
                if let ("command" | "args", Value::Array(words)) = (key.as_str(), value) {
                    let plain = command_words(words.iter().filter_map(Value::as_str));
                    *words = plain.into_iter().map(Value::from).collect();
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
    let volumes = items_mut(value, "volumes").filter_map(|volume| {
        let name = volume["name"].as_str()?.to_owned();
        Some((name, volume["hostPath"]["path"].as_str()?.to_owned()))
    });
    let paths: BTreeMap<String, String> = volumes.collect();
    let name_by_path = |entry: &mut Value| {
        let path = entry["name"].as_str().and_then(|name| paths.get(name));
        if let Some(path) = path {
            entry["name"] = path.as_str().into();
        }
    };
    items_mut(value, "volumes").for_each(name_by_path);
    for container in items_mut(value, "containers") {
        items_mut(container, "volumeMounts").for_each(name_by_path);
    }
}

fn items_mut<'a>(value: &'a mut Value, key: &str) -> impl Iterator<Item = &'a mut Value> {
    let list = value.get_mut(key).and_then(Value::as_array_mut);
    list.into_iter().flatten()
}

/// Splits a file into its YAML documents, without those that are empty.
fn documents(file: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in file.lines() {
        if line.trim_end() == "---" {
            documents.push(String::new());
        } else if let Some(last) = documents.last_mut() {
            last.push_str(line);
            last.push('\n');
        }
    }
    documents.retain(|document| !lines(document).is_empty());
    documents
}

/// Returns the lines without comments, empty lines and extra spaces.
fn lines(text: &str) -> Vec<String> {
    text.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

fn missing(expected: &Value, actual: Option<&Value>) -> Vec<String> {
    let mut found = Vec::new();
    compare(expected, actual, "", &mut found);
    found
}

fn compare(expected: &Value, actual: Option<&Value>, path: &str, found: &mut Vec<String>) {
    match (expected, actual) {
        (Value::Object(expected), Some(Value::Object(actual))) => {
            for (key, value) in expected {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                compare(value, actual.get(key), &path, found);
            }
        }
        (Value::Array(expected), Some(Value::Array(actual))) if !is_exact(path) => {
            compare_lists(expected, actual, path, found);
        }
        (expected, Some(actual)) if expected == actual => {}
        (expected, actual) => {
            found.push(format!("@ {path}"));
            found.extend(actual.map(|actual| format!("- {actual}")));
            found.push(format!("+ {expected}"));
        }
    }
}

/// Compares lists. Plain values have to be in the same order, objects may be in any order.
fn compare_lists(expected: &[Value], actual: &[Value], path: &str, found: &mut Vec<String>) {
    if expected.iter().all(|value| !value.is_object()) {
        let missing = missing_in_order(expected, actual);
        if !missing.is_empty() {
            found.push(format!("@ {path}"));
            found.extend(missing.iter().map(|value| format!("+ {value}")));
        }
        return;
    }
    for value in expected {
        let name = value.get("name").and_then(Value::as_str);
        let path = match name {
            Some(name) => format!("{path}[{name}]"),
            None => format!("{path}[]"),
        };
        let candidates = actual
            .iter()
            .filter(|candidate| name.is_none() || candidate.get("name") == value.get("name"));
        let closest = candidates
            .map(|candidate| {
                let mut differences = Vec::new();
                compare(value, Some(candidate), &path, &mut differences);
                differences
            })
            .min_by_key(Vec::len);
        match closest {
            Some(differences) => found.extend(differences),
            None => compare(value, None, &path, found),
        }
    }
}

/// Returns the items that are not in `actual` after the items before them.
fn missing_in_order<'a, T: PartialEq>(expected: &'a [T], actual: &[T]) -> Vec<&'a T> {
    let mut rest = actual.iter();
    let mut missing = Vec::new();
    for item in expected {
        let mut ahead = rest.clone();
        if ahead.any(|other| other == item) {
            rest = ahead;
        } else {
            missing.push(item);
        }
    }
    missing
}

/// Returns whether a list must have no other entries: a resolver asks the first nameserver first.
fn is_exact(path: &str) -> bool {
    path.ends_with("nameservers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_may_have_more_than_the_rendered_text() {
        let rendered = "spec:\n  dns: {nameservers: [10.0.0.1]}\n  containers:\n    - command: [kube-apiserver, --a=1]\n";
        let file = "# mine\nkind: Pod\n---\nkind: Pod\nspec:\n  dns: {nameservers: [10.0.0.1]}\n  containers:\n    - {name: other, command: [sh]}\n    - {name: api, command: [kube-apiserver, --z=0, --a=1]}\n";
        assert_eq!(
            differences(Format::Yaml, file, rendered).unwrap(),
            Vec::<String>::new()
        );
    }

    #[test]
    fn differences_name_the_path_and_both_values() {
        let rendered = "a: {b: 1, nameservers: [x]}\nlist: [{name: k, v: new}]\n";
        let file = "a: {b: 2, nameservers: [z, x]}\nlist: [{name: m, v: new}, {name: k, v: old}]\n";
        let found = differences(Format::Yaml, file, rendered).unwrap();
        let expected = [
            "@ a.b",
            "- 2",
            "+ 1",
            "@ a.nameservers",
            "- [\"z\",\"x\"]",
            "+ [\"x\"]",
            "@ list[k].v",
            "- \"old\"",
            "+ \"new\"",
        ];
        assert_eq!(found, expected);
        let empty = differences(Format::Yaml, "# empty\n", "a: 1\n").unwrap();
        assert_eq!(empty, ["@ ", "+ {\"a\":1}"]);
        assert!(differences(Format::Yaml, "a: [", "a: 1\n").is_err());
    }

    #[test]
    fn same_pod_is_known_whatever_its_volumes_are_called_and_its_command_is_written() {
        let rendered = "spec:\n  volumes: [{name: selector, hostPath: {path: /e}}]\n  containers:\n    - command: [kube-apiserver, --egress=/e]\n      volumeMounts: [{name: selector, mountPath: /e}]\n";
        let file = |volume: &str, path: &str, command: &str| {
            format!(
                "spec:\n  volumes: [{{name: {volume}, hostPath: {{path: {path}}}}}]\n  containers:\n    - command: {command}\n      volumeMounts: [{{name: {volume}, mountPath: /e}}]\n"
            )
        };
        for command in [
            "[kube-apiserver, --v=2, --egress=/e]",
            "[/usr/bin/kube-apiserver, --egress, /e]",
            "[/bin/sh, -c, 'exec kube-apiserver --egress=/e > /tmp/log']",
        ] {
            let same = file("other", "/e", command);
            let found = differences(Format::Yaml, &same, rendered).unwrap();
            assert!(found.is_empty(), "{command}: {found:?}");
        }
        let other_path = file("selector", "/f", "[kube-apiserver, --egress=/e]");
        let other_flag = file("selector", "/e", "[kube-apiserver, --egress=/f]");
        for wrong in [other_path, other_flag] {
            let found = differences(Format::Yaml, &wrong, rendered).unwrap();
            assert!(!found.is_empty(), "{wrong}");
        }
    }

    #[test]
    fn lines_have_to_be_there_in_order() {
        let rendered = "# comment\nforward . 10.0.0.1 {\n    policy sequential\n}\n";
        let file = ".:53 {\n  errors\n  forward .  10.0.0.1 {\n    max_concurrent 1000\n    policy sequential\n  }\n}\n";
        assert!(
            differences(Format::Lines, file, rendered)
                .unwrap()
                .is_empty()
        );
        let other = file.replace("10.0.0.1", "10.0.0.2");
        let found = differences(Format::Lines, &other, rendered).unwrap();
        assert_eq!(found, ["+ forward . 10.0.0.1 {"]);
    }
}
