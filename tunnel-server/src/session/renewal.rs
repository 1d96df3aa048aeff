//! Renewal of the certificate of a live session. One request runs at a time, on a blocking thread.

use std::time::{Duration, SystemTime};

use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;
use tracing::{info, warn};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::EnrollReply;

use super::Sessions;
use crate::routing::registry::AgentSession;
use tunnel_ca::renewal::{EnrollRefusal, RenewedCertificate};

/// Shortest time between two requests of an agent. No correct agent sends requests faster.
const RENEWAL_INTERVAL_MIN: Duration = Duration::from_secs(1);

type RenewalResult = Result<Result<RenewedCertificate, EnrollRefusal>, JoinError>;

/// The renewal request in progress, if any.
#[derive(Debug, Default)]
pub(super) struct RenewalTask {
    work: Option<JoinHandle<Result<RenewedCertificate, EnrollRefusal>>>,
    last: Option<Instant>,
}

impl RenewalTask {
    /// Starts a renewal request in the background. Returns a refusal if the server does not renew
    /// certificates, or if requests arrive too often.
    pub(super) fn begin(
        &mut self,
        sessions: &Sessions,
        agent: &AgentSession,
        csr: Vec<u8>,
    ) -> Result<(), EnrollRefusal> {
        let Some(renewals) = sessions.renewals.clone() else {
            let detail = "this server accepts certificates of --agent-ca only";
            return Err((EnrollCode::NotOffered, detail.to_owned()));
        };
        let too_soon = self
            .last
            .is_some_and(|last| last.elapsed() < RENEWAL_INTERVAL_MIN);
        if self.work.is_some() || too_soon {
            let detail = "too many certificate requests; try again later";
            return Err((EnrollCode::RateLimited, detail.to_owned()));
        }
        self.last = Some(Instant::now());
        let peer = agent.session.peer().clone();
        self.work = Some(tokio::task::spawn_blocking(move || {
            renewals.renew_on_session(&peer, &csr, SystemTime::now())
        }));
        Ok(())
    }

    /// Waits for the result of the current request. Never completes while there is no request.
    /// Cancel-safe.
    pub(super) async fn done(&mut self) -> RenewalResult {
        match &mut self.work {
            Some(work) => {
                let issued = work.await;
                self.work = None;
                issued
            }
            None => std::future::pending().await,
        }
    }
}

impl Sessions {
    /// Records the issued certificate and returns the reply for the agent.
    pub(super) fn renewed(&self, agent: &AgentSession, issued: RenewalResult) -> EnrollReply {
        let node = &agent.node;
        let issued = issued.unwrap_or_else(|panic| {
            warn!(%node, error = %panic, "renewal task failed");
            Err((EnrollCode::Unavailable, "internal server error".to_owned()))
        });
        match issued {
            Ok(renewed) => {
                agent.renewed(renewed.not_after, renewed.chain);
                self.nodes.record_renewal(node, renewed.not_after);
                self.metrics.renewal("issued");
                let not_after = tunnel_store::data_dir::rfc3339(renewed.not_after);
                info!(%node, session = agent.id.0, not_after, "certificate renewed");
                renewed.reply
            }
            Err((code, detail)) => {
                self.metrics.renewal(code.label());
                static REFUSED: LogRateLimit = LogRateLimit::new("renewals refused");
                if REFUSED.admit() {
                    warn!(%node, session = agent.id.0, %code, detail, "renewal refused");
                }
                EnrollReply::Refused(code, detail)
            }
        }
    }
}
