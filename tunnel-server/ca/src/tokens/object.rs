//! The object of a join token, and the trait of their stores.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tracing::warn;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::name_pattern::NamePattern;
use tunnel_store::data_dir::{name_text, rfc3339, time_text, whole_seconds};

use crate::renewal::EnrollRefusal;

/// The objects of the join tokens. Calls block the thread.
pub trait TokenObjects: fmt::Debug + Send + Sync {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>>;

    /// Creates an object. Returns `false` if one with this id exists.
    fn create(&self, id: &str, token: &StoredToken) -> io::Result<bool>;

    /// Replaces an object as it was read. Returns `false` if it has changed since then.
    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool>;

    /// Waits until what was read and replaced before is saved.
    fn confirm(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns the tokens, the counters, and the uses that wait for an approval, with their ids.
    fn list(&self) -> io::Result<Vec<(String, StoredToken)>>;
}

/// A token as it was read.
#[derive(Debug)]
pub struct TokenObject {
    pub token: StoredToken,
    /// What identifies this version of the object.
    pub version: String,
}

/// A token as its object has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredToken {
    pub(super) scope: TokenScope,
    pub(super) secret_sha256: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ips: Vec<IpAddr>,
    /// Counter and generation of the order about the node when the token was created.
    pub(super) counter: u64,
    pub(super) generation: u64,
    /// Time of the creation: by the API server's clock in a cluster, which overrides this.
    #[serde(with = "time_text")]
    pub created: SystemTime,
    pub(super) ttl_seconds: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) used_by: Option<String>,
    pub(super) revoked: bool,
}

/// What an object admits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum TokenScope {
    /// One node.
    Node(#[serde(with = "name_text")] NodeName),
    /// Each new node whose name matches, up to a number. Each use is an object of its own.
    Pattern {
        #[serde(with = "pattern_text")]
        pattern: NamePattern,
        uses_max: u32,
        /// Whether an operator has to approve each node.
        needs_approval: bool,
        /// Labels of the nodes.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        labels: BTreeMap<Box<str>, Box<str>>,
    },
    /// The use of a token for a pattern by one node. Nobody can present it.
    Use {
        #[serde(with = "name_text")]
        node: NodeName,
        /// The token that was used.
        token: String,
        is_approved: bool,
    },
    /// A counter of the uses of a token for a pattern, which has several. Nobody can present it.
    Counter {
        /// The token that is used.
        token: String,
        /// Uses so far. One that was counted and not saved is lost.
        uses: u32,
    },
}

/// Patterns as texts.
mod pattern_text {
    use serde::{Deserialize as _, Deserializer, Serializer, de};
    use tunnel_proto::wire::name_pattern::NamePattern;

    pub(super) fn serialize<S: Serializer>(
        pattern: &NamePattern,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(pattern)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<NamePattern, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl StoredToken {
    /// Checks the token for a sender that has proved its possession, so that the answer may name the
    /// reason.
    pub(super) fn check(&self, key: &str, now: SystemTime) -> Result<(), EnrollRefusal> {
        if self.revoked {
            return Err((EnrollCode::Revoked, REVOKED.to_owned()));
        }
        if self.expires() <= now {
            let detail = format!("the token ended at {}", rfc3339(self.expires()));
            return Err((EnrollCode::TokenExpired, detail));
        }
        if self.used_by.as_ref().is_some_and(|first| first != key) {
            let detail = match &self.scope {
                TokenScope::Use { node, .. } => format!(
                    "another key has enrolled {node} with this token: a cloned disk, or a second machine of this name"
                ),
                TokenScope::Node(_) | TokenScope::Pattern { .. } | TokenScope::Counter { .. } => {
                    USED.to_owned()
                }
            };
            return Err((EnrollCode::TokenUsed, detail));
        }
        Ok(())
    }

    /// Returns whether this is the use of a token for a pattern that waits for nobody.
    pub fn is_settled_use(&self) -> bool {
        matches!(
            self.scope,
            TokenScope::Use {
                is_approved: true,
                ..
            }
        )
    }

    pub fn expires(&self) -> SystemTime {
        let ttl = Duration::from_secs(self.ttl_seconds).min(LIFE_MAX);
        whole_seconds(self.created.checked_add(ttl).unwrap_or(self.created))
    }

    /// Returns whether the token expired more than a day before `now`.
    pub fn is_old(&self, now: SystemTime) -> bool {
        self.expires() + RETENTION_AFTER_EXPIRY < now
    }
}

/// Maximum lifetime of a token.
pub(super) const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Time for which an expired token stays, so that "expired" differs from "unknown".
pub(super) const RETENTION_AFTER_EXPIRY: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) fn unavailable(error: &io::Error) -> EnrollRefusal {
    static FAILED: LogRateLimit = LogRateLimit::new("join tokens cannot be used");
    if FAILED.admit() {
        warn!(%error, "cannot use a join token");
    }
    let detail = "the server cannot read or save the token; try again later";
    (EnrollCode::Unavailable, detail.to_owned())
}

const REVOKED: &str = "the token was revoked";
const USED: &str = "the token was used by another key; create a new one";
/// Changes of a token by others during one use.
pub(super) const CONFLICTS_MAX: usize = 8;
