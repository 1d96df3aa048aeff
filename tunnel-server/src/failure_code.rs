//! The codes of failures of agents, next to those of closed sessions and of enrollments.

use tunnel_proto::wire::code::{CloseCode, EnrollCode};

/// Returns the codes of all failures.
pub fn failure_codes() -> impl Iterator<Item = &'static str> {
    let no_failures = ["normal", "draining", "superseded", "dead", "unknown"];
    let of_sessions = CloseCode::labels().filter(move |code| !no_failures.contains(code));
    let of_enrollments = EnrollCode::labels().filter(|code| *code != "unknown");
    OWN_CODES
        .into_iter()
        .chain(of_sessions)
        .chain(of_enrollments)
}

/// The codes that are neither close codes nor those of enrollments.
const OWN_CODES: [&str; 12] = [
    "timeout",
    "handshake_failed",
    "no_identity",
    "unknown_protocol",
    "proxy_protocol",
    "cut",
    NOT_TLS,
    NO_CERTIFICATE,
    SERVER_EXPIRED,
    SERVER_REJECTED,
    SERVER_UNTRUSTED,
    SHORT_SESSION_CODE,
];

/// A session that ended soon after its admission, and not because an end was stopped or had another
/// session.
pub const SHORT_SESSION_CODE: &str = "short_session";
/// The agent does not trust the CA of this server's certificate.
pub const SERVER_UNTRUSTED: &str = "server_untrusted";
/// The agent finds the server's certificate expired or not yet valid.
pub const SERVER_EXPIRED: &str = "server_expired";
/// The agent rejects the server's certificate for another reason.
pub const SERVER_REJECTED: &str = "server_rejected";
/// A session without a certificate of the agent.
pub const NO_CERTIFICATE: &str = "no_certificate";
/// The first bytes are not TLS.
pub const NOT_TLS: &str = "not_tls";
