//! Which node a ServiceAccount token is bound to: a question that enrollments ask, and the cluster's side answers.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot};
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::name::NodeName;
use zeroize::Zeroizing;

pub use crate::ca::key_binding::KeyBinding;
use crate::ca::key_binding::KeyBindings;
use crate::ca::tokens::{FAILURES_PER_MINUTE, FailureWindow};

/// Questions that wait to be taken; an enrollment that finds no room is told to come again.
const QUEUE_MAX: usize = 64;
/// How long an enrollment waits for an answer; its connection has 5 s in all.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(4500);
/// Tokens whose failures are counted.
const TRACKED_TOKENS_MAX: usize = 4096;

/// A ServiceAccount token. Its `Debug` form tells nothing of it.
#[derive(Clone)]
pub struct ServiceAccountToken(Arc<Zeroizing<String>>);

impl ServiceAccountToken {
    /// Takes a token as it came.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Arc::new(text.trim().to_owned().into()))
    }

    /// The token itself.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ServiceAccountToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("AccountToken(..)")
    }
}

/// What the cluster vouches for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttestedToken {
    /// The node that the token is bound to, by itself or by its Pod.
    pub node: NodeName,
    /// The ServiceAccount's user name.
    pub account: String,
    /// When the token was issued.
    pub issued: SystemTime,
    /// When the token ends.
    pub ends: SystemTime,
    /// SHA-256 of the token.
    pub token: [u8; 32],
}

/// Why a token proves no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttestError {
    /// The API server does not take it for a token of this audience.
    #[error("the API server does not accept the ServiceAccount token for the audience {0:?}")]
    NotAccepted(String),
    /// Its time is over.
    #[error(
        "the ServiceAccount token has expired, or this server's clock is ahead of the cluster's"
    )]
    Expired,
    /// It is somebody else's.
    #[error("the token belongs to {0}, which is not in --agent-service-account")]
    OtherAccount(String),
    /// It is no projected token.
    #[error(
        "the ServiceAccount token is bound to no Pod or node; use a token of a projected volume"
    )]
    NotBound,
    /// There is no such Pod, or it is another one of the same name.
    #[error("the Pod {0} that the ServiceAccount token is bound to is gone")]
    PodGone(String),
    /// The API server says no node's name.
    #[error("the Pod of this ServiceAccount token is not scheduled, or its node name is invalid")]
    NotScheduled,
    /// The same token failed too often.
    #[error("too many attempts with a bad token; try again in a minute")]
    RateLimited,
    /// Nobody can be asked in time.
    #[error("cannot review ServiceAccount tokens: the API server is unavailable; try again later")]
    Unavailable,
}

impl AttestError {
    /// The code that the agent is told.
    #[must_use]
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

/// A question with the way back.
#[derive(Debug)]
pub struct Question {
    /// The token.
    pub token: ServiceAccountToken,
    /// Where the answer goes.
    pub answer: oneshot::Sender<Result<AttestedToken, AttestError>>,
}

/// Asks whose node a token proves. Clones ask the same side.
#[derive(Debug, Clone)]
pub struct Attestor {
    questions: mpsc::Sender<Question>,
    /// By the hash of the token.
    failures: Arc<Mutex<HashMap<[u8; 32], FailureWindow>>>,
    first_keys: KeyBindings,
}

impl Attestor {
    /// An attestor and the questions it asks.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Question>) {
        let (questions, receiver) = mpsc::channel(QUEUE_MAX);
        let attestor = Self {
            questions,
            failures: Arc::default(),
            first_keys: KeyBindings::default(),
        };
        (attestor, receiver)
    }

    /// The node of a token, within 4.5 s. A token that failed often is refused without asking; others' failures refuse
    /// nobody. Cancel-safe.
    ///
    /// # Errors
    /// Why it proves none.
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
        let question = Question { token, answer };
        self.questions
            .try_send(question)
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

    /// Binds the token to the first key that uses it here; the same key may use it again, as after a lost answer.
    #[must_use]
    pub fn bind(&self, attested: &AttestedToken, key: [u8; 32], now: SystemTime) -> KeyBinding {
        self.first_keys
            .bind(attested.token, key, attested.ends, now)
    }

    fn is_exhausted(&self, id: &[u8; 32], now: SystemTime) -> bool {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures
            .get(id)
            .is_some_and(|window| window.is_full(now, FAILURES_PER_MINUTE))
    }

    fn count(&self, id: [u8; 32], now: SystemTime) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() >= TRACKED_TOKENS_MAX {
            failures.retain(|_, window| window.is_current(now));
        }
        // Beyond that, tokens are asked about every time; how many at once has its own bound.
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

    /// Answers every question so, and says how many there were.
    async fn answered(
        mut questions: mpsc::Receiver<Question>,
        with: Result<AttestedToken, AttestError>,
    ) -> usize {
        let mut count = 0;
        while let Some(question) = questions.recv().await {
            count += 1;
            question.answer.send(with.clone()).unwrap();
        }
        count
    }

    #[tokio::test]
    async fn bad_token_is_asked_about_five_times_a_minute_and_others_as_before() {
        let (attestor, questions) = Attestor::new();
        let refusal = AttestError::NotAccepted("tunnel-server".into());
        let side = answered(questions, Err(refusal.clone()));
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
        let (attestor, questions) = Attestor::new();
        let ask = async || {
            let token = ServiceAccountToken::new("good");
            attestor.node_of(token, SystemTime::now()).await
        };
        for _ in 0..2 * FAILURES_PER_MINUTE {
            let error = ask().await.unwrap_err();
            assert_eq!(error, AttestError::Unavailable);
            assert!(error.code().is_retryable());
        }
        drop(questions);
        assert_eq!(ask().await, Err(AttestError::Unavailable));
    }

    #[test]
    fn token_is_never_shown() {
        let token = ServiceAccountToken::new("eyJsecret");
        assert!(!format!("{token:?}").contains("secret"));
    }
}
