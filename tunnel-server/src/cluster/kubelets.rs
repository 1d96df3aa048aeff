//! The CA of kubelets' client certificates, as the API server publishes it: followed, handed to those who judge agents, and
//! kept on disk for a start without the API server.

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::watch;
use tracing::{info, warn};
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};

use super::objects::{CLIENT_CA, CLIENT_CA_KEY};
use super::watches::{Context, Seen, follow_one};
use crate::cluster::conditions::{Part, Problems};

/// Begins with what was kept, and follows what the API server says.
pub(super) fn start(
    client: &Client,
    trust: Arc<AgentTrust>,
    kept: PathBuf,
    (context, problems): (Context, Problems),
    shutdown: &Shutdown,
) {
    let mut is_in_use = match files::read(&kept).map_err(|error| error.to_string()) {
        Ok(None) => false,
        Ok(Some(content)) => match adopt(&trust, &content) {
            Ok(()) => true,
            Err(error) => {
                warn!(error, path = %kept.display(), "cannot use the kept CA of kubelets");
                false
            }
        },
        Err(error) => {
            warn!(error, "cannot read the kept CA of kubelets");
            false
        }
    };
    let (namespace, name) = CLIENT_CA;
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let (latest, heard) = watch::channel(None::<String>);
    shutdown.spawn_service(keep(kept, heard));
    shutdown.spawn_service(async move {
        follow_one(maps, name, context, |seen| {
            let adopted = match of_map(&seen) {
                Told::Nothing => return,
                // An API server that knows its clients by tokens alone has none.
                Told::None if !is_in_use => Ok(()),
                Told::None => Err(format!("has no {CLIENT_CA_KEY} any more")),
                Told::Pem(pem) => adopt(&trust, pem.as_bytes()).map(|()| {
                    is_in_use = true;
                    if latest.send_replace(Some(pem.to_owned())).as_deref() != Some(pem) {
                        info!("kubelets are agents by the CA that the cluster says");
                    }
                }),
            };
            let line = adopted.err().map(|problem| {
                let stays = if is_in_use {
                    "; the last good CA stays in use"
                } else {
                    ""
                };
                format!("ConfigMap {namespace}/{name} {problem}{stays}")
            });
            problems.set(Part::KubeletCa, line.into_iter().collect());
        })
        .await;
    });
}

/// What the API server says.
#[derive(Debug, PartialEq, Eq)]
enum Told<'a> {
    /// It was not heard yet.
    Nothing,
    /// There is no CA.
    None,
    /// This is it.
    Pem(&'a str),
}

fn of_map(seen: &Seen<ConfigMap>) -> Told<'_> {
    match seen {
        Seen::Unknown => Told::Nothing,
        Seen::Absent => Told::None,
        Seen::Present(map) => {
            let text = map.data.as_ref().and_then(|data| data.get(CLIENT_CA_KEY));
            text.map_or(Told::None, |text| Told::Pem(text))
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

/// Writes the latest text to disk.
async fn keep(path: PathBuf, mut latest: watch::Receiver<Option<String>>) {
    while latest.changed().await.is_ok() {
        let Some(pem) = latest.borrow_and_update().clone() else {
            continue;
        };
        let path = path.clone();
        let write = move || match files::read(&path) {
            Ok(Some(kept)) if kept == pem.as_bytes() => Ok(()),
            Ok(_) | Err(_) => files::replace(&path, pem.as_bytes()),
        };
        match tokio::task::spawn_blocking(write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot keep the CA of kubelets"),
            Err(error) => warn!(%error, "keeping the CA of kubelets failed"),
        }
    }
}
