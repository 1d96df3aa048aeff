//! The meaning of quinn's connection errors.

use std::io;

use crate::tls::{self, CertificateAlert};
use crate::transport::{CloseReason, ClosedBy, HandshakeError};
use crate::wire::code::CloseCode;

/// Maps the error of a dial. Only a rejected certificate is certain to come from the server. Any
/// device on the path can answer a QUIC packet otherwise, and such an answer must not prevent the
/// fallback to TCP.
pub(super) fn dial_error(error: quinn::ConnectionError) -> HandshakeError {
    let code = match &error {
        quinn::ConnectionError::TransportError(ours) => Some(u64::from(ours.code)),
        quinn::ConnectionError::ConnectionClosed(theirs) => Some(u64::from(theirs.error_code)),
        quinn::ConnectionError::TimedOut => return HandshakeError::Timeout,
        _ => None,
    };
    let alert = code
        .and_then(|code| code.checked_sub(CRYPTO_ERROR))
        .is_some_and(|alert| CERTIFICATE_ALERTS.contains(&alert) || alert == CERTIFICATE_REQUIRED);
    let reported = matches!(error, quinn::ConnectionError::ConnectionClosed(_));
    if let Some((code, reason)) = code.filter(|_| reported).and_then(verdict) {
        HandshakeError::CertificateRejected(code, reason.to_owned())
    } else if code == Some(CRYPTO_ERROR + u64::from(tls::UNKNOWN_CA)) {
        HandshakeError::UnknownIssuer(error.to_string())
    } else if alert {
        let expired = code == Some(CRYPTO_ERROR + u64::from(tls::CERTIFICATE_EXPIRED));
        let hint = if expired { tls::CLOCK_HINT } else { "" };
        let text = tls::with_dates(&error.to_string());
        HandshakeError::Transport(format!("{text}{hint}"))
    } else if reported && code == Some(CONNECTION_REFUSED) {
        HandshakeError::Refused
    } else {
        HandshakeError::Connect(io::Error::new(
            io::ErrorKind::ConnectionRefused,
            error.to_string(),
        ))
    }
}

/// Maps the error that ended a connection.
pub(super) fn close_reason(error: quinn::ConnectionError) -> CloseReason {
    let (by, code) = match &error {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = CloseCode::from_number(
                u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX),
            );
            let reason = crate::wire::header::one_line(String::from_utf8_lossy(&close.reason));
            return CloseReason::peer(code, reason);
        }
        quinn::ConnectionError::LocallyClosed => (ClosedBy::Local, CloseCode::Normal),
        quinn::ConnectionError::TimedOut => (ClosedBy::Network, CloseCode::Dead),
        quinn::ConnectionError::Reset => (ClosedBy::Network, CloseCode::Dead),
        quinn::ConnectionError::ConnectionClosed(close) => {
            if let Some((code, reason)) = verdict(u64::from(close.error_code)) {
                return CloseReason::network(code, reason);
            }
            (ClosedBy::Network, CloseCode::Protocol)
        }
        quinn::ConnectionError::TransportError(_)
        | quinn::ConnectionError::VersionMismatch
        | quinn::ConnectionError::CidsExhausted => (ClosedBy::Network, CloseCode::Protocol),
    };
    CloseReason::new(by, code, error.to_string())
}

pub(super) fn handshake_error(error: quinn::ConnectionError) -> HandshakeError {
    let (code, is_from_peer) = match &error {
        quinn::ConnectionError::TimedOut => return HandshakeError::Timeout,
        quinn::ConnectionError::ConnectionClosed(theirs) => (u64::from(theirs.error_code), true),
        quinn::ConnectionError::TransportError(ours) => (u64::from(ours.code), false),
        _ => (0, false),
    };
    let text = tls::with_dates(&error.to_string());
    let alert = code.checked_sub(CRYPTO_ERROR);
    let alert = alert.and_then(|alert| u8::try_from(alert).ok());
    match alert.and_then(|alert| CertificateAlert::new(alert, is_from_peer)) {
        Some(alert) => HandshakeError::Certificate(alert, text),
        None => HandshakeError::Transport(text),
    }
}

/// Returns the close code and the text if a QUIC error code means that the server rejected this
/// agent's certificate.
pub(super) fn verdict(code: u64) -> Option<(CloseCode, &'static str)> {
    let alert = code.checked_sub(CRYPTO_ERROR)?;
    tls::alert_meaning(u8::try_from(alert).ok()?)
}

/// The transport error of a server that accepts no new connections at the moment (RFC 9000, section
/// 20.1).
const CONNECTION_REFUSED: u64 = 0x2;
/// Offset of TLS alerts in QUIC error codes (RFC 9001, section 4.8).
const CRYPTO_ERROR: u64 = 0x100;
/// Alerts from handshake_failure to decrypt_error, about certificates and their keys (RFC 8446,
/// section 6.2).
const CERTIFICATE_ALERTS: std::ops::RangeInclusive<u64> = 40..=51;
const CERTIFICATE_REQUIRED: u64 = 116;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quinn::{ConnectionClose, ConnectionError};
    use quinn_proto::{TransportError, TransportErrorCode};

    use super::*;

    #[test]
    fn only_a_verdict_about_a_certificate_is_an_alert() {
        let reported = |code| {
            dial_error(ConnectionError::TransportError(TransportError {
                code,
                frame: None,
                reason: String::new(),
            }))
        };
        for alert in [42, 46, 116] {
            let error = reported(TransportErrorCode::crypto(alert));
            assert!(matches!(error, HandshakeError::Transport(_)), "{alert}");
        }
        let unknown = reported(TransportErrorCode::crypto(48));
        assert!(matches!(unknown, HandshakeError::UnknownIssuer(_)));
        // no_application_protocol: another service uses the port.
        let others = [
            TransportErrorCode::crypto(120),
            TransportErrorCode::CONNECTION_REFUSED,
            TransportErrorCode::PROTOCOL_VIOLATION,
        ];
        for other in others {
            let error = reported(other);
            assert!(matches!(error, HandshakeError::Connect(_)), "{other}");
        }
        let by_server = dial_error(ConnectionError::ConnectionClosed(ConnectionClose {
            error_code: TransportErrorCode::crypto(48),
            frame_type: None,
            reason: Bytes::new(),
        }));
        assert_eq!(by_server.code(), Some(CloseCode::CredentialUntrusted));
        let silent = dial_error(ConnectionError::TimedOut);
        assert!(matches!(silent, HandshakeError::Timeout));
        let mismatch = dial_error(ConnectionError::VersionMismatch);
        assert!(matches!(mismatch, HandshakeError::Connect(_)));
    }
}
