//! The object of a join token, and the trait of their stores.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::name::NodeName;
use tunnel_store::data_dir::{name_text, time_text, whole_seconds};

/// The objects of the join tokens. Calls block the thread.
pub trait TokenObjects: fmt::Debug + Send + Sync {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>>;

    fn create(&self, id: &str, token: &StoredToken) -> io::Result<()>;

    /// Replaces an object as it was read. Returns `false` if it has changed since then.
    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool>;

    /// Waits until what was read and replaced before is saved.
    fn confirm(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns all tokens with their ids.
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
    #[serde(with = "name_text")]
    pub(super) node: NodeName,
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

impl StoredToken {
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
