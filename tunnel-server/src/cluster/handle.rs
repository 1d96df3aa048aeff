//! Handle to the API server that all controllers share.

use prometheus_client::registry::Registry as MetricsRegistry;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::settings::ConfigError;

use super::client::{self, Connection};
use super::conditions::Conditions;
use super::metrics::ClusterMetrics;
use super::objects::Object;
use super::watches::WatchContext;
use crate::config::KubernetesSettings;

/// A handle to the API server, with the conditions and metrics of its users. Clones share it.
#[derive(Clone)]
pub struct ClusterHandle {
    pub(super) connection: Connection,
    pub(super) problems: Conditions,
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
        let connection = client::connect(settings).await?;
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
            problems: Conditions::new(readiness.clone(), metrics.clone()),
            metrics,
        }
    }

    /// Returns the context of a watch of this object.
    pub(super) fn watch_context(&self, object: Object) -> WatchContext {
        WatchContext {
            object,
            metrics: self.metrics.clone(),
            problems: self.problems.clone(),
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
