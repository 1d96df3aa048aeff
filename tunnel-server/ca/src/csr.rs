//! Certificate requests of agents. A request must be signed by its own key, and the key must be of
//! a supported type.

use aws_lc_rs::rsa::PublicEncryptingKey;
use rcgen::{
    CertificateSigningRequestParams, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
    PKCS_RSA_SHA256, PKCS_RSA_SHA384, PKCS_RSA_SHA512, PublicKey, PublicKeyData,
};
use rustls_pki_types::CertificateSigningRequestDer;
use tunnel_proto::identity::sha256;

use super::IssueError;

/// A request whose sender has proved possession of the private key. Requested names and extensions
/// are dropped.
#[derive(Debug, Clone)]
pub struct AgentCsr {
    key: PublicKey,
}

impl AgentCsr {
    /// Parses and verifies a PKCS#10 request in DER.
    ///
    /// # Errors
    /// Returns [`IssueError::Request`] or [`IssueError::Key`].
    pub fn parse(csr_der: &[u8]) -> Result<Self, IssueError> {
        let request =
            CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(csr_der))
                .map_err(IssueError::Request)?;
        let key = request.public_key;
        if is_supported(&key) {
            Ok(Self { key })
        } else {
            Err(IssueError::Key)
        }
    }

    /// Returns the SHA-256 of the key's SubjectPublicKeyInfo, which identifies the key in the token
    /// store.
    pub fn key_sha256(&self) -> [u8; 32] {
        sha256(&self.key.subject_public_key_info())
    }

    pub(super) fn public_key(&self) -> &PublicKey {
        &self.key
    }
}

/// Returns whether the CA signs this type of key. The parser derives the type from the signature
/// algorithm, which may use another curve than the key, so the length of the key is checked.
fn is_supported(key: &PublicKey) -> bool {
    let kind = key.algorithm();
    let bytes = key.der_bytes();
    if *kind == PKCS_ECDSA_P256_SHA256 {
        is_point(bytes, 32)
    } else if *kind == PKCS_ECDSA_P384_SHA384 {
        is_point(bytes, 48)
    } else if *kind == PKCS_ED25519 {
        bytes.len() == 32
    } else if [&PKCS_RSA_SHA256, &PKCS_RSA_SHA384, &PKCS_RSA_SHA512].contains(&kind) {
        PublicEncryptingKey::from_der(&key.subject_public_key_info())
            .is_ok_and(|key| key.key_size_bits() >= RSA_BITS_MIN)
    } else {
        false
    }
}

/// Returns whether `bytes` is an uncompressed point (SEC 1, section 2.3.3).
fn is_point(bytes: &[u8], coordinate: usize) -> bool {
    bytes.len() == 1 + 2 * coordinate && bytes.first() == Some(&4)
}

const RSA_BITS_MIN: usize = 2048;

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P521_SHA512, SignatureAlgorithm};

    use super::*;

    fn request(kind: &'static SignatureAlgorithm) -> Vec<u8> {
        let key = KeyPair::generate_for(kind).unwrap();
        let request = CertificateParams::default().serialize_request(&key);
        request.unwrap().der().to_vec()
    }

    #[test]
    fn usual_keys_are_taken_and_others_are_not() {
        for kind in [
            &PKCS_ECDSA_P256_SHA256,
            &PKCS_ECDSA_P384_SHA384,
            &PKCS_ED25519,
            &PKCS_RSA_SHA256,
        ] {
            AgentCsr::parse(&request(kind)).unwrap();
        }
        let error = AgentCsr::parse(&request(&PKCS_ECDSA_P521_SHA512)).unwrap_err();
        assert!(matches!(error, IssueError::Key | IssueError::Request(_)));
    }

    #[test]
    fn request_that_its_key_did_not_sign_is_refused() {
        let mut csr = request(&PKCS_ED25519);
        let last = csr.len() - 1;
        csr[last] ^= 1;
        for bytes in [&csr[..], &csr[..last], &[], b"text"] {
            let refused = AgentCsr::parse(bytes);
            assert!(matches!(refused, Err(IssueError::Request(_))));
        }
    }

    #[test]
    fn hash_names_the_key_and_not_the_request() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        let first = params.serialize_request(&key).unwrap();
        let subject = &mut params.distinguished_name;
        subject.push(rcgen::DnType::CommonName, "other");
        let second = params.serialize_request(&key).unwrap();
        let hash = |csr: &rcgen::CertificateSigningRequest| {
            AgentCsr::parse(csr.der()).unwrap().key_sha256()
        };
        assert_eq!(hash(&first), hash(&second));
        assert_eq!(hash(&first), sha256(&key.subject_public_key_info()));
    }
}
