//! Calls to the API server: the limit of one call, the count of a write, and the retry of a write
//! after a conflict.

use std::time::Duration;

use super::failure::{ApiError, ApiErrorKind};
use super::metrics::ClusterMetrics;
use super::objects::Object;

/// Limit for one call of a writer or of a holder of a Lease.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(5);

/// Waits for the answer to a call, for at most `limit`.
pub(super) async fn with_limit<T, E: Into<ApiError>>(
    limit: Duration,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, ApiError> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_elapsed) => Err(ApiError::timeout()),
    }
}

/// Counts a write. Returns `None` after a conflict, which another read and write may resolve.
pub(super) fn count_write<T>(
    metrics: &ClusterMetrics,
    object: Object,
    written: Result<T, ApiError>,
) -> Result<Option<T>, ApiError> {
    match written {
        Ok(written) => {
            metrics.record_write(object, "ok");
            Ok(Some(written))
        }
        Err(failure) => {
            metrics.record_write(object, failure.kind.label());
            match failure.kind {
                ApiErrorKind::Conflict => Ok(None),
                _ => Err(failure),
            }
        }
    }
}

/// Consecutive write conflicts on one object.
#[derive(Debug)]
pub(super) struct Conflicts {
    /// Number of attempts that are left.
    left: u32,
    pause_min: Duration,
}

impl Conflicts {
    /// Allows `attempts` attempts. The pause after a conflict is `pause_min` to ten times that.
    pub(super) fn new(attempts: u32, pause_min: Duration) -> Self {
        Self {
            left: attempts,
            pause_min,
        }
    }

    /// Waits before the next attempt. The random delay keeps two conflicting writers from colliding
    /// again.
    ///
    /// # Errors
    /// Returns an error if this was the last attempt.
    pub(super) async fn wait(&mut self) -> Result<(), ApiError> {
        let pause = self.pause_min.mul_f64(1.0 + rand::random::<f64>() * 9.0);
        tokio::time::sleep(pause).await;
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return Ok(());
        }
        Err(ApiError::new(
            ApiErrorKind::Conflict,
            "too many conflicts in a row: another client keeps changing the object",
        ))
    }
}
