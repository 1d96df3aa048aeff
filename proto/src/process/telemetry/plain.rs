//! The last step of a log line: whatever text of others came into it, it stays one line of visible characters.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Stderr, Write};
use std::sync::Arc;

use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

use super::ACCESS;
use super::lost::NOTICE;
use super::outlet::{Class, Outlet};
use crate::process::panics;

/// How a line becomes plain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    /// What is replaced is escaped as in JSON strings.
    pub(super) json: bool,
    /// The colours are ours. Those of others were escaped before, by the formatter.
    pub(super) colours: bool,
}

/// Makes writers of whole lines to standard error.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) plain: Plain,
    pub(super) outlet: Arc<Outlet<Stderr>>,
}

/// Writes one line.
pub(super) struct Line<'a> {
    lines: &'a Lines,
    class: Class,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line {
            lines: self,
            class: Class::Other,
        }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Line<'a> {
        Line {
            lines: self,
            class: match event.target() {
                ACCESS => Class::Access,
                NOTICE => Class::Notice,
                panics::TARGET => Class::Panic,
                _ => Class::Other,
            },
        }
    }
}

impl Write for Line<'_> {
    /// Takes a whole line with its end, as the formatter gives it. Never fails and never waits for the output.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let visible = std::str::from_utf8(line).map(|text| self.lines.plain.visible(text));
        let out = visible.as_deref().map_or(line, str::as_bytes);
        self.lines.outlet.push(out, self.class);
        Ok(line.len())
    }

    /// A line leaves when its time has come.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Plain {
    fn visible(self, line: &str) -> Cow<'_, str> {
        let (text, end) = match line.strip_suffix('\n') {
            Some(text) => (text, "\n"),
            None => (line, ""),
        };
        // Nearly all lines are of such letters alone.
        let is_printable = |byte: u8| (b' '..=b'~').contains(&byte);
        if text.bytes().all(is_printable) || !text.chars().any(|letter| self.is_hidden(letter)) {
            return Cow::Borrowed(line);
        }
        let mut visible = String::with_capacity(line.len() + 64);
        for letter in text.chars() {
            // Writing to a String cannot fail.
            let _infallible = if !self.is_hidden(letter) {
                visible.write_char(letter)
            } else if self.json {
                write!(visible, "\\u{:04x}", u32::from(letter))
            } else {
                write!(visible, "{}", letter.escape_unicode())
            };
        }
        visible.push_str(end);
        Cow::Owned(visible)
    }

    /// Controls of both sets, ends of lines and paragraphs, and what makes text run backwards (Unicode's Bidi_Control).
    fn is_hidden(self, letter: char) -> bool {
        match letter {
            '\x1b' => !self.colours,
            '\u{061c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => true,
            letter => letter.is_control(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t15_hidden_characters_become_visible_in_one_line() {
        let (json, text) = (
            Plain {
                json: true,
                colours: false,
            },
            Plain {
                json: false,
                colours: false,
            },
        );
        assert_eq!(json.visible("{\"a\":\"é\"}\n"), "{\"a\":\"é\"}\n");
        let evil = "a\nb\r\x1b[31m\x7f\u{85}\u{9b}\u{202e}\u{2028}\u{2066}\n";
        assert_eq!(
            json.visible(evil),
            "a\\u000ab\\u000d\\u001b[31m\\u007f\\u0085\\u009b\\u202e\\u2028\\u2066\n"
        );
        assert_eq!(
            text.visible(evil),
            "a\\u{a}b\\u{d}\\u{1b}[31m\\u{7f}\\u{85}\\u{9b}\\u{202e}\\u{2028}\\u{2066}\n"
        );
        let coloured = Plain {
            json: false,
            colours: true,
        };
        assert_eq!(coloured.visible("\x1b[31mours\n"), "\x1b[31mours\n");
    }
}
