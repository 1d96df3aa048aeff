//! Join tokens of a cluster: a Secret for each, in a namespace of their own. RBAC knows no prefix of
//! names, and the server must not read every Secret of its own namespace. Nobody watches them; the
//! leader removes old ones.

use std::io;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams, Preconditions};
use tokio::runtime::Handle;
use tracing::{debug, info};
use tunnel_process::shutdown::Shutdown;

use super::super::api_call::{CALL_LIMIT, count_write, with_limit};
use super::super::client::ClusterHandle;
use super::super::conditions::Condition;
use super::super::failure::{ApiError, ApiErrorKind};
use super::super::leader_election::Leadership;
use super::super::objects::{
    COMPONENT_LABEL, JOIN_TOKEN, JOIN_TOKEN_USE, Object, join_token_name, tokens_namespace,
};
use super::cluster_objects::wait;
use tunnel_ca::tokens::{StoredToken, TokenObject, TokenObjects};

/// The Secrets of the join tokens. Clones share the connection.
#[derive(Clone)]
pub(in super::super) struct TokenSecrets {
    cluster: ClusterHandle,
    namespace: String,
    secrets: Api<Secret>,
    shutdown: Shutdown,
    /// Callers may be on threads outside of the runtime.
    runtime: Handle,
}

impl TokenSecrets {
    /// Prepares the client. Must be called within a runtime.
    pub(in super::super) fn new(cluster: &ClusterHandle, shutdown: &Shutdown) -> Self {
        let namespace = tokens_namespace(&cluster.connection.namespace);
        Self {
            secrets: Api::namespaced(cluster.connection.client.clone(), &namespace),
            cluster: cluster.clone(),
            namespace,
            shutdown: shutdown.clone(),
            runtime: Handle::current(),
        }
    }

    /// Runs a call to the API server, and waits for its result.
    fn wait<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> io::Result<T> {
        let _entered = self.runtime.enter();
        let this = self.clone();
        let reported = async move {
            let result = call.await;
            this.report(result.as_ref().err());
            result
        };
        let problem = |problem| format!("join tokens in namespace {}: {problem}", self.namespace);
        wait(&self.shutdown, reported).map_err(|error| io::Error::other(problem(error)))
    }

    /// Reports a missing namespace or Role, with the command that creates it, or that there is none.
    fn report(&self, error: Option<&ApiError>) {
        let line = match error {
            None => None,
            Some(error) if error.is_missing() => Some(missing(&self.namespace, error)),
            Some(_) => return,
        };
        let lines = line.into_iter().collect();
        self.cluster.conditions.set(Condition::Tokens, lines);
    }

    /// Returns the tokens and the uses with a label, page by page.
    async fn page(&self, component: &str, after: Option<String>) -> Result<Page, ApiError> {
        let parameters = ListParams {
            continue_token: after,
            ..ListParams::default()
                .labels(&format!("{COMPONENT_LABEL}={component}"))
                .limit(PAGE_OBJECTS)
        };
        let found = with_limit(LIST_LIMIT, self.secrets.list(&parameters)).await?;
        let tokens = found.items.into_iter().filter_map(|secret| {
            let token = parse(&secret).ok()?;
            Some((secret, token))
        });
        Ok(Page {
            tokens: tokens.collect(),
            next: found.metadata.continue_.filter(|next| !next.is_empty()),
        })
    }

    /// Removes what expired more than a day ago by the API server's clock. Without that clock nothing is
    /// removed.
    async fn clean(&self, component: &str) -> Result<(), ApiError> {
        let mut after = None;
        loop {
            let page = self.page(component, after).await?;
            let Some(now) = self.cluster.clock().time() else {
                return Ok(());
            };
            self.remove_old(page.tokens, now).await?;
            after = page.next;
            if after.is_none() {
                return Ok(());
            }
        }
    }

    async fn remove_old(
        &self,
        tokens: Vec<(Secret, StoredToken)>,
        now: SystemTime,
    ) -> Result<(), ApiError> {
        let mut failed = None;
        for (secret, token) in tokens {
            let Some(name) = secret.metadata.name.filter(|_| token.is_old(now)) else {
                continue;
            };
            let parameters = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: secret.metadata.uid,
                    resource_version: secret.metadata.resource_version,
                }),
                ..DeleteParams::default()
            };
            match with_limit(CALL_LIMIT, self.secrets.delete(&name, &parameters)).await {
                Ok(_deleted) => info!(secret = name, "removed an expired join token"),
                // Another server removed or changed it.
                Err(error)
                    if matches!(error.kind, ApiErrorKind::NotFound | ApiErrorKind::Conflict) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Removes old tokens while this server leads, until `shutdown` stops.
    pub(in super::super) async fn clean_as_leader(self, mut leadership: Leadership) {
        let mut round = 0_u32;
        while leadership.acquired().await {
            let mut cleaned = self.clean(JOIN_TOKEN).await;
            // There may be 100,000 uses, which stay for a year.
            if cleaned.is_ok() && round.is_multiple_of(ROUNDS_OF_USES) {
                cleaned = self.clean(JOIN_TOKEN_USE).await;
            }
            round = round.wrapping_add(1);
            self.report(cleaned.as_ref().err());
            if let Err(failure) = cleaned {
                debug!(error = %failure, "cannot remove expired join tokens");
            }
            tokio::time::sleep(CLEAN_INTERVAL).await;
        }
    }
}

/// A part of a list.
struct Page {
    tokens: Vec<(Secret, StoredToken)>,
    /// Where the next page begins.
    next: Option<String>,
}

impl TokenObjects for TokenSecrets {
    fn get(&self, id: &str) -> io::Result<Option<TokenObject>> {
        let (secrets, name) = (self.secrets.clone(), join_token_name(id));
        self.wait(async move {
            let found = with_limit(CALL_LIMIT, secrets.get_opt(&name)).await?;
            let Some(secret) = found else {
                return Ok(None);
            };
            let token = parse(&secret)?;
            let version = secret.metadata.resource_version.unwrap_or_default();
            Ok(Some(TokenObject { token, version }))
        })
    }

    fn create(&self, id: &str, token: &StoredToken) -> io::Result<bool> {
        let (secrets, secret) = (self.secrets.clone(), secret(id, token)?);
        let metrics = self.cluster.metrics.clone();
        self.wait(async move {
            let parameters = PostParams::default();
            let created = with_limit(CALL_LIMIT, secrets.create(&parameters, &secret)).await;
            Ok(count_write(&metrics, Object::Tokens, created)?.is_some())
        })
    }

    fn replace(&self, id: &str, object: &TokenObject) -> io::Result<bool> {
        let mut secret = secret(id, &object.token)?;
        secret.metadata.resource_version = Some(object.version.clone());
        let (secrets, name) = (self.secrets.clone(), join_token_name(id));
        let metrics = self.cluster.metrics.clone();
        self.wait(async move {
            let parameters = PostParams::default();
            let replaced = secrets.replace(&name, &parameters, &secret);
            let replaced = with_limit(CALL_LIMIT, replaced).await;
            Ok(count_write(&metrics, Object::Tokens, replaced)?.is_some())
        })
    }

    fn list(&self) -> io::Result<Vec<(String, StoredToken)>> {
        let (mut tokens, mut after) = (Vec::new(), None);
        loop {
            let this = self.clone();
            let page = self.wait(async move { this.page(JOIN_TOKEN, after).await })?;
            tokens.extend(page.tokens.into_iter().filter_map(|(secret, token)| {
                let name = secret.metadata.name?;
                Some((name.strip_prefix(&join_token_name(""))?.to_owned(), token))
            }));
            after = page.next;
            if after.is_none() {
                return Ok(tokens);
            }
        }
    }
}

tunnel_process::partial_debug!(TokenSecrets { namespace });

/// Returns the condition for a namespace or Role that the manifests have and the cluster lacks.
fn missing(namespace: &str, error: &ApiError) -> String {
    format!(
        "namespace {namespace} of the join tokens, or the Role of the server in it, is missing: {error}; nobody can create or use \
         a token; run kubectl create namespace {namespace}, and apply the manifests, which have the Role"
    )
}

fn secret(id: &str, token: &StoredToken) -> io::Result<Secret> {
    let content = serde_json::to_vec(token).map_err(io::Error::other)?;
    let component = if token.is_settled_use() {
        JOIN_TOKEN_USE
    } else {
        JOIN_TOKEN
    };
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(join_token_name(id)),
            labels: Some([(COMPONENT_LABEL.to_owned(), component.to_owned())].into()),
            ..ObjectMeta::default()
        },
        data: Some([(TOKEN_KEY.to_owned(), ByteString(content))].into()),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    })
}

/// Returns the token of a Secret. The API server's clock says when it was created.
fn parse(secret: &Secret) -> Result<StoredToken, ApiError> {
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    let damaged = |problem: String| {
        ApiError::new(
            ApiErrorKind::Invalid,
            format!("Secret {name} is damaged: {problem}"),
        )
    };
    let content = secret.data.as_ref().and_then(|data| data.get(TOKEN_KEY));
    let content = content.ok_or_else(|| damaged(format!("it has no key {TOKEN_KEY}")))?;
    let mut token: StoredToken =
        serde_json::from_slice(&content.0).map_err(|error| damaged(error.to_string()))?;
    if let Some(created) = &secret.metadata.creation_timestamp {
        token.created = created.0.into();
    }
    Ok(token)
}

const TOKEN_KEY: &str = "token.json";
/// Objects in one answer of the API server, of about 1 KiB each.
const PAGE_OBJECTS: u32 = 500;
/// Limit for one page of a list.
const LIST_LIMIT: Duration = Duration::from_secs(10);
const CLEAN_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Of how many rounds one looks at the uses, too: once a day.
const ROUNDS_OF_USES: u32 = 24;
