//! A CONNECT listener on a Unix socket, whose path the servers of a host share. The server that
//! started last has the path. It takes the path when it can serve, by a rename, so the path always
//! leads to a server. When that server stops or dies, another one takes the path.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;
use tracing::{Instrument, info, info_span, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::unix_socket::{self, SocketFile, SocketPermissions};

use super::caller_addr::{CallerAddr, CallerIdentity};
use super::context::{HttpListener, IngressContext};

/// Time between two checks whether the path leads to a server.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time for which a server that knows the nodes waits for its connections to the other
/// servers before it takes the path from one of them.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A path that servers of this host share, and the socket of this one if it has the path.
#[derive(Debug)]
pub struct SharedSocket {
    path: PathBuf,
    access: SocketPermissions,
    bound: Option<(UnixListener, SocketFile)>,
}

impl SharedSocket {
    /// Binds the socket, unless another server answers on the path. Must be called within a runtime.
    ///
    /// # Errors
    /// Returns an error if something other than a socket exists at the path, or the operating system
    /// refuses.
    pub fn bind(path: PathBuf, access: SocketPermissions) -> io::Result<Self> {
        let bound = match unix_socket::bind(&path, access) {
            Ok(bound) => Some(bound),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let path = path.display();
                info!(%path, "another server has the CONNECT socket; this one takes it when it can serve");
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            path,
            access,
            bound,
        })
    }

    /// Takes the path, from another server if need be. Cancel-safe.
    async fn take(&self) -> (UnixListener, SocketFile) {
        let mut is_reported = false;
        loop {
            match unix_socket::replace(&self.path, self.access) {
                Ok(bound) => return bound,
                Err(error) if !is_reported => {
                    warn!(%error, "cannot listen on the CONNECT socket, trying again");
                    is_reported = true;
                }
                Err(_reported) => {}
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Returns whether a process accepts connections on the path. Cancel-safe.
    async fn has_listener(&self) -> bool {
        match UnixStream::connect(&self.path).await {
            Ok(_connected) => true,
            Err(error) => !matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ),
        }
    }
}

impl IngressContext {
    /// Accepts connections on a Unix socket until the drain begins, for an HTTP listener without TLS.
    pub fn start_unix(self: &Arc<Self>, socket: SharedSocket, http_listener: Arc<HttpListener>) {
        let ingress = self.clone();
        self.shutdown.spawn_listener(async move {
            let drain = ingress.shutdown.drain().clone();
            tokio::select! {
                biased;
                () = drain.cancelled() => {}
                never = ingress.accept_unix(socket, http_listener) => match never {}
            }
        });
    }

    /// Accepts connections whenever this server has the path.
    async fn accept_unix(
        self: Arc<Self>,
        mut socket: SharedSocket,
        http_listener: Arc<HttpListener>,
    ) -> Infallible {
        let mut has_relieved = false;
        loop {
            let (listener, file) = match socket.bound.take() {
                Some(bound) => bound,
                None => {
                    self.wait_for_turn(&socket).await;
                    socket.take().await
                }
            };
            info!(listener = http_listener.name, path = %socket.path.display(), "listening");
            let mut accepting = RetryingListener::new(listener, http_listener.name);
            let mut lost = std::pin::pin!(self.path_lost(&socket, &file, &mut has_relieved));
            loop {
                let caller = tokio::select! {
                    caller = accepting.accept() => caller,
                    () = &mut lost => break,
                };
                let identity = caller
                    .peer_cred()
                    .map(|user| CallerIdentity::Uid(user.uid()));
                let (identity, addr) = (identity.unwrap_or_default(), CallerAddr::Unix);
                let serving =
                    self.clone()
                        .serve(http_listener.clone(), caller.into(), addr, identity);
                self.shutdown
                    .spawn_work(Box::pin(serving).instrument(info_span!("conn", peer = %addr)));
            }
        }
    }

    /// Waits until this server should take the path: when it knows the nodes and is connected to the
    /// servers that hold them, or when the path leads to no server.
    async fn wait_for_turn(&self, socket: &SharedSocket) {
        let deadline = async {
            self.routes.known().await;
            sleep(CONNECT_TIMEOUT).await;
        };
        let ready = async {
            while !(self.routes.are_known() && self.routing.is_connected_to_others())
                && socket.has_listener().await
            {
                sleep(CHECK_INTERVAL).await;
            }
        };
        tokio::select! {
            biased;
            // The other servers of this host have the path.
            () = self.shutdown.leaving().cancelled() => pending().await,
            () = deadline => {}
            () = ready => {}
        }
    }

    /// Waits until this server should take the path again: another one took it, and has stopped, or
    /// leaves.
    ///
    /// `has_relieved` is whether this server took the path because another one leaves. It does so once,
    /// since several servers would take the path in turns otherwise.
    async fn path_lost(&self, socket: &SharedSocket, file: &SocketFile, has_relieved: &mut bool) {
        loop {
            sleep(CHECK_INTERVAL).await;
            if self.shutdown.leaving().is_cancelled() {
                // The other servers of this host take the path.
                pending().await
            }
            let is_other_leaving = self.routing.is_other_leaving();
            *has_relieved &= is_other_leaving;
            if file.is_current().await {
                continue;
            }
            if is_other_leaving && !*has_relieved {
                *has_relieved = true;
                return;
            }
            if !socket.has_listener().await {
                return;
            }
        }
    }
}
