//! Pod lookups: which node a pod runs on, with one GET per lookup. Pods are never watched, and no
//! answer is cached. A pod with the same name may start on another node at once, and a stream to
//! the old node could then reach a different pod.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;
use tunnel_proto::wire::name::NodeName;

use super::api_call::with_limit;
use super::failure::ApiErrorKind;
use crate::cluster::conditions::{Condition, Conditions};
use crate::routing::pod_lookup::{Pod, PodLookupError, PodLookupRequest};

/// Maximum number of concurrent API calls. Further lookups wait.
const CALLS_MAX: usize = 16;
const CALL_LIMIT: Duration = Duration::from_secs(4);
/// The condition while the permission is missing.
const FORBIDDEN: &str = "the server may not get Pods, so exec, attach, cp and port-forward of a kube-apiserver without \
    --kubelet-certificate-authority fail: grant its ServiceAccount verb get on resource pods (the manifests of this version \
    do), or set --pod-lookup=false";

/// Answers lookups until the listeners are gone.
pub(super) async fn answer(
    client: Client,
    mut requests: mpsc::Receiver<PodLookupRequest>,
    conditions: Conditions,
) {
    let mut calls: JoinSet<Option<Access>> = JoinSet::new();
    loop {
        let request = tokio::select! {
            Some(ended) = calls.join_next(), if !calls.is_empty() => {
                match ended {
                    Ok(Some(Access::Granted)) => conditions.set(Condition::PodLookup, Vec::new()),
                    Ok(Some(Access::Refused)) => {
                        conditions.set(Condition::PodLookup, vec![FORBIDDEN.to_owned()]);
                    }
                    // The panic has been counted, and the caller received an error.
                    Ok(None) | Err(_) => {}
                }
                continue;
            }
            request = requests.recv(), if calls.len() < CALLS_MAX => request,
        };
        let Some(request) = request else {
            return;
        };
        if request.answer.is_closed() {
            continue;
        }
        let api = Api::<PodObject>::namespaced(client.clone(), &request.pod.namespace);
        calls.spawn(async move {
            let found = node_of(api, &request.pod).await;
            let access = Access::of(&found);
            let _asker_is_gone = request.answer.send(found);
            access
        });
    }
}

/// Access to Pods, as far as an answer shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Granted,
    Refused,
}

impl Access {
    /// Returns `None` if the API server did not evaluate the permission.
    fn of(found: &Result<NodeName, PodLookupError>) -> Option<Self> {
        match found {
            Ok(_)
            | Err(
                PodLookupError::NotFound
                | PodLookupError::Unbound
                | PodLookupError::UnusableNode(_),
            ) => Some(Self::Granted),
            Err(PodLookupError::Forbidden) => Some(Self::Refused),
            Err(PodLookupError::Unavailable(_) | PodLookupError::Timeout) => None,
        }
    }
}

async fn node_of(api: Api<PodObject>, pod: &Pod) -> Result<NodeName, PodLookupError> {
    let found = with_limit(CALL_LIMIT, api.get_opt(&pod.name)).await;
    let found = found.map_err(|failure| {
        debug!(error = %failure, %pod, "cannot get a pod");
        match failure.kind {
            ApiErrorKind::Forbidden => PodLookupError::Forbidden,
            _ => PodLookupError::Unavailable(failure.to_string()),
        }
    })?;
    let found = found.ok_or(PodLookupError::NotFound)?;
    let node = found.spec.and_then(|spec| spec.node_name);
    let node = node
        .filter(|node| !node.is_empty())
        .ok_or(PodLookupError::Unbound)?;
    node.parse()
        .map_err(|_unusable| PodLookupError::UnusableNode(node))
}
