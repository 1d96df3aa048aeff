//! F33: 100 watches of the API server from an edge, through a listener of its agent, for 10 minutes.
//! The link is cut for 30 s, the server is restarted by SIGTERM and after KILL, and UDP is blocked.
//! Clients and agent recover by themselves, and no client misses an object.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep};
use tunnel_process::host::raise_descriptor_limit;
use tunnel_proto::tls;
use tunnel_tests::apiserver::{FakeApiServer, Setup};
use tunnel_tests::checks::get_ok;
use tunnel_tests::client::{ClientTls, Endpoint, Exchange, RawRequest};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, NODE, Run, Runs, TransportMode, limits, node_status, until};
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::manifests::items;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup, Signal, next_loopback,
};

#[tokio::test(flavor = "multi_thread")]
async fn f33_watches_of_an_edge_recover_by_themselves_and_miss_nothing() -> Result<()> {
    // Each watch has a socket at its client and one at the API server, both in this process.
    raise_descriptor_limit()?;
    let mut runs = Runs::timed(Clocks::of_gear())?;
    // `auto` begins with QUIC.
    for transport_mode in [TransportMode::H2, TransportMode::Auto] {
        runs.start(transport_mode, "100 watches", watched);
    }
    runs.finish().await
}

async fn watched(run: Run) -> Result<()> {
    let mut edge = Edge::start(run).await?;
    edge.recovered("the start").await?;
    let began = Instant::now();
    if run.transport_mode == TransportMode::Auto {
        // Once, and first: an agent waits minutes before it tries QUIC again after it was lost soon.
        edge.block_udp().await?;
    }
    loop {
        edge.cut().await?;
        edge.restart(Signal::Term).await?;
        edge.restart(Signal::Kill).await?;
        if began.elapsed() >= run.clocks.pick(LENGTH, Duration::ZERO) {
            break;
        }
    }
    edge.complete().await
}

/// A server that offers an API server, an agent behind a link with a listener for it, and clients
/// of that listener.
struct Edge {
    run: Run,
    server: Server,
    link: Link,
    cluster: Arc<Cluster>,
    /// The objects of each client.
    informers: Vec<watch::Receiver<BTreeSet<String>>>,
    lists: Arc<AtomicU64>,
    writing: JoinSet<Result<()>>,
    _clients: JoinSet<()>,
    _agent: Process,
    _scratch: ScratchDir,
}

impl Edge {
    async fn start(run: Run) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let cluster = Arc::new(Cluster::start()?);
        let (delay, timeout) = run.limits.pick(("5s", "30s"), ("500ms", "2s"));
        let file = scratch.file("server.yaml", limits(&run.limits.server_limits()))?;
        let server = ServerSetup::on_address(&scratch.path().join("server"), next_loopback())
            .args(&["--cloud-apiserver", &cluster.api.addr().to_string()])
            .args(&["--drain-delay", delay, "--drain-timeout", timeout])
            .args(&["--config", &file.to_string_lossy()])
            .args(&["--proxy-port-listen", "off"])
            .start()
            .await?;
        let link = Link::start(server.address(Listener::Agents), run.seed)?;
        let file = scratch.file("agent.yaml", limits(run.limits.agent_limits()))?;
        let folder = scratch.path().join("agent");
        let mut agent = AgentSetup::on_loopback(NODE, link.addr(), &folder)
            .args(&["--token", &server.token(NODE, None).await?])
            .args(&["--transport", run.transport_mode.setting()])
            .args(&["--config", &file.to_string_lossy()])
            .args(&["--cloud-listen", "apiserver=127.0.0.1:0"])
            .start()?;
        let listener = agent.wait_for_line("cloud", START, |line| Listener::Cloud.opened(line));
        let endpoint = cluster.endpoint(listener.await?)?;
        server.wait_until_connected(&[NODE]).await;
        let (mut clients, lists) = (JoinSet::new(), Arc::default());
        let informers = (0..WATCHES).map(|_| {
            let (objects, observed) = watch::channel(BTreeSet::new());
            let informer = Informer {
                endpoint: endpoint.clone(),
                objects,
                revision: None,
                lists: Arc::clone(&lists),
            };
            clients.spawn(informer.run());
            observed
        });
        let informers = informers.collect();
        let mut writing = JoinSet::new();
        let every = run.clocks.time(EVERY);
        writing.spawn(cluster.clone().write(every));
        Ok(Self {
            run,
            server,
            link,
            cluster,
            informers,
            lists,
            writing,
            _clients: clients,
            _agent: agent,
            _scratch: scratch,
        })
    }

    async fn cut(&self) -> Result<()> {
        self.link.set(TrafficClass::ALL, Impairment::black_hole());
        sleep(self.run.clocks.time(CUT)).await;
        self.link.heal();
        self.recovered("the cut").await
    }

    async fn restart(&mut self, signal: Signal) -> Result<()> {
        let process = self.server.process();
        process.signal(signal)?;
        process.end(STOP).await?;
        let setup = self.server.setup_for_restart();
        self.server = setup.start().await?;
        self.recovered(&format!("{signal:?} and a start")).await
    }

    /// Blocks UDP during a session over QUIC, and waits until the agent is back on QUIC.
    async fn block_udp(&self) -> Result<()> {
        self.moved_to("quic", "before UDP is blocked").await?;
        self.link.set(TrafficClass::UDP, Impairment::black_hole());
        self.recovered("UDP was blocked").await?;
        self.moved_to("h2", "while UDP is blocked").await?;
        self.link.heal();
        self.moved_to("quic", "after UDP is back").await?;
        self.recovered("UDP was back").await
    }

    async fn moved_to(&self, transport: &str, when: &str) -> Result<()> {
        let meta = self.server.address(Listener::Meta);
        let is_over = async || {
            let status = node_status(meta, NODE).await;
            status.is_ok_and(|status| status["transport"] == transport)
        };
        let bound = self.run.clocks.connect_bound(RECOVERY);
        let moved = until(Instant::now(), scaled(bound), is_over).await;
        let what = format!("over {transport} {when}");
        self.run.within(&what, bound, moved)
    }

    /// Waits until each client has an object that is made after the fault.
    async fn recovered(&self, fault: &str) -> Result<()> {
        let newest = self.cluster.make()?;
        let what = format!("all watches have an object made after {fault}");
        self.all_have(&what, &[newest]).await
    }

    /// Ends the writing, and waits until each client has every object.
    async fn complete(mut self) -> Result<()> {
        self.writing.shutdown().await;
        let made = self.cluster.made.load(Ordering::SeqCst);
        let names: Vec<_> = (0..made).map(name).collect();
        let lists = self.lists.load(Ordering::Relaxed);
        let figure = format!("{made} objects, {lists} lists of {WATCHES} clients");
        self.run.report(figure);
        self.all_have("all watches have all objects", &names).await
    }

    async fn all_have(&self, what: &str, names: &[String]) -> Result<()> {
        let have_all = async || {
            self.informers.iter().all(|informer| {
                let objects = informer.borrow();
                names.iter().all(|name| objects.contains(name))
            })
        };
        let bound = self.run.clocks.connect_bound(RECOVERY);
        let measured = until(Instant::now(), scaled(bound), have_all).await;
        self.run.within(what, bound, measured)
    }
}

/// An API server whose ConfigMaps are watched.
struct Cluster {
    api: FakeApiServer,
    /// Number of ConfigMaps that were made.
    made: AtomicU64,
}

impl Cluster {
    fn start() -> Result<Self> {
        Ok(Self {
            api: FakeApiServer::start(Setup::default())?,
            made: AtomicU64::new(0),
        })
    }

    /// Makes ConfigMaps until the future is dropped.
    async fn write(self: Arc<Self>, every: Duration) -> Result<()> {
        let mut ticks = interval(every);
        loop {
            ticks.tick().await;
            self.make()?;
        }
    }

    /// Makes the next ConfigMap and returns its name.
    fn make(&self) -> Result<String> {
        let name = name(self.made.fetch_add(1, Ordering::SeqCst));
        let object = json!({ "metadata": { "name": name } });
        self.api.put("configmaps", Some(NAMESPACE), object)?;
        Ok(name)
    }

    /// Returns the API server for an administrator, at another address.
    fn endpoint(&self, address: SocketAddr) -> Result<Endpoint> {
        let kubeconfig = fs::read(self.api.admin_kubeconfig()?)?;
        let kubeconfig: Value = serde_json::from_slice(&kubeconfig)?;
        let read = |file: &Value| anyhow::Ok(fs::read(file.as_str().context("no file")?)?);
        let user = &kubeconfig["users"][0]["user"];
        let chain = tls::files::chain(&read(&user["client-certificate"])?)?;
        let key = tls::files::private_key(&read(&user["client-key"])?)?;
        let cluster = &kubeconfig["clusters"][0]["cluster"];
        let ca = tls::files::chain(&read(&cluster["certificate-authority"])?)?;
        let roots = RootCertStore::clone(&*tls::roots(ca)?);
        let tls = ClientTls::verifying(SERVER_NAME, roots, Some((chain, key)))?;
        Ok(Endpoint::tls(address, tls))
    }
}

fn name(number: u64) -> String {
    format!("event-{number}")
}

/// A client that lists and then watches, and watches again when its connection has ended.
struct Informer {
    endpoint: Endpoint,
    objects: watch::Sender<BTreeSet<String>>,
    /// Revision from which to watch; without one the client lists.
    revision: Option<String>,
    lists: Arc<AtomicU64>,
}

impl Informer {
    async fn run(mut self) {
        loop {
            // The client connects again whatever the end was.
            let _ended = self.list_and_watch().await;
            sleep(RETRY).await;
        }
    }

    async fn list_and_watch(&mut self) -> Result<()> {
        let revision = match self.revision.take() {
            Some(revision) => revision,
            None => self.list().await?,
        };
        let path = format!("{PATH}?watch=true&resourceVersion={revision}");
        self.revision = Some(revision);
        let get = RawRequest::get(HOST, &path);
        let mut events = Exchange::start(self.endpoint.clone(), &get).await?;
        ensure!(events.status() == 200, "{}", events.status());
        while let Some(line) = events.line().await {
            let event: Value = serde_json::from_str(&line)?;
            if event["type"] == "ERROR" {
                self.revision = None;
                return Ok(());
            }
            self.record(&event["object"])?;
            self.revision = Some(revision_of(&event["object"])?);
        }
        Ok(())
    }

    async fn list(&self) -> Result<String> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        let list = get_ok(self.endpoint.clone(), HOST, PATH).await?;
        let list: Value = serde_json::from_slice(&list.body)?;
        for object in items(&list["items"]) {
            self.record(object)?;
        }
        revision_of(&list)
    }

    fn record(&self, object: &Value) -> Result<()> {
        let name = object["metadata"]["name"].as_str().context("no name")?;
        self.objects.send_modify(|objects| {
            objects.insert(name.to_owned());
        });
        Ok(())
    }
}

fn revision_of(object: &Value) -> Result<String> {
    let revision = object["metadata"]["resourceVersion"].as_str();
    Ok(revision.context("no revision")?.to_owned())
}

const WATCHES: usize = 100;
const LENGTH: Duration = Duration::from_secs(600);
const CUT: Duration = Duration::from_secs(30);
/// Time between two objects.
const EVERY: Duration = Duration::from_secs(1);
/// Longer than `deadAfter`, at which the streams of a silent session are cut, and a dial.
const RECOVERY: Duration = Duration::from_secs(75);
/// Pause of a client before it connects again.
const RETRY: Duration = Duration::from_millis(500);
const NAMESPACE: &str = "default";
const PATH: &str = "/api/v1/namespaces/default/configmaps";
const HOST: &str = "kubernetes";
/// Name in the certificate of the API server.
const SERVER_NAME: &str = "kubernetes.default.svc";
/// Time limit for a start.
const START: Duration = Duration::from_secs(15);
/// Longer than drain delay and drain timeout.
const STOP: Duration = Duration::from_secs(45);
