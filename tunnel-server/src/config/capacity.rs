//! The number of connections that the process carries, from its memory limit and its limit of open
//! files. The limits are divided so that callers leave descriptors for agents, and both leave some
//! for the meta port and the admin socket.

use tokio::sync::Semaphore;
use tracing::info;
use tunnel_process::conn_limiter::ConnLimits;
use tunnel_process::host::Resources;
use tunnel_process::limits::AutoBufferPool;
use tunnel_process::settings::format_size;

use super::{Config, Limits};
use tunnel_dns::DnsLimits;

/// Maximum memory of an idle caller, with TLS. A caller that sends a head needs
/// [`HEAD_COPIES`] times the size of the head in addition. A head above [`CONNECTION_HEAD_BYTES`]
/// has memory of the buffer pool.
const CALLER_BYTES: u64 = 20 << 10;
/// Bytes of a request head for which the permit of a caller's connection counts. With 64 KiB, callers
/// whose requests wait had 300 KiB each.
pub const CONNECTION_HEAD_BYTES: usize = 16 << 10;
/// A head is in memory as it was read, as it was sent, and for a second attempt, and there may be as
/// much of the next one.
const HEAD_COPIES: u64 = 4;
/// Divisor for callers' share of the memory limit. Requests in progress need several times as much
/// memory.
const MEMORY_SHARE: u64 = 4;
/// Memory of a session without streams, measured with 1,000 agents: 46 KiB over h2, 44 KiB over
/// QUIC.
const SESSION_BYTES: u64 = 48 << 10;
/// Share of the memory limit for sessions, in percent. With the shares of callers and of the buffer
/// pool it is four fifths.
const SESSIONS_PERCENT: u64 = 30;
/// The automatic size of the buffer pool.
const BUFFER_POOL: AutoBufferPool = AutoBufferPool {
    memory_share: 4,
    max: 8 << 30,
};
/// Maximum of the automatic limit. An operator must configure a higher one.
const CALLERS_MAX: u64 = 1 << 16;
/// Open files reserved for the process itself: 64 connections of the meta port, 16 of the admin
/// socket, listeners, files, the API server.
const RESERVED: u64 = 160;
/// Open files of one caller: its connection, and one that the CONNECT listener dials for it.
const PER_CALLER: u64 = 2;
/// Divisor for callers' share of the open files that are not reserved. A quarter of the agents'
/// connections may be half-open.
const CALLERS_SHARE: u64 = 4;
/// Divisor for the embedded DNS's share of the open files, if it listens.
const DNS_SHARE: u64 = 8;
/// Divisor for the share of streams to targets of the cloud, if there are targets.
const CLOUD_SHARE: u64 = 8;
/// Divisor for the share of callers' permits that is reserved for callers with a verified client
/// certificate.
const VERIFIED_SHARE: usize = 4;
/// Minimum of the limits for callers and for agents over TCP, however few open files there are.
const SHARE_MIN: u64 = 8;

/// The number of connections that the process carries at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub callers: ConnLimits,
    /// Limits for additional connections of callers with a verified client certificate or over a
    /// Unix socket.
    pub verified_callers: ConnLimits,
    /// Limits for connections to the agents' port without a verified certificate.
    pub half_open: ConnLimits,
    /// Maximum number of TCP connections to the agents' port. Sessions over QUIC need no
    /// descriptor.
    pub agents_over_tcp: usize,
    /// Limits for TCP connections and forwarded queries of the embedded DNS, if it listens.
    pub dns: Option<DnsLimits>,
    /// Maximum number of streams to targets of the cloud; 0 without targets.
    pub cloud_streams: usize,
    /// Maximum number of sessions with agents.
    pub sessions: usize,
    /// Memory for data that peers may send unread, in bytes.
    pub buffer_pool: u64,
}

/// The optional parts of the server that need descriptors.
#[derive(Debug, Clone, Copy, Default)]
pub struct DescriptorUses {
    /// Whether the embedded DNS listens.
    pub dns: bool,
    /// Whether agents have targets of the cloud.
    pub cloud: bool,
}

impl DescriptorUses {
    /// Returns the parts that a configuration has.
    pub fn of(config: &Config) -> Self {
        Self {
            dns: config.dns.is_some(),
            cloud: !config.cloud.is_empty(),
        }
    }
}

impl Capacity {
    /// Divides the resources of the process. A limit set by the operator is used unchanged, except
    /// that half-open connections, the DNS and streams to the cloud never take all descriptors.
    pub fn new(limits: &Limits, uses: DescriptorUses, resources: Resources) -> Self {
        let descriptors = resources.descriptors.unwrap_or(u64::MAX);
        let dns_max = count((descriptors / DNS_SHARE / 2).max(1));
        let dns = uses.dns.then(|| DnsLimits {
            connections: limits.dns_connections.min(dns_max),
            forwards: limits.dns_forwards.min(dns_max),
            ..limits.dns()
        });
        let for_dns = dns.map_or(0, |dns| number(dns.connections) + number(dns.forwards));
        let cloud_max = count((descriptors / CLOUD_SHARE).max(1));
        let cloud_streams = if uses.cloud {
            limits.cloud_streams_total.min(cloud_max)
        } else {
            0
        };
        let free = descriptors.saturating_sub(RESERVED + for_dns + number(cloud_streams));
        let by_descriptors = free / CALLERS_SHARE;
        let head_bytes = number(limits.request_head_bytes.min(CONNECTION_HEAD_BYTES));
        let bytes = CALLER_BYTES + HEAD_COPIES * head_bytes;
        let by_memory = resources.memory.unwrap_or(u64::MAX) / MEMORY_SHARE / bytes;
        let auto = by_descriptors.min(by_memory).clamp(SHARE_MIN, CALLERS_MAX);
        let callers = limits.callers_total.unwrap_or_else(|| count(auto));
        let of_agents = free.saturating_sub(number(callers).saturating_mul(PER_CALLER));
        let agents_over_tcp = count(of_agents.max(SHARE_MIN)).min(Semaphore::MAX_PERMITS);
        let half_open = limits.pre_auth();
        let per_source = limits
            .callers_per_source
            .unwrap_or_else(|| callers.div_ceil(2));
        let verified = callers / VERIFIED_SHARE;
        Self {
            callers: ConnLimits {
                per_source,
                total: callers - verified,
            },
            verified_callers: ConnLimits {
                per_source,
                total: verified,
            },
            half_open: ConnLimits {
                per_source: half_open.per_source,
                total: half_open.total.min((agents_over_tcp / 4).max(1)),
            },
            agents_over_tcp,
            dns,
            cloud_streams,
            sessions: limits
                .sessions_total
                .unwrap_or_else(|| sessions_by_memory(resources))
                .min(Semaphore::MAX_PERMITS),
            buffer_pool: BUFFER_POOL.bytes(
                limits.buffer_pool,
                resources.memory,
                limits.stream_window,
            ),
        }
    }

    /// Describes what the process carries, in one line.
    pub fn describe(&self, resources: Resources) -> String {
        let files = resources.descriptors;
        format!(
            "memory limit {}, open files {}; {} sessions ({} over TCP), {} callers, buffer pool {}",
            resources.memory_text(),
            files.map_or_else(|| "without limit".to_owned(), |files| files.to_string()),
            self.sessions,
            self.agents_over_tcp,
            self.callers.total + self.verified_callers.total,
            format_size(self.buffer_pool)
        )
    }

    /// Logs what the process carries.
    pub fn log(&self, resources: Resources) {
        info!(
            memory_limit_bytes = resources.memory,
            open_files = resources.descriptors,
            sessions = self.sessions,
            agents_over_tcp = self.agents_over_tcp,
            callers = self.callers.total + self.verified_callers.total,
            buffer_pool_bytes = self.buffer_pool,
            "capacity of this process; limits.sessionsTotal, callersTotal and bufferPool change it"
        );
    }

    /// Returns a warning if the limit of open files reduces a configured limit.
    pub fn warning(&self, limits: &Limits, resources: Resources) -> Option<String> {
        let descriptors = resources.descriptors?;
        (self.half_open.total < limits.pre_auth_total).then(|| {
            format!(
                "the limit of {descriptors} open files allows {} callers, and {} agents over TCP of which {} may be in their \
                 handshake; raise it (LimitNOFILE= of systemd, ulimit -n) for more",
                self.callers.total + self.verified_callers.total,
                self.agents_over_tcp,
                self.half_open.total
            )
        })
    }
}

fn sessions_by_memory(resources: Resources) -> usize {
    let memory = resources.memory.unwrap_or(u64::MAX);
    count((memory / 100 * SESSIONS_PERCENT / SESSION_BYTES).max(SHARE_MIN))
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capacity(limits: &Limits, has_dns: bool, descriptors: u64, memory: u64) -> Capacity {
        let resources = Resources {
            descriptors: Some(descriptors),
            memory: Some(memory),
        };
        let uses = DescriptorUses {
            dns: has_dns,
            cloud: false,
        };
        Capacity::new(limits, uses, resources)
    }

    fn callers(capacity: &Capacity) -> usize {
        capacity.callers.total + capacity.verified_callers.total
    }

    #[test]
    fn streams_to_the_cloud_have_an_eighth_of_the_descriptors_and_agents_the_fewer() {
        let resources = Resources {
            descriptors: Some(8192),
            memory: None,
        };
        let of = |cloud| {
            let uses = DescriptorUses { dns: false, cloud };
            Capacity::new(&Limits::default(), uses, resources)
        };
        let (without, with) = (of(false), of(true));
        assert_eq!((without.cloud_streams, with.cloud_streams), (0, 1024));
        assert!(with.agents_over_tcp < without.agents_over_tcp);
        assert!(callers(&with) < callers(&without));
    }

    #[test]
    fn defaults_follow_memory_and_descriptors_and_leave_some_for_everybody() {
        let limits = Limits::default();
        for (descriptors, memory, expected, agents) in [
            (1024, 128 << 20, 216, 432),
            (1024, u64::MAX, 216, 432),
            (1 << 20, 128 << 20, 390, 1_048_576 - 160 - 2 * 390),
            (1 << 20, u64::MAX, 65_536, 1_048_576 - 160 - 2 * 65_536),
            (64, 1 << 20, 8, 8),
            (u64::MAX, u64::MAX, 65_536, Semaphore::MAX_PERMITS),
        ] {
            let capacity = capacity(&limits, false, descriptors, memory);
            let case = format!("{descriptors} files, {memory} bytes");
            assert_eq!(callers(&capacity), expected, "{case}");
            assert_eq!(capacity.agents_over_tcp, agents, "{case}");
            assert!(capacity.half_open.total <= capacity.agents_over_tcp);
            assert_eq!(capacity.verified_callers.total, expected / 4);
            assert_eq!(capacity.callers.per_source, expected.div_ceil(2));
        }
    }

    /// The limits of the manifests: all shares together leave a fifth of the memory.
    #[test]
    fn pool_and_sessions_follow_the_memory_limit_and_the_shares_fit() {
        let limits = Limits::default();
        for (memory, pool, sessions) in [
            (1 << 30, 256 << 20, 6_553),
            (128 << 20, 32 << 20, 819),
            (1 << 20, 8 << 20, 8),
            (64 << 30, 8 << 30, 419_430),
        ] {
            let capacity = capacity(&limits, false, 1 << 20, memory);
            assert_eq!(capacity.buffer_pool, pool, "{memory}");
            assert_eq!(capacity.sessions, sessions, "{memory}");
        }
        let text = capacity(&limits, false, 1 << 20, 1 << 30).describe(Resources {
            descriptors: Some(1 << 20),
            memory: Some(1 << 30),
        });
        let expected = "memory limit 1GiB, open files 1048576; 6553 sessions (";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with(" callers, buffer pool 256MiB"), "{text}");
        let mut limits = Limits::default();
        (limits.buffer_pool, limits.sessions_total) = (Some(1 << 30), Some(20_000));
        let capacity = capacity(&limits, false, 1 << 20, 1 << 30);
        assert_eq!((capacity.buffer_pool, capacity.sessions), (1 << 30, 20_000));
    }

    #[test]
    fn what_the_operator_wrote_counts_and_leaves_the_rest_to_agents() {
        let mut limits = Limits::default();
        (limits.callers_total, limits.callers_per_source) = (Some(400), Some(400));
        let few = capacity(&limits, false, 1024, u64::MAX);
        assert_eq!((callers(&few), few.callers.per_source), (400, 400));
        assert_eq!((few.agents_over_tcp, few.half_open.total), (64, 16));
        let resources = Resources {
            descriptors: Some(1024),
            memory: None,
        };
        let warning = few.warning(&limits, resources).unwrap();
        assert!(warning.contains("LimitNOFILE"), "{warning}");
        let many = capacity(&limits, false, 1 << 20, u64::MAX);
        assert_eq!(many.half_open.total, limits.pre_auth_total);
    }

    #[test]
    fn dns_has_its_own_share_of_few_descriptors() {
        let limits = Limits::default();
        let few = capacity(&limits, true, 1024, u64::MAX);
        let dns = few.dns.unwrap();
        assert_eq!((dns.connections, dns.forwards), (64, 64));
        let all = 160 + 128 + 2 * callers(&few) + few.agents_over_tcp;
        assert!(all <= 1024, "{all}");
        let many = capacity(&limits, true, 1 << 20, u64::MAX).dns.unwrap();
        assert_eq!(many.connections, limits.dns_connections);
        assert_eq!(many.forwards, limits.dns_forwards);
    }
}
