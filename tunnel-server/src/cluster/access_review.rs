//! Access reviews: SubjectAccessReviews of callers' rights at nodes, and TokenReviews of callers' tokens.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

use super::api_call::with_limit;
use super::conditions::{Condition, Conditions};
use super::failure::{ApiError, ApiErrorKind};
use crate::routing::access_review::{
    AUTHENTICATED, ClusterUser, NodeAccess, ReviewError, ReviewQueues, ReviewRequest,
};
use tunnel_ca::attestation::ServiceAccountToken;

/// Answers questions until the listeners are gone.
pub(super) async fn answer(client: Client, queues: ReviewQueues, conditions: Conditions) {
    tokio::join!(
        answer_queue(&client, queues.rights, RIGHT_CALLS, &conditions),
        answer_queue(&client, queues.known_tokens, TOKEN_CALLS, &conditions),
        answer_queue(&client, queues.new_tokens, TOKEN_CALLS, &conditions),
    );
}

/// Answers the questions of one queue, with `most` concurrent API calls.
async fn answer_queue(
    client: &Client,
    mut requests: mpsc::Receiver<ReviewRequest>,
    most: usize,
    conditions: &Conditions,
) {
    let mut calls: JoinSet<Option<String>> = JoinSet::new();
    loop {
        let request = tokio::select! {
            Some(ended) = calls.join_next(), if !calls.is_empty() => {
                // The panic has been counted, and the caller received an error.
                if let Ok(failure) = ended {
                    conditions.set(Condition::AccessReview, failure.into_iter().collect());
                }
                continue;
            }
            request = requests.recv(), if calls.len() < most => request,
        };
        let Some(request) = request else {
            return;
        };
        let client = client.clone();
        calls.spawn(async move {
            match request {
                ReviewRequest::Access { access, answer } => {
                    let reviewed = has_right(client, &access).await;
                    let failure = failure(&reviewed);
                    let _asker_is_gone = answer.send(reviewed);
                    failure
                }
                ReviewRequest::Token { token, answer } => {
                    let reviewed = user_of(client, &token).await;
                    let failure = failure(&reviewed);
                    let _asker_is_gone = answer.send(reviewed);
                    failure
                }
            }
        });
    }
}

fn failure<T>(reviewed: &Result<T, ReviewError>) -> Option<String> {
    let error = reviewed.as_ref().err()?;
    Some(format!(
        "rules with authorize: kubernetes, and callers with a serviceAccount, are refused: {error}"
    ))
}

async fn has_right(client: Client, access: &NodeAccess) -> Result<bool, ReviewError> {
    let user = &access.user;
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: Some(user.uid.clone()).filter(|uid| !uid.is_empty()),
            groups: Some(user.groups.clone()),
            extra: Some(user.extra.clone()),
            resource_attributes: Some(ResourceAttributes {
                verb: Some(access.verb.to_owned()),
                version: Some("v1".to_owned()),
                resource: Some("nodes".to_owned()),
                subresource: Some(access.subresource.to_owned()),
                name: Some(access.node.to_string()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let reviews = Api::<SubjectAccessReview>::all(client);
    let params = PostParams::default();
    let reviewed = with_limit(CALL_LIMIT, reviews.create(&params, &review)).await;
    let status = reviewed
        .map_err(|failure| unavailable("subjectaccessreviews", &failure))?
        .status
        .unwrap_or_default();
    Ok(status.allowed && status.denied != Some(true))
}

async fn user_of(
    client: Client,
    token: &ServiceAccountToken,
) -> Result<Option<ClusterUser>, ReviewError> {
    let review = TokenReview {
        spec: TokenReviewSpec {
            audiences: None,
            token: Some(token.reveal().to_owned()),
        },
        ..TokenReview::default()
    };
    let reviews = Api::<TokenReview>::all(client);
    let params = PostParams::default();
    let reviewed = with_limit(CALL_LIMIT, reviews.create(&params, &review)).await;
    let status = reviewed
        .map_err(|failure| unavailable("tokenreviews", &failure))?
        .status
        .unwrap_or_default();
    let user = status.user.filter(|_| status.authenticated == Some(true));
    Ok(user.map(|user| {
        let mut groups = user.groups.unwrap_or_default();
        if !groups.iter().any(|group| group == AUTHENTICATED) {
            groups.push(AUTHENTICATED.to_owned());
        }
        ClusterUser {
            name: user.username.unwrap_or_default(),
            uid: user.uid.unwrap_or_default(),
            groups,
            extra: user.extra.unwrap_or_default(),
        }
    }))
}

fn unavailable(resource: &'static str, failure: &ApiError) -> ReviewError {
    debug!(error = %failure, resource, "cannot ask the cluster about a caller");
    match failure.kind {
        ApiErrorKind::Forbidden => ReviewError::Forbidden(resource),
        _ => ReviewError::Unavailable(failure.to_string()),
    }
}

/// Maximum number of concurrent API calls for rights. Further questions wait.
const RIGHT_CALLS: usize = 8;
/// Maximum number of concurrent API calls for the tokens of one queue.
const TOKEN_CALLS: usize = 4;
const CALL_LIMIT: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::super::testing::{ApiServer, api_server};
    use super::*;

    /// Answers a review with this status.
    async fn answer(api: &mut ApiServer, resource: &str, status: &Value) {
        let call = api.call().await;
        assert!(call.what.contains(resource), "{}", call.what);
        let mut review = call.body.clone();
        review["status"] = status.clone();
        call.answer(&review);
    }

    #[tokio::test]
    async fn right_is_there_only_if_it_is_allowed_and_not_denied() {
        let access = NodeAccess {
            user: Arc::new(ClusterUser {
                name: "ops".to_owned(),
                ..ClusterUser::default()
            }),
            node: "edge-1".parse().unwrap(),
            verb: "get",
            subresource: "metrics",
        };
        for (status, expected) in [
            (json!({ "allowed": true }), true),
            (json!({ "allowed": true, "denied": false }), true),
            (json!({ "allowed": true, "denied": true }), false),
            (json!({ "allowed": false }), false),
            (Value::Null, false),
        ] {
            let (client, mut api) = api_server();
            let answered = answer(&mut api, "subjectaccessreviews", &status);
            let (reviewed, ()) = tokio::join!(has_right(client, &access), answered);
            assert_eq!(reviewed, Ok(expected), "{status}");
        }
    }

    #[tokio::test]
    async fn review_names_the_user_and_the_right() {
        let access = NodeAccess {
            user: Arc::new(ClusterUser {
                name: "ops".to_owned(),
                uid: "u1".to_owned(),
                groups: vec!["admins".to_owned()],
                extra: [("scopes".to_owned(), vec!["a".to_owned()])].into(),
            }),
            node: "edge-1".parse().unwrap(),
            verb: "create",
            subresource: "proxy",
        };
        let (client, mut api) = api_server();
        let asked = async {
            let call = api.call().await;
            let mut review = call.body.clone();
            review["status"] = json!({ "allowed": true });
            call.answer(&review);
            review["spec"].take()
        };
        let (reviewed, spec) = tokio::join!(has_right(client, &access), asked);
        assert_eq!(reviewed, Ok(true));
        let expected = json!({
            "user": "ops",
            "uid": "u1",
            "groups": ["admins"],
            "extra": { "scopes": ["a"] },
            "resourceAttributes": {
                "verb": "create",
                "version": "v1",
                "resource": "nodes",
                "subresource": "proxy",
                "name": "edge-1",
            },
        });
        assert_eq!(spec, expected);
    }

    #[tokio::test]
    async fn token_has_a_user_only_if_the_cluster_accepts_it() {
        let user = json!({ "username": "system:serviceaccount:monitoring:prometheus" });
        for (status, expected) in [
            (json!({ "authenticated": true, "user": user }), true),
            (json!({ "authenticated": false, "user": user }), false),
            (json!({ "user": user }), false),
            (Value::Null, false),
        ] {
            let (client, mut api) = api_server();
            let token = ServiceAccountToken::new("token");
            let answered = answer(&mut api, "tokenreviews", &status);
            let (reviewed, ()) = tokio::join!(user_of(client, &token), answered);
            let user = reviewed.unwrap();
            assert_eq!(user.is_some(), expected, "{status}");
            let groups = user.map(|user| user.groups).unwrap_or_default();
            assert_eq!(groups, [AUTHENTICATED; 1][..usize::from(expected)]);
        }
    }
}
