//! Permits for the streams of one node's agent. The number of streams is limited in total and for
//! each caller, so that one caller cannot use all of them. A caller has an entry only while it has
//! a stream, so the table is never larger than the number of streams.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tunnel_proto::wire::name::ReplicaId;

/// The identity by which the streams of a caller are counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallerKey {
    /// A verified certificate, by its common name.
    Certificate(Arc<str>),
    /// Another server, which forwards the streams of its callers with or without a certificate.
    Replica {
        replica: ReplicaId,
        is_verified: bool,
    },
    /// A user of this host that connects over a Unix socket. The kernel and the file mode take the
    /// role of a certificate.
    Local(Option<u32>),
    /// A user name with its password.
    User(Arc<str>),
    /// A source without an identity: one IPv4 address, or a /64 of IPv6.
    Source(IpAddr),
}

impl CallerKey {
    /// Returns whether the caller has a certificate, or what takes its role.
    pub(in crate::routing) fn is_verified(&self) -> bool {
        match self {
            Self::Certificate(_) | Self::Local(_) => true,
            Self::Replica { is_verified, .. } => *is_verified,
            Self::User(_) | Self::Source(_) => false,
        }
    }

    /// Returns whether another server forwards the streams.
    pub(in crate::routing) fn is_replica(&self) -> bool {
        match self {
            Self::Replica { .. } => true,
            Self::Certificate(_) | Self::Local(_) | Self::User(_) | Self::Source(_) => false,
        }
    }
}

/// The share of `limits.streamsPerAgent` that is exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamQuota {
    /// All streams of the agent.
    Agent,
    /// The share of all callers without a certificate.
    Unverified,
    /// The share of this caller, which has no certificate.
    UnverifiedCaller,
    /// The share of this caller, which has a certificate.
    VerifiedCaller,
    /// The share of all other servers.
    Forwarded,
}

impl StreamQuota {
    /// Returns whether a stream of `other` counts in this quota of `caller`.
    pub(super) fn includes(self, other: &CallerKey, caller_key: &CallerKey) -> bool {
        match self {
            Self::Agent => true,
            Self::Unverified => !other.is_verified(),
            Self::UnverifiedCaller | Self::VerifiedCaller => other == caller_key,
            Self::Forwarded => other.is_replica(),
        }
    }
}

/// A share has no permit left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaExhausted {
    /// The share that is exhausted.
    pub quota: StreamQuota,
    /// Number of streams in the share.
    pub streams: usize,
}

impl std::fmt::Display for QuotaExhausted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { quota, streams } = self;
        match quota {
            StreamQuota::Agent => write!(
                formatter,
                "the agent has {streams} streams open, the most it may have (limits.streamsPerAgent); try again later"
            ),
            StreamQuota::Unverified => write!(
                formatter,
                "callers without a client certificate have {streams} streams open to the agent, the most they may have together \
                 (three quarters of limits.streamsPerAgent); try again later, or with a client certificate"
            ),
            StreamQuota::UnverifiedCaller => write!(
                formatter,
                "this caller has {streams} streams open to the agent, the most that one caller without a client certificate may \
                 have (half of limits.streamsPerAgent); try again later, or with a client certificate"
            ),
            StreamQuota::VerifiedCaller => write!(
                formatter,
                "this caller has {streams} streams open to the agent, the most that one caller may have (three quarters of \
                 limits.streamsPerAgent); try again later"
            ),
            StreamQuota::Forwarded => write!(
                formatter,
                "other servers have {streams} streams open to the agent, the most they may have together (three quarters of \
                 limits.streamsPerAgent); try again later"
            ),
        }
    }
}

/// Permits for the streams of one agent, over all its sessions.
#[derive(Debug)]
pub(super) struct StreamLimiter {
    limit: usize,
    open: Mutex<OpenStreams>,
    /// Notified when a permit is released.
    released: Notify,
}

/// The permit of one stream. Released when dropped.
#[derive(Debug)]
pub(super) struct StreamPermit {
    limiter: Arc<StreamLimiter>,
    caller_key: CallerKey,
}

#[derive(Debug, Default)]
struct OpenStreams {
    all: usize,
    unverified: usize,
    forwarded: usize,
    callers: HashMap<CallerKey, usize>,
}

impl StreamLimiter {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            open: Mutex::default(),
            released: Notify::new(),
        })
    }

    /// Acquires a permit for one more stream of a caller.
    pub(super) fn acquire(
        self: &Arc<Self>,
        caller_key: &CallerKey,
    ) -> Result<StreamPermit, QuotaExhausted> {
        self.open.lock().acquire(caller_key, self.limit)?;
        Ok(StreamPermit {
            limiter: self.clone(),
            caller_key: caller_key.clone(),
        })
    }

    /// Returns a future that completes when a permit is released after this call.
    pub(super) fn released(&self) -> Notified<'_> {
        self.released.notified()
    }

    /// Returns whether unused streams can stay open. All streams together are then at most a
    /// quarter of the limit, so unused streams take at most half of the share of any caller.
    pub(super) fn has_spare(&self) -> bool {
        self.open.lock().all * 4 <= self.limit
    }
}

impl OpenStreams {
    fn acquire(&mut self, caller_key: &CallerKey, limit: usize) -> Result<(), QuotaExhausted> {
        let known = self.callers.get_mut(caller_key);
        let of_caller = known.as_ref().map_or(0, |count| **count);
        // The remaining quarter is reserved for callers of this server, and of those for callers
        // with a certificate other than the busiest one.
        let three_quarters = limit - limit / 4;
        let exhausted = |quota, streams| Err(QuotaExhausted { quota, streams });
        let is_verified = caller_key.is_verified();
        if self.all >= limit {
            return exhausted(StreamQuota::Agent, self.all);
        }
        if caller_key.is_replica() {
            if self.forwarded >= three_quarters {
                return exhausted(StreamQuota::Forwarded, self.forwarded);
            }
        } else if is_verified {
            if of_caller >= three_quarters {
                return exhausted(StreamQuota::VerifiedCaller, of_caller);
            }
        } else if of_caller >= limit.div_ceil(2) {
            return exhausted(StreamQuota::UnverifiedCaller, of_caller);
        }
        if !is_verified && self.unverified >= three_quarters {
            return exhausted(StreamQuota::Unverified, self.unverified);
        }
        self.all += 1;
        self.unverified += usize::from(!is_verified);
        self.forwarded += usize::from(caller_key.is_replica());
        match known {
            Some(count) => *count += 1,
            None => {
                self.callers.insert(caller_key.clone(), 1);
            }
        }
        Ok(())
    }

    fn remove(&mut self, caller_key: &CallerKey) {
        self.all -= 1;
        self.unverified -= usize::from(!caller_key.is_verified());
        self.forwarded -= usize::from(caller_key.is_replica());
        if let Some(count) = self.callers.get_mut(caller_key) {
            *count -= 1;
            if *count == 0 {
                self.callers.remove(caller_key);
            }
        }
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.limiter.open.lock().remove(&self.caller_key);
        self.limiter.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> CallerKey {
        CallerKey::Source([192, 0, 2, last].into())
    }

    fn replica(name: &str, is_verified: bool) -> CallerKey {
        CallerKey::Replica {
            replica: name.parse().unwrap(),
            is_verified,
        }
    }

    fn certificate(name: &str) -> CallerKey {
        CallerKey::Certificate(name.into())
    }

    /// Acquires as many permits as a caller can have. Returns them with the reason why it gets no
    /// more.
    fn fill(
        limiter: &Arc<StreamLimiter>,
        caller: &CallerKey,
    ) -> (Vec<StreamPermit>, QuotaExhausted) {
        let mut permits = Vec::new();
        loop {
            match limiter.acquire(caller) {
                Ok(permit) => permits.push(permit),
                Err(exhausted) => return (permits, exhausted),
            }
        }
    }

    #[test]
    fn shares_hold_for_every_kind_of_caller_and_for_small_limits() {
        for (limit, half, three_quarters) in [
            (1, 1, 1),
            (2, 1, 2),
            (3, 2, 3),
            (4, 2, 3),
            (5, 3, 4),
            (256, 128, 192),
        ] {
            let user = CallerKey::User("prometheus".into());
            for caller in [source(1), user] {
                let limiter = StreamLimiter::new(limit);
                let (permits, exhausted) = fill(&limiter, &caller);
                assert_eq!(permits.len(), half, "{limit}: {caller:?}");
                // An agent with a limit of one stream has only that stream.
                let quota = match limit {
                    1 => StreamQuota::Agent,
                    _ => StreamQuota::UnverifiedCaller,
                };
                assert_eq!(exhausted.quota, quota, "{limit}: {caller:?}");
            }
            for caller in [certificate("kube-apiserver"), CallerKey::Local(Some(0))] {
                let limiter = StreamLimiter::new(limit);
                let (permits, _) = fill(&limiter, &caller);
                assert_eq!(permits.len(), three_quarters, "{limit}: {caller:?}");
            }
        }
    }

    #[test]
    fn callers_without_certificates_leave_a_quarter_and_a_verified_one_too() {
        let limiter = StreamLimiter::new(256);
        let (first, _) = fill(&limiter, &source(1));
        let (second, exhausted) = fill(&limiter, &source(2));
        assert_eq!((first.len(), second.len()), (128, 64));
        assert_eq!(exhausted.quota, StreamQuota::Unverified);
        assert!(exhausted.to_string().contains("three quarters"));
        let (third, exhausted) = fill(&limiter, &certificate("kube-apiserver"));
        assert_eq!((third.len(), exhausted.quota), (64, StreamQuota::Agent));

        let limiter = StreamLimiter::new(256);
        let (busy, exhausted) = fill(&limiter, &certificate("kube-apiserver"));
        assert_eq!(busy.len(), 192);
        assert_eq!(exhausted.quota, StreamQuota::VerifiedCaller);
        let (other, _) = fill(&limiter, &certificate("prometheus"));
        assert_eq!(other.len(), 64);
    }

    #[test]
    fn other_servers_together_leave_a_quarter_to_callers_of_this_one() {
        let limiter = StreamLimiter::new(256);
        let replica = |name: &str| replica(name, true);
        let _first: Vec<_> = (0..100)
            .map(|_| limiter.acquire(&replica("server-1")).unwrap())
            .collect();
        let (second, exhausted) = fill(&limiter, &replica("server-2"));
        assert_eq!(second.len(), 92);
        assert_eq!(exhausted.quota, StreamQuota::Forwarded);
        assert_eq!(exhausted.streams, 192);
        let (own, exhausted) = fill(&limiter, &source(1));
        assert_eq!((own.len(), exhausted.quota), (64, StreamQuota::Agent));

        // The text reaches a caller of the other server, which is not "this caller".
        let (_only, exhausted) = fill(&StreamLimiter::new(256), &replica("server-1"));
        assert_eq!(exhausted.quota, StreamQuota::Forwarded);
        let text = exhausted.to_string();
        assert!(text.starts_with("other servers have 192 streams"), "{text}");
        assert!(!text.contains("  "), "{text}");
    }

    #[test]
    fn permits_come_back_and_leave_nothing_behind() {
        let limiter = StreamLimiter::new(8);
        let other = replica("server-1", true);
        let callers = [other, source(1), source(2), certificate("a")];
        for _ in 0..3 {
            let permits = callers.each_ref().map(|caller| fill(&limiter, caller));
            assert!(!limiter.has_spare());
            drop(permits);
            let open = limiter.open.lock();
            assert_eq!((open.all, open.unverified, open.callers.len()), (0, 0, 0));
            assert_eq!(open.forwarded, 0);
            drop(open);
            assert!(limiter.has_spare());
        }
    }

    /// A caller without a certificate uses two servers.
    #[test]
    fn callers_without_a_certificate_leave_a_quarter_over_all_servers() {
        let limiter = StreamLimiter::new(8);
        let mut permits: Vec<_> = (0..4)
            .map(|_| limiter.acquire(&source(1)).unwrap())
            .collect();
        let other = replica("server-1", false);
        permits.extend((0..2).map(|_| limiter.acquire(&other).unwrap()));
        let refused = limiter.acquire(&other).unwrap_err();
        let expected = QuotaExhausted {
            quota: StreamQuota::Unverified,
            streams: 6,
        };
        assert_eq!(refused, expected);
        assert!(limiter.acquire(&replica("server-1", true)).is_ok());
        assert!(limiter.acquire(&certificate("kube-apiserver")).is_ok());
    }
}
