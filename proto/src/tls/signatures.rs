//! Signatures by the keys of certificates. The key is read without the other fields, because webpki
//! parses no certificate of version 1 and none with an unknown critical extension.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, PeerMisbehaved};
use rustls_pki_types::{CertificateDer, SubjectPublicKeyInfoDer};
use x509_parser::asn1_rs::{Any, Class, Tag};
use x509_parser::oid_registry::OID_PKCS1_RSAENCRYPTION;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::provider;

/// Returns whether `certificate` is that of a CA and the key of `issuer` signed it. Does not check
/// names and validity.
pub fn is_ca_signed_by(certificate: &CertificateDer<'_>, issuer: &CertificateDer<'_>) -> bool {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else {
        return false;
    };
    let is_ca = matches!(parsed.basic_constraints(), Ok(Some(found)) if found.value.ca);
    let can_sign = match parsed.key_usage() {
        Ok(Some(usage)) => usage.value.key_cert_sign(),
        Ok(None) => true,
        Err(_twice) => false,
    };
    is_ca && can_sign && is_signed_by(certificate, issuer)
}

/// Returns whether the key of `issuer` signed `certificate`. Checks nothing else.
pub fn is_signed_by(certificate: &CertificateDer<'_>, issuer: &CertificateDer<'_>) -> bool {
    verify_certificate(certificate, issuer).unwrap_or(false)
}

/// Returns `None` if one of the certificates is malformed.
fn verify_certificate(
    certificate: &CertificateDer<'_>,
    issuer: &CertificateDer<'_>,
) -> Option<bool> {
    let mut fields = sequence(&mut certificate.as_ref())?;
    let signed = element(&mut fields)?.whole;
    let algorithm = sequence(&mut fields)?;
    let signature = bit_string(&mut fields)?;
    let key = PublicKey::of(issuer)?;
    let algorithms = provider().signature_verification_algorithms.all;
    Some(algorithms.iter().any(|known| {
        known.signature_alg_id().as_ref() == algorithm
            && known.public_key_alg_id().as_ref() == key.algorithm
            && known.verify_signature(key.bits, signed, signature).is_ok()
    }))
}

/// The public key of a certificate (SubjectPublicKeyInfo, RFC 5280, section 4.1).
pub(super) struct PublicKey<'a> {
    /// The whole SubjectPublicKeyInfo structure.
    info: &'a [u8],
    /// Content of its AlgorithmIdentifier.
    algorithm: &'a [u8],
    bits: &'a [u8],
}

impl<'a> PublicKey<'a> {
    /// Reads the key of a certificate of any version, whatever its extensions are.
    pub(super) fn of(certificate: &'a CertificateDer<'_>) -> Option<Self> {
        let mut certificate = sequence(&mut certificate.as_ref())?;
        let mut fields = sequence(&mut certificate)?;
        // Version 1 has no version field.
        if element(&mut fields)?.class == Class::ContextSpecific {
            element(&mut fields)?;
        }
        // signature, issuer, validity, subject
        for _ in 0..4 {
            element(&mut fields)?;
        }
        let info = element(&mut fields)?;
        let mut key = info.content_of(Tag::Sequence)?;
        Some(Self {
            info: info.whole,
            algorithm: sequence(&mut key)?,
            bits: bit_string(&mut key)?,
        })
    }

    /// Verifies the signature of a handshake of TLS 1.3.
    ///
    /// # Errors
    /// The reason why the signature does not count.
    pub(super) fn verify_tls13(
        &self,
        algorithms: &WebPkiSupportedAlgorithms,
        message: &[u8],
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let info = SubjectPublicKeyInfoDer::from(self.info);
        verify_tls13_signature_with_raw_key(message, &info, signed, algorithms)
            .map_err(|error| self.unsupported().unwrap_or(error))
    }

    /// Verifies the signature of a handshake of TLS 1.2, where the scheme does not fix the curve.
    ///
    /// # Errors
    /// The reason why the signature does not count.
    pub(super) fn verify_tls12(
        &self,
        algorithms: &WebPkiSupportedAlgorithms,
        message: &[u8],
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let mut offered = algorithms.mapping.iter();
        let (_, candidates) = offered
            .find(|(scheme, _)| *scheme == signed.scheme)
            .ok_or(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme)?;
        let algorithm = candidates
            .iter()
            .find(|known| known.public_key_alg_id().as_ref() == self.algorithm);
        let error = match algorithm {
            Some(known) => match known.verify_signature(self.bits, message, signed.signature()) {
                Ok(()) => return Ok(HandshakeSignatureValid::assertion()),
                Err(_invalid) => CertificateError::BadSignature,
            },
            None => CertificateError::Other(OtherError(Arc::new(UnsupportedKey::Kind))),
        };
        Err(self
            .unsupported()
            .unwrap_or(Error::InvalidCertificate(error)))
    }

    /// Returns an error if the provider verifies no signature of this key.
    fn unsupported(&self) -> Option<Error> {
        let bits = self.rsa_bits()?;
        let is_supported = (RSA_BITS_MIN..=RSA_BITS_MAX).contains(&bits);
        let cause = || OtherError(Arc::new(UnsupportedKey::RsaBits(bits)));
        (!is_supported).then(|| Error::InvalidCertificate(CertificateError::Other(cause())))
    }

    /// Returns the length of the modulus of an RSA key (RFC 8017, appendix A.1.1).
    fn rsa_bits(&self) -> Option<usize> {
        let mut algorithm = self.algorithm;
        let kind = element(&mut algorithm)?.content_of(Tag::Oid)?;
        if kind != OID_PKCS1_RSAENCRYPTION.as_bytes() {
            return None;
        }
        let mut numbers = sequence(&mut { self.bits })?;
        let modulus = element(&mut numbers)?.content_of(Tag::Integer)?;
        let unsigned = modulus.iter().position(|byte| *byte != 0)?;
        let digits = modulus.get(unsigned..)?;
        let unused = usize::try_from(digits.first()?.leading_zeros()).ok()?;
        Some(digits.len() * 8 - unused)
    }
}

/// The reason why the provider verifies no signature of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnsupportedKey {
    #[error("an RSA key of {0} bits; {RSA_BITS_MIN} to {RSA_BITS_MAX} are supported")]
    RsaBits(usize),
    #[error("a kind of key that is not supported")]
    Kind,
}

/// Bounds of an RSA key whose signatures the provider verifies.
pub(super) const RSA_BITS_MIN: usize = 2048;
pub(super) const RSA_BITS_MAX: usize = 8192;

/// An element of a DER structure.
struct Element<'a> {
    class: Class,
    tag: Tag,
    whole: &'a [u8],
    content: &'a [u8],
}

impl<'a> Element<'a> {
    fn content_of(&self, tag: Tag) -> Option<&'a [u8]> {
        (self.class == Class::Universal && self.tag == tag).then_some(self.content)
    }
}

/// Takes the next element.
fn element<'a>(input: &mut &'a [u8]) -> Option<Element<'a>> {
    let (rest, any) = Any::from_der(input).ok()?;
    let whole = input.get(..input.len().checked_sub(rest.len())?)?;
    *input = rest;
    Some(Element {
        class: any.class(),
        tag: any.tag(),
        whole,
        content: any.data,
    })
}

fn sequence<'a>(input: &mut &'a [u8]) -> Option<&'a [u8]> {
    element(input)?.content_of(Tag::Sequence)
}

/// Takes a bit string of whole bytes.
fn bit_string<'a>(input: &mut &'a [u8]) -> Option<&'a [u8]> {
    element(input)?
        .content_of(Tag::BitString)?
        .strip_prefix(&[0])
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};

    use super::*;

    /// Returns the parameters and the key of a CA.
    fn ca(change: impl FnOnce(&mut CertificateParams)) -> (CertificateParams, KeyPair) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        change(&mut params);
        (params, KeyPair::generate().unwrap())
    }

    #[test]
    fn only_a_ca_that_the_issuer_signed_is_its_successor() {
        let (params, key) = ca(|_| {});
        let old = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let signed = |change: fn(&mut CertificateParams)| {
            let (params, key) = ca(change);
            params.signed_by(&key, &issuer).unwrap().der().clone()
        };
        let next = signed(|_| {});
        assert!(is_ca_signed_by(&next, old.der()));
        assert!(is_ca_signed_by(old.der(), old.der()));
        assert!(!is_ca_signed_by(old.der(), &next));
        for not_a_ca in [
            signed(|params| params.is_ca = IsCa::ExplicitNoCa),
            signed(|params| params.is_ca = IsCa::NoCa),
            signed(|params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]),
        ] {
            assert!(!is_ca_signed_by(&not_a_ca, old.der()));
        }
        let mut damaged = next.to_vec();
        *damaged.last_mut().unwrap() ^= 1;
        assert!(!is_ca_signed_by(&CertificateDer::from(damaged), old.der()));
        assert!(!is_ca_signed_by(
            &CertificateDer::from(vec![0x30, 0x03, 0x30]),
            old.der()
        ));
        assert!(!is_ca_signed_by(&next, &CertificateDer::from(vec![])));
    }

    #[test]
    fn key_is_that_of_a_strict_parser_and_truncated_certificates_have_none() {
        let (params, key) = ca(|_| {});
        let der = params.self_signed(&key).unwrap().der().clone();
        let (_, strict) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(PublicKey::of(&der).unwrap().info, strict.public_key().raw);
        for length in 0..der.len() {
            let cut = CertificateDer::from(&der[..length]);
            assert!(PublicKey::of(&cut).is_none(), "{length} bytes");
        }
    }

    #[test]
    fn length_of_an_rsa_key_is_that_of_its_modulus() {
        let algorithm = [&[0x06, 9][..], OID_PKCS1_RSAENCRYPTION.as_bytes(), &[5, 0]].concat();
        // SEQUENCE { INTEGER 0x00ff01, INTEGER 3 }, and the same without content
        for (bits, expected) in [
            (&[0x30, 8, 2, 3, 0, 0xff, 1, 2, 1, 3][..], Some(16)),
            (&[0x30, 7, 2, 2, 0x1f, 1, 2, 1, 3], Some(13)),
            (&[0x30, 0], None),
            (&[], None),
        ] {
            let key = PublicKey {
                info: &[],
                algorithm: &algorithm,
                bits,
            };
            assert_eq!(key.rsa_bits(), expected);
            assert_eq!(key.unsupported().is_some(), expected.is_some());
        }
    }
}
