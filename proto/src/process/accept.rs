//! Taking connections from a listener, also when the process has run out of what a connection needs.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tracing::{info, warn};

use super::telemetry::LogRateLimit;

/// Pause after an accept error such as "too many open files", so that the loop does not spin.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A listener that gives connections and no errors.
#[derive(Debug)]
pub struct RetryingListener<L> {
    listener: L,
    /// For logs.
    name: &'static str,
    /// Errors since the last connection.
    failures: u64,
    /// The first of them has a line.
    is_logged: bool,
}

/// Callers can take what connections need and give it back as often as they like.
static ACCEPT_ERRORS: LogRateLimit = LogRateLimit::new("listeners that cannot accept connections");

impl<L> RetryingListener<L> {
    /// Takes connections from a listener of this name.
    #[must_use]
    pub fn new(listener: L, name: &'static str) -> Self {
        Self {
            listener,
            name,
            failures: 0,
            is_logged: false,
        }
    }

    /// Judges one attempt; a failure is told once, and its end.
    async fn handle_result<T>(&mut self, accepted: io::Result<T>) -> Option<T> {
        match accepted {
            Ok(connection) => {
                if std::mem::take(&mut self.is_logged) {
                    info!(
                        listener = self.name,
                        failures = self.failures,
                        "accepting connections again"
                    );
                }
                self.failures = 0;
                Some(connection)
            }
            Err(error) => {
                if self.failures == 0 {
                    self.is_logged = ACCEPT_ERRORS.admit();
                }
                if self.failures == 0 && self.is_logged {
                    warn!(
                        %error,
                        listener = self.name,
                        "cannot accept connections; new connections wait, open connections continue"
                    );
                }
                self.failures += 1;
                tokio::time::sleep(RETRY_DELAY).await;
                None
            }
        }
    }
}

impl RetryingListener<TcpListener> {
    /// The next connection and where it comes from. Cancel-safe.
    pub async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            let accepted = self.listener.accept().await;
            if let Some(connection) = self.handle_result(accepted).await {
                return connection;
            }
        }
    }
}

impl RetryingListener<UnixListener> {
    /// The next connection. Cancel-safe.
    pub async fn accept(&mut self) -> UnixStream {
        loop {
            let accepted = self.listener.accept().await;
            if let Some((connection, _)) = self.handle_result(accepted).await {
                return connection;
            }
        }
    }
}
