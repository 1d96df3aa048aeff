//! The version of the JSON documents that commands print.

use serde::Serialize;

/// The field `schemaVersion` of a document. It changes when a field is renamed, removed or gets another
/// meaning, and not when one is added.
pub const SCHEMA_VERSION: u32 = 1;

/// A JSON document that a command prints.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Document<T> {
    schema_version: u32,
    #[serde(flatten)]
    content: T,
}

impl<T> Document<T> {
    /// Creates a document with the fields of `content`.
    pub fn new(content: T) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            content,
        }
    }
}
