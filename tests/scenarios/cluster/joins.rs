//! Nodes join a large cluster through two servers: what a join costs etcd and the watches of the API
//! server, what the servers answer meanwhile, and their memory.
//!
//! In the long run (`CULVERT_TEST_GEAR=full`) 5,000 of 20,000 Nodes join, 20 each second where the
//! machine is fast enough.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};
use tunnel_process::host::raise_descriptor_limit;
use tunnel_proto::transport::TransportKind;
use tunnel_server::admin::{AdminClient, CreateToken};
use tunnel_store::data_dir::DataDir;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Kind, edge_at};
use tunnel_tests::dns::DnsClient;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::{meta_page, sum};
use tunnel_tests::process::{Listener, Server};
use tunnel_tests::scripted::{AgentCredential, ScriptedAgent};

use super::{ClusterEnv, GUIDE_IP};
use crate::abuse::report_figure;
use crate::binaries::kib;

#[tokio::test(flavor = "multi_thread")]
async fn real_joins_cost_little_in_etcd_and_in_watches_and_servers_answer_meanwhile() -> Result<()>
{
    let Some(cluster_env) = ClusterEnv::start(Kind::Real).await? else {
        return Ok(());
    };
    let (nodes, joins) = Gear::current().pick((500, 50), (20_000, 5_000));
    raise_descriptor_limit()?;
    cluster_env.create_service(GUIDE_IP).await?;
    add_nodes(&cluster_env, nodes).await?;
    let servers = [
        Observed::start(&cluster_env, "a").await?,
        Observed::start(&cluster_env, "b").await?,
    ];
    for server in &servers {
        eventually("all Nodes", LISTED, async || {
            let listed = server.nodes().await?;
            ensure!(listed == nodes, "{listed}");
            anyhow::Ok(())
        })
        .await;
    }
    let at_rest = servers.each_ref().map(Observed::resident);
    let before = Cost::so_far(&cluster_env).await?;
    let began = Instant::now();
    let joiner = Arc::new(Joiner::new(&servers).await?);
    let joining = joiner.join_all(joins);
    tokio::pin!(joining);
    let (mut answers, mut slowest) = (0, BTreeMap::<_, Duration>::new());
    let agents = loop {
        let [one, other] = &servers;
        let server = if answers % 2 == 0 { one } else { other };
        let round = server.answers();
        tokio::pin!(round);
        // The round that is under way when the last one has joined counts.
        let (took, joined) = tokio::select! {
            agents = &mut joining => (round.await?, Some(agents?)),
            took = &mut round => (took?, None),
        };
        for (what, took) in took {
            let most = slowest.entry(what).or_default();
            *most = took.max(*most);
        }
        answers += 1;
        if let Some(agents) = joined {
            break agents;
        }
    };
    let took = began.elapsed();
    let cost = before.until(&Cost::so_far(&cluster_env).await?, joins);
    for server in &servers {
        let connected = server.server.metric("tunnel_server_agents").await?;
        ensure!(connected == joins as u64, "{connected} sessions");
        server.answers().await?;
    }
    let (mut peak, mut peaks) = (0, Vec::new());
    for (server, at_rest) in servers.iter().zip(at_rest) {
        let most = server.peak()?;
        peak = peak.max(most);
        peaks.push(format!(
            "{} MiB of {} MiB at rest",
            most >> 10,
            at_rest? >> 10
        ));
    }
    report_figure(&format!(
        "{joins} joins among {nodes} Nodes in {took:?}: {cost:?} each; {answers} rounds of answers, the slowest of each {slowest:?}; \
         peaks of the servers: {}",
        peaks.join(", ")
    ));
    ensure!(answers > 0, "nothing was asked meanwhile");
    ensure!(
        cost.etcd_bytes <= COST_MAX_BYTES && cost.watch_bytes <= COST_MAX_BYTES,
        "{cost:?}"
    );
    ensure!(peak <= SERVER_MAX_KIB, "{peaks:?}");
    drop(agents);
    Ok(())
}

/// Machines that the cluster does not know join by one token, which admits one fewer than come.
#[tokio::test(flavor = "multi_thread")]
async fn new_nodes_join_by_one_token_over_two_servers() -> Result<()> {
    let Some(cluster_env) = ClusterEnv::start(Kind::FakeApiServer).await? else {
        return Ok(());
    };
    let joins: u32 = Gear::current().pick(40, 2_000);
    raise_descriptor_limit()?;
    cluster_env.create_service(GUIDE_IP).await?;
    add_nodes(&cluster_env, 1).await?;
    let servers = [
        Observed::start(&cluster_env, "a").await?,
        Observed::start(&cluster_env, "b").await?,
    ];
    let mut joiner = Joiner::new(&servers).await?;
    let create = CreateToken {
        uses: Some(joins),
        ..token_for("cam-*")?
    };
    let created = joiner.tokens[0].create_token(&create).await?;
    joiner.pattern = Some(created.token.clone());
    let began = Instant::now();
    let joined = Arc::new(joiner).join_all(joins as usize).await?;
    report_figure(&format!(
        "{joins} joins by one token in {:?}, the slowest in {:?}",
        began.elapsed(),
        joined.slowest
    ));
    for server in &servers {
        let connected = server.server.metric("tunnel_server_agents").await?;
        ensure!(connected == u64::from(joins), "{connected} sessions");
    }
    let late = AgentCredential::enroll(
        servers[1].server.address(Listener::Agents),
        &created.token,
        "cam-late",
    );
    let refused = late.await.err().context("a use too many")?.to_string();
    ensure!(refused.contains("cannot be used more often"), "{refused}");
    let listed = servers[1]
        .server
        .verb(&["token", "list"])?
        .run()
        .await?
        .ok()?;
    ensure!(
        listed.contains(&format!("cam-* ({joins} of {joins})")),
        "{listed}"
    );
    drop(joined);
    Ok(())
}

/// Returns the request for a token for a node, or for a pattern of nodes.
fn token_for(nodes: &str) -> Result<CreateToken> {
    Ok(CreateToken {
        node: nodes.parse()?,
        uses: None,
        needs_approval: false,
        labels: BTreeMap::new(),
        ttl_seconds: 3600,
        ips: Vec::new(),
    })
}

/// Creates edge nodes, each with an address of its own.
async fn add_nodes(cluster_env: &ClusterEnv, count: usize) -> Result<()> {
    let mut creating = JoinSet::new();
    for worker in 0..AT_ONCE {
        let api = cluster_env.admin().clone();
        creating.spawn(async move {
            for number in (worker..count).step_by(AT_ONCE) {
                let (high, low) = (number / 250, number % 250);
                let address = format!("10.{}.{}.{low}", 200 + high / 250, high % 250);
                let node = edge_at(&name(number), &address);
                api.create("/api/v1/nodes", node.object()).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(created) = creating.join_next().await {
        created??;
    }
    Ok(())
}

fn name(number: usize) -> String {
    format!("edge-{number:05}")
}

/// A server with everything that shows nodes.
struct Observed {
    server: Server,
    process: u32,
    dns: DnsClient,
    status: SocketAddr,
}

impl Observed {
    async fn start(cluster_env: &ClusterEnv, name: &str) -> Result<Self> {
        let loopback = "127.0.0.1:0";
        // The default, as much longer as this machine is slow.
        let limit = scaled(Duration::from_secs(5)).as_secs();
        let file = cluster_env.scratch.file(
            &format!("{name}.yaml"),
            format!("limits: {{ handshakeTimeout: {limit}s }}\n"),
        )?;
        let setup = cluster_env.setup(name)?.args(&["--peer-listen", "off"]);
        let setup = setup.args(&["--config", &file.to_string_lossy()]);
        let setup = setup.args(&["--dns-listen", loopback, "--status-listen", loopback]);
        let mut server = setup.start().await?;
        let mut addresses = Vec::new();
        for listener in [Listener::Dns, Listener::Status] {
            let address = server
                .process()
                .wait_for_line("a listener", LISTED, |line| listener.opened(line));
            addresses.push(address.await?);
        }
        let process = server.process().id().context("it has ended")?;
        Ok(Self {
            server,
            process,
            dns: DnsClient::new(addresses[0]),
            status: addresses[1],
        })
    }

    /// Returns the number of nodes that the verb `nodes` lists.
    async fn nodes(&self) -> Result<usize> {
        let printed = self
            .server
            .verb(&["nodes", "-o", "json"])?
            .run()
            .await?
            .ok()?;
        Ok(printed.matches("\"node\":").count())
    }

    /// Asks the server in every way. Returns the times of the answers.
    async fn answers(&self) -> Result<[(&'static str, Duration); 5]> {
        let mut began = Instant::now();
        let mut answered = |what| {
            let took = began.elapsed();
            began = Instant::now();
            (what, took)
        };
        let found = self.dns.addresses(&name(7)).await?;
        ensure!(found == [GUIDE_IP.parse::<IpAddr>()?], "{found:?}");
        let dns = answered("DNS");
        let get = RawRequest::get("127.0.0.1", "/nodes?sort=name&page=6");
        let page = request(self.status, &get).await?.text();
        ensure!(page.contains(&name(200)), "{page}");
        let page = answered("console");
        let meta = self.server.address(Listener::Meta);
        let get = RawRequest::get("meta", "/sd/prometheus?port=10250");
        let targets = request(meta, &get).await?.text();
        ensure!(targets.ends_with("]\n"), "{} bytes", targets.len());
        let targets = answered("/sd");
        ensure!(self.nodes().await? >= 500);
        let nodes = answered("nodes");
        let report = self.server.verb(&["doctor"])?.run().await?;
        ensure!(report.out.contains("nodes"), "{report}");
        Ok([dns, page, targets, nodes, answered("doctor")])
    }

    fn resident(&self) -> Result<u64> {
        kib(self.process, "VmRSS:")
    }

    /// Returns the most memory that the process has had, in KiB.
    fn peak(&self) -> Result<u64> {
        kib(self.process, "VmHWM:")
    }
}

/// Lets nodes join: a token of one server, an enrollment at the other one, and a session with each.
struct Joiner {
    tokens: [AdminClient; 2],
    agents: [SocketAddr; 2],
    /// A token for all nodes, in place of one for each.
    pattern: Option<String>,
}

impl Joiner {
    async fn new(servers: &[Observed; 2]) -> Result<Self> {
        let client = async |server: &Observed| {
            let dir = DataDir::open_existing(Path::new(server.server.data_dir()))?;
            let client = AdminClient::connect(&dir).await?;
            client.context("no server")
        };
        let [one, other] = servers;
        Ok(Self {
            tokens: [client(one).await?, client(other).await?],
            agents: [one, other].map(|server| server.server.address(Listener::Agents)),
            pattern: None,
        })
    }

    async fn join_all(self: Arc<Self>, count: usize) -> Result<Joined> {
        let mut pace = interval(PACE);
        let (mut joining, mut joined) = (JoinSet::new(), Joined::default());
        for number in 0..count {
            pace.tick().await;
            if joining.len() >= AT_ONCE {
                let next = joining.join_next().await.context("none joins")?;
                joined.add(next?)?;
            }
            let joiner = self.clone();
            joining.spawn(async move {
                let began = Instant::now();
                let agents = joiner.join(number).await;
                agents
                    .with_context(|| name(number))
                    .map(|agents| (agents, began.elapsed()))
            });
        }
        while let Some(agents) = joining.join_next().await {
            joined.add(agents?)?;
        }
        Ok(joined)
    }

    async fn join(&self, number: usize) -> Result<[ScriptedAgent; 2]> {
        let (node, token) = match &self.pattern {
            Some(token) => (format!("cam-{number:05}"), token.clone()),
            None => {
                let create = token_for(&name(number))?;
                let created = self.tokens[number % 2].create_token(&create).await?;
                (name(number), created.token)
            }
        };
        let other = self.agents[(number + 1) % 2];
        let credential = AgentCredential::enroll(other, &token, &node).await?;
        let connect = async |server| {
            ScriptedAgent::connect_with(server, &credential, &node, TransportKind::Quic).await
        };
        Ok([
            connect(self.agents[0]).await?,
            connect(self.agents[1]).await?,
        ])
    }
}

/// Nodes that have joined, and the time from the request for a token or a certificate to the last session.
#[derive(Default)]
struct Joined {
    agents: Vec<[ScriptedAgent; 2]>,
    slowest: Duration,
}

impl Joined {
    fn add(&mut self, joined: Result<([ScriptedAgent; 2], Duration)>) -> Result<()> {
        let (agents, took) = joined?;
        self.agents.push(agents);
        self.slowest = self.slowest.max(took);
        Ok(())
    }
}

/// What etcd and the API server have counted, or what one join costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Bytes of all keys and values that were put.
    etcd_bytes: f64,
    etcd_puts: f64,
    /// Bytes of all events that the API server has sent to watches, those of kube-apiserver itself and
    /// the Lease of the leader included.
    watch_bytes: f64,
}

impl Cost {
    async fn so_far(cluster_env: &ClusterEnv) -> Result<Self> {
        let etcd = meta_page(cluster_env.cluster.etcd()?, "/metrics").await?;
        let api = cluster_env.admin().text("/metrics").await?;
        let cost = Self {
            etcd_bytes: sum(&etcd, "etcd_debugging_mvcc_total_put_size_in_bytes"),
            etcd_puts: sum(&etcd, "etcd_mvcc_put_total"),
            watch_bytes: sum(&api, "apiserver_watch_events_sizes_sum"),
        };
        let is_measured = cost.etcd_bytes > 0.0 && cost.watch_bytes > 0.0;
        ensure!(is_measured, "no metrics: {cost:?}");
        Ok(cost)
    }

    /// Returns the cost of each of some joins between two moments.
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    fn until(&self, later: &Self, joins: usize) -> Self {
        let each = |before: f64, after: f64| ((after - before) / joins as f64).round();
        Self {
            etcd_bytes: each(self.etcd_bytes, later.etcd_bytes),
            etcd_puts: each(self.etcd_puts, later.etcd_puts),
            watch_bytes: each(self.watch_bytes, later.watch_bytes),
        }
    }
}

const COST_MAX_BYTES: f64 = 4096.0;
const SERVER_MAX_KIB: u64 = 400 << 10;
const PACE: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 32;
const LISTED: Duration = Duration::from_secs(60);
