//! Numeric codes of refusals, resets, closes and enrollment replies, with their meaning and whether
//! a retry makes sense.

/// Declares an enum of wire codes. Each code has a number and a name for logs and metrics.
/// `Unknown` is for other numbers.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $number:literal $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$vmeta])* $variant,)+
            /// A number of a later version.
            Unknown(u32),
        }

        impl $name {
            /// Returns the number on the wire.
            pub fn number(self) -> u32 {
                match self {
                    $(Self::$variant => $number,)+
                    Self::Unknown(number) => number,
                }
            }

            /// Returns the code for a number from the wire.
            pub fn from_number(number: u32) -> Self {
                match number {
                    $($number => Self::$variant,)+
                    other => Self::Unknown(other),
                }
            }

            /// Returns the name for logs and metric labels.
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                    Self::Unknown(_) => "unknown",
                }
            }

            /// Returns the names of all codes, and the name of those of later versions.
            pub fn labels() -> impl Iterator<Item = &'static str> {
                [$($label,)+ "unknown"].into_iter()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.label())
            }
        }
    };
}

codes! {
    /// The reason why the end that accepts a stream refuses it (StreamReply). For every code,
    /// nothing was started at the target.
    RefusalCode {
        /// The header does not parse, or requests something that this end does not offer.
        BadHeader = 1 "bad_header",
        /// The accepting end's dial policy forbids the target.
        Policy = 2 "refused_by_policy",
        /// The target refused the connection or cannot be reached.
        TargetRefused = 3 "target_refused",
        /// The target did not accept the connection in time.
        TargetTimeout = 4 "target_timeout",
        /// The accepting end has reached its limit of streams.
        TooManyStreams = 5 "too_many_streams",
        /// The accepting end is draining.
        Draining = 6 "draining",
        /// The accepting end had an internal error.
        Internal = 7 "internal",
        /// The accepting server has no session with the node's agent. Between servers only.
        NotHere = 8 "not_here",
        /// The server's configuration has no cloud target of this name. From servers to agents only.
        UnknownTarget = 9 "unknown_target",
        /// The accepting server's sessions with the node's agent are suspect. Between servers only.
        AgentSuspect = 10 "agent_suspect",
        /// The accepting server lost the session with the node's agent before anything was sent.
        /// Between servers only.
        AgentLost = 11 "agent_lost",
        /// The node's agent did not accept the stream in time. Between servers only.
        AgentTimeout = 12 "agent_timeout",
    }
}

codes! {
    /// The reason why a stream was reset. A reset is a cut, never a clean end: bytes may be
    /// missing.
    ResetCode {
        /// The stream was dropped before it was shut down.
        Dropped = 0 "dropped",
        /// The socket that feeds the stream was cut.
        PeerCut = 1 "peer_cut",
        /// The stream's first bytes violate the protocol or did not arrive in time.
        Protocol = 2 "protocol",
        /// The stream is refused. The reply contains the reason. Used with STOP_SENDING only.
        Refused = 3 "refused",
        /// The session that carried the stream behind this server was lost. Between servers only.
        SessionLost = 4 "session_lost",
        /// Nothing was read from the stream for 10 s, and other streams waited for its memory.
        ReaderStalled = 5 "reader_stalled",
        /// The agent is stopping, and the client of the stream to a target of the cloud dials again.
        AgentStopping = 6 "agent_stopping",
    }
}

codes! {
    /// The reason why a session was closed.
    CloseCode {
        /// The session is complete.
        Normal = 0 "normal",
        /// The process is draining.
        Draining = 1 "draining",
        /// The peer violated the protocol.
        Protocol = 2 "protocol",
        /// The peers have no protocol version in common.
        Version = 3 "version",
        /// The name in Hello differs from the name in the certificate.
        NameNotInCredential = 4 "name_not_in_credential",
        /// Another live agent serves this name.
        NameInUse = 5 "name_in_use",
        /// A newer session of the same agent replaced this one.
        Superseded = 6 "superseded",
        /// Hello or Welcome did not arrive in time.
        HandshakeTimeout = 7 "handshake_timeout",
        /// The peer was silent for too long.
        Dead = 8 "dead",
        /// The credential is no longer accepted.
        CredentialRevoked = 9 "credential_revoked",
        /// The limit of sessions or connections is reached.
        Overloaded = 10 "overloaded",
        /// The credential has expired and was not renewed.
        CredentialExpired = 11 "credential_expired",
        /// The node has reached its limit of sessions, or opened sessions too fast.
        TooManySessions = 12 "too_many_sessions",
        /// The server trusts no CA that issued the credential. The client derives the code also from
        /// the alert that ends TLS.
        CredentialUntrusted = 13 "credential_untrusted",
    }
}

codes! {
    /// The reason why an enrollment was refused.
    EnrollCode {
        /// The message does not parse.
        BadRequest = 1 "bad_request",
        /// The token is unknown or its secret is wrong.
        BadToken = 2 "bad_token",
        /// The token has expired.
        TokenExpired = 3 "token_expired",
        /// Another key has already used the token.
        TokenUsed = 4 "token_used",
        /// The token is for another node.
        WrongNode = 5 "wrong_node",
        /// The request exceeded a rate limit after too many failures. Retry later.
        RateLimited = 6 "rate_limited",
        /// The server cannot issue certificates at the moment. Retry later.
        Unavailable = 7 "unavailable",
        /// An operator revoked the token or the node's certificates.
        Revoked = 8 "revoked",
        /// The certificate expired too long ago to be renewed.
        CertificateEnded = 9 "certificate_ended",
        /// The clocks of agent and server differ too much.
        ClockWrong = 10 "clock_wrong",
        /// This server issues no certificates, because the operator provides them.
        NotOffered = 11 "not_offered",
        /// The requester did not prove that it holds the key of the certificate to renew.
        BadProof = 12 "bad_proof",
        /// An operator has to approve the node first. Retry later.
        Pending = 13 "pending",
    }
}

impl CloseCode {
    /// Returns whether the agent should retry. The other codes need an operator.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::Version | Self::NameNotInCredential | Self::CredentialRevoked => false,
            Self::Normal
            | Self::Draining
            | Self::Protocol
            | Self::NameInUse
            | Self::Superseded
            | Self::HandshakeTimeout
            | Self::Dead
            | Self::Overloaded
            | Self::CredentialExpired
            | Self::TooManySessions
            | Self::CredentialUntrusted
            | Self::Unknown(_) => true,
        }
    }
}

impl EnrollCode {
    /// Returns whether the same request may succeed later without an operator.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::RateLimited | Self::Unavailable | Self::Pending | Self::Unknown(_) => true,
            Self::BadRequest
            | Self::BadToken
            | Self::TokenExpired
            | Self::TokenUsed
            | Self::WrongNode
            | Self::Revoked
            | Self::CertificateEnded
            | Self::ClockWrong
            | Self::NotOffered
            | Self::BadProof => false,
        }
    }
}
