//! Snapshot of the shared state in the data directory. A server that starts without the API server
//! uses the last observed CA and refuses the same nodes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use zeroize::Zeroizing;

use super::documents::SharedDocuments;
use crate::ca::{CaMaterial, SourceNames};
use crate::store::data_dir::{DataDir, wiped_text};
use crate::store::snapshot::Snapshot;

/// Changes within this time are written together.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SharedSnapshot {
    /// Secret that the CA came from. The snapshot is ignored for another Secret.
    secret: String,
    certificates: String,
    #[serde(with = "wiped_text")]
    key: Zeroizing<String>,
    pub(super) documents: BTreeMap<String, String>,
    /// Whether the documents were observed, so that the snapshot is complete enough to start with.
    pub(super) is_whole: bool,
}

impl SharedSnapshot {
    pub(super) fn material(&self) -> Option<CaMaterial> {
        if self.key.is_empty() {
            return None;
        }
        let names = SourceNames {
            certificates: "persisted certificates",
            key: "persisted key",
        };
        CaMaterial::parse(self.certificates.as_bytes(), self.key.as_bytes(), names)
            .inspect_err(|error| warn!(%error, "cannot use the persisted CA"))
            .ok()
    }
}

/// Returns the persisted state of the Secret with this name. Returns the empty state if the file is
/// missing or not valid, because the cluster provides the state again.
pub(super) fn load(data: &DataDir, secret: &str) -> SharedSnapshot {
    let path = data.authority();
    let read = files::read_secret(&path).map_err(|error| error.to_string());
    let persisted = read.and_then(|content| match content {
        None => Ok(SharedSnapshot::default()),
        Some(content) => serde_json::from_slice(&content).map_err(|error| error.to_string()),
    });
    let persisted: SharedSnapshot = persisted.unwrap_or_else(|error| {
        warn!(error, path = %path.display(), "cannot load the persisted CA state; waiting for the API server");
        SharedSnapshot::default()
    });
    if data.ca_key().exists() {
        warn!(
            path = %data.ca_key().display(),
            secret, "the CA in the data directory is not used in a cluster; to continue with this CA, store it in the Secret"
        );
    }
    if persisted.secret == secret {
        return persisted;
    }
    SharedSnapshot {
        secret: secret.to_owned(),
        ..SharedSnapshot::default()
    }
}

/// Writes the certificates to the path where operators expect them.
pub(super) async fn publish(data: &DataDir, material: Arc<CaMaterial>) {
    let path = data.ca_certificate();
    let writing =
        tokio::task::spawn_blocking(move || write_certificates(&path, material.certificates_pem()));
    match writing.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "cannot write the certificates of the CA"),
        Err(error) => warn!(%error, "writing the certificates of the CA failed"),
    }
}

/// Starts the task that persists the state soon after `changes`.
pub(super) fn start(
    data: &DataDir,
    persisted: SharedSnapshot,
    current: watch::Receiver<Option<Arc<CaMaterial>>>,
    documents: SharedDocuments,
    changes: watch::Receiver<()>,
    shutdown: &Shutdown,
) {
    let (path, certificate) = (data.authority(), data.ca_certificate());
    let secret = persisted.secret.clone();
    let snapshot = Snapshot::new(
        "shared CA state",
        PAUSE,
        Some(persisted),
        move |persisted| save(&path, &certificate, persisted),
    );
    let state = move |(): &()| {
        let state = shared_state(&secret, current.borrow().as_deref(), &documents);
        (!state.key.is_empty()).then_some(state)
    };
    // The state may change until the process stops.
    let never = CancellationToken::new();
    shutdown.spawn_service(snapshot.follow(changes, state, never));
}

fn shared_state(
    secret: &str,
    material: Option<&CaMaterial>,
    documents: &SharedDocuments,
) -> SharedSnapshot {
    let texts = documents.texts().into_iter();
    SharedSnapshot {
        secret: secret.to_owned(),
        certificates: material.map_or_else(String::new, |ca| ca.certificates_pem().to_owned()),
        key: material.map_or_else(Zeroizing::default, |ca| ca.key_pem().to_owned().into()),
        is_whole: documents.is_observed(),
        documents: texts.map(|(key, text)| (key.to_owned(), text)).collect(),
    }
}

/// Writes the file, and the certificates to the path where operators expect them.
fn save(path: &Path, certificate: &Path, persisted: &SharedSnapshot) -> std::io::Result<()> {
    let content = Zeroizing::new(serde_json::to_vec(persisted).map_err(std::io::Error::other)?);
    files::replace(path, &content)?;
    write_certificates(certificate, &persisted.certificates)
}

fn write_certificates(path: &Path, pem: &str) -> std::io::Result<()> {
    if files::read(path)?.as_deref() == Some(pem.as_bytes()) {
        return Ok(());
    }
    files::replace(path, pem.as_bytes())
}
