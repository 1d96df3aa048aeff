//! What TLS alerts about certificates mean (RFC 8446, section 6.2): revoked, or not valid at the time of whoever judged.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

use crate::wire::code::CloseCode;

/// certificate_revoked.
const CERTIFICATE_REVOKED: u8 = 44;
/// certificate_expired: it has ended, or has not begun.
pub(crate) const CERTIFICATE_EXPIRED: u8 = 45;
/// Added where this end found the server's certificate to be outside its time.
pub(crate) const CLOCK_HINT: &str = "; is the clock of this host wrong? run: date -u";

/// What the server says of this end's certificate by an alert, and in words.
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

/// The alert by which the peer ended TLS, if an error is that.
pub(crate) fn received_alert(error: &io::Error) -> Option<u8> {
    match tls_error(error)? {
        Error::AlertReceived(alert) => Some(AlertDescription::into(*alert)),
        _ => None,
    }
}

/// Whether TLS itself failed, at this end or by an alert, and not the connection below it.
pub(crate) fn is_tls_error(error: &io::Error) -> bool {
    tls_error(error).is_some()
}

/// Words to add when a certificate was found outside its time by this host's clock; else none.
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
