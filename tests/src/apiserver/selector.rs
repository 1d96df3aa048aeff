//! Label and field selectors of a collection.

use serde_json::Value;

use super::status::Status;

/// A selector whose requirements must all match. Each is a name and a value.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Selector {
    labels: Vec<(String, String)>,
    fields: Vec<(String, String)>,
}

impl Selector {
    /// Parses the two parameters of a request. Only equality is supported.
    pub(super) fn parse(labels: Option<&str>, fields: Option<&str>) -> Result<Self, Status> {
        let parse = |text: Option<&str>| -> Result<Vec<_>, Status> {
            let parts = text.unwrap_or_default().split(',').map(str::trim);
            parts
                .filter(|part| !part.is_empty())
                .map(|part| match part.split_once('=') {
                    Some((name, value)) if !part.contains(['!', '(']) => {
                        Ok((name.to_owned(), value.trim_start_matches('=').to_owned()))
                    }
                    _ => Err(Status::bad_request(format!("a selector {part:?}"))),
                })
                .collect()
        };
        Ok(Self {
            labels: parse(labels)?,
            fields: parse(fields)?,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Returns the only name that the selector matches, for authorization.
    pub(super) fn only_name(&self) -> Option<&str> {
        let name = self
            .fields
            .iter()
            .find(|(field, _)| field == "metadata.name");
        name.map(|(_, value)| value.as_str())
    }

    pub(super) fn fits(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let has_label = |(name, value): &(String, String)| labels[name] == value.as_str();
        let has_field = |(name, value): &(String, String)| match name
            .split('.')
            .fold(object, |found, word| &found[word])
        {
            Value::String(found) => found == value,
            Value::Null => value.is_empty(),
            // A number or a boolean.
            found => value.parse::<Value>().is_ok_and(|value| value == *found),
        };
        self.labels.iter().all(has_label) && self.fields.iter().all(has_field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equality_is_a_selector() {
        for selector in ["zone in (a)", "zone!=a", "zone"] {
            let refused = Selector::parse(Some(selector), None).unwrap_err();
            assert_eq!(refused.code, 400, "{selector}");
        }
        let selector = Selector::parse(None, Some("metadata.name=worker-1")).unwrap();
        assert_eq!(selector.only_name(), Some("worker-1"));
    }
}
