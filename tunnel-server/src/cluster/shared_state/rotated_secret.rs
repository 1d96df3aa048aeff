//! Access of `ca rotate` to the CA Secret. The [`CaReconciler`](super::ca::CaReconciler) of every
//! server follows what is written here.

use std::io;
use std::sync::Arc;

use kube::api::PostParams;
use tunnel_process::shutdown::Shutdown;

use super::super::api_call::{CALL_LIMIT, count_write, with_limit};
use super::super::failure::{ApiError, ApiErrorKind};
use super::super::objects::{Object, REPLACES_CA_ANNOTATION};
use super::ca::{Plan, plan, put};
use super::cluster_objects::{ClusterObjects, wait};
use tunnel_ca::rotation::{CaStore, Rotation, SharedCa};
use tunnel_ca::{CaError, CaMaterial};

/// The CA Secret, for a thread that may block.
pub(super) struct RotatedSecret {
    pub(super) cluster_objects: ClusterObjects,
    pub(super) name: String,
    /// Runs the calls to the API server.
    pub(super) shutdown: Shutdown,
}

impl RotatedSecret {
    /// Runs a call to the API server, and waits for its result.
    fn wait<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, CaError> {
        wait(&self.shutdown, call).map_err(|problem| {
            let name = self.cluster_objects.describe_secret(&self.name);
            io::Error::other(format!("{name}: {problem}")).into()
        })
    }
}

impl CaStore for RotatedSecret {
    fn read(&self) -> Result<SharedCa, CaError> {
        let (cluster_objects, name) = (self.cluster_objects.clone(), self.name.clone());
        self.wait(async move {
            let secret = cluster_objects.secret(&name).await?;
            match plan(&secret, &cluster_objects.describe_secret(&name)) {
                Plan::Adopt(ca) => Ok(ca),
                Plan::Fill => Err(ApiError::new(ApiErrorKind::Invalid, "it is empty")),
                Plan::Refuse(condition) => Err(ApiError::new(ApiErrorKind::Invalid, condition)),
            }
        })
    }

    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<bool, CaError> {
        let rotation = rotation.map(Rotation::to_json).transpose()?;
        let (cluster_objects, name) = (self.cluster_objects.clone(), self.name.clone());
        self.wait(async move {
            let mut secret = cluster_objects.secret(&name).await?;
            if secret.metadata.resource_version != version {
                return Ok(false);
            }
            // A server that missed stages follows, because the command is the word of an operator.
            if let Plan::Adopt(replaced) = plan(&secret, &cluster_objects.describe_secret(&name)) {
                let annotations = secret.metadata.annotations.get_or_insert_default();
                let hashes = replaced.material.trusted().join(",");
                annotations.insert(REPLACES_CA_ANNOTATION.to_owned(), hashes);
            }
            put(
                &mut secret,
                &material,
                rotation.as_ref().map(|content| content.as_slice()),
            );
            let parameters = PostParams::default();
            let replaced = cluster_objects.secrets.replace(&name, &parameters, &secret);
            let written = with_limit(CALL_LIMIT, replaced).await;
            let metrics = &cluster_objects.cluster.metrics;
            Ok(count_write(metrics, Object::Ca, written)?.is_some())
        })
    }
}

tunnel_process::partial_debug!(RotatedSecret { name });
