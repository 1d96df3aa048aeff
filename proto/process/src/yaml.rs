//! Configuration files in YAML. All mistakes of a file are reported at once, each with its line:
//! unknown keys with the known key that is meant, and values of the wrong kind.
//!
//! serde-saphyr parses the text into a tree (`tree.rs`). The settings are deserialized from the
//! tree (`settings_reader.rs`): where a streaming deserializer ends at the first mistake, that
//! deserializer records it and goes on.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_saphyr::{NonFiniteFloatPolicy, Options, Spanned};

use self::tree::Node;

mod mistakes;
mod settings_reader;
mod tree;

pub use self::settings_reader::YamlFile;

/// Maximum depth of a file. Settings have three levels.
const DEPTH_MAX: usize = 16;
/// Maximum number of values of a file. Bounds the memory of the tree.
const NODES_MAX: usize = 250_000;
/// Maximum number of values that aliases (`*name`) repeat.
const REPEATED_MAX: usize = 10_000;

/// All mistakes of a file, one per line.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n  "))]
pub struct YamlError(pub Vec<String>);

/// Parses the settings of a configuration file. Returns `None` if the file has no settings, only
/// comments for example.
///
/// `T` consists of texts, options, lists and structures. A number is read as its text, and a single
/// value as a list of one value. No message contains a value, which may be secret.
///
/// # Errors
/// [`YamlError`] with the first syntax error, or with all mistakes in keys and values. Of a list of
/// structures, the entries after one without a required key are not read.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<Option<T>, YamlError> {
    let file = read(text)?;
    if file.mistakes.is_empty() {
        Ok(file.settings)
    } else {
        Err(YamlError(file.mistakes))
    }
}

/// Parses the settings of a configuration file like [`parse`], and returns them next to the mistakes,
/// so that the values can be checked too.
///
/// # Errors
/// [`YamlError`] with the first syntax error.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<YamlFile<T>, YamlError> {
    let tree: Option<Spanned<Node>> = serde_saphyr::from_str_with_options(text, options())
        .map_err(|error| YamlError(vec![error.to_string()]))?;
    let file = tree.map(|root| settings_reader::read(&root, text));
    Ok(file.unwrap_or_else(|| YamlFile {
        settings: None,
        mistakes: Vec::new(),
        bad_keys: BTreeSet::new(),
        lines: BTreeMap::new(),
    }))
}

/// Deserializes a setting that is one text, such as ports with commas, and that a file may also have
/// as a list. For `#[serde(deserialize_with)]`, with [`parse`].
///
/// # Errors
/// The error of the deserializer.
pub fn text_or_list<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<String>, D::Error> {
    let texts = Option::<Vec<String>>::deserialize(deserializer)?;
    Ok(texts.map(|texts| texts.join(", ")))
}

fn options() -> Options {
    let mut options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: DEPTH_MAX, max_nodes: NODES_MAX },
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        // A snippet shows lines that may contain a token or a password.
        with_snippet: false,
    };
    options.alias_limits.max_total_replayed_events = REPEATED_MAX;
    options
}

#[cfg(test)]
mod tests;
