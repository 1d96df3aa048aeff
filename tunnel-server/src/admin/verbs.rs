//! The commands `token`, `nodes`, `ca`, `data`, `connect`, `ping`, `healthcheck` and `diag`. They use the running
//! server if there is one, or else the files of the data directory.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tunnel_process::command_line::EXIT_USAGE;
use tunnel_process::config_report::UnusableFile;
use tunnel_process::name_list::NameList;
use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;
use tunnel_proto::wire::PORT_SERVER_META;
use tunnel_proto::wire::label::unique_labels;
use tunnel_proto::wire::name::NodeName;

use crate::admin::{AdminClient, AdminError, CreateToken, CreatedToken};
use crate::config::{LoadError, RawConfig};
use crate::dry_run::DryRunStatus;
use tunnel_ca::revocation::Revocations;
use tunnel_ca::tokens::{CreateTokenError, TokenStore};
use tunnel_ca::{CaError, IssueError, LocalCa};
use tunnel_store::data_dir::{DataDir, rfc3339};
use tunnel_store::known_nodes::KnownNodes;

mod args;
mod ca;
pub mod connect;
mod data;
pub mod diag;
mod healthcheck;
mod inventory;
mod json_list;
mod names_file;
mod nodes;
mod ping;
mod reload;
mod rotate;
mod selector;
mod table;

pub use args::{
    CaArgs, CaVerb, DataDirArg, DataVerb, HealthcheckArgs, NodeNames, NodesArgs, NodesOutput,
    NodesVerb, ReloadArgs, TokenVerb,
};
use connect::ConnectArgs;
pub(crate) use names_file::load_names;
pub use names_file::{BadLines, NamesFileError};
pub use ping::PingArgs;
pub use selector::{LabelSelector, UnknownLabel};

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum VerbError {
    /// A file cannot be used; the text names the file.
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Ca(#[from] CaError),
    #[error(transparent)]
    Issue(#[from] IssueError),
    #[error(transparent)]
    Token(#[from] CreateTokenError),
    /// The running server could not be reached or refused the request.
    #[error(transparent)]
    Server(#[from] AdminError),
    #[error("no token has the id {0:?}; 'tunnel-server token list' shows them")]
    UnknownToken(String),
    #[error("no node has the name {0}; 'tunnel-server nodes' lists the known nodes")]
    UnknownNodes(NameList),
    #[error("not waiting for an approval: {0}; 'tunnel-server token list' shows who waits")]
    NotPending(NameList),
    #[error("connected: {0}; stop the agent first")]
    ConnectedNodes(NameList),
    #[error(transparent)]
    NamesFile(#[from] NamesFileError),
    #[error(transparent)]
    UnknownLabel(#[from] UnknownLabel),
    #[error("not revoked: {0}; 'tunnel-server nodes revocations' lists the revoked nodes")]
    NotRevoked(NameList),
    /// The server does not run or is not ready.
    #[error("not ready: {0}")]
    NotReady(String),
    /// No server runs with the directory, which has no CA either.
    #[error(
        "no tunnel-server runs with {}, and no CA is there: start the server, or give its \
         --data-dir; --offline creates a CA there",
        .0.display()
    )]
    NoServer(PathBuf),
    /// Only a running server has the fact.
    #[error("no tunnel-server runs with {}", .0.display())]
    NotRunning(PathBuf),
    /// The directory belongs to a server in a cluster, which stores this data in the cluster's
    /// Secrets.
    #[error(
        "no tunnel-server runs with {}, and what it follows is in its cluster's Secrets: use the verb where a server runs, as in \
         kubectl exec",
        .0.display()
    )]
    ClusterManaged(PathBuf),
    /// The directory belongs to a server in a cluster that has not saved the CA's certificate.
    #[error("{} does not exist yet; the CA's certificate is in the cluster's ConfigMap for agents", .0.display())]
    CaNotStored(PathBuf),
    /// The directory belongs to a server in a cluster, and export and import would have no effect.
    #[error(
        "{} belongs to a server in a cluster, whose servers share the CA in a Secret: export and import are for standalone \
         servers",
        .0.display()
    )]
    CaInCluster(PathBuf),
    /// The directory belongs to a server in a cluster, whose callers have certificates of the
    /// cluster.
    #[error(
        "{} belongs to a server in a cluster, whose callers have certificates of the cluster's CA: ask for one with a \
         CertificateSigningRequest for the signer kubernetes.io/kube-apiserver-client",
        .0.display()
    )]
    ClientCaInCluster(PathBuf),
    /// A running server would continue with the previous CA.
    #[error(
        "a tunnel-server runs with {}: stop it, import the CA, and start it again",
        .0.display()
    )]
    ServerRuns(PathBuf),
    /// A running server uses the store alone.
    #[error(
        "a tunnel-server runs with {}, and uses its store alone: stop it first; 'tunnel-server nodes', 'nodes revocations' and \
         'token list' show what it has",
        .0.display()
    )]
    StoreInUse(PathBuf),
    /// An import would replace another CA, and there is no terminal to ask.
    #[error(
        "{} has another CA, whose agents and join tokens would be refused; to replace it, add --force",
        .0.display()
    )]
    OtherCa(PathBuf),
    /// A key or a certificate would overwrite a file.
    #[error("{} exists; remove it, or choose another file", .0.display())]
    FileExists(PathBuf),
    /// The connection to a node could not be opened.
    #[error(transparent)]
    Connect(#[from] connect::ConnectError),
    /// Nothing answered a ping; what is printed says why.
    #[error("{0} does not answer")]
    NoAnswer(NodeName),
    /// The configuration that names the server cannot be used.
    #[error(transparent)]
    Config(#[from] LoadError),
    /// The running server cannot use its file.
    #[error(transparent)]
    UnusableFile(#[from] UnusableFile),
    /// The labels of a token contradict each other.
    #[error("--label: {0}")]
    Labels(String),
    /// A list cannot be encoded as JSON.
    #[error("cannot make JSON")]
    Json(#[from] serde_json::Error),
}

impl VerbError {
    /// Returns [`EXIT_USAGE`] if the arguments are invalid, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) if error.is_usage() => EXIT_USAGE,
            Self::UnusableFile(error) if error.is_usage() => EXIT_USAGE,
            Self::Token(
                CreateTokenError::InvalidTtl
                | CreateTokenError::InvalidUses
                | CreateTokenError::Options(_),
            )
            | Self::UnknownLabel(_)
            | Self::Labels(_)
            | Self::NamesFile(_) => EXIT_USAGE,
            Self::Server(AdminError::Refused { status, .. })
                if *status == http::StatusCode::BAD_REQUEST =>
            {
                EXIT_USAGE
            }
            Self::File(_)
            | Self::UnusableFile(_)
            | Self::Ca(_)
            | Self::Issue(_)
            | Self::Token(_)
            | Self::Server(_)
            | Self::UnknownToken(_)
            | Self::UnknownNodes(_)
            | Self::NotPending(_)
            | Self::ConnectedNodes(_)
            | Self::NotRevoked(_)
            | Self::NotReady(_)
            | Self::NoServer(_)
            | Self::NotRunning(_)
            | Self::ClusterManaged(_)
            | Self::CaNotStored(_)
            | Self::CaInCluster(_)
            | Self::ClientCaInCluster(_)
            | Self::ServerRuns(_)
            | Self::StoreInUse(_)
            | Self::OtherCa(_)
            | Self::FileExists(_)
            | Self::Connect(_)
            | Self::NoAnswer(_)
            | Self::Config(_)
            | Self::Json(_) => 1,
        }
    }
}

impl TokenVerb {
    /// Runs the command and prints the result.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        self.execute().await?.print()
    }

    async fn execute(self) -> Result<VerbOutput, VerbError> {
        match self {
            Self::Create {
                node,
                uses,
                approve,
                ttl,
                ips,
                labels,
                offline,
                output,
                data_dir,
            } => {
                let labels = unique_labels(labels).map_err(VerbError::Labels)?;
                let dir = open_dir(&data_dir.path()?, offline)?;
                let token_request = CreateToken {
                    node,
                    uses,
                    needs_approval: approve,
                    ttl_seconds: ttl.as_secs(),
                    ips,
                    labels,
                };
                let created = create_token(&dir, &token_request, ttl, offline).await?;
                created_token(&created, output)
            }
            Self::List { output, data_dir } => {
                let dir = DataDir::open_existing(&data_dir.path()?)?;
                let tokens = match AdminClient::connect(&dir).await? {
                    Some(server) => server.tokens().await?,
                    None => TokenStore::open(require_standalone(&dir)?)?.list(SystemTime::now())?,
                };
                Ok(VerbOutput::out(match output {
                    OutputFormat::Table => table::tokens(&tokens),
                    OutputFormat::Json => {
                        json(&Document::new(serde_json::json!({ "tokens": tokens })))?
                    }
                }))
            }
            Self::Revoke {
                id,
                output,
                data_dir,
            } => {
                let dir = DataDir::open_existing(&data_dir.path()?)?;
                let found = match AdminClient::connect(&dir).await? {
                    Some(server) => server.revoke_token(&id).await?,
                    None => TokenStore::open(require_standalone(&dir)?)?.revoke(&id)?,
                };
                if !found {
                    return Err(VerbError::UnknownToken(id));
                }
                Ok(VerbOutput::out(match output {
                    OutputFormat::Table => format!("token {id} revoked\n"),
                    OutputFormat::Json => {
                        json(&Document::new(serde_json::json!({ "revoked": id })))?
                    }
                }))
            }
        }
    }
}

impl ConnectArgs {
    /// Connects and copies bytes until the node closes its side.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        let data_dir = self.data_dir.path()?;
        Ok(self.relay(&data_dir).await?)
    }
}

/// Why nothing is known of a server without a meta port.
pub(super) const META_IS_OFF: &str = "the meta port is off (--meta-listen)";

impl HealthcheckArgs {
    /// Asks the server's meta port whether the server is ready, and prints one line.
    ///
    /// # Errors
    /// Returns [`VerbError::NotReady`].
    pub async fn run(self) -> Result<(), VerbError> {
        let settings = args::file_settings(self.config.as_deref())?;
        let address = self.meta_listen.or(settings.meta_listen);
        let address = address.unwrap_or_else(|| format!("127.0.0.1:{PORT_SERVER_META}"));
        if address == "off" {
            return Err(VerbError::NotReady(META_IS_OFF.to_owned()));
        }
        healthcheck::check_ready(&address)
            .await
            .map_err(VerbError::NotReady)?;
        VerbOutput::out("ready\n".into()).print()
    }
}

/// Returns `dir` if its files are what a server uses. In a cluster a change to the files would
/// appear to succeed and have no effect.
fn require_standalone(dir: &DataDir) -> Result<&DataDir, VerbError> {
    if dir.is_cluster_managed() {
        return Err(VerbError::ClusterManaged(dir.path().to_owned()));
    }
    Ok(dir)
}

/// Opens the data directory. With `can_create` a directory that does not exist is created.
fn open_dir(path: &Path, can_create: bool) -> Result<DataDir, VerbError> {
    if can_create {
        return Ok(DataDir::open(path)?);
    }
    DataDir::open_existing(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => VerbError::NoServer(path.to_owned()),
        _ => VerbError::File(error),
    })
}

/// Loads the CA of a standalone server that does not run. Only with `can_create` a new one is
/// created: in a wrong directory it would issue tokens that no server accepts.
fn load_ca(dir: &DataDir, can_create: bool) -> Result<LocalCa, VerbError> {
    if !can_create && !dir.ca_key().exists() && !dir.ca_certificate().exists() {
        return Err(VerbError::NoServer(dir.path().to_owned()));
    }
    Ok(LocalCa::load_or_create(dir)?)
}

async fn create_token(
    dir: &DataDir,
    token_request: &CreateToken,
    ttl: Duration,
    offline: bool,
) -> Result<CreatedToken, VerbError> {
    if let Some(server) = AdminClient::connect(dir).await? {
        return Ok(server.create_token(token_request).await?);
    }
    let ca = load_ca(require_standalone(dir)?, offline)?;
    let (tokens, nodes) = (TokenStore::open(dir)?, KnownNodes::open(dir)?);
    let orders = Revocations::open(dir, true)?;
    let now = SystemTime::now();
    let token = token_request.create(&tokens, &nodes, &orders, ca.spki_sha256(), now)?;
    nodes.save()?;
    let advertised = dir.advertised()?;
    Ok(CreatedToken::new(
        &token,
        &token_request.node,
        now + ttl,
        &advertised,
    ))
}

/// Prints a new token: alone on standard output, or in a document.
fn created_token(created: &CreatedToken, output: OutputFormat) -> Result<VerbOutput, VerbError> {
    if output == OutputFormat::Json {
        return Ok(VerbOutput::out(json(&Document::new(created))?));
    }
    let hint = created.hint.as_ref();
    let hint = hint.map(|hint| format!("note: {hint}\n"));
    Ok(VerbOutput {
        out: format!("{}\n", created.token),
        err: format!(
            "token {} can be used until {}; on the node run as root, and enter the token:\n  {}\n{}",
            created.id,
            rfc3339(created.expires),
            created.command,
            hint.unwrap_or_default()
        ),
        failure: None,
    })
}

/// Returns a client of the server that runs with the directory.
///
/// # Errors
/// Returns [`VerbError::NotRunning`] without a server.
async fn running(dir: &DataDir) -> Result<AdminClient, VerbError> {
    let server = AdminClient::connect(dir).await?;
    server.ok_or_else(|| VerbError::NotRunning(dir.path().to_owned()))
}

/// Returns the settings of the server that runs with a data directory, if there is one.
///
/// # Errors
/// Returns [`VerbError::Server`] if the server does not answer.
pub async fn running_settings(data_dir: &Path) -> Result<Option<RawConfig>, VerbError> {
    let Ok(dir) = DataDir::open_existing(data_dir) else {
        return Ok(None);
    };
    match AdminClient::connect(&dir).await? {
        Some(server) => Ok(Some(server.settings().await?)),
        None => Ok(None),
    }
}

/// Returns what the dry run of the server that runs with a data directory has found, if there is one.
///
/// # Errors
/// Returns an error if the server does not answer.
pub async fn running_dry_run(data_dir: &Path) -> Result<Option<DryRunStatus>, AdminError> {
    let Ok(dir) = DataDir::open_existing(data_dir) else {
        return Ok(None);
    };
    match AdminClient::connect(&dir).await? {
        Some(server) => server.dry_run().await,
        None => Ok(None),
    }
}

/// Returns whether a server runs with a data directory.
///
/// # Errors
/// Returns [`VerbError::Server`] if there is a socket that cannot be opened.
pub async fn is_running(data_dir: &Path) -> Result<bool, VerbError> {
    match DataDir::open_existing(data_dir) {
        Ok(dir) => Ok(AdminClient::connect(&dir).await?.is_some()),
        Err(_no_server) => Ok(false),
    }
}

fn json(value: &impl serde::Serialize) -> Result<String, VerbError> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

struct VerbOutput {
    out: String,
    err: String,
    /// Why the command fails although it has an output.
    failure: Option<VerbError>,
}

impl VerbOutput {
    fn out(out: String) -> Self {
        Self {
            out,
            err: String::new(),
            failure: None,
        }
    }

    /// Prints the output, and returns its failure. A reader that closes the pipe early is not an error.
    fn print(self) -> Result<(), VerbError> {
        let written = write_all(&mut io::stdout(), &self.out)
            .and_then(|()| write_all(&mut io::stderr(), &self.err));
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
        self.failure.map_or(Ok(()), Err)
    }
}

fn write_all(stream: &mut impl Write, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())?;
    stream.flush()
}

#[cfg(test)]
mod tests;
