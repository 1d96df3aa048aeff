//! The proof that renews an expired certificate. The certificate's key signs a value that only the
//! two ends of this TLS connection can compute (RFC 8446, section 7.5), so the proof is not valid
//! on any other connection.

use rustls::SignatureScheme;
use rustls::sign::SigningKey;
use rustls_pki_types::CertificateDer;

use super::provider;
use crate::identity::{IdentityError, public_key};

/// Signature schemes of TLS 1.3 that determine the curve and the hash.
const SCHEMES: [SignatureScheme; 6] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ED25519,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
];

/// The reason why a proof cannot be created or is not valid.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The key supports no signature scheme of TLS 1.3.
    #[error("the key supports no TLS 1.3 signature scheme")]
    Key,
    /// The key could not sign.
    #[error("cannot sign")]
    Sign(#[source] rustls::Error),
    /// The certificate does not parse.
    #[error(transparent)]
    Certificate(#[from] IdentityError),
    /// The signature is from another key or connection, or its scheme is not supported.
    #[error("the signature was not made with the certificate's key for this connection")]
    Signature,
}

/// Signs the exported keying material. Returns the number of the signature scheme and the
/// signature.
///
/// # Errors
/// [`ProofError`].
pub fn sign_proof(
    key: &dyn SigningKey,
    keying_material: &[u8],
) -> Result<(Vec<u8>, u16), ProofError> {
    let signer = key.choose_scheme(&SCHEMES).ok_or(ProofError::Key)?;
    let signature = signer.sign(keying_material).map_err(ProofError::Sign)?;
    Ok((signature, signer.scheme().into()))
}

/// Verifies a signature by the key of `leaf` over the exported keying material.
///
/// # Errors
/// [`ProofError::Certificate`] or [`ProofError::Signature`].
pub fn verify_proof(
    leaf: &CertificateDer<'_>,
    keying_material: &[u8],
    signature: &[u8],
    scheme: u16,
) -> Result<(), ProofError> {
    let scheme = SignatureScheme::from(scheme);
    let known = provider().signature_verification_algorithms.mapping;
    let algorithms = known
        .iter()
        .find(|(known, _)| SCHEMES.contains(&scheme) && *known == scheme);
    // TLS 1.3 uses the first algorithm of the list.
    let algorithm = algorithms.and_then(|(_, algorithms)| algorithms.first());
    algorithm
        .ok_or(ProofError::Signature)?
        .verify_signature(&public_key(leaf)?, keying_material, signature)
        .map_err(|_invalid| ProofError::Signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Role;
    use crate::tls::test_ca::TestCa;

    #[test]
    fn proof_is_valid_for_its_key_and_its_connection_only() {
        let ca = TestCa::new();
        let role = Role::Agent("worker-1".parse().unwrap());
        let (own, other) = (ca.key(&role), ca.key(&role));
        let keying_material = [7; 32];
        let (signature, scheme) = sign_proof(&*own.key, &keying_material).unwrap();
        verify_proof(&own.cert[0], &keying_material, &signature, scheme).unwrap();
        for (leaf, keying_material, signature, scheme) in [
            (&other.cert[0], keying_material, &signature[..], scheme),
            (&own.cert[0], [8; 32], &signature[..], scheme),
            (&own.cert[0], keying_material, &signature[1..], scheme),
            (&own.cert[0], keying_material, &signature[..], 0x0807),
            (&own.cert[0], keying_material, &signature[..], 0x0201),
            (&own.cert[0], keying_material, &[], 0),
        ] {
            assert!(verify_proof(leaf, &keying_material, signature, scheme).is_err());
        }
    }
}
