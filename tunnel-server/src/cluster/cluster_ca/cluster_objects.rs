//! Calls that read and write the shared Secrets and the ConfigMap.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;

use crate::cluster::client::Connection;
use crate::cluster::conditions::Condition;
use crate::cluster::failure::{ApiError, ApiErrorKind};
use crate::cluster::handle::ClusterHandle;
use crate::cluster::objects::Object;

/// Limit for one API call.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Number of consecutive write conflicts on one object before the writer backs off.
pub(super) const CONFLICTS_MAX: u32 = 8;

/// Clients for the Secrets and the ConfigMap.
#[derive(Clone)]
pub(super) struct ClusterObjects {
    pub(super) cluster: ClusterHandle,
    pub(super) namespace: String,
    pub(super) secrets: Api<Secret>,
    pub(super) maps: Api<ConfigMap>,
}

impl ClusterObjects {
    pub(super) fn new(cluster: &ClusterHandle) -> Self {
        let Connection {
            client, namespace, ..
        } = &cluster.connection;
        Self {
            cluster: cluster.clone(),
            namespace: namespace.clone(),
            secrets: Api::namespaced(client.clone(), namespace),
            maps: Api::namespaced(client.clone(), namespace),
        }
    }

    pub(super) fn describe_secret(&self, name: &str) -> String {
        format!("Secret {}/{name}", self.namespace)
    }

    pub(super) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ApiError> {
        match tokio::time::timeout(CALL_LIMIT, call).await {
            Ok(done) => done.map_err(|error| ApiError::from(&error)),
            Err(_elapsed) => Err(ApiError::timeout()),
        }
    }

    /// Returns the Secret, which must exist. This server never creates Secrets.
    pub(super) async fn secret(&self, name: &str) -> Result<Secret, ApiError> {
        match self.call(self.secrets.get_opt(name)).await {
            Ok(Some(secret)) => Ok(secret),
            Ok(None) => Err(ApiError::absent(Object::Ca, &self.namespace, name)),
            Err(failure) if failure.kind == ApiErrorKind::Forbidden => Err(ApiError::new(
                failure.kind,
                format!(
                    "{failure}; grant get, list, watch and update on {}",
                    self.describe_secret(name)
                ),
            )),
            Err(failure) => Err(failure),
        }
    }

    /// Counts a write. Returns `None` after a conflict.
    pub(super) fn record_write<T>(
        &self,
        object: Object,
        written: Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        let metrics = &self.cluster.metrics;
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

    pub(super) fn condition(&self, condition: Condition, line: Option<String>) {
        self.cluster
            .problems
            .set(condition, line.into_iter().collect());
    }
}

pub(super) fn conflicts() -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        "too many conflicts in a row: another client keeps changing the object",
    )
}

/// The random delay keeps two conflicting writers from colliding again.
pub(super) async fn pause_after_conflict() {
    let pause = Duration::from_millis(10).mul_f64(1.0 + rand::random::<f64>() * 9.0);
    tokio::time::sleep(pause).await;
}
