//! The record of a stream: plain data that is complete when the stream ends, and its line in the access
//! log. Other sinks of a record are metrics and lists of recent requests.

use std::fmt::Display;

use tokio::time::Instant;
use tracing::info;

use crate::wire::code::RefusalCode;
use crate::wire::header::StreamKind;
use crate::wire::name::{NodeName, Port, SessionId};
use tunnel_process::telemetry::{ACCESS, StreamLines, StreamStage, non_empty};

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
    /// The agent stopped before the connection to a target of the cloud had ended.
    AgentStopping,
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
            | Self::AgentStopping => StreamStage::Opened { is_ok: false },
            Self::NoSession | Self::NoReply | Self::Refused(_) => StreamStage::Refused,
            Self::NoHeader => StreamStage::Unknown,
        }
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

/// All that is known of a stream when it ends, as plain data for its sinks.
#[derive(Debug, Clone)]
pub struct StreamRecord {
    /// Time at which the stream was accepted.
    pub began: Instant,
    /// The listener that accepted the stream, if there are several.
    pub listener: Option<&'static str>,
    /// The node whose agent has a part in the stream.
    pub node: Option<NodeName>,
    /// `edge` for a stream to a target of the cloud.
    pub direction: Option<&'static str>,
    /// The session that carries the stream.
    pub session: Option<SessionId>,
    /// The other end of the connection, if it is not the agent or its server.
    pub peer: Option<String>,
    /// What the header asks for; `None` without one.
    pub kind: Option<StreamKind>,
    /// Trace context of the opener, or empty.
    pub trace_parent: String,
    /// The address that was dialed, or empty.
    pub dialed: String,
    /// How the stream ended.
    pub end: StreamEnd,
    /// Reason of the end, or empty.
    pub detail: String,
    /// Bytes that this process received in the tunnel.
    pub bytes_in: u64,
    /// Bytes that this process sent into the tunnel.
    pub bytes_out: u64,
}

impl StreamRecord {
    /// Begins the record of a stream.
    pub fn start() -> Self {
        Self {
            began: Instant::now(),
            listener: None,
            node: None,
            direction: None,
            session: None,
            peer: None,
            kind: None,
            trace_parent: String::new(),
            dialed: String::new(),
            end: StreamEnd::NoHeader,
            detail: String::new(),
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    /// Sets how the stream ended, before a byte was relayed.
    pub fn fail(&mut self, end: StreamEnd, detail: impl Into<String>) {
        self.end = end;
        self.detail = detail.into();
    }

    /// Sets how the relay of the stream ended.
    pub fn relayed(&mut self, relayed: Relayed) {
        self.fail(relayed.end, relayed.detail);
        self.bytes_in = relayed.bytes_in;
        self.bytes_out = relayed.bytes_out;
    }

    /// Writes the line of the access log, if `lines` admits one of `source`. `stage` says how far the
    /// stream came.
    pub fn log<K>(&self, lines: &'static StreamLines<K>, stage: StreamStage, source: K)
    where
        K: Ord + Clone + Display + Send + 'static,
    {
        let Some(form) = lines.admit(stage, self.end.label(), source) else {
            return;
        };
        let (port, name, target) = match &self.kind {
            Some(StreamKind::Target(target) | StreamKind::Forward { target, .. }) => {
                (Some(target.port()), None, Some(target.to_string()))
            }
            Some(StreamKind::Cloud(name)) => (None, Some(name), None),
            Some(StreamKind::Control { .. }) => (None, None, Some("control".to_owned())),
            Some(StreamKind::Enroll) => (None, None, Some("enroll".to_owned())),
            None => (None, None, Some("unknown".to_owned())),
        };
        info!(
            target: ACCESS,
            listener = self.listener,
            node = self.node.as_ref().map(NodeName::as_str),
            direction = self.direction,
            session = self.session.map(|session| session.0),
            name = name.map(tracing::field::display),
            peer = self.peer,
            port = port.map(Port::get),
            target,
            dialed = non_empty(&self.dialed),
            code = self.end.label(),
            error = non_empty(form.of_error(&self.detail)),
            trace_parent = non_empty(&self.trace_parent),
            bytes_in = self.bytes_in,
            bytes_out = self.bytes_out,
            elapsed = self.began.elapsed().as_secs_f64(),
            "access"
        );
    }
}
