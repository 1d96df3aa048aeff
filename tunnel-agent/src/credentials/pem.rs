//! PEM encoding of certificates.

use tunnel_proto::process::base64;

/// Encodes certificates in PEM (RFC 7468).
pub(super) fn pem_certificates(certificates: &[Vec<u8>]) -> String {
    let mut text = String::new();
    for der in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        // 48 bytes become 64 characters.
        for line in der.chunks(48) {
            text.push_str(&base64::encode(line));
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}
