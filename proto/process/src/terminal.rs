//! The terminal of an operator: questions in it, its size, and whether it has colors.

use std::io::{self, BufRead, IsTerminal as _, Read as _, Stdin, Write as _};

use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use zeroize::Zeroizing;

/// The answer to a question in the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The operator answered yes.
    Yes,
    /// The operator gave another answer.
    No,
    /// Standard input is not a terminal.
    NoTerminal,
}

/// Returns the number of rows of the terminal that standard output is, if it has one.
pub fn rows() -> Option<usize> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_row.into()).filter(|rows| *rows > 0)
}

/// Returns whether standard output is a terminal with colors that the user has not switched off
/// (<https://no-color.org>).
pub fn has_color() -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal == "dumb");
    io::stdout().is_terminal() && !is_dumb && std::env::var_os("NO_COLOR").is_none()
}

/// Asks a question on standard error, and reads the answer from standard input if that is a
/// terminal. Blocks the thread until the operator has answered.
///
/// # Errors
/// When the terminal cannot be written or read.
pub fn ask(question: &str) -> io::Result<Answer> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Ok(Answer::NoTerminal);
    }
    let mut stderr = io::stderr();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    Ok(match answer.trim() {
        "y" | "Y" | "yes" => Answer::Yes,
        _ => Answer::No,
    })
}

/// Reads a line with a secret from the terminal of standard input, which does not show what is
/// typed. Blocks the thread until the operator has answered.
///
/// # Errors
/// When standard input is not a terminal, when the line is longer than a terminal's, or
/// [`io::ErrorKind::Interrupted`] after Ctrl-C.
pub fn read_secret(prompt: &str) -> io::Result<Zeroizing<Vec<u8>>> {
    let stdin = io::stdin();
    let mut stderr = io::stderr();
    let hidden = HiddenInput::start(&stdin)?;
    write!(stderr, "{prompt}: ")?;
    stderr.flush()?;
    let line = read_secret_line(&mut stdin.lock());
    drop(hidden);
    writeln!(stderr)?;
    line
}

/// Restores the terminal when dropped.
///
/// Ctrl-C and Ctrl-\ send no signal meanwhile, because a signal would end the process without the
/// restoration. They end the line.
struct HiddenInput<'a> {
    stdin: &'a Stdin,
    before: Termios,
}

impl<'a> HiddenInput<'a> {
    fn start(stdin: &'a Stdin) -> io::Result<Self> {
        let before = tcgetattr(stdin)?;
        let mut hidden = before.clone();
        hidden
            .local_modes
            .remove(LocalModes::ECHO | LocalModes::ISIG);
        hidden.local_modes.insert(LocalModes::ICANON);
        hidden.special_codes[SpecialCodeIndex::VEOL] = INTERRUPT;
        hidden.special_codes[SpecialCodeIndex::VEOL2] = QUIT;
        tcsetattr(stdin, OptionalActions::Now, &hidden)?;
        Ok(Self { stdin, before })
    }
}

impl Drop for HiddenInput<'_> {
    fn drop(&mut self) {
        // Nothing can be restored in a terminal that has gone.
        let _gone = tcsetattr(self.stdin, OptionalActions::Now, &self.before);
    }
}

fn read_secret_line(input: &mut impl BufRead) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut line = Zeroizing::new(Vec::with_capacity(LINE_MAX));
    for byte in input.bytes() {
        match byte? {
            b'\n' => break,
            INTERRUPT | QUIT => return Err(io::ErrorKind::Interrupted.into()),
            byte if line.len() < LINE_MAX => line.push(byte),
            _ => {
                let error = "the line is longer than a terminal's";
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
    Ok(line)
}

/// The character that Ctrl-C sends.
const INTERRUPT: u8 = 0x03;
/// The character that Ctrl-\ sends.
const QUIT: u8 = 0x1c;
/// Longest line of a terminal (termios(3)). A buffer that grows would leave copies in memory.
const LINE_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_at_a_newline_or_the_end_and_ctrl_c_is_an_error() {
        let read = |text: &str| read_secret_line(&mut text.as_bytes());
        assert_eq!(*read("secret\nrest").unwrap(), b"secret");
        assert_eq!(*read("secret").unwrap(), b"secret");
        assert!(read("").unwrap().is_empty());
        let error = read("secr\u{3}et\n").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        let error = read(&"x".repeat(LINE_MAX + 1)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
