//! Rows of the store: tables, the form of a value, and what is read from a table.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// The content of a row or a file. It may have secrets.
pub(super) type Content = Arc<Zeroizing<Vec<u8>>>;

tunnel_process::named! {
    /// A table of the store, in the order of a dump.
    #[derive(PartialOrd, Ord)]
    pub enum Table: ALL, label {
        /// Orders of operators about nodes, by node.
        Orders = "orders",
        /// Join tokens of a standalone server, by id.
        Tokens = "tokens",
        /// Known nodes, by name.
        Nodes = "nodes",
        /// The last observed state of the cluster.
        Cluster = "cluster",
        /// DNS records, by name.
        Records = "records",
        /// Connections of agents over QUIC, by connection id.
        Sessions = "sessions",
        /// Values that could not be read, by table and key.
        Damaged = "damaged",
    }
}

impl Table {
    pub(super) fn class(self) -> Class {
        match self {
            // With the rows that take the place of those that are set aside.
            Self::Orders | Self::Tokens | Self::Damaged => Class::Vital,
            Self::Nodes | Self::Cluster | Self::Records | Self::Sessions => Class::Observed,
        }
    }
}

/// Changes that are written together, so that what is large or fails delays no vital change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// What an operator decided, and what must not be used twice.
    Vital,
    /// What the server observed, and would observe again.
    Observed,
    /// Files, each of which may fail for itself.
    Files,
}

impl Class {
    pub(super) const ALL: [Self; 3] = [Self::Vital, Self::Observed, Self::Files];

    /// Returns the time for which changes wait for others: a site that reconnects causes many in a
    /// row.
    pub(super) fn pause(self) -> Duration {
        match self {
            Self::Vital | Self::Files => Duration::ZERO,
            Self::Observed => Duration::from_secs(1),
        }
    }
}

/// What a change replaces.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    Row(Table, Box<str>),
    File(PathBuf),
}

impl Target {
    pub(super) fn class(&self) -> Class {
        match self {
            Self::Row(table, _) => table.class(),
            Self::File(_) => Class::Files,
        }
    }
}

/// A change of one row.
#[derive(Debug, Clone)]
pub struct RowChange {
    pub(super) key: Box<str>,
    pub(super) content: Option<Content>,
}

impl RowChange {
    /// Inserts or replaces a row, or removes it if there is no value.
    pub fn of(key: &str, value: Option<&impl Serialize>) -> Self {
        Self {
            key: key.into(),
            content: value.map(encode),
        }
    }

    /// Inserts or replaces a row.
    pub fn upsert(key: &str, value: &impl Serialize) -> Self {
        Self::of(key, Some(value))
    }

    /// Inserts or replaces a row by these bytes.
    #[cfg(any(test, feature = "test-util"))]
    pub fn raw(key: &str, content: &[u8]) -> Self {
        Self {
            key: key.into(),
            content: Some(Content::new(content.to_vec().into())),
        }
    }

    pub fn remove(key: &str) -> Self {
        Self {
            key: key.into(),
            content: None,
        }
    }

    /// Returns the key, and the value unless the row is removed.
    #[cfg(any(test, feature = "test-util"))]
    #[expect(clippy::unwrap_used, reason = "a test fails by a damaged value")]
    pub fn decoded<T: DeserializeOwned>(&self) -> (String, Option<T>) {
        let content = self.content.as_ref();
        let value = content.map(|content| decode(content).unwrap());
        (self.key.to_string(), value)
    }
}

/// The values of a table, by key.
#[derive(Debug)]
pub struct Loaded<T> {
    pub values: BTreeMap<String, T>,
    pub damaged: Vec<UnreadableValue>,
    /// Values that a later version wrote.
    pub later: Vec<UnreadableValue>,
}

/// A value that cannot be read.
#[derive(Debug, Clone)]
pub struct UnreadableValue {
    pub key: String,
    pub problem: String,
    pub(super) content: Content,
}

impl UnreadableValue {
    /// Returns the number at a JSON pointer of the value, if the value is JSON behind a version.
    pub fn number(&self, pointer: &str) -> Option<u64> {
        let (_version, json) = self.content.split_first()?;
        let value = serde_json::from_slice::<serde_json::Value>(json).ok()?;
        value.pointer(pointer)?.as_u64()
    }
}

impl<T: DeserializeOwned> Loaded<T> {
    /// Reads rows whose keys begin with `prefix`, which the keys of the values lack.
    pub(super) fn of(rows: Vec<(String, Content)>, prefix: &str) -> Self {
        let mut loaded = Self {
            values: BTreeMap::new(),
            damaged: Vec::new(),
            later: Vec::new(),
        };
        for (key, content) in rows {
            let Some(rest) = key.strip_prefix(prefix) else {
                continue;
            };
            let (unreadable, problem) = match decode(&content) {
                Ok(value) => {
                    loaded.values.insert(rest.to_owned(), value);
                    continue;
                }
                Err(DecodeError::Later) => (&mut loaded.later, LATER.to_owned()),
                Err(DecodeError::Damaged(problem)) => (&mut loaded.damaged, problem),
            };
            unreadable.push(UnreadableValue {
                key,
                problem,
                content,
            });
        }
        loaded
    }
}

/// Why a value cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DecodeError {
    Later,
    Damaged(String),
}

/// Returns the form of a value on disk: a version, and JSON. Fields may be added in one version; a
/// version that others must not read has another number.
fn encode(value: &impl Serialize) -> Content {
    let mut content = Zeroizing::new(vec![VERSION]);
    // Values are plain structs, maps with text keys and lists, which always have a JSON form.
    if serde_json::to_writer(&mut *content, value).is_err() {
        debug_assert!(false, "a value without a JSON form");
    }
    Arc::new(content)
}

pub(super) fn decode<T: DeserializeOwned>(content: &[u8]) -> Result<T, DecodeError> {
    match content.split_first() {
        Some((&VERSION, json)) => {
            serde_json::from_slice(json).map_err(|error| DecodeError::Damaged(error.to_string()))
        }
        Some((version, _)) if *version > VERSION => Err(DecodeError::Later),
        Some(_) | None => Err(DecodeError::Damaged("it has no version".to_owned())),
    }
}

/// Returns a value as JSON. What cannot be read is text.
pub fn json_text(content: &[u8]) -> String {
    let value = decode::<serde_json::Value>(content);
    let value = value.unwrap_or_else(|_unreadable| String::from_utf8_lossy(content).into());
    value.to_string()
}

/// Reads a value, whatever becomes of it.
#[cfg(feature = "test-util")]
pub fn check_value<T: DeserializeOwned>(content: &[u8]) {
    let _any = decode::<T>(content);
}

const LATER: &str = "a later version wrote it";
/// Version of all values.
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_later_versions_and_damaged_ones_spare_the_others() {
        let content = |bytes: &[u8]| Content::new(bytes.to_vec().into());
        let rows = [
            ("x/a", encode(&7)),
            ("x/b", content(b"")),
            ("y/a", encode(&8)),
            ("x/c", content(b"\x01{")),
            ("x/d", content(b"\x02whatever")),
            ("x/e", content(b"\x00")),
        ];
        let rows = rows.map(|(key, content)| (key.to_owned(), content));
        let loaded = Loaded::<u32>::of(rows.into(), "x/");
        assert_eq!(loaded.values, BTreeMap::from([("a".to_owned(), 7)]));
        let keys = |values: &[UnreadableValue]| -> Vec<_> {
            values.iter().map(|value| value.key.clone()).collect()
        };
        assert_eq!(keys(&loaded.later), ["x/d"]);
        assert_eq!(keys(&loaded.damaged), ["x/b", "x/c", "x/e"]);
    }
}
