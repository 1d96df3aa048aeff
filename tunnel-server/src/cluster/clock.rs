//! The clock of the API server, which each of its responses has.

use std::sync::Arc;
use std::time::SystemTime;

use http::{HeaderMap, header};
use k8s_openapi::jiff::fmt::rfc2822;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::routing::clock::ClockReading;

/// The last observed clock of the API server. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ApiServerClock(Arc<Mutex<Option<ClockReading>>>);

impl ApiServerClock {
    /// Records the `Date` of a response.
    pub(super) fn observe(&self, headers: &HeaderMap) {
        if let Some(Ok(date)) = date(headers) {
            *self.0.lock() = Some(ClockReading::new(date));
        }
    }

    /// Returns the last reading.
    pub(crate) fn reading(&self) -> Option<ClockReading> {
        *self.0.lock()
    }

    pub(super) fn time(&self) -> Option<SystemTime> {
        self.reading()?.time(Instant::now())
    }
}

/// Returns the date of a response, or the reason why it cannot be read.
pub(super) fn date(headers: &HeaderMap) -> Option<Result<SystemTime, String>> {
    let text = headers.get(header::DATE)?.to_str().ok()?;
    let date = rfc2822::parse(text).map_err(|error| format!("Date {text:?}: {error}"));
    Some(date.map(|date| date.timestamp().into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn clock_is_that_of_the_last_answer_with_a_date() {
        let clock = ApiServerClock::default();
        let observe = |date: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::DATE, date.parse().unwrap());
            clock.observe(&headers);
        };
        assert_eq!(clock.time(), None);
        observe("Thu, 01 Jan 1970 00:01:00 GMT");
        observe("yesterday");
        clock.observe(&HeaderMap::new());
        tokio::time::advance(Duration::from_secs(5)).await;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(65);
        assert_eq!(clock.time(), Some(time));
    }
}
