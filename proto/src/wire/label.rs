//! Labels of nodes, as Kubernetes writes them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::frame::FrameError;

/// Labels of a node, by their keys.
pub type Labels = BTreeMap<Box<str>, Box<str>>;

/// Most labels that an agent may give its node.
pub const LABELS_MAX: usize = 16;
/// Longest name in a key, and longest value.
const NAME_MAX: usize = 63;

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

/// Parses `KEY=VALUE`.
///
/// # Errors
/// Returns a text for people.
pub fn parse_label(text: &str) -> Result<(Box<str>, Box<str>), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    if !is_label_value(value) {
        return Err(format!(
            "{value:?} is not the value of a label in Kubernetes"
        ));
    }
    Ok((key.parse::<LabelKey>()?.0, value.into()))
}

/// Returns the labels that an operator repeated.
///
/// # Errors
/// Returns a text for people if a key has two values.
pub fn unique_labels(
    labels: impl IntoIterator<Item = (Box<str>, Box<str>)>,
) -> Result<Labels, String> {
    let mut unique = Labels::new();
    for (key, value) in labels {
        if let Some(other) = unique.get(&key).filter(|other| **other != value) {
            return Err(format!("{key} has two values, {other:?} and {value:?}"));
        }
        unique.insert(key, value);
    }
    Ok(unique)
}

/// Returns whether `name` is a lower-case DNS subdomain (RFC 1123), like the names of objects.
pub fn is_object_name(name: &str) -> bool {
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

pub(super) fn encode(labels: &Labels) -> Vec<String> {
    let labels = labels.iter();
    labels
        .map(|(key, value)| format!("{key}={value}"))
        .collect()
}

pub(super) fn decode(texts: &[String]) -> Result<Labels, FrameError> {
    if texts.len() > LABELS_MAX {
        return Err(FrameError::Invalid("number of labels"));
    }
    let labels = texts.iter().map(|text| parse_label(text));
    labels
        .collect::<Result<_, _>>()
        .map_err(|_syntax| FrameError::Invalid("label"))
}
