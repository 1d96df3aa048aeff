//! Texts of peers and callers as the status page shows them.

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

    /// Returns the text, or `-` if there is none.
    pub(super) fn or_dash(text: Option<&str>) -> Self {
        Self::new(text.filter(|text| !text.is_empty()).unwrap_or("-"))
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
        assert_eq!(VisibleText::or_dash(Some("")).to_string(), "-");
        assert_eq!(VisibleText::or_dash(None).to_string(), "-");
    }
}
