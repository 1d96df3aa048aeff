//! Certificates of the API server and of its clients.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls_pki_types::CertificateDer;

use super::access::User;
use crate::targets::TargetTls;

/// A CA, the server's certificate, and the users of the client certificates.
#[derive(Debug)]
pub(super) struct Pki {
    ca: CertifiedIssuer<'static, KeyPair>,
    serving: TargetTls,
    users: HashMap<CertificateDer<'static>, User>,
}

impl Pki {
    pub(super) fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params
            .distinguished_name
            .push(DnType::CommonName, "kubernetes");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"];
        // The address of the Service, and the address of an agent's listener for pods.
        let addresses = ["10.96.0.1", "169.254.2.1"];
        let names = [&names[..], &addresses].concat();
        let names: Vec<_> = names.into_iter().map(str::to_owned).collect();
        let mut params = CertificateParams::new(names)?;
        params
            .distinguished_name
            .push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &ca)?;
        let serving = TargetTls::from_pem(&certificate.pem(), &key.serialize_pem())?;
        Ok(Self {
            ca,
            serving,
            users: HashMap::new(),
        })
    }

    /// Creates a client certificate and writes `NAME.crt` and `NAME.key` into `folder`.
    pub(super) fn user(&mut self, name: &str, user: User, folder: &Path) -> Result<()> {
        let mut params = CertificateParams::new(Vec::new())?;
        params
            .distinguished_name
            .push(DnType::CommonName, user.name.as_str());
        for group in user
            .groups
            .iter()
            .filter(|group| !group.ends_with(":authenticated"))
        {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group.as_str());
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.ca)?;
        std::fs::write(folder.join(format!("{name}.crt")), certificate.pem())
            .context("client certificate")?;
        std::fs::write(folder.join(format!("{name}.key")), key.serialize_pem())
            .context("client key")?;
        self.users.insert(certificate.der().clone(), user);
        Ok(())
    }

    pub(super) fn ca(&self) -> &CertifiedIssuer<'static, KeyPair> {
        &self.ca
    }

    pub(super) fn ca_pem(&self) -> String {
        self.ca.pem()
    }

    pub(super) fn serving(&self) -> &TargetTls {
        &self.serving
    }

    /// Returns the users by certificate. Only certificates created here belong to a user.
    pub(super) fn users(&self) -> Arc<HashMap<CertificateDer<'static>, User>> {
        Arc::new(self.users.clone())
    }
}
