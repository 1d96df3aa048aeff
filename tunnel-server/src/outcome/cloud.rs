//! How a stream to a target of the cloud ended.

use tunnel_proto::egress::SocketRelayEnd;
use tunnel_proto::process::telemetry::StreamStage;
use tunnel_proto::wire::code::RefusalCode;

/// The end of a stream to a target of the cloud. The labels are those of the agent's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloudResult {
    Ok,
    /// One side was complete, and its reader closed.
    ReaderClosed,
    /// The agent's side was cut.
    CutByAgent,
    /// The target's side was cut.
    CutByTarget,
    /// The target read nothing for 10 s while other streams waited for the memory.
    ReaderStalled,
    /// The header did not arrive, or violated the protocol.
    NoHeader,
    /// The stream was refused with a reply.
    Refused(RefusalCode),
}

impl CloudResult {
    /// Every end that a stream can have.
    pub const ALL: [Self; 14] = [
        Self::Ok,
        Self::ReaderClosed,
        Self::CutByAgent,
        Self::CutByTarget,
        Self::ReaderStalled,
        Self::NoHeader,
        Self::Refused(RefusalCode::BadHeader),
        Self::Refused(RefusalCode::Policy),
        Self::Refused(RefusalCode::TargetRefused),
        Self::Refused(RefusalCode::TargetTimeout),
        Self::Refused(RefusalCode::TooManyStreams),
        Self::Refused(RefusalCode::Draining),
        Self::Refused(RefusalCode::Internal),
        Self::Refused(RefusalCode::UnknownTarget),
    ];

    /// Returns the word for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ReaderClosed => "reader_closed",
            Self::CutByAgent => "cut_by_peer",
            Self::CutByTarget => "cut_by_target",
            Self::ReaderStalled => "reader_stalled",
            Self::NoHeader => "no_header",
            Self::Refused(code) => code.label(),
        }
    }

    /// Returns how far a stream with this end came.
    pub fn stage(self) -> StreamStage {
        match self {
            Self::Ok => StreamStage::Opened { is_ok: true },
            Self::ReaderClosed | Self::CutByAgent | Self::CutByTarget | Self::ReaderStalled => {
                StreamStage::Opened { is_ok: false }
            }
            Self::Refused(_) => StreamStage::Refused,
            Self::NoHeader => StreamStage::Unknown,
        }
    }
}

impl From<SocketRelayEnd> for CloudResult {
    fn from(end: SocketRelayEnd) -> Self {
        match end {
            SocketRelayEnd::Clean => Self::Ok,
            SocketRelayEnd::ReaderClosed => Self::ReaderClosed,
            SocketRelayEnd::StreamCut | SocketRelayEnd::Stopped => Self::CutByAgent,
            SocketRelayEnd::SocketCut => Self::CutByTarget,
            SocketRelayEnd::ReaderStalled => Self::ReaderStalled,
        }
    }
}
