//! Snapshot of the shared state in the data directory. A server that starts without the API server
//! uses the last observed CA and refuses the same nodes.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::warn;
use tunnel_process::files;
use tunnel_process::shutdown::Shutdown;
use zeroize::Zeroizing;

use super::documents::SharedDocuments;
use tunnel_ca::{CaMaterial, CaPem, SourceNames};
use tunnel_store::data_dir::{DataDir, replace_changed};
use tunnel_store::state_store::{OnDamage, RowSet, StateStore, Table, follow};

/// The CA in a file of its own, and rows of the store.
pub(super) struct SharedSnapshot {
    data: DataDir,
    store: StateStore,
    ca: PersistedCa,
    /// One row, whose key is the prefix.
    origin: RowSet<String, Origin>,
    documents: RowSet<String, String>,
}

/// The CA that was last observed.
#[derive(Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PersistedCa {
    /// Secret that the CA came from. The snapshot is ignored for another Secret.
    secret: String,
    pem: CaPem,
}

/// Where the documents came from.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Origin {
    /// The Secret of the CA, for whose installation the documents are.
    secret: String,
    /// Whether the CA and the documents were observed, so that the snapshot is complete enough to start with.
    is_whole: bool,
}

impl SharedSnapshot {
    /// Loads the snapshot of the Secret with this name. What is missing, not valid, or of another
    /// Secret is ignored, because the cluster provides it again. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be opened.
    pub(super) fn load(data: &DataDir, secret: &str) -> io::Result<Self> {
        let store = data.store(OnDamage::SetAside)?;
        if data.ca_key().exists() {
            warn!(
                path = %data.ca_key().display(),
                secret, "the CA in the data directory is not used in a cluster; to continue with this CA, store it in the Secret"
            );
        }
        let mut snapshot = Self {
            data: data.clone(),
            ca: load_ca(data),
            origin: RowSet::load(&store, Table::Cluster, "shared"),
            documents: RowSet::load(&store, Table::Cluster, "document/"),
            store,
        };
        if snapshot.ca.secret != secret {
            snapshot.ca = PersistedCa::default();
        }
        if snapshot.origin().secret != secret {
            snapshot.documents.replace(BTreeMap::new());
            snapshot.set_origin(secret, false);
        }
        Ok(snapshot)
    }

    pub(super) fn material(&self) -> Option<CaMaterial> {
        let pem = &self.ca.pem;
        if pem.key.is_empty() {
            return None;
        }
        let names = SourceNames {
            certificates: "persisted certificates",
            key: "persisted key",
        };
        pem.material(names)
            .inspect_err(|error| warn!(%error, "cannot use the persisted CA"))
            .ok()
    }

    pub(super) fn documents(&self) -> &BTreeMap<String, String> {
        self.documents.values()
    }

    /// Returns whether the snapshot is complete enough to start with.
    pub(super) fn is_whole(&self) -> bool {
        self.origin().is_whole
    }

    fn origin(&self) -> &Origin {
        static NONE: Origin = Origin {
            secret: String::new(),
            is_whole: false,
        };
        self.origin.values().values().next().unwrap_or(&NONE)
    }

    fn set_origin(&mut self, secret: &str, is_whole: bool) {
        let origin = Origin {
            secret: secret.to_owned(),
            is_whole,
        };
        self.origin
            .replace(BTreeMap::from([(String::new(), origin)]));
    }

    /// Starts the task that persists the state soon after `changes`.
    pub(super) fn start(
        mut self,
        current: watch::Receiver<Option<Arc<CaMaterial>>>,
        documents: SharedDocuments,
        changes: watch::Receiver<()>,
        shutdown: &Shutdown,
    ) {
        let secret = self.origin().secret.clone();
        shutdown.spawn_service(follow(changes, move |()| {
            let material = current.borrow().clone();
            if let Some(material) = &material {
                self.replace_ca(&secret, material);
            }
            let texts = documents.texts().into_iter();
            let texts = texts.map(|(key, text)| (key.to_owned(), text));
            self.documents.replace(texts.collect());
            // Last, because it says that the CA and the documents are there.
            let is_whole = material.is_some() && documents.is_observed();
            self.set_origin(&secret, is_whole);
        }));
    }

    /// Writes the CA, and its certificates to the path where operators expect them.
    fn replace_ca(&mut self, secret: &str, material: &CaMaterial) {
        let ca = PersistedCa {
            secret: secret.to_owned(),
            pem: CaPem::of(material),
        };
        if ca == self.ca {
            return;
        }
        let mut content = Zeroizing::new(Vec::new());
        if let Err(error) = serde_json::to_writer(&mut *content, &ca) {
            warn!(%error, "cannot persist the CA");
            return;
        }
        self.store.replace_file(self.data.authority(), content);
        let certificates = ca.pem.certificates.as_bytes().to_vec();
        let path = self.data.ca_certificate();
        self.store.replace_file(path, certificates.into());
        self.ca = ca;
    }
}

fn load_ca(data: &DataDir) -> PersistedCa {
    let path = data.authority();
    let read = files::read_secret(&path).map_err(|error| error.to_string());
    let persisted = read.and_then(|content| match content {
        None => Ok(PersistedCa::default()),
        Some(content) => serde_json::from_slice(&content).map_err(|error| error.to_string()),
    });
    persisted.unwrap_or_else(|error| {
        warn!(error, path = %path.display(), "cannot load the persisted CA; waiting for the API server");
        PersistedCa::default()
    })
}

/// Writes the certificates to the path where operators expect them, before the server is ready.
pub(super) async fn publish(data: &DataDir, material: Arc<CaMaterial>) {
    let path = data.ca_certificate();
    let writing = tokio::task::spawn_blocking(move || {
        replace_changed(&path, material.certificates_pem().as_bytes())
    });
    match writing.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "cannot write the certificates of the CA"),
        Err(error) => warn!(%error, "writing the certificates of the CA failed"),
    }
}
