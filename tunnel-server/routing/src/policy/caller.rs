//! The identity of a caller.

use std::fmt;
use std::sync::Arc;

/// The identity that a caller has proved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CallerIdentity {
    /// The caller has not proved an identity.
    #[default]
    Anonymous,
    /// The caller has a certificate of the callers' CA. The value is the common name of its
    /// subject, or empty if there is no single common name.
    Certificate(Arc<str>),
    /// The caller has sent a user name with its password.
    User(Arc<str>),
    /// The caller's process runs as this user at the other end of a Unix socket.
    Uid(u32),
}

impl fmt::Display for CallerIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => Ok(()),
            Self::Certificate(name) => write!(formatter, "certificate:{name}"),
            Self::User(name) => write!(formatter, "user:{name}"),
            Self::Uid(uid) => write!(formatter, "uid:{uid}"),
        }
    }
}
