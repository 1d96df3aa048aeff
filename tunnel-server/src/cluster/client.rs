//! Client for the API server, and the handle that its users share.

use std::time::Duration;

use kube::Client;
use prometheus_client::registry::Registry as MetricsRegistry;
use tunnel_process::meta::Readiness;
use tunnel_process::settings::ConfigError;
use tunnel_process::shutdown::Shutdown;

use super::clock::ApiServerClock;
use super::conditions::Conditions;
use super::credentials::FollowingClient;
use super::failure::Throttle;
use super::metrics::ClusterMetrics;
use super::objects::Object;
use super::watches::WatchContext;
use crate::config::KubernetesSettings;

/// A client that has not connected yet, and the namespace of the objects.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) throttle: Throttle,
    pub(super) clock: ApiServerClock,
    pub(super) namespace: String,
}

impl Connection {
    /// Creates the connection of a client to the objects in the namespace of `settings`.
    pub(super) fn new(client: &FollowingClient, settings: &KubernetesSettings) -> Self {
        let namespace = settings.namespace.as_ref();
        Self {
            client: client.client.clone(),
            throttle: client.throttle.clone(),
            clock: client.clock.clone(),
            namespace: namespace.unwrap_or(&client.default_namespace).clone(),
        }
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
    /// Prepares the client, and reads its credentials again every `reload_every` until `shutdown`
    /// stops. Sends no request.
    ///
    /// # Errors
    /// Returns [`ConfigError`] if the kubeconfig or the ServiceAccount cannot be read.
    pub async fn open(
        settings: &KubernetesSettings,
        readiness: &Readiness,
        registry: &mut MetricsRegistry,
        reload_every: Duration,
        shutdown: &Shutdown,
    ) -> Result<Self, ConfigError> {
        let client = FollowingClient::open(settings).await?;
        let connection = Connection::new(&client, settings);
        let handle = Self::with_connection(connection, readiness, registry);
        client.follow(settings, reload_every, handle.conditions.clone(), shutdown);
        Ok(handle)
    }

    pub(super) fn with_connection(
        connection: Connection,
        readiness: &Readiness,
        registry: &mut MetricsRegistry,
    ) -> Self {
        let metrics = ClusterMetrics::new(registry);
        Self {
            connection,
            conditions: Conditions::new(readiness.clone()),
            metrics,
        }
    }

    pub(crate) fn clock(&self) -> ApiServerClock {
        self.connection.clock.clone()
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

tunnel_process::partial_debug!(ClusterHandle);
