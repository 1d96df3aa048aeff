//! TLS alerts about certificates (RFC 8446, section 6.2): the peer found a certificate to be
//! revoked, or not valid at the peer's time.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use crate::wire::code::CloseCode;

const CERTIFICATE_REVOKED: u8 = 44;
/// certificate_expired: the certificate has expired, or is not valid yet.
pub(crate) const CERTIFICATE_EXPIRED: u8 = 45;
/// A hint for errors where this end found the server's certificate to be outside its validity.
pub(crate) const CLOCK_HINT: &str = "; is the clock of this host wrong? run: date -u";

/// Returns the close code and the text for an alert by which the server rejects this end's
/// certificate.
#[must_use]
pub fn alert_meaning(alert: u8) -> Option<(CloseCode, &'static str)> {
    match alert {
        CERTIFICATE_REVOKED => Some((
            CloseCode::CredentialRevoked,
            "the server has revoked this node's certificate",
        )),
        CERTIFICATE_EXPIRED => Some((
            CloseCode::CredentialExpired,
            "this node's certificate is expired or not yet valid by the server's clock",
        )),
        _ => None,
    }
}

/// Returns whether [`alert_meaning`] can return this code.
#[must_use]
pub fn is_certificate_rejection(code: CloseCode) -> bool {
    matches!(
        code,
        CloseCode::CredentialRevoked | CloseCode::CredentialExpired
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

/// Returns a hint to append if a certificate is outside its validity by this host's clock. Returns
/// an empty text otherwise.
#[must_use]
pub fn clock_hint(error: &io::Error) -> &'static str {
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

fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}
