//! Errors about certificates outside their validity: their text for people, with dates in place of
//! rustls' seconds.
//!
//! An error of QUIC has the text of the TLS error and not the error itself. The verifiers therefore
//! remember the errors that they return, and the error that made such a text is found again.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls::{CertificateError, Error};
use rustls_pki_types::UnixTime;

/// Returns the text of an error, with dates.
pub(super) fn text(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            let age = duration(time.as_secs().saturating_sub(not_after.as_secs()));
            format!(
                "invalid peer certificate: certificate expired: verification time {}, but \
                 certificate is not valid after {} ({age} ago)",
                date(*time),
                date(*not_after),
            )
        }
        Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before }) => {
            let wait = duration(not_before.as_secs().saturating_sub(time.as_secs()));
            format!(
                "invalid peer certificate: certificate not valid yet: verification time {}, but \
                 certificate is not valid before {} ({wait} in future)",
                date(*time),
                date(*not_before),
            )
        }
        other => other.to_string(),
    }
}

/// Remembers an error that a verifier returns, for [`with_dates`].
pub(super) fn remember(error: Error) -> Error {
    let has_times = matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::ExpiredContext { .. } | CertificateError::NotValidYetContext { .. }
        )
    );
    if has_times {
        RECENT.add(&error);
    }
    error
}

/// Returns the text of an error of QUIC with that of the TLS error in it replaced by [`text`].
pub(crate) fn with_dates(quic: &str) -> String {
    RECENT.with_dates(quic)
}

/// The last errors, the newest first.
struct RecentErrors(Mutex<VecDeque<Error>>);

impl RecentErrors {
    const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    fn add(&self, error: &Error) {
        let mut recent = self.0.lock();
        if !recent.contains(error) {
            recent.truncate(RECENT_MAX - 1);
            recent.push_front(error.clone());
        }
    }

    fn with_dates(&self, quic: &str) -> String {
        let recent = self.0.lock();
        let mut causes = recent.iter().map(|error| (error.to_string(), error));
        match causes.find(|(cause, _)| quic.contains(cause)) {
            Some((cause, error)) => quic.replace(&cause, &text(error)),
            None => quic.to_owned(),
        }
    }
}

fn date(time: UnixTime) -> String {
    // The latest date that can be formatted, for times beyond the year 9999.
    let seconds = time.as_secs().min(253_402_300_799);
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

fn duration(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

static RECENT: RecentErrors = RecentErrors::new();
/// Errors that are remembered. The text of an error is made within milliseconds.
const RECENT_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    fn expired(time: u64, not_after: u64) -> Error {
        let (time, not_after) = (at(time), at(not_after));
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after })
    }

    #[test]
    fn times_of_certificates_are_dates() {
        assert_eq!(
            text(&expired(1_700_090_000, 1_700_000_000)),
            "invalid peer certificate: certificate expired: verification time \
             2023-11-15T23:13:20Z, but certificate is not valid after 2023-11-14T22:13:20Z \
             (1day 1h ago)"
        );
        let (time, not_before) = (at(1_700_000_000), at(1_700_090_000));
        let early = CertificateError::NotValidYetContext { time, not_before };
        let early = text(&Error::InvalidCertificate(early));
        assert!(early.contains("time 2023-11-14T22:13:20Z, but"), "{early}");
        let end = "before 2023-11-15T23:13:20Z (1day 1h in future)";
        assert!(early.ends_with(end), "{early}");
        let never = text(&expired(u64::MAX, 0));
        assert!(never.contains("time 9999-12-31T23:59:59Z"), "{never}");
    }

    #[test]
    fn text_of_quic_has_the_dates_of_the_error_that_the_verifier_returned() {
        let error = expired(1_700_090_001, 1_700_000_001);
        let quic = |error: &Error| format!("the cryptographic handshake failed: error 45: {error}");
        assert_eq!(with_dates(&quic(&error)), quic(&error));
        assert_eq!(remember(error.clone()), error);
        let expected = format!(
            "the cryptographic handshake failed: error 45: {}",
            text(&error)
        );
        assert_eq!(with_dates(&quic(&error)), expected);
        // Another error, and one without times.
        let other = quic(&expired(1_700_090_002, 1_700_000_001));
        assert_eq!(with_dates(&other), other);
        let unknown = remember(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        assert_eq!(with_dates(&quic(&unknown)), quic(&unknown));
    }

    #[test]
    fn errors_that_are_remembered_are_bounded() {
        let recent = RecentErrors::new();
        for time in 0..100 {
            recent.add(&expired(time, 1));
            recent.add(&expired(time, 1));
        }
        assert_eq!(recent.0.lock().len(), RECENT_MAX);
        assert_eq!(recent.0.lock().front(), Some(&expired(99, 1)));
    }
}
