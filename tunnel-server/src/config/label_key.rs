//! The keys of Node labels that the server stores for discovery and for `nodes --selector`, and the
//! names of Kubernetes.

use std::fmt;
use std::str::FromStr;

use tunnel_process::settings::ConfigErrors;

/// Key of a label in Kubernetes: a name, with the prefix of a DNS subdomain or without.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabelKey(Box<str>);

impl LabelKey {
    /// Returns the key, with its prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for LabelKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (prefix, name) = match text.split_once('/') {
            Some((prefix, name)) => (Some(prefix), name),
            None => (None, text),
        };
        if prefix.is_none_or(is_object_name) && is_label_name(name) {
            Ok(Self(text.into()))
        } else {
            Err(format!(
                "{text:?} is not the key of a label, as in topology.kubernetes.io/zone"
            ))
        }
    }
}

impl fmt::Display for LabelKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Returns whether Kubernetes accepts the text as the value of a label.
pub fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_label_name(text)
}

/// Returns the name that Prometheus gives a label in its meta labels: each character that is not
/// allowed becomes `_`.
pub fn prometheus_label_name(key: &str) -> String {
    let allowed = |character: char| match character {
        'a'..='z' | 'A'..='Z' | '0'..='9' => character,
        _ => '_',
    };
    key.chars().map(allowed).collect()
}

/// Returns the keys of `--node-label`, sorted.
pub(super) fn check(texts: &[String], errors: &mut ConfigErrors) -> Vec<LabelKey> {
    let mut keys = errors.parse_list(SETTING, texts, str::parse::<LabelKey>);
    keys.sort();
    keys.dedup();
    if keys.len() > KEYS_MAX {
        errors.add(SETTING, format!("more than {KEYS_MAX} labels"));
    }
    for (position, key) in keys.iter().enumerate() {
        let name = prometheus_label_name(key.as_str());
        let mut earlier = keys.iter().take(position);
        if let Some(other) = earlier.find(|other| prometheus_label_name(other.as_str()) == name) {
            errors.add(
                SETTING,
                format!("{other} and {key} have one name in Prometheus, {name}; leave one out"),
            );
        }
    }
    keys
}

/// Returns whether `name` is a lower-case DNS subdomain (RFC 1123), like the names of objects.
pub(super) fn is_object_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(inner)
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

fn is_label_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [text.bytes().next(), text.bytes().last()];
    (1..=NAME_MAX).contains(&text.len())
        && text.bytes().all(is_inner)
        && ends
            .iter()
            .flatten()
            .all(|byte| byte.is_ascii_alphanumeric())
}

const SETTING: &str = "--node-label";
/// Maximum number of labels: 20,000 nodes with all of them need about 40 MB.
const KEYS_MAX: usize = 16;
/// Longest name in a key, and longest value.
const NAME_MAX: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::assert_contains;

    fn checked(texts: &[&str]) -> Result<Vec<LabelKey>, String> {
        let mut errors = ConfigErrors::default();
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        let keys = check(&texts, &mut errors);
        errors.finish(keys).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_of_kubernetes_are_parsed_and_other_texts_are_not() {
        let longest = format!("{}/{}", "a".repeat(253), "b".repeat(63));
        for text in ["zone", "example.com/A_b.c-d", &longest] {
            assert_eq!(text.parse::<LabelKey>().unwrap().as_str(), text);
        }
        let long = "b".repeat(64);
        for text in [
            "", "a=b", "!a", "/a", "a/", "a/b/c", "A/b", "-a", "a-", "a b", "ä", "a\n", &long,
        ] {
            assert!(text.parse::<LabelKey>().is_err(), "{text:?}");
        }
        for (value, expected) in [("", true), ("1.2_3-X", true), ("-a", false), (&long, false)] {
            assert_eq!(is_label_value(value), expected, "{value:?}");
        }
    }

    #[test]
    fn keys_are_sorted_and_bounded_and_have_different_names_in_prometheus() {
        let keys = checked(&["zone", "example.com/rack", "zone"]).unwrap();
        let keys: Vec<_> = keys.iter().map(LabelKey::as_str).collect();
        assert_eq!(keys, ["example.com/rack", "zone"]);
        assert_eq!(prometheus_label_name(keys[0]), "example_com_rack");
        let error = checked(&["a.b", "a_b"]).unwrap_err();
        assert_contains(&error, "a.b and a_b have one name in Prometheus, a_b");
        let many: Vec<String> = (0..17).map(|number| format!("label-{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(checked(&many[..16]).is_ok());
        assert_contains(&checked(&many).unwrap_err(), "more than 16 labels");
        let error = checked(&["zone=a"]).unwrap_err();
        assert_contains(&error, "--node-label: \"zone=a\" is not the key of a label");
    }
}
