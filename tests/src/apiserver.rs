//! A stand-in for kube-apiserver: real enough for kubectl and client libraries, in memory, with faults on demand.
//!
//! It serves the kinds that a tunnel has to do with over TLS on a free port of loopback: get, list in pages, watch with
//! resource versions, bookmarks and initial events, create, update, merge and strategic patches, server-side apply,
//! delete; discovery, tables, field and label selectors; ServiceAccounts may do what the roles in it say. There are no
//! controllers: nobody makes Endpoints or collects garbage. Tests that are to hold against a real one use
//! [`crate::cluster`], which puts both behind the same words, and keep to this module for faults and for counting requests.

mod access;
mod admission;
mod apply;
mod connection;
mod discovery;
mod faults;
mod fields;
mod http;
mod kinds;
mod patch;
mod pki;
mod protobuf;
mod record;
mod request;
mod selector;
mod signing;
mod status;
mod store;
mod table;
mod tokens;
mod watching;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::process::ScratchDir;

pub use access::User;
pub use faults::{Cut, Fault, Presence};
pub use record::RecordedRequest;
pub use status::Status;
pub use tokens::{Reviewing, TokenClaims};

use admission::key;
use connection::Listening;
use faults::Faults;
use http::{Service, shown};

use pki::Pki;
use record::RequestLog;
use store::Store;

/// What a stand-in begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// The first addresses of the ranges from which Services get theirs, the main family first.
    pub service_ranges: Vec<IpAddr>,
    /// ServiceAccounts with credentials, as namespace and name.
    pub service_accounts: Vec<(String, String)>,
}

impl Default for Setup {
    /// IPv4 alone, and no ServiceAccounts.
    fn default() -> Self {
        Self {
            service_ranges: vec![IpAddr::from([10, 106, 0, 0])],
            service_accounts: Vec::new(),
        }
    }
}

/// A running stand-in. Dropping it is a power cut.
#[derive(Debug)]
pub struct FakeApiServer {
    service: Arc<Service>,
    addr: SocketAddr,
    listening: Mutex<Listening>,
    pki: Pki,
    tokens: HashMap<(String, String), String>,
    scratch: ScratchDir,
}

impl FakeApiServer {
    /// Starts one with the namespaces that every cluster has, on the runtime that this is called in.
    ///
    /// # Errors
    /// No port, or no place for its files.
    pub fn start(setup: Setup) -> Result<Self> {
        let scratch = ScratchDir::new().context("folder of the API server")?;
        let mut pki = Pki::new().context("certificates of the API server")?;
        pki.user(ADMIN, User::admin(), scratch.path())?;
        let mut tokens = HashMap::new();
        let mut users = HashMap::new();
        for (namespace, name) in setup.service_accounts {
            let token = format!("token-{:032x}", rand::random::<u128>());
            users.insert(token.clone(), User::service_account(&namespace, &name));
            tokens.insert((namespace, name), token);
        }
        let service = Arc::new(Service {
            store: Store::new(),
            faults: Faults::new(),
            record: RequestLog::default(),
            tokens: users,
            signer: tokens::Signer::new(),
            families: setup.service_ranges,
        });
        let listening = Listening::start(Arc::clone(&service), &pki)?;
        let addr = listening.addr();
        let fake_api = Self {
            service,
            addr,
            listening: Mutex::new(listening),
            pki,
            tokens,
            scratch,
        };
        for namespace in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            fake_api.put(
                "namespaces",
                None,
                json!({ "metadata": { "name": namespace }, "status": { "phase": "Active" } }),
            )?;
        }
        // As kube-apiserver publishes it (`pkg/controlplane/controller/clusterauthenticationtrust`).
        let client_ca = fake_api.pki.ca_pem();
        fake_api.set_client_ca(&client_ca)?;
        Ok(fake_api)
    }

    /// Publishes another CA of client certificates; who may ask here stays as it was.
    ///
    /// # Errors
    /// It cannot be kept.
    pub fn set_client_ca(&self, pem: &str) -> Result<()> {
        let map = json!({
            "metadata": { "name": "extension-apiserver-authentication" }, "data": { "client-ca-file": pem },
        });
        self.put("configmaps", Some("kube-system"), map)
    }

    /// A token that this server accepts when it is asked about it.
    pub fn sign(&self, claims: &TokenClaims) -> String {
        self.service.signer.sign(claims)
    }

    /// Reviews tokens in another way.
    pub fn review_as(&self, reviewing: Reviewing) {
        self.service.signer.set(reviewing);
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A kubeconfig with which one may do everything, by client certificate.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn admin_kubeconfig(&self) -> Result<PathBuf> {
        let folder = self.scratch.path();
        let user = json!({
            "client-certificate": folder.join(format!("{ADMIN}.crt")), "client-key": folder.join(format!("{ADMIN}.key")),
        });
        self.kubeconfig(ADMIN, &user, "default")
    }

    /// A kubeconfig of a ServiceAccount of the [`Setup`], by token.
    ///
    /// # Errors
    /// There is no such ServiceAccount, or it cannot be written.
    pub fn service_account_kubeconfig(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        let token = self.tokens.get(&(namespace.to_owned(), name.to_owned()));
        let token = token.with_context(|| format!("no ServiceAccount {namespace}/{name}"))?;
        self.kubeconfig(
            &format!("{namespace}-{name}"),
            &json!({ "token": token }),
            namespace,
        )
    }

    fn kubeconfig(&self, name: &str, user: &Value, namespace: &str) -> Result<PathBuf> {
        let ca = self.scratch.file("ca.crt", self.pki.ca_pem())?;
        let cluster =
            json!({ "server": format!("https://{}", self.addr()), "certificate-authority": ca });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": name, "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": name, "namespace": namespace } }],
        });
        Ok(self
            .scratch
            .file(&format!("{name}.kubeconfig"), config.to_string())?)
    }

    /// Adds a fault to those in force.
    pub fn fault(&self, fault: Fault) {
        self.service.faults.add(fault);
    }

    /// Ends all faults but its absence.
    pub fn mend(&self) {
        self.service.faults.clear();
    }

    /// Goes away or comes back; with all it holds.
    ///
    /// # Errors
    /// Its port cannot be opened again.
    pub async fn be(&self, presence: Presence) -> Result<()> {
        self.service.faults.set_presence(presence);
        if presence == Presence::Refusing {
            self.listening.lock().await.close().await;
        } else {
            self.listening
                .lock()
                .await
                .open(Arc::clone(&self.service))
                .context("open the API server's port again")?;
        }
        Ok(())
    }

    /// Ends all watches that are open.
    pub fn cut_watches(&self, how: Cut) {
        self.service.faults.cut(how);
    }

    /// Forgets the past: watches and lists that go on from before it get 410.
    pub fn compact(&self) {
        self.service.store.compact();
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.service.record.all()
    }

    /// Puts an object into the store past the API: without authorisation, checks and defaults. For thousands of them.
    ///
    /// # Errors
    /// There is no such kind, or the object has no name.
    pub fn put(&self, plural: &str, namespace: Option<&str>, mut object: Value) -> Result<()> {
        let kind = kinds::KINDS
            .iter()
            .find(|kind| kind.plural == plural)
            .with_context(|| format!("no kind {plural}"))?;
        let name = object["metadata"]["name"]
            .as_str()
            .context("the object has no name")?
            .to_owned();
        object["kind"] = kind.kind.into();
        object["apiVersion"] = kind.api_version().into();
        if let Some(namespace) = namespace {
            object["metadata"]["namespace"] = namespace.into();
        }
        object["metadata"]["uid"] = format!("{:032x}", rand::random::<u128>()).into();
        object["metadata"]["creationTimestamp"] = admission::now().into();
        self.service
            .store
            .write(|content| content.put(key(kind, namespace, &name), object));
        Ok(())
    }

    /// The object as it is kept, if it is there.
    pub fn get(&self, plural: &str, namespace: Option<&str>, name: &str) -> Option<Value> {
        let kind = kinds::KINDS.iter().find(|kind| kind.plural == plural)?;
        let key = key(kind, namespace, name);
        self.service
            .store
            .read(|content| content.get(&key).map(|object| shown(kind, object)))
    }

    /// Each state that the object has had since the last compaction, with its revision; `None`: it was gone.
    pub fn history(
        &self,
        plural: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Vec<(u64, Option<Value>)> {
        let Some(kind) = kinds::KINDS.iter().find(|kind| kind.plural == plural) else {
            return Vec::new();
        };
        let key = key(kind, namespace, name);
        self.service.store.read(|content| {
            let changes = content
                .changes_after(content.compacted())
                .into_iter()
                .flatten();
            let own = changes.filter(|change| change.key == key);
            own.map(|change| (change.revision, change.after.as_deref().cloned()))
                .collect()
        })
    }
}

/// The user of [`FakeApiServer::admin_kubeconfig`], as its files are called.
const ADMIN: &str = "admin";
