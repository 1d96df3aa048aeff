//! The client of the admin socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tunnel_process::config_report::ConfigStatus;
use tunnel_process::meta::send_request;
use tunnel_process::yaml;
use tunnel_proto::wire::name::{NameError, NodeName};

use super::{
    ApproveOutcome, CreateToken, CreatedToken, ErrorBody, ForgetOutcome, NodesOrder, OrderOutcome,
    RunningServer,
};
use crate::admin::failures::FailureStatus;
use crate::admin::pages::{NamedNodes, NodesPage, PageQuery, RevocationsPage};
use crate::admin::ping::PingReport;
use crate::config::RawConfig;
use crate::dry_run::DryRunStatus;
use tunnel_ca::rotation::{RotationAction, RotationStatus};
use tunnel_ca::tokens::TokenInfo;
use tunnel_store::data_dir::DataDir;

/// A client of the server that runs with a data directory. Each call opens its own connection.
#[derive(Debug, Clone)]
pub struct AdminClient {
    path: PathBuf,
}

/// The reason why a request to the running server failed.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The socket cannot be opened.
    #[error("cannot reach the running server at {0}")]
    Unreachable(PathBuf, #[source] io::Error),
    #[error("connection to the running server was lost")]
    ConnectionLost(#[source] io::Error),
    /// The server did not answer in time.
    #[error("the running server gave no answer in {} s", RESPONSE_TIMEOUT.as_secs())]
    Timeout,
    /// The response cannot be parsed.
    #[error("cannot read the answer of the running server: {0}")]
    InvalidResponse(String),
    #[error("{problem}")]
    Refused { status: StatusCode, problem: String },
}

/// A token of a page that is not the name of a node.
impl From<NameError> for AdminError {
    fn from(error: NameError) -> Self {
        Self::InvalidResponse(error.to_string())
    }
}

impl AdminError {
    /// Returns whether the requested object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if *status == StatusCode::NOT_FOUND)
    }
}

impl AdminClient {
    /// Connects to the running server. Returns `None` if no server runs.
    ///
    /// # Errors
    /// Returns [`AdminError::Unreachable`] if there is a socket that cannot be opened.
    pub async fn connect(dir: &DataDir) -> Result<Option<Self>, AdminError> {
        let path = dir.admin_socket();
        match UnixStream::connect(&path).await {
            Ok(_socket) => Ok(Some(Self { path })),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(AdminError::Unreachable(path, error)),
        }
    }

    /// Creates a join token.
    pub async fn create_token(
        &self,
        token_request: &CreateToken,
    ) -> Result<CreatedToken, AdminError> {
        self.post("/tokens", token_request).await
    }

    /// Returns all join tokens.
    pub async fn tokens(&self) -> Result<Vec<TokenInfo>, AdminError> {
        self.send(Method::GET, "/tokens").await
    }

    /// Revokes a token. Returns `false` if no token has this id.
    pub async fn revoke_token(&self, id: &str) -> Result<bool, AdminError> {
        let is_plain = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_plain {
            return Ok(false);
        }
        self.delete(&format!("/tokens/{id}")).await
    }

    pub async fn nodes(&self, query: &PageQuery) -> Result<NodesPage, AdminError> {
        self.send(Method::GET, &query.target("nodes")).await
    }

    /// Returns those of at most 1,000 nodes that exist. The token of the page is the last name that
    /// the server has looked up.
    pub async fn named_nodes(&self, names: &[NodeName]) -> Result<NodesPage, AdminError> {
        self.post("/nodes", &named(names)).await
    }

    /// Returns the failures of agents at the server, the last one first.
    pub async fn failures(&self) -> Result<Vec<FailureStatus>, AdminError> {
        self.send(Method::GET, "/failures").await
    }

    /// Probes the agent of a node.
    pub async fn ping(&self, node: &NodeName) -> Result<PingReport, AdminError> {
        self.send(Method::GET, &format!("/ping/{node}")).await
    }

    /// Returns the facts of a node's agent about itself, as the agent sent them.
    pub async fn agent_diag(&self, node: &NodeName) -> Result<serde_json::Value, AdminError> {
        self.send(Method::GET, &format!("/diag/{node}")).await
    }

    /// Returns the keys of the Nodes' labels that the server stores.
    pub async fn node_labels(&self) -> Result<Vec<String>, AdminError> {
        self.send(Method::GET, "/node-labels").await
    }

    /// Admits at most 1,000 nodes that used a token for a pattern and wait.
    pub async fn approve_nodes(&self, names: &[NodeName]) -> Result<ApproveOutcome, AdminError> {
        self.post("/nodes/approve", &named(names)).await
    }

    /// Removes at most 1,000 nodes from the known nodes.
    pub async fn forget_nodes(&self, names: &[NodeName]) -> Result<ForgetOutcome, AdminError> {
        self.post("/nodes/forget", &named(names)).await
    }

    /// Orders something about nodes.
    pub async fn order(&self, order: &NodesOrder) -> Result<OrderOutcome, AdminError> {
        self.post("/revocations", order).await
    }

    /// Returns a page of the revocations in force.
    pub async fn revocations(&self, query: &PageQuery) -> Result<RevocationsPage, AdminError> {
        self.send(Method::GET, &query.target("revocations")).await
    }

    /// Returns the CA's certificate as PEM.
    pub async fn ca(&self) -> Result<String, AdminError> {
        let body = self.call(Method::GET, "/ca", Vec::new()).await?;
        String::from_utf8(body.to_vec())
            .map_err(|error| AdminError::InvalidResponse(error.to_string()))
    }

    /// Returns the stage of the rotation of the CA.
    pub async fn ca_rotation(&self) -> Result<RotationStatus, AdminError> {
        self.send(Method::GET, "/ca/rotation").await
    }

    /// Changes the stage of the rotation of the CA.
    pub async fn rotate_ca(&self, action: RotationAction) -> Result<RotationStatus, AdminError> {
        self.post("/ca/rotation", &action).await
    }

    /// Has the server read its file again, and returns what became of it.
    pub async fn reload(&self) -> Result<ConfigStatus, AdminError> {
        self.send(Method::POST, "/config").await
    }

    /// Ends what the rules in force refuse. Returns the number of requests and streams.
    pub async fn end_running(&self) -> Result<usize, AdminError> {
        self.send(Method::POST, "/config/end-running").await
    }

    /// Returns what the dry run of rules has found, if there is one.
    pub async fn dry_run(&self) -> Result<Option<DryRunStatus>, AdminError> {
        self.send(Method::GET, "/dry-run").await
    }

    /// Returns the settings that the server uses, before the checks.
    pub async fn settings(&self) -> Result<RawConfig, AdminError> {
        let body = self.call(Method::GET, "/settings", Vec::new()).await?;
        let text = String::from_utf8_lossy(&body);
        let settings = yaml::parse(&text);
        let settings = settings.map_err(|error| AdminError::InvalidResponse(error.to_string()))?;
        Ok(settings.unwrap_or_default())
    }

    /// Returns the settings and the last log lines of the server.
    pub async fn diag(&self) -> Result<RunningServer, AdminError> {
        self.send(Method::GET, "/diag").await
    }

    /// Sends a request without a body.
    async fn send<T: DeserializeOwned>(&self, method: Method, path: &str) -> Result<T, AdminError> {
        parse(&self.call(method, path, Vec::new()).await?)
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        message: &(impl Serialize + Sync),
    ) -> Result<T, AdminError> {
        let body = serde_json::to_vec(message)
            .map_err(|error| AdminError::InvalidResponse(error.to_string()))?;
        parse(&self.call(Method::POST, path, body).await?)
    }

    /// Deletes an object. Returns `false` if it does not exist.
    async fn delete(&self, path: &str) -> Result<bool, AdminError> {
        match self.call(Method::DELETE, path, Vec::new()).await {
            Ok(_empty) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn call(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, AdminError> {
        tokio::time::timeout(RESPONSE_TIMEOUT, self.exchange(method, path, body))
            .await
            .map_err(|_elapsed| AdminError::Timeout)?
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Bytes, AdminError> {
        let socket = UnixStream::connect(&self.path)
            .await
            .map_err(|error| AdminError::Unreachable(self.path.clone(), error))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, "tunnel-server")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| AdminError::InvalidResponse(error.to_string()))?;
        let answered = send_request(socket, request, RESPONSE_MAX_BYTES).await;
        let (status, body) = answered.map_err(AdminError::ConnectionLost)?;
        if status.is_success() {
            return Ok(body);
        }
        let problem = serde_json::from_slice::<ErrorBody>(&body).map_or_else(
            |_not_ours| format!("the running server answered {status}"),
            |problem| problem.error,
        );
        Err(AdminError::Refused { status, problem })
    }
}

fn named(names: &[NodeName]) -> NamedNodes {
    NamedNodes {
        nodes: names.iter().map(NodeName::to_string).collect(),
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, AdminError> {
    serde_json::from_slice(body).map_err(|error| AdminError::InvalidResponse(error.to_string()))
}

/// Timeout for a response. A busy disk may need seconds.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a response. A page of nodes is about 1 MiB, a list of 10,000 tokens 4 MiB.
const RESPONSE_MAX_BYTES: usize = 64 * 1024 * 1024;
