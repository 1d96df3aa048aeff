//! A test CA that issues certificates of operators, and certificates that must be refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tunnel_proto::tls;

use crate::client::ClientCertificate;
use crate::targets::TargetTls;

/// A certificate authority with one root.
#[derive(Debug)]
pub struct TestCa {
    root: CertificateDer<'static>,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// The contents of a certificate.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// SAN URI, such as `culvert://agent/worker-1`.
    pub uri: Option<String>,
    /// DNS name of the SAN.
    pub dns: Option<String>,
    /// Subject; empty for the library's default.
    pub subject: Vec<(Subject, String)>,
    /// Whether the certificate is for servers; otherwise for clients.
    pub server: bool,
    /// Start of the validity.
    pub from: SystemTime,
    /// End of the validity.
    pub until: SystemTime,
}

/// An attribute of a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The common name (CN).
    Name,
    Organization,
}

/// A certificate with its key, in PEM and as a `CertifiedKey`.
#[derive(Debug)]
pub struct Issued {
    /// Certificate chain in PEM.
    pub certificate: String,
    /// Private key in PEM.
    pub key: String,
    /// Chain and key for TLS.
    pub own: Arc<CertifiedKey>,
}

impl Leaf {
    /// Returns an agent's certificate, valid for a day.
    pub fn agent(node: &str) -> Self {
        Self {
            uri: Some(format!("culvert://agent/{node}")),
            dns: None,
            subject: Vec::new(),
            server: false,
            from: SystemTime::now() - Duration::from_secs(60),
            until: SystemTime::now() + Duration::from_secs(86400),
        }
    }

    /// Returns a tunnel server's certificate, valid for a day.
    pub fn server() -> Self {
        Self {
            uri: Some("culvert://server".to_owned()),
            server: true,
            ..Self::agent("")
        }
    }

    /// Returns a caller's certificate with this common name, valid for a day.
    pub fn caller(name: &str) -> Self {
        Self::subject(&[(Subject::Name, name)])
    }

    /// Returns a certificate of a kubelet or another https target on this node, valid for a day.
    pub fn target(node: &str) -> Self {
        Self {
            uri: None,
            dns: Some(node.to_owned()),
            server: true,
            ..Self::agent("")
        }
    }

    /// Returns a kubelet's client certificate, valid for a day.
    pub fn kubelet(node: &str) -> Self {
        Self::subject(&[
            (Subject::Organization, "system:nodes"),
            (Subject::Name, &format!("system:node:{node}")),
        ])
    }

    /// Returns a client certificate with this subject and no other name.
    pub fn subject(parts: &[(Subject, &str)]) -> Self {
        let subject = parts
            .iter()
            .map(|(part, value)| (*part, (*value).to_owned()));
        Self {
            uri: None,
            subject: subject.collect(),
            ..Self::agent("")
        }
    }
}

impl TestCa {
    /// Creates a CA with its own root.
    pub fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        Ok(Self {
            root: certificate.der().clone(),
            pem: certificate.pem(),
            issuer: Issuer::new(params, key),
        })
    }

    pub fn root(&self) -> &CertificateDer<'static> {
        &self.root
    }

    /// Returns the root certificate as PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    pub(crate) fn issuer(&self) -> &Issuer<'static, KeyPair> {
        &self.issuer
    }

    /// Issues a certificate for a new key.
    pub fn issue(&self, leaf: &Leaf) -> Result<Issued> {
        let mut params = CertificateParams::default();
        if let Some(uri) = &leaf.uri {
            let uri = Ia5String::try_from(uri.as_str())?;
            params.subject_alt_names.push(SanType::URI(uri));
        }
        if let Some(dns) = &leaf.dns {
            let dns = Ia5String::try_from(dns.as_str())?;
            params.subject_alt_names.push(SanType::DnsName(dns));
        }
        if !leaf.subject.is_empty() {
            params.distinguished_name = subject(&leaf.subject);
        }
        params.extended_key_usages = vec![if leaf.server {
            ExtendedKeyUsagePurpose::ServerAuth
        } else {
            ExtendedKeyUsagePurpose::ClientAuth
        }];
        params.not_before = leaf.from.into();
        params.not_after = leaf.until.into();
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let der = key.serialize_der().try_into().map_err(anyhow::Error::msg)?;
        Ok(Issued {
            own: tls::certified_key(vec![certificate.der().clone()], der)?,
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}

impl Issued {
    /// Returns the certificate as a test's TLS client presents it.
    pub fn presented(&self) -> Result<ClientCertificate> {
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())?;
        Ok((self.own.cert.clone(), key))
    }

    /// Returns the certificate as a target serves it.
    pub fn serving(&self) -> Result<TargetTls> {
        TargetTls::from_pem(&self.certificate, &self.key)
    }

    /// Replaces `NAME.crt` and `NAME.key` in a directory, one after the other as most tools do.
    pub fn write(&self, folder: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        let certificate = folder.join(format!("{name}.crt"));
        let key = folder.join(format!("{name}.key"));
        replace(&key, self.key.as_bytes())?;
        replace(&certificate, self.certificate.as_bytes())?;
        Ok((certificate, key))
    }
}

/// Encodes the subject. The library stores one value per kind, so a second value uses the same kind
/// by its OID (RFC 5280, appendix A.1).
fn subject(parts: &[(Subject, String)]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    for (part, value) in parts {
        let (kind, number) = match part {
            Subject::Name => (DnType::CommonName, 3),
            Subject::Organization => (DnType::OrganizationName, 10),
        };
        let is_taken = name.get(&kind).is_some();
        let kind = if is_taken {
            DnType::CustomDnType(vec![2, 5, 4, number])
        } else {
            kind
        };
        name.push(kind, value.as_str());
    }
    name
}

/// Replaces a file atomically.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, content)?;
    fs::rename(fresh, path)?;
    Ok(())
}
