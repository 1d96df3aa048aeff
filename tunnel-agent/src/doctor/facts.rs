//! Gathers the facts of `doctor` from this host, the running agent and the servers, all at the same
//! time. A fact that cannot be obtained is the reason for that.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use http::StatusCode;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tunnel_doctor::{HostFacts, NO_ANSWER, time_for_facts};
use tunnel_process::host::Resources;
use tunnel_process::meta::{MetaAddress, Readiness};
use tunnel_process::settings::format_size;
use tunnel_proto::dial::SystemResolver;
use tunnel_proto::wire::header::{Refusal, Target};
use tunnel_proto::wire::name::{NodeName, Port};

use super::cloud::{self, CloudFacts};
use super::credential::{self, CredentialFacts, CredentialFault};
use super::names::{self, NameFacts};
use super::probe::{Prober, ServerFacts};
use crate::config::{Config, TransportChoice};
use crate::connector::endpoint::resolve;
use crate::connector::status::SessionReport;
use crate::egress::{self, DialContext};
use crate::metrics::Metrics;
use crate::node_ip::{NodeIp, NodeIpLookup};
use crate::policy::DialPolicy;
use crate::status;

/// The facts for all checks.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) node: NodeName,
    pub(super) data_dir: PathBuf,
    pub(super) transport: TransportChoice,
    /// Open files that the agent needs for as many streams as its limits allow.
    pub(super) descriptors_min: u64,
    pub(super) now: SystemTime,
    pub(super) credential: Result<CredentialFacts, CredentialFault>,
    pub(super) servers: Result<Vec<ServerFacts>, String>,
    pub(super) ports: Vec<PortFacts>,
    pub(super) host: HostFacts,
    /// What the process can carry, if it has the resources of this command.
    pub(super) capacity: String,
    pub(super) agent: AgentFacts,
    pub(super) cloud: CloudFacts,
    pub(super) names: NameFacts,
}

/// A port of --port, and the address where the agent dials it, or its refusal.
#[derive(Debug)]
pub(super) struct PortFacts {
    pub(super) port: Port,
    pub(super) dialed: Result<SocketAddr, Refusal>,
}

/// The agent on this host.
#[derive(Debug)]
pub(super) struct AgentFacts {
    /// Address of the meta port, or the Unix socket.
    pub(super) address: String,
    pub(super) answer: AgentAnswer,
}

/// The answer on the address of the meta port.
#[derive(Debug)]
pub(super) enum AgentAnswer {
    /// No program listens there.
    NotRunning,
    /// A program other than the agent answers.
    OtherProgram(String),
    NoAnswer(String),
    Running(RunningAgent),
}

/// The answers of a running agent.
#[derive(Debug)]
pub(super) struct RunningAgent {
    pub(super) sessions: Result<Vec<SessionReport>, String>,
    /// Lines of the page `/readyz?verbose`.
    pub(super) readiness: Vec<String>,
    /// Soft limit of open files, unless there is none.
    pub(super) descriptors: Result<Option<u64>, String>,
}

/// Gathers the facts within `limit`.
pub(super) async fn gather(config: &Config, ports: &[Port], limit: Duration) -> Facts {
    let limit = time_for_facts(limit);
    let within = config.limits.handshake_timeout.min(limit / STEPS);
    let now = SystemTime::now();
    let resources = Resources::of_process();
    let buffer_pool = config.limits.buffer_pool_bytes(resources);
    let ((credential, servers), ports, host, agent, cloud, names) = tokio::join!(
        Box::pin(network(config, now, within)),
        Box::pin(dial_ports(config, ports, within)),
        Box::pin(HostFacts::gather(
            &config.data_dir,
            buffer_pool,
            &resources,
            within
        )),
        Box::pin(agent(config.meta_endpoint(), within)),
        Box::pin(cloud::gather(&config.cloud_listeners, within)),
        Box::pin(names::gather(!config.cloud_listeners.is_empty(), within)),
    );
    let streams = u64::from(config.limits.streams_per_agent);
    let sessions = u64::try_from(config.replicas).unwrap_or(u64::MAX);
    Facts {
        node: config.node_name.clone(),
        data_dir: config.data_dir.clone(),
        transport: config.transport,
        descriptors_min: streams
            .saturating_mul(sessions)
            .saturating_add(DESCRIPTORS_OTHER),
        now,
        credential,
        servers,
        ports,
        host,
        capacity: format!(
            "memory limit {}; {} streams, buffer pool {}",
            resources.memory_text(),
            config.limits.streams_per_agent,
            format_size(buffer_pool)
        ),
        agent,
        cloud,
        names,
    }
}

/// Reads the credential and dials the servers with it.
async fn network(
    config: &Config,
    now: SystemTime,
    within: Duration,
) -> (
    Result<CredentialFacts, CredentialFault>,
    Result<Vec<ServerFacts>, String>,
) {
    let own = config.clone();
    // A file system may not answer.
    let loaded = timeout(within, spawn_blocking(move || credential::load(&own, now))).await;
    let loaded = match loaded {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(panicked)) => Err(CredentialFault::Unreadable(panicked.to_string())),
        Err(_elapsed) => Err(CredentialFault::Unreadable(NO_ANSWER.to_owned())),
    };
    let (identity, credential) = match loaded {
        Ok((identity, facts)) => (Some(identity), Ok(facts)),
        Err(fault) => (None, Err(fault)),
    };
    let servers = match Prober::new(config, identity, within) {
        Ok(prober) => Ok(prober.probe(&config.servers).await),
        Err(reason) => Err(reason),
    };
    (credential, servers)
}

async fn dial_ports(config: &Config, ports: &[Port], within: Duration) -> Vec<PortFacts> {
    if ports.is_empty() {
        return Vec::new();
    }
    let lookup = NodeIpLookup::new(
        config.node_name.clone(),
        config.node_ip,
        Readiness::default(),
    );
    let node_ip = lookup.current(server(config, within).await);
    let mut dials = JoinSet::new();
    for port in ports {
        dials.spawn(dial_port(
            *port,
            node_ip,
            config.dial_policy.clone(),
            within,
        ));
    }
    dials.join_all().await
}

/// Returns an address of the first server that has one. The route to it leads to the node's address.
async fn server(config: &Config, within: Duration) -> SocketAddr {
    for server in &config.servers {
        if let Ok(addresses) = resolve(server, within).await
            && let Some(address) = addresses.first()
        {
            return *address;
        }
    }
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// Dials a port of this node as the agent does for a request, and closes the connection.
async fn dial_port(
    port: Port,
    node_ip: Option<NodeIp>,
    dial_policy: DialPolicy,
    limit: Duration,
) -> PortFacts {
    let metrics = Metrics::default();
    let context = DialContext {
        node_ip,
        dial_policy: &dial_policy,
        resolver: &SystemResolver::new(1),
        limit,
        metrics: &metrics,
    };
    let dialed = egress::dial(&Target::Node(port), &context).await;
    PortFacts {
        port,
        dialed: dialed.map(|(_socket, address)| address),
    }
}

async fn agent(address: MetaAddress, within: Duration) -> AgentFacts {
    let answer = timeout(within, ask(&address)).await;
    AgentFacts {
        address: address.to_string(),
        answer: answer.unwrap_or_else(|_elapsed| AgentAnswer::NoAnswer(NO_ANSWER.to_owned())),
    }
}

async fn ask(address: &MetaAddress) -> AgentAnswer {
    let readiness = match address.get("/readyz?verbose").await {
        Ok((StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE, body)) => body,
        Ok((status, _other)) => return AgentAnswer::OtherProgram(format!("it answers {status}")),
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
                    AgentAnswer::NotRunning
                }
                io::ErrorKind::Other => AgentAnswer::OtherProgram(error.to_string()),
                _ => AgentAnswer::NoAnswer(error.to_string()),
            };
        }
    };
    let sessions = status::sessions(address).await;
    let metrics = address.get("/metrics").await;
    AgentAnswer::Running(RunningAgent {
        sessions: sessions
            .map(|(sessions, _json)| sessions)
            .map_err(|error| error.to_string()),
        readiness: readiness.lines().map(str::to_owned).collect(),
        descriptors: metrics
            .map(|(_status, page)| descriptors(&page))
            .map_err(|error| error.to_string()),
    })
}

/// Returns the soft limit of open files from the page of metrics.
fn descriptors(page: &str) -> Option<u64> {
    let mut lines = page.lines();
    let value = lines.find_map(|line| line.strip_prefix("process_max_fds "))?;
    value.trim().parse().ok()
}

/// Steps of the longest path: the credential, the name, the connection, the handshake, the close.
const STEPS: u32 = 5;
/// Open files for other things than streams.
const DESCRIPTORS_OTHER: u64 = 64;

#[cfg(test)]
mod tests {
    use tunnel_proto::calibration::scaled;

    use super::*;
    use crate::node_ip::NodeIpOrigin;

    #[test]
    fn limit_of_open_files_is_read_from_the_metrics() {
        let page = "# TYPE process_max_fds gauge\nprocess_max_fds 1024\nprocess_open_fds 9\n";
        assert_eq!(descriptors(page), Some(1024));
        assert_eq!(descriptors("# TYPE process_max_fds gauge\n"), None);
    }

    #[tokio::test]
    async fn port_that_the_policy_denies_is_refused_and_a_listener_is_found() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let port = Port::new(address.port()).unwrap();
        let node_ip = Some(NodeIp {
            ip: address.ip(),
            origin: NodeIpOrigin::Fixed,
            is_own: true,
        });
        let limit = scaled(Duration::from_secs(5));
        let dialed = dial_port(port, node_ip, DialPolicy::default(), limit)
            .await
            .dialed;
        assert_eq!(dialed.ok(), Some(address));
        let dial_policy = DialPolicy {
            deny_ports: port.to_string().parse().unwrap(),
            ..DialPolicy::default()
        };
        let refused = dial_port(port, node_ip, dial_policy, limit).await.dialed;
        assert!(refused.unwrap_err().detail.contains("--deny-ports"));
    }
}
