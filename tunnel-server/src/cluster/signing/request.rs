//! Pure functions for CertificateSigningRequests: their name, content and state.

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use kube::api::ObjectMeta;
use rcgen::{CertificateParams, DistinguishedName, DnType, PublicKeyData as _};
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::enroll::hex;

use crate::cluster::objects::KUBELET_CLIENT_NAME;
use crate::cluster::signing::snapshot::{KubeletCredential, not_after};

/// Number of digest bytes in the name of a request. Two servers of a cluster never share a name.
const DIGEST_BYTES: usize = 8;

/// State of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RequestState {
    /// The request does not exist.
    Absent,
    /// The request is neither approved nor denied.
    Pending,
    /// The request is approved but not signed yet.
    Approved,
    /// The issued chain in PEM.
    Issued(Vec<u8>),
    /// The request was denied or has failed, with the reason.
    Refused(&'static str, String),
}

/// Returns the name of the request for the next certificate. The name follows from the key and the
/// current certificate. A server therefore finds its request after a restart, and replicas never
/// share one.
pub(super) fn request_name(kept: &KubeletCredential) -> String {
    let last = kept.certificate.as_ref().and_then(|own| not_after(own));
    let last = last.and_then(|not_after| not_after.duration_since(std::time::UNIX_EPOCH).ok());
    let last = last.map_or(0, |not_after| not_after.as_secs());
    let mut digest_input = kept.key.subject_public_key_info();
    digest_input.extend_from_slice(&last.to_be_bytes());
    let digest = sha256(&digest_input);
    let digest = digest.get(..DIGEST_BYTES).unwrap_or_default();
    format!("{KUBELET_CLIENT_NAME}-{}", hex(digest))
}

/// Builds a request for a client certificate with the server's name and no group.
pub(super) fn request(
    name: &str,
    signer: &str,
    kept: &KubeletCredential,
) -> Result<CertificateSigningRequest, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, KUBELET_CLIENT_NAME);
    let pem = params.serialize_request(&kept.key)?.pem()?;
    Ok(CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(pem.into_bytes()),
            signer_name: signer.to_owned(),
            usages: Some(vec!["digital signature".into(), "client auth".into()]),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    })
}

/// Returns the state of an observed request.
pub(super) fn request_state(found: Option<&CertificateSigningRequest>) -> RequestState {
    let Some(found) = found else {
        return RequestState::Absent;
    };
    let status = found.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let has = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
    if let Some(denied) = has("Denied") {
        return RequestState::Refused("was denied", condition_reason(denied));
    }
    if let Some(failed) = has("Failed") {
        return RequestState::Refused("has failed", condition_reason(failed));
    }
    match status.certificate {
        Some(ByteString(chain)) if !chain.is_empty() => RequestState::Issued(chain),
        Some(_) | None if has("Approved").is_some() => RequestState::Approved,
        Some(_) | None => RequestState::Pending,
    }
}

fn condition_reason(condition: &CertificateSigningRequestCondition) -> String {
    let reasons = [&condition.reason, &condition.message];
    let reasons: Vec<_> = reasons.into_iter().flatten().map(String::as_str).collect();
    if reasons.is_empty() {
        return "no reason given".to_owned();
    }
    reasons.join(", ")
}
