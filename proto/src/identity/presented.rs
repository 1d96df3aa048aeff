//! A certificate that was presented and not verified, for people: whose it is, and who issued it.

use std::fmt;
use std::time::SystemTime;

use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{IdentityError, Role, role_of, validity_period};

/// What a certificate says about itself. Nothing of it is verified, and its texts may be hostile: print
/// them with visible characters only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentedCertificate {
    /// The subject, at most 200 characters.
    pub subject: String,
    /// The issuer, at most 200 characters.
    pub issuer: String,
    /// Start of the validity.
    pub not_before: SystemTime,
    /// End of the validity.
    pub not_after: SystemTime,
    /// The role by its SAN URI. A certificate that another program made has none.
    pub role: Option<Role>,
}

impl PresentedCertificate {
    /// Reads a certificate.
    ///
    /// # Errors
    /// [`IdentityError::Malformed`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let (_, certificate) =
            X509Certificate::from_der(der).map_err(|_parse| IdentityError::Malformed)?;
        let (not_before, not_after) = validity_period(&certificate);
        let text = |name: String| name.chars().take(NAME_MAX).collect();
        Ok(Self {
            subject: text(certificate.subject().to_string()),
            issuer: text(certificate.issuer().to_string()),
            not_before,
            not_after,
            role: role_of(&certificate).ok().flatten().map(|(role, _)| role),
        })
    }
}

impl fmt::Display for PresentedCertificate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let date = humantime::format_rfc3339_seconds;
        write!(
            formatter,
            "subject {:?}, issuer {:?}, valid from {} until {}",
            self.subject,
            self.issuer,
            date(self.not_before),
            date(self.not_after)
        )
    }
}

const NAME_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(common_name: &str, uri: Option<&str>) -> PresentedCertificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        if let Some(uri) = uri {
            let uri = SanType::URI(uri.try_into().unwrap());
            params.subject_alt_names = vec![uri];
        }
        let signed = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        PresentedCertificate::read(signed.der()).unwrap()
    }

    #[test]
    fn certificate_says_whose_it_is_and_whether_a_server_of_ours_has_it() {
        let proxy = certificate("Zscaler Root CA", None);
        assert_eq!(proxy.role, None);
        let text = proxy.to_string();
        assert!(
            text.contains("issuer \"CN=Zscaler Root CA\", valid from "),
            "{text}"
        );
        let server = certificate("x", Some("culvert://server"));
        assert_eq!(server.role, Some(Role::Server));
        let hostile = certificate(&"\u{202e}\n\"".repeat(1000), None);
        assert!(hostile.subject.chars().count() <= NAME_MAX);
        assert!(
            !hostile.to_string().contains(['\n', '\u{202e}']),
            "{hostile}"
        );
        assert!(PresentedCertificate::read(&CertificateDer::from(vec![48, 0])).is_err());
    }
}
