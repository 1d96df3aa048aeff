//! A CA for this crate's tests.

use std::sync::Arc;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    SanType,
};
use rustls::RootCertStore;
use rustls::server::ResolvesServerCert;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls_pki_types::CertificateDer;

use crate::identity::Role;

pub(crate) struct TestCa {
    root: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl TestCa {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap().der().clone();
        Self {
            root,
            issuer: Issuer::new(params, key),
        }
    }

    pub(crate) fn root(&self) -> CertificateDer<'static> {
        self.root.clone()
    }

    pub(crate) fn roots(&self) -> Arc<RootCertStore> {
        super::roots([self.root()]).unwrap()
    }

    /// Issues a leaf with the role's URI. The chain includes the root, as the server's does.
    pub(crate) fn key(&self, role: &Role) -> Arc<CertifiedKey> {
        let usage = match role {
            Role::Agent(_) => ExtendedKeyUsagePurpose::ClientAuth,
            Role::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Role::Peer(_) => {
                let both = [
                    ExtendedKeyUsagePurpose::ClientAuth,
                    ExtendedKeyUsagePurpose::ServerAuth,
                ];
                return self.leaf_for(&role.uri(), &both);
            }
        };
        self.leaf(&role.uri(), usage)
    }

    pub(crate) fn leaf(&self, uri: &str, usage: ExtendedKeyUsagePurpose) -> Arc<CertifiedKey> {
        self.leaf_for(uri, &[usage])
    }

    /// Issues a leaf with these extended usages. An empty list allows any usage.
    pub(crate) fn leaf_for(
        &self,
        uri: &str,
        usages: &[ExtendedKeyUsagePurpose],
    ) -> Arc<CertifiedKey> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(uri).unwrap())];
        params.extended_key_usages = usages.to_vec();
        self.sign(&params)
    }

    pub(crate) fn kubelet(&self, node: &str) -> Arc<CertifiedKey> {
        let mut params = CertificateParams::default();
        let subject = &mut params.distinguished_name;
        subject.push(DnType::OrganizationName, "system:nodes");
        subject.push(DnType::CommonName, format!("system:node:{node}"));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Arc<CertifiedKey> {
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        let chain = vec![leaf.der().clone(), self.root()];
        super::certified_key(chain, key.serialize_der().try_into().unwrap()).unwrap()
    }

    pub(crate) fn resolver(&self, role: &Role) -> Arc<dyn ResolvesServerCert> {
        Arc::new(SingleCertAndKey::from(self.key(role)))
    }
}
