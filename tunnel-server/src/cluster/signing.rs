//! Client certificate of the server for kubelets, requested by a CertificateSigningRequest. The
//! server waits for the certificate, persists it in the data directory, delegates it to the
//! listeners, and renews it before it expires.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
};
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use rcgen::{CertificateParams, DistinguishedName, DnType, PublicKeyData as _};
use rustls::sign::CertifiedKey;
use tokio::time::Instant;
use tracing::{info, warn};
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::enroll::hex;

use super::api_call::with_limit;
use super::conditions::{Condition, Conditions};
use super::failure::{ApiError, ApiErrorKind, CallBackoff};
use super::objects::KUBELET_CLIENT_NAME;
use crate::ingress::target_tls::TargetTls;
use crate::metrics::Metrics;
use tunnel_store::data_dir::{DataDir, rfc3339};

mod snapshot;

use snapshot::{KubeletClientCredential, not_after};

/// Time between polls of a request that waits for approval or signing.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Time between polls of a refused request. The cluster deletes the request after an hour, unless
/// an operator deletes it earlier.
const REFUSED_POLL_INTERVAL: Duration = Duration::from_secs(60);
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Longest sleep before the renewal time, because the wall clock may be changed.
const SLEEP_MAX: Duration = Duration::from_secs(3600);
/// The metric label that the files of `--target-cert-file` use, too.
const LABEL: &str = "target_certificate";

/// The signer of the requests, and the user of the certificate.
#[derive(Debug)]
pub struct SignerConfig {
    /// `signerName` of the requests.
    pub name: String,
    /// Receives the certificate for its connections.
    pub targets: Arc<TargetTls>,
}

pub(super) struct KubeletClientCertificateTask {
    pub(super) api: Api<CertificateSigningRequest>,
    pub(super) signer: SignerConfig,
    pub(super) data: DataDir,
    pub(super) conditions: Conditions,
    pub(super) metrics: Metrics,
}

impl KubeletClientCertificateTask {
    /// Requests the certificate and renews it for as long as the future is polled. Cancel-safe: the
    /// next run finds the pending request by its name.
    pub(super) async fn run(self) {
        let mut credential = loop {
            match self.open().await {
                Ok(credential) => break credential,
                Err(reason) => self.set_conditions(vec![reason]),
            }
            tokio::time::sleep(REFUSED_POLL_INTERVAL).await;
        };
        if let Some(own) = &credential.certificate {
            self.delegate(own);
        }
        let mut backoff = CallBackoff::default();
        loop {
            let wait = match self.poll_request(&mut credential).await {
                Ok(wait) => {
                    backoff.reset();
                    wait
                }
                Err(failure) => {
                    let text =
                        format!("cannot request a client certificate for kubelets: {failure}");
                    self.set_conditions(vec![text]);
                    let jitter = rand::random();
                    backoff.next_delay(&failure, Instant::now(), jitter)
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Polls the request once. Returns the delay until the next poll.
    async fn poll_request(
        &self,
        credential: &mut KubeletClientCredential,
    ) -> Result<Duration, ApiError> {
        let now = SystemTime::now();
        let left = credential
            .renew_at()
            .duration_since(now)
            .unwrap_or_default();
        if !left.is_zero() {
            self.set_conditions(Vec::new());
            return Ok(left.min(SLEEP_MAX));
        }
        let name = request_name(credential);
        let found = with_limit(CALL_LIMIT, self.api.get_opt(&name)).await?;
        let signer = &self.signer.name;
        match request_state(found.as_ref()) {
            RequestState::Absent => {
                let asked = request(&name, signer, credential)
                    .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
                let parameters = PostParams::default();
                with_limit(CALL_LIMIT, self.api.create(&parameters, &asked)).await?;
                info!(
                    request = name,
                    signer, "requested a client certificate for kubelets"
                );
                self.set_conditions(vec![approval_condition(&name, credential)]);
                Ok(POLL_INTERVAL)
            }
            RequestState::Pending => {
                self.set_conditions(vec![approval_condition(&name, credential)]);
                Ok(POLL_INTERVAL)
            }
            RequestState::Approved => {
                self.set_conditions(vec![format!(
                    "CertificateSigningRequest {name} is approved, but not yet signed by {signer}"
                )]);
                Ok(POLL_INTERVAL)
            }
            RequestState::Issued(chain) => match self.install(credential, chain).await {
                Ok(()) => {
                    self.set_conditions(Vec::new());
                    Ok(POLL_INTERVAL)
                }
                Err(reason) => {
                    self.set_conditions(vec![format!(
                        "cannot use the certificate of CertificateSigningRequest {name}: {reason}; to request another one, run: kubectl \
                         delete csr {name}"
                    )]);
                    Ok(REFUSED_POLL_INTERVAL)
                }
            },
            RequestState::Refused(how, why) => {
                self.set_conditions(vec![format!(
                    "CertificateSigningRequest {name} {how}: {why}; a new request is created once this one is deleted, after an hour or \
                     by: kubectl delete csr {name}"
                )]);
                Ok(REFUSED_POLL_INTERVAL)
            }
        }
    }

    async fn open(&self) -> Result<KubeletClientCredential, String> {
        let data = self.data.clone();
        let opened =
            tokio::task::spawn_blocking(move || KubeletClientCredential::open(&data)).await;
        opened
            .map_err(|panic| panic.to_string())?
            .map_err(|error| error.to_string())
    }

    /// Uses a new certificate and persists it. If it cannot be persisted, it is used anyway.
    async fn install(
        &self,
        credential: &mut KubeletClientCredential,
        chain: Vec<u8>,
    ) -> Result<(), String> {
        let own = credential
            .install(&chain)
            .map_err(|error| error.to_string())?;
        self.delegate(&own);
        let path = self.data.kubelet_client_certificate();
        let write = move || tunnel_process::files::replace(&path, &chain);
        let written = tokio::task::spawn_blocking(write).await;
        if let Ok(Err(error)) = written {
            warn!(%error, "cannot persist the client certificate for kubelets; a new one is requested after a restart");
        }
        info!("client certificate for kubelets is ready");
        Ok(())
    }

    fn delegate(&self, own: &Arc<CertifiedKey>) {
        if let Some(not_after) = not_after(own) {
            self.metrics.credential(LABEL, not_after);
        }
        if let Err(error) = self.signer.targets.delegate(own.clone()) {
            warn!(%error, "cannot use the client certificate for kubelets");
        }
    }

    fn set_conditions(&self, lines: Vec<String>) {
        self.conditions
            .set(Condition::KubeletClientCertificate, lines);
    }
}

fn approval_condition(name: &str, credential: &KubeletClientCredential) -> String {
    let current = credential.certificate.as_deref().and_then(not_after);
    let valid = current.filter(|until| *until > SystemTime::now());
    let consequence = valid.map_or_else(
        || "until then client-certificate delegation is off".to_owned(),
        |until| format!("the current certificate ends at {}", rfc3339(until)),
    );
    format!(
        "CertificateSigningRequest {name} is not approved yet; {consequence}; approve: kubectl certificate approve {name}"
    )
}

/// Number of digest bytes in the name of a request. Two servers of a cluster never share a name.
const DIGEST_BYTES: usize = 8;

#[derive(Debug, PartialEq, Eq)]
enum RequestState {
    /// The request does not exist.
    Absent,
    /// The request is neither approved nor denied.
    Pending,
    /// The request is approved but not signed yet.
    Approved,
    Issued(Vec<u8>),
    /// The request was denied or has failed, with the reason.
    Refused(&'static str, String),
}

/// Returns the name of the request for the next certificate. The name follows from the key and the
/// current certificate. A server therefore finds its request after a restart, and replicas never
/// share one.
fn request_name(credential: &KubeletClientCredential) -> String {
    let last = credential
        .certificate
        .as_ref()
        .and_then(|own| not_after(own));
    let last = last.and_then(|not_after| not_after.duration_since(std::time::UNIX_EPOCH).ok());
    let last = last.map_or(0, |not_after| not_after.as_secs());
    let mut digest_input = credential.key.subject_public_key_info();
    digest_input.extend_from_slice(&last.to_be_bytes());
    let digest = sha256(&digest_input);
    let digest = digest.get(..DIGEST_BYTES).unwrap_or_default();
    format!("{KUBELET_CLIENT_NAME}-{}", hex(digest))
}

/// Builds a request for a client certificate with the server's name and no group.
fn request(
    name: &str,
    signer: &str,
    credential: &KubeletClientCredential,
) -> Result<CertificateSigningRequest, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, KUBELET_CLIENT_NAME);
    let pem = params.serialize_request(&credential.key)?.pem()?;
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

fn request_state(found: Option<&CertificateSigningRequest>) -> RequestState {
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

#[cfg(test)]
mod tests;
