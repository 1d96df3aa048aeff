//! The connection to a target: a stream of the node's agent, TLS in it for the TLS doors, and an HTTP client on top.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use super::Doors;
use super::answer::{Failure, Outcome};
use super::record::Record;
use super::target::{Destination, Scheme};

/// A connection to a target, ready for one request.
#[derive(Debug)]
pub(super) struct Upstream {
    /// Sends the request.
    pub(super) sender: SendRequest<Incoming>,
    /// Drives the connection; dropping it closes the target's side.
    pub(super) connection: AbortOnDropHandle<()>,
}

/// Opens a stream to the destination and prepares it for a request. Does not wait for the agent's reply on plain
/// doors: the request follows the header at once, and a refusal surfaces as the request's error.
pub(super) async fn connect(
    doors: &Arc<Doors>,
    scheme: Scheme,
    destination: &Destination,
    trace_parent: String,
    record: &mut Record,
) -> Result<Upstream, Failure> {
    let place = destination.to_string();
    let kind = StreamKind::Target(destination.target.clone());
    let header = StreamHeader { kind, trace_parent };
    let began = Instant::now();
    let opened = doors
        .registry
        .open(&destination.node, &header, doors.limits.open)
        .await;
    let opened = opened.map_err(|error| Failure::from_open(&error, &place))?;
    record.opened(opened.session, opened.stream.bytes(), began.elapsed());
    match scheme {
        Scheme::Http => handshake(doors, opened.stream, &place).await,
        Scheme::Https => {
            // A name that ends in a number is no DNS name for TLS; the certificate is not judged by it here.
            let node = destination.node.to_string();
            let name = ServerName::try_from(node.clone())
                .or_else(|_number| ServerName::try_from(format!("{node}.invalid")))
                .map_err(|error| Failure::new(Outcome::TargetTls, format!("{place}: {error}")))?;
            let connecting =
                TlsConnector::from(doors.target_tls.clone()).connect(name, opened.stream);
            // The agent's reply has its own limit inside the stream; this one is for a target that is silent in TLS.
            let stream = match timeout(doors.limits.open + doors.limits.handshake, connecting).await
            {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return Err(tls_failure(&error, &place)),
                Err(_elapsed) => {
                    let text =
                        format!("{place}: the target did not finish the TLS handshake in time");
                    return Err(Failure::new(Outcome::TargetTimeout, text));
                }
            };
            handshake(doors, stream, &place).await
        }
    }
}

fn tls_failure(error: &std::io::Error, place: &str) -> Failure {
    let failure = Failure::from_stream(error, place, Outcome::TargetTls);
    match failure.outcome {
        // A target that cuts or ends the connection in the handshake does not speak TLS.
        Outcome::TargetBadResponse | Outcome::TargetTls => Failure::new(
            Outcome::TargetTls,
            format!("{place}: TLS with the target failed: {error}"),
        ),
        _ => failure,
    }
}

async fn handshake<S>(doors: &Arc<Doors>, stream: S, place: &str) -> Result<Upstream, Failure>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let built = Builder::new()
        .preserve_header_case(true)
        .handshake(TokioIo::new(stream))
        .await;
    let (sender, connection) =
        built.map_err(|error| Failure::from_stream(&error, place, Outcome::TargetBadResponse))?;
    let drive = async move {
        if let Err(error) = connection.with_upgrades().await {
            debug!(%error, "connection to a target ended");
        }
    };
    let connection = AbortOnDropHandle::new(doors.drivers.spawn(drive));
    Ok(Upstream { sender, connection })
}
