//! Accepting connections from a listener. Accepting continues after the process has run out of
//! resources.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tracing::{info, warn};

use super::telemetry::LogRateLimit;

/// Pause after an accept error such as "too many open files", so that the loop does not spin.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A listener that retries after accept errors.
#[derive(Debug)]
pub struct RetryingListener<L> {
    listener: L,
    name: &'static str,
    /// Number of errors since the last connection.
    failures: u64,
    /// Whether the first of these errors was logged.
    is_logged: bool,
}

/// Callers can exhaust and release resources as often as they like.
static ACCEPT_ERRORS: LogRateLimit = LogRateLimit::new("listeners that cannot accept connections");

impl<L> RetryingListener<L> {
    /// Wraps `listener`. Log lines name it `name`.
    pub fn new(listener: L, name: &'static str) -> Self {
        Self {
            listener,
            name,
            failures: 0,
            is_logged: false,
        }
    }

    /// Handles the result of one accept call. Logs the first failure of a series, and the end of
    /// the series.
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
    /// Waits for the next connection and returns it with its remote address. Cancel-safe.
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
    /// Waits for the next connection. Cancel-safe.
    pub async fn accept(&mut self) -> UnixStream {
        loop {
            let accepted = self.listener.accept().await;
            if let Some((connection, _)) = self.handle_result(accepted).await {
                return connection;
            }
        }
    }
}
