//! Which entries of `limits:` make themselves felt, for the metric that counts them; the embedded DNS has metrics of its own.

/// An entry of `limits:` that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// A handshake, an admission or an enrollment took too long.
    HandshakeTimeout,
    /// A caller's head, or its first bytes, took too long.
    RequestHeadTimeout,
    /// A caller's head was too large, or had too many fields.
    RequestHeadBytes,
    /// A caller kept its connection for too long without a request.
    CallerIdleTimeout,
    /// A source had its share of callers' connections.
    CallersPerSource,
    /// All places for callers' connections were taken.
    CallersTotal,
    /// An agent had as many streams as it may have.
    StreamsPerAgent,
    /// A node opened sessions too fast.
    AdmissionsPerNode,
    /// An agent did not take or answer a stream in time.
    OpenTimeout,
    /// A target did not take a connection in time.
    TargetDialTimeout,
    /// A source had its share of connections without a credential.
    PreAuthPerSource,
    /// All places for connections without a credential were taken.
    PreAuthTotal,
    /// Stalled readers held as much as they may.
    BufferPool,
    /// A session was silent while requests waited.
    SuspectAfterBusy,
    /// A session was silent.
    SuspectAfterIdle,
    /// A session was silent for so long that it was closed.
    DeadAfter,
    /// A session ended with its certificate.
    CertificateLife,
}

impl Limit {
    /// All of them.
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

    /// As in `limits:`.
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
