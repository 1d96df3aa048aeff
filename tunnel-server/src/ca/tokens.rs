//! Join tokens. A token is created for one node and bound to the first key that uses it. The store
//! persists only the hash of its secret, in a file or in a Secret that all servers of a cluster
//! share.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;
use tunnel_proto::identity::sha256;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{JoinToken, TOKEN_ID_LEN, TOKEN_SECRET_BYTES, TokenError, hex};
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::order::Order;

use crate::store::data_dir::{DataDir, name_text, random, time_text, whole_seconds};
use crate::store::document::SharedDocument;
use crate::store::file_document;

/// The join tokens of a data directory or of a cluster. Calls that change a token block the thread
/// until the change is on disk or in the cluster. Others read memory.
#[derive(Debug)]
pub struct TokenStore {
    doc: SharedDocument,
    state: Mutex<State>,
    /// Generation that is persisted. The lock is held while writing, so that callers that wait find
    /// their change already written.
    written: Mutex<u64>,
}

/// Public information about a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenInfo {
    /// The public part of the token.
    pub id: String,
    /// Node that may use the token.
    #[serde(with = "name_text")]
    pub node: NodeName,
    /// Addresses that the operator gave for the node.
    pub ips: Vec<IpAddr>,
    #[serde(with = "time_text")]
    pub created: SystemTime,
    #[serde(with = "time_text")]
    pub expires: SystemTime,
    /// SHA-256 of the key to which the token is bound, in hexadecimal.
    pub used_by: Option<String>,
    /// State of the token at the time of the listing.
    pub state: TokenState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenState {
    /// Any key of the node can use the token.
    Active,
    /// Only the key that used the token can use it again.
    Used,
    /// The token has expired without being used.
    Expired,
    Revoked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenGrant {
    /// The public part of the token.
    pub id: String,
    /// Node for which the certificate is issued.
    pub node: NodeName,
    /// What was ordered about the node when the token was created: its counter and generation.
    pub order: Order,
}

#[derive(Debug, thiserror::Error)]
pub enum CreateTokenError {
    /// The requested lifetime is out of range.
    #[error("a token's life must be between 1 second and 365 days")]
    InvalidTtl,
    /// A file cannot be created or saved; the text names the file.
    #[error("{0}")]
    File(#[from] io::Error),
    /// The id and the secret do not form a valid token.
    #[error("cannot encode the token")]
    Token(#[from] TokenError),
}

impl TokenStore {
    /// Opens the tokens of a data directory.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read or is damaged.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        Self::from_document(file_document::open(dir, dir.tokens())?)
    }

    /// Opens the tokens of a document.
    ///
    /// # Errors
    /// Returns an error with the document's name if the document cannot be read or is damaged.
    pub(crate) fn from_document(doc: SharedDocument) -> io::Result<Self> {
        let mut state = State::default();
        state.refresh(&doc)?;
        Ok(Self {
            doc,
            state: Mutex::new(state),
            written: Mutex::default(),
        })
    }

    /// Creates a token for a node. `order` is the order about the node: a later one makes the token
    /// void. Only the result contains the secret.
    ///
    /// # Errors
    /// Returns a [`CreateTokenError`].
    pub fn create(
        &self,
        node: &NodeName,
        ttl: Duration,
        ips: Vec<IpAddr>,
        ca_hash: [u8; 32],
        order: Order,
        now: SystemTime,
    ) -> Result<JoinToken, CreateTokenError> {
        if ttl < Duration::from_secs(1) || ttl > LIFE_MAX {
            return Err(CreateTokenError::InvalidTtl);
        }
        let id = hex(&random::<{ TOKEN_ID_LEN / 2 }>()?);
        let secret = random::<TOKEN_SECRET_BYTES>()?;
        let token = JoinToken::new(&id, &secret, Some(ca_hash))?;
        let created = whole_seconds(now);
        let stored = StoredToken {
            node: node.clone(),
            secret_sha256: hex(&sha256(&secret)),
            ips,
            counter: order.counter,
            generation: order.generation,
            created,
            expires: created + ttl,
            used_by: None,
            revoked: false,
        };
        let generation = self.change(now, |state| {
            state.tokens.insert(id.clone(), stored);
        });
        if let Err(error) = self.save(generation, now) {
            self.state.lock().tokens.remove(&id);
            return Err(error.into());
        }
        Ok(token)
    }

    /// Returns whether this store has a token with this id, valid or not.
    #[must_use]
    pub fn knows(&self, id: &str, now: SystemTime) -> bool {
        let mut state = self.state.lock();
        self.reload(&mut state, now);
        state.tokens.contains_key(id)
    }

    /// Returns all tokens, oldest first. Tokens that expired more than a day ago are dropped.
    #[must_use]
    pub fn list(&self, now: SystemTime) -> Vec<TokenInfo> {
        let mut state = self.state.lock();
        self.reload(&mut state, now);
        let mut tokens: Vec<TokenInfo> = state
            .tokens
            .iter()
            .map(|(id, stored)| stored.info(id, now))
            .collect();
        tokens.sort_by(|one, other| (one.created, &one.id).cmp(&(other.created, &other.id)));
        tokens
    }

    /// Revokes a token. Returns `false` if no token has this id. Certificates issued with the token
    /// stay valid.
    ///
    /// # Errors
    /// Returns an error if the change cannot be persisted. The token is then revoked until the
    /// process ends.
    pub fn revoke(&self, id: &str, now: SystemTime) -> io::Result<bool> {
        let mut found = false;
        let generation = self.change(now, |state| {
            if let Some(stored) = state.tokens.get_mut(id) {
                stored.revoked = true;
                found = true;
            }
        });
        if found {
            self.save(generation, now)?;
        }
        Ok(found)
    }

    /// Accepts or refuses a token for a node and a key (SHA-256 of its SubjectPublicKeyInfo). The
    /// first key that uses a token may repeat it until the token expires, because an answer may be
    /// lost. Failures are rate-limited per token and, for unknown ids, globally. A valid token is
    /// accepted regardless of the failures of others.
    ///
    /// # Errors
    /// Returns the code and a message for the operator. The message never contains the secret.
    pub fn redeem(
        &self,
        token_text: &str,
        node: &NodeName,
        csr_public_key_sha256: [u8; 32],
        now: SystemTime,
    ) -> Result<TokenGrant, (EnrollCode, String)> {
        let (grant, generation) = {
            let mut state = self.state.lock();
            self.reload(&mut state, now);
            let grant = state.redeem(token_text, node, csr_public_key_sha256, now)?;
            (grant, state.generation)
        };
        // A repeated use is saved too: the save of the first use may have failed.
        self.save(generation, now).map_err(|error| {
            static UNSAVED: LogRateLimit = LogRateLimit::new("uses of join tokens cannot be saved");
            if UNSAVED.admit() {
                warn!(%error, "cannot save the use of a join token");
            }
            let detail = "the server cannot save its files; try again later";
            (EnrollCode::Unavailable, detail.to_owned())
        })?;
        self.state
            .lock()
            .is_bound(&grant.id, csr_public_key_sha256)?;
        Ok(grant)
    }

    /// Loads changes that a command wrote in the meantime and drops old tokens.
    fn reload(&self, state: &mut State, now: SystemTime) {
        if let Err(error) = state.refresh(&self.doc) {
            static UNREAD: LogRateLimit = LogRateLimit::new("join tokens cannot be reloaded");
            if UNREAD.admit() {
                warn!(%error, "cannot reload the join tokens");
            }
        }
        state.prune(now);
    }

    fn change(&self, now: SystemTime, change: impl FnOnce(&mut State)) -> u64 {
        let mut state = self.state.lock();
        self.reload(&mut state, now);
        change(&mut state);
        state.generation += 1;
        state.generation
    }

    fn save(&self, generation: u64, now: SystemTime) -> io::Result<()> {
        let mut written = self.written.lock();
        if *written >= generation {
            return Ok(());
        }
        let mut latest = generation;
        let version = self.doc.change(|theirs: Option<TokensDocument>| {
            let mut state = self.state.lock();
            if let Some(theirs) = theirs {
                state.merge(theirs);
            }
            state.prune(now);
            latest = state.generation;
            Ok(TokensDocument {
                tokens: state.tokens.clone(),
            })
        })?;
        self.state.lock().version = Some(version);
        *written = latest;
        Ok(())
    }
}

#[derive(Debug, Default)]
struct State {
    tokens: BTreeMap<String, StoredToken>,
    /// Number of changes in memory.
    generation: u64,
    /// Version of the document that was last read or written.
    version: Option<u64>,
    /// Wrong secrets, by token id.
    failures: HashMap<String, FailureWindow>,
    /// Attempts with unknown token ids.
    unknown: FailureWindow,
}

#[derive(Debug, Serialize, Deserialize)]
struct TokensDocument {
    tokens: BTreeMap<String, StoredToken>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StoredToken {
    #[serde(with = "name_text")]
    node: NodeName,
    secret_sha256: String,
    #[serde(default)]
    ips: Vec<IpAddr>,
    /// Counter and generation of the order about the node when the token was created.
    counter: u64,
    generation: u64,
    #[serde(with = "time_text")]
    created: SystemTime,
    #[serde(with = "time_text")]
    expires: SystemTime,
    #[serde(default)]
    used_by: Option<String>,
    #[serde(default)]
    revoked: bool,
}

impl State {
    fn refresh(&mut self, doc: &SharedDocument) -> io::Result<()> {
        let version = doc.version();
        if version.is_none() || version == self.version {
            return Ok(());
        }
        // Damaged content is parsed once.
        self.version = version;
        if let Some(content) = doc.read::<TokensDocument>()? {
            self.merge(content);
        }
        Ok(())
    }

    /// Merges the tokens that other processes wrote. A persisted key wins over a key that is only
    /// in memory, because it was written first.
    fn merge(&mut self, content: TokensDocument) {
        for (id, theirs) in content.tokens {
            match self.tokens.get_mut(&id) {
                None => {
                    self.tokens.insert(id, theirs);
                }
                Some(ours) => {
                    ours.revoked |= theirs.revoked;
                    ours.used_by = theirs.used_by.or_else(|| ours.used_by.take());
                }
            }
        }
    }

    /// Checks after the write that the token is still bound to `key`. Another server may have bound
    /// or revoked the token first.
    fn is_bound(&self, id: &str, key: [u8; 32]) -> Result<(), (EnrollCode, String)> {
        let stored = self.tokens.get(id);
        if stored.is_none_or(|stored| stored.revoked) {
            return Err((EnrollCode::Revoked, REVOKED.to_owned()));
        }
        let key = hex(&key);
        if stored.is_some_and(|stored| stored.used_by.as_ref() != Some(&key)) {
            return Err((EnrollCode::TokenUsed, USED.to_owned()));
        }
        Ok(())
    }

    fn prune(&mut self, now: SystemTime) {
        self.tokens
            .retain(|_, stored| stored.expires + RETENTION_AFTER_EXPIRY > now);
        let tokens = &self.tokens;
        self.failures.retain(|id, _| tokens.contains_key(id));
    }

    fn redeem(
        &mut self,
        text: &str,
        node: &NodeName,
        key: [u8; 32],
        now: SystemTime,
    ) -> Result<TokenGrant, (EnrollCode, String)> {
        let parsed = text.parse::<JoinToken>().ok();
        let known = parsed.and_then(|token| Some((self.tokens.get_mut(token.id())?, token)));
        let Some((stored, token)) = known else {
            return Err(bad_token(self.unknown.count(now, UNKNOWN_PER_MINUTE)));
        };
        let presented = hex(&sha256(token.secret()));
        if verify_slices_are_equal(presented.as_bytes(), stored.secret_sha256.as_bytes()).is_err() {
            let failures = self.failures.entry(token.id().to_owned()).or_default();
            return Err(bad_token(failures.count(now, FAILURES_PER_MINUTE)));
        }
        let key = hex(&key);
        // The sender has proved possession of the token from here on, so the answer may name the
        // reason.
        let refusal = if stored.revoked {
            (EnrollCode::Revoked, REVOKED.to_owned())
        } else if stored.node != *node {
            let detail = format!("the token is for the node {}, not {node}", stored.node);
            (EnrollCode::WrongNode, detail)
        } else if stored.expires <= now {
            let detail = format!(
                "the token ended at {}",
                crate::store::data_dir::rfc3339(stored.expires)
            );
            (EnrollCode::TokenExpired, detail)
        } else if stored.used_by.as_ref().is_some_and(|first| *first != key) {
            (EnrollCode::TokenUsed, USED.to_owned())
        } else {
            if stored.used_by.is_none() {
                stored.used_by = Some(key);
                self.generation += 1;
            }
            return Ok(TokenGrant {
                id: token.id().to_owned(),
                node: stored.node.clone(),
                order: Order {
                    counter: stored.counter,
                    generation: stored.generation,
                    ..Order::default()
                },
            });
        };
        Err(refusal)
    }
}

impl StoredToken {
    fn info(&self, id: &str, now: SystemTime) -> TokenInfo {
        let state = if self.revoked {
            TokenState::Revoked
        } else if self.used_by.is_some() {
            TokenState::Used
        } else if self.expires <= now {
            TokenState::Expired
        } else {
            TokenState::Active
        };
        TokenInfo {
            id: id.to_owned(),
            node: self.node.clone(),
            ips: self.ips.clone(),
            created: self.created,
            expires: self.expires,
            used_by: self.used_by.clone(),
            state,
        }
    }
}

/// Number of failures in the current minute.
#[derive(Debug, Default)]
pub(crate) struct FailureWindow {
    since: Option<SystemTime>,
    count: u32,
}

impl FailureWindow {
    /// Counts one failure and returns whether the count is within the limit.
    pub(crate) fn count(&mut self, now: SystemTime, limit: u32) -> bool {
        if !self.is_current(now) {
            *self = Self {
                since: Some(now),
                count: 0,
            };
        }
        self.count = self.count.saturating_add(1);
        self.count <= limit
    }

    /// Returns whether the count of this minute has reached the limit.
    pub(crate) fn is_full(&self, now: SystemTime, limit: u32) -> bool {
        self.is_current(now) && self.count >= limit
    }

    /// Returns whether the window's minute has not ended.
    pub(crate) fn is_current(&self, now: SystemTime) -> bool {
        self.since
            .and_then(|since| now.duration_since(since).ok())
            .is_some_and(|age| age < MINUTE)
    }
}

fn bad_token(is_within_limit: bool) -> (EnrollCode, String) {
    if is_within_limit {
        let detail = "the token is unknown or damaged; create a new one";
        (EnrollCode::BadToken, detail.to_owned())
    } else {
        let detail = "too many attempts with bad tokens; try again in a minute";
        (EnrollCode::RateLimited, detail.to_owned())
    }
}

const REVOKED: &str = "the token was revoked";
const USED: &str = "the token was used by another key; create a new one";
const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum lifetime of a token.
const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Time for which an expired token stays in the list, so that "expired" differs from "unknown".
const RETENTION_AFTER_EXPIRY: Duration = DAY;
/// Wrong secrets per minute and token that are answered in detail.
pub(crate) const FAILURES_PER_MINUTE: u32 = 5;
/// Unknown tokens per minute that are answered in detail. The limit is global because a whole site
/// may share one address.
const UNKNOWN_PER_MINUTE: u32 = 60;

#[cfg(test)]
mod tests;
