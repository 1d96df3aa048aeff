//! TLS alerts about certificates (RFC 8446, section 6.2): the peer found a certificate to be
//! revoked, not valid at the peer's time, or from a CA that the peer does not trust.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use super::validity;
use crate::wire::code::CloseCode;

const CERTIFICATE_REVOKED: u8 = 44;
/// certificate_expired: the certificate has expired, or is not valid yet.
pub(crate) const CERTIFICATE_EXPIRED: u8 = 45;
/// unknown_ca: no CA that the peer trusts issued the certificate.
pub(crate) const UNKNOWN_CA: u8 = 48;
/// A hint for errors where this end found the server's certificate to be outside its validity.
pub(crate) const CLOCK_HINT: &str = "; is the clock of this host wrong? run: date -u";

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
    use super::*;

    #[test]
    fn only_an_error_of_tls_is_of_an_unknown_issuer() {
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert!(is_unknown_issuer(&io::Error::other(unknown)));
        assert!(!is_unknown_issuer(&io::Error::other("UnknownIssuer")));
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
