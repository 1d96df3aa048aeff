//! The version of the JSON documents that commands print.

/// The field `schemaVersion` of a document. It changes when a field is renamed, removed or gets another
/// meaning, and not when one is added.
pub const SCHEMA_VERSION: u32 = 1;
