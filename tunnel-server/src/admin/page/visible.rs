//! Texts of peers and callers as the status page shows them.

use std::fmt::{self, Write as _};

/// A text for a page. Characters that are invisible or change the direction of other text are
/// written as `\u{202e}`. The template escapes the markup.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct VisibleText(String);

impl VisibleText {
    pub(super) fn new(text: &str) -> Self {
        let mut visible = String::with_capacity(text.len());
        for character in text.chars() {
            if is_invisible(character) {
                let _infallible = write!(visible, "{}", character.escape_unicode());
            } else {
                visible.push(character);
            }
        }
        Self(visible)
    }

    /// Returns the text, or `-` if there is none.
    pub(super) fn or_dash(text: Option<&str>) -> Self {
        Self::new(text.filter(|text| !text.is_empty()).unwrap_or("-"))
    }
}

impl fmt::Display for VisibleText {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Returns whether a character is a control character or one of the formats of Unicode that have no
/// glyph, those of bidirectional text included.
fn is_invisible(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
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
