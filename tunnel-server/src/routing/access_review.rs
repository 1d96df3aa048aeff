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
use tokio::sync::{mpsc, oneshot};
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

/// A client of the cluster's authorization. Clones share the queue and the answers.
#[derive(Debug, Clone)]
pub struct AccessReviewer {
    requests: mpsc::Sender<ReviewRequest>,
    state: Arc<Mutex<ReviewState>>,
    /// Has the cluster's client CA.
    trust: Option<Arc<AgentTrust>>,
}

#[derive(Debug)]
struct ReviewState {
    /// Answers by the hash of their question.
    answers: HashMap<[u8; 32], (Instant, Answer)>,
    /// Reviews of tokens, by source.
    tokens: Budget<IpAddr>,
    /// Reviews of rights, by the name of the verified user.
    rights: Budget<String>,
}

/// Reviews of each asker since `since`.
#[derive(Debug)]
struct Budget<K> {
    most: u32,
    used: HashMap<K, u32>,
    since: Instant,
}

#[derive(Debug, Clone)]
enum Answer {
    Access(bool),
    Token(Option<Arc<ClusterUser>>),
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
    /// Creates a client and the receiver of its questions.
    pub fn new(trust: Option<Arc<AgentTrust>>) -> (Self, mpsc::Receiver<ReviewRequest>) {
        let (requests, receiver) = mpsc::channel(QUEUE_MAX);
        let state = ReviewState {
            answers: HashMap::new(),
            tokens: Budget::new(TOKEN_BUDGET),
            rights: Budget::new(RIGHT_BUDGET),
        };
        let state = Arc::new(Mutex::new(state));
        let reviewer = Self {
            requests,
            state,
            trust,
        };
        (reviewer, receiver)
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

    /// Returns the user of a token, or `None` if the cluster does not accept it. Cancel-safe.
    ///
    /// # Errors
    /// [`ReviewError`] if there is no answer.
    pub async fn user_of(
        &self,
        token: &str,
        caller: IpAddr,
    ) -> Result<Option<Arc<ClusterUser>>, ReviewError> {
        let key = key(&["token", token]);
        if let Some(Answer::Token(user)) = self.remembered(&key) {
            return Ok(user);
        }
        let source = source(caller);
        let is_admitted = self.state.lock().tokens.admit(source, Instant::now());
        if !is_admitted {
            return Err(ReviewError::TooMany);
        }
        let token = ServiceAccountToken::new(token);
        let asked = |answer| ReviewRequest::Token { token, answer };
        let user = self.ask(asked).await?.map(Arc::new);
        self.remember(key, user.is_some(), Answer::Token(user.clone()));
        Ok(user)
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

    async fn has_right(&self, access: NodeAccess) -> Result<bool, ReviewError> {
        let user = format!("{:?}", access.user);
        let key = key(&[
            "access",
            &user,
            access.node.as_str(),
            access.verb,
            access.subresource,
        ]);
        if let Some(Answer::Access(is_allowed)) = self.remembered(&key) {
            return Ok(is_allowed);
        }
        let name = access.user.name.clone();
        let is_admitted = self.state.lock().rights.admit(name, Instant::now());
        if !is_admitted {
            return Err(ReviewError::TooMany);
        }
        let asked = |answer| ReviewRequest::Access { access, answer };
        let is_allowed = self.ask(asked).await?;
        self.remember(key, is_allowed, Answer::Access(is_allowed));
        Ok(is_allowed)
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, ReviewError>>) -> ReviewRequest,
    ) -> Result<T, ReviewError> {
        let unavailable = |why: &str| ReviewError::Unavailable(why.to_owned());
        let (answer, answered) = oneshot::channel();
        let asking = async {
            let sent = self.requests.send(request(answer)).await;
            sent.map_err(|_closed| unavailable("the server is stopping"))?;
            let answered = answered.await;
            answered.unwrap_or_else(|_dropped| Err(unavailable("the server is stopping")))
        };
        let waited = timeout(ANSWER_TIMEOUT, asking).await;
        waited.unwrap_or_else(|_elapsed| Err(unavailable("no answer in time")))
    }

    fn remembered(&self, key: &[u8; 32]) -> Option<Answer> {
        let state = self.state.lock();
        let (until, answer) = state.answers.get(key)?;
        (Instant::now() < *until).then(|| answer.clone())
    }

    fn remember(&self, key: [u8; 32], is_allowed: bool, answer: Answer) {
        let now = Instant::now();
        let lasts = if is_allowed { ALLOW_LASTS } else { DENY_LASTS };
        let mut state = self.state.lock();
        if state.answers.len() >= ANSWERS_MAX {
            state.answers.retain(|_key, (until, _answer)| now < *until);
        }
        if state.answers.len() < ANSWERS_MAX {
            state.answers.insert(key, (now + lasts, answer));
        }
    }
}

impl<K: Eq + Hash> Budget<K> {
    fn new(most: u32) -> Self {
        Self {
            most,
            used: HashMap::new(),
            since: Instant::now(),
        }
    }

    fn admit(&mut self, asker: K, now: Instant) -> bool {
        if now.duration_since(self.since) >= BUDGET_TIME {
            self.used.clear();
            self.since = now;
        }
        if self.used.len() >= ASKERS_MAX && !self.used.contains_key(&asker) {
            return false;
        }
        let used = self.used.entry(asker).or_default();
        *used += 1;
        *used <= self.most
    }
}

/// Returns the hash of a question. The length before each part keeps two questions apart.
fn key(parts: &[&str]) -> [u8; 32] {
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
/// Questions that fit into the queue. Further callers wait until the queue has room.
const QUEUE_MAX: usize = 64;
/// Time that a request waits for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A right that is taken away ends new requests after this time.
const ALLOW_LASTS: Duration = Duration::from_secs(10);
/// A right that is granted applies after this time.
const DENY_LASTS: Duration = Duration::from_secs(5);
/// Answers that are remembered.
const ANSWERS_MAX: usize = 4096;
/// Tokens of one source that are reviewed within [`BUDGET_TIME`]. Anyone can send tokens.
const TOKEN_BUDGET: u32 = 20;
/// Rights of one verified user that are reviewed within [`BUDGET_TIME`]: a scrape of many nodes asks about
/// each.
const RIGHT_BUDGET: u32 = 200;
const BUDGET_TIME: Duration = Duration::from_secs(1);
/// Sources, and users, that may ask within [`BUDGET_TIME`].
const ASKERS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const CALLER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn user(name: &str) -> Arc<ClusterUser> {
        Arc::new(ClusterUser {
            name: name.to_owned(),
            ..ClusterUser::default()
        })
    }

    /// Answers questions by the subresources that are allowed, and counts them.
    fn answering(
        allowed: &'static [&'static str],
    ) -> (
        AccessReviewer,
        Arc<Mutex<Vec<String>>>,
        tokio::task::JoinSet<()>,
    ) {
        let (reviewer, mut requests) = AccessReviewer::new(None);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (seen, mut tasks) = (asked.clone(), tokio::task::JoinSet::new());
        tasks.spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    ReviewRequest::Access { access, answer } => {
                        seen.lock()
                            .push(format!("{} {}", access.verb, access.subresource));
                        let _gone = answer.send(Ok(allowed.contains(&access.subresource)));
                    }
                    ReviewRequest::Token { answer, .. } => {
                        seen.lock().push("token".to_owned());
                        let _gone = answer.send(Ok(None));
                    }
                }
            }
        });
        (reviewer, asked, tasks)
    }

    #[tokio::test(start_paused = true)]
    async fn own_subresource_is_asked_before_proxy_and_answers_last_for_seconds() {
        let (reviewer, asked, _tasks) = answering(&["proxy"]);
        let (ops, node) = (user("ops"), "edge-1".parse().unwrap());
        let allows = async |operation: Operation, method: &Method| {
            let allows = reviewer.allows(&ops, &node, operation, method);
            allows.await.unwrap()
        };
        assert!(allows(Operation::Pods, &Method::GET).await);
        assert!(!allows(Operation::Metrics, &Method::GET).await);
        assert!(allows(Operation::Exec, &Method::GET).await);
        assert!(!allows(Operation::Metrics, &Method::HEAD).await, "no verb");
        let once = ["get pods", "get proxy", "get metrics", "create proxy"];
        assert_eq!(*asked.lock(), once);
        assert!(allows(Operation::Exec, &Method::POST).await);
        assert_eq!(asked.lock().len(), once.len(), "remembered");
        tokio::time::advance(DENY_LASTS).await;
        assert!(!allows(Operation::Metrics, &Method::GET).await);
        assert!(allows(Operation::Exec, &Method::POST).await);
        assert_eq!(
            asked.lock().len(),
            once.len() + 1,
            "an answer that denies ends first"
        );
        tokio::time::advance(ALLOW_LASTS).await;
        assert!(allows(Operation::Exec, &Method::POST).await);
        assert_eq!(asked.lock().len(), once.len() + 2);
    }

    #[tokio::test(start_paused = true)]
    async fn source_has_a_budget_and_others_have_theirs() {
        let (reviewer, asked, _tasks) = answering(&[]);
        let ask = async |number: u32, caller: IpAddr| {
            reviewer.user_of(&format!("{number}"), caller).await
        };
        for number in 0..TOKEN_BUDGET {
            assert_eq!(ask(number, CALLER).await, Ok(None));
        }
        assert_eq!(ask(TOKEN_BUDGET, CALLER).await, Err(ReviewError::TooMany));
        assert_eq!(ask(0, CALLER).await, Ok(None), "remembered");
        let other = Ipv4Addr::new(192, 0, 2, 1).into();
        assert_eq!(ask(TOKEN_BUDGET, other).await, Ok(None));
        assert_eq!(asked.lock().len(), 21);
        tokio::time::advance(BUDGET_TIME).await;
        assert_eq!(ask(TOKEN_BUDGET + 1, CALLER).await, Ok(None));
    }

    #[tokio::test]
    async fn cluster_that_does_not_answer_is_an_error() {
        let (reviewer, requests) = AccessReviewer::new(None);
        drop(requests);
        let asked = reviewer.user_of("token", CALLER).await;
        assert!(
            matches!(asked, Err(ReviewError::Unavailable(_))),
            "{asked:?}"
        );
    }

    #[test]
    fn claims_name_an_account_or_none() {
        // {"sub":"system:serviceaccount:monitoring:prometheus-k8s"} in base64url.
        let payload =
            "eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6bW9uaXRvcmluZzpwcm9tZXRoZXVzLWs4cyJ9";
        let account = claimed_account(&format!("e30.{payload}.c2ln"));
        assert_eq!(account.as_deref(), Some("monitoring/prometheus-k8s"));
        // {"sub":"admin"}
        for token in [
            "",
            "abc",
            "a.b.c",
            "e30.eyJzdWIiOiJhZG1pbiJ9.c",
            "e30.e30.c",
            "a.b.c.d",
        ] {
            assert_eq!(claimed_account(token), None, "{token}");
        }
    }
}
