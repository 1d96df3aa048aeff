//! CA material as persisted: trusted certificates and the signing key, both PEM, checked to match
//! each other.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData as _, SerialNumber,
};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use tracing::info;
use tunnel_process::files;
use tunnel_proto::identity::{self, BACKDATED, sha256, spki_sha256};
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::hex;
use tunnel_store::data_dir::{random, whole_seconds};
use zeroize::Zeroizing;

use super::CaError;

/// Names of the sources of a CA in error messages: paths, or keys of a Secret.
#[derive(Debug, Clone, Copy)]
pub struct SourceNames<'a> {
    pub certificates: &'a str,
    pub key: &'a str,
}

#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CaPem {
    pub certificates: String,
    pub key: Zeroizing<String>,
}

impl CaPem {
    pub fn of(material: &CaMaterial) -> Self {
        Self {
            certificates: material.root_pem.clone(),
            key: material.key_pem.clone(),
        }
    }

    /// Separates the certificates of a PEM text from its keys, so that no key is stored with the
    /// certificates. Other blocks, and text between blocks, are left out.
    pub(super) fn split(text: &str) -> Self {
        let mut parts = Self {
            certificates: String::new(),
            // Text that grows would leave copies of the key in memory.
            key: Zeroizing::new(String::with_capacity(text.len() + 1)),
        };
        let mut label = None;
        for line in text.lines().map(str::trim_end) {
            let begin = line.strip_prefix("-----BEGIN ");
            label = begin.and_then(|rest| rest.strip_suffix("-----")).or(label);
            let block = match label {
                Some("CERTIFICATE") => Some(&mut parts.certificates),
                Some(label) if label.ends_with("PRIVATE KEY") => Some(&mut *parts.key),
                Some(_) | None => None,
            };
            if let Some(block) = block {
                block.push_str(line);
                block.push('\n');
            }
            if line.starts_with("-----END ") {
                label = None;
            }
        }
        parts
    }

    /// Returns the CA.
    ///
    /// # Errors
    /// Returns a [`CaError`] with the names of the sources.
    pub fn material(&self, names: SourceNames<'_>) -> Result<CaMaterial, CaError> {
        CaMaterial::parse(self.certificates.as_bytes(), self.key.as_bytes(), names)
    }
}

impl fmt::Debug for CaPem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CaPem(..)")
    }
}

/// A CA that can sign: its certificates and its key, checked against each other.
pub struct CaMaterial {
    /// Certificate of the signing key.
    pub(super) root: CertificateDer<'static>,
    /// All trusted certificates: while the CA is being replaced, the old and the new one, and each
    /// signed by the other.
    pub(super) roots: Vec<CertificateDer<'static>>,
    pub(super) root_pem: String,
    pub(super) key_pem: Zeroizing<String>,
    pub(super) spki_sha256: [u8; 32],
    pub(super) issuer: Issuer<'static, KeyPair>,
}

impl CaMaterial {
    /// Generates a new CA.
    ///
    /// # Errors
    /// Returns an error if the key or the certificate cannot be generated.
    pub fn generate(now: SystemTime) -> Result<Self, CaError> {
        let key = KeyPair::generate().map_err(CaError::Generate)?;
        let certificate = self_signed(&key, CA_NAME, now)?.pem();
        let names = SourceNames {
            certificates: "new certificate",
            key: "new key",
        };
        Self::new(certificate, key, names)
    }

    /// Loads a CA from its two files, or creates one whose common name begins with `name`. Hold the
    /// lock of the directory. Blocks the thread.
    pub(super) fn load_or_create(
        certificate_path: &Path,
        key_path: &Path,
        name: &str,
    ) -> Result<Self, CaError> {
        let names = SourceNames {
            certificates: &certificate_path.display().to_string(),
            key: &key_path.display().to_string(),
        };
        let certificate = files::read(certificate_path)?;
        let key = match files::read_secret(key_path)? {
            Some(pem) => read_key(&pem, names.key)?,
            None if certificate.is_some() => {
                return Err(CaError::KeyMissing(
                    names.certificates.to_owned(),
                    names.key.to_owned(),
                ));
            }
            None => {
                let key = KeyPair::generate().map_err(CaError::Generate)?;
                files::replace(key_path, Zeroizing::new(key.serialize_pem()).as_bytes())?;
                key
            }
        };
        let root_pem = if let Some(pem) = certificate {
            String::from_utf8_lossy(&pem).into_owned()
        } else {
            // A crash between the two writes leaves the key without its certificate.
            let pem = self_signed(&key, name, SystemTime::now())?.pem();
            files::replace(certificate_path, pem.as_bytes())?;
            info!(path = %certificate_path.display(), "created a CA");
            pem
        };
        Self::new(root_pem, key, names)
    }

    /// Parses the certificates and the key from PEM.
    ///
    /// # Errors
    /// Returns a [`CaError`] with the names of the sources.
    pub fn parse(certificates: &[u8], key: &[u8], names: SourceNames<'_>) -> Result<Self, CaError> {
        let key = read_key(key, names.key)?;
        let pem = String::from_utf8_lossy(certificates).into_owned();
        Self::new(pem, key, names)
    }

    fn new(root_pem: String, key: KeyPair, names: SourceNames<'_>) -> Result<Self, CaError> {
        let roots = tls::files::chain(root_pem.as_bytes()).map_err(|problem| CaError::Damaged {
            name: names.certificates.to_owned(),
            what: "certificate",
            problem: problem.to_string(),
        })?;
        let spki = sha256(&key.subject_public_key_info());
        let signing = roots
            .iter()
            .find(|root| spki_sha256(root).ok() == Some(spki));
        let Some(root) = signing.cloned() else {
            return Err(CaError::Mismatch(
                names.certificates.to_owned(),
                names.key.to_owned(),
            ));
        };
        let key_pem = Zeroizing::new(key.serialize_pem());
        let issuer = Issuer::from_ca_cert_der(&root, key).map_err(CaError::Generate)?;
        Ok(Self {
            root,
            roots,
            root_pem,
            key_pem,
            spki_sha256: spki,
            issuer,
        })
    }

    /// Signs the key of another CA, and returns the certificate as PEM. An agent that trusts this CA
    /// then accepts the other one. The subject is not that of the other CA, so that no program that
    /// reads `ca.crt` builds a path through this certificate.
    ///
    /// # Errors
    /// Returns an error if the certificate cannot be signed.
    pub fn cross_sign(&self, other: &Self, now: SystemTime) -> Result<String, CaError> {
        let signer = hex(&self.spki_sha256);
        let other_name = identity::common_name(&other.root).unwrap_or_else(|| CA_NAME.to_owned());
        let name = format!("signed by {}: {other_name}", &signer[..8]);
        let mut params = ca_params(&name, now)?;
        params.use_authority_key_identifier_extension = true;
        let certificate = params
            .signed_by(other.issuer.key(), &self.issuer)
            .map_err(CaError::Generate)?;
        Ok(certificate.pem())
    }

    pub fn certificates_pem(&self) -> &str {
        &self.root_pem
    }

    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Returns the SHA-256 of the public key that signs, hex.
    pub fn signer(&self) -> String {
        hex(&self.spki_sha256)
    }

    /// Returns the SHA-256 of the public key of each trusted certificate, hex.
    pub fn trusted(&self) -> Vec<String> {
        let keys = self.roots.iter().filter_map(|root| spki_sha256(root).ok());
        keys.map(|key| hex(&key)).collect()
    }

    /// Returns a digest of the key that signs and of the trusted certificates' keys.
    pub fn digest(&self) -> [u8; 32] {
        let mut trusted = self.trusted();
        trusted.sort_unstable();
        sha256(format!("{} {}", self.signer(), trusted.join(" ")).as_bytes())
    }

    /// Returns whether this CA follows the `used` one without ending sessions: it trusts the key that
    /// signs in `used`, or signs with a key that `used` trusts.
    pub fn continues(&self, used: &Self) -> bool {
        self.trusted().contains(&used.signer()) || used.trusted().contains(&self.signer())
    }

    /// Returns whether both values trust the same certificates and sign with the same key.
    pub fn is_same(&self, other: &Self) -> bool {
        self.root == other.root && self.roots == other.roots
    }
}

impl fmt::Debug for CaMaterial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("CaMaterial")
            .field("spki_sha256", &hex(&self.spki_sha256))
            .field("roots", &self.roots.len())
            .finish_non_exhaustive()
    }
}

pub(super) fn read_key(pem: &[u8], name: &str) -> Result<KeyPair, CaError> {
    std::str::from_utf8(pem)
        .map_err(|error| error.to_string())
        .and_then(|text| KeyPair::from_pem(text).map_err(|error| error.to_string()))
        .map_err(|problem| CaError::Damaged {
            name: name.to_owned(),
            what: "private key",
            problem,
        })
}

fn self_signed(key: &KeyPair, name: &str, now: SystemTime) -> Result<Certificate, CaError> {
    let hash = hex(&sha256(&key.subject_public_key_info()));
    let params = ca_params(&format!("{name} {}", &hash[..8]), now)?;
    params.self_signed(key).map_err(CaError::Generate)
}

fn ca_params(name: &str, now: SystemTime) -> Result<CertificateParams, CaError> {
    let now = whole_seconds(now);
    let mut params = CertificateParams::default();
    params.not_before = now.checked_sub(BACKDATED).unwrap_or(now).into();
    params.not_after = (now + CA_LIFE).into();
    params.serial_number = Some(serial()?);
    params.distinguished_name = common_name(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

/// Returns a positive random number of 16 bytes (RFC 5280, section 4.1.2.2: at most 20).
pub(super) fn serial() -> io::Result<SerialNumber> {
    let mut bytes = random::<16>()?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

pub(super) fn common_name(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    let fits: String = text.chars().take(COMMON_NAME_MAX).collect();
    name.push(DnType::CommonName, fits);
    name
}

/// Beginning of the local CA's common name.
pub(super) const CA_NAME: &str = "culvert CA";
/// Maximum length of a common name (RFC 5280, appendix A, ub-common-name).
pub(super) const COMMON_NAME_MAX: usize = 64;
/// Lifetime of the CA certificate: 10 years.
const CA_LIFE: Duration = Duration::from_secs(3653 * 24 * 60 * 60);
