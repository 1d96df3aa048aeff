//! Label and field selectors of a collection.

use serde_json::Value;

use super::kinds::Kind;
use super::status::Status;

/// A selector whose requirements must all match.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<(String, bool, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Selector {
    /// Parses the two parameters of a request.
    pub(super) fn parse(
        kind: &Kind,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, Status> {
        let parts = |text: Option<&str>| split(text.unwrap_or_default());
        let labels = parts(labels)
            .iter()
            .map(|part| Requirement::parse(part))
            .collect();
        let fields = parts(fields)
            .iter()
            .map(|part| field(kind, part))
            .collect::<Result<_, _>>()?;
        Ok(Self { labels, fields })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Returns the only name that the selector matches, for authorization.
    pub(super) fn only_name(&self) -> Option<&str> {
        let named =
            |(field, equal, _): &&(String, bool, String)| field == "metadata.name" && *equal;
        self.fields
            .iter()
            .find(named)
            .map(|(_, _, name)| name.as_str())
    }

    pub(super) fn fits(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.labels
            .iter()
            .all(|requirement| requirement.fits(labels))
            && self.fields.iter().all(|(field, equal, wanted)| {
                let found = field.split('.').fold(object, |value, word| &value[word]);
                let found = match found {
                    Value::String(text) => text.clone(),
                    Value::Null => String::new(),
                    other => other.to_string(),
                };
                (found == *wanted) == *equal
            })
    }
}

impl Requirement {
    fn parse(text: &str) -> Self {
        let text = text.trim();
        if let Some((key, values)) = text.split_once(" notin ") {
            return Self::NotIn(key.trim().to_owned(), set(values));
        }
        if let Some((key, values)) = text.split_once(" in ") {
            return Self::In(key.trim().to_owned(), set(values));
        }
        if let Some((key, value)) = text.split_once("!=") {
            return Self::NotIn(key.trim().to_owned(), vec![value.trim().to_owned()]);
        }
        if let Some((key, value)) = text.split_once('=') {
            return Self::In(
                key.trim().to_owned(),
                vec![value.trim_start_matches('=').trim().to_owned()],
            );
        }
        match text.strip_prefix('!') {
            Some(key) => Self::Absent(key.trim().to_owned()),
            None => Self::Exists(text.to_owned()),
        }
    }

    fn fits(&self, labels: &Value) -> bool {
        let value = |key: &str| labels[key].as_str();
        match self {
            Self::In(key, values) => {
                value(key).is_some_and(|found| values.iter().any(|value| value == found))
            }
            Self::NotIn(key, values) => {
                value(key).is_none_or(|found| values.iter().all(|value| value != found))
            }
            Self::Exists(key) => value(key).is_some(),
            Self::Absent(key) => value(key).is_none(),
        }
    }
}

/// Splits at commas outside parentheses.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0_u32);
    for letter in text.chars() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = parts.last_mut() {
            last.push(letter);
        }
    }
    parts.retain(|part| !part.trim().is_empty());
    parts
}

fn set(text: &str) -> Vec<String> {
    let inner = text.trim().trim_start_matches('(').trim_end_matches(')');
    inner
        .split(',')
        .map(|value| value.trim().to_owned())
        .collect()
}

/// Parses a field selector. The real API server supports a few fields of each kind and refuses the
/// others.
fn field(kind: &Kind, text: &str) -> Result<(String, bool, String), Status> {
    let (field, equal, value) = if let Some((field, value)) = text.split_once("!=") {
        (field, false, value)
    } else if let Some((field, value)) = text.split_once('=') {
        (field, true, value.trim_start_matches('='))
    } else {
        return Err(Status::bad_request(format!(
            "invalid field selector: {text:?}"
        )));
    };
    let known = match field {
        "metadata.name" => true,
        "metadata.namespace" => kind.namespaced,
        "spec.unschedulable" => kind.kind == "Node",
        "spec.nodeName" | "status.phase" | "status.podIP" => kind.kind == "Pod",
        "type" if kind.kind == "Secret" => true,
        "spec.clusterIP" | "spec.type" => kind.kind == "Service",
        _ => {
            kind.kind == "Event"
                && (field.starts_with("involvedObject.") || EVENT_FIELDS.contains(&field))
        }
    };
    if known {
        Ok((field.to_owned(), equal, value.to_owned()))
    } else {
        Err(Status::bad_request(format!(
            "field label not supported: {field}"
        )))
    }
}

const EVENT_FIELDS: [&str; 5] = [
    "reason",
    "reportingComponent",
    "source",
    "type",
    "regarding.name",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selector(labels: &str, fields: &str) -> Result<Selector, Status> {
        let nodes = Kind::find("", "nodes").unwrap();
        Selector::parse(nodes, Some(labels), Some(fields))
    }

    #[test]
    fn labels_are_selected_by_equality_sets_and_presence() {
        let node = json!({ "metadata": { "name": "worker-1", "labels": { "zone": "a", "edge": "true" } } });
        for (labels, fits) in [
            ("", true),
            ("zone=a", true),
            ("zone==a,edge=true", true),
            ("zone!=a", false),
            ("other!=a", true),
            ("zone in (a, b)", true),
            ("zone notin (a,b)", false),
            ("edge", true),
            ("!edge", false),
            ("zone in (b),edge", false),
        ] {
            assert_eq!(selector(labels, "").unwrap().fits(&node), fits, "{labels}");
        }
    }

    #[test]
    fn only_fields_that_the_real_one_knows_are_selected() {
        let node = json!({ "metadata": { "name": "worker-1" } });
        let one = selector("", "metadata.name=worker-1").unwrap();
        assert!(one.fits(&node));
        assert_eq!(one.only_name(), Some("worker-1"));
        assert!(!selector("", "metadata.name!=worker-1").unwrap().fits(&node));
        assert_eq!(selector("", "spec.podCIDR=x").unwrap_err().code, 400);
    }
}
