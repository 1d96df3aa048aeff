//! The section `limits:` of the YAML file: every limit and timer by name, so that tests can shorten
//! them.

use std::time::Duration;

use serde::Deserialize;
use tunnel_proto::process::admission::ConnLimits;
use tunnel_proto::process::settings::{ConfigErrors, format_size, parse_size, positive};
use tunnel_proto::transport::liveness::LivenessLimits;

use crate::dns::DnsLimits;

/// Name, default and description of every limit, for the reference.
pub const LIMITS: &[(&str, &str, &str)] = &[
    (
        "handshakeTimeout",
        "5s",
        "TLS and QUIC handshakes, admission of an agent, a whole enrollment",
    ),
    (
        "requestHeadTimeout",
        "10s",
        "time for a caller to send a request head",
    ),
    ("requestHeadBytes", "64KiB", "largest request head"),
    (
        "callerIdleTimeout",
        "3m",
        "how long a caller may keep its connection without a request; longer than scrape intervals",
    ),
    (
        "callersTotal",
        "auto",
        "connections of callers to all listeners; one more evicts the one that has been idle for the longest time, of the \
         address with the most, and is refused where all are in use. A quarter is left to callers that verify with a \
         client certificate or come over a Unix socket. auto: a quarter of the memory limit at 20 KiB and requestHeadBytes \
         each, and a quarter of the open files (RLIMIT_NOFILE), at most 65536",
    ),
    (
        "callersPerSource",
        "auto",
        "the same from one address (IPv6: one /64); auto: half of callersTotal",
    ),
    (
        "streamsPerAgent",
        "256",
        "streams open to one agent at once; more get 503 too_many_streams. One caller without a client certificate may have half \
         of them, all such callers together and one caller with a certificate three quarters",
    ),
    (
        "admissionsPerNode",
        "100",
        "sessions that one node may open at once; then two a second. More are refused with too_many_sessions",
    ),
    (
        "openTimeout",
        "10s",
        "opening a stream, up to the agent's reply; then 504 agent_timeout",
    ),
    (
        "targetDialTimeout",
        "5s",
        "time for an agent to dial a target, sent to agents in Welcome; then 504 target_timeout",
    ),
    (
        "preAuthPerSource",
        "1024",
        "connections from one address (IPv6: one /64) to the agents' port without a verified credential yet; one more \
         evicts the oldest of that address, or is refused while that one is younger than 1 s",
    ),
    (
        "preAuthTotal",
        "4096",
        "the same from all addresses; one more evicts the oldest of the address with the most",
    ),
    (
        "streamWindow",
        "2MiB",
        "bytes of one stream that may be under way unread",
    ),
    (
        "bufferPool",
        "512MiB",
        "bytes that stalled readers of all agents may hold; when it is full, or an agent holds a quarter of it, new \
         streams get 503 too_many_streams",
    ),
    (
        "keepAlive",
        "5s",
        "interval of keep-alive probes to an idle agent",
    ),
    (
        "suspectAfterBusy",
        "5s",
        "a session that is silent for this long while requests wait is suspect and gets no new streams until it answers",
    ),
    (
        "suspectAfterIdle",
        "15s",
        "as suspectAfterBusy, without requests",
    ),
    (
        "deadAfter",
        "60s",
        "a session that is silent for this long is closed and its streams are cut",
    ),
    (
        "dnsForwardBudget",
        "400ms",
        "time for another resolver to answer a DNS query; then SERVFAIL",
    ),
    (
        "dnsForwards",
        "512",
        "DNS queries being asked elsewhere at once; more get SERVFAIL",
    ),
    (
        "dnsConnections",
        "256",
        "DNS connections over TCP; more wait, and one source has 32 at most",
    ),
    (
        "dnsPerSource",
        "10000",
        "DNS queries a second of one address (IPv6: /64); more get no answer",
    ),
    (
        "certificateLife",
        "30d",
        "life of the certificates that the local CA issues; they are renewed at half of it, and a session goes on for at \
         most 30 s after the end of one that was not",
    ),
    (
        "reloadEvery",
        "10s",
        "how often certificate files that the operator brings are read again",
    ),
];

/// Margin between `deadAfter` and QUIC's own idle timeout, which is a backstop.
const IDLE_BACKSTOP: Duration = Duration::from_secs(15);

/// Maximum time for a last renewal after expiry, for clocks that differ slightly.
const EXPIRY_GRACE_MAX: Duration = Duration::from_secs(30);

/// Minimum size of the pool in stream windows. A single stalled stream must not use up an agent's
/// share of the pool, which is a quarter.
const POOL_WINDOWS_MIN: u64 = 4;

/// The limits in their raw form.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RawLimits {
    handshake_timeout: Option<String>,
    request_head_timeout: Option<String>,
    request_head_bytes: Option<String>,
    caller_idle_timeout: Option<String>,
    callers_total: Option<String>,
    callers_per_source: Option<String>,
    streams_per_agent: Option<String>,
    admissions_per_node: Option<String>,
    open_timeout: Option<String>,
    target_dial_timeout: Option<String>,
    pre_auth_per_source: Option<String>,
    pre_auth_total: Option<String>,
    stream_window: Option<String>,
    buffer_pool: Option<String>,
    keep_alive: Option<String>,
    suspect_after_busy: Option<String>,
    suspect_after_idle: Option<String>,
    dead_after: Option<String>,
    dns_forward_budget: Option<String>,
    dns_forwards: Option<String>,
    dns_connections: Option<String>,
    dns_per_source: Option<String>,
    certificate_life: Option<String>,
    reload_every: Option<String>,
}

/// The checked limits. [`LIMITS`] describes each of them.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Timeout of handshakes, admissions and enrollments (`handshakeTimeout`).
    pub handshake_timeout: Duration,
    /// Timeout for receiving a request head (`requestHeadTimeout`).
    pub request_head_timeout: Duration,
    /// Maximum size of a request head (`requestHeadBytes`).
    pub request_head_bytes: usize,
    /// Idle timeout of callers' connections (`callerIdleTimeout`).
    pub caller_idle_timeout: Duration,
    /// Maximum number of callers' connections (`callersTotal`); `None` for auto.
    pub callers_total: Option<usize>,
    /// Maximum number of callers' connections from one source (`callersPerSource`); `None` for
    /// auto.
    pub callers_per_source: Option<usize>,
    /// Maximum number of concurrent streams of an agent (`streamsPerAgent`).
    pub streams_per_agent: u32,
    /// Number of sessions that a node may open at once (`admissionsPerNode`).
    pub admissions_per_node: u32,
    /// Timeout for opening a stream, up to the agent's reply (`openTimeout`).
    pub open_timeout: Duration,
    /// Timeout for an agent to dial a target (`targetDialTimeout`).
    pub target_dial_timeout: Duration,
    /// Maximum number of unauthenticated connections from one source (`preAuthPerSource`).
    pub pre_auth_per_source: usize,
    /// Maximum number of unauthenticated connections (`preAuthTotal`).
    pub pre_auth_total: usize,
    /// Bytes of one stream that may be in flight unread (`streamWindow`).
    pub stream_window: u32,
    /// Bytes that stalled readers of all agents may hold (`bufferPool`).
    pub buffer_pool: u64,
    /// Interval of keep-alive probes to an idle agent (`keepAlive`).
    pub keep_alive: Duration,
    /// Silence after which a session with waiting requests is suspect (`suspectAfterBusy`).
    pub suspect_after_busy: Duration,
    /// Silence after which an idle session is suspect (`suspectAfterIdle`).
    pub suspect_after_idle: Duration,
    /// Silence after which a session is closed (`deadAfter`).
    pub dead_after: Duration,
    /// Limits of the embedded DNS (`dnsForwardBudget`, `dnsForwards`, `dnsConnections`,
    /// `dnsPerSource`).
    pub dns: DnsLimits,
    /// Lifetime of certificates that the local CA issues (`certificateLife`).
    pub certificate_life: Duration,
    /// Interval at which certificate files of the operator are read again (`reloadEvery`).
    pub reload_every: Duration,
}

impl Limits {
    /// Returns QUIC's idle timeout.
    #[must_use]
    pub fn idle_timeout(&self) -> Duration {
        self.dead_after + IDLE_BACKSTOP
    }

    /// Returns the liveness limits of sessions. The server probes idle sessions too.
    #[must_use]
    pub fn liveness(&self) -> LivenessLimits {
        LivenessLimits {
            keep_alive: self.keep_alive,
            suspect_after_busy: self.suspect_after_busy,
            suspect_after_idle: self.suspect_after_idle,
            dead_after: self.dead_after,
            probes_idle: true,
        }
    }

    /// Returns the limits for unauthenticated connections.
    #[must_use]
    pub fn pre_auth(&self) -> ConnLimits {
        ConnLimits {
            per_source: self.pre_auth_per_source,
            total: self.pre_auth_total,
        }
    }

    /// Returns the time for which a session may continue after its certificate has expired.
    #[must_use]
    pub fn expiry_grace(&self) -> Duration {
        EXPIRY_GRACE_MAX.min(self.certificate_life)
    }

    /// Returns a warning if the streams of one agent can hold more than the pool. The pool does not
    /// limit streams that are already admitted.
    pub(super) fn hard_bound_warning(&self) -> Option<String> {
        let bound = u64::from(self.streams_per_agent) * u64::from(self.stream_window);
        (bound > self.buffer_pool).then(|| {
            format!(
                "stalled readers of one agent may hold {} (limits.streamsPerAgent {} x limits.streamWindow {}), more \
                 than limits.bufferPool {}, which only stops new streams",
                format_size(bound),
                self.streams_per_agent,
                format_size(self.stream_window.into()),
                format_size(self.buffer_pool),
            )
        })
    }

    /// Checks the raw limits and applies the defaults of [`LIMITS`].
    #[must_use]
    pub fn check(errors: &mut ConfigErrors, raw: Option<&RawLimits>) -> Self {
        let nothing = RawLimits::default();
        let raw = raw.unwrap_or(&nothing);
        let mut read = LimitsReader {
            errors,
            failed: false,
        };
        let limits = Self {
            handshake_timeout: read.time("handshakeTimeout", raw.handshake_timeout.as_deref()),
            request_head_timeout: read
                .time("requestHeadTimeout", raw.request_head_timeout.as_deref()),
            // hyper needs at least 8 KiB.
            request_head_bytes: read.size(
                "requestHeadBytes",
                raw.request_head_bytes.as_deref(),
                8 << 10,
                16 << 20,
            ),
            caller_idle_timeout: read.time("callerIdleTimeout", raw.caller_idle_timeout.as_deref()),
            callers_total: read.count_or_auto("callersTotal", raw.callers_total.as_deref()),
            callers_per_source: read
                .count_or_auto("callersPerSource", raw.callers_per_source.as_deref()),
            streams_per_agent: read.count(
                "streamsPerAgent",
                raw.streams_per_agent.as_deref(),
                1 << 20,
            ),
            admissions_per_node: read.count(
                "admissionsPerNode",
                raw.admissions_per_node.as_deref(),
                1 << 20,
            ),
            open_timeout: read.time("openTimeout", raw.open_timeout.as_deref()),
            target_dial_timeout: read.time("targetDialTimeout", raw.target_dial_timeout.as_deref()),
            pre_auth_per_source: read.count(
                "preAuthPerSource",
                raw.pre_auth_per_source.as_deref(),
                1 << 20,
            ),
            pre_auth_total: read.count("preAuthTotal", raw.pre_auth_total.as_deref(), 1 << 20),
            stream_window: read.size(
                "streamWindow",
                raw.stream_window.as_deref(),
                16 << 10,
                16 << 20,
            ),
            buffer_pool: read.size("bufferPool", raw.buffer_pool.as_deref(), 64 << 10, 1 << 50),
            keep_alive: read.time("keepAlive", raw.keep_alive.as_deref()),
            suspect_after_busy: read.time("suspectAfterBusy", raw.suspect_after_busy.as_deref()),
            suspect_after_idle: read.time("suspectAfterIdle", raw.suspect_after_idle.as_deref()),
            dead_after: read.time("deadAfter", raw.dead_after.as_deref()),
            dns: DnsLimits {
                forward_budget: read.time("dnsForwardBudget", raw.dns_forward_budget.as_deref()),
                forwards: read.count("dnsForwards", raw.dns_forwards.as_deref(), 1 << 16),
                connections: read.count("dnsConnections", raw.dns_connections.as_deref(), 1 << 16),
                per_source: read.count("dnsPerSource", raw.dns_per_source.as_deref(), 1 << 30),
            },
            certificate_life: read.time("certificateLife", raw.certificate_life.as_deref()),
            reload_every: read.time("reloadEvery", raw.reload_every.as_deref()),
        };
        // Relations between limits are checked only if every limit is valid.
        if !read.failed {
            limits.check_together(errors);
        }
        limits
    }

    fn check_together(&self, errors: &mut ConfigErrors) {
        let show = humantime::format_duration;
        if self.suspect_after_busy > self.suspect_after_idle {
            errors.add(
                "limits.suspectAfterBusy",
                format!(
                    "{} is more than suspectAfterIdle, {}",
                    show(self.suspect_after_busy),
                    show(self.suspect_after_idle)
                ),
            );
        }
        if self.suspect_after_idle > self.dead_after {
            errors.add(
                "limits.suspectAfterIdle",
                format!(
                    "{} is more than deadAfter, {}",
                    show(self.suspect_after_idle),
                    show(self.dead_after)
                ),
            );
        }
        if self.keep_alive >= self.suspect_after_idle {
            errors.add(
                "limits.keepAlive",
                format!(
                    "{} is not less than suspectAfterIdle, {}: every idle agent would be suspect",
                    show(self.keep_alive),
                    show(self.suspect_after_idle)
                ),
            );
        }
        let pool_min = POOL_WINDOWS_MIN * u64::from(self.stream_window);
        if self.buffer_pool < pool_min {
            errors.add(
                "limits.bufferPool",
                format!(
                    "{} is less than {POOL_WINDOWS_MIN} x streamWindow, {}",
                    format_size(self.buffer_pool),
                    format_size(pool_min)
                ),
            );
        }
    }
}

struct LimitsReader<'a> {
    errors: &'a mut ConfigErrors,
    failed: bool,
}

impl LimitsReader<'_> {
    fn text<'t>(&self, name: &str, written: Option<&'t str>) -> &'t str {
        let default = LIMITS
            .iter()
            .find(|(known, ..)| *known == name)
            .map_or("", |(_, default, _)| *default);
        written.unwrap_or(default)
    }

    fn time(&mut self, name: &str, written: Option<&str>) -> Duration {
        let text = self.text(name, written);
        let parsed = humantime::parse_duration(text).map_err(|error| format!("{text:?}: {error}"));
        let checked = parsed.and_then(|time| positive(time).map_err(str::to_owned));
        self.unwrap_or_record(name, checked, Duration::from_secs(1))
    }

    fn size<T: TryFrom<u64> + Default>(
        &mut self,
        name: &str,
        written: Option<&str>,
        least: u64,
        most: u64,
    ) -> T {
        let text = self.text(name, written);
        let checked = parse_size(text).and_then(|bytes| {
            let fits = (least..=most).contains(&bytes);
            let value = if fits { T::try_from(bytes).ok() } else { None };
            value.ok_or_else(|| format!("{text:?} is not between {least} and {most} bytes"))
        });
        self.unwrap_or_record(name, checked, T::default())
    }

    fn count<T: TryFrom<u64> + Default>(
        &mut self,
        name: &str,
        written: Option<&str>,
        most: u64,
    ) -> T {
        let text = self.text(name, written);
        let parsed = text
            .parse::<u64>()
            .ok()
            .filter(|number| (1..=most).contains(number));
        let checked = parsed.and_then(|number| T::try_from(number).ok());
        let checked = checked.ok_or_else(|| format!("{text:?} is not a number from 1 to {most}"));
        self.unwrap_or_record(name, checked, T::default())
    }

    fn count_or_auto(&mut self, name: &str, written: Option<&str>) -> Option<usize> {
        let text = self.text(name, written);
        (text != "auto").then(|| self.count(name, written, 1 << 20))
    }

    fn unwrap_or_record<T>(&mut self, name: &str, checked: Result<T, String>, fallback: T) -> T {
        self.failed |= checked.is_err();
        self.errors
            .unwrap_or_record(&format!("limits.{name}"), checked, fallback)
    }
}
