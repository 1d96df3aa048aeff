//! Join tokens, each of which is an object of its own: a row of the store of the data directory, or a
//! Secret that all servers of a cluster can read. A token is created for one node and bound to the
//! first key that uses it, by compare-and-swap on its object alone; or for a number of new nodes
//! whose names match a pattern, and then each use is an object, too. Only the hash of its secret is
//! stored.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{JoinToken, TOKEN_ID_LEN, TOKEN_SECRET_BYTES, TokenError, hex};
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::name_pattern::NamePattern;
use tunnel_proto::wire::order::{NodeOrder, Order};
use tunnel_store::data_dir::{DataDir, random, time_text, whole_seconds};

use super::LocalCa;
use crate::renewal::EnrollRefusal;

mod object;
mod pace;
mod rows;
mod uses;

pub(crate) use object::unavailable;
use object::{CONFLICTS_MAX, LIFE_MAX, TokenScope};
pub use object::{StoredToken, TokenObject, TokenObjects};
use pace::LookupPace;
use rows::TokenRows;
use uses::{PatternUses, TokenUse};

/// The join tokens of a data directory or of a cluster. Calls block the thread, unless they are
/// asynchronous.
#[derive(Debug)]
pub struct TokenStore {
    objects: Arc<dyn TokenObjects>,
    failures: Mutex<Failures>,
    lookups: Arc<Semaphore>,
    pace: Mutex<LookupPace>,
    uses: PatternUses,
    /// The CA whose key marks the tokens that this store creates.
    ca: Option<Arc<LocalCa>>,
}

/// Public information about a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenInfo {
    /// The public part of the token.
    pub id: String,
    /// Node that may use the token, or the pattern of their names.
    pub node: String,
    /// Uses of a token for a pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uses: Option<u32>,
    /// How many nodes may use a token for a pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uses_max: Option<u32>,
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
    /// A node has used a token for a pattern, and waits until an operator approves it.
    Pending,
}

/// The nodes that a token for a pattern enrolls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewNodes {
    pub pattern: NamePattern,
    /// How many of them.
    pub uses_max: u32,
    /// Whether an operator has to approve each.
    pub needs_approval: bool,
    /// Labels that each of them gets.
    pub labels: BTreeMap<Box<str>, Box<str>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenGrant {
    /// The public part of the token.
    pub id: String,
    /// Node for which the certificate is issued.
    pub node: NodeName,
    /// What was ordered about the node when the token was created: its counter and generation.
    pub order: Order,
    /// Labels of a node that a token for a pattern enrolls.
    pub labels: BTreeMap<Box<str>, Box<str>>,
}

#[derive(Debug, thiserror::Error)]
pub enum CreateTokenError {
    /// No token admits a revoked node.
    #[error(
        "the node is revoked; 'tunnel-server nodes unrevoke {0}' first, or 'tunnel-server nodes reissue {0}' in place of 'revoke' \
         to end only the certificates that it has"
    )]
    Revoked(NodeName),
    /// The requested lifetime is out of range.
    #[error("a token's life must be between 1 second and 365 days")]
    InvalidTtl,
    #[error("a token can be used 1 to {USES_MAX} times")]
    InvalidUses,
    /// The options of a token for one node are given for a pattern, or the reverse.
    #[error("{0}")]
    Options(&'static str),
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
    /// Returns an error with the path if the store cannot be opened.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        Ok(Self::of(Arc::new(TokenRows::open(dir)?)))
    }

    /// Opens the tokens like [`TokenStore::open`], and removes those that have been expired for a day
    /// until `shutdown` stops.
    ///
    /// # Errors
    /// As in [`TokenStore::open`].
    pub fn open_cleaned(dir: &DataDir, shutdown: &Shutdown) -> io::Result<Self> {
        let rows = Arc::new(TokenRows::open(dir)?);
        rows::clean(rows.clone(), shutdown);
        Ok(Self::of(rows))
    }

    pub fn of(objects: Arc<dyn TokenObjects>) -> Self {
        Self {
            uses: PatternUses::of(objects.clone()),
            objects,
            failures: Mutex::default(),
            lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            pace: Mutex::default(),
            ca: None,
        }
    }

    /// Waits for the permission to look up a token that somebody without credentials presents. So
    /// unknown tokens load neither the API server nor a file system that does not answer.
    /// Cancel-safe.
    pub(crate) async fn lookup_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.lookups.clone().acquire_owned().await.ok()
    }

    /// Returns the store with the CA whose key marks its tokens.
    pub fn marked_by(self, ca: Arc<LocalCa>) -> Self {
        Self {
            ca: Some(ca),
            ..self
        }
    }

    /// Returns whether a server with this CA created the token, without a lookup: the last bytes of
    /// its secret are an authentication code by the CA's key. A token of an earlier CA has another
    /// one, and is valid.
    pub(crate) fn is_marked(&self, token: &str) -> bool {
        let (Some(ca), Ok(token)) = (&self.ca, token.parse::<JoinToken>()) else {
            return false;
        };
        let (random, mark) = token.secret().split_at(TOKEN_SECRET_BYTES - MARK_BYTES);
        verify_slices_are_equal(mark, &mark_of(ca, token.id(), random)).is_ok()
    }

    /// Waits until a source may present a token that is not marked, and returns the wait. Cancel-safe.
    ///
    /// # Errors
    /// Returns the refusal of a source that has presented too many unknown tokens.
    pub(crate) async fn admit(&self, source: IpAddr) -> Result<Duration, EnrollRefusal> {
        let wait = self.pace.lock().admit(source, Instant::now());
        let wait = wait.ok_or_else(|| bad_token(false))?;
        tokio::time::sleep(wait).await;
        Ok(wait)
    }

    /// Counts the outcome of a token that a source presented after it `waited`.
    pub(crate) fn record(&self, source: IpAddr, waited: Duration, refused: EnrollCode) {
        if matches!(refused, EnrollCode::BadToken | EnrollCode::RateLimited) {
            self.pace.lock().failed(source, waited, Instant::now());
        }
    }

    /// Creates a token for a node with the order about it. A later order makes the token void. Only
    /// the result contains the secret.
    ///
    /// # Errors
    /// Returns a [`CreateTokenError`]. There is no token for a revoked node.
    pub fn create(
        &self,
        NodeOrder { node, order }: &NodeOrder,
        ttl: Duration,
        ips: Vec<IpAddr>,
        ca_hash: [u8; 32],
        now: SystemTime,
    ) -> Result<JoinToken, CreateTokenError> {
        if order.is_revoked {
            return Err(CreateTokenError::Revoked(node.clone()));
        }
        let scope = TokenScope::Node(node.clone());
        self.insert(scope, *order, ttl, ips, ca_hash, now)
    }

    /// Creates a token for new nodes. Only the result contains the secret.
    ///
    /// # Errors
    /// Returns a [`CreateTokenError`].
    pub fn create_for_pattern(
        &self,
        nodes: NewNodes,
        ttl: Duration,
        ca_hash: [u8; 32],
        now: SystemTime,
    ) -> Result<JoinToken, CreateTokenError> {
        if !(1..=USES_MAX).contains(&nodes.uses_max) {
            return Err(CreateTokenError::InvalidUses);
        }
        let scope = TokenScope::Pattern {
            pattern: nodes.pattern,
            uses_max: nodes.uses_max,
            needs_approval: nodes.needs_approval,
            labels: nodes.labels,
        };
        self.insert(scope, Order::default(), ttl, Vec::new(), ca_hash, now)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a stored token")]
    fn insert(
        &self,
        scope: TokenScope,
        order: Order,
        ttl: Duration,
        ips: Vec<IpAddr>,
        ca_hash: [u8; 32],
        now: SystemTime,
    ) -> Result<JoinToken, CreateTokenError> {
        if ttl < Duration::from_secs(1) || ttl > LIFE_MAX {
            return Err(CreateTokenError::InvalidTtl);
        }
        let id = hex(&random::<{ TOKEN_ID_LEN / 2 }>()?);
        let mut secret = random::<TOKEN_SECRET_BYTES>()?;
        if let Some(ca) = &self.ca {
            let (random, mark) = secret.split_at_mut(TOKEN_SECRET_BYTES - MARK_BYTES);
            mark.copy_from_slice(&mark_of(ca, &id, random));
        }
        let token = JoinToken::new(&id, &secret, Some(ca_hash))?;
        let stored = StoredToken {
            scope,
            secret_sha256: hex(&sha256(&secret)),
            ips,
            counter: order.counter,
            generation: order.generation,
            created: whole_seconds(now),
            ttl_seconds: ttl.as_secs(),
            used_by: None,
            revoked: false,
        };
        if !self.objects.create(&id, &stored)? {
            return Err(io::Error::other("a token has this id; try again").into());
        }
        Ok(token)
    }

    /// Returns whether this store has a token with this id, valid or not.
    ///
    /// # Errors
    /// Returns an error if the token cannot be read.
    pub fn knows(&self, id: &str) -> io::Result<bool> {
        Ok(self.objects.get(id)?.is_some())
    }

    /// Returns all tokens, oldest first, and the nodes that wait for an approval.
    ///
    /// # Errors
    /// Returns an error if the tokens cannot be read.
    pub fn list(&self, now: SystemTime) -> io::Result<Vec<TokenInfo>> {
        let listed = self.objects.list()?;
        let mut counted = HashMap::<_, u32>::new();
        for (_, stored) in &listed {
            if let TokenScope::Counter { token, uses } = &stored.scope {
                *counted.entry(token.clone()).or_default() += uses;
            }
        }
        let mut tokens: Vec<_> = listed
            .into_iter()
            .filter(|(_, stored)| !matches!(stored.scope, TokenScope::Counter { .. }))
            .map(|(id, stored)| stored.info(&id, counted.get(&id).copied(), now))
            .collect();
        tokens.sort_by(|one, other| (one.created, &one.id).cmp(&(other.created, &other.id)));
        Ok(tokens)
    }

    /// Revokes a token. Returns `false` if no token has this id. Certificates issued with the token
    /// stay valid.
    ///
    /// # Errors
    /// Returns an error if the change cannot be persisted.
    pub fn revoke(&self, id: &str) -> io::Result<bool> {
        for _ in 0..CONFLICTS_MAX {
            let Some(mut object) = self.objects.get(id)? else {
                return Ok(false);
            };
            object.token.revoked = true;
            if self.objects.replace(id, &object)? {
                return Ok(true);
            }
        }
        Err(io::Error::other("the token keeps changing; try again"))
    }

    /// Approves the uses of tokens by these nodes that wait for it. Returns the nodes that were
    /// approved.
    ///
    /// # Errors
    /// Returns an error if the tokens cannot be read or saved.
    pub fn approve(&self, nodes: &[NodeName]) -> io::Result<Vec<NodeName>> {
        self.uses.approve(nodes)
    }

    /// Accepts or refuses a token for a node and a key (SHA-256 of its SubjectPublicKeyInfo). The
    /// first key that uses a token may repeat it until the token expires, because an answer may be
    /// lost. Failures are rate-limited per token and, for unknown ids, globally. A valid token is
    /// accepted regardless of the failures of others. A token for a pattern admits no node that
    /// `is_known`, and none while that is not known.
    ///
    /// # Errors
    /// Returns the code and a message for the operator. The message never contains the secret.
    pub fn redeem(
        &self,
        token_text: &str,
        node: &NodeName,
        csr_public_key_sha256: [u8; 32],
        is_known: &dyn Fn(&NodeName) -> Option<bool>,
        now: SystemTime,
    ) -> Result<TokenGrant, EnrollRefusal> {
        let key = hex(&csr_public_key_sha256);
        for _ in 0..CONFLICTS_MAX {
            let Ok(token) = token_text.parse::<JoinToken>() else {
                return Err(self.failures.lock().unknown(now));
            };
            let found = self
                .objects
                .get(token.id())
                .map_err(|error| unavailable(&error))?;
            let Some(mut object) = found else {
                return Err(self.failures.lock().unknown(now));
            };
            let presented = hex(&sha256(token.secret()));
            let stored = object.token.secret_sha256.as_bytes();
            if verify_slices_are_equal(presented.as_bytes(), stored).is_err() {
                return Err(self.failures.lock().wrong_secret(token.id(), now));
            }
            object.token.check(&key, now)?;
            let order = Order {
                counter: object.token.counter,
                generation: object.token.generation,
                ..Order::default()
            };
            match &object.token.scope {
                TokenScope::Use { .. } | TokenScope::Counter { .. } => {
                    return Err(self.failures.lock().unknown(now));
                }
                TokenScope::Node(expected) if expected != node => {
                    let detail = format!("the token is for the node {expected}, not {node}");
                    return Err((EnrollCode::WrongNode, detail));
                }
                TokenScope::Node(_) => {}
                TokenScope::Pattern {
                    pattern, labels, ..
                } => {
                    if !pattern.matches(node) || node.as_str().parse::<IpAddr>().is_ok() {
                        let detail = format!("the token is for nodes {pattern}, not {node}");
                        return Err((EnrollCode::WrongNode, detail));
                    }
                    let token_use = TokenUse {
                        token: token.id(),
                        node,
                        key: &key,
                    };
                    let labels = labels.clone();
                    let is_known = is_known(node);
                    self.uses.take(&token_use, object.token, is_known, now)?;
                    return self.granted(token.id(), node, order, labels);
                }
            }
            if object.token.used_by.is_none() {
                object.token.used_by = Some(key.clone());
                let replaced = self.objects.replace(token.id(), &object);
                if !replaced.map_err(|error| unavailable(&error))? {
                    continue;
                }
            }
            return self.granted(token.id(), node, order, BTreeMap::new());
        }
        Err(unavailable(&io::Error::other("the token keeps changing")))
    }

    /// Returns the grant as soon as all uses are saved: another request with this key may not have
    /// saved its use yet.
    fn granted(
        &self,
        id: &str,
        node: &NodeName,
        order: Order,
        labels: BTreeMap<Box<str>, Box<str>>,
    ) -> Result<TokenGrant, EnrollRefusal> {
        let confirmed = self.objects.confirm();
        confirmed.map_err(|error| unavailable(&error))?;
        Ok(TokenGrant {
            id: id.to_owned(),
            node: node.clone(),
            order,
            labels,
        })
    }
}

/// Attempts that failed within a minute.
#[derive(Debug, Default)]
struct Failures {
    /// Wrong secrets, by the id of an existing token.
    by_token: HashMap<String, FailureWindow>,
    /// Attempts with unknown token ids.
    unknown: FailureWindow,
}

impl Failures {
    fn unknown(&mut self, now: SystemTime) -> EnrollRefusal {
        bad_token(self.unknown.count(now, UNKNOWN_PER_MINUTE))
    }

    fn wrong_secret(&mut self, id: &str, now: SystemTime) -> EnrollRefusal {
        self.by_token.retain(|_, window| window.is_current(now));
        let window = self.by_token.entry(id.to_owned()).or_default();
        bad_token(window.count(now, FAILURES_PER_MINUTE))
    }
}

impl StoredToken {
    /// Returns the token, or the use that waits for an approval, for a list. A token for a pattern was
    /// used so often.
    fn info(&self, id: &str, uses: Option<u32>, now: SystemTime) -> TokenInfo {
        let (uses, uses_max) = match &self.scope {
            TokenScope::Pattern { uses_max, .. } => (Some(uses.unwrap_or(0)), Some(*uses_max)),
            TokenScope::Node(_) | TokenScope::Use { .. } | TokenScope::Counter { .. } => {
                (None, None)
            }
        };
        let is_use = matches!(self.scope, TokenScope::Use { .. });
        let is_spent = match uses {
            Some(_) => uses >= uses_max,
            None => !is_use && self.used_by.is_some(),
        };
        let state = if self.revoked {
            TokenState::Revoked
        } else if is_spent {
            TokenState::Used
        } else if self.expires() <= now {
            TokenState::Expired
        } else if is_use {
            TokenState::Pending
        } else {
            TokenState::Active
        };
        TokenInfo {
            id: id.to_owned(),
            node: match &self.scope {
                TokenScope::Node(node) | TokenScope::Use { node, .. } => node.to_string(),
                TokenScope::Pattern { pattern, .. } => pattern.to_string(),
                TokenScope::Counter { token, .. } => token.clone(),
            },
            uses,
            uses_max,
            ips: self.ips.clone(),
            created: self.created,
            expires: self.expires(),
            used_by: self.used_by.clone(),
            state,
        }
    }
}

/// Returns the last bytes of the secret of a token that a server with this CA creates.
fn mark_of(ca: &LocalCa, id: &str, random: &[u8]) -> [u8; MARK_BYTES] {
    let tag = ca.tag("join token", &[id.as_bytes(), random]);
    let mut mark = [0; MARK_BYTES];
    mark.copy_from_slice(&tag.as_ref()[..MARK_BYTES]);
    mark
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

fn bad_token(is_within_limit: bool) -> EnrollRefusal {
    if is_within_limit {
        let detail = "the token is unknown or damaged; create a new one";
        (EnrollCode::BadToken, detail.to_owned())
    } else {
        let detail = "too many attempts with bad tokens; try again in a minute";
        (EnrollCode::RateLimited, detail.to_owned())
    }
}

/// Length of the mark in a secret, whose other bytes are random.
const MARK_BYTES: usize = 8;
/// Tokens of agents that are looked up at a time. Others wait.
const LOOKUPS_MAX: usize = 16;
/// Nodes that one token can enroll.
pub const USES_MAX: u32 = 100_000;
const MINUTE: Duration = Duration::from_secs(60);
/// Wrong secrets per minute and token that are answered in detail.
pub(crate) const FAILURES_PER_MINUTE: u32 = 5;
/// Unknown tokens per minute that are answered in detail. The limit is global because a whole site
/// may share one address.
const UNKNOWN_PER_MINUTE: u32 = 60;

#[cfg(test)]
mod tests;
