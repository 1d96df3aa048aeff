//! Connections to kubelets of edge nodes through the tunnel: a TLS handshake, and no request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use rustls::ClientConfig;
use rustls::client::verify_server_name;
use rustls::server::ParsedCertificate;
use rustls_pki_types::ServerName;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_doctor::{Fact, NO_ANSWER};
use tunnel_proto::tls;
use tunnel_proto::tls::files::load_roots;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::admin::verbs::connect::open_tunnel;
use crate::cluster::doctor::{ClusterFacts, ReportedNode};
use crate::config::Config;
use crate::ingress::target_tls::server_name;
use tunnel_store::data_dir::DataDir;

/// The answer of the kubelet of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::admin::doctor) struct KubeletProbe {
    pub(in crate::admin::doctor) node: String,
    pub(in crate::admin::doctor) port: u16,
    pub(in crate::admin::doctor) answer: KubeletAnswer,
}

/// How far a connection to a kubelet got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::admin::doctor) enum KubeletAnswer {
    /// There was no connection.
    Unreachable(String),
    /// The connection is there, but its TLS handshake failed.
    NoHandshake(String),
    /// The kubelet presented a certificate, which `--target-ca` verified if it is set.
    Certificate {
        /// Whether the certificate is for the name or for an address of the node.
        is_for_node: bool,
    },
}

/// A kubelet to connect to.
pub(super) struct Kubelet {
    node: NodeName,
    port: Port,
    addresses: Vec<IpAddr>,
}

/// Returns the kubelets of some connected edge nodes.
pub(super) fn sample(
    cluster: &Fact<ClusterFacts>,
    is_connected: impl Fn(&str) -> bool,
    only_nodes: &[NodeName],
) -> Vec<Kubelet> {
    let nodes = cluster
        .as_ref()
        .ok()
        .and_then(|facts| facts.nodes.as_ref().ok());
    let nodes = nodes.into_iter().flat_map(|facts| &facts.nodes);
    let is_selected = |node: &&ReportedNode| {
        let mut only = only_nodes.iter();
        let is_named = only.any(|name| name.as_str() == node.name);
        node.is_edge && is_connected(&node.name) && (only_nodes.is_empty() || is_named)
    };
    let kubelets = nodes.filter(is_selected).filter_map(|node| {
        Some(Kubelet {
            node: node.name.parse().ok()?,
            port: Port::new(node.kubelet_port.unwrap_or(KUBELET_PORT))?,
            addresses: node.internal.clone(),
        })
    });
    kubelets.take(SAMPLE_MAX).collect()
}

/// Connects to the kubelets.
///
/// # Errors
/// Returns the reason if no connection can be opened from here.
pub(super) async fn probe_all(config: &Config, kubelets: Vec<Kubelet>) -> Fact<Vec<KubeletProbe>> {
    if kubelets.is_empty() {
        return Ok(Vec::new());
    }
    let (path, ca) = (config.data_dir.clone(), config.targets.ca.clone());
    let prepared = tokio::task::spawn_blocking(move || -> Fact<(DataDir, Arc<ClientConfig>)> {
        let dir = DataDir::open_existing(&path).map_err(|error| error.to_string())?;
        let roots = ca.map(|ca| load_roots(&ca)).transpose();
        let roots = roots.map_err(|error| error.to_string())?;
        let roots = roots.map(tls::roots).transpose();
        let tls = roots.and_then(|roots| tls::target_client(roots, None));
        Ok((dir, tls.map_err(|error| format!("--target-ca: {error}"))?))
    });
    let prepared = prepared.await.map_err(|error| error.to_string())?;
    let (dir, tls) = &prepared?;
    let probes = kubelets.into_iter().map(|kubelet| async move {
        let answer = timeout(PROBE_LIMIT, probe(dir, tls.clone(), &kubelet)).await;
        KubeletProbe {
            node: kubelet.node.to_string(),
            port: kubelet.port.get(),
            answer: answer
                .unwrap_or_else(|_elapsed| KubeletAnswer::Unreachable(NO_ANSWER.to_owned())),
        }
    });
    Ok(stream::iter(probes)
        .buffer_unordered(SAMPLE_MAX)
        .collect()
        .await)
}

async fn probe(dir: &DataDir, tls: Arc<ClientConfig>, kubelet: &Kubelet) -> KubeletAnswer {
    let socket = match UnixStream::connect(dir.admin_socket()).await {
        Ok(socket) => socket,
        Err(error) => return KubeletAnswer::Unreachable(error.to_string()),
    };
    let tunnel = match open_tunnel(socket, &kubelet.node, kubelet.port).await {
        Ok(tunnel) => tunnel.io,
        Err(error) => return KubeletAnswer::Unreachable(error.to_string()),
    };
    let name = match server_name(&kubelet.node) {
        Ok(name) => name,
        Err(error) => return KubeletAnswer::NoHandshake(error.to_string()),
    };
    match TlsConnector::from(tls).connect(name.clone(), tunnel).await {
        Ok(stream) => {
            let (_io, session) = stream.get_ref();
            let leaf = session.peer_certificates().and_then(<[_]>::first);
            let leaf = leaf.and_then(|leaf| ParsedCertificate::try_from(leaf).ok());
            let addresses = kubelet.addresses.iter();
            let mut names = addresses
                .map(|address| ServerName::from(*address))
                .chain([name]);
            KubeletAnswer::Certificate {
                is_for_node: leaf
                    .is_some_and(|leaf| names.any(|name| verify_server_name(&leaf, &name).is_ok())),
            }
        }
        Err(error) => KubeletAnswer::NoHandshake(tls::describe(&error)),
    }
}

/// Port of a kubelet whose Node does not say it.
const KUBELET_PORT: u16 = 10250;
/// Maximum number of nodes to which the command connects, to all at the same time. A fault of all nodes
/// shows in some. The admin socket has as many connections again for the agents.
const SAMPLE_MAX: usize = 8;
/// Limit of a connection.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
