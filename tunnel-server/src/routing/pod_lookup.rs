//! Lookup of the node that a Pod runs on. HTTPS listeners send queries for kubelet paths, and the
//! controllers of the cluster answer them.

use tokio::sync::{mpsc, oneshot};
use tunnel_proto::wire::name::NodeName;
use tunnel_routing::pod::ANSWER_TIMEOUT;

pub use tunnel_routing::pod::{Pod, PodLookupError};

/// Queries that fit into the queue. Further callers wait until the queue has room.
const QUEUE_MAX: usize = 64;

/// A query with the channel for its answer.
#[derive(Debug)]
pub struct PodLookupRequest {
    /// The Pod to look up.
    pub pod: Pod,
    /// Receives the node, by the name of its Node object.
    pub answer: oneshot::Sender<Result<NodeName, PodLookupError>>,
}

/// A client that looks up the nodes of Pods. Clones share the queue.
#[derive(Debug, Clone)]
pub struct PodResolver(mpsc::Sender<PodLookupRequest>);

impl PodResolver {
    /// Creates a resolver and the receiver of its queries.
    pub fn new() -> (Self, mpsc::Receiver<PodLookupRequest>) {
        let (requests, receiver) = mpsc::channel(QUEUE_MAX);
        (Self(requests), receiver)
    }

    /// Returns the node that a Pod is bound to, within 10 s. Cancel-safe: a query whose caller is
    /// gone is dropped.
    ///
    /// # Errors
    /// Returns a [`PodLookupError`] if the node is unknown.
    pub async fn node_of(&self, pod: Pod) -> Result<NodeName, PodLookupError> {
        let (answer, answered) = oneshot::channel();
        let asking = async {
            let stopped = || PodLookupError::Unavailable("the server is stopping".to_owned());
            let sent = self.0.send(PodLookupRequest { pod, answer }).await;
            sent.map_err(|_closed| stopped())?;
            answered.await.map_err(|_dropped| stopped())?
        };
        let waited = tokio::time::timeout(ANSWER_TIMEOUT, asking).await;
        waited.unwrap_or(Err(PodLookupError::Timeout))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn pod() -> Pod {
        Pod {
            namespace: "default".into(),
            name: "web-0".into(),
        }
    }

    #[tokio::test]
    async fn question_without_an_answering_side_is_an_error() {
        let (finder, requests) = PodResolver::new();
        drop(requests);
        let answer = finder.node_of(pod()).await;
        let is_unavailable = matches!(answer, Err(PodLookupError::Unavailable(_)));
        assert!(is_unavailable, "{answer:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn more_questions_than_the_queue_holds_wait_and_are_answered() {
        let (finder, mut requests) = PodResolver::new();
        let mut asking = tokio::task::JoinSet::new();
        for _ in 0..3 * QUEUE_MAX {
            let finder = finder.clone();
            asking.spawn(async move { finder.node_of(pod()).await });
        }
        let answering = async {
            for _ in 0..3 * QUEUE_MAX {
                let request = requests.recv().await.unwrap();
                let node = "worker-1".parse().unwrap();
                request.answer.send(Ok(node)).unwrap();
            }
        };
        let (answers, ()) = tokio::join!(asking.join_all(), answering);
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_an_answer_is_bounded() {
        let (finder, _questions) = PodResolver::new();
        let began = tokio::time::Instant::now();
        assert_eq!(finder.node_of(pod()).await, Err(PodLookupError::Timeout));
        let waited = began.elapsed();
        let latest = ANSWER_TIMEOUT + Duration::from_millis(10);
        assert!(waited >= ANSWER_TIMEOUT && waited < latest, "{waited:?}");
    }
}
