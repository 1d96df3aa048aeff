//! PEM encoding of certificates.

use base64::prelude::{BASE64_STANDARD, Engine as _};

/// Encodes certificates in PEM (RFC 7468).
pub(super) fn pem_certificates(certificates: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for der in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        // 48 bytes become 64 characters.
        for line in der.chunks(48) {
            BASE64_STANDARD.encode_string(line, &mut text);
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}
