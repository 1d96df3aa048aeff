//! Answers which node a pod runs on: one GET each, kept for a moment. Pods are never watched.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{Api, Client};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::failure::{Failure, FailureKind};
use super::world::World;
use crate::pods::{Kubelet, Pod, Question};

/// How long an answer is good: a pod never moves, but one of the same name may start elsewhere.
const FRESH: Duration = Duration::from_secs(5);
/// Answers that are kept.
const ANSWERS_MAX: usize = 1024;
/// Questions to the API server at once; more are answered with nothing.
const CALLS_MAX: usize = 16;
/// One question.
const CALL_LIMIT: Duration = Duration::from_secs(4);

/// Answers until the doors are gone.
pub(super) async fn answer(
    client: Client,
    mut questions: mpsc::Receiver<Question>,
    world: watch::Receiver<World>,
) {
    let mut kept: HashMap<Pod, (Instant, Option<Box<str>>)> = HashMap::new();
    let mut calls: JoinSet<(Pod, Option<Box<str>>, oneshot::Sender<_>)> = JoinSet::new();
    loop {
        let question = tokio::select! {
            question = questions.recv() => question,
            Some(ended) = calls.join_next(), if !calls.is_empty() => {
                if let Ok((pod, node, answer)) = ended {
                    answer_with(&world, node.as_deref(), answer);
                    if kept.len() >= ANSWERS_MAX {
                        kept.retain(|_, (at, _)| at.elapsed() < FRESH);
                    }
                    if kept.len() < ANSWERS_MAX {
                        kept.insert(pod, (Instant::now(), node));
                    }
                }
                continue;
            }
        };
        let Some(Question { pod, answer }) = question else {
            return;
        };
        match kept.get(&pod) {
            Some((at, node)) if at.elapsed() < FRESH => {
                answer_with(&world, node.as_deref(), answer);
            }
            Some(_) | None if calls.len() < CALLS_MAX => {
                let api = Api::<PodObject>::namespaced(client.clone(), &pod.namespace);
                calls.spawn(async move {
                    let node = node_of(api, &pod).await;
                    (pod, node, answer)
                });
            }
            Some(_) | None => debug!("too many questions about pods at once"),
        }
    }
}

async fn node_of(api: Api<PodObject>, pod: &Pod) -> Option<Box<str>> {
    let found = tokio::time::timeout(CALL_LIMIT, api.get_opt(&pod.name)).await;
    let found = found.map_or_else(
        |_elapsed| Err(Failure::timeout()),
        |found| found.map_err(|error| Failure::from(&error)),
    );
    match found {
        Ok(found) => Some(found?.spec?.node_name?.into()),
        Err(failure) if failure.kind == FailureKind::Forbidden => {
            warn!(error = %failure, "may not ask for pods; grant get on pods, or set --pod-lookup=false");
            None
        }
        Err(failure) => {
            debug!(error = %failure, namespace = pod.namespace, pod = pod.name, "cannot ask for a pod");
            None
        }
    }
}

fn answer_with(
    world: &watch::Receiver<World>,
    node: Option<&str>,
    answer: oneshot::Sender<Option<Kubelet>>,
) {
    let nodes = world.borrow().nodes.clone();
    let kubelet = node
        .and_then(|node| nodes.kubelet(node))
        .map(|(node, port)| Kubelet { node, port });
    let _door_is_gone = answer.send(kubelet);
}
