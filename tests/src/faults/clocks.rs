//! The timers of a run: the defaults of both binaries, or ten times shorter ones with matching
//! bounds.

use std::time::Duration;

use crate::eventually::scaled;
use crate::gear::Gear;

/// The speed of a run's timers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clocks {
    /// The defaults of both binaries. The bounds of the cases are defined for these timers.
    Full,
    /// Ten times shorter where configurable. Faults and bounds are shorter too.
    Short,
}

impl Clocks {
    /// Returns the timers of the run's gear.
    pub fn of_gear() -> Self {
        Gear::current().pick(Self::Short, Self::Full)
    }

    /// Converts a time of the fault matrix (an outage, a pause) to this run.
    pub fn time(self, contract: Duration) -> Duration {
        self.pick(contract, contract / DIVISOR)
    }

    /// Converts a bound that depends on the timers of a session.
    pub fn bound(self, contract: Duration) -> Duration {
        self.pick(contract, contract / DIVISOR + SLACK)
    }

    /// Converts a bound that includes opening a session.
    pub fn connect_bound(self, contract: Duration) -> Duration {
        self.pick(contract, contract / DIVISOR + CONNECT)
    }

    /// Returns one of two values, for amounts and rates that keep short runs short.
    pub fn pick<T>(self, full: T, short: T) -> T {
        match self {
            Self::Full => full,
            Self::Short => short,
        }
    }

    /// Returns the server's `limits:` as YAML. On a busy machine a stream opens later.
    pub fn server_limits(self) -> String {
        let open = scaled(Duration::from_secs(1)).as_millis();
        self.pick(
            "{}".into(),
            format!("{SERVER_LIMITS}openTimeout: {open}ms\n"),
        )
    }

    /// Returns the agent's `limits:` as YAML.
    pub fn agent_limits(self) -> &'static str {
        self.pick("{}", AGENT_LIMITS)
    }
}

const DIVISOR: u32 = 10;

/// Retransmission, timer check intervals and the scheduler do not get faster.
const SLACK: Duration = Duration::from_millis(500);

/// Neither the agent's backoff of up to 2 s nor QUIC's first retransmission, after 1 s on an
/// unknown path, is configurable.
const CONNECT: Duration = Duration::from_secs(3);

const SERVER_LIMITS: &str = "\
keepAlive: 500ms
suspectAfterBusy: 500ms
suspectAfterIdle: 1500ms
deadAfter: 6s
";

/// On a busy machine a handshake takes longer than a tenth of the default.
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
