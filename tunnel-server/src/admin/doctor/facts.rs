//! Gathers the facts of `doctor` from the running server, this host and the API server, all at the
//! same time. A fact that cannot be obtained is the reason for that.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::net::UnixStream;
use tokio::time::{Instant, timeout};
use tunnel_doctor::{
    Condition, Fact, HostFacts, NO_ANSWER, conditions, time_for_facts, waits_for, within,
};
use tunnel_process::host::Resources;
use tunnel_process::meta;
use tunnel_proto::wire::name::NodeName;

use self::agents::AgentReport;
use self::dialed::DialedFacts;
use self::kubelets::KubeletProbe;
use self::socket::{ConnectFailure, connect, open};
use super::survey::{NodeSurvey, SurveySettings};
use crate::admin::pages::PageQuery;
use crate::admin::verbs::META_IS_OFF;
use crate::admin::{AdminClient, AdminError};
use crate::cluster::doctor::{ClusterFacts, ClusterObjects, check_credentials};
use crate::config::{Capacity, Config, DescriptorUses};

pub(super) mod agents;
pub(super) mod dialed;
pub(super) mod kubelets;
mod socket;

/// The facts for all checks.
pub(super) struct Facts {
    pub(super) only_nodes: Vec<NodeName>,
    pub(super) data_dir: PathBuf,
    pub(super) server: ServerAnswer,
    /// Lines of the page `/readyz?verbose`.
    pub(super) readiness: Fact<Vec<String>>,
    pub(super) host: HostFacts,
    /// Whether the command runs in a Pod of the cluster.
    pub(super) is_pod: bool,
    /// Largest packets of the network interfaces.
    pub(super) links: Vec<Link>,
    /// Maximum number of open files of the server.
    pub(super) descriptors: Fact<u64>,
    /// What the process can carry, if it has the resources of this command.
    pub(super) capacity: String,
    /// Whether the credentials for the API server can be read, if a cluster is configured.
    pub(super) credentials: Fact<()>,
    pub(super) cluster: Fact<ClusterFacts>,
    /// Connections to kubelets of connected edge nodes.
    pub(super) kubelets: Fact<Vec<KubeletProbe>>,
    /// What some connected agents say of themselves.
    pub(super) agents: Vec<AgentReport>,
    pub(super) dialed: DialedFacts,
}

/// The answer of the running server.
#[expect(clippy::large_enum_variant, reason = "there is one")]
pub(super) enum ServerAnswer {
    Nodes(NodeSurvey),
    /// There is no data directory.
    NotRunning,
    /// A server is there and gives no answer.
    NoAnswer(String),
    /// This user cannot ask the server.
    Unknown(String),
}

/// A network interface other than loopback.
pub(super) struct Link {
    pub(super) name: String,
    /// Maximum size of a packet in bytes.
    pub(super) mtu: u32,
}

/// Gathers the facts within `limit`.
pub(super) async fn gather(config: &Config, only_nodes: &[NodeName], limit: Duration) -> Facts {
    let limit = time_for_facts(limit);
    let resources = Resources::of_process();
    let capacity = Capacity::new(&config.limits, DescriptorUses::of(config), resources);
    let end = Instant::now() + limit;
    let settings = SurveySettings {
        only_nodes: only_nodes.to_vec(),
        renewal_margin: (config.limits.certificate_life / 4).min(RENEWAL_MARGIN_MAX),
        now: SystemTime::now(),
    };
    let credentials = async {
        match &config.kubernetes {
            Some(settings) => check_credentials(settings).await,
            None => Ok(()),
        }
    };
    let (server, readiness, host, descriptors, dialed, credentials, objects) = tokio::join!(
        Box::pin(server(&config.data_dir, settings, limit)),
        Box::pin(readiness(config.meta_listen, limit)),
        Box::pin(HostFacts::gather(
            &config.data_dir,
            capacity.buffer_pool,
            &resources,
            limit
        )),
        Box::pin(within(limit, descriptors(&config.data_dir))),
        Box::pin(DialedFacts::gather(config)),
        Box::pin(within(limit, credentials)),
        Box::pin(within(limit, ClusterObjects::read(config))),
    );
    let cluster = objects.and_then(|objects| {
        let settings = config.kubernetes.as_ref().ok_or(NO_ANSWER)?;
        Ok(objects.facts(config, settings, |node| server.is_connected(node.as_str())))
    });
    let nodes = kubelets::sample(&cluster, |node| server.is_connected(node), only_nodes);
    let left = end.saturating_duration_since(Instant::now());
    let asked = server.connected(agents::SAMPLE_MAX);
    let (kubelets, agents) = tokio::join!(
        within(left, Box::pin(kubelets::probe_all(config, nodes))),
        timeout(left, Box::pin(agents::ask_all(&config.data_dir, asked))),
    );
    Facts {
        only_nodes: only_nodes.to_vec(),
        data_dir: config.data_dir.clone(),
        server,
        readiness,
        host,
        is_pod: config
            .kubernetes
            .as_ref()
            .is_some_and(|settings| settings.in_cluster),
        links: links(Path::new("/sys/class/net")),
        descriptors,
        capacity: capacity.describe(resources),
        credentials,
        cluster,
        kubelets,
        agents: agents.unwrap_or_default(),
        dialed,
    }
}

impl Facts {
    /// Returns the conditions of the running server; none if they are not known.
    pub(super) fn conditions(&self) -> Vec<Condition<'_>> {
        conditions(self.readiness_page()).collect()
    }

    /// Returns the components for which the running server waits before it is ready.
    pub(super) fn waits_for(&self) -> Vec<&str> {
        waits_for(self.readiness_page().iter().map(String::as_str)).collect()
    }

    fn readiness_page(&self) -> &[String] {
        self.readiness.as_deref().unwrap_or_default()
    }

    /// Returns whether the command has a cluster by a kubeconfig, perhaps on another host than the
    /// server.
    pub(super) fn is_remote(&self) -> bool {
        self.cluster.is_ok() && !self.is_pod
    }

    /// Returns why what the server itself knows is not checked.
    pub(super) fn elsewhere(&self) -> String {
        format!(
            "this host has no data directory {}, so the server is elsewhere; use the command on its host \
             or in its Pod",
            self.data_dir.display()
        )
    }

    /// Returns whether a node is to be checked.
    pub(super) fn is_selected(&self, node: &str) -> bool {
        let mut only = self.only_nodes.iter();
        self.only_nodes.is_empty() || only.any(|name| name.as_str() == node)
    }
}

impl ServerAnswer {
    fn is_connected(&self, name: &str) -> bool {
        match self {
            Self::Nodes(survey) => survey.is_connected(name),
            Self::NotRunning | Self::NoAnswer(_) | Self::Unknown(_) => false,
        }
    }

    /// Returns at most `most` of the nodes that are checked and whose agents are connected.
    fn connected(&self, most: usize) -> Vec<NodeName> {
        match self {
            Self::Nodes(survey) => survey.connected().take(most).collect(),
            Self::NotRunning | Self::NoAnswer(_) | Self::Unknown(_) => Vec::new(),
        }
    }
}

async fn server(data_dir: &Path, settings: SurveySettings, limit: Duration) -> ServerAnswer {
    let answer = timeout(limit, ask(data_dir, settings)).await;
    answer.unwrap_or_else(|_elapsed| ServerAnswer::NoAnswer(NO_ANSWER.to_owned()))
}

async fn ask(data_dir: &Path, settings: SurveySettings) -> ServerAnswer {
    let client = match connect(data_dir).await {
        Ok(Some(client)) => client,
        Ok(None) => return ServerAnswer::NotRunning,
        Err(ConnectFailure::Forbidden(reason)) => return ServerAnswer::Unknown(reason),
        Err(ConnectFailure::Other(reason)) => return ServerAnswer::NoAnswer(reason),
    };
    match survey(&client, settings).await {
        Ok(survey) => ServerAnswer::Nodes(survey),
        Err(error) => ServerAnswer::NoAnswer(error.to_string()),
    }
}

/// Reads the nodes of the server, page by page.
async fn survey(client: &AdminClient, settings: SurveySettings) -> Result<NodeSurvey, AdminError> {
    let (mut survey, mut query) = (NodeSurvey::new(settings), PageQuery::default());
    for failure in &client.failures().await? {
        survey.add_failure(failure);
    }
    loop {
        let page = client.nodes(&query).await?;
        for node in &page.nodes {
            survey.add(node);
        }
        if !query.advance(page.r#continue.as_deref())? {
            return Ok(survey);
        }
    }
}

async fn readiness(meta_listen: Option<SocketAddr>, limit: Duration) -> Fact<Vec<String>> {
    let address = meta::dialable(meta_listen.ok_or(META_IS_OFF)?);
    let answer = within(limit, async {
        let answer = meta::get(address, "/readyz?verbose").await;
        answer.map_err(|error| error.to_string())
    });
    match answer.await {
        Ok((_status, body)) => Ok(body.lines().map(str::to_owned).collect()),
        Err(reason) => Err(format!("meta port {address}: {reason}; see --meta-listen")),
    }
}

/// Returns the network interfaces that can be read.
fn links(folder: &Path) -> Vec<Link> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.take(LINKS_MAX).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let mtu = fs::read_to_string(entry.path().join("mtu")).ok()?;
        let mtu = mtu.trim().parse().ok()?;
        (name != "lo").then_some(Link { name, mtu })
    });
    links.collect()
}

/// Returns the maximum number of open files of the server that answers on the admin socket.
async fn descriptors(data_dir: &Path) -> Fact<u64> {
    let dir = open(data_dir).await.map_err(|error| error.to_string())?;
    let socket = UnixStream::connect(dir.admin_socket()).await;
    let socket = socket.map_err(|error| format!("the server's process is not known: {error}"))?;
    let user = socket.peer_cred().map_err(|error| error.to_string())?;
    // A process of another container has no id here.
    let id = user.pid().filter(|id| *id > 0).ok_or(NO_PROCESS)?;
    let path = format!("/proc/{id}/limits");
    let limits = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    open_files(&limits).ok_or_else(|| format!("{path}: no limit of open files"))
}

/// Returns the soft limit of open files from the text of `/proc/PID/limits`.
fn open_files(limits: &str) -> Option<u64> {
    let mut lines = limits.lines();
    let values = lines.find_map(|line| line.strip_prefix("Max open files"))?;
    match values.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Maximum number of network interfaces that are read.
const LINKS_MAX: usize = 256;
const NO_PROCESS: &str = "the server's process is in another container";
/// Certificates are renewed at half of their life, so the margin of a short life is a quarter.
const RENEWAL_MARGIN_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_of_open_files_is_read() {
        let text = "Limit   Soft Limit   Hard Limit   Units\n\
                    Max open files            1024                 524288               files\n";
        assert_eq!(open_files(text), Some(1024));
        assert_eq!(
            open_files("Max open files unlimited unlimited files"),
            Some(u64::MAX)
        );
        assert_eq!(open_files(""), None);
    }
}
