//! A deserializer of settings that records the mistakes of a tree and reads on after each.

use std::collections::{BTreeMap, BTreeSet};
use std::slice;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer as _, MapAccess, SeqAccess,
    Visitor,
};
use serde_saphyr::Spanned;

use super::mistakes::{Mistake, Mistakes};
use super::tree::Node;

/// A configuration file, as far as it could be read.
#[derive(Debug)]
pub struct YamlFile<T> {
    /// The settings, with the defaults of those that have mistakes. `None` if there are none, or they
    /// could not be read at all.
    pub settings: Option<T>,
    /// All mistakes in keys and values, one per line.
    pub mistakes: Vec<String>,
    /// First parts of the keys whose values have mistakes.
    pub bad_keys: BTreeSet<String>,
    /// The line of each key of the first two levels, as in `httpListen` and `limits.openTimeout`.
    pub lines: BTreeMap<String, u64>,
}

/// Reads settings from the tree of a file, as far as that is possible, and all mistakes. `file` is
/// the text of the file.
pub(super) fn read<T: DeserializeOwned>(root: &Spanned<Node>, file: &str) -> YamlFile<T> {
    let mistakes = Mistakes::default();
    let value = Value {
        mistakes: &mistakes,
        file,
        node: root,
        path: String::new(),
    };
    let settings = T::deserialize(value).map_err(|mistake| {
        mistakes.record_found(root.referenced.line(), "", mistake);
    });
    let (mistakes, bad_keys) = mistakes.into_parts();
    YamlFile {
        settings: settings.ok(),
        mistakes,
        bad_keys,
        lines: key_lines(root),
    }
}

/// Returns the line of each key of the first two levels, as in `httpListen` and `limits.openTimeout`.
fn key_lines(root: &Spanned<Node>) -> BTreeMap<String, u64> {
    let mut lines = BTreeMap::new();
    let Node::Mapping(entries) = &root.value else {
        return lines;
    };
    for (key, node) in entries {
        lines.insert(key.value.clone(), key.defined.line());
        if let Node::Mapping(entries) = &node.value {
            let inner = entries.iter().map(|(inner, _)| {
                (
                    format!("{}.{}", key.value, inner.value),
                    inner.defined.line(),
                )
            });
            lines.extend(inner);
        }
    }
    lines
}

/// A value of the tree. After a mistake the visitor receives an empty value, so that the others are
/// read too.
struct Value<'a> {
    mistakes: &'a Mistakes,
    /// The text of the file.
    file: &'a str,
    node: &'a Spanned<Node>,
    /// The keys above, as in `services[0].listen`.
    path: String,
}

impl<'a> Value<'a> {
    fn record_kind(&self, expected: &str) {
        let (line, kind) = (self.node.referenced.line(), self.node.value.kind());
        let text = format!("{kind} where {expected} is expected");
        self.mistakes.record(line, &self.path, text);
    }

    /// Visits the entries of a mapping. With `known`, other keys are mistakes.
    fn visit_mapping<'de, V: Visitor<'de>>(
        self,
        known: Option<&'static [&'static str]>,
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        let node = self.node;
        let entries = match &node.value {
            Node::Mapping(entries) => entries.as_slice(),
            Node::Null | Node::Text(_) | Node::Plain | Node::List(_) => {
                self.record_kind("a mapping");
                let empty = MappingAccess::new(self, &[], known);
                return visitor
                    .visit_map(empty)
                    .map_err(|_missing| Mistake::Recorded);
            }
        };
        visitor.visit_map(MappingAccess::new(self, entries, known))
    }
}

impl<'de> Deserializer<'de> for Value<'_> {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        match &self.node.value {
            Node::Null => visitor.visit_unit(),
            Node::Text(_) | Node::Plain => self.deserialize_str(visitor),
            Node::List(_) => self.deserialize_seq(visitor),
            Node::Mapping(_) => self.visit_mapping(None, visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        let Some(text) = Node::text(self.node, self.file) else {
            self.record_kind("a single value");
            return visitor.visit_str("");
        };
        visitor.visit_str(text)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        match self.node.value {
            Node::Null => visitor.visit_none(),
            Node::Text(_) | Node::Plain | Node::List(_) | Node::Mapping(_) => {
                visitor.visit_some(self)
            }
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        let node = self.node;
        let (items, index) = match &node.value {
            Node::List(items) => (items.as_slice(), Some(0)),
            Node::Text(_) | Node::Plain => (slice::from_ref(node), None),
            Node::Null => (&[][..], None),
            Node::Mapping(_) => {
                self.record_kind("a list");
                (&[][..], None)
            }
        };
        visitor.visit_seq(ListAccess {
            mistakes: self.mistakes,
            file: self.file,
            items: items.iter(),
            path: self.path,
            index,
        })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        self.visit_mapping(None, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        self.visit_mapping(Some(fields), visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf
        unit unit_struct tuple tuple_struct enum identifier
    }
}

/// The items of a list.
struct ListAccess<'a> {
    mistakes: &'a Mistakes,
    file: &'a str,
    items: slice::Iter<'a, Spanned<Node>>,
    path: String,
    /// Index of the next item, or `None` for a single value that stands for a list.
    index: Option<usize>,
}

impl<'de> SeqAccess<'de> for ListAccess<'_> {
    type Error = Mistake;

    /// Ends the list at an item that has no value, whose mistake is recorded.
    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Mistake> {
        let Some(node) = self.items.next() else {
            return Ok(None);
        };
        let path = match &mut self.index {
            Some(index) => {
                let path = format!("{}[{index}]", self.path);
                *index += 1;
                path
            }
            None => self.path.clone(),
        };
        let value = Value {
            mistakes: self.mistakes,
            file: self.file,
            node,
            path: path.clone(),
        };
        match seed.deserialize(value) {
            Ok(item) => Ok(Some(item)),
            Err(mistake) => {
                let line = node.referenced.line();
                self.mistakes.record_found(line, &path, mistake);
                Ok(None)
            }
        }
    }
}

/// The entries of a mapping.
struct MappingAccess<'a> {
    mistakes: &'a Mistakes,
    file: &'a str,
    entries: slice::Iter<'a, (Spanned<String>, Spanned<Node>)>,
    path: String,
    known: Option<&'static [&'static str]>,
    /// The value of the last key, with its path.
    next: Option<(&'a Spanned<Node>, String)>,
}

impl<'a> MappingAccess<'a> {
    fn new(
        value: Value<'a>,
        entries: &'a [(Spanned<String>, Spanned<Node>)],
        known: Option<&'static [&'static str]>,
    ) -> Self {
        Self {
            mistakes: value.mistakes,
            file: value.file,
            entries: entries.iter(),
            path: value.path,
            known,
            next: None,
        }
    }
}

impl<'de> MapAccess<'de> for MappingAccess<'_> {
    type Error = Mistake;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, Mistake> {
        for (key, node) in self.entries.by_ref() {
            let name = key.value.as_str();
            if let Some(known) = self.known
                && !known.contains(&name)
            {
                let line = key.defined.line();
                self.mistakes.record_unknown(line, &self.path, name, known);
                continue;
            }
            let path = match self.path.as_str() {
                "" => name.to_owned(),
                above => format!("{above}.{name}"),
            };
            self.next = Some((node, path));
            return seed.deserialize(name.into_deserializer()).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Mistake> {
        let (node, path) = self.next.take().ok_or(Mistake::Recorded)?;
        let value = Value {
            mistakes: self.mistakes,
            file: self.file,
            node,
            path: path.clone(),
        };
        seed.deserialize(value).map_err(|mistake| {
            let line = node.referenced.line();
            self.mistakes.record_found(line, &path, mistake);
            Mistake::Recorded
        })
    }
}
