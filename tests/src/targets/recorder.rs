//! A target that records every request exactly as received, verified by the strict parser.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use tokio::io::AsyncWriteExt;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::byte_stream::ByteStream;
use crate::strict_http::{Parsed, StrictRequest, parse};

/// A target that answers each complete request with 200 and `METHOD TARGET by NAME`. Connections
/// stay open unless a request asks for a close. All input is recorded.
#[derive(Debug)]
pub struct RecordingTarget {
    listening: Listening,
    recorded: Arc<Mutex<Vec<RecordedInput>>>,
}

/// One input that reached a [`RecordingTarget`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordedInput {
    /// A request, and the number of its connection, from 0.
    Request(u64, Box<StrictRequest>),
    /// Bytes that are no request, and why.
    Fault(String),
    /// Bytes of an incomplete request: the peer ended or cut the connection.
    Unfinished(Vec<u8>),
}

target_methods!(RecordingTarget);

impl RecordingTarget {
    /// Starts a recorder on a free loopback port.
    pub async fn start(name: &str) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, name).await
    }

    pub async fn start_on(bind: SocketAddr, name: &str) -> Result<Self> {
        let recorded = Arc::new(Mutex::new(Vec::new()));
        let (log, name) = (Arc::clone(&recorded), name.to_owned());
        let connections = Arc::new(AtomicU64::new(0));
        let listening = Listening::start(bind, None, move |wire, traffic| {
            let recording = Recording {
                connection: connections.fetch_add(1, SeqCst),
                name: name.clone(),
                recorded: Arc::clone(&log),
            };
            recording.serve(wire, traffic)
        });
        Ok(Self {
            listening: listening.await?,
            recorded,
        })
    }

    /// Returns all input so far, in order.
    pub fn recorded(&self) -> Vec<RecordedInput> {
        self.recorded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<StrictRequest> {
        let requests = self
            .recorded()
            .into_iter()
            .filter_map(|recorded| match recorded {
                RecordedInput::Request(_, request) => Some(*request),
                RecordedInput::Fault(_) | RecordedInput::Unfinished(_) => None,
            });
        requests.collect()
    }
}

/// One connection of a recorder.
struct Recording {
    connection: u64,
    name: String,
    recorded: Arc<Mutex<Vec<RecordedInput>>>,
}

impl Recording {
    async fn serve(self, mut wire: ByteStream, traffic: Arc<Traffic>) -> io::Result<()> {
        loop {
            match parse(wire.ahead()) {
                Ok(Parsed::Whole(request, taken)) => {
                    let _taken = wire.ahead().split_to(taken);
                    traffic.count_request();
                    let answer = answer(&request, &self.name);
                    let closes = request.field("connection") == Some("close");
                    self.record(RecordedInput::Request(self.connection, request));
                    wire.write_all(&answer).await?;
                    wire.flush().await?;
                    if closes {
                        return wire.close().await;
                    }
                }
                Ok(Parsed::Partial) => {
                    let filled = wire.fill().await;
                    if !matches!(filled, Ok(1..)) {
                        if !wire.ahead().is_empty() {
                            let bytes = wire.ahead().to_vec();
                            self.record(RecordedInput::Unfinished(bytes));
                        }
                        return filled.map(drop);
                    }
                }
                Err(fault) => {
                    self.record(RecordedInput::Fault(fault));
                    return wire.close().await;
                }
            }
        }
    }

    fn record(&self, recorded: RecordedInput) {
        self.recorded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(recorded);
    }
}

fn answer(request: &StrictRequest, name: &str) -> Vec<u8> {
    let StrictRequest { method, target, .. } = request;
    let body = format!("{method} {target} by {name}\n");
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    let body = if method == "HEAD" { "" } else { &body };
    [head.as_bytes(), body.as_bytes()].concat()
}
