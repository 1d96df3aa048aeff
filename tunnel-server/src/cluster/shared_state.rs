//! State that all servers of a cluster share: one CA, the join tokens, and one set of orders about
//! nodes. Two Secrets hold it, which manifests ship empty and the first writer fills, and a Secret for
//! each join token.
//!
//! ```text
//! Secret ca    ──▶ CaReconciler ──▶ LocalCa (issuer, listeners, agent trust), CA bundle ConfigMap
//!              ◀─▶ RotatedSecret ◀─▶ CaRotator (compare-and-swap)
//! Secret revocations ◀─▶ SharedDocuments ◀─▶ Revocations (compare-and-swap)
//! Secret of a join token ◀─▶ TokenSecrets ◀─▶ TokenStore (read when it is used, compare-and-swap)
//! ```
//!
//! A server waits for both Secrets before it serves requests. The server also persists their
//! content, so that a server with a persistent data directory starts without the API server.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::info;
use tunnel_process::shutdown::Shutdown;

use super::client::ClusterHandle;
use super::conditions::Condition;
use super::objects::Object;
use crate::config::KubernetesSettings;
use tunnel_ca::rotation::CaStore;
use tunnel_ca::tokens::TokenStore;
use tunnel_ca::{CaError, CaMaterial, LocalCa};
use tunnel_store::data_dir::DataDir;
use tunnel_store::document::SharedDocument;

mod ca;
mod ca_bundle;
mod cluster_objects;
mod documents;
mod rotated_secret;
mod snapshot;
mod tokens;

use ca::CaReconciler;
use cluster_objects::ClusterObjects;
use documents::{DocumentsSecret, REVOKED, SharedDocuments};
use rotated_secret::RotatedSecret;
use snapshot::SharedSnapshot;
pub(super) use tokens::TokenSecrets;

/// State that one server shares with the other servers of its cluster.
#[derive(Debug)]
pub(crate) struct SharedState {
    /// The CA. Replaced when the Secret changes.
    pub(crate) ca: Arc<LocalCa>,
    /// The Secret of the CA, to rotate it.
    pub(crate) ca_secret: Arc<dyn CaStore>,
    pub(crate) tokens: TokenStore,
    pub(crate) revocations: SharedDocument,
}

impl ClusterHandle {
    /// Waits for the shared state, from the cluster or from the data directory. Reports conditions
    /// in the meantime. Cancel-safe.
    ///
    /// # Errors
    /// Returns an error if the server's own keys cannot be created.
    pub(crate) async fn shared_state(
        &self,
        settings: &KubernetesSettings,
        data: &DataDir,
        life: Duration,
        shutdown: &Shutdown,
    ) -> Result<SharedState, CaError> {
        let cluster_objects = ClusterObjects::new(self);
        let names = &settings.names;
        let ca_secret = cluster_objects.describe_secret(&names.ca_secret);
        let persisted = SharedSnapshot::load(data, &ca_secret)?;
        let material = persisted.material().map(Arc::new);
        let (current, changes) = (watch::Sender::new(material), watch::Sender::new(()));
        let secret = DocumentsSecret {
            name: names.revocations_secret.clone(),
            object: Object::Revocations,
            condition: Condition::Revocations,
            keys: &[REVOKED],
        };
        let revocations = SharedDocuments::new(
            &cluster_objects,
            secret,
            persisted.documents(),
            persisted.is_whole(),
            changes.clone(),
            shutdown,
        );
        persisted.start(
            current.subscribe(),
            revocations.clone(),
            changes.subscribe(),
            shutdown,
        );
        let ca_reconciler = CaReconciler {
            cluster_objects: cluster_objects.clone(),
            secret: names.ca_secret.clone(),
            map: names.ca_config_map.clone(),
            current: current.clone(),
            rotation: Mutex::default(),
            changes,
        };
        ca_reconciler.start(shutdown);

        let mut known = current.subscribe();
        let material = first(&mut known).await;
        revocations.wait_observed().await;
        snapshot::publish(data, material.clone()).await;
        let ca = Arc::new(LocalCa::new(material)?.with_life(life));
        follow(&ca, known, shutdown);
        let ca_secret = Arc::new(RotatedSecret {
            cluster_objects,
            name: names.ca_secret.clone(),
            shutdown: shutdown.clone(),
        });
        Ok(SharedState {
            ca,
            ca_secret,
            tokens: TokenStore::of(Arc::new(TokenSecrets::new(self, shutdown))),
            revocations: revocations.document(REVOKED),
        })
    }
}

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
