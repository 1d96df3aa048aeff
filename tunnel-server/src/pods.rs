//! Which node a pod runs on: a question that the doors ask for kubelet paths, and the cluster's side answers.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tunnel_proto::wire::name::{NodeName, Port};

/// Questions that wait to be taken; a door that finds no room goes without an answer.
const QUESTIONS_MAX: usize = 64;
/// How long a door waits for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Pod {
    /// The pod of a kubelet's streaming path: `/exec/NAMESPACE/POD/...`, `/attach/...`, `/containerLogs/...`,
    /// `/portForward/...` (kubelet `pkg/kubelet/server/server.go`); none for other paths, or where namespace or pod are
    /// not names of Kubernetes.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        let mut parts = path.strip_prefix('/')?.split('/');
        let is_streaming = matches!(
            parts.next()?,
            "exec" | "attach" | "containerLogs" | "portForward"
        );
        let (namespace, name) = (parts.next()?, parts.next()?);
        let is_name = |text: &str| {
            text.parse::<NodeName>()
                .is_ok_and(|parsed| parsed.as_str() == text)
        };
        // A name that reads as an address is no node's, but may be a pod's; such pods are not looked up.
        (is_streaming && is_name(namespace) && !namespace.contains('.') && is_name(name)).then(
            || Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            },
        )
    }
}

/// The kubelet of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// The node.
    pub node: NodeName,
    /// Its port.
    pub port: Port,
}

/// A question with the way back.
#[derive(Debug)]
pub struct Question {
    /// The pod.
    pub pod: Pod,
    /// Where the answer goes; none when the cluster does not know the pod or cannot be asked.
    pub answer: oneshot::Sender<Option<Kubelet>>,
}

/// Asks for pods' nodes. Clones ask the same side.
#[derive(Debug, Clone)]
pub struct PodFinder(mpsc::Sender<Question>);

impl PodFinder {
    /// A finder and the questions it asks.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Question>) {
        let (questions, taken) = mpsc::channel(QUESTIONS_MAX);
        (Self(questions), taken)
    }

    /// The kubelet that runs a pod, within 5 s; `None` when that cannot be told. Cancel-safe.
    pub async fn kubelet_of(&self, pod: Pod) -> Option<Kubelet> {
        let (answer, answered) = oneshot::channel();
        self.0.try_send(Question { pod, answer }).ok()?;
        tokio::time::timeout(ANSWER_LIMIT, answered)
            .await
            .ok()?
            .ok()?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_paths_name_their_pod() {
        for (path, pod) in [
            ("/exec/default/web-0/nginx", Some(("default", "web-0"))),
            ("/attach/kube-system/a.b/c", Some(("kube-system", "a.b"))),
            ("/containerLogs/ns/pod/c", Some(("ns", "pod"))),
            ("/portForward/ns/pod", Some(("ns", "pod"))),
            ("/portForward/ns", None),
            ("/exec/../web-0/nginx", None),
            ("/exec/a.b/web-0/nginx", None),
            ("/exec/NS/web-0/nginx", None),
            ("/exec/ns/web%2f0/nginx", None),
            ("/metrics/cadvisor", None),
            ("/logs/ns/pod", None),
        ] {
            let found = Pod::of_path(path);
            let found = found.as_ref().map(|pod| (&*pod.namespace, &*pod.name));
            assert_eq!(found, pod, "{path}");
        }
    }

    #[tokio::test]
    async fn question_without_an_answering_side_is_answered_with_nothing() {
        let (finder, questions) = PodFinder::new();
        let pod = Pod::of_path("/exec/ns/pod/c").unwrap();
        drop(questions);
        assert_eq!(finder.kubelet_of(pod).await, None);
    }
}
