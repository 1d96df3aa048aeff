//! The part of kube-controller-manager for the signer `kubernetes.io/kube-apiserver-client`, on
//! request of a test.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use rcgen::{
    CertificateSigningRequestParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls_pki_types::CertificateDer;
use serde_json::Value;

use super::FakeApiServer;
use super::defaulting::key;
use super::kinds::Kind;
use crate::manifests::items;

/// Path of the requests.
pub(crate) const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// The only supported signer.
const SIGNER: &str = "kubernetes.io/kube-apiserver-client";
/// Lifetime of its certificates.
const LIFE: Duration = Duration::from_secs(365 * 86400);

impl FakeApiServer {
    /// Signs an approved CertificateSigningRequest with the cluster's CA and returns the
    /// certificate.
    ///
    /// # Errors
    /// Returns an error if there is no such request, or if it is not approved or is for another
    /// signer or other usages.
    pub fn sign_request(&self, name: &str) -> Result<CertificateDer<'static>> {
        let mut object = self
            .get("certificatesigningrequests", None, name)
            .with_context(|| format!("no CertificateSigningRequest {name}"))?;
        let certificate = sign(&mut object, self.pki.ca())?;
        let kind = Kind::find("certificates.k8s.io", "certificatesigningrequests");
        let key = key(kind.context("no such kind")?, None, name);
        self.service.store.write(|content| content.put(key, object));
        Ok(certificate)
    }

    /// Returns the root of the client certificates.
    pub fn client_ca(&self) -> CertificateDer<'static> {
        self.pki.ca().der().clone()
    }
}

/// Signs an approved request, writes the certificate into its status and returns the certificate.
pub(crate) fn sign(
    object: &mut Value,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<CertificateDer<'static>> {
    let is_approved =
        items(&object["status"]["conditions"]).any(|condition| condition["type"] == "Approved");
    ensure!(is_approved, "the request is not approved");
    ensure!(object["spec"]["signerName"] == SIGNER, "another signer");
    let usages = object["spec"]["usages"].as_array().context("no usages")?;
    let allowed = ["client auth", "digital signature", "key encipherment"];
    ensure!(
        usages.iter().any(|usage| usage == "client auth")
            && usages
                .iter()
                .all(|usage| allowed.iter().any(|allowed| usage == allowed)),
        "usages {usages:?}"
    );
    let ByteString(asked) = serde_json::from_value(object["spec"]["request"].clone())?;
    let mut asked = CertificateSigningRequestParams::from_pem(std::str::from_utf8(&asked)?)?;
    asked.params.not_before = SystemTime::now().into();
    asked.params.not_after = (SystemTime::now() + LIFE).into();
    asked.params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    asked.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let signed = asked.signed_by(issuer)?;
    let certificate = ByteString(signed.pem().into_bytes());
    object["status"]["certificate"] = serde_json::to_value(certificate)?;
    Ok(signed.der().clone())
}
