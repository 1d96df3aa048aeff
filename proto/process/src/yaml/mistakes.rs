//! The mistakes of a configuration file, with the known key that an unknown one may mean.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;

use serde::de::{Error, Expected, Unexpected};

/// Maximum number of mistakes that are reported. The others are counted.
const MISTAKES_MAX: usize = 32;
/// Maximum number of characters of an unknown key that are shown and compared.
const KEY_SHOWN_MAX: usize = 64;

/// The mistakes of a file, in the order of the file.
#[derive(Default)]
pub(super) struct Mistakes {
    /// First parts of the keys whose values have mistakes.
    keys: RefCell<BTreeSet<String>>,
    texts: RefCell<Vec<String>>,
    /// Number of mistakes that are not in `texts`.
    omitted: Cell<usize>,
}

impl Mistakes {
    /// Records a mistake. `path` has the keys above, as in `services[0].listen`.
    pub(super) fn record(&self, line: u64, path: &str, text: impl fmt::Display) {
        let key = path.split(['.', '[']).next().unwrap_or_default();
        if !key.is_empty() {
            self.keys.borrow_mut().insert(key.to_owned());
        }
        let mut texts = self.texts.borrow_mut();
        if texts.len() >= MISTAKES_MAX {
            self.omitted.set(self.omitted.get() + 1);
        } else if path.is_empty() {
            texts.push(format!("line {line}: {text}"));
        } else {
            texts.push(format!("line {line}: {path}: {text}"));
        }
    }

    /// Records the mistake of a value unless it is recorded already.
    pub(super) fn record_found(&self, line: u64, path: &str, mistake: Mistake) {
        match mistake {
            Mistake::Recorded => {}
            Mistake::Found(text) => self.record(line, path, text),
        }
    }

    pub(super) fn record_unknown(&self, line: u64, path: &str, key: &str, known: &[&'static str]) {
        let key: String = key.chars().take(KEY_SHOWN_MAX).collect();
        let hint = nearest(&key, known)
            .map(|name| format!("; did you mean {name}?"))
            .unwrap_or_default();
        let text = format!("unknown key {}{hint}", key.escape_debug());
        self.record(line, path, text);
    }

    /// Returns the texts, and the first parts of the keys whose values have mistakes.
    pub(super) fn into_parts(self) -> (Vec<String>, BTreeSet<String>) {
        let (mut texts, omitted) = (self.texts.into_inner(), self.omitted.get());
        if omitted > 0 {
            texts.push(format!("and {omitted} more"));
        }
        (texts, self.keys.into_inner())
    }
}

/// Returns the known key that is most similar to an unknown one. Case, `-` and `_` do not count. Of
/// three characters, one may be wrong.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    let plain = |text: &str| {
        let letters = text.chars().filter(char::is_ascii_alphanumeric);
        letters.collect::<String>().to_ascii_lowercase()
    };
    let key = plain(key);
    let (distance, name) = known
        .iter()
        .map(|&name| (strsim::damerau_levenshtein(&key, &plain(name)), name))
        .min_by_key(|(distance, _)| *distance)?;
    (distance <= key.len() / 3).then_some(name)
}

/// The reason why a value could not be read.
#[derive(Debug)]
pub(super) enum Mistake {
    Recorded,
    Found(String),
}

impl fmt::Display for Mistake {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recorded => formatter.write_str("recorded"),
            Self::Found(text) => formatter.write_str(text),
        }
    }
}

impl std::error::Error for Mistake {}

impl Error for Mistake {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::Found(text.to_string())
    }

    // The default texts of these two contain the value.
    fn invalid_type(_value: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Found(format!("{expected} is expected"))
    }

    fn invalid_value(_value: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Found(format!("{expected} is expected"))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::Found(format!("{field} is missing"))
    }
}
