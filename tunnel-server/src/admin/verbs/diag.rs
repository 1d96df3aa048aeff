//! The command `diag`: collects facts about a server and its host for a bug report.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use tunnel_process::diag::DiagDocument;
use tunnel_process::meta;
use tunnel_proto::wire::PORT_SERVER_META;
use tunnel_proto::wire::name::NodeName;

use super::VerbError;
use crate::admin::AdminClient;
use crate::admin::pages::PageQuery;
use crate::config::{Config, DATA_DIR, LoadError};
use tunnel_store::data_dir::DataDir;

/// Collects the facts of the server of a data directory. Without valid settings these are the facts
/// of a server with the default data directory and meta address.
pub async fn collect(settings: Result<Config, LoadError>) -> DiagDocument {
    let mut document = DiagDocument::new("tunnel-server", env!("CARGO_PKG_VERSION"));
    let (data_dir, meta) = match &settings {
        Ok(config) => (config.data_dir.clone(), config.meta_listen),
        Err(_invalid) => (DATA_DIR.into(), Some(DEFAULT_META)),
    };
    document.add_settings(settings);
    if let Some(address) = meta {
        document.add_meta(&meta::dialable(address).into()).await;
    }
    document.add("running", running(&data_dir)).await;
    document.add("nodes", nodes(&data_dir)).await;
    document.add_files(data_dir).await;
    document
}

/// Collects what the running server knows of a node, and the facts that its agent sends about itself:
/// version, settings without secrets, sessions, conditions and last log lines.
pub async fn collect_node(settings: Result<Config, LoadError>, node: &NodeName) -> DiagDocument {
    let mut document = DiagDocument::new("tunnel-server", env!("CARGO_PKG_VERSION"));
    let data_dir = settings.map_or_else(|_invalid| DATA_DIR.into(), |config| config.data_dir);
    let status = async {
        let named = client(&data_dir)
            .await?
            .named_nodes(std::slice::from_ref(node))
            .await?;
        let status = named.nodes.first();
        let unknown = || VerbError::UnknownNodes([node].into_iter().collect());
        as_json(status.ok_or_else(unknown)?)
    };
    document.add("node", status).await;
    let failures = async {
        let mut failures = client(&data_dir).await?.failures().await?;
        failures.retain(|failure| {
            let mut named = failure.node.iter().chain(&failure.nodes_from_address);
            named.any(|name| name == node.as_str())
        });
        as_json(&failures)
    };
    document.add("failures", failures).await;
    let agent = async { Ok::<_, VerbError>(client(&data_dir).await?.agent_diag(node).await?) };
    document.add("agent", agent).await;
    document
}

/// Returns what only the running server knows: its version, its settings and its last log lines.
async fn running(data_dir: &Path) -> Result<Value, VerbError> {
    as_json(&client(data_dir).await?.diag().await?)
}

/// Returns the first nodes. A report has no room for a large fleet.
async fn nodes(data_dir: &Path) -> Result<Value, VerbError> {
    let first = PageQuery::default();
    as_json(&client(data_dir).await?.nodes(&first).await?.nodes)
}

async fn client(data_dir: &Path) -> Result<AdminClient, VerbError> {
    super::running(&DataDir::open_existing(data_dir)?).await
}

fn as_json(fact: &impl Serialize) -> Result<Value, VerbError> {
    Ok(serde_json::to_value(fact)?)
}

/// Default address of the meta port.
const DEFAULT_META: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), PORT_SERVER_META);
