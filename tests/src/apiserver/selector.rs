//! Label and field selectors of a collection.

use serde_json::Value;

use super::kinds::Kind;
use super::status::Status;

/// A selector whose requirements must all match.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

/// A requirement for a label or a field.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    name: String,
    /// Required value; any value if `None`.
    value: Option<String>,
    is_negated: bool,
}

impl Selector {
    /// Parses the two parameters of a request. Sets of values are not supported.
    pub(super) fn parse(
        kind: &Kind,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, Status> {
        let parse = |text: Option<&str>| -> Result<Vec<_>, Status> {
            let parts = text.unwrap_or_default().split(',').map(str::trim);
            parts
                .filter(|part| !part.is_empty())
                .map(Requirement::parse)
                .collect()
        };
        let (labels, fields) = (parse(labels)?, parse(fields)?);
        if let Some(unknown) = fields.iter().find(|field| !field.is_field_of(kind)) {
            let message = format!("field label not supported: {}", unknown.name);
            return Err(Status::bad_request(message));
        }
        Ok(Self { labels, fields })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Returns the only name that the selector matches, for authorization.
    pub(super) fn only_name(&self) -> Option<&str> {
        self.fields
            .iter()
            .find(|field| field.name == "metadata.name" && !field.is_negated)
            .and_then(|field| field.value.as_deref())
    }

    pub(super) fn fits(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.labels
            .iter()
            .all(|label| label.fits(labels[&label.name].as_str()))
            && self.fields.iter().all(|field| {
                let words = field.name.split('.');
                match words.fold(object, |value, word| &value[word]) {
                    Value::String(text) => field.fits(Some(text)),
                    Value::Null => field.fits(Some("")),
                    other => field.fits(Some(&other.to_string())),
                }
            })
    }
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, Status> {
        if text.contains('(') {
            let message = format!("sets are not supported: {text:?}");
            return Err(Status::bad_request(message));
        }
        let (name, value, is_negated) = if let Some((name, value)) = text.split_once("!=") {
            (name, Some(value), true)
        } else if let Some((name, value)) = text.split_once('=') {
            (name, Some(value.trim_start_matches('=')), false)
        } else if let Some(name) = text.strip_prefix('!') {
            (name, None, true)
        } else {
            (text, None, false)
        };
        Ok(Self {
            name: name.trim().to_owned(),
            value: value.map(|value| value.trim().to_owned()),
            is_negated,
        })
    }

    fn fits(&self, found: Option<&str>) -> bool {
        let fits = match &self.value {
            Some(value) => found == Some(value.as_str()),
            None => found.is_some(),
        };
        fits != self.is_negated
    }

    /// Returns whether this is a field selector for the kind. The real API server supports a few
    /// fields of each kind and refuses the others.
    fn is_field_of(&self, kind: &Kind) -> bool {
        let field = self.name.as_str();
        let is_known = match field {
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
        is_known && self.value.is_some()
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
    fn labels_are_selected_by_equality_and_presence() {
        let node = json!({ "metadata": { "name": "worker-1", "labels": { "zone": "a", "edge": "true" } } });
        for (labels, fits) in [
            ("", true),
            ("zone=a", true),
            ("zone==a,edge=true", true),
            ("zone!=a", false),
            ("other!=a", true),
            ("edge", true),
            ("!edge", false),
            ("zone=b,edge", false),
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
        assert_eq!(selector("zone in (a)", "").unwrap_err().code, 400);
    }
}
