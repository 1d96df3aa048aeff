//! The section `limits:` of the YAML file: every limit and timer by name, so that tests can shorten
//! them.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tunnel_process::conn_limiter::ConnLimits;
use tunnel_process::limits::{check_buffer_pool, count, duration, duration_within, size};
use tunnel_process::settings::{ConfigErrors, optional};
use tunnel_proto::session::LivenessLimits;

use tunnel_dns::DnsLimits;

tunnel_process::limits! {
    /// Time limit for TLS and QUIC handshakes, for the admission of an agent and for a whole
    /// enrollment.
    handshake_timeout ("handshakeTimeout", counted as HandshakeTimeout): Duration
        = "5s", duration, live;
    /// Time for a caller to send a request head.
    request_head_timeout ("requestHeadTimeout", counted as RequestHeadTimeout): Duration
        = "10s", duration, live;
    /// Maximum size of a request head, from 8KiB to 16MiB. For one above 16 KiB or 100 fields, five
    /// times its size is reserved from bufferPool: half of the pool for all, a quarter for one
    /// address.
    request_head_bytes ("requestHeadBytes", counted as RequestHeadBytes): usize
        = "1MiB", size(8 << 10, 16 << 20), live;
    /// Time that a caller may keep its connection without a request. Longer than scrape intervals.
    caller_idle_timeout ("callerIdleTimeout", counted as CallerIdleTimeout): Duration
        = "3m", duration, live;
    /// Connections of callers to all listeners. One more evicts the connection that has been idle
    /// for the longest time, of the address with the most connections, and is refused if all are
    /// in use. A quarter is reserved for callers that verify with a client certificate or come over
    /// a Unix socket. auto: a quarter of the memory limit at 84 KiB each (less with a smaller
    /// requestHeadBytes), and a quarter of the open files (RLIMIT_NOFILE), at most 65536.
    callers_total ("callersTotal", counted as CallersTotal): Option<usize>
        = "auto", optional("auto", count(1 << 20)), live;
    /// Connections of callers from one address (IPv6: one /64). auto: half of callersTotal.
    callers_per_source ("callersPerSource", counted as CallersPerSource): Option<usize>
        = "auto", optional("auto", count(1 << 20)), live;
    /// Streams open to one agent at once; more get 503 too_many_streams. One caller without a
    /// client certificate may have half of them; all such callers together, and one caller with a
    /// certificate, three quarters.
    streams_per_agent ("streamsPerAgent", counted as StreamsPerAgent): u32
        = "256", count(1 << 20);
    /// Streams to targets of the cloud that one agent has open at once, at most an eighth of those
    /// of all agents; more are refused with too_many_streams.
    cloud_streams_per_agent ("cloudStreamsPerAgent", counted as CloudStreamsPerAgent): u32
        = "256", count(1 << 16), live;
    /// Streams to targets of the cloud that all agents have open at once, at most an eighth of the
    /// open files.
    cloud_streams_total ("cloudStreamsTotal", counted as CloudStreamsTotal): usize
        = "50000", count(1 << 20);
    /// New streams to targets of the cloud a second of one node, after a burst of twice as many.
    cloud_stream_rate ("cloudStreamRate", counted as CloudStreamRate): u32 = "100", count(1 << 16), live;
    /// Sessions that one node may open at once, then two a second. More are refused with
    /// too_many_sessions.
    admissions_per_node ("admissionsPerNode", counted as AdmissionsPerNode): u32
        = "100", count(1 << 20), live;
    /// Time limit for opening a stream, up to the agent's reply; then 504 agent_timeout.
    open_timeout ("openTimeout", counted as OpenTimeout): Duration = "10s", duration, live;
    /// Time for an agent to dial a target, sent to agents in Welcome; then 504 target_timeout.
    target_dial_timeout ("targetDialTimeout", counted as TargetDialTimeout): Duration
        = "5s", duration, live;
    /// Connections from one address (IPv6: one /64) to the agents' port without a verified
    /// credential. One more evicts the oldest of that address, or is refused if the oldest is
    /// younger than 1 s.
    pre_auth_per_source ("preAuthPerSource", counted as PreAuthPerSource): usize
        = "1024", count(1 << 20), live;
    /// Connections from all addresses to the agents' port without a verified credential. One more
    /// evicts the oldest of the address with the most.
    pre_auth_total ("preAuthTotal", counted as PreAuthTotal): usize = "4096", count(1 << 20), live;
    /// Streams to nodes that another server holds, open over the connection to that server at once,
    /// and as many in the other direction; more get 503 too_many_streams.
    peer_streams ("peerStreams", counted as PeerStreams): usize = "4096", count(1 << 20);
    /// Nodes of one other server that this server remembers. The rest is not reached over it. ca rotate
    /// stores as many for each server while it runs, and counts no agents of one that knows more.
    directory_nodes ("directoryNodes"): usize = "250000", count(1 << 24);
    /// Bytes of one stream that may be in flight and unread, from 16KiB to 16MiB. Over h2 up to
    /// 8MiB on a long path, while few streams are open.
    stream_window ("streamWindow"): u32 = "2MiB", size(16 << 10, 16 << 20);
    /// Memory for data that agents, and other servers, may have sent unread, and for large request
    /// heads. It is reserved before they may send. When stalled readers of one agent hold a quarter
    /// of it, or three quarters are in use, new streams of the callers with the most unread data get
    /// 503 too_many_streams. auto: a quarter of the memory limit, at most 8GiB.
    buffer_pool ("bufferPool", counted as BufferPool): Option<u64>
        = "auto", optional("auto", size(64 << 10, 1 << 50));
    /// Sessions of all agents; one more is refused with overloaded. auto: three tenths of the memory
    /// limit at 48 KiB each.
    sessions_total ("sessionsTotal", counted as SessionsTotal): Option<usize>
        = "auto", optional("auto", count(1 << 24));
    /// Expected interval between keep-alives of an idle agent. The server probes if one is late.
    keep_alive ("keepAlive"): Duration = "5s", duration;
    /// A session that is silent, or loses all data, for this long while requests wait is suspect and
    /// gets no new streams until it answers.
    suspect_after_busy ("suspectAfterBusy", counted as SuspectAfterBusy): Duration
        = "5s", duration, live;
    /// Like suspectAfterBusy, but for a session without requests.
    suspect_after_idle ("suspectAfterIdle", counted as SuspectAfterIdle): Duration
        = "15s", duration, live;
    /// A session that is silent, or loses all data, for this long is closed and its streams are cut.
    dead_after ("deadAfter", counted as DeadAfter): Duration = "60s", duration;
    /// Time for another resolver to answer a DNS query; then SERVFAIL.
    dns_forward_budget ("dnsForwardBudget"): Duration = "400ms", duration;
    /// DNS queries that are forwarded at once; more get SERVFAIL.
    dns_forwards ("dnsForwards"): usize = "512", count(1 << 16);
    /// DNS connections over TCP. More wait, and one source has 32 at most.
    dns_connections ("dnsConnections"): usize = "256", count(1 << 16);
    /// DNS queries a second from one address (IPv6: one /64); more get no answer.
    dns_per_source ("dnsPerSource"): u32 = "10000", count(1 << 30);
    /// Lifetime of the certificates that the local CA issues, from 6s to 10years. They are renewed at
    /// half of it. A session continues for at most 30 s after the end of a certificate that was not
    /// renewed.
    certificate_life ("certificateLife", counted as CertificateLife): Duration
        = "30d", duration_within(CERTIFICATE_LIFE_MIN, CERTIFICATE_LIFE_MAX);
    /// Interval for reading the operator's certificate files again.
    reload_every ("reloadEvery"): Duration = "10s", duration;
}

/// Agents renew at half of the life, and request a certificate every 3 s at most.
const CERTIFICATE_LIFE_MIN: Duration = Duration::from_secs(6);
/// Ten years, which the CA itself lives.
const CERTIFICATE_LIFE_MAX: Duration = Duration::from_secs(315_576_000);

/// Margin between `deadAfter` and QUIC's own idle timeout, which is a backstop.
const IDLE_BACKSTOP: Duration = Duration::from_secs(15);

/// Maximum time for a last renewal after expiry, for clocks that differ slightly.
const EXPIRY_GRACE_MAX: Duration = Duration::from_secs(30);

/// The current limits, of which those that are `live` follow the file. Clones share the limits.
#[derive(Debug, Clone, Default)]
pub struct SharedLimits {
    limits: Arc<ArcSwap<Limits>>,
    /// Bound of `openTimeout` for the listeners that read through this clone.
    open_timeout_max: Option<Duration>,
}

impl From<Limits> for SharedLimits {
    fn from(limits: Limits) -> Self {
        Self {
            limits: Arc::new(ArcSwap::from_pointee(limits)),
            open_timeout_max: None,
        }
    }
}

impl SharedLimits {
    /// Returns the limits of this moment.
    pub fn load(&self) -> Limits {
        let mut limits = **self.limits.load();
        if let Some(max) = self.open_timeout_max {
            limits.open_timeout = limits.open_timeout.min(max);
        }
        limits
    }

    pub fn replace(&self, limits: Limits) {
        self.limits.store(Arc::new(limits));
    }

    /// Returns the same limits with an `openTimeout` of at most `max`.
    pub fn with_open_timeout_max(&self, max: Duration) -> Self {
        Self {
            limits: self.limits.clone(),
            open_timeout_max: Some(max),
        }
    }
}

impl Limits {
    /// Returns QUIC's idle timeout.
    pub fn idle_timeout(&self) -> Duration {
        self.dead_after + IDLE_BACKSTOP
    }

    /// Returns the liveness limits of sessions. The server probes idle sessions too.
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
    pub fn pre_auth(&self) -> ConnLimits {
        ConnLimits {
            per_source: self.pre_auth_per_source,
            total: self.pre_auth_total,
        }
    }

    /// Returns the time for which a session may continue after its certificate has expired.
    pub fn expiry_grace(&self) -> Duration {
        EXPIRY_GRACE_MAX.min(self.certificate_life)
    }

    /// Returns the limits of the embedded DNS.
    pub fn dns(&self) -> DnsLimits {
        DnsLimits {
            forward_budget: self.dns_forward_budget,
            forwards: self.dns_forwards,
            connections: self.dns_connections,
            per_source: self.dns_per_source,
        }
    }

    fn check_together(&self, errors: &mut ConfigErrors) {
        self.liveness().check(self.keep_alive, errors);
        check_buffer_pool(self.buffer_pool, self.stream_window, errors);
    }
}
