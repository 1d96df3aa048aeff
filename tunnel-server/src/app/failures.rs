//! The condition of agents whose failures go on: a name in use twice, sessions that are cut.

use std::time::{Duration, SystemTime};

use tunnel_process::timers::sleep_coalesced;

use super::context::ServerContext;
use crate::admin::failures::{CONDITION_CODES, NAME_RETRY_MAX, condition_lines};

/// Sets the condition `agents` and clears it again, until the server stops.
pub(super) fn report(context: &ServerContext) {
    let failures = context.failures.clone();
    let readiness = context.readiness.clone();
    context.shutdown.spawn_service(async move {
        loop {
            let now = SystemTime::now();
            let since = now.checked_sub(NAME_RETRY_MAX);
            let recent = failures.verified_since(CONDITION_CODES, since.unwrap_or(now));
            readiness.report_conditions("agents", condition_lines(&recent, now));
            sleep_coalesced(INTERVAL).await;
        }
    });
}

const INTERVAL: Duration = Duration::from_secs(2);
