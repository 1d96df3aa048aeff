//! A label of Node objects that a setting names.

use std::fmt;
use std::str::FromStr;

use super::label_key::{LabelKey, is_label_value};

/// A label of a Node with its value, `KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeLabel(Box<str>);

impl NodeLabel {
    /// Returns the key, with its prefix.
    pub fn key(&self) -> &str {
        self.0.split_once('=').map_or("", |(key, _value)| key)
    }

    /// Returns the value, which may be empty.
    pub fn value(&self) -> &str {
        self.0.split_once('=').map_or("", |(_key, value)| value)
    }

    /// Returns the text `KEY=VALUE`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns an error if a kubelet may be able to set the label, and so `gain` something.
    pub(super) fn check_restricted(&self, gain: &str) -> Result<(), String> {
        if self.is_restricted() {
            return Ok(());
        }
        Err(format!(
            "a kubelet may be able to set {} on its own Node, and so {gain}; use a key that begins with {RESTRICTED}/",
            self.key()
        ))
    }

    /// Returns whether Kubernetes promises that the admission plugin `NodeRestriction` denies the
    /// label to kubelets. It denies some others, too.
    pub fn is_restricted(&self) -> bool {
        let prefix = self.key().split_once('/').map(|(prefix, _name)| prefix);
        let rest = prefix.and_then(|prefix| prefix.strip_suffix(RESTRICTED));
        rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }
}

impl FromStr for NodeLabel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_label = text
            .split_once('=')
            .is_some_and(|(key, value)| key.parse::<LabelKey>().is_ok() && is_label_value(value));
        if is_label {
            Ok(Self(text.into()))
        } else {
            Err(format!(
                "{text:?} is not KEY=VALUE of a label, as in {RESTRICTED}/registry=true"
            ))
        }
    }
}

impl fmt::Display for NodeLabel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Prefix of the labels that kubelets cannot set.
const RESTRICTED: &str = "node-restriction.kubernetes.io";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_kubernetes_are_parsed_and_other_texts_are_not() {
        let longest = format!("{}/{}=1", "a".repeat(253), "b".repeat(63));
        for (text, key, value) in [
            ("zone=a", "zone", "a"),
            (
                "node-role.kubernetes.io/edge=",
                "node-role.kubernetes.io/edge",
                "",
            ),
            (
                "example.com/A_b.c-d=1.2_3-X",
                "example.com/A_b.c-d",
                "1.2_3-X",
            ),
            (&longest, &longest[..317], "1"),
        ] {
            let label: NodeLabel = text.parse().unwrap();
            assert_eq!((label.key(), label.value()), (key, value), "{text}");
            assert_eq!(label.as_str(), text);
        }
        let long = format!("{}=1", "b".repeat(64));
        for text in [
            "",
            "=",
            "=a",
            "a",
            "a=b=c",
            "a= b",
            " a=b",
            "a=b ",
            "a/b/c=d",
            "/a=b",
            "a/=b",
            "A/b=c",
            "-a=b",
            "a-=b",
            "a=-b",
            "a=b.",
            "a=*",
            "!a=b",
            "ä=b",
            "a=\u{430}",
            "a=b\n",
            &long,
        ] {
            assert!(text.parse::<NodeLabel>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn labels_with_one_prefix_are_denied_to_kubelets() {
        for (text, expected) in [
            ("node-restriction.kubernetes.io/a=b", true),
            ("example.com.node-restriction.kubernetes.io/a=b", true),
            ("xnode-restriction.kubernetes.io/a=b", false),
            ("node-restriction.kubernetes.io.example/a=b", false),
            ("node-restriction.kubernetes.io=b", false),
            ("openyurt.io/is-edge-worker=true", false),
        ] {
            let label: NodeLabel = text.parse().unwrap();
            assert_eq!(label.is_restricted(), expected, "{text}");
        }
    }
}
