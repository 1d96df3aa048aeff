//! Patterns of names that an operator writes.

use std::fmt;
use std::str::FromStr;

use super::name::{NameError, NodeName};

/// A name pattern such as `*.edge.example.com`. A `*` matches one or more characters of a label.
/// Each label may contain at most one `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern(Box<str>);

/// The reason why a text is not a name pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamePatternError {
    /// A label contains more than one `*`.
    #[error("a label may have one '*'")]
    Stars,
    /// The last label would be a number, as in an address.
    #[error("names in DNS do not end in a number")]
    Number,
    /// The text is not a valid name after each `*` is replaced by a letter.
    #[error(transparent)]
    Name(#[from] NameError),
}

impl NamePattern {
    /// Returns whether each label of the name matches its label of the pattern.
    pub fn matches(&self, name: &NodeName) -> bool {
        let (wanted, labels) = (self.0.split('.'), name.as_str().split('.'));
        wanted.clone().count() == labels.clone().count()
            && wanted
                .zip(labels)
                .all(|(wanted, label)| matches_label(label, wanted))
    }
}

fn matches_label(label: &str, wanted: &str) -> bool {
    match wanted.split_once('*') {
        None => label == wanted,
        Some((start, end)) => {
            let rest = label.strip_prefix(start);
            rest.and_then(|rest| rest.strip_suffix(end))
                .is_some_and(|star| !star.is_empty())
        }
    }
}

impl FromStr for NamePattern {
    type Err = NamePatternError;

    fn from_str(text: &str) -> Result<Self, NamePatternError> {
        let text = text.trim().to_ascii_lowercase();
        let text = text.strip_suffix('.').unwrap_or(&text);
        if text.split('.').any(|label| label.matches('*').count() > 1) {
            return Err(NamePatternError::Stars);
        }
        let name = text.replace('*', "x").parse::<NodeName>()?.for_dns()?;
        if name.ends_in_number() {
            return Err(NamePatternError::Number);
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_stands_for_a_part_of_one_label() {
        for (pattern, name, expected) in [
            ("*.edge.example.com", "site-1.edge.example.com", true),
            ("*.Edge.example.com.", "SITE-1.edge.example.com", true),
            ("*.edge.example.com", "edge.example.com", false),
            ("*.edge.example.com", "a.b.edge.example.com", false),
            ("*.edge.example.com", "site-1.edge.example.org", false),
            ("*.edge.example.com", "site-1xedge.example.com", false),
            ("ip-*.ec2.internal", "ip-10-0-0-1.ec2.internal", true),
            ("ip-*.ec2.internal", "ip-.ec2.internal", false),
            ("gw-*-1", "gw-a-1", true),
            ("gw-*-1", "gw-1", false),
            ("*", "registry", true),
            ("*", "registry.example", false),
            ("registry", "registry", true),
            ("registry", "registry2", false),
        ] {
            let pattern: NamePattern = pattern.parse().unwrap();
            // Texts like "ip-" are not valid names.
            let name = name.parse().ok();
            let matches = name.is_some_and(|name| pattern.matches(&name));
            assert_eq!(matches, expected, "{pattern} {expected}");
        }
    }

    #[test]
    fn patterns_are_names_but_for_their_stars() {
        for text in [
            "", "**", "a*b*", "*..x", "-*", "a b", "10.0.0.1", "*.10", "[a-z]", "?",
        ] {
            assert!(text.parse::<NamePattern>().is_err(), "{text:?}");
        }
    }
}
