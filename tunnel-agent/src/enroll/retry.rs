//! Retries enrollment over all servers with growing pauses, and alternates between renewal and
//! token if both are possible.

use std::time::Duration;

use rand::random;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};
use tunnel_proto::wire::code::EnrollCode;

use super::{EndpointRotation, EnrollError, EnrollProof, Enrollment, attempt};
use crate::connector::backoff::{Backoff, ReconnectEvent};
use crate::credentials::Credentials;
use crate::error::causes;
use crate::log_throttle::LogThrottle;

/// Enrolls, with retries while they may help. Cancel-safe: the key is persisted and the request may
/// be repeated.
///
/// # Errors
/// Returns an error if the operator must act.
pub(crate) async fn enroll(enrollment: &Enrollment) -> Result<Credentials, EnrollError> {
    RetryLoop::new(enrollment).run().await
}

/// Renews an expired certificate, or enrolls with a token. The two alternate, each with an attempt
/// at each server, since a temporary-looking failure may be permanent, for example if the server
/// has another CA. Cancel-safe as [`enroll`].
///
/// # Errors
/// Returns an error if the operator must act.
pub(crate) async fn renew_or_enroll(
    renewal: &Enrollment,
    by_token: &Enrollment,
) -> Result<Credentials, EnrollError> {
    let (mut renewal, mut by_token) = (RetryLoop::new(renewal), RetryLoop::new(by_token));
    let mut throttle = LogThrottle::default();
    loop {
        match renewal.try_each_server().await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) => {
                let agent = &renewal.enrollment.node;
                if throttle.failed("renewal", Instant::now()).is_some() {
                    warn!(node = %agent, error = causes(&error), "cannot renew the certificate; trying the token");
                }
                if !error.is_retryable() {
                    return by_token.run().await;
                }
            }
        }
        match by_token.try_each_server().await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) => {
                let agent = &renewal.enrollment.node;
                if throttle.failed("token", Instant::now()).is_some() {
                    warn!(node = %agent, error = causes(&error), "cannot enroll with the token; trying the certificate's key");
                }
                if !error.is_retryable() {
                    return renewal.run().await;
                }
            }
        }
    }
}

/// The attempts of one enrollment, and the pauses between them.
struct RetryLoop<'a> {
    enrollment: &'a Enrollment,
    backoff: Backoff,
    rotation: EndpointRotation,
    throttle: LogThrottle<String>,
}

impl<'a> RetryLoop<'a> {
    fn new(enrollment: &'a Enrollment) -> Self {
        Self {
            enrollment,
            backoff: Backoff::new(),
            rotation: EndpointRotation::default(),
            throttle: LogThrottle::default(),
        }
    }

    fn log_start(&self) {
        let node = &self.enrollment.node;
        match &self.enrollment.proof {
            EnrollProof::Token(token) => info!(%node, token = token.id(), "enrolling"),
            EnrollProof::ServiceAccount(..) => {
                info!(%node, "enrolling with the ServiceAccount token")
            }
            EnrollProof::ExpiredCertificate(ended) => {
                let ended = humantime::format_rfc3339_seconds(ended.not_after);
                info!(%node, %ended, "certificate has expired; renewing with its key");
            }
        }
    }

    /// Logs a failed attempt. Servers with the same failure have different texts, and each of them
    /// gets a line.
    fn log_failure(&mut self, failure: &EnrollError, retry_in: Duration) {
        let (node, error) = (&self.enrollment.node, causes(failure));
        let retry_in = retry_in.as_secs_f64();
        match self.throttle.failed(error.clone(), Instant::now()) {
            Some(suppressed) => warn!(%node, error, retry_in, suppressed, "cannot enroll"),
            None => debug!(%node, error, retry_in, "cannot enroll"),
        }
    }

    /// Retries until an attempt succeeds or the operator must act.
    async fn run(&mut self) -> Result<Credentials, EnrollError> {
        loop {
            match self.try_each_server().await {
                Err(error) if error.is_retryable() => {}
                ended => return ended,
            }
        }
    }

    /// Makes one attempt per server, with a pause after each failure. Returns the last failure, or
    /// the first one that is not retryable.
    async fn try_each_server(&mut self) -> Result<Credentials, EnrollError> {
        if self.rotation.attempts == 0 {
            self.log_start();
        }
        let mut left = self.enrollment.servers.len();
        loop {
            let statuses = &self.enrollment.statuses;
            let error = match attempt(self.enrollment, &mut self.rotation).await {
                Err(error) if error.is_retryable() => error,
                Err(error) => {
                    statuses.set_enrollment(Some((causes(&error), None)));
                    return Err(error);
                }
                Ok(enrolled) => {
                    statuses.set_enrollment(None);
                    return Ok(enrolled);
                }
            };
            let mut retry_in =
                self.backoff
                    .next(ReconnectEvent::Failed(None), Instant::now(), random());
            if let EnrollError::Refused {
                code: EnrollCode::RateLimited,
                ..
            } = error
            {
                retry_in += RATE_LIMIT_WAIT;
            }
            let retry_at = Instant::now() + retry_in;
            statuses.set_enrollment(Some((causes(&error), Some(retry_at))));
            self.log_failure(&error, retry_in);
            sleep(retry_in).await;
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(error);
            }
        }
    }
}

/// Added to the wait after "rate limited". The server counts failures over a minute.
const RATE_LIMIT_WAIT: Duration = Duration::from_secs(15);
