//! Pods as requests of kube-apiserver to a kubelet name them, and the answer of a lookup of their node.

use std::fmt;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pod {
    pub namespace: String,
    /// Name of the Pod in the API. A static Pod has such a name as well.
    pub name: String,
}

impl fmt::Display for Pod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.namespace, self.name)
    }
}

/// A request path in the kubelet's API (Kubernetes `pkg/kubelet/server/server.go`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeletPath {
    /// `/exec/NAMESPACE/POD/...`, `/attach/...`, `/portForward/...` or `/containerLogs/...`.
    Stream(Pod),
    /// One of these paths in which the namespace or the Pod name is missing or invalid.
    Malformed,
    /// Any path that is not one of these.
    Other,
}

impl KubeletPath {
    /// Parses a path without its query.
    pub fn of(path: &str) -> Self {
        let mut parts = path.strip_prefix('/').unwrap_or_default().split('/');
        let (Some("exec" | "attach" | "portForward" | "containerLogs"), namespace, name) =
            (parts.next(), parts.next(), parts.next())
        else {
            return Self::Other;
        };
        match (namespace, name) {
            (Some(namespace), Some(name))
                if is_label(namespace) && namespace.len() <= LABEL_MAX && is_subdomain(name) =>
            {
                Self::Stream(Pod {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                })
            }
            _ => Self::Malformed,
        }
    }
}

/// Returns whether a text is a valid Pod name (Kubernetes `IsDNS1123Subdomain`, which does not
/// limit the length of a label).
fn is_subdomain(text: &str) -> bool {
    text.len() <= SUBDOMAIN_MAX && text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(is_inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Reason why the node of a Pod is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodLookupError {
    /// The API has no such Pod.
    #[error("there is no such pod")]
    NotFound,
    /// The Pod is not scheduled to a node.
    #[error("the pod is bound to no node")]
    Unbound,
    /// The Pod's node has a name that cannot be addressed.
    #[error("node name {0:?} is not valid for an agent")]
    UnusableNode(String),
    /// The server's ServiceAccount lacks the required permission.
    #[error(
        "the API server refuses; grant the tunnel server's ServiceAccount the right 'pods get' (verb get on resource pods, \
         all namespaces), or start kube-apiserver with --kubelet-certificate-authority, which needs no look-up"
    )]
    Forbidden,
    /// The API server is unavailable.
    #[error("the API server cannot be asked: {0}")]
    Unavailable(String),
    /// The API server did not answer in time.
    #[error("no answer of the API server within {} s", ANSWER_TIMEOUT.as_secs())]
    Timeout,
}

/// Time that a request waits for an answer, including its time in the queue. The limit covers two
/// API calls that time out.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest DNS subdomain (RFC 1123), in bytes.
const SUBDOMAIN_MAX: usize = 253;
/// Longest DNS label, in bytes.
const LABEL_MAX: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_paths_name_their_pod() {
        for (path, pod) in [
            ("/exec/default/web-0/nginx", "default/web-0"),
            ("/exec/default/web-0/0a1b/nginx", "default/web-0"),
            ("/attach/kube-system/a.b/c", "kube-system/a.b"),
            ("/containerLogs/ns/pod/c", "ns/pod"),
            ("/portForward/ns/pod", "ns/pod"),
            // The API name of a static Pod ends with the name of its node.
            ("/exec/ns/etcd-edge.site-3/etcd", "ns/etcd-edge.site-3"),
            // Names that look like addresses are valid Pod names too.
            ("/exec/1/10.0.0.1/c", "1/10.0.0.1"),
        ] {
            let KubeletPath::Stream(found) = KubeletPath::of(path) else {
                panic!("{path}");
            };
            assert_eq!(found.to_string(), pod, "{path}");
        }
        let long = format!("/exec/ns/{}/c", "x".repeat(100));
        assert!(matches!(KubeletPath::of(&long), KubeletPath::Stream(_)));
        let too_long = format!("/exec/ns/{}/c", "x".repeat(254));
        let long_namespace = format!("/exec/{}/pod/c", "x".repeat(64));
        let malformed = "/exec /exec/ /portForward/ns /portForward/ns/ /exec//web-0/nginx \
                         /exec/../web-0/nginx /exec/ns/../nginx /exec/a.b/web-0/nginx \
                         /exec/NS/web-0/nginx /exec/ns/web%2f0/nginx /exec/ns/-web/nginx \
                         /exec/ns/a..b/nginx";
        for path in [&*too_long, &long_namespace]
            .into_iter()
            .chain(malformed.split(' '))
        {
            assert_eq!(KubeletPath::of(path), KubeletPath::Malformed, "{path}");
        }
        // The first path is empty.
        let other = " / * /metrics/cadvisor /logs/ns/pod /Exec/ns/pod/c /%65xec/ns/pod/c \
                     //exec/ns/pod/c /run/ns/pod/c";
        for path in other.split(' ') {
            assert_eq!(KubeletPath::of(path), KubeletPath::Other, "{path}");
        }
    }
}
