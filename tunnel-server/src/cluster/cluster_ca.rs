//! State that all servers of a cluster share: one CA, one set of join tokens and revocations, and
//! the assignment of QUIC keys to servers. Two Secrets hold all of it. Manifests ship them empty,
//! and the first writer fills them.
//!
//! ```text
//! Secret ca    ──▶ CaReconciler ──▶ LocalCa (issuer, listeners, agent trust), CA bundle ConfigMap
//! Secret state ◀─▶ SharedDocuments ◀─▶ TokenStore, Revocations (compare-and-swap, no Lease)
//! ```
//!
//! A server waits for both Secrets before it serves requests. The server also persists their
//! content, so that a server with a persistent data directory starts without the API server.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use tokio::sync::watch;
use tracing::info;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;

use super::failure::{ApiError, ApiErrorKind};
use super::handle::ClusterHandle;
use super::identity;
use super::objects::Object;
use super::watches::follow_one;
use crate::ca::{CaError, CaMaterial, LocalCa};
use crate::cluster::conditions::Condition;
use crate::config::KubernetesSettings;
use crate::store::data_dir::DataDir;
use crate::store::document::SharedDocument;

mod ca;
mod ca_bundle;
mod documents;
mod quic_key_lease;
mod snapshot;

use ca::CaReconciler;
use documents::{REVOKED, SharedDocuments, TOKENS};
pub use quic_key_lease::LeaseGuard;
use quic_key_lease::QuicKeyLeases;

/// Limit for one API call.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Number of consecutive write conflicts on one object before the writer backs off.
const CONFLICTS_MAX: u32 = 8;

/// State that one server shares with the other servers of its cluster.
#[derive(Debug)]
pub(crate) struct ClusterAuthority {
    /// The CA. Replaced when the Secret changes.
    pub(crate) ca: Arc<LocalCa>,
    pub(crate) tokens: SharedDocument,
    pub(crate) revocations: SharedDocument,
    /// Keys for QUIC stateless resets and connection ids.
    pub(crate) keys: QuicKeys,
    /// Lease on the keys.
    pub(crate) lease_guard: Option<LeaseGuard>,
}

/// Clients for the Secrets and the ConfigMap.
#[derive(Clone)]
struct ClusterObjects {
    cluster: ClusterHandle,
    namespace: String,
    secrets: Api<Secret>,
    maps: Api<ConfigMap>,
}

impl ClusterHandle {
    /// Waits for the shared state, from the cluster or from the data directory. Reports conditions
    /// in the meantime. Cancel-safe.
    ///
    /// # Errors
    /// Returns an error if the server's own keys cannot be created.
    pub(crate) async fn cluster_ca(
        &self,
        settings: &KubernetesSettings,
        data: &DataDir,
        life: Duration,
        shutdown: &Shutdown,
    ) -> Result<ClusterAuthority, CaError> {
        let namespace = self.connection.namespace.clone();
        let client = &self.connection.client;
        let cluster_objects = ClusterObjects {
            cluster: self.clone(),
            secrets: Api::namespaced(client.clone(), &namespace),
            maps: Api::namespaced(client.clone(), &namespace),
            namespace,
        };
        let names = &settings.names;
        let kept = snapshot::load(data, &cluster_objects.describe_secret(&names.ca_secret));
        let material = kept.material().map(Arc::new);
        let current = watch::Sender::new(material);
        let documents =
            SharedDocuments::new(&cluster_objects, &names.state_secret, &kept, shutdown);
        let ca_reconciler = CaReconciler::new(&cluster_objects, names, current.clone());
        ca_reconciler.start(settings, shutdown);
        snapshot::start(data, kept, current.subscribe(), &documents, shutdown);

        let mut known = current.subscribe();
        let material = first(&mut known).await;
        documents.wait_observed().await;
        snapshot::publish(data, material.clone()).await;
        let ca = Arc::new(LocalCa::new(material)?.with_life(life));
        follow(&ca, known, shutdown);
        let key_leases = QuicKeyLeases {
            cluster_objects: cluster_objects.clone(),
            lease: names.replica_lease.clone(),
            is_single: settings.single_replica,
            holder: identity(),
        };
        let claimed = key_leases.claim(&documents, data).await?;
        let lease_guard = claimed
            .claim
            .map(|claim| key_leases.renew_until_released(claim, shutdown));
        Ok(ClusterAuthority {
            ca,
            tokens: documents.document(TOKENS),
            revocations: documents.document(REVOKED),
            keys: claimed.keys,
            lease_guard,
        })
    }
}

/// Waits for the first CA.
async fn first(known: &mut watch::Receiver<Option<Arc<CaMaterial>>>) -> Arc<CaMaterial> {
    loop {
        if let Some(material) = known.borrow_and_update().clone() {
            return material;
        }
        if known.changed().await.is_err() {
            // The sender only ends with the process.
            std::future::pending::<()>().await;
        }
    }
}

/// Replaces the CA in use whenever the observed CA changes.
fn follow(
    ca: &Arc<LocalCa>,
    mut known: watch::Receiver<Option<Arc<CaMaterial>>>,
    shutdown: &Shutdown,
) {
    let ca = ca.clone();
    shutdown.spawn_service(async move {
        while known.changed().await.is_ok() {
            let Some(material) = known.borrow_and_update().clone() else {
                continue;
            };
            if ca.replace(material) {
                info!(?ca, "the CA was replaced");
            }
        }
    });
}

impl ClusterObjects {
    fn describe_secret(&self, name: &str) -> String {
        format!("Secret {}/{name}", self.namespace)
    }

    async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ApiError> {
        match tokio::time::timeout(CALL_LIMIT, call).await {
            Ok(done) => done.map_err(|error| ApiError::from(&error)),
            Err(_elapsed) => Err(ApiError::timeout()),
        }
    }

    /// Returns the Secret, which must exist. This server never creates Secrets.
    async fn secret(&self, name: &str) -> Result<Secret, ApiError> {
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
    fn record_write<T>(
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

    fn condition(&self, condition: Condition, line: Option<String>) {
        self.cluster
            .problems
            .set(condition, line.into_iter().collect());
    }
}

fn conflicts() -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        "too many conflicts in a row: another client keeps changing the object",
    )
}

/// The random delay keeps two conflicting writers from colliding again.
async fn pause_after_conflict() {
    let pause = Duration::from_millis(10).mul_f64(1.0 + rand::random::<f64>() * 9.0);
    tokio::time::sleep(pause).await;
}
