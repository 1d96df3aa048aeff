//! Label values and label sets of the agent's metrics.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};
use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::transport::TransportKind;
use tunnel_proto::wire::code::RefusalCode;

use crate::config::Limit;

tunnel_proto::label_sets! {
    pub(super)
    TransportLabels { transport: TransportLabel }
    ConnectLabels { transport: TransportLabel, result: ConnectResult }
    StreamLabels { result: StreamEnd }
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

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// From the tunnel to a target.
    ToTarget,
    /// From a target to the tunnel.
    FromTarget,
}

impl Direction {
    fn label(self) -> &'static str {
        match self {
            Self::ToTarget => "to_target",
            Self::FromTarget => "from_target",
        }
    }
}

/// The result of an attempt to connect to an address of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DialResult {
    Connected,
    /// The target refused or was unreachable.
    Refused,
    /// The target did not answer in time.
    Timeout,
    /// This host could not try.
    Failed,
}

impl DialResult {
    fn label(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Failed => "failed",
        }
    }
}

/// The result of a dialed session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ConnectResult {
    /// The session became ready.
    Ready,
    /// No answer arrived in time.
    NoAnswer,
    /// There was no connection or no handshake.
    Failed,
    /// The server refused the session.
    NotAdmitted,
    /// Another session was ready first.
    Abandoned,
}

impl ConnectResult {
    fn label(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::NoAnswer => "no_answer",
            Self::Failed => "failed",
            Self::NotAdmitted => "not_admitted",
            Self::Abandoned => "abandoned",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TransportLabel(pub(super) TransportKind);

impl TransportLabel {
    fn label(self) -> &'static str {
        self.0.label()
    }
}

/// Implements label values for enums by their labels.
macro_rules! label_values {
    ($($name:ty),+) => { $(
        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
                self.label().encode(encoder)
            }
        }
    )+ };
}

label_values!(
    StreamEnd,
    Direction,
    DialResult,
    ConnectResult,
    TransportLabel
);
