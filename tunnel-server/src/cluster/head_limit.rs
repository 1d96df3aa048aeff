//! Time limits of requests to the API server.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Request;
use kube::client::Body;
use tower::{BoxError, Service};

use super::watches::WATCH_SECONDS;

/// Limit for the TCP and TLS handshake.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A connection without data for this long is dead. A watch ends before that.
pub(super) const READ_LIMIT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// The response head of a watch arrives at once, even if no event follows.
const WATCH_HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Limit for the response head of a list page and of all other calls. Writers have limits of their
/// own.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

/// Fails requests whose response head does not arrive in time. kube has no such limit.
#[derive(Debug)]
pub(super) struct HeadLimit<S>(pub(super) S);

impl<S> Service<Request<Body>> for HeadLimit<S>
where
    S: Service<Request<Body>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.split('&').any(|pair| pair == "watch=true");
        let limit = if is_watch {
            WATCH_HEAD_LIMIT
        } else {
            HEAD_LIMIT
        };
        let answer = self.0.call(request);
        Box::pin(async move {
            match tokio::time::timeout(limit, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(elapsed) => Err(elapsed.into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use http::Response;
    use tokio::time::Instant;
    use tower::layer::layer_fn;
    use tower::{Layer as _, ServiceExt as _, service_fn};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn heads_of_watches_have_a_short_limit() {
        let never = service_fn(|_request| std::future::pending::<Result<Response<()>, BoxError>>());
        for (uri, limit) in [
            (
                "/api/v1/nodes?&watch=true&timeoutSeconds=60",
                WATCH_HEAD_LIMIT,
            ),
            ("/api/v1/nodes?&limit=200&continue=watch=true", HEAD_LIMIT),
            ("/api/v1/nodes", HEAD_LIMIT),
        ] {
            let begun = Instant::now();
            let limited = layer_fn(HeadLimit).layer(never);
            let request = Request::get(uri).body(Body::empty()).unwrap();
            limited.oneshot(request).await.unwrap_err();
            assert_eq!(begun.elapsed(), limit, "{uri}");
        }
    }
}
