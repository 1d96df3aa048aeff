//! The server's client certificate for kubelets, asked of the cluster by a CertificateSigningRequest: waited for, kept in
//! the data directory, lent to the doors, and renewed before its end.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Api;
use kube::api::PostParams;
use rustls::sign::CertifiedKey;
use tokio::time::Instant;
use tracing::{info, warn};

use super::failure::{Backoff, Failure, FailureKind};
use crate::cluster::conditions::{Part, Problems};
use crate::ingress::target_tls::Targets;
use crate::metrics::Metrics;
use crate::store::data_dir::DataDir;

mod request;
mod snapshot;

use crate::cluster::signing::snapshot::Kept;
use request::{Course, course, request, request_name};

/// Between looks at a request that somebody has to approve or sign.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Between looks at a request that was refused: it goes by itself after an hour, or when an operator deletes it.
const REFUSED_LOOK_EVERY: Duration = Duration::from_secs(60);
/// One call.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// The longest sleep before the time to renew: wall clocks are set.
const SLEEP_MAX: Duration = Duration::from_secs(3600);
/// As the files of `--target-cert-file` are called in metrics.
const LABEL: &str = "target_certificate";

/// Who is asked, and for whom.
#[derive(Debug)]
pub struct Signer {
    /// `signerName` of the requests.
    pub name: String,
    /// Gets the certificate.
    pub targets: Arc<Targets>,
}

/// Keeps a certificate.
pub(super) struct Signing {
    pub(super) api: Api<CertificateSigningRequest>,
    pub(super) signer: Signer,
    pub(super) data: DataDir,
    pub(super) problems: Problems,
    pub(super) metrics: Metrics,
}

impl Signing {
    /// Asks, waits and renews for as long as it is polled. Cancel-safe: what was asked for is found again by its name.
    pub(super) async fn run(self) {
        let mut kept = loop {
            match self.open().await {
                Ok(kept) => break kept,
                Err(problem) => self.tell(vec![problem]),
            }
            tokio::time::sleep(REFUSED_LOOK_EVERY).await;
        };
        if let Some(own) = &kept.certificate {
            self.lend(own);
        }
        let mut backoff = Backoff::default();
        loop {
            let wait = match self.step(&mut kept).await {
                Ok(wait) => {
                    backoff.reset();
                    wait
                }
                Err(failure) => {
                    let text = format!("cannot ask for a certificate: {failure}");
                    self.tell(vec![text]);
                    let jitter = rand::random();
                    backoff.after(&failure, Instant::now(), jitter)
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// One look. Says when the next one is due.
    async fn step(&self, kept: &mut Kept) -> Result<Duration, Failure> {
        let now = SystemTime::now();
        let left = kept.renew_at().duration_since(now).unwrap_or_default();
        if !left.is_zero() {
            self.tell(Vec::new());
            return Ok(left.min(SLEEP_MAX));
        }
        let name = request_name(kept);
        let found = limited(self.api.get_opt(&name)).await?;
        let signer = &self.signer.name;
        match course(found.as_ref()) {
            Course::Absent => {
                let asked = request(&name, signer, kept)
                    .map_err(|error| Failure::new(FailureKind::Invalid, error.to_string()))?;
                let parameters = PostParams::default();
                limited(self.api.create(&parameters, &asked)).await?;
                info!(request = name, signer, "asked for a client certificate");
                self.tell(vec![waits(&name)]);
                Ok(LOOK_EVERY)
            }
            Course::Waits => {
                self.tell(vec![waits(&name)]);
                Ok(LOOK_EVERY)
            }
            Course::Approved => {
                self.tell(vec![format!(
                    "CertificateSigningRequest {name} is approved and waits for its signer, {signer}"
                )]);
                Ok(LOOK_EVERY)
            }
            Course::Issued(chain) => match self.take(kept, chain).await {
                Ok(()) => {
                    self.tell(Vec::new());
                    Ok(LOOK_EVERY)
                }
                Err(problem) => {
                    self.tell(vec![format!(
                        "the certificate of CertificateSigningRequest {name} is of no use: {problem}; to ask again: kubectl \
                         delete csr {name}"
                    )]);
                    Ok(REFUSED_LOOK_EVERY)
                }
            },
            Course::Refused(how, why) => {
                self.tell(vec![format!(
                    "CertificateSigningRequest {name} {how}: {why}; it is asked for anew when that one is gone, in an hour or \
                     by: kubectl delete csr {name}"
                )]);
                Ok(REFUSED_LOOK_EVERY)
            }
        }
    }

    async fn open(&self) -> Result<Kept, String> {
        let data = self.data.clone();
        let opened = tokio::task::spawn_blocking(move || Kept::open(&data)).await;
        opened
            .map_err(|panic| panic.to_string())?
            .map_err(|error| error.to_string())
    }

    /// Uses a new certificate, and keeps it; one that cannot be kept is used all the same.
    async fn take(&self, kept: &mut Kept, chain: Vec<u8>) -> Result<(), String> {
        let own = kept.take(&chain).map_err(|error| error.to_string())?;
        self.lend(&own);
        let path = self.data.kubelet_client_certificate();
        let write = move || tunnel_proto::process::files::replace(&path, &chain);
        let written = tokio::task::spawn_blocking(write).await;
        if let Ok(Err(error)) = written {
            warn!(%error, "cannot keep the client certificate for kubelets; it is asked for again after a restart");
        }
        info!("has a client certificate for kubelets");
        Ok(())
    }

    fn lend(&self, own: &Arc<CertifiedKey>) {
        if let Some(ends) = snapshot::ends(own) {
            self.metrics.credential(LABEL, ends);
        }
        if let Err(error) = self.signer.targets.lend(own.clone()) {
            warn!(%error, "the client certificate for kubelets cannot be used");
        }
    }

    fn tell(&self, lines: Vec<String>) {
        self.problems.set(Part::KubeletCertificate, lines);
    }
}

fn waits(name: &str) -> String {
    format!(
        "CertificateSigningRequest {name} waits for approval; until then nothing is lent to callers: kubectl certificate \
         approve {name}"
    )
}

async fn limited<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    let answered = tokio::time::timeout(CALL_LIMIT, call).await;
    let answered = answered.map_err(|_elapsed| Failure::timeout())?;
    answered.map_err(|error| Failure::from(&error))
}

#[cfg(test)]
mod tests;
