//! The outputs of log lines.

use std::io::{self, Stderr, Stdout, Write};

use super::line_file::LineFile;

/// An output of log lines.
#[derive(Debug)]
pub(super) enum LogOutput {
    Stderr(Stderr),
    Stdout(Stdout),
    File(LineFile),
}

impl Write for LogOutput {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stderr(output) => output.write(data),
            Self::Stdout(output) => output.write(data),
            Self::File(output) => output.write(data),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stderr(output) => output.flush(),
            Self::Stdout(output) => output.flush(),
            Self::File(output) => output.flush(),
        }
    }
}
