//! A fake kube-apiserver in memory, with faults on demand. It has what the scenarios ask of it.
//!
//! The server serves, over TLS on a free loopback port, the kinds that a tunnel uses. Supported are
//! get, list in pages, watch from a resource version with bookmarks, create, update, JSON, merge and
//! strategic patches and delete; discovery, selectors by equality. A server-side apply
//! merges, without field managers and thus without conflicts. Objects are not validated. Users are
//! authorized by the roles in the server. There are no controllers, so Endpoints are not created and
//! garbage is not collected. Tests that must also hold against a real server use [`crate::cluster`],
//! which has one interface for both. Those tests use this module only for faults and request counts.

mod access;
mod bootstrap;
mod connection;
mod defaulting;
mod discovery;
mod exec;
mod faults;
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
mod tokens;
mod watching;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::process::ScratchDir;

pub use access::User;
pub use faults::{Cut, Fault, Presence};
pub use record::RecordedRequest;
pub(crate) use signing::{REQUESTS, sign};
pub use status::Status;
pub use tokens::{Reviewing, TokenClaims};

use connection::Listening;
use defaulting::key;
use faults::Faults;
use http::{Service, shown};
use kinds::Kind;
use pki::Pki;
use record::RequestLog;
use store::Store;

/// Initial configuration of a fake API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setup {
    /// First addresses of the Service ranges, the primary family first.
    pub service_ranges: Vec<IpAddr>,
    /// ServiceAccounts with credentials, as namespace and name.
    pub service_accounts: Vec<(String, String)>,
}

impl Default for Setup {
    /// Returns a setup with IPv4 only and no ServiceAccounts.
    fn default() -> Self {
        Self {
            service_ranges: vec![IpAddr::from([10, 106, 0, 0])],
            service_accounts: Vec::new(),
        }
    }
}

/// A running fake API server. Dropping it has the effect of a power failure.
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
    /// Starts a server with the namespaces of every cluster on the current runtime.
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
            egress: Mutex::default(),
            execs: Mutex::default(),
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
        for namespace in [
            "default",
            "kube-system",
            "kube-public",
            "kube-node-lease",
            "kube-system-tokens",
        ] {
            fake_api.put(
                "namespaces",
                None,
                json!({ "metadata": { "name": namespace }, "status": { "phase": "Active" } }),
            )?;
        }
        for (plural, object) in bootstrap::roles() {
            fake_api.put(plural, None, object)?;
        }
        // Published as in kube-apiserver
        // (`pkg/controlplane/controller/clusterauthenticationtrust`).
        let client_ca = fake_api.pki.ca_pem();
        fake_api.set_client_ca(&client_ca)?;
        Ok(fake_api)
    }

    /// Publishes another CA of client certificates. The CA that this server accepts does not
    /// change.
    pub fn set_client_ca(&self, pem: &str) -> Result<()> {
        let map = json!({
            "metadata": { "name": "extension-apiserver-authentication" }, "data": { "client-ca-file": pem },
        });
        self.put("configmaps", Some("kube-system"), map)
    }

    /// Signs a token that this server accepts in a TokenReview.
    pub fn sign(&self, claims: &TokenClaims) -> String {
        self.service.signer.sign(claims)
    }

    /// Sets how this server reviews tokens.
    pub fn review_as(&self, reviewing: Reviewing) {
        self.service.signer.set(reviewing);
    }

    /// Reaches kubelets through the CONNECT listener on this Unix socket.
    pub async fn set_egress(&self, socket: &Path) {
        *self.service.egress.lock().await = Some(socket.to_owned());
    }

    /// Returns the listen address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Writes a kubeconfig with all permissions, authenticated by a client certificate.
    pub fn admin_kubeconfig(&self) -> Result<PathBuf> {
        let folder = self.scratch.path();
        let user = json!({
            "client-certificate": folder.join(format!("{ADMIN}.crt")), "client-key": folder.join(format!("{ADMIN}.key")),
        });
        self.kubeconfig(ADMIN, &user, "default")
    }

    /// Writes a kubeconfig of a ServiceAccount of the [`Setup`], authenticated by a token.
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
        let config = kubeconfig(self.addr(), &ca, user, namespace);
        Ok(self
            .scratch
            .file(&format!("{name}.kubeconfig"), config.to_string())?)
    }

    /// Adds a fault to the active ones.
    pub fn fault(&self, fault: Fault) {
        self.service.faults.add(fault);
    }

    /// Removes all faults except absence.
    pub fn clear_faults(&self) {
        self.service.faults.clear();
    }

    /// Makes the server disappear or return, with all its objects.
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

    /// Ends all open watches.
    pub fn cut_watches(&self, how: Cut) {
        self.service.faults.cut(how);
    }

    /// Compacts the history: watches and lists that continue from before it get 410.
    pub fn compact(&self) {
        self.service.store.compact();
    }

    /// Returns all requests so far.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.service.record.all()
    }

    /// Stores an object without the API: without authorization, checks and defaults. Meant for
    /// thousands of objects, and for old ones.
    pub fn put(&self, plural: &str, namespace: Option<&str>, mut object: Value) -> Result<()> {
        let kind = Kind::plural(plural).with_context(|| format!("no kind {plural}"))?;
        let name = object["metadata"]["name"]
            .as_str()
            .context("the object has no name")?
            .to_owned();
        object["kind"] = kind.kind.into();
        object["apiVersion"] = kind.api_version().into();
        if let Some(namespace) = namespace {
            object["metadata"]["namespace"] = namespace.into();
        }
        object["metadata"]["uid"] = defaulting::uid().into();
        if object["metadata"]["creationTimestamp"].is_null() {
            object["metadata"]["creationTimestamp"] = defaulting::now().into();
        }
        self.service
            .store
            .write(|content| content.put(key(kind, namespace, &name), object));
        Ok(())
    }

    /// Returns the stored object, if it exists.
    pub fn get(&self, plural: &str, namespace: Option<&str>, name: &str) -> Option<Value> {
        let kind = Kind::plural(plural)?;
        let key = key(kind, namespace, name);
        self.service
            .store
            .read(|content| content.get(&key).map(|object| shown(kind, object)))
    }

    /// Returns each state of the object since the last compaction, with its revision; `None` means
    /// that the object was deleted.
    pub fn history(
        &self,
        plural: &str,
        namespace: Option<&str>,
        name: &str,
    ) -> Vec<(u64, Option<Value>)> {
        let Some(kind) = Kind::plural(plural) else {
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

/// Returns a kubeconfig for the API server at `addr`, whose certificate file `ca` verifies.
pub(crate) fn kubeconfig(addr: SocketAddr, ca: &Path, user: &Value, namespace: &str) -> Value {
    let cluster = json!({ "server": format!("https://{addr}"), "certificate-authority": ca });
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": cluster }],
        "users": [{ "name": "test", "user": user }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test", "namespace": namespace } }],
    })
}

/// User name of [`FakeApiServer::admin_kubeconfig`], also used for its files.
const ADMIN: &str = "admin";
