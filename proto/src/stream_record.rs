//! The record of a stream: plain data that is complete when the stream ends.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;
use tunnel_process::telemetry::StreamStage;

use crate::wire::code::RefusalCode;
use crate::wire::header::{AuditId, StreamHeader, StreamKind, is_one_line, one_line};
use crate::wire::name::{NodeName, Port, ReplicaId, SessionId};

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
    /// The opener cut the stream, or its session was lost, while the target was dialed.
    OpenerGone,
    /// The stream was refused with a reply.
    Refused(RefusalCode),
}

impl StreamEnd {
    /// Ends that a stream has at both ends of a session, whatever its target is. A metric has a series
    /// for each from the start on.
    const COMMON: [Self; 11] = [
        Self::Ok,
        Self::ReaderClosed,
        Self::CutByPeer,
        Self::ReaderStalled,
        Self::Refused(RefusalCode::BadHeader),
        Self::Refused(RefusalCode::Policy),
        Self::Refused(RefusalCode::TargetRefused),
        Self::Refused(RefusalCode::TargetTimeout),
        Self::Refused(RefusalCode::TooManyStreams),
        Self::Refused(RefusalCode::Draining),
        Self::Refused(RefusalCode::Internal),
    ];

    /// Returns the labels of the ends that all streams can have, and of those that only some can.
    pub fn labels(others: &[Self]) -> impl Iterator<Item = &'static str> {
        let ends = Self::COMMON.iter().chain(others);
        ends.map(|end| end.label())
    }

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
            Self::OpenerGone => "opener_gone",
            Self::Refused(code) => code.label(),
        }
    }

    /// Returns whether a stream with this end was accepted by its target.
    pub fn has_reached_target(self) -> bool {
        matches!(self.stage(), StreamStage::Opened { .. })
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
            Self::NoSession | Self::NoReply | Self::OpenerGone | Self::Refused(_) => {
                StreamStage::Refused
            }
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

/// What the head of an HTTP request adds to its audit event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditedHead {
    /// The verb of Kubernetes for the method, or the method in lower case.
    pub verb: Cow<'static, str>,
    /// The URI, and after it `User-Agent`.
    texts: String,
    uri_length: usize,
}

impl AuditedHead {
    /// Returns a head with the parts of a URI, that is host, path and a part of the query, and with a
    /// `User-Agent`, or an empty one.
    pub fn new(verb: Cow<'static, str>, uri: [&str; 3], user_agent: &str) -> Self {
        let length = uri.iter().map(|part| part.len()).sum::<usize>() + user_agent.len();
        let mut texts = String::with_capacity(length);
        texts.extend(uri);
        let mut texts = one_line(texts);
        let uri_length = texts.len();
        if is_one_line(user_agent) {
            texts.push_str(user_agent);
        } else {
            texts.push_str(&one_line(user_agent));
        }
        Self {
            verb,
            texts,
            uri_length,
        }
    }

    /// Returns the URI as one line.
    pub fn uri(&self) -> &str {
        self.texts.get(..self.uri_length).unwrap_or_default()
    }

    /// Returns `User-Agent` as one line, or an empty text.
    pub fn user_agent(&self) -> &str {
        self.texts.get(self.uri_length..).unwrap_or_default()
    }
}

/// All that is known of a stream or request when it ends, as plain data for its sinks.
#[derive(Debug, Clone)]
pub struct StreamRecord<E = StreamEnd> {
    /// Time at which the stream was accepted.
    pub began: Instant,
    /// The same time, by the clock of the host.
    pub received_at: SystemTime,
    /// What the audit events of the stream have in common at all ends.
    pub audit_id: AuditId,
    /// Nothing could be read of what the opener asks for.
    pub is_unread: bool,
    /// The listener that accepted the stream, if there are several.
    pub listener: Option<&'static str>,
    /// The other end of the connection, if it is not the agent or its server.
    pub peer: Option<RecordedPeer>,
    /// Identity that the caller has proved, or empty.
    pub caller: String,
    /// The caller is what the opener of the stream claims. An empty one is unknown.
    pub is_claimed: bool,
    /// Method and path, or the name of the TCP service, or empty.
    pub request: String,
    /// More of an HTTP request. `None` if there is no audit log.
    pub head: Option<AuditedHead>,
    /// What the caller wants to do at the target, as far as the server reads it.
    pub operation: Option<Cow<'static, str>>,
    /// The rule that decided.
    pub rule: Option<Arc<str>>,
    /// What the rules of a dry run decide, if they decide otherwise.
    pub dry_run: Option<Box<str>>,
    /// The node whose agent has a part in the stream, as soon as it is known.
    pub node: Option<NodeName>,
    /// The port that the opener asks for, as soon as it is known.
    pub port: Option<Port>,
    /// `edge` for a stream to a target of the cloud.
    pub direction: Option<&'static str>,
    /// The target as it was asked for, of the cloud its name, or empty.
    pub target: String,
    /// The address that was dialed, or empty.
    pub dialed: String,
    /// The session that carries the stream.
    pub session: Option<SessionId>,
    /// The server that forwards the stream to the agent.
    pub via: Option<ReplicaId>,
    /// The audit id of the request that opened the stream, if it was another one.
    pub stream: Option<AuditId>,
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

impl<E: EndCode> StreamRecord<E> {
    /// Begins the record of a stream that was accepted at `began`.
    pub fn start(began: Instant, end: E) -> Self {
        Self {
            began,
            received_at: SystemTime::now(),
            audit_id: AuditId::new(rand::random()),
            is_unread: false,
            listener: None,
            peer: None,
            caller: String::new(),
            is_claimed: false,
            request: String::new(),
            head: None,
            operation: None,
            rule: None,
            dry_run: None,
            node: None,
            port: None,
            direction: None,
            target: String::new(),
            dialed: String::new(),
            session: None,
            via: None,
            stream: None,
            trace_parent: String::new(),
            status: None,
            is_retried: false,
            end,
            detail: String::new(),
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    /// Sets what the header of a stream says.
    pub fn asked(&mut self, header: &StreamHeader) {
        self.is_unread = false;
        self.audit_id = header.audit_id.unwrap_or(self.audit_id);
        self.trace_parent.clone_from(&header.trace_parent);
        self.caller.clone_from(&header.caller);
        self.operation = (!header.operation.is_empty()).then(|| header.operation.clone().into());
        self.is_claimed = true;
        match &header.kind {
            StreamKind::Target(target) => {
                self.port = Some(target.port());
                self.target = target.to_string();
            }
            StreamKind::Forward { node, target, .. } => {
                self.node = Some(node.clone());
                self.port = Some(target.port());
                self.target = target.to_string();
            }
            StreamKind::Cloud(name) => self.target = name.to_string(),
            StreamKind::Control { .. } => "control".clone_into(&mut self.target),
            StreamKind::Enroll => "enroll".clone_into(&mut self.target),
        }
    }

    /// Sets how the stream ended.
    pub fn fail(&mut self, end: E, detail: impl Into<String>) {
        self.end = end;
        self.detail = detail.into();
    }
}
