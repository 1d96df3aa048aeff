//! Join tokens: made for one node, bound to the first key that uses them, kept by the hash of their secret in a file, or
//! where all servers of a cluster see them.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use serde::{Deserialize, Serialize};
use tracing::warn;
use tunnel_proto::identity::sha256;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{JoinToken, TOKEN_ID_LEN, TOKEN_SECRET_BYTES, TokenError, hex};
use tunnel_proto::wire::name::NodeName;

use crate::store::data_dir::{DataDir, SharedFile, name_text, random, time_text, whole_seconds};
use crate::store::document::{DocumentVersion, SharedDocument};

/// The join tokens of a data directory or of a cluster. Its calls that change something block the thread until that is on
/// disk or in the cluster.
#[derive(Debug)]
pub struct TokenStore {
    doc: SharedDocument,
    state: Mutex<State>,
    /// The generation that is kept. Held while writing, so that callers who wait find their change written by the first.
    written: Mutex<u64>,
}

/// What people may know about a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenInfo {
    /// The public part of the token.
    pub id: String,
    /// The node that may use it.
    #[serde(with = "name_text")]
    pub node: NodeName,
    /// Addresses that were given for the node.
    pub ips: Vec<IpAddr>,
    /// When it was made.
    #[serde(with = "time_text")]
    pub created: SystemTime,
    /// When it ends.
    #[serde(with = "time_text")]
    pub expires: SystemTime,
    /// SHA-256 of the key that it is bound to, in hexadecimal.
    pub used_by: Option<String>,
    /// Whether it can be used.
    pub state: TokenState,
}

/// Whether a token can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenState {
    /// By any key of its node.
    Active,
    /// At most by the key that used it.
    Used,
    /// Its time is over.
    Expired,
    /// An operator took it back.
    Revoked,
}

/// A token was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenGrant {
    /// The public part of the token.
    pub id: String,
    /// The node that the certificate is for.
    pub node: NodeName,
}

/// Why no token was made.
#[derive(Debug, thiserror::Error)]
pub enum CreateTokenError {
    /// It would never or almost always be valid.
    #[error("a token's life must be between 1 second and 365 days")]
    InvalidTtl,
    /// It cannot be made or kept; the text names the file.
    #[error("{0}")]
    File(#[from] io::Error),
    /// Its parts do not make a token.
    #[error("cannot encode the token")]
    Token(#[from] TokenError),
}

impl TokenStore {
    /// Opens the tokens of a data directory.
    ///
    /// # Errors
    /// When the file cannot be read or is damaged, with its path.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        Self::from_document(SharedDocument::File(SharedFile::new(dir, dir.tokens())))
    }

    /// The tokens of a document.
    ///
    /// # Errors
    /// When it cannot be read or is damaged, with its name.
    pub(crate) fn from_document(doc: SharedDocument) -> io::Result<Self> {
        let mut state = State::default();
        state.refresh(&doc)?;
        Ok(Self {
            doc,
            state: Mutex::new(state),
            written: Mutex::default(),
        })
    }

    /// Makes a token for a node. The secret is in the result only.
    ///
    /// # Errors
    /// [`CreateTokenError`].
    pub fn create(
        &self,
        node: &NodeName,
        ttl: Duration,
        ips: Vec<IpAddr>,
        ca_hash: [u8; 32],
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
            created,
            expires: created + ttl,
            used_by: None,
            revoked: false,
        };
        let generation = self.change(now, |state| {
            state.tokens.insert(id.clone(), stored);
        });
        if let Err(error) = self.save(generation, now) {
            self.lock().tokens.remove(&id);
            return Err(error.into());
        }
        Ok(token)
    }

    /// All tokens, oldest first. Those that ended more than a day ago are forgotten.
    #[must_use]
    pub fn list(&self, now: SystemTime) -> Vec<TokenInfo> {
        let mut state = self.lock();
        self.reload(&mut state, now);
        let mut tokens: Vec<TokenInfo> = state
            .tokens
            .iter()
            .map(|(id, stored)| stored.info(id, now))
            .collect();
        tokens.sort_by(|one, other| (one.created, &one.id).cmp(&(other.created, &other.id)));
        tokens
    }

    /// Takes a token back. Says whether there is one of this id. Certificates issued with it stay valid.
    ///
    /// # Errors
    /// When the change cannot be kept; the token is revoked until the process ends.
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

    /// Takes all tokens of a node back. Says how many there were that could still be used by some key.
    ///
    /// # Errors
    /// When the change cannot be kept; they are revoked until the process ends.
    pub fn revoke_node_tokens(&self, node: &NodeName, now: SystemTime) -> io::Result<usize> {
        let mut count = 0;
        let generation = self.change(now, |state| {
            for stored in state.tokens.values_mut() {
                if stored.node == *node && !stored.revoked {
                    stored.revoked = true;
                    count += usize::from(stored.expires > now);
                }
            }
        });
        self.save(generation, now)?;
        Ok(count)
    }

    /// Accepts or refuses a token for a node and a key (SHA-256 of its SubjectPublicKeyInfo). The first key that uses
    /// a token may repeat it until it ends, since an answer may be lost. Failures are limited per token and, for
    /// unknown ids, together; a valid token passes whatever others did.
    ///
    /// # Errors
    /// The code and a line for people, which never holds the secret.
    pub fn redeem(
        &self,
        token_text: &str,
        node: &NodeName,
        csr_public_key_sha256: [u8; 32],
        now: SystemTime,
    ) -> Result<TokenGrant, (EnrollCode, String)> {
        let (grant, generation) = {
            let mut state = self.lock();
            self.reload(&mut state, now);
            let grant = state.redeem(token_text, node, csr_public_key_sha256, now)?;
            (grant, state.generation)
        };
        // Also when this key is a repeater: the first time may have failed here.
        self.save(generation, now).map_err(|error| {
            static UNSAVED: LogRateLimit = LogRateLimit::new("uses of join tokens cannot be saved");
            if UNSAVED.admit() {
                warn!(%error, "cannot save the use of a join token");
            }
            let detail = "the server cannot save its files; try again later";
            (EnrollCode::Unavailable, detail.to_owned())
        })?;
        self.lock().is_bound(&grant.id, csr_public_key_sha256)?;
        Ok(grant)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what a verb wrote meanwhile, and forgets what is over.
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
        let mut state = self.lock();
        self.reload(&mut state, now);
        change(&mut state);
        state.generation += 1;
        state.generation
    }

    fn save(&self, generation: u64, now: SystemTime) -> io::Result<()> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if *written >= generation {
            return Ok(());
        }
        let mut latest = generation;
        let version = self.doc.change(|theirs: Option<TokensDocument>| {
            let mut state = self.lock();
            if let Some(theirs) = theirs {
                state.merge(theirs);
            }
            state.prune(now);
            latest = state.generation;
            Ok(TokensDocument {
                tokens: state.tokens.clone(),
            })
        })?;
        self.lock().version = version;
        *written = latest;
        Ok(())
    }
}

#[derive(Debug, Default)]
struct State {
    tokens: BTreeMap<String, StoredToken>,
    /// Counts changes in memory.
    generation: u64,
    /// The document as last read or written.
    version: Option<DocumentVersion>,
    /// Wrong secrets, by the ids that exist.
    failures: HashMap<String, FailureWindow>,
    /// Ids that do not exist.
    unknown: FailureWindow,
}

/// The form of the document.
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
        if let Some(content) = doc.read::<TokensDocument>()? {
            self.merge(content);
            self.version = version;
        }
        Ok(())
    }

    /// Takes in what others wrote. A key that is written there was first, whatever was meant here meanwhile.
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

    /// Whether a token that was just bound and written still is what it was meant to be: another server may have been
    /// faster.
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
        // From here on the sender is known to hold the token, so that it may be told what is wrong.
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

/// Failures in the current minute.
#[derive(Debug, Default)]
pub(crate) struct FailureWindow {
    since: Option<SystemTime>,
    count: u32,
}

impl FailureWindow {
    /// Counts one and says whether it is still within the limit.
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

    /// Whether as many as the limit were counted in this minute.
    pub(crate) fn is_full(&self, now: SystemTime, limit: u32) -> bool {
        self.is_current(now) && self.count >= limit
    }

    /// Whether its minute goes on.
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
/// Longest life of a token.
const LIFE_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long an ended token stays in the list, so that "expired" can be told from "unknown".
const RETENTION_AFTER_EXPIRY: Duration = DAY;
/// Wrong secrets a minute that are answered in detail, per token.
pub(crate) const FAILURES_PER_MINUTE: u32 = 5;
/// Unknown tokens a minute that are answered in detail, all senders together: a whole site is behind one address.
const UNKNOWN_PER_MINUTE: u32 = 60;

#[cfg(test)]
mod tests;
