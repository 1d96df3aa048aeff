//! Session settings that are independent of the transport.

use std::sync::Arc;
use std::time::Duration;

use super::flow::BufferPool;

/// Windows and timers of sessions.
#[derive(Debug, Clone)]
pub struct SessionSettings {
    /// Receive window of one stream, in bytes. 2 MiB keep quinn's assembler below its limit on
    /// gaps.
    pub stream_window: u32,
    /// Maximum number of streams that the peer may have open at once. A transport may allow fewer
    /// at first and more as they are used. At the agent's end of h2, the streams that the agent
    /// opens and the offers for them count, too.
    pub streams: u32,
    /// Interval (+- 20 %) of keep-alive messages when nothing else is sent. `None` leaves
    /// keep-alive to the peer.
    pub keep_alive: Option<Duration>,
    /// Ends a session after this time without data from the peer. This limit is a fallback in
    /// addition to the session's own liveness check.
    pub idle_timeout: Duration,
    /// Congestion control of QUIC. For TCP, the operating system decides.
    pub congestion: CongestionControl,
    /// The pool from which all sessions reserve memory for unread bytes.
    pub pool: Arc<BufferPool>,
}

tunnel_process::named! {
    /// The congestion control algorithm of QUIC.
    #[derive(Default)]
    pub enum CongestionControl: FromStr {
        /// CUBIC (RFC 9438). Treats every loss as congestion.
        Cubic = "cubic",
        /// BBR as implemented in quinn. Measures the path's rate, so random loss costs little
        /// throughput.
        #[default]
        Bbr = "bbr",
    }
}
