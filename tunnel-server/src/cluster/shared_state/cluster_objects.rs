//! Calls that read and write the shared Secrets and the ConfigMap.

use std::sync::mpsc::sync_channel;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use tunnel_process::shutdown::Shutdown;

use crate::cluster::api_call::{CALL_LIMIT, Conflicts, with_limit};
use crate::cluster::client::ClusterHandle;
use crate::cluster::client::Connection;
use crate::cluster::conditions::Condition;
use crate::cluster::failure::{ApiError, ApiErrorKind};
use crate::cluster::objects::Object;
use tunnel_store::document::block_current_thread;

/// Number of consecutive write conflicts on one object before the writer backs off.
const CONFLICTS_MAX: u32 = 8;
/// Shortest pause after a conflict. All servers of the cluster may write at the same time.
const CONFLICT_PAUSE_MIN: Duration = Duration::from_millis(10);

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

    /// Returns the Secret, which must exist. This server never creates Secrets.
    pub(super) async fn secret(&self, name: &str) -> Result<Secret, ApiError> {
        match with_limit(CALL_LIMIT, self.secrets.get_opt(name)).await {
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

    pub(super) fn condition(&self, condition: Condition, line: Option<String>) {
        self.cluster
            .conditions
            .set(condition, line.into_iter().collect());
    }
}

/// Runs a call to the API server, and waits for its result. Blocks the thread.
///
/// # Errors
/// Returns the reason of the failure.
pub(super) fn wait<T: Send + 'static>(
    shutdown: &Shutdown,
    call: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, String> {
    let (done, answer) = sync_channel(1);
    shutdown.spawn_service(async move {
        let _nobody_waits_any_more = done.try_send(call.await);
    });
    match block_current_thread(|| answer.recv()) {
        Ok(result) => result.map_err(|failure| failure.to_string()),
        Err(_dropped) => Err("the server is stopping".to_owned()),
    }
}

/// Returns the budget of conflicts for a change of one object.
pub(super) fn conflicts() -> Conflicts {
    Conflicts::new(CONFLICTS_MAX, CONFLICT_PAUSE_MIN)
}
