//! The record of a stream: plain data that is complete when the stream ends, and the only place that
//! passes it to its sinks: metrics and recent requests, and the access log.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

use tokio::time::Instant;
use tracing::info;

use crate::transport::ByteCount;
use crate::wire::code::RefusalCode;
use crate::wire::header::StreamKind;
use crate::wire::name::{CloudTarget, NodeName, Port, ReplicaId, SessionId};
use tunnel_process::telemetry::{ACCESS, LineForm, StreamStage, non_empty};

/// How a stream ended, in one word for metrics and logs.
pub trait EndCode: Copy {
    /// Returns the word.
    fn label(self) -> &'static str;
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamEnd {
    /// Both sides ended cleanly.
    Ok,
    /// One side stopped reading before all data was delivered.
    ReaderClosed,
    /// The tunnel's side was cut.
    CutByPeer,
    /// The target's side was cut.
    CutByTarget,
    /// The local client of a target of the cloud was cut.
    CutByCaller,
    /// The agent stopped before the stream had ended.
    AgentStopping,
    /// The server stopped before the stream had ended.
    ServerStopping,
    /// The target, or the other end's reader, read nothing for 10 s while other streams waited for
    /// the memory.
    ReaderStalled,
    /// No session could open a stream to a target of the cloud.
    NoSession,
    /// The server did not accept a stream to a target of the cloud in time.
    NoReply,
    /// The header did not arrive, or violated the protocol.
    NoHeader,
    /// The stream was refused with a reply.
    Refused(RefusalCode),
}

impl StreamEnd {
    /// Returns the word for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ReaderClosed => "reader_closed",
            Self::CutByPeer => "cut_by_peer",
            Self::CutByTarget => "cut_by_target",
            Self::CutByCaller => "cut_by_caller",
            Self::AgentStopping => "agent_stopping",
            Self::ServerStopping => "server_stopping",
            Self::ReaderStalled => "reader_stalled",
            Self::NoSession => "no_session",
            Self::NoReply => "no_reply",
            Self::NoHeader => "no_header",
            Self::Refused(code) => code.label(),
        }
    }

    /// Returns how far a stream with this end came.
    pub fn stage(self) -> StreamStage {
        match self {
            Self::Ok => StreamStage::Opened { is_ok: true },
            Self::ReaderClosed
            | Self::ReaderStalled
            | Self::CutByPeer
            | Self::CutByTarget
            | Self::CutByCaller
            | Self::AgentStopping
            | Self::ServerStopping => StreamStage::Opened { is_ok: false },
            Self::NoSession | Self::NoReply | Self::Refused(_) => StreamStage::Refused,
            Self::NoHeader => StreamStage::Unknown,
        }
    }
}

impl EndCode for StreamEnd {
    fn label(self) -> &'static str {
        Self::label(self)
    }
}

/// The totals and the end of a relay.
#[derive(Debug)]
pub struct Relayed {
    /// How the relay ended.
    pub end: StreamEnd,
    /// Bytes that this process received in the tunnel; over a second server, from the agent.
    pub bytes_in: u64,
    /// Bytes that this process sent into the tunnel; over a second server, to the agent.
    pub bytes_out: u64,
    /// The error of a cut; empty without one.
    pub detail: String,
}

/// The other end of the connection on which a stream was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordedPeer {
    /// A TCP connection from this address.
    Tcp(SocketAddr),
    /// A connection over a Unix socket of this host.
    Unix,
    /// Another server.
    Server(ReplicaId),
}

impl Display for RecordedPeer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix => formatter.write_str("unix"),
            Self::Server(replica) => replica.fmt(formatter),
        }
    }
}

/// All that is known of a stream or request when it ends, as plain data for its sinks.
#[derive(Debug, Clone)]
pub struct StreamRecord<E = StreamEnd> {
    /// Time at which the stream was accepted.
    pub began: Instant,
    /// The listener that accepted the stream, if there are several.
    pub listener: Option<&'static str>,
    /// The other end of the connection, if it is not the agent or its server.
    pub peer: Option<RecordedPeer>,
    /// Identity that the caller has proved, or empty.
    pub caller: String,
    /// Method and path, or the name of the TCP service, or empty.
    pub request: String,
    /// The node whose agent has a part in the stream, as soon as it is known.
    pub node: Option<NodeName>,
    /// The port that the opener asks for, as soon as it is known.
    pub port: Option<Port>,
    /// `edge` for a stream to a target of the cloud.
    pub direction: Option<&'static str>,
    /// The target of the cloud.
    pub name: Option<CloudTarget>,
    /// The target, or empty.
    pub target: String,
    /// The address that was dialed, or empty.
    pub dialed: String,
    /// The session that carries the stream.
    pub session: Option<SessionId>,
    /// The server that forwards the stream to the agent.
    pub via: Option<ReplicaId>,
    /// Trace context of the opener, or empty.
    pub trace_parent: String,
    /// The status that the caller received.
    pub status: Option<u16>,
    /// The request was sent once more because its session was lost.
    pub is_retried: bool,
    /// How the stream ended.
    pub end: E,
    /// Reason of the end, or empty.
    pub detail: String,
    /// Bytes that this process received in the tunnel.
    pub bytes_in: u64,
    /// Bytes that this process sent into the tunnel.
    pub bytes_out: u64,
}

/// The sinks of the records of one end.
pub trait RecordSinks<E: EndCode = StreamEnd> {
    /// The end of a stream that nobody serves to its end.
    const DROPPED: E;

    /// Adds what is known at the end, and passes the record to the sinks that only this end has.
    /// Returns the form of the line in the access log, if there is one.
    fn end(&self, record: &mut StreamRecord<E>) -> Option<LineForm>;
}

/// The record of a stream in progress. Dropping it ends the record and passes it to all sinks, once.
#[derive(Debug)]
pub struct OpenRecord<S: RecordSinks<E>, E: EndCode = StreamEnd> {
    record: StreamRecord<E>,
    /// What carries the stream, and the bytes that it had carried before.
    bytes: Option<(ByteCount, (u64, u64))>,
    /// The sinks of the record.
    pub sinks: S,
}

impl<S: RecordSinks<E>, E: EndCode> OpenRecord<S, E> {
    /// Begins the record of a stream that was accepted at `began`.
    pub fn start(began: Instant, sinks: S) -> Self {
        Self {
            record: StreamRecord::start(began, S::DROPPED),
            bytes: None,
            sinks,
        }
    }

    /// Records what carries the stream from here on.
    pub fn carried(&mut self, bytes: ByteCount) {
        let before = bytes.read();
        self.bytes = Some((bytes, before));
    }
}

impl<S: RecordSinks> OpenRecord<S> {
    /// Sets how the relay of the stream ended.
    pub fn relayed(&mut self, relayed: Relayed) {
        self.bytes = None;
        self.fail(relayed.end, relayed.detail);
        self.bytes_in = relayed.bytes_in;
        self.bytes_out = relayed.bytes_out;
    }
}

impl<S: RecordSinks<E>, E: EndCode> Deref for OpenRecord<S, E> {
    type Target = StreamRecord<E>;

    fn deref(&self) -> &StreamRecord<E> {
        &self.record
    }
}

impl<S: RecordSinks<E>, E: EndCode> DerefMut for OpenRecord<S, E> {
    fn deref_mut(&mut self) -> &mut StreamRecord<E> {
        &mut self.record
    }
}

impl<S: RecordSinks<E>, E: EndCode> Drop for OpenRecord<S, E> {
    fn drop(&mut self) {
        let Self {
            record,
            bytes,
            sinks,
        } = self;
        if let Some((bytes, before)) = bytes {
            let (received, sent) = bytes.read();
            record.bytes_in = received.saturating_sub(before.0);
            record.bytes_out = sent.saturating_sub(before.1);
        }
        if let Some(form) = sinks.end(record) {
            record.log(form);
        }
    }
}

impl<E: EndCode> StreamRecord<E> {
    /// Begins the record of a stream that was accepted at `began`.
    pub fn start(began: Instant, end: E) -> Self {
        Self {
            began,
            listener: None,
            peer: None,
            caller: String::new(),
            request: String::new(),
            node: None,
            port: None,
            direction: None,
            name: None,
            target: String::new(),
            dialed: String::new(),
            session: None,
            via: None,
            trace_parent: String::new(),
            status: None,
            is_retried: false,
            end,
            detail: String::new(),
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    /// Sets what the opener asks for.
    pub fn asked(&mut self, kind: &StreamKind) {
        match kind {
            StreamKind::Target(target) => {
                self.port = Some(target.port());
                self.target = target.to_string();
            }
            StreamKind::Forward { node, target, .. } => {
                self.node = Some(node.clone());
                self.port = Some(target.port());
                self.target = target.to_string();
            }
            StreamKind::Cloud(name) => self.name = Some(name.clone()),
            StreamKind::Control { .. } => "control".clone_into(&mut self.target),
            StreamKind::Enroll => "enroll".clone_into(&mut self.target),
        }
    }

    /// Sets how the stream ended.
    pub fn fail(&mut self, end: E, detail: impl Into<String>) {
        self.end = end;
        self.detail = detail.into();
    }

    /// Writes the line of the access log.
    fn log(&self, form: LineForm) {
        info!(
            target: ACCESS,
            listener = self.listener,
            peer = self.peer.as_ref().map(tracing::field::display),
            caller = non_empty(&self.caller),
            request = non_empty(&self.request),
            node = self.node.as_ref().map(NodeName::as_str),
            direction = self.direction,
            port = self.port.map(Port::get),
            name = self.name.as_ref().map(tracing::field::display),
            target = non_empty(&self.target),
            dialed = non_empty(&self.dialed),
            session = self.session.map(|session| session.0),
            via = self.via.as_ref().map(tracing::field::display),
            status = self.status,
            code = self.end.label(),
            retried = self.is_retried.then_some(true),
            error = non_empty(form.of_error(&self.detail)),
            trace_parent = non_empty(&self.trace_parent),
            bytes_in = self.bytes_in,
            bytes_out = self.bytes_out,
            elapsed = self.began.elapsed().as_secs_f64(),
            "access"
        );
    }
}
