//! The command `healthcheck`: one request to the server's meta port, for images without a shell.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Requests `/readyz` at the address on which the server listens. Returns why the server is not
/// ready.
pub(super) async fn check_ready(listen: &str) -> Result<(), String> {
    let address = dialable(listen);
    let (status, body) = tokio::time::timeout(TIMEOUT, read(&address))
        .await
        .unwrap_or_else(|_elapsed| Err(format!("no answer in {} s", TIMEOUT.as_secs())))
        .map_err(|problem| format!("{address}: {problem}"))?;
    if status == StatusCode::OK {
        return Ok(());
    }
    let waiting: Vec<&str> = body
        .lines()
        .filter_map(|line| line.strip_prefix("[-] "))
        .collect();
    Err(if waiting.is_empty() {
        format!("{address} answers {status}")
    } else {
        format!("waiting for {}", waiting.join(", "))
    })
}

async fn read(address: &str) -> Result<(StatusCode, String), String> {
    let socket = TcpStream::connect(address)
        .await
        .map_err(|error| error.to_string())?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(|error| error.to_string())?;
    let request = Request::get("/readyz?verbose")
        .header(http::header::HOST, "tunnel-server")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let exchange = async move {
        let answer = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), BODY_MAX_BYTES);
        let body = body.collect().await.map_err(|error| error.to_string())?;
        drop(sender);
        Ok((
            status,
            String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        ))
    };
    tokio::join!(exchange, connection).0
}

/// Converts a listen address to one that can be dialed: an unspecified address becomes loopback.
fn dialable(listen: &str) -> String {
    match listen.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            let loopback = if address.is_ipv4() {
                IpAddr::V4(Ipv4Addr::LOCALHOST)
            } else {
                IpAddr::V6(Ipv6Addr::LOCALHOST)
            };
            SocketAddr::new(loopback, address.port()).to_string()
        }
        Ok(_) | Err(_) => listen.to_owned(),
    }
}

/// Timeout of the check, shorter than the timeouts of container runtimes.
const TIMEOUT: Duration = Duration::from_secs(3);
const BODY_MAX_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use tokio::net::TcpListener;
    use tunnel_proto::process::meta::{Meta, Readiness};
    use tunnel_proto::process::shutdown::Shutdown;

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
