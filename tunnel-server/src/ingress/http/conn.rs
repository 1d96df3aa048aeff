//! The state of a caller's HTTP connection, which its requests share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tunnel_proto::relay::PollCut;
use tunnel_routing::policy::Policy;

use super::timeouts::ConnTimeouts;
use super::upstream::UpstreamPool;
use crate::ingress::connect::basic_auth::Credentials;
use crate::ingress::context::{CallerConn, HttpListener, IngressContext};

/// A caller's connection that carries a byte stream after an upgrade, such as after a 101.
pub(in crate::ingress) type UpgradedCaller = Box<dyn CallerIo>;

/// Resolves once hyper has written the head that grants the upgrade. Fails if the connection ends
/// before that.
pub(in crate::ingress) type CallerUpgrade = oneshot::Receiver<UpgradedCaller>;

/// The I/O traits of an upgraded connection.
pub(in crate::ingress) trait CallerIo:
    AsyncRead + AsyncWrite + PollCut + Send + Unpin
{
}

impl<S: AsyncRead + AsyncWrite + PollCut + Send + Unpin> CallerIo for S {}

/// A caller's HTTP connection, plain or inside TLS.
pub(in crate::ingress) struct HttpConn {
    pub(in crate::ingress) ingress: Arc<IngressContext>,
    pub(in crate::ingress) listener: Arc<HttpListener>,
    pub(in crate::ingress) caller: CallerConn,
    /// The last credentials that passed authentication, on a CONNECT listener that requires them.
    pub(in crate::ingress) credentials: Mutex<Option<Credentials>>,
    /// A CONNECT is in progress. The server then forwards the end of the caller's direction to the
    /// target.
    pub(in crate::ingress) is_connecting: AtomicBool,
    /// The connection closes after the next response.
    pub(in crate::ingress) closes: AtomicBool,
    /// The request in progress has a large head. Its connection to the target has buffers for that
    /// head, and serves no other request.
    pub(in crate::ingress) has_large_head: AtomicBool,
    pub(in crate::ingress) timeouts: Arc<ConnTimeouts>,
    pub(in crate::ingress) pool: Arc<UpstreamPool>,
    /// Receives the connection once hyper has finished with it, if an upgrade was granted.
    pub(in crate::ingress) upgrade: Mutex<Option<oneshot::Sender<UpgradedCaller>>>,
}

impl HttpConn {
    /// Returns whether the caller has client-certificate delegation: connections to targets use the
    /// server's client certificate. The names of such callers may change while the connection is open.
    pub(in crate::ingress) fn has_delegation(&self, policy: &Policy) -> bool {
        self.caller.has_delegation && policy.delegation.still_admits(&self.caller.identity)
    }

    /// Requests the connection once hyper has written the response to the current request. That
    /// response must grant an upgrade.
    pub(in crate::ingress) fn take_upgrade(&self) -> CallerUpgrade {
        let (granted, upgrade) = oneshot::channel();
        *self.upgrade.lock() = Some(granted);
        upgrade
    }
}
