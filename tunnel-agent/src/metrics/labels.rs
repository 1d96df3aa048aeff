//! Label values and label sets of the agent's metrics.

use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::wire::code::RefusalCode;

use crate::config::Limit;

tunnel_proto::label_sets! {
    pub(super)
    TransportLabels { transport: StaticLabel }
    ConnectLabels { transport: StaticLabel, result: ConnectResult }
    StreamLabels { result: StaticLabel }
    DirectionLabels { direction: Direction }
    DialLabels { result: DialResult }
    RenewalLabels { result: StaticLabel }
    LimitLabels { limit: Limit }
}

/// The end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StreamEnd {
    /// Both sides ended cleanly.
    Ok,
    /// One side stopped reading before all data was delivered.
    ReaderClosed,
    /// The tunnel's side was cut.
    CutByPeer,
    /// The target's side was cut.
    CutByTarget,
    /// The header did not arrive, or violated the protocol.
    NoHeader,
    /// The stream was refused with a reply.
    Refused(RefusalCode),
}

impl StreamEnd {
    /// Returns the label for logs and metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ReaderClosed => "reader_left",
            Self::CutByPeer => "cut_by_peer",
            Self::CutByTarget => "cut_by_target",
            Self::NoHeader => "no_header",
            Self::Refused(code) => code.label(),
        }
    }
}

tunnel_proto::label_values! {
    /// The direction of bytes.
    pub(crate) enum Direction {
        /// From the tunnel to a target.
        ToTarget = "to_target",
        /// From a target to the tunnel.
        FromTarget = "from_target",
    }
}

tunnel_proto::label_values! {
    /// The result of an attempt to connect to an address of a target.
    pub(crate) enum DialResult {
        Connected = "connected",
        /// The target refused or was unreachable.
        Refused = "refused",
        /// The target did not answer in time.
        Timeout = "timeout",
        /// This host could not try.
        Failed = "failed",
    }
}

tunnel_proto::label_values! {
    /// The result of a dialed session.
    pub(crate) enum ConnectResult {
        /// The session became ready.
        Ready = "ready",
        /// No answer arrived in time.
        NoAnswer = "no_answer",
        /// There was no connection or no handshake.
        Failed = "failed",
        /// The server refused the session.
        NotAdmitted = "not_admitted",
        /// Another session was ready first.
        Abandoned = "abandoned",
    }
}
