//! CA of kubelet client certificates, as the API server publishes it. This module watches the CA,
//! passes it to the agent trust, and persists it for a start without the API server.

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tokio::sync::watch;
use tracing::{info, warn};
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};

use super::handle::ClusterHandle;
use super::objects::{CLIENT_CA, CLIENT_CA_KEY, Object};
use super::watches::{Observed, follow_one};
use crate::cluster::conditions::Condition;

/// Starts with the persisted CA and follows the CA that the API server publishes.
pub(super) fn start(
    cluster: &ClusterHandle,
    trust: Arc<AgentTrust>,
    persisted: PathBuf,
    shutdown: &Shutdown,
) {
    let mut is_in_use = match files::read(&persisted).map_err(|error| error.to_string()) {
        Ok(None) => false,
        Ok(Some(content)) => match adopt(&trust, &content) {
            Ok(()) => true,
            Err(error) => {
                warn!(error, path = %persisted.display(), "cannot use the persisted kubelet client CA");
                false
            }
        },
        Err(error) => {
            warn!(error, "cannot read the persisted kubelet client CA");
            false
        }
    };
    let (namespace, name) = CLIENT_CA;
    let maps = Api::<ConfigMap>::namespaced(cluster.connection.client.clone(), namespace);
    let context = cluster.watch_context(Object::KubeletCa);
    let problems = cluster.problems.clone();
    let (latest, updates) = watch::channel(None::<String>);
    shutdown.spawn_service(persist(persisted, updates));
    shutdown.spawn_service(async move {
        follow_one(maps, name, context, |observed| {
            let adopted = match published_ca(&observed) {
                PublishedCa::Nothing => return,
                // An API server that authenticates clients only by tokens publishes no CA.
                PublishedCa::None if !is_in_use => Ok(()),
                PublishedCa::None => Err(format!("no longer has {CLIENT_CA_KEY}")),
                PublishedCa::Pem(pem) => adopt(&trust, pem.as_bytes()).map(|()| {
                    is_in_use = true;
                    if latest.send_replace(Some(pem.to_owned())).as_deref() != Some(pem) {
                        info!("kubelet client CA updated from the cluster");
                    }
                }),
            };
            let line = adopted.err().map(|problem| {
                let stays = if is_in_use {
                    "; the previous CA stays in use"
                } else {
                    ""
                };
                format!("ConfigMap {namespace}/{name} {problem}{stays}")
            });
            problems.set(Condition::KubeletCa, line.into_iter().collect());
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
    /// The published CA in PEM.
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

/// Writes the latest CA to disk.
async fn persist(path: PathBuf, mut latest: watch::Receiver<Option<String>>) {
    while latest.changed().await.is_ok() {
        let Some(pem) = latest.borrow_and_update().clone() else {
            continue;
        };
        let path = path.clone();
        let write = move || match files::read(&path) {
            Ok(Some(persisted)) if persisted == pem.as_bytes() => Ok(()),
            Ok(_) | Err(_) => files::replace(&path, pem.as_bytes()),
        };
        match tokio::task::spawn_blocking(write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot persist the kubelet client CA"),
            Err(error) => warn!(%error, "task that persists the kubelet client CA failed"),
        }
    }
}
