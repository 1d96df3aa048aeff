//! What all servers of a cluster must agree on: one CA, one set of join tokens and revocations, and which of them has which
//! QUIC keys. All of it is in two Secrets that manifests ship empty; the first writer wins.
//!
//! ```text
//! Secret ca    ──▶ Keeper ──▶ LocalCa (issuer, doors, agents' trust), and the ConfigMap of its certificates
//! Secret state ◀─▶ Documents ◀─▶ TokenStore, Revocations (compare-and-swap, no Lease)
//! ```
//!
//! A server waits for both before it serves anything. What it heard is on its disk, too, so that one with a data directory
//! that stays starts without the API server.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use tokio::sync::watch;
use tracing::info;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;

use super::failure::{Failure, FailureKind};
use super::metrics::Object;
use super::watches::{Context, follow_one};
use super::{ClusterSide, identity};
use crate::ca::{CaError, CaMaterial, LocalCa};
use crate::cluster::conditions::Part;
use crate::config::KubernetesSettings;
use crate::store::data_dir::DataDir;
use crate::store::document::SharedDoc;

mod bundle;
mod ca;
mod documents;
mod replica;
mod snapshot;

use ca::Keeper;
use documents::{Documents, REVOKED, TOKENS};
pub use replica::Holding;
use replica::Replicas;

/// One call.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Writes of one object that may conflict in a row before the writer backs off.
const CONFLICTS_MAX: u32 = 8;

/// What a server of a cluster shares with the others.
#[derive(Debug)]
pub(crate) struct Authority {
    /// Our CA. It becomes another when the Secret says so.
    pub(crate) ca: Arc<LocalCa>,
    pub(crate) tokens: SharedDoc,
    pub(crate) revocations: SharedDoc,
    /// The keys by which QUIC knows its own.
    pub(crate) keys: QuicKeys,
    /// The right to use them.
    pub(crate) holding: Option<Holding>,
}

/// Where the Secrets and the ConfigMap are, as every part needs it.
#[derive(Clone)]
struct Place {
    side: ClusterSide,
    namespace: String,
    secrets: Api<Secret>,
    maps: Api<ConfigMap>,
}

impl ClusterSide {
    /// Waits for what all servers share: from the cluster, or as it was kept in the data directory. Meanwhile problems are
    /// told. Cancel-safe.
    ///
    /// # Errors
    /// When the server's own keys cannot be made.
    pub(crate) async fn authority(
        &self,
        settings: &KubernetesSettings,
        (data, life): (&DataDir, Duration),
        shutdown: &Shutdown,
    ) -> Result<Authority, CaError> {
        let namespace = self.connection.namespace.clone();
        let client = &self.connection.client;
        let place = Place {
            side: self.clone(),
            secrets: Api::namespaced(client.clone(), &namespace),
            maps: Api::namespaced(client.clone(), &namespace),
            namespace,
        };
        let names = &settings.names;
        let kept = snapshot::load(data, &place.named(&names.ca_secret));
        let material = kept.material().map(Arc::new);
        let current = watch::Sender::new(material);
        let documents = Documents::new(&place, &names.state_secret, &kept, shutdown);
        let keeper = Keeper::new(&place, names, current.clone());
        keeper.start(settings, shutdown);
        snapshot::start(
            data,
            kept.clone(),
            (current.subscribe(), &documents),
            shutdown,
        );

        let mut known = current.subscribe();
        let material = first(&mut known).await;
        documents.heard().await;
        snapshot::publish(data, material.clone()).await;
        let ca = Arc::new(LocalCa::new(material)?.with_life(life));
        follow(&ca, known, shutdown);
        let replicas = Replicas {
            place: place.clone(),
            lease: names.replica_lease.clone(),
            is_single: settings.single_replica,
            holder: identity(),
        };
        let claimed = replicas.claim(&documents, data).await?;
        let holding = claimed.claim.map(|claim| replicas.hold(claim, shutdown));
        Ok(Authority {
            ca,
            tokens: documents.document(TOKENS),
            revocations: documents.document(REVOKED),
            keys: claimed.keys,
            holding,
        })
    }
}

/// The first CA that is heard of.
async fn first(known: &mut watch::Receiver<Option<Arc<CaMaterial>>>) -> Arc<CaMaterial> {
    loop {
        if let Some(material) = known.borrow_and_update().clone() {
            return material;
        }
        if known.changed().await.is_err() {
            // The keeper ends with the process alone.
            std::future::pending::<()>().await;
        }
    }
}

/// Makes the CA that is served the one that is heard.
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

impl Place {
    fn named(&self, name: &str) -> String {
        format!("Secret {}/{name}", self.namespace)
    }

    fn context(&self, object: Object) -> Context {
        Context {
            object,
            metrics: self.side.metrics.clone(),
            problems: self.side.problems.clone(),
            throttle: self.side.connection.throttle.clone(),
        }
    }

    async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(CALL_LIMIT, call).await {
            Ok(done) => done.map_err(|error| Failure::from(&error)),
            Err(_elapsed) => Err(Failure::timeout()),
        }
    }

    /// The Secret, which must be there: this server never makes one.
    async fn secret(&self, name: &str) -> Result<Secret, Failure> {
        match self.call(self.secrets.get_opt(name)).await {
            Ok(Some(secret)) => Ok(secret),
            Ok(None) => Err(Failure::absent(Object::Ca, &self.namespace, name)),
            Err(failure) if failure.kind == FailureKind::Forbidden => Err(Failure::new(
                failure.kind,
                format!(
                    "{failure}; grant get, list, watch and update on {}",
                    self.named(name)
                ),
            )),
            Err(failure) => Err(failure),
        }
    }

    /// Counts a write; `None` after a conflict.
    fn wrote<T>(&self, object: Object, written: Result<T, Failure>) -> Result<Option<T>, Failure> {
        let metrics = &self.side.metrics;
        match written {
            Ok(written) => {
                metrics.wrote(object, "ok");
                Ok(Some(written))
            }
            Err(failure) => {
                metrics.wrote(object, failure.kind.label());
                match failure.kind {
                    FailureKind::Conflict => Ok(None),
                    _ => Err(failure),
                }
            }
        }
    }

    fn problem(&self, part: Part, line: Option<String>) {
        self.side.problems.set(part, line.into_iter().collect());
    }
}

/// Too many conflicts in a row.
fn conflicts() -> Failure {
    Failure::new(FailureKind::Conflict, "somebody else keeps changing it")
}

/// Two writers that met once should not meet again.
async fn pause_after_conflict() {
    let pause = Duration::from_millis(10).mul_f64(1.0 + rand::random::<f64>() * 9.0);
    tokio::time::sleep(pause).await;
}
