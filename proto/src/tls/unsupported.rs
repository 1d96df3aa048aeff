//! What TLS cannot do with a target: the cause in words, and what to do at the target.

use std::io;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible};

use super::alerts::tls_error;
use super::signatures::UnsupportedKey;

/// Returns what a target has that TLS does not support, and what to do. Returns `None` for other
/// errors of a handshake with a target.
pub fn unsupported(error: &io::Error) -> Option<String> {
    let text = match tls_error(error)? {
        Error::AlertReceived(AlertDescription::ProtocolVersion)
        | Error::PeerIncompatible(
            PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
        ) => OLD_VERSION.to_owned(),
        Error::AlertReceived(
            AlertDescription::HandshakeFailure | AlertDescription::InsufficientSecurity,
        ) => NOTHING_IN_COMMON.to_owned(),
        Error::InvalidMessage(
            InvalidMessage::CertificatePayloadTooLarge | InvalidMessage::HandshakePayloadTooLarge,
        ) => CHAIN_TOO_LARGE.to_owned(),
        Error::InvalidCertificate(error) => certificate(error)?,
        _ => return None,
    };
    Some(text)
}

fn certificate(error: &CertificateError) -> Option<String> {
    match error {
        CertificateError::Other(cause) => {
            if let Some(key) = cause.0.downcast_ref::<UnsupportedKey>() {
                return Some(format!(
                    "the target's certificate has {key}; give the target another key"
                ));
            }
            let text = match cause.0.downcast_ref::<webpki::Error>()? {
                webpki::Error::UnsupportedCertVersion => X509_VERSION_1,
                webpki::Error::UnsupportedCriticalExtension => CRITICAL_EXTENSION,
                webpki::Error::CaUsedAsEndEntity => CA_AS_TARGET,
                webpki::Error::MaximumPathDepthExceeded => CHAIN_TOO_LONG,
                _ => return None,
            };
            Some(text.to_owned())
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            Some(SIGNATURE_ALGORITHM.to_owned())
        }
        _ => None,
    }
}

const OLD_VERSION: &str = "the target has no version of TLS that is supported (1.2 and 1.3); \
                           enable one of them at the target";
const NOTHING_IN_COMMON: &str = "the target supports nothing of what was offered. TLS 1.2 needs a cipher suite with ECDHE and \
     AES-GCM or ChaCha20-Poly1305 (none with CBC, none with an RSA or DHE key exchange) and no key \
     on P-521; every version needs X25519, P-256 or P-384 and a key that is ECDSA, Ed25519 or RSA \
     (no RSASSA-PSS key, no Ed448, no DSA); enable TLS 1.3 or one of these at the target";
const CHAIN_TOO_LARGE: &str = "the target's certificate chain has more than 64 KiB; let the target \
                               send its certificate and the intermediate CAs only";
const SIGNATURE_ALGORITHM: &str = "the target's certificate or one of its CAs is signed by an algorithm that is not supported, \
     for example with SHA-1; issue it again with SHA-256";
// Certificates that only `--target-tls verify` refuses.
const X509_VERSION_1: &str = "the target's certificate or one of its CAs is of X.509 version 1, which cannot be verified; \
     issue a certificate of version 3, or use --target-tls tunnel";
const CRITICAL_EXTENSION: &str = "the target's certificate or one of its CAs has an unknown critical extension, so it cannot \
     be verified; issue one without it, or use --target-tls tunnel";
const CA_AS_TARGET: &str = "the target's certificate is that of a CA; issue one for the target, or use --target-tls tunnel";
const CHAIN_TOO_LONG: &str = "the chain from the target's certificate to --target-ca is too long; issue the certificate by \
     a CA nearer to the root";
