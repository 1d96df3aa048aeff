//! TLS alerts about certificates (RFC 8446, section 6.2): the peer found a certificate to be
//! revoked, not valid at the peer's time, or from a CA that the peer does not trust.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use super::validity;
use crate::wire::code::CloseCode;

const BAD_CERTIFICATE: u8 = 42;
const UNSUPPORTED_CERTIFICATE: u8 = 43;
const CERTIFICATE_REVOKED: u8 = 44;
/// certificate_expired: the certificate has expired, or is not valid yet.
pub(crate) const CERTIFICATE_EXPIRED: u8 = 45;
const CERTIFICATE_UNKNOWN: u8 = 46;
/// unknown_ca: no CA that the peer trusts issued the certificate.
pub(crate) const UNKNOWN_CA: u8 = 48;
const ACCESS_DENIED: u8 = 49;
const CERTIFICATE_REQUIRED: u8 = 116;
/// A hint for errors where this end found the server's certificate to be outside its validity.
pub(crate) const CLOCK_HINT: &str = "; is the clock of this host wrong? run: date -u";
/// A hint for errors where this end found the server's certificate to be that of no server.
const USAGE_HINT: &str = "; no tunnel-server has such a certificate. Does a proxy or \
                          firewall on the path open TLS? 'tunnel-agent doctor' prints what was \
                          presented";

/// Returns the close code and the text for an alert by which the server rejects this end's
/// certificate.
pub fn alert_meaning(alert: u8) -> Option<(CloseCode, &'static str)> {
    match alert {
        CERTIFICATE_REVOKED => Some((
            CloseCode::CredentialRevoked,
            "the server has revoked this node or its certificate; a revocation of the node ends with \
             'tunnel-server nodes unrevoke'. To enroll again, remove agent.key and agent.crt from \
             the agent's data directory and give the agent a new token",
        )),
        CERTIFICATE_EXPIRED => Some((
            CloseCode::CredentialExpired,
            "this node's certificate is expired or not yet valid by the server's clock",
        )),
        UNKNOWN_CA => Some((
            CloseCode::CredentialUntrusted,
            "the server does not trust the CA of this node's certificate; an agent with a token enrolls again; \
             otherwise add that CA to the server's --agent-ca (of a kubelet's certificate: --kubelet-client-ca), \
             or give the agent a certificate of the server's CA; --ca-file only verifies the server",
        )),
        _ => None,
    }
}

/// Returns whether [`alert_meaning`] can return this code.
pub fn is_certificate_rejection(code: CloseCode) -> bool {
    matches!(
        code,
        CloseCode::CredentialRevoked
            | CloseCode::CredentialExpired
            | CloseCode::CredentialUntrusted
    )
}

/// The alert about a certificate that ended a handshake (RFC 8446, section 6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CertificateAlert {
    /// Why the certificate was rejected.
    pub reason: CertificateRejection,
    /// Whether the peer sent the alert, about this end's certificate.
    pub is_from_peer: bool,
}

/// The reason why an end rejected a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateRejection {
    /// certificate_required: there was none.
    Missing,
    /// unknown_ca: no trusted CA issued it.
    UnknownCa,
    /// certificate_expired: it is expired or not yet valid at the time of the rejecting end.
    Expired,
    /// certificate_revoked.
    Revoked,
    /// Any other alert about certificates.
    Other,
}

impl CertificateAlert {
    /// Returns the alert with this number, if it is about a certificate.
    pub(crate) fn new(alert: u8, is_from_peer: bool) -> Option<Self> {
        let reason = match alert {
            CERTIFICATE_REQUIRED => CertificateRejection::Missing,
            UNKNOWN_CA => CertificateRejection::UnknownCa,
            CERTIFICATE_EXPIRED => CertificateRejection::Expired,
            CERTIFICATE_REVOKED => CertificateRejection::Revoked,
            BAD_CERTIFICATE | UNSUPPORTED_CERTIFICATE | CERTIFICATE_UNKNOWN | ACCESS_DENIED => {
                CertificateRejection::Other
            }
            _ => return None,
        };
        Some(Self {
            reason,
            is_from_peer,
        })
    }

    /// Returns the alert that ended a handshake over TCP, if it is about a certificate.
    pub fn of(error: &io::Error) -> Option<Self> {
        let (alert, is_from_peer) = match tls_error(error)? {
            Error::AlertReceived(alert) => (AlertDescription::into(*alert), true),
            Error::NoCertificatesPresented => (CERTIFICATE_REQUIRED, false),
            Error::InvalidCertificate(error) => {
                (AlertDescription::from(error.clone()).into(), false)
            }
            _ => return None,
        };
        Self::new(alert, is_from_peer)
    }
}

/// Returns the alert by which the peer ended TLS, if `error` contains one.
pub(crate) fn received_alert(error: &io::Error) -> Option<u8> {
    match tls_error(error)? {
        Error::AlertReceived(alert) => Some(AlertDescription::into(*alert)),
        _ => None,
    }
}

/// Returns whether TLS itself failed, at this end or by an alert, rather than the connection below
/// it.
pub(crate) fn is_tls_error(error: &io::Error) -> bool {
    tls_error(error).is_some()
}

/// Returns whether this end found that no trusted CA issued the peer's certificate.
pub fn is_unknown_issuer(error: &io::Error) -> bool {
    let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
    tls_error(error) == Some(&unknown)
}

/// Returns a hint to append if a certificate is outside its validity by this host's clock. Returns
/// an empty text otherwise.
fn clock_hint(error: &io::Error) -> &'static str {
    let by_time = matches!(
        tls_error(error),
        Some(Error::InvalidCertificate(
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
        ))
    );
    if by_time { CLOCK_HINT } else { "" }
}

/// Returns a hint to append if what a server of sessions presented is no certificate of a server,
/// as when a program on the path opens TLS. Returns an empty text otherwise.
pub(crate) fn usage_hint(error: &io::Error) -> &'static str {
    let by_usage = matches!(
        tls_error(error),
        Some(Error::InvalidCertificate(
            CertificateError::Other(_) | CertificateError::ApplicationVerificationFailure
        ))
    );
    if by_usage { USAGE_HINT } else { "" }
}

/// Returns the text of a TLS error for people, with dates and a hint about the clocks.
pub fn describe(error: &io::Error) -> String {
    format!("{}{}", text(error), clock_hint(error))
}

/// Returns the text of a TLS error for people, with dates.
pub fn text(error: &io::Error) -> String {
    tls_error(error).map_or_else(|| error.to_string(), validity::text)
}

pub(super) fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::OtherError;

    use super::*;

    #[test]
    fn only_an_error_of_tls_is_of_an_unknown_issuer() {
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert!(is_unknown_issuer(&io::Error::other(unknown)));
        assert!(!is_unknown_issuer(&io::Error::other("UnknownIssuer")));
    }

    #[test]
    fn only_a_certificate_that_is_no_servers_has_a_hint_about_the_path() {
        let hint = |error| usage_hint(&io::Error::other(Error::InvalidCertificate(error)));
        let cause = OtherError(Arc::new(webpki::Error::CaUsedAsEndEntity));
        assert_eq!(hint(CertificateError::Other(cause)), USAGE_HINT);
        assert_eq!(hint(CertificateError::Expired), "");
    }

    #[test]
    fn alert_about_a_certificate_has_its_reason_and_its_sender() {
        use CertificateRejection::{Expired, Missing, Other, Revoked, UnknownCa};
        let invalid = Error::InvalidCertificate;
        for (error, expected) in [
            (
                Error::AlertReceived(AlertDescription::UnknownCA),
                Some((UnknownCa, true)),
            ),
            (
                Error::AlertReceived(AlertDescription::CertificateExpired),
                Some((Expired, true)),
            ),
            (
                Error::AlertReceived(AlertDescription::BadCertificate),
                Some((Other, true)),
            ),
            (Error::AlertReceived(AlertDescription::InternalError), None),
            (Error::NoCertificatesPresented, Some((Missing, false))),
            (
                invalid(CertificateError::UnknownIssuer),
                Some((UnknownCa, false)),
            ),
            (invalid(CertificateError::Expired), Some((Expired, false))),
            (
                invalid(CertificateError::NotValidYet),
                Some((Expired, false)),
            ),
            (invalid(CertificateError::Revoked), Some((Revoked, false))),
            (Error::HandshakeNotComplete, None),
        ] {
            let alert = CertificateAlert::of(&io::Error::other(error.clone()));
            let alert = alert.map(|alert| (alert.reason, alert.is_from_peer));
            assert_eq!(alert, expected, "{error:?}");
        }
        assert_eq!(CertificateAlert::of(&io::Error::other("closed")), None);
    }

    #[test]
    fn certificate_outside_its_validity_has_a_hint_about_the_clock() {
        let described = |error| describe(&io::Error::other(Error::InvalidCertificate(error)));
        for error in [CertificateError::Expired, CertificateError::NotValidYet] {
            let text = described(error);
            assert!(text.ends_with("wrong? run: date -u"), "{text}");
        }
        let other = CertificateError::UnknownIssuer;
        assert_eq!(
            described(other.clone()),
            Error::InvalidCertificate(other).to_string()
        );
        assert_eq!(describe(&io::Error::other("closed")), "closed");
    }
}
