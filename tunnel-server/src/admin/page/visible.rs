//! Texts of peers and callers as the console shows them.

use std::fmt;

use serde::Serialize;
use tunnel_process::telemetry::{LogFormat, visible};

/// A text of a peer or a caller. A page shows characters that are invisible or change the direction of
/// other text as `\u{202e}`, and the template escapes the markup. JSON has the text as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(super) struct VisibleText(String);

impl VisibleText {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text as it is.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether there is no text.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for VisibleText {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&visible(self.0.trim_end(), LogFormat::Text))
    }
}

/// Returns the beginning of a text with an ellipsis, or the whole if it has at most `max` characters.
pub(super) fn beginning(text: &str, max: usize) -> String {
    let text = VisibleText::new(text).to_string();
    match text.char_indices().nth(max) {
        None => text,
        Some((end, _)) => format!("{}…", text.split_at(end).0),
    }
}

/// Returns the beginning of a text up to the end of a word, with an ellipsis, or the whole if it has at
/// most `max` characters.
pub(super) fn beginning_by_words(text: &str, max: usize) -> String {
    let begin = beginning(text, max);
    match begin.strip_suffix('…').and_then(|cut| cut.rsplit_once(' ')) {
        Some((words, _)) => format!("{words}…"),
        None => begin,
    }
}

/// Returns the end of a name with an ellipsis, which tells the servers of a set apart, or the whole.
pub(super) fn ending(name: &str, max: usize) -> String {
    let name = VisibleText::new(name).to_string();
    let cut = name.chars().count().saturating_sub(max);
    let end: String = name.chars().skip(cut).collect();
    if cut > 0 { format!("…{end}") } else { end }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_shown_by_their_numbers() {
        let text = VisibleText::new("a\u{202e}b\nc\u{2066}\u{e0041}ü<b>");
        assert_eq!(
            text.to_string(),
            "a\\u{202e}b\\u{a}c\\u{2066}\\u{e0041}ü<b>"
        );
    }

    #[test]
    fn long_sentences_are_cut_between_words() {
        for (text, begin) in [
            ("no port", "no port"),
            ("not allowed", "not…"),
            ("notallowed", "notallo…"),
        ] {
            assert_eq!(beginning_by_words(text, 7), begin);
        }
    }

    #[test]
    fn long_texts_are_cut_at_characters() {
        for (text, begin, end) in [
            ("", "", ""),
            ("über", "über", "über"),
            ("überall", "über…", "…rall"),
            ("a\u{202e}", "a\\u{…", "…02e}"),
        ] {
            assert_eq!(
                (beginning(text, 4), ending(text, 4)),
                (begin.to_owned(), end.to_owned())
            );
        }
    }
}
