//! Questions to an operator in the terminal.

use std::io::{self, IsTerminal as _, Write as _};

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
