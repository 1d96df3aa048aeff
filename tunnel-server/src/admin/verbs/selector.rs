//! The selector of `nodes --selector`, with the operators of Kubernetes' label selectors.

use std::str::FromStr;

use crate::config::{LabelKey, is_label_value};
use crate::routing::routes::NodeLabels;

/// A selector has a label that the server does not store.
#[derive(Debug, thiserror::Error)]
#[error("the server cannot select by the label {key}: it stores {stored} (--node-label)")]
pub struct UnknownLabel {
    key: String,
    stored: String,
}

/// A label selector. A node must meet all requirements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: LabelKey,
    operator: Operator,
}

/// The operators have the names and the meaning of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Operator {
    In(Vec<Box<str>>),
    /// Nodes without the label match too.
    NotIn(Vec<Box<str>>),
    Exists,
    DoesNotExist,
}

impl LabelSelector {
    /// Checks that the server stores the labels of the selector.
    ///
    /// # Errors
    /// Returns [`UnknownLabel`] for the first label that is not among `stored`.
    pub(super) fn check(&self, stored: &[String]) -> Result<(), UnknownLabel> {
        let mut keys = self.0.iter().map(|requirement| &requirement.key);
        match keys.find(|key| stored.iter().all(|stored| stored != key.as_str())) {
            None => Ok(()),
            Some(unknown) => Err(UnknownLabel {
                key: unknown.to_string(),
                stored: if stored.is_empty() {
                    "no label of the Nodes".to_owned()
                } else {
                    format!("only {}", stored.join(", "))
                },
            }),
        }
    }

    pub(crate) fn matches(&self, labels: &NodeLabels) -> bool {
        self.0.iter().all(|requirement| {
            let value = labels.get(requirement.key.as_str());
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

impl FromStr for LabelSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut depth = 0_usize;
        let is_separator = |character: char| {
            match character {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            character == ',' && depth == 0
        };
        let requirements = text.split(is_separator).map(str::parse);
        requirements.collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Requirement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (key, operator) = if let Some((head, set)) = text.split_once('(') {
            let values = set.strip_suffix(')').ok_or_else(|| syntax(text))?;
            let values = values.split(',').map(value).collect::<Result<_, _>>()?;
            match head.split_whitespace().collect::<Vec<_>>()[..] {
                [key, "in"] => (key, Operator::In(values)),
                [key, "notin"] => (key, Operator::NotIn(values)),
                _ => return Err(syntax(text)),
            }
        } else if let Some((key, other)) = text.split_once("!=") {
            (key, Operator::NotIn(vec![value(other)?]))
        } else if let Some((key, own)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (key, Operator::In(vec![value(own)?]))
        } else if let Some(key) = text.strip_prefix('!') {
            (key, Operator::DoesNotExist)
        } else {
            (text, Operator::Exists)
        };
        let key = key.trim().parse()?;
        Ok(Self { key, operator })
    }
}

fn value(text: &str) -> Result<Box<str>, String> {
    let text = text.trim();
    if is_label_value(text) {
        Ok(text.into())
    } else {
        Err(format!("{text:?} is not the value of a label"))
    }
}

fn syntax(text: &str) -> String {
    format!("{text:?} is none of K=V, K!=V, K, !K, K in (V, ..) and K notin (V, ..)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::assert_contains;

    #[test]
    fn selectors_select_what_those_of_kubernetes_select() {
        let labels = [("example.com/zone", "north"), ("edge", "")];
        let labels = labels.map(|(key, value)| (key.into(), value.into()));
        let labels = NodeLabels::from(labels);
        for (selector, expected) in [
            ("example.com/zone=north", true),
            ("example.com/zone==north", true),
            ("example.com/zone = south", false),
            ("example.com/zone!=south", true),
            ("example.com/zone!=north", false),
            ("absent!=north", true),
            ("absent=", false),
            ("edge=", true),
            ("edge", true),
            ("!edge", false),
            ("!absent", true),
            ("example.com/zone in (south, north),edge", true),
            ("edge,example.com/zone in (south,west)", false),
            ("example.com/zone notin (south,west)", true),
            ("absent notin (a)", true),
            ("absent in ()", false),
            ("edge,!edge", false),
        ] {
            let parsed: LabelSelector = selector.parse().unwrap();
            assert_eq!(parsed.matches(&labels), expected, "{selector}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for selector in [
            "",
            ",",
            "a,",
            "a=b=c",
            "a in b",
            "a in (b",
            "a in (b))",
            "a of (b)",
            "in (b)",
            "a=<b>",
            "!",
            "!!a",
            "a=\u{202e}",
        ] {
            let parsed = selector.parse::<LabelSelector>();
            assert!(parsed.is_err(), "{selector}: {parsed:?}");
        }
    }

    #[test]
    fn labels_that_the_server_does_not_store_are_an_error_that_names_the_others() {
        let selector: LabelSelector = "zone,rack=a".parse().unwrap();
        let stored = ["zone", "role", "rack"].map(str::to_owned);
        assert!(selector.check(&stored).is_ok());
        for (stored, expected) in [
            (&stored[..2], "label rack: it stores only zone, role"),
            (&[], "label zone: it stores no label of the Nodes"),
        ] {
            let error = selector.check(stored).unwrap_err();
            assert_contains(&error, expected);
        }
    }
}
