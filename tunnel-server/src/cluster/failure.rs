//! Classification of failed calls to the API server, and the backoff after them.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::watcher;
use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_process::backoff::Backoff;
use tunnel_process::errors::causes;

use super::objects::{Object, creation};

tunnel_process::named! {
    /// Kinds of failures, as labels of metrics.
    pub(super) enum ApiErrorKind: label {
        /// Another client changed or created the object first.
        Conflict = "conflict",
        /// Status 401: the API server does not know who this server is.
        Unauthorized = "unauthorized",
        /// Status 403: the API server does not permit the request.
        Forbidden = "forbidden",
        /// Status 404: the object does not exist.
        NotFound = "not_found",
        /// Status 429: the API server asks for fewer requests.
        Throttled = "throttled",
        /// The resource version of a watch is too old. The client must list all objects again.
        Expired = "expired",
        /// Status 413 or 422: the API server rejects the written object.
        Invalid = "invalid",
        /// The API server did not answer in time.
        Timeout = "timeout",
        /// The Lease was lost before the write.
        Deposed = "deposed",
        /// The connection failed, or the answer is a 5xx or not valid.
        Unavailable = "unavailable",
    }
}

/// A failed call to the API server.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub(super) struct ApiError {
    pub(super) kind: ApiErrorKind,
    /// Delay that the API server requested, if any.
    pub(super) retry_after: Option<Duration>,
    text: String,
}

impl ApiError {
    pub(super) fn new(kind: ApiErrorKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            retry_after: None,
            text: text.into(),
        }
    }

    /// Returns the error for a missing object that manifests ship. The text has the command that
    /// creates it.
    pub(super) fn absent(object: Object, namespace: &str, name: &str) -> Self {
        let kind = object.kind();
        let command = creation(kind, namespace, name);
        let text = format!(
            "{kind} {namespace}/{name} does not exist; create it empty, as the manifests do: {command}"
        );
        Self::new(ApiErrorKind::NotFound, text)
    }

    /// Converts a failure to create an object. Under the permissions of the manifests the server
    /// may not create objects, so the error then has the command for an operator.
    pub(super) fn of_creation(self, object: Object, namespace: &str, name: &str) -> Self {
        if self.kind == ApiErrorKind::Forbidden {
            Self::absent(object, namespace, name)
        } else {
            self
        }
    }

    /// Returns `true` if an object or a permission is missing.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self.kind, ApiErrorKind::Forbidden | ApiErrorKind::NotFound)
    }

    /// Returns `true` if an operator must act, because a retry alone cannot succeed.
    pub(super) fn needs_operator(&self) -> bool {
        matches!(
            self.kind,
            ApiErrorKind::Unauthorized | ApiErrorKind::Forbidden | ApiErrorKind::NotFound
        )
    }

    pub(super) fn timeout() -> Self {
        Self::new(
            ApiErrorKind::Timeout,
            "the API server did not answer in time",
        )
    }
}

impl From<&kube::Error> for ApiError {
    fn from(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            // kube's own text of a connection error has no details.
            return Self::new(ApiErrorKind::Unavailable, causes(error));
        };
        let kind = match status.code {
            401 => ApiErrorKind::Unauthorized,
            403 => ApiErrorKind::Forbidden,
            404 => ApiErrorKind::NotFound,
            409 => ApiErrorKind::Conflict,
            410 => ApiErrorKind::Expired,
            413 | 422 => ApiErrorKind::Invalid,
            429 => ApiErrorKind::Throttled,
            _ => ApiErrorKind::Unavailable,
        };
        let seconds = status.details.as_ref();
        let seconds = seconds.map_or(0, |details| details.retry_after_seconds);
        Self {
            kind,
            retry_after: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
            text: match kind {
                ApiErrorKind::Unauthorized => {
                    format!("{} ({}); {UNAUTHORIZED}", status.message, status.code)
                }
                _ => format!("{} ({})", status.message, status.code),
            },
        }
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        Self::from(&error)
    }
}

impl From<&watcher::Error> for ApiError {
    fn from(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => error.into(),
            watcher::Error::WatchError(status) => (&kube::Error::Api(status.clone())).into(),
            watcher::Error::NoResourceVersion => Self::new(
                ApiErrorKind::Unavailable,
                "object without a resourceVersion",
            ),
        }
    }
}

/// Time until which the API server asked for no requests (`Retry-After` of a 429 or 503). Clones
/// share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Throttle(Arc<Mutex<Option<Instant>>>);

impl Throttle {
    /// Records the `Retry-After` of a response.
    pub(super) fn observe(&self, status: http::StatusCode, headers: &http::HeaderMap) {
        let asks = matches!(
            status,
            http::StatusCode::TOO_MANY_REQUESTS | http::StatusCode::SERVICE_UNAVAILABLE
        );
        let seconds = headers
            .get(http::header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.parse::<u64>().ok());
        let Some(seconds) = seconds.filter(|_| asks) else {
            return;
        };
        let until = Instant::now() + Duration::from_secs(seconds).min(RETRY_AFTER_MAX);
        let mut retry_at = self.0.lock();
        *retry_at = Some(retry_at.map_or(until, |retry_at| retry_at.max(until)));
    }

    pub(super) fn remaining(&self, now: Instant) -> Duration {
        let retry_at = self.0.lock();
        retry_at.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }
}

/// The waits after failed calls. A quiet period ends their series.
#[derive(Debug)]
pub(super) struct CallBackoff {
    waits: Backoff,
    last: Option<Instant>,
    /// Time of the last full list after an expired version.
    last_relist: Option<Instant>,
    /// Time of the last failure because the API server was unavailable.
    last_outage: Option<Instant>,
}

impl Default for CallBackoff {
    fn default() -> Self {
        Self {
            waits: Backoff::new(DELAY_INITIAL, DELAY_MAX, 0.5..=1.0),
            last: None,
            last_relist: None,
            last_outage: None,
        }
    }
}

impl CallBackoff {
    /// Returns the delay after a failure. `jitter` is between 0 and 1. The first expired version
    /// within [`RELIST_SPACING`] has no delay. If the API server was unavailable since the last
    /// list, the spacing is [`OUTAGE_SPACING`], because an API server may restart twice.
    pub(super) fn next_delay(&mut self, failure: &ApiError, now: Instant, jitter: f64) -> Duration {
        let asked = failure.retry_after.unwrap_or_default().min(RETRY_AFTER_MAX);
        let is_expired = failure.kind == ApiErrorKind::Expired;
        if failure.kind == ApiErrorKind::Unavailable {
            self.last_outage = Some(now);
        }
        let min_spacing = if self.last_outage > self.last_relist {
            OUTAGE_SPACING
        } else {
            RELIST_SPACING
        };
        let spacing = self.last_relist.map_or(Duration::ZERO, |last| {
            (last + min_spacing).saturating_duration_since(now)
        });
        if is_expired && spacing.is_zero() {
            // The API server answers, so the list is due whatever failed before. A failure of that
            // list counts as the first one.
            self.last_relist = Some(now + asked);
            self.reset();
            return asked;
        }
        let is_quiet = self
            .last
            .is_none_or(|last| now.saturating_duration_since(last) > QUIET);
        if is_quiet {
            self.waits.restart();
        }
        self.last = Some(now);
        let longest = match failure.kind {
            ApiErrorKind::Conflict => CONFLICT_DELAY_MAX,
            _ => DELAY_MAX,
        };
        let base = self.waits.next_within(longest, jitter);
        if !is_expired {
            return base.max(asked);
        }
        let wait = base.max(spacing).max(asked);
        self.last_relist = Some(now + wait);
        wait
    }

    /// Treats the next failure as the first one.
    pub(super) fn reset(&mut self) {
        self.last = None;
    }
}

/// What a status of 401 means.
const UNAUTHORIZED: &str = "the API server does not accept the credentials of --kubeconfig or of this Pod's ServiceAccount, \
                            which have expired or are those of another cluster; renew them there, and this server reads them \
                            again";
/// Maximum of the first delay.
const DELAY_INITIAL: Duration = Duration::from_millis(500);
/// Maximum delay. A change during an outage of the API server must take effect within 10 s of its
/// return, and a call that began earlier takes some of that time.
const DELAY_MAX: Duration = Duration::from_secs(4);
/// A conflict is not an overload. A change by another writer is repaired within 5 s.
const CONFLICT_DELAY_MAX: Duration = DELAY_INITIAL;
/// After this time without a failure, the next failure counts as the first one.
const QUIET: Duration = Duration::from_secs(60);
/// Minimum time between full lists when versions expire repeatedly.
const RELIST_SPACING: Duration = Duration::from_secs(30);
/// Minimum time between full lists if the API server was unavailable between two of them.
const OUTAGE_SPACING: Duration = Duration::from_secs(5);
/// Upper limit for the delay that the API server requests.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: ApiErrorKind) -> ApiError {
        ApiError::new(kind, "")
    }

    #[tokio::test(start_paused = true)]
    async fn waits_double_up_to_the_longest_and_begin_again_after_quiet() {
        let (mut backoff, now) = (CallBackoff::default(), Instant::now());
        let away = failure(ApiErrorKind::Unavailable);
        for seconds in [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0] {
            let wait = backoff.next_delay(&away, now, 1.0);
            assert_eq!(wait, Duration::from_secs_f64(seconds));
        }
        let conflict = failure(ApiErrorKind::Conflict);
        let wait = backoff.next_delay(&conflict, now, 1.0);
        assert_eq!(wait, CONFLICT_DELAY_MAX);
        let later = now + QUIET * 2;
        assert_eq!(backoff.next_delay(&away, later, 0.0), DELAY_INITIAL / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn expired_versions_never_make_a_storm_of_lists() {
        let (mut backoff, start) = (CallBackoff::default(), Instant::now());
        let mut now = start;
        for _ in 0..10 {
            now += backoff.next_delay(&failure(ApiErrorKind::Expired), now, 0.0);
        }
        assert!(now - start >= RELIST_SPACING * 9, "{:?}", now - start);
    }

    #[tokio::test(start_paused = true)]
    async fn version_that_expired_after_an_outage_is_listed_at_once() {
        let (mut backoff, now) = (CallBackoff::default(), Instant::now());
        for _ in 0..5 {
            backoff.next_delay(&failure(ApiErrorKind::Unavailable), now, 1.0);
        }
        let expired = failure(ApiErrorKind::Expired);
        assert_eq!(backoff.next_delay(&expired, now, 1.0), Duration::ZERO);
        let list_failed = backoff.next_delay(&failure(ApiErrorKind::Unavailable), now, 1.0);
        assert_eq!(list_failed, DELAY_INITIAL);
        assert_eq!(backoff.next_delay(&expired, now, 0.0), RELIST_SPACING);
        let later = now + RELIST_SPACING * 3;
        assert_eq!(backoff.next_delay(&expired, later, 1.0), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn each_restart_of_a_server_that_restarts_twice_is_listed_soon() {
        let (mut backoff, start) = (CallBackoff::default(), Instant::now());
        let expired = failure(ApiErrorKind::Expired);
        let away = failure(ApiErrorKind::Unavailable);
        for restart in 0..3 {
            let now = start + Duration::from_secs(12) * restart;
            backoff.next_delay(&away, now, 1.0);
            let wait = backoff.next_delay(&expired, now + Duration::from_secs(1), 1.0);
            assert_eq!(wait, Duration::ZERO, "restart {restart}");
        }
        let soon = start + Duration::from_secs(26);
        backoff.next_delay(&away, soon, 1.0);
        let wait = backoff.next_delay(&expired, soon, 0.0);
        assert!(wait <= OUTAGE_SPACING, "{wait:?}");
    }

    #[test]
    fn refused_credentials_are_no_missing_rights() {
        let of = |code: u16, message: &str| {
            let status = serde_json::json!({ "code": code, "message": message });
            let status = serde_json::from_value(status).unwrap();
            ApiError::from(kube::Error::Api(Box::new(status)))
        };
        let unauthorized = of(401, "Unauthorized");
        assert_eq!(unauthorized.kind, ApiErrorKind::Unauthorized);
        let text = unauthorized.to_string();
        assert!(
            text.starts_with("Unauthorized (401); the API server does not accept"),
            "{text}"
        );
        assert!(text.contains("--kubeconfig") && unauthorized.needs_operator());
        let forbidden = of(403, "nodes is forbidden");
        assert_eq!(forbidden.kind, ApiErrorKind::Forbidden);
        assert_eq!(forbidden.to_string(), "nodes is forbidden (403)");
    }

    #[test]
    fn failed_connection_names_its_causes() {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let error = kube::Error::Service(Box::new(refused));
        let failure = ApiError::from(&watcher::Error::WatchFailed(error));
        assert!(failure.to_string().contains("refused"), "{failure}");
    }

    #[tokio::test(start_paused = true)]
    async fn server_says_how_long_to_wait() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let seven = http::HeaderValue::from_static("7");
        let headers = http::HeaderMap::from_iter([(http::header::RETRY_AFTER, seven)]);
        throttle.observe(http::StatusCode::OK, &headers);
        assert_eq!(throttle.remaining(now), Duration::ZERO);
        throttle.observe(http::StatusCode::TOO_MANY_REQUESTS, &headers);
        assert_eq!(throttle.remaining(now), Duration::from_secs(7));
        let mut asked = failure(ApiErrorKind::Throttled);
        asked.retry_after = Some(Duration::from_secs(20));
        let wait = CallBackoff::default().next_delay(&asked, now, 0.0);
        assert_eq!(wait, Duration::from_secs(20));
    }
}
