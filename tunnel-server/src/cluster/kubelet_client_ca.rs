//! CA of kubelet client certificates, as the API server publishes it. This module watches the CA,
//! passes it to the agent trust, and persists it for a start without the API server.

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tracing::{info, warn};
use tunnel_process::files;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};

use super::client::ClusterHandle;
use super::objects::{CLIENT_CA, CLIENT_CA_KEY, Object};
use super::watches::{Observed, follow_one};
use crate::cluster::conditions::Condition;
use tunnel_store::state_store::StateStore;

/// The file of the CA that was last observed, and who writes it.
pub(super) struct PersistedFile {
    pub(super) path: PathBuf,
    pub(super) store: StateStore,
}

/// Starts with the CA that is persisted, and follows the CA that the API server publishes.
pub(super) fn start(
    cluster: &ClusterHandle,
    trust: Arc<AgentTrust>,
    PersistedFile { path, store }: PersistedFile,
    shutdown: &Shutdown,
) {
    let read = files::read(&path).map_err(|error| error.to_string());
    let persisted = read.unwrap_or_else(|error| {
        warn!(error, "cannot read the persisted kubelet client CA");
        None
    });
    let adopted = persisted.as_deref().map(|pem| adopt(&trust, pem));
    let mut is_in_use = matches!(adopted, Some(Ok(())));
    if let Some(Err(error)) = adopted {
        warn!(error, path = %path.display(), "cannot use the persisted kubelet client CA");
    }
    let (namespace, name) = CLIENT_CA;
    let maps = Api::<ConfigMap>::namespaced(cluster.connection.client.clone(), namespace);
    let context = cluster.watch_context(Object::KubeletClientCa);
    let conditions = cluster.conditions.clone();
    let mut latest = persisted;
    shutdown.spawn_service(async move {
        follow_one(maps, name, context, |observed| {
            let adopted = match published_ca(&observed) {
                PublishedCa::Nothing => return,
                // An API server that authenticates clients only by tokens publishes no CA.
                PublishedCa::None if !is_in_use => Ok(()),
                PublishedCa::None => Err(format!("no longer has {CLIENT_CA_KEY}")),
                PublishedCa::Pem(pem) => adopt(&trust, pem.as_bytes()).map(|()| {
                    is_in_use = true;
                    if latest.as_deref() != Some(pem.as_bytes()) {
                        info!("kubelet client CA updated from the cluster");
                        store.replace_file(path.clone(), pem.as_bytes().to_vec().into());
                        latest = Some(pem.as_bytes().to_vec());
                    }
                }),
            };
            let line = adopted.err().map(|reason| {
                let stays = if is_in_use {
                    "; the previous CA stays in use"
                } else {
                    ""
                };
                format!("ConfigMap {namespace}/{name} {reason}{stays}")
            });
            conditions.set(Condition::KubeletClientCa, line.into_iter().collect());
        })
        .await;
    });
}

/// The CA as published by the API server.
#[derive(Debug, PartialEq, Eq)]
enum PublishedCa<'a> {
    /// The ConfigMap has not been observed yet.
    Nothing,
    /// The API server publishes no CA.
    None,
    Pem(&'a str),
}

fn published_ca(observed: &Observed<ConfigMap>) -> PublishedCa<'_> {
    match observed {
        Observed::Unknown => PublishedCa::Nothing,
        Observed::Absent => PublishedCa::None,
        Observed::Present(map) => {
            let text = map.data.as_ref().and_then(|data| data.get(CLIENT_CA_KEY));
            text.map_or(PublishedCa::None, |text| PublishedCa::Pem(text))
        }
    }
}

fn adopt(trust: &AgentTrust, pem: &[u8]) -> Result<(), String> {
    let roots = tls::files::chain(pem)
        .map_err(|error| format!("holds no certificate in {CLIENT_CA_KEY}: {error}"))?;
    tls::roots(roots)
        .and_then(|roots| trust.replace_cluster(roots))
        .map_err(|error| format!("holds a CA that cannot be used: {error}"))
}
