//! Numeric codes of refusals, resets, closes and enrollment answers, what they mean and who may retry.

/// Makes an enum of wire codes with a number, a name for logs and metrics, and an unknown case.
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
            /// The number on the wire.
            #[must_use]
            pub fn number(self) -> u32 {
                match self {
                    $(Self::$variant => $number,)+
                    Self::Unknown(number) => number,
                }
            }

            /// The meaning of a number from the wire.
            #[must_use]
            pub fn from_number(number: u32) -> Self {
                match number {
                    $($number => Self::$variant,)+
                    other => Self::Unknown(other),
                }
            }

            /// The word for logs and metric labels.
            #[must_use]
            pub fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                    Self::Unknown(_) => "unknown",
                }
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
    /// Why the acceptor of a stream refuses it (StreamReply). Nothing was started at the target in any of them.
    RefusalCode {
        /// The header does not parse or asks for something this end does not offer.
        BadHeader = 1 "bad_header",
        /// The acceptor's own policy forbids the target.
        Policy = 2 "refused_by_policy",
        /// The target refused the connection or cannot be reached.
        TargetRefused = 3 "target_refused",
        /// The target did not accept the connection in time.
        TargetTimeout = 4 "target_timeout",
        /// The acceptor has no room for another stream.
        TooManyStreams = 5 "too_many_streams",
        /// The acceptor is stopping.
        Draining = 6 "draining",
        /// The acceptor broke.
        Internal = 7 "internal",
    }
}

codes! {
    /// Why a stream was reset. A reset says that bytes may be missing: a cut, never a clean end.
    ResetCode {
        /// The stream was dropped before it was shut down.
        Dropped = 0 "dropped",
        /// The socket behind the stream was cut.
        PeerCut = 1 "peer_cut",
        /// The stream's first bytes break the protocol or did not come in time.
        Protocol = 2 "protocol",
        /// The stream is refused, see its reply (used with STOP_SENDING only).
        Refused = 3 "refused",
    }
}

codes! {
    /// Why a session was closed.
    CloseCode {
        /// All is done.
        Normal = 0 "normal",
        /// The process is stopping.
        Draining = 1 "draining",
        /// The peer broke the protocol.
        Protocol = 2 "protocol",
        /// No protocol version in common.
        Version = 3 "version",
        /// The name in Hello is not the one in the credential.
        NameNotInCredential = 4 "name_not_in_credential",
        /// Another live agent serves this name.
        NameInUse = 5 "name_in_use",
        /// A newer session of the same agent took over.
        Superseded = 6 "superseded",
        /// Hello or Welcome did not come in time.
        HandshakeTimeout = 7 "handshake_timeout",
        /// Nothing was heard for too long.
        Dead = 8 "dead",
        /// The credential is no longer accepted.
        CredentialRevoked = 9 "credential_revoked",
        /// Too many sessions or connections.
        Overloaded = 10 "overloaded",
        /// The credential's time is over, and it was not renewed.
        CredentialExpired = 11 "credential_expired",
        /// The node has as many sessions as it may have, or opened them too fast.
        TooManySessions = 12 "too_many_sessions",
    }
}

codes! {
    /// Why an enrollment was refused.
    EnrollCode {
        /// The message does not parse.
        BadRequest = 1 "bad_request",
        /// The token is unknown or its secret is wrong.
        BadToken = 2 "bad_token",
        /// The token's time is over.
        TokenExpired = 3 "token_expired",
        /// The token was used by another key.
        TokenUsed = 4 "token_used",
        /// The token is for another node.
        WrongNode = 5 "wrong_node",
        /// Too many failures; try later.
        RateLimited = 6 "rate_limited",
        /// The server cannot issue now; try later.
        Unavailable = 7 "unavailable",
        /// An operator took the token back, or revoked the node's certificates.
        Revoked = 8 "revoked",
        /// The certificate ended too long ago to be renewed.
        CertificateEnded = 9 "certificate_ended",
        /// Agent's and server's clocks are too far apart.
        ClockWrong = 10 "clock_wrong",
        /// This server issues no certificates: its operator brings them.
        NotOffered = 11 "not_offered",
        /// Whoever asks did not prove to hold the certificate that is to be renewed.
        BadProof = 12 "bad_proof",
    }
}

impl CloseCode {
    /// Whether the agent should try again at all; the others need a person.
    #[must_use]
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
            | Self::Unknown(_) => true,
        }
    }
}

impl EnrollCode {
    /// Whether the same request may succeed later without a person's help.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        match self {
            Self::RateLimited | Self::Unavailable | Self::Unknown(_) => true,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_unknown_ones_are_kept() {
        for number in 0..64 {
            assert_eq!(RefusalCode::from_number(number).number(), number);
            assert_eq!(ResetCode::from_number(number).number(), number);
            assert_eq!(CloseCode::from_number(number).number(), number);
            assert_eq!(EnrollCode::from_number(number).number(), number);
        }
        assert_eq!(CloseCode::from_number(4000).label(), "unknown");
    }
}
