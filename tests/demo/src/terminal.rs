//! Output of the tour.

use std::io::{self, IsTerminal, Write};

/// Prints to standard output, with colors on a terminal.
#[derive(Debug)]
pub(super) struct Terminal {
    color: bool,
}

#[derive(Debug, Clone, Copy)]
enum Style {
    Bold = 1,
    Dim = 2,
    Red = 31,
    Green = 32,
}

impl Terminal {
    pub(super) fn new() -> Self {
        let wished = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self {
            color: wished && io::stdout().is_terminal(),
        }
    }

    pub(super) fn title(&self, text: &str) {
        self.message(&format!(
            "{}\n{}",
            self.paint(Style::Bold, text),
            "=".repeat(text.chars().count())
        ));
    }

    pub(super) fn heading(&self, text: &str) {
        self.message(&format!("\n{}", self.paint(Style::Bold, text)));
    }

    /// Prints a command that the reader can copy.
    pub(super) fn command(&self, line: &str) {
        self.message(&format!("  {} {line}", self.paint(Style::Dim, "$")));
    }

    /// Prints the output of a command.
    pub(super) fn output(&self, text: &str) {
        let lines: Vec<&str> = text.lines().collect();
        for line in lines.iter().take(SHOWN_LINES) {
            self.message(&self.paint(Style::Dim, &format!("    {line}")));
        }
        if lines.len() > SHOWN_LINES {
            let rest = format!("    … {} lines more", lines.len() - SHOWN_LINES);
            self.message(&self.paint(Style::Dim, &rest));
        }
    }

    pub(super) fn verdict(&self, verdict: &Result<(), String>) {
        match verdict {
            Ok(()) => self.message(&format!("  {}", self.paint(Style::Green, "PASS"))),
            Err(why) => self.message(&format!("  {}: {why}", self.paint(Style::Red, "FAIL"))),
        }
    }

    pub(super) fn message(&self, text: &str) {
        let mut out = io::stdout().lock();
        // A closed pipe is not an error.
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }

    fn paint(&self, style: Style, text: &str) -> String {
        if !self.color {
            return text.to_owned();
        }
        format!("\u{1b}[{}m{text}\u{1b}[0m", style as u8)
    }
}

/// Enough for every answer of the tour whose lines all matter.
const SHOWN_LINES: usize = 14;
