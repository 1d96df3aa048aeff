//! The identity of a caller.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tunnel_proto::wire::name::NodeName;

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
    /// The cluster has reviewed the bearer token of this ServiceAccount, `NAMESPACE/NAME`.
    ServiceAccount(Arc<str>),
    /// The caller's process runs as this user at the other end of a Unix socket.
    Uid(u32),
    /// The caller is the agent of this node, by its certificate.
    Agent(NodeName),
}

/// What is known of a bearer token that passes on to the target and that this server has not reviewed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UnreadToken {
    /// There is none.
    #[default]
    None,
    /// It claims a ServiceAccount that no rule names. A target that accepts the token finds this account.
    OfOther,
    /// It may be that of any account.
    OfAny,
    /// Something that a target may read as a token, or not.
    Unclear,
}

impl UnreadToken {
    /// Returns whether a target that reviews tokens sees one.
    pub fn is_token(self) -> bool {
        matches!(self, Self::OfOther | Self::OfAny)
    }

    /// Returns whether a target may take the caller for any ServiceAccount.
    pub fn may_be_any_account(self) -> bool {
        matches!(self, Self::OfAny | Self::Unclear)
    }
}

impl fmt::Display for CallerIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => Ok(()),
            Self::Certificate(name) => write!(formatter, "certificate:{name}"),
            Self::User(name) => write!(formatter, "user:{name}"),
            Self::ServiceAccount(name) => write!(formatter, "serviceaccount:{name}"),
            Self::Uid(uid) => write!(formatter, "uid:{uid}"),
            Self::Agent(node) => write!(formatter, "agent:{node}"),
        }
    }
}

/// A text is not the identity of a caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no caller; use anonymous, certificate:NAME, user:NAME, uid:NUMBER, serviceaccount:NAMESPACE/NAME or \
     agent:NODE"
)]
pub struct CallerIdentityError(String);

impl FromStr for CallerIdentity {
    type Err = CallerIdentityError;

    fn from_str(text: &str) -> Result<Self, CallerIdentityError> {
        let unknown = || CallerIdentityError(text.to_owned());
        if text == "anonymous" {
            return Ok(Self::Anonymous);
        }
        match text.split_once(':').ok_or_else(unknown)? {
            ("certificate", name) => Ok(Self::Certificate(name.into())),
            ("user", name) => Ok(Self::User(name.into())),
            ("serviceaccount", name) => Ok(Self::ServiceAccount(name.into())),
            ("uid", uid) => uid.parse().map(Self::Uid).map_err(|_syntax| unknown()),
            ("agent", node) => node.parse().map(Self::Agent).map_err(|_syntax| unknown()),
            _ => Err(unknown()),
        }
    }
}
