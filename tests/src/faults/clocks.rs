//! The clocks of a run: those of the contract, or ten times shorter ones with bounds to match.

use std::time::Duration;

/// How fast the clocks of a run go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clocks {
    /// The defaults of both programs: what the contract says.
    Full,
    /// Configured ten times shorter where that is possible; faults and bounds are, too.
    Short,
}

impl Clocks {
    /// A time of the fault matrix (an outage, a pause) in this run.
    #[must_use]
    pub fn time(self, contract: Duration) -> Duration {
        match self {
            Self::Full => contract,
            Self::Short => contract / DIVISOR,
        }
    }

    /// A bound that clocks of a session decide.
    #[must_use]
    pub fn bound(self, contract: Duration) -> Duration {
        match self {
            Self::Full => contract,
            Self::Short => contract / DIVISOR + SLACK,
        }
    }

    /// A bound within which a session has to be made.
    #[must_use]
    pub fn connect_bound(self, contract: Duration) -> Duration {
        match self {
            Self::Full => contract,
            Self::Short => contract / DIVISOR + CONNECT,
        }
    }

    /// One of two figures: amounts and rates that keep short runs short.
    #[must_use]
    pub fn pick<T>(self, full: T, short: T) -> T {
        match self {
            Self::Full => full,
            Self::Short => short,
        }
    }

    /// The server's `limits:`, YAML.
    #[must_use]
    pub fn server_limits(self) -> &'static str {
        self.pick("{}", SERVER_LIMITS)
    }

    /// The agent's `limits:`, YAML.
    #[must_use]
    pub fn agent_limits(self) -> &'static str {
        self.pick("{}", AGENT_LIMITS)
    }

    /// What a short run adds to its bounds, for people.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Full => "full clocks: the defaults of both programs".to_owned(),
            Self::Short => format!(
                "short clocks: limits, faults and bounds are divided by {DIVISOR}; bounds get {SLACK:?} more for timers \
                 that no setting shortens, or {CONNECT:?} where a session has to be made (up to 2 s of backoff, \
                 handshakes); F32 lasts 20 s"
            ),
        }
    }
}

const DIVISOR: u32 = 10;

/// Retransmission, the intervals at which clocks are looked at, and the scheduler do not get faster.
const SLACK: Duration = Duration::from_millis(500);

/// The agent's backoff of up to 2 s is no setting, nor is QUIC's first retransmission, after 1 s on a path not known yet.
const CONNECT: Duration = Duration::from_secs(3);

const SERVER_LIMITS: &str = "\
keepAlive: 500ms
suspectAfterBusy: 500ms
suspectAfterIdle: 1500ms
deadAfter: 6s
openTimeout: 1s
";

/// A handshake takes a busy machine longer than a tenth of the default.
const AGENT_LIMITS: &str = "\
keepAlive: 500ms
suspectAfterBusy: 500ms
suspectAfterIdle: 1500ms
deadAfter: 6s
quicHeadStart: 300ms
quicProbeEvery: 4500ms
quicSteadyAfter: 6s
handshakeTimeout: 1s
";
