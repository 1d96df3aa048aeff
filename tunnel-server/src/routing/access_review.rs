//! Questions to the authorization of the cluster: whose a bearer token is, and whether a user may do
//! something at a node. The controllers of the cluster answer them; answers are remembered for seconds.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use parking_lot::Mutex;
use rustls_pki_types::{CertificateDer, UnixTime};
use serde::Deserialize;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tunnel_process::conn_limiter::source;
use tunnel_proto::identity::{common_name, organizations, sha256};
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::name::NodeName;

use tunnel_ca::attestation::ServiceAccountToken;
use tunnel_routing::operation::Operation;

/// A user, as the cluster's authorization knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterUser {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// A right on a subresource of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAccess {
    pub user: Arc<ClusterUser>,
    pub node: NodeName,
    pub verb: &'static str,
    pub subresource: &'static str,
}

/// A question with the channel for its answer.
#[derive(Debug)]
pub enum ReviewRequest {
    /// Whether a user has a right.
    Access {
        access: NodeAccess,
        answer: oneshot::Sender<Result<bool, ReviewError>>,
    },
    /// The user of a token, or `None` if the cluster does not accept the token.
    Token {
        token: ServiceAccountToken,
        answer: oneshot::Sender<Result<Option<ClusterUser>, ReviewError>>,
    },
}

/// Reason why a review has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReviewError {
    #[error("too many reviews of this caller; retry in a second")]
    TooMany,
    /// The server's ServiceAccount lacks the right to ask.
    #[error("the API server refuses the review; grant the tunnel server create on {0}")]
    Forbidden(&'static str),
    #[error("the API server cannot be asked: {0}")]
    Unavailable(String),
}

/// The questions, apart by who can cause them: tokens that anyone can make up delay neither rights nor the
/// tokens that the cluster has accepted before.
#[derive(Debug)]
pub struct ReviewQueues {
    /// Rights of verified users.
    pub rights: mpsc::Receiver<ReviewRequest>,
    /// Tokens that were accepted before.
    pub known_tokens: mpsc::Receiver<ReviewRequest>,
    /// Tokens of which nothing is known.
    pub new_tokens: mpsc::Receiver<ReviewRequest>,
}

/// A client of the cluster's authorization. Clones share the queues and the answers.
#[derive(Debug, Clone)]
pub struct AccessReviewer {
    rights: mpsc::Sender<ReviewRequest>,
    known_tokens: mpsc::Sender<ReviewRequest>,
    new_tokens: mpsc::Sender<ReviewRequest>,
    state: Arc<Mutex<ReviewState>>,
    /// Has the cluster's client CA.
    trust: Option<Arc<AgentTrust>>,
}

#[derive(Debug)]
struct ReviewState {
    rights: Answers<bool>,
    /// Users of accepted tokens, and the time until which a request needs no further review.
    accepted: Answers<(Instant, Arc<ClusterUser>)>,
    rejected: Answers<()>,
    /// Questions that are under review.
    pending: HashMap<QuestionKey, Arc<OnceCell<Reviewed>>>,
    /// Who asks about tokens that are not known, by source.
    token_askers: Askers<IpAddr>,
    /// Who asks about rights, by the name of the verified user.
    right_askers: Askers<String>,
}

/// The hash of a question.
type QuestionKey = [u8; 32];

type Reviewed = Result<Answer, ReviewError>;

#[derive(Debug, Clone)]
enum Answer {
    Access(bool),
    Token(Option<Arc<ClusterUser>>),
}

/// At most [`ANSWERS_MAX`] answers with the time of their end.
#[derive(Debug)]
struct Answers<T>(HashMap<QuestionKey, (Instant, T)>);

/// How many reviews each asker may cause.
#[derive(Debug)]
struct Askers<K> {
    /// Reviews of each within [`BUDGET_TIME`].
    most: u32,
    used: HashMap<K, u32>,
    since: Instant,
    /// Reviews of each at once. Further ones of the same asker wait.
    at_once: usize,
    turns: HashMap<K, Arc<Semaphore>>,
}

impl ClusterUser {
    /// Returns the user of a client certificate, as kube-apiserver reads it.
    pub fn of_certificate(leaf: &CertificateDer<'_>) -> Option<Self> {
        let mut groups = organizations(leaf);
        groups.push(AUTHENTICATED.to_owned());
        Some(Self {
            name: common_name(leaf)?,
            groups,
            ..Self::default()
        })
    }
}

impl AccessReviewer {
    /// Creates a client and the receivers of its questions.
    pub fn new(trust: Option<Arc<AgentTrust>>) -> (Self, ReviewQueues) {
        let (rights, of_rights) = mpsc::channel(QUEUE_MAX);
        let (known_tokens, of_known_tokens) = mpsc::channel(QUEUE_MAX);
        let (new_tokens, of_new_tokens) = mpsc::channel(QUEUE_MAX);
        let state = ReviewState {
            rights: Answers::default(),
            accepted: Answers::default(),
            rejected: Answers::default(),
            pending: HashMap::new(),
            token_askers: Askers::new(TOKEN_BUDGET, TOKENS_AT_ONCE),
            right_askers: Askers::new(RIGHT_BUDGET, RIGHTS_AT_ONCE),
        };
        let reviewer = Self {
            rights,
            known_tokens,
            new_tokens,
            state: Arc::new(Mutex::new(state)),
            trust,
        };
        let queues = ReviewQueues {
            rights: of_rights,
            known_tokens: of_known_tokens,
            new_tokens: of_new_tokens,
        };
        (reviewer, queues)
    }

    /// Returns the user of a chain (leaf first) of the cluster's client CA. A certificate of another CA is
    /// no user of the cluster, whatever its name is.
    pub fn certificate_user(&self, chain: &[CertificateDer<'_>]) -> Option<Arc<ClusterUser>> {
        let trust = self.trust.as_ref()?;
        let leaf = chain
            .first()
            .filter(|_| trust.is_of_cluster(chain, UnixTime::now()))?;
        ClusterUser::of_certificate(leaf).map(Arc::new)
    }

    /// Returns the user of a token from this address, or `None` if the cluster does not accept it.
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`ReviewError`] if there is no answer.
    pub async fn user_of(
        &self,
        token: &str,
        address: IpAddr,
    ) -> Result<Option<Arc<ClusterUser>>, ReviewError> {
        let key = key(&["token", token]);
        let is_known = {
            let (state, now) = (self.state.lock(), Instant::now());
            let accepted = state.accepted.get(&key, now);
            if let Some((_, user)) = accepted.filter(|(until, _)| now < *until) {
                return Ok(Some(user.clone()));
            }
            if state.rejected.get(&key, now).is_some() {
                return Ok(None);
            }
            accepted.is_some()
        };
        let reviewed = self.once(key, async {
            let _turn = if is_known {
                None
            } else {
                Some(self.token_turn(source(address)).await?)
            };
            let queue = match is_known {
                true => &self.known_tokens,
                false => &self.new_tokens,
            };
            let token = ServiceAccountToken::new(token);
            let asked = ask(queue, |answer| ReviewRequest::Token { token, answer });
            let user = asked.await?.map(Arc::new);
            self.state.lock().reviewed_token(key, user.as_ref());
            Ok(Answer::Token(user))
        });
        match reviewed.await? {
            Answer::Token(user) => Ok(user),
            Answer::Access(_) => Ok(None),
        }
    }

    /// Returns whether a user may do something at a node: one of the subresources of the operation is
    /// allowed. Cancel-safe.
    ///
    /// # Errors
    /// [`ReviewError`] if there is no answer.
    pub async fn allows(
        &self,
        user: &Arc<ClusterUser>,
        node: &NodeName,
        operation: Operation,
        method: &Method,
    ) -> Result<bool, ReviewError> {
        let Some(verb) = operation.verb(method) else {
            return Ok(false);
        };
        for subresource in operation.subresources() {
            let access = NodeAccess {
                user: user.clone(),
                node: node.clone(),
                verb,
                subresource,
            };
            if self.has_right(access).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Forgets the answers about rights, so that the next questions are asked.
    pub fn forget_rights(&self) {
        self.state.lock().rights = Answers::default();
    }

    async fn has_right(&self, access: NodeAccess) -> Result<bool, ReviewError> {
        let user = format!("{:?}", access.user);
        let key = key(&[
            "access",
            &user,
            access.node.as_str(),
            access.verb,
            access.subresource,
        ]);
        let remembered = self.state.lock().rights.get(&key, Instant::now()).copied();
        if let Some(is_allowed) = remembered {
            return Ok(is_allowed);
        }
        let reviewed = self.once(key, async {
            let name = access.user.name.clone();
            let turn = self.state.lock().right_askers.admit(name, Instant::now());
            let _turn = take(turn).await?;
            let asked = |answer| ReviewRequest::Access { access, answer };
            let is_allowed = ask(&self.rights, asked).await?;
            let now = Instant::now();
            let lasts = if is_allowed { ALLOW_LASTS } else { DENY_LASTS };
            self.state
                .lock()
                .rights
                .insert(key, now + lasts, is_allowed, now);
            Ok(Answer::Access(is_allowed))
        });
        Ok(matches!(reviewed.await?, Answer::Access(true)))
    }

    async fn token_turn(&self, source: IpAddr) -> Result<OwnedSemaphorePermit, ReviewError> {
        let turn = self.state.lock().token_askers.admit(source, Instant::now());
        take(turn).await
    }

    /// Returns the answer to a question, which all that ask for it meanwhile share.
    async fn once(&self, key: QuestionKey, review: impl Future<Output = Reviewed>) -> Reviewed {
        let cell = self.state.lock().pending.entry(key).or_default().clone();
        let pending = PendingReview {
            reviewer: self,
            key,
            cell,
        };
        let limited = async {
            let waited = timeout(ANSWER_TIMEOUT, review).await;
            waited.unwrap_or_else(|_elapsed| Err(unavailable("no answer in time")))
        };
        // If the asker that reviews is gone, the next one does.
        pending.cell.get_or_init(|| limited).await.clone()
    }
}

/// A question that somebody asks, until it is dropped.
struct PendingReview<'a> {
    reviewer: &'a AccessReviewer,
    key: QuestionKey,
    cell: Arc<OnceCell<Reviewed>>,
}

impl Drop for PendingReview<'_> {
    fn drop(&mut self) {
        let mut state = self.reviewer.state.lock();
        // One is of this asker, and one of the table. Later askers look at the remembered answers first.
        if self.cell.initialized() || Arc::strong_count(&self.cell) == 2 {
            let own = state.pending.get(&self.key);
            if own.is_some_and(|own| Arc::ptr_eq(own, &self.cell)) {
                state.pending.remove(&self.key);
            }
        }
    }
}

async fn ask<T>(
    queue: &mpsc::Sender<ReviewRequest>,
    request: impl FnOnce(oneshot::Sender<Result<T, ReviewError>>) -> ReviewRequest,
) -> Result<T, ReviewError> {
    let (answer, answered) = oneshot::channel();
    let sent = queue.send(request(answer)).await;
    sent.map_err(|_closed| unavailable("the server is stopping"))?;
    let answered = answered.await;
    answered.unwrap_or_else(|_dropped| Err(unavailable("the server is stopping")))
}

fn unavailable(why: &str) -> ReviewError {
    ReviewError::Unavailable(why.to_owned())
}

async fn take(turn: Option<Arc<Semaphore>>) -> Result<OwnedSemaphorePermit, ReviewError> {
    let turn = turn.ok_or(ReviewError::TooMany)?;
    let taken = turn.acquire_owned().await;
    taken.map_err(|_never_closed| ReviewError::TooMany)
}

impl ReviewState {
    fn reviewed_token(&mut self, key: QuestionKey, user: Option<&Arc<ClusterUser>>) {
        let now = Instant::now();
        match user {
            Some(user) => {
                let accepted = (now + ALLOW_LASTS, user.clone());
                self.accepted.insert(key, now + KNOWN_LASTS, accepted, now);
            }
            None => {
                self.accepted.0.remove(&key);
                self.rejected.insert(key, now + DENY_LASTS, (), now);
            }
        }
    }
}

impl<T> Default for Answers<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Answers<T> {
    fn get(&self, key: &QuestionKey, now: Instant) -> Option<&T> {
        let (until, answer) = self.0.get(key)?;
        (now < *until).then_some(answer)
    }

    /// Remembers an answer. A full table loses those that are over, or else the one that ends first.
    fn insert(&mut self, key: QuestionKey, until: Instant, answer: T, now: Instant) {
        if self.0.len() >= ANSWERS_MAX && !self.0.contains_key(&key) {
            self.0.retain(|_key, (until, _answer)| now < *until);
        }
        if self.0.len() >= ANSWERS_MAX && !self.0.contains_key(&key) {
            let ends = self.0.iter().map(|(key, (until, _answer))| (*until, *key));
            if let Some((_, first)) = ends.min() {
                self.0.remove(&first);
            }
        }
        self.0.insert(key, (until, answer));
    }
}

impl<K: Eq + Hash + Clone> Askers<K> {
    fn new(most: u32, at_once: usize) -> Self {
        Self {
            most,
            used: HashMap::new(),
            since: Instant::now(),
            at_once,
            turns: HashMap::new(),
        }
    }

    /// Counts a review. Returns what the asker waits for, or `None` if it has used up its budget.
    fn admit(&mut self, asker: K, now: Instant) -> Option<Arc<Semaphore>> {
        if now.duration_since(self.since) >= BUDGET_TIME {
            self.used.clear();
            self.turns
                .retain(|_asker, turn| Arc::strong_count(turn) > 1);
            self.since = now;
        }
        let has_space = |count: usize| count < ASKERS_MAX;
        if !has_space(self.used.len().max(self.turns.len())) && !self.used.contains_key(&asker) {
            return None;
        }
        let used = self.used.entry(asker.clone()).or_default();
        *used += 1;
        if *used > self.most {
            return None;
        }
        let at_once = self.at_once;
        let turn = self.turns.entry(asker);
        Some(
            turn.or_insert_with(|| Arc::new(Semaphore::new(at_once)))
                .clone(),
        )
    }
}

/// Returns the hash of a question. The length before each part keeps two questions apart.
fn key(parts: &[&str]) -> QuestionKey {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&part.len().to_be_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    sha256(&bytes)
}

/// Returns the account that a ServiceAccount token claims, `NAMESPACE/NAME`. Only a review says whether the
/// claim is true.
pub fn claimed_account(token: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Claims {
        sub: String,
    }
    let claims: Claims = serde_json::from_slice(&token_payload(token)?).ok()?;
    account_name(&claims.sub)
}

/// Returns the payload of a JSON web token, the second of its three parts (RFC 7519, section 3).
pub fn token_payload(token: &str) -> Option<Vec<u8>> {
    let mut parts = token.split('.');
    let (Some(_), Some(payload), Some(_), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    base64_url(payload)
}

/// Returns `NAMESPACE/NAME` of the user name of a ServiceAccount.
pub fn account_name(user: &str) -> Option<String> {
    let account = user.strip_prefix("system:serviceaccount:")?;
    let (namespace, name) = account.split_once(':')?;
    Some(format!("{namespace}/{name}"))
}

/// Decodes base64url without padding (RFC 7515, section 2).
fn base64_url(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count) = (0_u32, 0);
    for digit in text.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count).to_le_bytes()[0]);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

/// The group of all users whose identity was checked.
pub const AUTHENTICATED: &str = "system:authenticated";
/// Questions that fit into a queue. Further callers wait until the queue has room.
const QUEUE_MAX: usize = 64;
/// Time that a request waits for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A right that is taken away ends new requests after this time.
const ALLOW_LASTS: Duration = Duration::from_secs(10);
/// A right that is granted applies after this time.
const DENY_LASTS: Duration = Duration::from_secs(5);
/// Time for which a token that was accepted is known: it is reviewed again before tokens that are not.
const KNOWN_LASTS: Duration = Duration::from_secs(3600);
/// Answers of one kind that are remembered.
const ANSWERS_MAX: usize = 4096;
/// Unknown tokens of one source that are reviewed within [`BUDGET_TIME`]. Anyone can send tokens.
const TOKEN_BUDGET: u32 = 20;
/// Unknown tokens of one source that are under review or wait in the queue. Further ones of the source wait
/// for these, so that no source fills the queue.
const TOKENS_AT_ONCE: usize = 2;
/// Rights of one verified user that are reviewed within [`BUDGET_TIME`]: a scrape of many nodes asks about
/// each.
const RIGHT_BUDGET: u32 = 200;
/// Rights of one user that are under review or wait in the queue.
const RIGHTS_AT_ONCE: usize = 4;
const BUDGET_TIME: Duration = Duration::from_secs(1);
/// Sources, and users, that may ask within [`BUDGET_TIME`].
const ASKERS_MAX: usize = 1024;

#[cfg(test)]
mod tests;
