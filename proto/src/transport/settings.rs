//! What both ends configure about their sessions, whatever the transport.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::flow::BufferPool;

/// Windows and timers of sessions.
#[derive(Debug, Clone)]
pub struct SessionSettings {
    /// Receive window of one stream, bytes; 2 MiB keep quinn's assembler below its limit on gaps.
    pub stream_window: u32,
    /// Streams that the peer may have open at once; a transport may allow fewer at first and more as they are used.
    pub streams: u32,
    /// Gives a sign of life this often (+- 20 %) when nothing else is sent; `None` leaves it to the peer.
    pub keep_alive: Option<Duration>,
    /// Ends a session after this long without a sign of the peer: a backstop behind the session's own clock.
    pub idle_timeout: Duration,
    /// Congestion control of QUIC; TCP's is the system's.
    pub congestion: CongestionControl,
    /// What unread bytes of all sessions together are counted against.
    pub pool: Arc<BufferPool>,
}

/// How QUIC finds the speed of the path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CongestionControl {
    /// CUBIC (RFC 9438): takes every loss for congestion.
    Cubic,
    /// BBR as in quinn: measures the path's rate, so random loss costs little.
    #[default]
    Bbr,
}

impl FromStr for CongestionControl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cubic" => Ok(Self::Cubic),
            "bbr" => Ok(Self::Bbr),
            other => Err(format!("{other:?} is neither cubic nor bbr")),
        }
    }
}
