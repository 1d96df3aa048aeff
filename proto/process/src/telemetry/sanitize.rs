//! Sanitizes log lines: whatever text from others a line contains, the output is one line of
//! visible characters.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::Arc;

use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

use super::dropped::NOTICE;
use super::log_writer::{ACCESS, BatchWriter, LineKind};
use super::output::LogOutput;
use super::recent::RECENT;
use crate::panics;

/// The output format for which a line is sanitized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sanitizer {
    /// Whether replaced characters are escaped as in JSON strings.
    pub(super) json: bool,
    /// Whether color sequences are preserved. They are ours; the formatter has already escaped
    /// those of others.
    pub(super) colors: bool,
}

/// A factory of writers of complete lines to an output.
#[derive(Debug)]
pub(super) struct MakeLineWriter {
    pub(super) sanitizer: Sanitizer,
    pub(super) log_writer: Arc<BatchWriter<LogOutput>>,
}

pub(super) struct LineWriter<'a> {
    factory: &'a MakeLineWriter,
    kind: LineKind,
}

impl<'a> MakeWriter<'a> for MakeLineWriter {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter {
            factory: self,
            kind: LineKind::Other,
        }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> LineWriter<'a> {
        LineWriter {
            factory: self,
            kind: match event.target() {
                ACCESS => LineKind::Access,
                NOTICE => LineKind::Notice,
                panics::TARGET => LineKind::Panic,
                _ => LineKind::Other,
            },
        }
    }
}

impl Write for LineWriter<'_> {
    /// Queues a complete line with its line end, as the formatter provides it. Never fails and
    /// never waits for the output.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let escaped = std::str::from_utf8(line).map(|text| self.factory.sanitizer.escaped(text));
        let out = escaped.as_deref().map_or(line, str::as_bytes);
        if self.kind != LineKind::Access {
            RECENT.push(out);
        }
        self.factory.log_writer.push(out, self.kind);
        Ok(line.len())
    }

    /// Does nothing. The writer thread decides when a line is written.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sanitizer {
    pub(super) fn escaped(self, line: &str) -> Cow<'_, str> {
        let (text, end) = match line.strip_suffix('\n') {
            Some(text) => (text, "\n"),
            None => (line, ""),
        };
        // Nearly all lines contain only such characters. Without a branch for each of them, the compiler
        // compares many at once.
        let is_printable = |byte: u8| (b' '..=b'~').contains(&byte);
        let is_plain = text
            .bytes()
            .fold(true, |all, byte| all & is_printable(byte));
        if is_plain || !text.chars().any(|letter| self.is_hidden(letter)) {
            return Cow::Borrowed(line);
        }
        let mut escaped = String::with_capacity(line.len() + 64);
        for letter in text.chars() {
            if !self.is_hidden(letter) {
                escaped.push(letter);
            } else if self.json {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _infallible = write!(escaped, "\\u{unit:04x}");
                }
            } else {
                escaped.extend(letter.escape_unicode());
            }
        }
        escaped.push_str(end);
        Cow::Owned(escaped)
    }

    fn is_hidden(self, letter: char) -> bool {
        is_hidden(letter) && !(self.colors && letter == '\x1b')
    }
}

/// Returns whether a character has no glyph or changes how other text is shown: a control character,
/// or one of the formats of Unicode, those of bidirectional text included.
pub fn is_hidden(character: char) -> bool {
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
    fn t15_hidden_characters_become_visible_in_one_line() {
        let evil = "a\nb\r\x1b[31m\x7f\u{85}\u{9b}\u{202e}\u{2028}\u{2066}\u{e0041}\n";
        let in_json =
            "a\\u000ab\\u000d\\u001b[31m\\u007f\\u0085\\u009b\\u202e\\u2028\\u2066\\udb40\\udc41\n";
        let in_text =
            "a\\u{a}b\\u{d}\\u{1b}[31m\\u{7f}\\u{85}\\u{9b}\\u{202e}\\u{2028}\\u{2066}\\u{e0041}\n";
        for (json, colors, line, expected) in [
            (true, false, "{\"a\":\"é\"}\n", "{\"a\":\"é\"}\n"),
            (true, false, evil, in_json),
            (false, false, evil, in_text),
            (false, true, "\x1b[31mours\n", "\x1b[31mours\n"),
        ] {
            let escaped = Sanitizer { json, colors }.escaped(line);
            assert_eq!(escaped, expected, "{json} {colors}");
        }
    }
}
