//! Token reviews: which node a ServiceAccount token is bound to. The server sends a TokenReview.
//! Older API servers do not report the node, so the server then also gets the Pod of the token.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tracing::{debug, warn};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::name::NodeName;

use super::failure::{ApiError, ApiErrorKind};
use crate::config::AgentTokens;
use crate::routing::access_review::token_payload;
use tunnel_ca::attestation::{AttestError, AttestedToken, ServiceAccountToken, TokenReviewRequest};

/// Maximum number of tokens that are reviewed concurrently. Further tokens wait.
const CALLS_MAX: usize = 16;
/// Limit for all calls for one token.
const CALL_LIMIT: Duration = Duration::from_secs(4);
/// Keys of the extra fields in a review (Kubernetes `pkg/serviceaccount/claims.go`,
/// `apiserver/pkg/authentication/serviceaccount`).
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const ACCOUNT_PREFIX: &str = "system:serviceaccount:";

/// Answers requests until all senders are gone.
pub(super) async fn answer(
    client: Client,
    mut requests: mpsc::Receiver<TokenReviewRequest>,
    settings: AgentTokens,
) {
    let mut calls: JoinSet<()> = JoinSet::new();
    loop {
        let request = tokio::select! {
            request = requests.recv(), if calls.len() < CALLS_MAX => request,
            Some(_ended) = calls.join_next(), if !calls.is_empty() => continue,
        };
        let Some(TokenReviewRequest { token, answer }) = request else {
            return;
        };
        let (client, settings) = (client.clone(), settings.clone());
        calls.spawn(handle_request(client, token, settings, answer));
    }
}

/// Anyone who reaches the agent port can cause these log messages.
static REVIEW_FAILED: LogRateLimit = LogRateLimit::new("ServiceAccount tokens cannot be reviewed");

async fn handle_request(
    client: Client,
    token: ServiceAccountToken,
    settings: AgentTokens,
    answer: oneshot::Sender<Result<AttestedToken, AttestError>>,
) {
    let attested = tokio::time::timeout(CALL_LIMIT, attest(&client, &token, &settings)).await;
    let attested = attested.unwrap_or_else(|_elapsed| {
        if REVIEW_FAILED.admit() {
            warn!(error = %ApiError::timeout(), "cannot review a ServiceAccount token");
        }
        Err(AttestError::Unavailable)
    });
    let _enrollment_may_be_over = answer.send(attested);
}

async fn attest(
    client: &Client,
    token: &ServiceAccountToken,
    settings: &AgentTokens,
) -> Result<AttestedToken, AttestError> {
    // A text that is not a token is not sent to the API server.
    let not_accepted = || AttestError::NotAccepted(settings.audience.clone());
    let claims = TokenClaims::of(token).ok_or_else(not_accepted)?;
    let review = TokenReview {
        spec: TokenReviewSpec {
            audiences: Some(vec![settings.audience.clone()]),
            token: Some(token.reveal().to_owned()),
        },
        ..TokenReview::default()
    };
    let reviews = Api::<TokenReview>::all(client.clone());
    let reviewed = reviews.create(&PostParams::default(), &review).await;
    let status = reviewed
        .map_err(|error| unavailable("tokenreviews", &error))?
        .status
        .unwrap_or_default();
    let token_binding = match check_review(&status, settings) {
        Err(AttestError::NotAccepted(_)) if claims.is_expired(SystemTime::now()) => {
            return Err(AttestError::Expired);
        }
        checked => checked?,
    };
    let node = match token_binding.bound {
        BoundObject::Node(node) => node,
        BoundObject::Pod(pod) => {
            let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
            let found = pods.get_opt(&pod.name).await;
            let found = found.map_err(|error| unavailable("pods", &error))?;
            node_of(&pod, found.as_ref())?
        }
    };
    Ok(AttestedToken {
        node,
        account: token_binding.account,
        issued: claims.issued(),
        ends: claims.ends(),
        token: sha256(token.reveal().as_bytes()),
    })
}

fn unavailable(resource: &str, error: &kube::Error) -> AttestError {
    let failure = ApiError::from(error);
    let hint = match failure.kind {
        ApiErrorKind::Forbidden => "; grant create on tokenreviews and get on pods of the agents",
        _ => "",
    };
    if REVIEW_FAILED.admit() {
        warn!(error = %failure, resource, "cannot review a ServiceAccount token{hint}");
    }
    AttestError::Unavailable
}

/// Account and bound object that the API server confirmed.
#[derive(Debug, PartialEq, Eq)]
struct TokenBinding {
    account: String,
    bound: BoundObject,
}

#[derive(Debug, PartialEq, Eq)]
enum BoundObject {
    Node(NodeName),
    Pod(BoundPod),
}

#[derive(Debug, PartialEq, Eq)]
struct BoundPod {
    namespace: String,
    name: String,
    uid: String,
}

/// Pure function from the answer of a review to the binding that it confirms.
fn check_review(
    status: &TokenReviewStatus,
    settings: &AgentTokens,
) -> Result<TokenBinding, AttestError> {
    let has_audience = status
        .audiences
        .iter()
        .flatten()
        .any(|audience| *audience == settings.audience);
    // An API server that does not support audiences returns none. The token may then be meant for
    // the API server itself.
    if status.authenticated != Some(true) || !has_audience {
        debug!(
            error = status.error.as_deref().unwrap_or_default(),
            "the API server does not accept a ServiceAccount token"
        );
        return Err(AttestError::NotAccepted(settings.audience.clone()));
    }
    let user = status.user.as_ref();
    let account = user.and_then(|user| user.username.clone());
    let account = account.unwrap_or_default();
    if !settings.accounts.contains(&account) {
        return Err(AttestError::OtherAccount(account));
    }
    let extra = |key: &str| {
        let values = user.and_then(|user| user.extra.as_ref()?.get(key));
        match values.map(Vec::as_slice) {
            Some([value]) => Some(value.as_str()),
            Some(_) | None => None,
        }
    };
    let bound = match (extra(NODE_NAME), extra(POD_NAME), extra(POD_UID)) {
        (Some(node), _, _) => BoundObject::Node(node_name(node)?),
        (None, Some(name), Some(uid)) => {
            let inside = account.strip_prefix(ACCOUNT_PREFIX);
            let inside = inside.and_then(|account| account.split_once(':'));
            let (namespace, _) = inside.ok_or(AttestError::NotBound)?;
            BoundObject::Pod(BoundPod {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                uid: uid.to_owned(),
            })
        }
        (None, _, _) => return Err(AttestError::NotBound),
    };
    Ok(TokenBinding { account, bound })
}

/// Pure function from the observed Pod to its node. The token must be bound to this Pod.
fn node_of(bound: &BoundPod, found: Option<&Pod>) -> Result<NodeName, AttestError> {
    let is_it = |pod: &&Pod| pod.metadata.uid.as_deref() == Some(&*bound.uid);
    let gone = || AttestError::PodGone(format!("{}/{}", bound.namespace, bound.name));
    let pod = found.filter(is_it).ok_or_else(gone)?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    node_name(node.ok_or(AttestError::NotScheduled)?)
}

fn node_name(text: &str) -> Result<NodeName, AttestError> {
    let node = text.parse().map_err(|_syntax| AttestError::NotScheduled);
    node.and_then(|node: NodeName| {
        let is_same = node.as_str() == text;
        is_same.then_some(node).ok_or(AttestError::NotScheduled)
    })
}

/// Claims of a token. They are trustworthy only after the API server has accepted the token.
#[derive(Debug, Deserialize)]
struct TokenClaims {
    iat: u64,
    exp: Option<u64>,
}

impl TokenClaims {
    fn of(token: &ServiceAccountToken) -> Option<Self> {
        serde_json::from_slice(&token_payload(token.reveal())?).ok()
    }

    fn issued(&self) -> SystemTime {
        from_unix_seconds(self.iat)
    }

    /// Returns the expiry. Tokens that are bound to a Pod or a node have one. A token without an
    /// expiry is remembered for a long time.
    fn ends(&self) -> SystemTime {
        self.exp.map_or_else(
            || from_unix_seconds(self.iat) + TOKEN_LIFE_MAX,
            from_unix_seconds,
        )
    }

    fn is_expired(&self, now: SystemTime) -> bool {
        self.exp.is_some_and(|exp| from_unix_seconds(exp) <= now)
    }
}

fn from_unix_seconds(seconds: u64) -> SystemTime {
    let epoch = SystemTime::UNIX_EPOCH;
    epoch
        .checked_add(Duration::from_secs(seconds))
        .unwrap_or(epoch)
}

/// Longest lifetime of bound tokens in a cluster.
const TOKEN_LIFE_MAX: Duration = Duration::from_secs(365 * 86_400);

#[cfg(test)]
mod tests;
