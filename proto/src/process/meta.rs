//! The meta port: `/livez`, `/readyz[?verbose]`, `/metrics`, and what a binary adds. Plain HTTP/1.1, read-only.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tracing::debug;

use super::accept::Accepting;
use super::places::{PlaceLimits, Places};
use super::shutdown::Shutdown;

/// Connections at once; newer ones push out the oldest. Probes and one or two scrapers need a handful.
const CONNECTIONS: PlaceLimits = PlaceLimits {
    per_source: 32,
    total: 64,
};
/// A caller must send its request head within this time.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Longest answer that [`get`] takes.
const ANSWER_MAX_BYTES: usize = 1024 * 1024;

/// An answer of the meta port.
pub type Answer = Response<Full<Bytes>>;

/// An extra endpoint: called with the caller's address.
pub type Endpoint = Box<dyn Fn(SocketAddr) -> Answer + Send + Sync>;

/// What the meta port serves.
pub struct Meta {
    readiness: Readiness,
    metrics: Registry,
    endpoints: Vec<(&'static str, Endpoint)>,
}

impl std::fmt::Debug for Meta {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Meta")
            .field("readiness", &self.readiness)
            .finish_non_exhaustive()
    }
}

impl Meta {
    /// Serves the readiness and metrics of a process.
    #[must_use]
    pub fn new(readiness: Readiness, metrics: Registry) -> Self {
        Self {
            readiness,
            metrics,
            endpoints: Vec::new(),
        }
    }

    /// Adds an endpoint for GET on exactly `path`.
    #[must_use]
    pub fn with(mut self, path: &'static str, endpoint: Endpoint) -> Self {
        self.endpoints.push((path, endpoint));
        self
    }

    /// Serves until `stop`.
    pub fn start(self, listener: TcpListener, shutdown: &Shutdown) {
        let meta = Arc::new(self);
        let places = Places::new(CONNECTIONS);
        let state = shutdown.clone();
        shutdown.spawn_listener(async move {
            let mut accepting = Accepting::new(listener, "meta");
            loop {
                let (socket, peer) = accepting.next().await;
                let Ok(place) = places.enter(peer.ip()) else {
                    debug!(%peer, "meta connection turned away");
                    continue;
                };
                let meta = meta.clone();
                state.spawn_service(async move {
                    tokio::select! {
                        () = meta.serve(socket, peer) => {}
                        () = place.evicted() => debug!(%peer, "meta connection gave way to a newer one"),
                    }
                });
            }
        });
    }

    async fn serve(&self, socket: TcpStream, peer: SocketAddr) {
        let service = service_fn(async |request| Ok::<_, Infallible>(self.answer(&request, peer)));
        let mut server = hyper::server::conn::http1::Builder::new();
        server
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_LIMIT);
        if let Err(error) = server.serve_connection(TokioIo::new(socket), service).await {
            debug!(%error, %peer, "meta connection ended");
        }
    }

    fn answer(&self, request: &Request<Incoming>, peer: SocketAddr) -> Answer {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET here\n");
        }
        match request.uri().path() {
            "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(request.uri().query() == Some("verbose")),
            "/metrics" => self.metrics(),
            path => match self.endpoints.iter().find(|(known, _)| *known == path) {
                Some((_, endpoint)) => endpoint(peer),
                None => text(
                    StatusCode::NOT_FOUND,
                    "not found; there are /livez /readyz /metrics\n",
                ),
            },
        }
    }

    fn ready(&self, verbose: bool) -> Answer {
        let (waiting, done) = self.readiness.read();
        let status = if waiting.is_empty() {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        let mut body = String::new();
        if verbose {
            for (mark, parts) in [("+", &done), ("-", &waiting)] {
                for part in parts {
                    let _infallible = writeln!(body, "[{mark}] {part}");
                }
            }
            for (part, line) in self.readiness.notes() {
                let _infallible = writeln!(body, "[!] {part}: {line}");
            }
        }
        body.push_str(if waiting.is_empty() {
            "ok\n"
        } else {
            "not ready\n"
        });
        text(status, body)
    }

    fn metrics(&self) -> Answer {
        let mut body = String::new();
        if prometheus_client::encoding::text::encode(&mut body, &self.metrics).is_err() {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics cannot be encoded\n",
            );
        }
        let mut answer = text(StatusCode::OK, body);
        let kind = http::HeaderValue::from_static(
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        );
        answer
            .headers_mut()
            .insert(http::header::CONTENT_TYPE, kind);
        answer
    }
}

/// A plain text answer.
#[must_use]
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let kind = http::HeaderValue::from_static("text/plain; charset=utf-8");
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, kind);
    answer
}

/// A JSON answer.
#[must_use]
pub fn json(status: StatusCode, value: &serde_json::Value) -> Answer {
    let mut answer = text(status, format!("{value}\n"));
    let kind = http::HeaderValue::from_static("application/json");
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, kind);
    answer
}

/// Asks the meta port at `address` for `path`, within 5 s. Cancel-safe.
///
/// # Errors
/// When there is no answer, or none that is plain text of at most 1 MiB.
pub async fn get(address: SocketAddr, path: &str) -> io::Result<(StatusCode, String)> {
    tokio::time::timeout(HEAD_LIMIT, ask(address, path))
        .await
        .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

async fn ask(address: SocketAddr, path: &str) -> io::Result<(StatusCode, String)> {
    let socket = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    let request = Request::get(path)
        .header(http::header::HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(io::Error::other)?;
    let exchange = async move {
        let answer = sender
            .send_request(request)
            .await
            .map_err(io::Error::other)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES)
            .collect()
            .await
            .map_err(io::Error::other)?;
        Ok((
            status,
            String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        ))
    };
    // The connection ends with its sender; what it says is in the exchange's result.
    let (answered, _connection_over) = tokio::join!(exchange, connection);
    answered
}

/// Readiness by named blocks: the process is ready when no block is held.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<ReadinessState>>);

#[derive(Debug, Default)]
struct ReadinessState {
    waiting: BTreeSet<&'static str>,
    done: BTreeSet<&'static str>,
    notes: BTreeMap<&'static str, Vec<String>>,
}

impl Readiness {
    /// Holds readiness back until the block is dropped.
    #[must_use]
    pub fn block(&self, part: &'static str) -> ReadinessBlock {
        self.change(|state| {
            state.waiting.insert(part);
            state.done.remove(part);
        });
        ReadinessBlock {
            readiness: self.clone(),
            part,
        }
    }

    /// The parts that are waited for, and those that are ready.
    #[must_use]
    pub fn read(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (
            state.waiting.iter().copied().collect(),
            state.done.iter().copied().collect(),
        )
    }

    /// What an operator should know of a part, one line each, without holding readiness back. Replaces what was said of
    /// the part before.
    pub fn note(&self, part: &'static str, lines: Vec<String>) {
        self.change(|state| {
            if lines.is_empty() {
                state.notes.remove(part);
            } else {
                state.notes.insert(part, lines);
            }
        });
    }

    /// What was said of the parts, line by line.
    #[must_use]
    pub fn notes(&self) -> Vec<(&'static str, String)> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let notes = state.notes.iter();
        notes
            .flat_map(|(part, lines)| lines.iter().map(|line| (*part, line.clone())))
            .collect()
    }

    fn change(&self, change: impl FnOnce(&mut ReadinessState)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// See [`Readiness::block`].
#[derive(Debug)]
pub struct ReadinessBlock {
    readiness: Readiness,
    part: &'static str,
}

impl Drop for ReadinessBlock {
    fn drop(&mut self) {
        self.readiness.change(|state| {
            state.waiting.remove(self.part);
            state.done.insert(self.part);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn readiness_is_answered_and_can_be_asked_for() {
        let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
        let block = readiness.block("session");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Meta::new(readiness.clone(), Registry::default()).start(listener, &shutdown);
        let (status, body) = get(address, "/readyz?verbose").await.unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(body, "[-] session\nnot ready\n");
        drop(block);
        readiness.note("ports", vec!["\"abc\" is no port".into()]);
        let (status, body) = get(address, "/readyz?verbose").await.unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, "[+] session\n[!] ports: \"abc\" is no port\nok\n");
        readiness.note("ports", Vec::new());
        let (status, body) = get(address, "/readyz").await.unwrap();
        assert_eq!((status, body.as_str()), (StatusCode::OK, "ok\n"));
        assert_eq!(get(address, "/x").await.unwrap().0, StatusCode::NOT_FOUND);
        shutdown.finish().await;
        assert!(get(address, "/readyz").await.is_err());
    }

    #[test]
    fn readiness_waits_for_every_block() {
        let readiness = Readiness::default();
        let first = readiness.block("listeners");
        let second = readiness.block("session");
        drop(first);
        assert_eq!(readiness.read(), (vec!["session"], vec!["listeners"]));
        drop(second);
        assert!(readiness.read().0.is_empty());
        let _again = readiness.block("session");
        assert_eq!(readiness.read().0, ["session"]);
    }
}
