//! Retries enrollment over all servers with growing pauses, and alternates between renewal and
//! token if both are possible. Each attempt reads the token and uses the roots of --ca-file as they
//! are then, and a change of these roots ends the pause.

use std::ops::ControlFlow;
use std::time::Duration;

use rand::random;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};
use tunnel_process::backoff::Backoff;
use tunnel_process::errors::causes;
use tunnel_process::telemetry::LogThrottle;
use tunnel_proto::wire::code::EnrollCode;

use super::{EndpointRotation, EnrollError, Enrollment, attempt};
use crate::connector::backoff::{self as reconnect, ReconnectEvent};
use crate::credentials::{CaFile, Credentials};

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

/// Enrolls again after servers have stopped to trust the CA of the certificate, or the agent theirs.
/// Retries until it succeeds, whatever the failure: the servers, --ca-file or the token may change.
/// Cancel-safe as [`enroll`].
pub(crate) async fn enroll_again(enrollment: &Enrollment, backoff: &mut Backoff) -> Credentials {
    RetryLoop::new(enrollment).run_again(backoff).await
}

/// Returns the waits before rounds of attempts to enroll again: full jitter, since one wrong CA makes
/// all agents of a fleet ask in the same moment.
pub(crate) fn reenroll_backoff(first: Duration) -> Backoff {
    Backoff::new(first, first * REENROLL_FACTOR, 0.0..=1.0)
}

/// The attempts of one enrollment, and the pauses between them.
struct RetryLoop<'a> {
    enrollment: &'a Enrollment,
    backoff: reconnect::Backoff,
    rotation: EndpointRotation,
    throttle: LogThrottle<String>,
    /// The roots, for their changes.
    ca: CaFile,
}

impl<'a> RetryLoop<'a> {
    fn new(enrollment: &'a Enrollment) -> Self {
        Self {
            enrollment,
            backoff: reconnect::Backoff::new(),
            rotation: EndpointRotation::default(),
            throttle: LogThrottle::default(),
            ca: enrollment.ca.with_later_changes(),
        }
    }

    /// Waits. Returns `Break` if a change of --ca-file ended the wait.
    async fn pause(&mut self, wait: Duration) -> ControlFlow<()> {
        tokio::select! {
            () = sleep(wait) => ControlFlow::Continue(()),
            () = self.ca.changed() => ControlFlow::Break(()),
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

    /// Makes rounds of one attempt per server, with long pauses, until an attempt succeeds. A change of
    /// the roots starts the pauses again.
    async fn run_again(&mut self, backoff: &mut Backoff) -> Credentials {
        let node = &self.enrollment.node;
        let mut wait = backoff.next(random());
        let retry_in = wait.as_secs_f64();
        warn!(%node, retry_in, "servers and this node's certificate are of different CAs; enrolling again with the token");
        loop {
            if self.pause(wait).await.is_break() {
                backoff.restart();
                wait = backoff.next(random());
                continue;
            }
            wait = backoff.next(random());
            for _ in 0..self.enrollment.servers.len().max(1) {
                let statuses = &self.enrollment.statuses;
                match attempt(self.enrollment, &mut self.rotation).await {
                    Ok(enrolled) => {
                        statuses.set_enrollment(None);
                        return enrolled;
                    }
                    Err(error) => {
                        let retry_at = Instant::now() + wait;
                        statuses.set_enrollment(Some((causes(&error), Some(retry_at))));
                        self.log_failure(&error, wait);
                    }
                }
            }
        }
    }

    /// Makes one attempt per server, with a pause after each failure. Returns the last failure, or
    /// the first one that is not retryable.
    async fn try_each_server(&mut self) -> Result<Credentials, EnrollError> {
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
            if self.pause(retry_in).await.is_break() {
                self.backoff = reconnect::Backoff::new();
            }
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(error);
            }
        }
    }
}

/// Added to the wait after "rate limited". The server counts failures over a minute.
const RATE_LIMIT_WAIT: Duration = Duration::from_secs(15);
/// The longest wait before another enrollment, as a multiple of the first one.
const REENROLL_FACTOR: u32 = 10;
