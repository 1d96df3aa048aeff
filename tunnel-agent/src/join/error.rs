//! The reasons why a host does not join.

use std::io;

use super::paths;
use crate::config::LoadError;

/// The reason why a host did not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinCommandError {
    #[error(
        "no join token: give its file with --token-file, or pass it on standard input (--token-file - reads it from the \
         terminal)"
    )]
    NoToken,
    /// The text never contains the token.
    #[error("--token-file: {0}")]
    InvalidToken(String),
    #[error(transparent)]
    Config(#[from] LoadError),
    /// The keys cannot be set in the text of the file without a change of other keys.
    #[error("cannot edit {file}; set these keys by hand, and join again:\n{keys}")]
    CannotEdit {
        file: &'static str,
        /// Lines for the configuration file.
        keys: String,
    },
    /// Files differ from what the verb would write, and there is no terminal to ask.
    #[error("nothing is changed: {0}; to replace this, add --yes")]
    Differs(String),
    #[error("nothing is changed: the answer was not yes")]
    Declined,
    #[error("nothing is changed: interrupted before the token was read")]
    Interrupted,
    #[error(
        "nothing is changed: systemd does not run on this host. Write the token to a file with mode 0600, and run the agent \
         under a supervisor of your own:\n  {0}\nor write the files of the service only, with --no-start"
    )]
    NoSystemd(String),
    /// The service could not run the program.
    #[error(
        "a systemd service cannot run {0}; install the program and run that one: install -m 0755 {0} {program}",
        program = paths::PROGRAM
    )]
    Program(String),
    #[error(
        "the unit of the package runs as user {user}, and /etc/passwd has no such user; install the package again",
        user = paths::USER
    )]
    NoUser,
    #[error("cannot create the user {user}: systemd-sysusers: {0}", user = paths::USER)]
    User(String),
    #[error("the service runs as a user that cannot read {0}; run: chmod 644 {0}")]
    ConfigUnreadable(&'static str),
    #[error("{0}; run tunnel-agent join as root")]
    Denied(io::Error),
    /// The text names the file.
    #[error(transparent)]
    File(io::Error),
    /// The service did not start, or got no session.
    #[error("not joined: {reason}\n{undone}")]
    NotJoined {
        reason: String,
        /// The state in which the host is left.
        undone: String,
    },
}

impl JoinCommandError {
    /// Returns whether the arguments, the token or the configuration are invalid.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::NoToken | Self::InvalidToken(_) | Self::Config(_) => true,
            Self::CannotEdit { .. }
            | Self::ConfigUnreadable(_)
            | Self::Differs(_)
            | Self::Declined
            | Self::Interrupted
            | Self::NoSystemd(_)
            | Self::Program(_)
            | Self::NoUser
            | Self::Denied(_)
            | Self::File(_)
            | Self::User(_)
            | Self::NotJoined { .. } => false,
        }
    }
}

impl From<io::Error> for JoinCommandError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Self::Denied(error),
            _ => Self::File(error),
        }
    }
}
