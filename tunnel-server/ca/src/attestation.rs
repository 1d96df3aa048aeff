//! Attestation of ServiceAccount tokens: an enrollment asks to which node a token is bound, and the
//! cluster module answers.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::name::NodeName;
use zeroize::Zeroizing;

pub use crate::key_binding::KeyBinding;
use crate::key_binding::KeyBindings;
use crate::tokens::{FAILURES_PER_MINUTE, FailureWindow};

/// Maximum number of queued requests. An enrollment that finds the queue full is refused and may
/// retry.
const QUEUE_MAX: usize = 64;
/// Time for which an enrollment waits for an answer. The whole connection has 5 s.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(4500);
/// Maximum number of tokens whose failures are counted.
const TRACKED_TOKENS_MAX: usize = 4096;

/// A ServiceAccount token. The `Debug` form does not reveal the token.
#[derive(Clone)]
pub struct ServiceAccountToken(Arc<Zeroizing<String>>);

impl ServiceAccountToken {
    pub fn new(text: &str) -> Self {
        Self(Arc::new(text.trim().to_owned().into()))
    }

    /// Returns the text of the token, which is a secret.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ServiceAccountToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ServiceAccountToken(..)")
    }
}

/// The facts that the cluster attests about a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttestedToken {
    /// Node to which the token is bound, directly or through its Pod.
    pub node: NodeName,
    /// User name of the ServiceAccount.
    pub account: String,
    pub issued: SystemTime,
    pub ends: SystemTime,
    /// SHA-256 of the token.
    pub token: [u8; 32],
}

/// The reason why a token does not prove a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttestError {
    /// The API server does not accept the token for this audience.
    #[error("the API server does not accept the ServiceAccount token for the audience {0:?}")]
    NotAccepted(String),
    #[error(
        "the ServiceAccount token has expired, or this server's clock is ahead of the cluster's"
    )]
    Expired,
    /// The token belongs to another ServiceAccount.
    #[error("the token belongs to {0}, which is not in --agent-service-account")]
    OtherAccount(String),
    #[error(
        "the ServiceAccount token is bound to no Pod or node; use a token of a projected volume"
    )]
    NotBound,
    /// The Pod does not exist, or another Pod has its name.
    #[error("the Pod {0} that the ServiceAccount token is bound to is gone")]
    PodGone(String),
    /// The API server reports no valid node name.
    #[error("the Pod of this ServiceAccount token is not scheduled, or its node name is invalid")]
    NotScheduled,
    /// Too many attempts with this token failed.
    #[error("too many attempts with a bad token; try again in a minute")]
    RateLimited,
    /// The API server did not answer in time.
    #[error("cannot review ServiceAccount tokens: the API server is unavailable; try again later")]
    Unavailable,
}

impl AttestError {
    pub fn code(&self) -> EnrollCode {
        match self {
            Self::NotAccepted(_)
            | Self::OtherAccount(_)
            | Self::NotBound
            | Self::PodGone(_)
            | Self::NotScheduled => EnrollCode::BadToken,
            Self::Expired => EnrollCode::TokenExpired,
            Self::RateLimited => EnrollCode::RateLimited,
            Self::Unavailable => EnrollCode::Unavailable,
        }
    }
}

#[derive(Debug)]
pub struct TokenReviewRequest {
    pub token: ServiceAccountToken,
    pub answer: oneshot::Sender<Result<AttestedToken, AttestError>>,
}

/// A client of the cluster module that resolves tokens to nodes. Clones share the queue.
#[derive(Debug, Clone)]
pub struct Attestor {
    requests: mpsc::Sender<TokenReviewRequest>,
    /// Failures by the SHA-256 of the token.
    failures: Arc<Mutex<HashMap<[u8; 32], FailureWindow>>>,
    first_keys: KeyBindings,
}

impl Attestor {
    pub fn new() -> (Self, mpsc::Receiver<TokenReviewRequest>) {
        let (requests, receiver) = mpsc::channel(QUEUE_MAX);
        let attestor = Self {
            requests,
            failures: Arc::default(),
            first_keys: KeyBindings::default(),
        };
        (attestor, receiver)
    }

    /// Returns the node of a token within 4.5 s. A token that failed often is refused without a
    /// request to the cluster; failures of other tokens have no effect. Cancel-safe.
    ///
    /// # Errors
    /// Returns the reason why the token proves no node.
    pub async fn node_of(
        &self,
        token: ServiceAccountToken,
        now: SystemTime,
    ) -> Result<AttestedToken, AttestError> {
        let id = sha256(token.reveal().as_bytes());
        if self.is_exhausted(&id, now) {
            return Err(AttestError::RateLimited);
        }
        let (answer, answered) = oneshot::channel();
        let request = TokenReviewRequest { token, answer };
        self.requests
            .try_send(request)
            .map_err(|_full| AttestError::Unavailable)?;
        let answered = tokio::time::timeout(ANSWER_TIMEOUT, answered).await;
        let Ok(Ok(answered)) = answered else {
            return Err(AttestError::Unavailable);
        };
        if let Err(error) = &answered
            && *error != AttestError::Unavailable
        {
            self.count(id, now);
        }
        answered
    }

    /// Binds the token to the first key that uses it on this server. The same key may use the token
    /// again, for example after a lost answer.
    pub fn bind(&self, attested: &AttestedToken, key: [u8; 32], now: SystemTime) -> KeyBinding {
        self.first_keys
            .bind(attested.token, key, attested.ends, now)
    }

    fn is_exhausted(&self, id: &[u8; 32], now: SystemTime) -> bool {
        let failures = self.failures.lock();
        failures
            .get(id)
            .is_some_and(|window| window.is_full(now, FAILURES_PER_MINUTE))
    }

    fn count(&self, id: [u8; 32], now: SystemTime) {
        let mut failures = self.failures.lock();
        if failures.len() >= TRACKED_TOKENS_MAX {
            failures.retain(|_, window| window.is_current(now));
        }
        // Beyond this limit every attempt is sent to the cluster. The queue has its own limit.
        if failures.len() < TRACKED_TOKENS_MAX || failures.contains_key(&id) {
            failures
                .entry(id)
                .or_default()
                .count(now, FAILURES_PER_MINUTE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every request with `with` and returns the number of requests.
    async fn answered(
        mut requests: mpsc::Receiver<TokenReviewRequest>,
        with: Result<AttestedToken, AttestError>,
    ) -> usize {
        let mut count = 0;
        while let Some(request) = requests.recv().await {
            count += 1;
            request.answer.send(with.clone()).unwrap();
        }
        count
    }

    #[tokio::test]
    async fn bad_token_is_asked_about_five_times_a_minute_and_others_as_before() {
        let (attestor, requests) = Attestor::new();
        let refusal = AttestError::NotAccepted("tunnel-server".into());
        let side = answered(requests, Err(refusal.clone()));
        let asking = async move {
            let now = SystemTime::now();
            let ask = async |token: &str, now| {
                attestor.node_of(ServiceAccountToken::new(token), now).await
            };
            for _ in 0..5 {
                assert_eq!(ask("bad", now).await, Err(refusal.clone()));
            }
            assert_eq!(ask("bad", now).await, Err(AttestError::RateLimited));
            assert_eq!(ask("other", now).await, Err(refusal.clone()));
            let later = now + Duration::from_secs(61);
            assert_eq!(ask("bad", later).await, Err(refusal));
        };
        let (count, ()) = tokio::join!(side, asking);
        assert_eq!(count, 7);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_who_answers_is_a_reason_to_come_again_and_counts_for_nothing() {
        let (attestor, requests) = Attestor::new();
        let ask = async || {
            let token = ServiceAccountToken::new("good");
            attestor.node_of(token, SystemTime::now()).await
        };
        for _ in 0..2 * FAILURES_PER_MINUTE {
            let error = ask().await.unwrap_err();
            assert_eq!(error, AttestError::Unavailable);
            assert!(error.code().is_retryable());
        }
        drop(requests);
        assert_eq!(ask().await, Err(AttestError::Unavailable));
    }

    #[test]
    fn token_is_never_shown() {
        let token = ServiceAccountToken::new("eyJsecret");
        assert!(!format!("{token:?}").contains("secret"));
    }
}
