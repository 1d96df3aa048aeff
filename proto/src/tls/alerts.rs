//! TLS alerts about certificates (RFC 8446, section 6.2): the peer found a certificate to be
//! revoked, not valid at the peer's time, or from a CA that the peer does not trust.

use std::io;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use rustls::{AlertDescription, CertificateError, Error};

use crate::wire::code::CloseCode;

const CERTIFICATE_REVOKED: u8 = 44;
/// certificate_expired: the certificate has expired, or is not valid yet.
pub(crate) const CERTIFICATE_EXPIRED: u8 = 45;
/// unknown_ca: no CA that the peer trusts issued the certificate.
const UNKNOWN_CA: u8 = 48;
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
    let text = with_dates(&error.to_string());
    format!("{text}{}", clock_hint(error))
}

/// Replaces the Unix times and the seconds in rustls' text about a certificate outside its validity
/// by dates and durations. QUIC errors contain nothing but this text. Returns other texts
/// unchanged.
pub fn with_dates(text: &str) -> String {
    let mut dated = text.replace(" (UNIX)", "");
    if dated.len() == text.len() {
        return dated;
    }
    for (before, after, render) in TIMES {
        if let Some((range, seconds)) = number_between(&dated, before, after) {
            dated.replace_range(range, &render(Duration::from_secs(seconds)));
        }
    }
    dated
}

/// Returns the number between two texts, and the range of the number and the second text.
fn number_between(text: &str, before: &str, after: &str) -> Option<(Range<usize>, u64)> {
    let start = text.find(before)? + before.len();
    let rest = text.get(start..)?;
    let digits = rest.find(|character: char| !character.is_ascii_digit())?;
    let (number, rest) = rest.split_at_checked(digits)?;
    let end = start + digits + after.len();
    let seconds = number.parse().ok()?;
    rest.starts_with(after).then_some((start..end, seconds))
}

fn date(since_epoch: Duration) -> String {
    // The latest date that can be formatted, for times beyond the year 9999.
    let seconds = since_epoch.as_secs().min(253_402_300_799);
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

fn duration(length: Duration) -> String {
    humantime::format_duration(length).to_string()
}

type FormatTime = fn(Duration) -> String;

/// The numbers in rustls' texts: the text before each, the unit behind it, and the form for people.
const TIMES: [(&str, &str, FormatTime); 4] = [
    ("verification time ", "", date),
    ("certificate is not valid after ", "", date),
    ("certificate is not valid before ", "", date),
    (" (", " seconds", duration),
];

pub(super) fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::UnixTime;

    use super::*;

    fn at(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    fn io_error(error: CertificateError) -> io::Error {
        io::Error::other(Error::InvalidCertificate(error))
    }

    #[test]
    fn times_of_certificates_are_dates() {
        let (early, late) = (at(1_700_000_000), at(1_700_090_000));
        let expired = describe(&io_error(CertificateError::ExpiredContext {
            time: late,
            not_after: early,
        }));
        assert_eq!(
            expired,
            "invalid peer certificate: certificate expired: verification time \
             2023-11-15T23:13:20Z, but certificate is not valid after 2023-11-14T22:13:20Z \
             (1day 1h ago); is the clock of this host wrong? run: date -u"
        );
        let early = describe(&io_error(CertificateError::NotValidYetContext {
            time: early,
            not_before: late,
        }));
        assert!(early.contains("time 2023-11-14T22:13:20Z, but"), "{early}");
        let end = "before 2023-11-15T23:13:20Z (1day 1h in future)";
        assert!(early.contains(end), "{early}");
        let never = io_error(CertificateError::ExpiredContext {
            time: at(u64::MAX),
            not_after: at(0),
        });
        assert!(describe(&never).contains("time 9999-12-31T23:59:59Z"));
    }

    #[test]
    fn other_texts_stay_as_they_are() {
        for text in ["", "(7 seconds", "verification time 17 (1 seconds ago)"] {
            assert_eq!(with_dates(text), text);
        }
        for text in ["é (UNIX)", "verification time (UNIX) (x seconds"] {
            assert_eq!(with_dates(text), text.replace(" (UNIX)", ""));
        }
        let other = io_error(CertificateError::UnknownIssuer);
        assert_eq!(describe(&other), other.to_string());
        assert!(is_unknown_issuer(&other));
        assert!(!is_unknown_issuer(&io::Error::other("UnknownIssuer")));
    }
}
