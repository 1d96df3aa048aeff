//! The entries of `limits:` whose effect a metric counts. The embedded DNS has its own metrics.

/// An entry of `limits:` that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// A handshake, an admission or an enrollment timed out.
    HandshakeTimeout,
    /// A caller's head or first bytes did not arrive in time.
    RequestHeadTimeout,
    /// A caller's head was too large or had too many fields.
    RequestHeadBytes,
    /// A caller's connection was idle for too long.
    CallerIdleTimeout,
    /// A source reached its limit of caller connections.
    CallersPerSource,
    /// All permits for caller connections were taken.
    CallersTotal,
    /// An agent reached its limit of streams.
    StreamsPerAgent,
    /// A node opened sessions too fast.
    AdmissionsPerNode,
    /// An agent did not accept or answer a stream in time.
    OpenTimeout,
    /// A target did not accept a connection in time.
    TargetDialTimeout,
    /// A source reached its limit of unauthenticated connections.
    PreAuthPerSource,
    /// All permits for unauthenticated connections were taken.
    PreAuthTotal,
    /// Stalled readers held as many bytes as the pool allows.
    BufferPool,
    /// A session did not respond while requests waited.
    SuspectAfterBusy,
    /// An idle session did not respond.
    SuspectAfterIdle,
    /// A session did not respond for so long that it was closed.
    DeadAfter,
    /// A session ended because its certificate expired.
    CertificateLife,
}

impl Limit {
    /// All variants in the order of declaration.
    pub const ALL: [Self; 17] = [
        Self::HandshakeTimeout,
        Self::RequestHeadTimeout,
        Self::RequestHeadBytes,
        Self::CallerIdleTimeout,
        Self::CallersPerSource,
        Self::CallersTotal,
        Self::StreamsPerAgent,
        Self::AdmissionsPerNode,
        Self::OpenTimeout,
        Self::TargetDialTimeout,
        Self::PreAuthPerSource,
        Self::PreAuthTotal,
        Self::BufferPool,
        Self::SuspectAfterBusy,
        Self::SuspectAfterIdle,
        Self::DeadAfter,
        Self::CertificateLife,
    ];

    /// Returns the name of the entry in `limits:`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HandshakeTimeout => "handshakeTimeout",
            Self::RequestHeadTimeout => "requestHeadTimeout",
            Self::RequestHeadBytes => "requestHeadBytes",
            Self::CallerIdleTimeout => "callerIdleTimeout",
            Self::CallersPerSource => "callersPerSource",
            Self::CallersTotal => "callersTotal",
            Self::StreamsPerAgent => "streamsPerAgent",
            Self::AdmissionsPerNode => "admissionsPerNode",
            Self::OpenTimeout => "openTimeout",
            Self::TargetDialTimeout => "targetDialTimeout",
            Self::PreAuthPerSource => "preAuthPerSource",
            Self::PreAuthTotal => "preAuthTotal",
            Self::BufferPool => "bufferPool",
            Self::SuspectAfterBusy => "suspectAfterBusy",
            Self::SuspectAfterIdle => "suspectAfterIdle",
            Self::DeadAfter => "deadAfter",
            Self::CertificateLife => "certificateLife",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LIMITS;

    #[test]
    fn counted_limits_are_entries_of_the_file() {
        for limit in Limit::ALL {
            let name = limit.name();
            assert!(LIMITS.iter().any(|(known, ..)| *known == name), "{name}");
        }
        let names: std::collections::HashSet<_> = Limit::ALL.map(Limit::name).into();
        assert_eq!(names.len(), Limit::ALL.len());
    }
}
