//! Client for the API server, from a kubeconfig or the ServiceAccount of the container, and the
//! handle that its users share.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use prometheus_client::registry::Registry as MetricsRegistry;
use tower::layer::layer_fn;
use tower::util::MapResponseLayer;
use tower::{BoxError, Service};
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::settings::ConfigError;

use super::conditions::Conditions;
use super::failure::Throttle;
use super::metrics::ClusterMetrics;
use super::objects::Object;
use super::watches::{WATCH_SECONDS, WatchContext};
use crate::config::KubernetesSettings;

/// Limit for the TCP and TLS handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A connection without data for this long is dead. A watch ends before that.
const READ_LIMIT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// The response head of a watch arrives at once, even if no event follows.
const WATCH_HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Limit for the response head of a list page and of all other calls. Writers have limits of their
/// own.
const HEAD_LIMIT: Duration = Duration::from_secs(60);
/// Default namespace outside a cluster.
const NAMESPACE: &str = "kube-system";

/// A client that has not connected yet, and the namespace of the objects.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) throttle: Throttle,
    pub(super) namespace: String,
}

/// Prepares a client. Sends no request, so that the server starts even if the API server is
/// unavailable.
pub(super) async fn connect(settings: &KubernetesSettings) -> Result<Connection, ConfigError> {
    let mut config = match &settings.kubeconfig {
        Some(path) => {
            let refuse = |error: kube::config::KubeconfigError| {
                ConfigError(vec![format!("--kubeconfig: {}: {error}", path.display())])
            };
            let file = Kubeconfig::read_from(path).map_err(refuse)?;
            let current = KubeConfigOptions::default();
            let mut config = Config::from_custom_kubeconfig(file, &current)
                .await
                .map_err(refuse)?;
            // The namespace of the context is a preference of its user, not the namespace of these
            // objects.
            config.default_namespace = NAMESPACE.into();
            config
        }
        None => Config::incluster().map_err(|error| {
            ConfigError(vec![format!(
                "--kubernetes: the ServiceAccount of this container: {error}"
            )])
        })?,
    };
    if config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some() {
        return Err(ConfigError(vec![
            "--kubeconfig: its user gets credentials from another program (exec, auth-provider), and this server starts none; \
             give it a token, a token file or a client certificate"
                .to_owned(),
        ]));
    }
    config.connect_timeout = Some(CONNECT_LIMIT);
    config.read_timeout = Some(READ_LIMIT);
    config.reset_reader_on_write = true;
    // Callers decide about retries, because they know what changed in the meantime.
    config.default_retry = false;
    let namespace = settings.namespace.as_ref();
    let namespace = namespace.unwrap_or(&config.default_namespace).clone();
    let throttle = Throttle::default();
    let observer = throttle.clone();
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| ConfigError(vec![format!("--kubeconfig: {error}")]))?;
    let client = builder
        .with_layer(&layer_fn(HeadLimit))
        .with_layer(&MapResponseLayer::new(move |response: Response<_>| {
            observer.observe(response.status(), response.headers());
            response
        }))
        .build();
    Ok(Connection {
        client,
        throttle,
        namespace,
    })
}

/// Fails requests whose response head does not arrive in time. kube has no such limit.
#[derive(Debug)]
struct HeadLimit<S>(S);

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

/// A handle to the API server, with the conditions and metrics of its users. Clones share it.
#[derive(Clone)]
pub struct ClusterHandle {
    pub(super) connection: Connection,
    pub(super) conditions: Conditions,
    pub(super) metrics: ClusterMetrics,
}

impl ClusterHandle {
    /// Prepares the client. Sends no request.
    ///
    /// # Errors
    /// Returns [`ConfigError`] if the kubeconfig or the ServiceAccount cannot be read.
    pub async fn open(
        settings: &KubernetesSettings,
        readiness: &Readiness,
        registry: &mut MetricsRegistry,
    ) -> Result<Self, ConfigError> {
        let connection = connect(settings).await?;
        Ok(Self::with_connection(connection, readiness, registry))
    }

    pub(super) fn with_connection(
        connection: Connection,
        readiness: &Readiness,
        registry: &mut MetricsRegistry,
    ) -> Self {
        let metrics = ClusterMetrics::new(registry);
        Self {
            connection,
            conditions: Conditions::new(readiness.clone(), metrics.clone()),
            metrics,
        }
    }

    pub(super) fn watch_context(&self, object: Object) -> WatchContext {
        WatchContext {
            object,
            metrics: self.metrics.clone(),
            conditions: self.conditions.clone(),
            throttle: self.connection.throttle.clone(),
        }
    }
}

impl std::fmt::Debug for ClusterHandle {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ClusterHandle")
            .field("namespace", &self.connection.namespace)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
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
