//! Names on an edge node that is cut off: a cache on the node asks the cluster's DNS through the
//! tunnel, and answers the names that it has while the link is down.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tunnel_proto::calibration::recalibrate;
use tunnel_tests::dns::{Behavior, DnsClient, FakeResolver, addresses};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::manifests::documents;
use tunnel_tests::metrics::{meta_page, value};
use tunnel_tests::netns::in_service_namespace;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Program, ScratchDir, Server, ServerSetup,
};
use tunnel_tests::tools::{Skip, Tool, or_skip};

use crate::dns::report_figure;

#[tokio::test(flavor = "multi_thread")]
async fn known_names_outlive_a_cut_of_the_link_over_quic() -> Result<()> {
    let test = "cloud::names::known_names_outlive_a_cut_of_the_link_over_quic";
    outage(test, "quic").await
}

#[tokio::test(flavor = "multi_thread")]
async fn known_names_outlive_a_cut_of_the_link_over_h2() -> Result<()> {
    let test = "cloud::names::known_names_outlive_a_cut_of_the_link_over_h2";
    outage(test, "h2").await
}

/// Runs both outages in a namespace, since the rendered texts have fixed addresses and ports.
async fn outage(test: &str, transport: &str) -> Result<()> {
    let Some(cache) = or_skip(CacheProgram::find()) else {
        return Ok(());
    };
    let limit = Duration::from_secs(120) + cut_for();
    in_service_namespace(test, limit, async || {
        let mut edge = Edge::start(cache, transport).await?;
        edge.known_names_never_fail().await?;
        edge.start_without_the_link_fails_at_once().await
    })
    .await
}

/// An agent behind a link that can be cut, and a cache that asks through it.
struct Edge {
    cache: CacheProgram,
    running: Option<Process>,
    client: DnsClient,
    link: Link,
    resolver: FakeResolver,
    transport: &'static str,
    scratch: ScratchDir,
    _agent: Process,
    _server: Server,
}

impl Edge {
    async fn start(cache: CacheProgram, transport: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let resolver = FakeResolver::start(Behavior::Answers(1)).await?;
        // Entries expire during the cut.
        resolver.expire_after(1);
        let target = resolver.address();
        let settings = format!("cloud: [{{ name: dns, target: '{target}', nodes: ['*'] }}]");
        let file = scratch.file("server.yaml", settings)?;
        let server = ServerSetup::on_loopback(&scratch.path().join("server"))
            .args(&["--config", &file.to_string_lossy()])
            .start()
            .await?;
        let link = Link::start(server.address(Listener::Agents), 7)?;
        for address in [CACHE, LISTENER] {
            let add = Program::ours("tunnel-agent")?.args(["address", "add", address]);
            add.run().await?.ok()?;
        }
        let folder = scratch.path().join("agent");
        let token = server.token("worker-1", None).await?;
        let loopback = Ipv4Addr::LOCALHOST;
        let agent = AgentSetup::on_address("worker-1", link.addr(), &folder, loopback)
            .args(&["--token", &token, "--transport", transport])
            .args(&["--cloud-listen", &format!("dns={LISTENER}:1053")]);
        let agent = agent.start()?;
        server.wait_until_connected(&["worker-1"]).await;
        let address: IpAddr = CACHE.parse()?;
        let mut edge = Self {
            cache,
            running: None,
            client: DnsClient::new((address, 53).into()),
            link,
            resolver,
            transport: if transport == "h2" { "h2" } else { "quic" },
            scratch,
            _agent: agent,
            _server: server,
        };
        edge.start_cache().await?;
        Ok(edge)
    }

    /// Starts the cache again. Returns how long its first answer took.
    async fn start_cache(&mut self) -> Result<Duration> {
        if let Some(running) = self.running.take() {
            running.kill().await?;
        }
        let (running, first) = self.cache.start(&self.scratch).await?;
        self.running = Some(running);
        Ok(first)
    }

    /// Cuts the link under a steady rate of queries.
    async fn known_names_never_fail(&mut self) -> Result<()> {
        for name in known_names() {
            eventually(&name, LONG, async || self.ensure_fresh(&name, 1).await).await;
        }
        self.link.set(TrafficClass::ALL, Impairment::black_hole());
        self.ask_while_the_link_is_down().await?;
        self.resolver.behave(Behavior::Answers(2));
        let healed = Instant::now();
        self.link.heal();
        let number = Cell::new(0);
        eventually("an answer for a new name", BACK_WITHIN, async || {
            number.set(number.get() + 1);
            let name = name(&format!("back-{}", number.get()));
            self.ensure_fresh(&name, 2).await
        })
        .await;
        let back = healed.elapsed();
        for name in known_names() {
            eventually(&name, FRESH_WITHIN, async || {
                self.ensure_fresh(&name, 2).await
            })
            .await;
        }
        let elapsed = healed.elapsed();
        report_figure(&format!(
            "new names {back:.1?} after the link is back, all fresh after {elapsed:.1?}"
        ));
        Ok(())
    }

    async fn ask_while_the_link_is_down(&self) -> Result<()> {
        let (began, cut_for) = (Instant::now(), cut_for());
        let (mut seen, mut settled) = (Seen::default(), None);
        let mut ticks = interval(Duration::from_secs(1) / PER_SECOND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut waiting = JoinSet::new();
        let mut number = 0_u32;
        while began.elapsed() < cut_for {
            ticks.tick().await;
            number += 1;
            // One name in ten is new.
            let is_known = !number.is_multiple_of(10);
            let name = if is_known {
                name(&format!("known-{}", number % KNOWN))
            } else {
                name(&format!("unknown-{number}"))
            };
            waiting.spawn(Answer::to(self.client, name, is_known));
            while let Some(answer) = waiting.try_join_next() {
                seen.add(answer?);
            }
            if settled.is_none() && seen.is_settled(Instant::now()) {
                let connections = self.connections().await?;
                if connections.reset > 0 {
                    settled = Some((number, connections));
                } else {
                    // It was a limit of the agent, which has not noticed the cut.
                    seen.forget_unknown();
                }
            }
        }
        let noticed = seen.noticed.context("no answer at once for a new name")?;
        let (since, before) = settled.context("the cut was too short")?;
        let after = self.connections().await?;
        let reset = after.reset - before.reset;
        let queries = number - since;
        report_figure(&format!(
            "{} over {}: cut noticed after {:.1?}; {seen}; of {queries} queries {reset} led to a \
             connection, which the agent reset; load {}",
            self.cache.name(),
            self.transport,
            noticed - began,
            std::fs::read_to_string("/proc/loadavg")?.trim(),
        ));
        // Without a session no connection waits for one: answers wait for the processor alone.
        ensure!(reset > 0, "the cache asks on");
        ensure!(after.others - before.others <= before.open, "{after:?}");
        ensure!(seen.known.keys().eq([NOERROR]), "{seen}");
        ensure!(seen.unknown.keys().eq([SERVFAIL]), "{seen}");
        // The machine may have become slower since the factor was measured.
        ensure!(seen.slowest < AT_ONCE.mul_f64(recalibrate()), "{seen}");
        Ok(())
    }

    /// Returns what became of the connections to the agent's listener.
    async fn connections(&self) -> Result<Connections> {
        let page = meta_page(Listener::Meta.on(Ipv4Addr::LOCALHOST), "/metrics").await?;
        let ended = "tunnel_agent_cloud_streams_total";
        let reset = value(&page, &format!("{ended}{{result=\"no_session\"}}")).unwrap_or(0);
        Ok(Connections {
            reset,
            others: value(&page, ended).unwrap_or(0) - reset,
            open: value(&page, "tunnel_agent_cloud_streams_open").unwrap_or(0),
        })
    }

    /// A cache that starts while the link is down has nothing.
    async fn start_without_the_link_fails_at_once(&mut self) -> Result<()> {
        self.link.set(TrafficClass::ALL, Impairment::black_hole());
        self.expect_failures_at_once("offline").await;
        let first = self.start_cache().await?;
        report_figure(&format!(
            "first failure of a cache that starts: {first:.0?}"
        ));
        ensure!(first < scaled(AT_ONCE), "{first:?}");
        for number in 0..KNOWN {
            let asked = Instant::now();
            let name = name(&format!("known-{number}"));
            let answer = self.client.ask(&name, RecordType::A).await?;
            ensure!(answer.metadata.response_code == ResponseCode::ServFail);
            ensure!(asked.elapsed() < scaled(AT_ONCE), "{:?}", asked.elapsed());
        }
        Ok(())
    }

    /// Waits until names that are not known fail at once.
    async fn expect_failures_at_once(&self, label: &str) {
        let number = Cell::new(0);
        eventually("a failure at once", LONG, async || {
            number.set(number.get() + 1);
            let asked = Instant::now();
            let name = name(&format!("{label}-{}", number.get()));
            let answer = self.client.ask(&name, RecordType::A).await?;
            ensure!(answer.metadata.response_code == ResponseCode::ServFail);
            ensure!(asked.elapsed() < scaled(AT_ONCE), "{:?}", asked.elapsed());
            anyhow::Ok(())
        })
        .await;
    }

    /// Checks that a name has so many addresses.
    async fn ensure_fresh(&self, name: &str, count: usize) -> Result<()> {
        let answer = self.client.ask(name, RecordType::A).await?;
        let found = addresses(&answer);
        ensure!(found.len() == count, "{name}: {found:?}");
        Ok(())
    }
}

/// Connections to the agent's listener.
#[derive(Debug)]
struct Connections {
    /// Reset because no session was live.
    reset: u64,
    /// Ended otherwise.
    others: u64,
    open: u64,
}

/// An answer of the cache.
struct Answer {
    is_known: bool,
    code: String,
    asked: Instant,
    elapsed: Duration,
}

impl Answer {
    async fn to(client: DnsClient, name: String, is_known: bool) -> Self {
        let asked = Instant::now();
        let answer = client.ask(&name, RecordType::A).await;
        let code = answer.map_or_else(
            |error| format!("{error:#}"),
            |answer| format!("{:?}", answer.metadata.response_code),
        );
        Self {
            is_known,
            code,
            asked,
            elapsed: asked.elapsed(),
        }
    }
}

/// The answers of an outage.
#[derive(Debug, Default)]
struct Seen {
    known: Tally,
    slowest_known: Duration,
    /// Answers for new names once it is known that the link is down.
    unknown: Tally,
    slowest: Duration,
    /// When the first new name was asked that failed at once.
    noticed: Option<Instant>,
}

/// Number of answers by code.
type Tally = BTreeMap<String, u64>;

impl Seen {
    fn add(&mut self, answer: Answer) {
        let Answer { code, elapsed, .. } = answer;
        if answer.is_known {
            self.slowest_known = self.slowest_known.max(elapsed);
            *self.known.entry(code).or_default() += 1;
            return;
        }
        if self.noticed.is_none() && code == SERVFAIL && elapsed < scaled(AT_ONCE) {
            self.noticed = Some(answer.asked);
        }
        if self.is_settled(answer.asked) {
            self.slowest = self.slowest.max(elapsed);
            *self.unknown.entry(code).or_default() += 1;
        }
    }

    /// Forgets what was seen of new names.
    fn forget_unknown(&mut self) {
        (self.noticed, self.slowest) = (None, Duration::ZERO);
        self.unknown.clear();
    }

    /// Returns whether agent and cache know that the link is down.
    fn is_settled(&self, now: Instant) -> bool {
        self.noticed.is_some_and(|noticed| now > noticed + SETTLE)
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}, the slowest {:.0?}; {:?}, the slowest {:.0?}",
            self.known, self.slowest_known, self.unknown, self.slowest
        )
    }
}

/// The cache of the test: node-cache itself where it is installed, else unbound, which can be had
/// from Debian and answers from expired entries, too.
#[derive(Debug, Clone, Copy)]
enum CacheProgram {
    NodeCache,
    Unbound,
}

impl CacheProgram {
    fn find() -> Result<Self, Skip> {
        if Tool::NodeCache.find().is_some() {
            return Ok(Self::NodeCache);
        }
        tunnel_tests::tools::require(&[Tool::Unbound]).map(|()| Self::Unbound)
    }

    fn name(self) -> &'static str {
        match self {
            Self::NodeCache => Tool::NodeCache.program(),
            Self::Unbound => Tool::Unbound.program(),
        }
    }

    /// Starts the cache and waits until it answers. Returns how long the first answer took.
    async fn start(self, scratch: &ScratchDir) -> Result<(Process, Duration)> {
        let program = match self {
            Self::NodeCache => node_cache(scratch).await?,
            Self::Unbound => {
                let file = scratch.file("unbound.conf", UNBOUND)?;
                let program = Program::tool(Tool::Unbound)?;
                program.args(["-d", "-p", "-c"]).arg(file)
            }
        };
        let running = program.start()?;
        let client = DnsClient::new(format!("{CACHE}:53").parse()?);
        let first = Cell::new(Duration::ZERO);
        eventually("an answer of the cache", LONG, async || {
            let asked = Instant::now();
            let answer = client.ask(&name("started"), RecordType::A).await;
            first.set(asked.elapsed());
            answer
        })
        .await;
        Ok((running, first.get()))
    }
}

/// Returns node-cache with the Corefile and the arguments of the rendered manifest. The test adds
/// the addresses, so that node-cache changes no interface and no rule.
async fn node_cache(scratch: &ScratchDir) -> Result<Program> {
    let render = Program::ours("tunnel-server")?.args(["render", "node-local-dns"]);
    let manifest = render
        .args(["--cluster-dns", "10.96.0.10"])
        .run()
        .await?
        .ok()?;
    let objects = documents(&manifest)?;
    let corefile = objects[2]["data"]["Corefile"]
        .as_str()
        .context("Corefile")?;
    let base = scratch.file("Corefile.base", corefile)?;
    let written = scratch.path().join("Corefile");
    let pod = &objects[3]["spec"]["template"]["spec"];
    let arguments = pod["containers"][0]["args"].as_array().context("args")?;
    let mut program = Program::tool(Tool::NodeCache)?;
    for argument in arguments {
        let argument = argument.as_str().context("an argument")?;
        program = match argument {
            "/etc/Corefile" => program.arg(&written),
            _ => program.arg(argument),
        };
    }
    let program = program.arg("-basecorefile").arg(base);
    Ok(program.args(["-setupinterface=false", "-setupiptables=false"]))
}

fn known_names() -> impl Iterator<Item = String> {
    (0..KNOWN).map(|number| name(&format!("known-{number}")))
}

fn name(service: &str) -> String {
    format!("{service}.default.svc.cluster.local")
}

/// How long the link is down.
fn cut_for() -> Duration {
    Duration::from_secs(Gear::current().pick(20, 600))
}

/// Addresses of the rendered texts.
const CACHE: &str = "169.254.20.10";
const LISTENER: &str = "169.254.20.11";
const KNOWN: u32 = 20;
/// Queries per second.
const PER_SECOND: u32 = 200;
/// Codes in the words of the DNS library.
const NOERROR: &str = "NoError";
const SERVFAIL: &str = "ServFail";
const AT_ONCE: Duration = Duration::from_millis(500);
/// Time in which node-cache finds that its upstream is down.
const SETTLE: Duration = Duration::from_secs(2);
/// The agent dials every 2 s while clients ask.
const BACK_WITHIN: Duration = Duration::from_secs(3);
const FRESH_WITHIN: Duration = Duration::from_secs(5);
const LONG: Duration = Duration::from_secs(30);

const UNBOUND: &str = r#"
server:
    interface: 169.254.20.10
    access-control: 0.0.0.0/0 allow
    do-daemonize: no
    use-syslog: no
    username: ""
    chroot: ""
    directory: "/"
    pidfile: ""
    module-config: "iterator"
    do-not-query-localhost: no
    local-zone: "cluster.local." nodefault
    serve-expired: yes
    serve-expired-ttl: 86400
    infra-host-ttl: 1
    infra-keep-probing: yes
forward-zone:
    name: "cluster.local."
    forward-addr: 169.254.20.11@1053
    forward-tcp-upstream: yes
"#;
