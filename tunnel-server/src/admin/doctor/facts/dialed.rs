//! Facts from connections that the command opens itself: to the port of agents, to the targets of
//! the cloud, and to resolvers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use rustls::client::verify_server_name;
use rustls::server::ParsedCertificate;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tunnel_doctor::{Fact, within};
use tunnel_process::meta;
use tunnel_proto::dial::split_host_port;
use tunnel_proto::tls;
use tunnel_proto::tls::files::KeyPairFiles;

use crate::config::{APISERVER_TARGET, Config};
use tunnel_dns::response_times;

/// The answers of the addresses that the server or its agents dial.
#[derive(Debug, Clone)]
pub(in crate::admin::doctor) struct DialedFacts {
    /// Own addresses for agents.
    pub(in crate::admin::doctor) own: Vec<Dialed>,
    /// Addresses that agents dial, from `--advertise`.
    pub(in crate::admin::doctor) advertised: Vec<Dialed>,
    /// Hosts of `--advertise` for which the certificate of `--agent-cert-file` is not valid.
    pub(in crate::admin::doctor) uncovered: Fact<Vec<String>>,
    /// The API servers of `--cloud-apiserver`.
    pub(in crate::admin::doctor) apiservers: Vec<CloudApiServer>,
    /// Resolvers to which queries are forwarded, with the time of an answer.
    pub(in crate::admin::doctor) resolvers: Fact<Vec<(SocketAddr, Option<Duration>)>>,
    /// Whether the server answers DNS queries.
    pub(in crate::admin::doctor) has_dns: bool,
}

/// An address, and why there was no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::admin::doctor) struct Dialed {
    pub(in crate::admin::doctor) address: String,
    pub(in crate::admin::doctor) error: Option<String>,
}

/// The answer of an API server that edge nodes reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::admin::doctor) struct CloudApiServer {
    pub(in crate::admin::doctor) address: String,
    /// Whether the certificate is for `kubernetes.default.svc`.
    pub(in crate::admin::doctor) is_for_service: Fact<bool>,
}

impl DialedFacts {
    /// Gathers the facts, all at the same time. Each connection has a time limit.
    pub(super) async fn gather(config: &Config) -> Self {
        let own = config.listeners.agents.iter();
        // A port of 0 is chosen by the system, and not known here.
        let own = own.filter(|address| address.port() > 0);
        let own: Vec<String> = own
            .map(|address| meta::dialable(*address).to_string())
            .collect();
        let apiservers = config
            .cloud
            .iter()
            .filter(|target| target.name.as_str() == APISERVER_TARGET)
            .flat_map(|target| &target.addresses);
        let apiservers = apiservers
            .take(ADDRESSES_MAX)
            .map(async |address| CloudApiServer {
                address: address.clone(),
                is_for_service: within(DIAL_LIMIT, is_for_service(address)).await,
            });
        let resolvers = async {
            match &config.dns {
                Some(settings) => response_times(settings).await,
                None => Ok(Vec::new()),
            }
        };
        let (own, advertised, uncovered, apiservers, resolvers) = tokio::join!(
            dial_all(&own),
            dial_all(&config.advertise),
            uncovered(config),
            join_all(apiservers),
            Box::pin(resolvers),
        );
        Self {
            own,
            advertised,
            uncovered,
            apiservers,
            resolvers,
            has_dns: config.dns.is_some(),
        }
    }
}

async fn dial_all(addresses: &[String]) -> Vec<Dialed> {
    let dialing = addresses.iter().take(ADDRESSES_MAX).map(async |address| {
        let dial = async {
            match TcpStream::connect(address.as_str()).await {
                Ok(_socket) => Ok(()),
                // The other end accepted, and closed before this end knew of it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        };
        Dialed {
            address: address.clone(),
            error: within(DIAL_LIMIT, dial).await.err(),
        }
    });
    join_all(dialing).await
}

/// Returns whether the certificate of an API server is for the name that clients on edge nodes
/// verify. The certificate's chain is not verified: the clients have the CA.
async fn is_for_service(address: &str) -> Fact<bool> {
    let socket = TcpStream::connect(address).await;
    let socket = socket.map_err(|error| error.to_string())?;
    let name = ServerName::try_from(SERVICE_NAME).map_err(|error| error.to_string())?;
    let config = tls::target_client(None, None).map_err(|error| error.to_string())?;
    let stream = TlsConnector::from(config)
        .connect(name.clone(), socket)
        .await;
    let stream = stream.map_err(|error| tls::describe(&error))?;
    let (_io, session) = stream.get_ref();
    let leaf = session.peer_certificates().and_then(<[_]>::first);
    let leaf = leaf.and_then(|leaf| ParsedCertificate::try_from(leaf).ok());
    Ok(leaf.is_some_and(|leaf| verify_server_name(&leaf, &name).is_ok()))
}

/// Returns the hosts of `--advertise` that the operator's certificate does not name. Agents verify
/// the name only of such a certificate.
async fn uncovered(config: &Config) -> Fact<Vec<String>> {
    let Some(files) = &config.agent_files else {
        return Ok(Vec::new());
    };
    let (pair, advertised) = (files.pair.clone(), config.advertise.clone());
    let found = tokio::task::spawn_blocking(move || uncovered_by(&pair, &advertised));
    found.await.map_err(|error| error.to_string())?
}

/// Returns the hosts for which the certificate is not valid. Blocks the thread.
fn uncovered_by(pair: &KeyPairFiles, advertised: &[String]) -> Fact<Vec<String>> {
    let key = pair.load().map_err(|error| error.to_string())?;
    let leaf = key.end_entity_cert().map_err(|error| error.to_string())?;
    let leaf = ParsedCertificate::try_from(leaf).map_err(|error| error.to_string())?;
    let hosts = advertised
        .iter()
        .filter_map(|address| Some(split_host_port(address)?.0));
    let uncovered = hosts.filter(|host| {
        let name = ServerName::try_from(*host);
        !name.is_ok_and(|name| verify_server_name(&leaf, &name).is_ok())
    });
    Ok(uncovered.map(str::to_owned).collect())
}

/// Name of the API server that the kubeconfigs of edge nodes verify.
const SERVICE_NAME: &str = "kubernetes.default.svc";
/// Maximum number of addresses of a kind to which the command connects.
const ADDRESSES_MAX: usize = 16;
/// Limit of one connection.
const DIAL_LIMIT: Duration = Duration::from_secs(5);
