//! Guards that a busy machine does not affect: valgrind counts the instructions of the pure parts
//! of a request, and the allocations of whole requests.

use std::hint::black_box;
use std::io::{Write, stdout};
use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::BytesMut;
use http::{HeaderMap, HeaderValue, Method, Uri, header::HOST};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::task::JoinSet;
use tunnel_process::telemetry::{AuditOutput, AuditSettings};
use tunnel_proto::audit;
use tunnel_proto::relay::{Socket, relay};
use tunnel_proto::wire::frame::{self, STREAM_MESSAGE_MAX};
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_routing::decision::{RequestFacts, decide};
use tunnel_routing::destination::{RequestedDestination, Scheme};
use tunnel_routing::operation::{Operation, OperationSet, RequestedOperation};
use tunnel_routing::policy::rules::{
    CallerMatch, DestinationKind, Effect, Facts, NamedCaller, Rule, RuleLabel, RulePorts,
    RuleTable, Verdict,
};
use tunnel_routing::policy::{
    Access, AccessCaller, CallerIdentity, DefaultPorts, Listener, Policy, PortLists, PortPolicy,
    UnreadToken, authorize, locate,
};
use tunnel_routing::routes::{RouteNode, RouteTable};
use tunnel_tests::audit_events::AuditEvents;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::targets::Exporter;

use crate::client::{Caller, Endpoint};
use crate::machine::cpu_seconds;

/// Kinds of work that are counted.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Work {
    /// Encodes and decodes the header of a stream.
    Framing,
    /// Finds a node among 1,000 by name.
    Route,
    /// Decides the node and the target from the head of a request.
    Policy,
    /// Decides about an access by 100 rules, all of which are read to their last condition. The last one
    /// allows the access.
    Rules,
    /// Relays 1 KiB between two streams.
    Chunk,
    /// Sends a request over a new connection through server and agent. The count includes the
    /// caller and the target.
    Stream,
    /// Sends a request of 1 KiB over a kept connection to the target.
    Direct,
    /// The same through server and agent.
    Kept,
    /// The same with an audit log.
    Audited,
}

/// The largest part of the instructions of server and agent for a request over a kept connection that
/// the audit log may add.
const AUDIT_PART: f64 = 0.05;
const AUDITED: u32 = 500;
/// The longest time of a decision by 100 rules, in nanoseconds of a processor.
const DECISION: f64 = 1000.0;
const DECISIONS: u32 = 500_000;

/// The count, the kind of work, how often the work is repeated, and the limit for each repetition.
/// The limits are a tenth above the counts of a release build. Relaying a chunk must not allocate
/// at all.
const LIMITS: [(Count, &str, u32, f64); 7] = [
    (Count::Instructions, "framing", 1000, 1620.0),
    (Count::Instructions, "route", 1000, 1000.0),
    (Count::Instructions, "policy", 1000, 4300.0),
    (Count::Instructions, "rules", 1000, 15_200.0),
    (Count::Allocations, "rules", 1000, 0.01),
    (Count::Allocations, "chunk", 1000, 0.01),
    (Count::Allocations, "stream", 50, 240.0),
];

#[derive(Debug, Clone, Copy)]
enum Count {
    Instructions,
    Allocations,
}

/// Does one kind of work `times` times, in a process that valgrind watches.
#[derive(Debug, clap::Args)]
pub(crate) struct Worker {
    work: Work,
    times: u32,
}

impl Worker {
    pub(crate) async fn run(&self) -> Result<ExitCode> {
        AuditEvents::leave_out();
        match self.work {
            Work::Framing => framing(self.times)?,
            Work::Route => route(self.times)?,
            Work::Policy => policy(self.times)?,
            Work::Rules => rules(self.times)?,
            Work::Chunk => chunk(self.times).await?,
            Work::Stream => stream(self.times).await?,
            Work::Direct => {
                let exporter = Exporter::start("worker-1").await?;
                kept(exporter.addr(), "worker-1", self.times).await?;
            }
            Work::Kept => tunneled(self.times).await?,
            Work::Audited => {
                let scratch = ScratchDir::new()?;
                let settings = AuditSettings {
                    output: AuditOutput::File(scratch.path().join("audit.log")),
                    ..AuditSettings::default()
                };
                let _audit = audit::start(&settings, "server")?;
                tunneled(self.times).await?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn framing(times: u32) -> Result<()> {
    let port = Port::new(9100).context("a port")?;
    let header = StreamHeader::new(StreamKind::Target(Target::Node(port)));
    let mut buffer = BytesMut::new();
    for _ in 0..times {
        black_box(&header).encode(&mut buffer)?;
        let frame = frame::take(&mut buffer, STREAM_MESSAGE_MAX)?.context("a whole frame")?;
        black_box(StreamHeader::decode(&frame)?);
    }
    Ok(())
}

fn table() -> Result<RouteTable> {
    let names: Vec<NodeName> = (0..1000)
        .map(|number| format!("worker-{number}.site").parse())
        .collect::<Result<_, _>>()?;
    Ok(RouteTable::new(names.iter().map(|name| (name, &[][..]))))
}

fn route(times: u32) -> Result<()> {
    let (table, name) = (table()?, "worker-500.site".parse()?);
    for _ in 0..times {
        black_box(table.by_name(black_box(&name))?);
    }
    Ok(())
}

fn policy(times: u32) -> Result<()> {
    let table = table()?;
    let lists = PortLists {
        http: "9100, 80".parse().map_err(anyhow::Error::msg)?,
        https: "9443".parse().map_err(anyhow::Error::msg)?,
        localhost: "10266, 10267".parse().map_err(anyhow::Error::msg)?,
    };
    let ports = PortPolicy::of_lists(lists, Port::new(10264).into_iter().collect());
    let policy = Policy {
        rules: RuleTable::defaults(&DefaultPorts::default()).into(),
        ..ports.into()
    };
    let (method, uri) = (Method::GET, Uri::from_static("/metrics"));
    let mut headers = HeaderMap::new();
    headers.insert(HOST, HeaderValue::from_static("worker-500.site:9100"));
    for _ in 0..times {
        let facts = RequestFacts {
            method: &method,
            uri: &uri,
            headers: &headers,
            scheme: Scheme::Http,
            implied_port: None,
        };
        let requested = decide(black_box(&facts), &table)?;
        let access = Access {
            caller: AccessCaller::ANONYMOUS,
            destination: RequestedDestination::<()>::Node(requested),
            operation: RequestedOperation::Http {
                method: &method,
                path: uri.path(),
                may_be_upgrade: false,
            },
        };
        let mut access = locate(&policy.ports, access)?.access;
        policy.admit(&mut access, &table)?;
        let granted = authorize(&policy.rules.in_force, &access.facts);
        ensure!(black_box(granted).is_ok(), "the request is refused");
    }
    Ok(())
}

fn rules(times: u32) -> Result<()> {
    let named = (0..10).map(|number| NamedCaller {
        name: format!("caller-{number}").into(),
        who: CallerMatch::Certificate(format!("caller-{number}").into()),
    });
    let mut table = RuleTable {
        callers: named.collect(),
        ..RuleTable::default()
    };
    for number in 0..100 {
        let rule = Rule {
            callers: table.caller("caller-9"),
            operations: Some(OperationSet::OBSERVE),
            ports: Some(RulePorts {
                has_kubelet: true,
                ..RulePorts::default()
            }),
            ..Rule::new(&format!("rule-{number}"), Effect::Allow)
        };
        let label = |value: &str| RuleLabel {
            key: "tier".into(),
            value: value.into(),
        };
        table.rules.push(match number {
            99 => Rule {
                nodes: vec!["worker-*".parse()?],
                ..rule
            },
            _ if number % 2 == 0 => Rule {
                nodes: vec![format!("worker-{number}-*").parse()?],
                ..rule
            },
            _ => Rule {
                effect: Effect::Deny,
                labels: vec![label("pay")],
                ..rule
            },
        });
    }
    let node: NodeName = "worker-500.site".parse()?;
    let described = RouteNode {
        labels: [("tier".into(), "shop".into())].into(),
        ..RouteNode::edge(node.clone(), Vec::new())
    };
    let facts = Facts {
        listener: Listener::Https,
        identity: CallerIdentity::Certificate("caller-9".into()),
        has_delegation: false,
        token: UnreadToken::None,
        source: None,
        kind: DestinationKind::Node,
        node: Some(node),
        described: Some(Arc::new(described)),
        port: Port::new(10250),
        is_kubelet: true,
        operation: Operation::Metrics,
        without_upgrade: Operation::Metrics,
    };
    for _ in 0..times {
        let decision = table.decide(black_box(&facts));
        ensure!(black_box(decision).verdict == Verdict::Allow, "refused");
    }
    Ok(())
}

/// Returns the nanoseconds of a processor for a decision: the least of five rounds, since the caches are
/// those of all processes.
fn decision_time() -> Result<f64> {
    let own = std::process::id();
    (0..5).try_fold(f64::INFINITY, |least, _| {
        let before = cpu_seconds(own);
        rules(DECISIONS)?;
        let each = (cpu_seconds(own) - before) / f64::from(DECISIONS);
        anyhow::Ok(least.min(each * 1e9))
    })
}

async fn chunk(times: u32) -> Result<()> {
    let (mut near, mut left) = duplex(CHUNK);
    let (mut right, mut far) = duplex(CHUNK);
    let mut relaying = JoinSet::new();
    relaying.spawn(async move { relay(&mut Socket(&mut left), &mut Socket(&mut right)).await });
    let (sent, mut got) = ([7; CHUNK], [0; CHUNK]);
    for _ in 0..times {
        near.write_all(&sent).await?;
        far.read_exact(&mut got).await?;
    }
    Ok(())
}

async fn stream(times: u32) -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let wanted = RawRequest::get(&host, "/size/1024");
    for _ in 0..times {
        let reply = request(env.http(), &wanted).await?;
        ensure!(reply.status == 200, "{}", reply.text());
    }
    Ok(())
}

async fn tunneled(times: u32) -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let http = env.bound().http.context("no HTTP listener")?;
    kept(http, &host, times).await
}

async fn kept(address: SocketAddr, host: &str, times: u32) -> Result<()> {
    let mut caller = Caller::connect(&Endpoint {
        address,
        tls: None,
        host: host.into(),
        is_connect: false,
    })
    .await?;
    for _ in 0..times {
        caller.get(1024).await?;
    }
    Ok(())
}

/// Measures the time of a decision and counts all kinds of work. Fails when a figure is above its limit.
/// Without valgrind the function prints that the counts are skipped.
pub(crate) fn run() -> Result<ExitCode> {
    let mut figures = Figures { are_within: true };
    figures.show("rules", decision_time()?, "ns of a processor", DECISION)?;
    if Command::new("valgrind").arg("--version").output().is_err() {
        writeln!(stdout(), "skipped: valgrind is not installed")?;
        return Ok(figures.exit_code());
    }
    for (count, name, times, limit) in LIMITS {
        figures.show(name, count.each(name, times)?, count.unit(), limit)?;
    }
    let each = |name| Count::Instructions.each(name, AUDITED);
    let (direct, kept, audited) = (each("direct")?, each("kept")?, each("audited")?);
    let unit = format!(
        "of the {:.0} instructions of a request, which are {:.0}",
        kept - direct,
        audited - kept
    );
    let part = (audited - kept) / (kept - direct);
    figures.show("audit", part, &unit, AUDIT_PART)?;
    Ok(figures.exit_code())
}

/// Whether all figures so far are within their limits.
struct Figures {
    are_within: bool,
}

impl Figures {
    fn show(&mut self, what: &str, figure: f64, unit: &str, limit: f64) -> Result<()> {
        let is_within = figure <= limit;
        self.are_within &= is_within;
        let verdict = if is_within { "fine" } else { "too many" };
        writeln!(
            stdout(),
            "{what}: {figure:.3} {unit}, at most {limit}: {verdict}"
        )?;
        Ok(())
    }

    fn exit_code(&self) -> ExitCode {
        if self.are_within {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

impl Count {
    fn unit(self) -> &'static str {
        match self {
            Self::Instructions => "instructions",
            Self::Allocations => "allocations",
        }
    }

    /// Returns the count for each repetition. The difference of two runs does not contain the work that each
    /// run does once.
    fn each(self, work: &str, times: u32) -> Result<f64> {
        Ok((self.of(work, 2 * times)? - self.of(work, times)?) / f64::from(times))
    }

    /// Returns the count for a process that does `work` `times` times.
    fn of(self, work: &str, times: u32) -> Result<f64> {
        let (tool, out, mark) = match self {
            Self::Instructions => (
                "callgrind",
                "--callgrind-out-file=/dev/null",
                "Collected : ",
            ),
            Self::Allocations => ("dhat", "--dhat-out-file=/dev/null", " bytes in "),
        };
        let output = Command::new("valgrind")
            .args([&format!("--tool={tool}"), out])
            .arg(std::env::current_exe()?)
            .args(["work", work, &times.to_string()])
            .output()
            .context("run valgrind")?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "valgrind: {text}");
        let line = text.lines().find_map(|line| line.split_once(mark));
        let (_, rest) = line.with_context(|| format!("no count in {text}"))?;
        let count = rest.split_whitespace().next().unwrap_or_default();
        Ok(count.replace(',', "").parse()?)
    }
}

const CHUNK: usize = 1024;
