//! A YAML file as a tree of values with their locations.

use std::fmt;

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_saphyr::Spanned;
use zeroize::Zeroizing;

/// A value of a file.
pub(super) enum Node {
    Null,
    /// A text. Its memory is wiped on drop, because it may be secret.
    Text(Zeroizing<String>),
    /// A plain number or truth value, which [`Node::text`] reads from the file.
    Plain,
    List(Vec<Spanned<Self>>),
    Mapping(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl Node {
    /// Returns what the value is, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "no value",
            Self::Text(_) | Self::Plain => "a single value",
            Self::List(_) => "a list",
            Self::Mapping(_) => "a mapping",
        }
    }

    /// Returns the text of a single value of `file` as written: 0755 and 1.10 are no numbers here.
    pub(super) fn text<'a>(node: &'a Spanned<Self>, file: &'a str) -> Option<&'a str> {
        match &node.value {
            Self::Text(text) => Some(text.as_str()),
            Self::Plain => plain_text(node, file),
            Self::Null | Self::List(_) | Self::Mapping(_) => None,
        }
    }
}

/// Returns the text of a number or truth value, which contains no space. A tag may precede it.
fn plain_text<'a>(node: &Spanned<Node>, file: &'a str) -> Option<&'a str> {
    let span = node.defined.span();
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let len = usize::try_from(span.byte_len()?).ok()?;
    let written = file.get(start..start.checked_add(len)?)?;
    written.split_whitespace().next_back()
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, _value: bool) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_i64<E>(self, _value: i64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_u64<E>(self, _value: u64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_f64<E>(self, _value: f64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(Zeroizing::new(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut mapping: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = mapping.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Mapping(entries))
    }
}
