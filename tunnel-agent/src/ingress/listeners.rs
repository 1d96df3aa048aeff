//! The listeners for targets of the cloud. A listener whose address cannot be bound is a condition,
//! and is bound later. They accept in a drain, until another agent of the node takes over.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tracing::{Instrument, debug_span, info, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tcp::listen_freebind;

use super::Ingress;
use crate::config::CloudListener;
use crate::handover::HostLock;

/// Binds the listeners and accepts their connections until they close. Returns their addresses; those
/// of listeners that cannot be bound yet are as configured.
pub(crate) fn start(
    ingress: &Arc<Ingress>,
    listeners: &[CloudListener],
    host_lock: &Arc<HostLock>,
    readiness: &Readiness,
    shutdown: &Shutdown,
) -> Vec<SocketAddr> {
    let conditions = Arc::new(BindConditions {
        readiness: readiness.clone(),
        lines: Mutex::default(),
    });
    let mut addresses = Vec::new();
    for listener in listeners {
        let task = ListenerTask {
            listener: listener.clone(),
            ingress: ingress.clone(),
            conditions: conditions.clone(),
            host_lock: host_lock.clone(),
            shutdown: shutdown.clone(),
        };
        let bound = task.bind(true);
        let address = bound.as_ref().and_then(|bound| bound.local_addr().ok());
        addresses.push(address.unwrap_or(listener.address));
        shutdown.spawn_listener(task.run(bound));
    }
    addresses
}

struct ListenerTask {
    listener: CloudListener,
    ingress: Arc<Ingress>,
    conditions: Arc<BindConditions>,
    host_lock: Arc<HostLock>,
    shutdown: Shutdown,
}

impl ListenerTask {
    async fn run(self, mut bound: Option<TcpListener>) {
        let socket = loop {
            match bound {
                Some(socket) => break socket,
                None => {
                    self.host_lock.address_may_be_free().await;
                    bound = self.bind(false);
                }
            }
        };
        let mut socket = RetryingListener::new(socket, LISTENER);
        loop {
            let (tcp, peer) = socket.accept().await;
            let (ingress, target) = (self.ingress.clone(), self.listener.target.clone());
            let span = debug_span!("conn", node = %ingress.node, %peer);
            let conns = self.ingress.conns.clone();
            self.shutdown.spawn_service(conns.track_future(
                async move { ingress.serve(tcp, peer, &target).await }.instrument(span),
            ));
        }
    }

    /// Binds the listener, or sets its condition. Logs the failure if it is the first one.
    fn bind(&self, is_first: bool) -> Option<TcpListener> {
        let CloudListener { target, address } = &self.listener;
        let bound = listen_freebind(*address).and_then(|bound| Ok((bound.local_addr()?, bound)));
        match bound {
            Ok((address, bound)) => {
                info!(listener = LISTENER, name = %target, %address, "listening");
                self.conditions.set(self.listener.address, None);
                Some(bound)
            }
            // The other agent closes its listeners before this one has the lock. At first it is not
            // known yet whether the holder is such an agent.
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && (self.host_lock.is_standby()
                        || is_first && self.host_lock.has_other_holder()) =>
            {
                self.conditions.set(*address, None);
                None
            }
            Err(error) => {
                let problem = problem(&self.listener, &error);
                if is_first {
                    warn!(listener = LISTENER, name = %target, %address, error = problem, "cannot listen; trying again");
                }
                self.conditions.set(*address, Some(problem));
                None
            }
        }
    }
}

/// The condition of all listeners, with a line for each that cannot be bound.
struct BindConditions {
    readiness: Readiness,
    lines: Mutex<BTreeMap<SocketAddr, String>>,
}

impl BindConditions {
    fn set(&self, address: SocketAddr, line: Option<String>) {
        let mut lines = self.lines.lock();
        match line {
            Some(line) => lines.insert(address, line),
            None => lines.remove(&address),
        };
        let lines = lines.values().cloned().collect();
        self.readiness.set_conditions(CONDITION, lines);
    }
}

/// Describes why a listener cannot be bound, and by which program its port is usually used.
fn problem(listener: &CloudListener, error: &io::Error) -> String {
    let CloudListener { target, address } = listener;
    let hint = match (error.kind(), usual_user(address.port())) {
        (io::ErrorKind::AddrInUse, Some(user)) => {
            format!("; this is the port of {user}: stop it, or set another address")
        }
        (io::ErrorKind::AddrInUse, None) => {
            "; another process has it: stop it, or set another address".to_owned()
        }
        _ => String::new(),
    };
    format!("cannot listen on {address} (--cloud-listen {target}): {error}{hint}")
}

/// Returns the program of a node that uses the port by default.
fn usual_user(port: u16) -> Option<&'static str> {
    match port {
        10261 => Some("Yurthub's proxy"),
        10267 => Some("Yurthub's health checks"),
        10268 => Some("Yurthub's proxy over TLS"),
        10266 => Some("an agent's /readyz"),
        6443 => Some("kube-apiserver"),
        10250 => Some("the kubelet"),
        _ => None,
    }
}

/// Name of the condition in `/readyz?verbose`.
pub(crate) const CONDITION: &str = "cloud listeners";
/// Name of the listeners in log lines.
const LISTENER: &str = "cloud";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    use super::*;
    use crate::config::Limits;
    use crate::ingress::sessions::CloudSessions;
    use crate::metrics::Metrics;

    #[tokio::test(start_paused = true)]
    async fn taken_address_is_a_condition_until_it_can_be_bound() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
        let ingress = Arc::new(Ingress::new(
            "worker-1".parse().unwrap(),
            Arc::new(CloudSessions::default()),
            Arc::default(),
            &Limits::default(),
            Metrics::default(),
        ));
        let listener = CloudListener {
            target: "apiserver".parse().unwrap(),
            address,
        };
        let addresses = start(
            &ingress,
            &[listener],
            &HostLock::none(),
            &readiness,
            &shutdown,
        );
        assert_eq!(addresses, [address]);
        let conditions = readiness.conditions();
        assert_eq!(conditions.len(), 1, "{conditions:?}");
        let (condition, line) = &conditions[0];
        assert_eq!(*condition, CONDITION);
        assert!(line.contains("another process has it"), "{line}");

        drop(other);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(readiness.conditions().is_empty());
        let mut client = TcpStream::connect(address).await.unwrap();
        let read = client.read(&mut [0]).await.unwrap_err();
        assert_eq!(read.kind(), io::ErrorKind::ConnectionReset);

        shutdown.finish().await;
        let refused = TcpStream::connect(address).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn problem_says_whose_port_it_looks_like() {
        let in_use = io::Error::from(io::ErrorKind::AddrInUse);
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        for (listener, error, expected) in [
            (
                "a=127.0.0.1:10261",
                &in_use,
                "this is the port of Yurthub's proxy:",
            ),
            (
                "a=127.0.0.1:10268",
                &in_use,
                "Yurthub's proxy over TLS: stop it",
            ),
            ("a=127.0.0.1:7", &in_use, "another process has it"),
            (
                "a=127.0.0.1:7",
                &denied,
                "127.0.0.1:7 (--cloud-listen a): permission denied",
            ),
        ] {
            let listener: CloudListener = listener.parse().unwrap();
            let text = problem(&listener, error);
            assert!(text.contains(expected), "{text}");
        }
    }
}
