//! The command `healthcheck`: one request to the server's meta port, for images without a shell.

use std::net::SocketAddr;
use std::time::Duration;

use http::StatusCode;
use tunnel_doctor::waits_for;
use tunnel_process::meta;

/// Requests `/readyz` at the address on which the server listens. Returns why the server is not
/// ready.
pub(super) async fn check_ready(listen: &str) -> Result<(), String> {
    let address = dialable(listen);
    let (status, body) = tokio::time::timeout(TIMEOUT, meta::get(&address, "/readyz?verbose"))
        .await
        .map_err(|_elapsed| format!("no answer in {} s", TIMEOUT.as_secs()))
        .and_then(|answer| answer.map_err(|error| error.to_string()))
        .map_err(|problem| format!("{address}: {problem}"))?;
    if status == StatusCode::OK {
        return Ok(());
    }
    let waiting: Vec<&str> = waits_for(body.lines()).collect();
    Err(if waiting.is_empty() {
        format!("{address} answers {status}")
    } else {
        format!("waiting for {}", waiting.join(", "))
    })
}

/// Converts a listen address to one that can be dialed: an unspecified address becomes loopback.
fn dialable(listen: &str) -> String {
    listen.parse::<SocketAddr>().map_or_else(
        |_is_name| listen.to_owned(),
        |address| meta::dialable(address).to_string(),
    )
}

/// Timeout of the check, shorter than the timeouts of container runtimes.
const TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use tokio::net::TcpListener;
    use tunnel_process::meta::{Meta, Readiness};
    use tunnel_process::shutdown::Shutdown;

    use super::super::VerbError;
    use super::*;

    #[test]
    fn any_address_is_asked_on_loopback() {
        assert_eq!(dialable("0.0.0.0:1"), "127.0.0.1:1");
        assert_eq!(dialable("[::]:1"), "[::1]:1");
        assert_eq!(dialable("10.0.0.1:1"), "10.0.0.1:1");
        assert_eq!(dialable("localhost:1"), "localhost:1");
    }

    #[tokio::test]
    async fn readiness_is_printed_with_what_it_waits_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
        let block = readiness.block("listeners");
        Meta::new(readiness, Registry::default()).start(listener, &shutdown);

        let waiting = VerbError::NotReady(check_ready(&address).await.unwrap_err());
        assert_eq!(waiting.to_string(), "not ready: waiting for listeners");
        assert_eq!(waiting.exit_code(), 1);
        drop(block);
        check_ready(&address).await.unwrap();
        shutdown.finish().await;
        assert!(check_ready(&address).await.is_err());
    }
}
