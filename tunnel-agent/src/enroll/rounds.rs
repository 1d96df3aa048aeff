//! Trying until there is a certificate: server after server with growing pauses, and by turns where there are two ways.

use std::time::Duration;

use rand::random;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use tunnel_proto::wire::code::EnrollCode;

use super::{Claim, EnrollError, Enrolled, Enrolment, Turns, attempt};
use crate::connector::causes;
use crate::connector::plan::{Event, Plan};

/// Enrols, trying again while that may help. Cancel-safe: the key is kept and the request may be repeated.
///
/// # Errors
/// When a person has to act.
pub(crate) async fn enroll(enrolment: &Enrolment) -> Result<Enrolled, EnrollError> {
    Rounds::new(enrolment).until_it_ends().await
}

/// Renews a certificate that has ended, or enrols with a token: each gets a round over all servers by turns, since a
/// failure that may pass may also never do so, as when the server has another CA now. Cancel-safe as [`enroll`].
///
/// # Errors
/// When a person has to act.
pub(crate) async fn renew_or_enroll(
    late: &Enrolment,
    by_token: &Enrolment,
) -> Result<Enrolled, EnrollError> {
    let (mut late, mut by_token) = (Rounds::new(late), Rounds::new(by_token));
    loop {
        match late.round().await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) => {
                let agent = &late.enrolment.node;
                warn!(%agent, error = causes(&error), "certificate is not renewed; trying the token");
                if !error.is_retryable() {
                    return by_token.until_it_ends().await;
                }
            }
        }
        match by_token.round().await {
            Ok(enrolled) => return Ok(enrolled),
            Err(error) => {
                let agent = &late.enrolment.node;
                warn!(%agent, error = causes(&error), "not enrolled with the token; trying the certificate's key");
                if !error.is_retryable() {
                    return late.until_it_ends().await;
                }
            }
        }
    }
}

/// Attempts of one enrolment, and the pauses between them.
struct Rounds<'a> {
    enrolment: &'a Enrolment,
    plan: Plan,
    turns: Turns,
}

impl<'a> Rounds<'a> {
    fn new(enrolment: &'a Enrolment) -> Self {
        Self {
            enrolment,
            plan: Plan::new(),
            turns: Turns::default(),
        }
    }

    /// Says what is about to be tried.
    fn tell(&self) {
        let node = &self.enrolment.node;
        match &self.enrolment.claim {
            Claim::Token(token) => info!(agent = %node, token = token.id(), "enrolling"),
            Claim::Account(..) => info!(agent = %node, "enrolling with the ServiceAccount token"),
            Claim::Ended(ended) => {
                let ended = humantime::format_rfc3339_seconds(ended.not_after);
                info!(agent = %node, %ended, "certificate has ended; renewing it with its key");
            }
        }
    }

    /// Until it works or a person has to act.
    async fn until_it_ends(&mut self) -> Result<Enrolled, EnrollError> {
        loop {
            match self.round().await {
                Err(error) if error.is_retryable() => {}
                ended => return ended,
            }
        }
    }

    /// One attempt per server, each with a pause after a failure. The last failure, or the first that no repetition
    /// helps against.
    async fn round(&mut self) -> Result<Enrolled, EnrollError> {
        if self.turns.taken == 0 {
            self.tell();
        }
        let mut left = self.enrolment.servers.len();
        loop {
            let error = match attempt(self.enrolment, &mut self.turns).await {
                Err(error) if error.is_retryable() => error,
                ended => return ended,
            };
            let mut retry_in = self
                .plan
                .next(Event::Failed(None), Instant::now(), random());
            if let EnrollError::Refused {
                code: EnrollCode::RateLimited,
                ..
            } = error
            {
                retry_in += RATE_LIMITED;
            }
            let agent = &self.enrolment.node;
            warn!(%agent, error = causes(&error), ?retry_in, "cannot enrol");
            sleep(retry_in).await;
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(error);
            }
        }
    }
}

/// Added to the wait after "rate limited": failures are counted over a minute.
const RATE_LIMITED: Duration = Duration::from_secs(15);
