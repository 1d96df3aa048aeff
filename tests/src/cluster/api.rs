//! Objects of a cluster as JSON, by path.

use std::path::Path;

use anyhow::{Context, Result};
use http::header::{CONTENT_TYPE, USER_AGENT};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::Value;

/// A client that uses paths such as `/api/v1/nodes/worker-1`.
#[derive(Clone)]
pub struct Api {
    client: Client,
    agent: String,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("agent", &self.agent)
            .finish_non_exhaustive()
    }
}

impl Api {
    /// Connects with the cluster and user of a kubeconfig. `agent` is the User-Agent of the
    /// requests.
    pub async fn new(kubeconfig: &Path, agent: &str) -> Result<Self> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
        let config =
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Self {
            client: Client::try_from(config)?,
            agent: agent.to_owned(),
        })
    }

    /// Returns the object or list at a path, or `None` if there is none.
    ///
    /// # Errors
    /// Returns an error for any answer other than 200 and 404.
    pub async fn get(&self, path: &str) -> Result<Option<Value>> {
        match self.request("GET", path, "application/json", None).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if is_status(&error, 404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the text at a path.
    ///
    /// # Errors
    /// Returns an error for any answer other than 200.
    pub async fn text(&self, path: &str) -> Result<String> {
        let request = http::Request::get(path).header(USER_AGENT, self.agent.as_str());
        let answer = self.client.request_text(request.body(Vec::new())?).await;
        answer.with_context(|| format!("GET {path}"))
    }

    pub async fn list(&self, path: &str) -> Result<Vec<Value>> {
        let mut list = self.request("GET", path, "application/json", None).await?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            _ => anyhow::bail!("{path} is no list"),
        }
    }

    pub async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.request("POST", path, "application/json", Some(object))
            .await
    }

    pub async fn replace(&self, path: &str, object: &Value) -> Result<Value> {
        self.request("PUT", path, "application/json", Some(object))
            .await
    }

    /// Changes the object at a path by a merge patch.
    pub async fn merge(&self, path: &str, patch: &Value) -> Result<Value> {
        self.request("PATCH", path, "application/merge-patch+json", Some(patch))
            .await
    }

    pub async fn delete(&self, path: &str) -> Result<()> {
        self.request("DELETE", path, "application/json", None)
            .await
            .map(drop)
    }

    async fn request(
        &self,
        method: &str,
        path: &str,
        content: &str,
        body: Option<&Value>,
    ) -> Result<Value> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(CONTENT_TYPE, content)
            .header(USER_AGENT, self.agent.as_str())
            .body(body.into_bytes())?;
        let answer = self.client.request::<Value>(request).await;
        answer.with_context(|| format!("{method} {path}"))
    }
}

/// Returns whether an error is the API's answer with this HTTP status.
pub fn is_status(error: &anyhow::Error, code: u16) -> bool {
    matches!(error.downcast_ref::<kube::Error>(), Some(kube::Error::Api(status)) if status.code == code)
}
