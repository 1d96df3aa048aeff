//! Measures scrapes and exec-like upgrades of a node while 64 readers of the same node never read:
//! `cargo run --release -p tunnel-bench --bin stalls` (after the two binaries were built with
//! --release). Prints a table and fails if a request fails.

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_tests::client::{
    ByteStream, ClientTls, Endpoint, KeepAliveClient, RawRequest, UpgradeClient, request,
};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::stats::{millis, percentile as at};
use tunnel_tests::targets::FakeKubelet;

const NODE: &str = "worker-1";
const READERS: usize = 64;
const SCRAPES: usize = 1000;
const UPGRADES: usize = 100;
/// Callers that scrape at the same time.
const SCRAPERS: usize = 4;
const PAGE: usize = 64 * 1024;
const ROUNDS: usize = 3;
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| transport | readers through | round | scrapes p50 / p99 ms without | with | p99 ratio | upgrades p99 ms without | with | failed |"
    )?;
    writeln!(
        out,
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )?;
    let mut failed = 0;
    for transport in ["quic", "h2"] {
        for through in [Through::Endpoint, Through::Service] {
            let mut stack = Stack::start(transport).await?;
            for round in 1..=ROUNDS {
                let without = stack.work().await;
                let readers = match stack.stall(through).await {
                    Ok(readers) => readers,
                    Err(error) => {
                        writeln!(std::io::stderr(), "{}", stack.server.process())?;
                        return Err(error);
                    }
                };
                let with = stack.work().await;
                drop(readers);
                failed += without.failed + with.failed;
                writeln!(
                    out,
                    "| {transport} | {through:?} | {round} | {} / {} | {} / {} | {:.2} | {} | {} | {} |",
                    millis(at(&without.scrapes, 0.5)),
                    millis(at(&without.scrapes, 0.99)),
                    millis(at(&with.scrapes, 0.5)),
                    millis(at(&with.scrapes, 0.99)),
                    at(&with.scrapes, 0.99).as_secs_f64()
                        / at(&without.scrapes, 0.99).as_secs_f64(),
                    millis(at(&without.upgrades, 0.99)),
                    millis(at(&with.upgrades, 0.99)),
                    without.failed + with.failed,
                )?;
                stack.quiet().await;
            }
        }
    }
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[derive(Debug, Clone, Copy)]
enum Through {
    Endpoint,
    Service,
}

/// The two binaries, and kubelets with and without TLS behind the agent.
struct Stack {
    server: Server,
    _agent: Process,
    service: SocketAddr,
    kubelet: FakeKubelet,
    plain: FakeKubelet,
    _scratch: ScratchDir,
}

/// Durations of the requests of one measurement.
struct Work {
    scrapes: Vec<Duration>,
    upgrades: Vec<Duration>,
    failed: usize,
}

impl Stack {
    async fn start(transport: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let kubelet = FakeKubelet::start(NODE).await?;
        let plain = FakeKubelet::start_on(([127, 0, 0, 1], 0).into(), NODE, None).await?;
        let target = plain.addr().port();
        let services = format!(
            "services:\n- name: kubelet\n  listen: 127.0.0.1:0\n  node: {NODE}\n  target: \"{target}\"\n"
        );
        let file = scratch.file("server.yaml", services)?;
        let setup = ServerSetup::on_loopback(&scratch.path().join("server")).args(&[
            "--config",
            &file.to_string_lossy(),
            "--https-proxy-ports",
            &kubelet.addr().port().to_string(),
            "--proxy-port-listen",
            "off",
        ]);
        let mut server = setup.start().await?;
        let service = server
            .process()
            .wait_for_line("the service", WAIT_TIMEOUT, service_address)
            .await?;
        let token = server.token(NODE, None).await?;
        let agents = server.address(Listener::Agents);
        let agent = AgentSetup::on_loopback(NODE, agents, &scratch.path().join("agent"))
            .args(&["--token", &token, "--transport", transport])
            .start()?;
        server.wait_until_connected(&[NODE]).await;
        Ok(Self {
            server,
            _agent: agent,
            service,
            kubelet,
            plain,
            _scratch: scratch,
        })
    }

    fn endpoint(&self) -> Result<Endpoint> {
        let tls = ClientTls::insecure(NODE, None)?;
        Ok(Endpoint::tls(self.server.address(Listener::Https), tls))
    }

    fn host(&self) -> String {
        format!("{NODE}:{}", self.kubelet.addr().port())
    }

    /// Starts readers that request an endless answer and read none of it. Returns when all targets
    /// are blocked.
    async fn stall(&self, through: Through) -> Result<Vec<ByteStream>> {
        let mut readers = Vec::new();
        for _ in 0..READERS {
            let (endpoint, host) = match through {
                Through::Endpoint => (self.endpoint()?, self.host()),
                Through::Service => (Endpoint::plain(self.service), NODE.to_owned()),
            };
            let mut reader = ByteStream::connect(endpoint).await?;
            let head = format!("GET /follow HTTP/1.1\r\nHost: {host}\r\n\r\n");
            reader.send(head.as_bytes()).await?;
            readers.push(reader);
        }
        let target = match through {
            Through::Endpoint => &self.kubelet,
            Through::Service => &self.plain,
        };
        eventually("all followers", WAIT_TIMEOUT, async || {
            (target.followers() == READERS).then_some(())
        })
        .await;
        // More than the windows and the sockets can buffer.
        let line = "x".repeat(512 * 1024);
        for _ in 0..24 {
            target.emit(&line);
        }
        // Blocked: no data arrives for half a second.
        let last = std::sync::atomic::AtomicU64::new(0);
        eventually(
            "the readers' answers to be blocked",
            WAIT_TIMEOUT,
            async || {
                tokio::time::sleep(Duration::from_millis(500)).await;
                let nodes = self.server.nodes().await.ok()?;
                let received = nodes.first()?["bytesIn"].as_u64()?;
                let before = last.swap(received, std::sync::atomic::Ordering::Relaxed);
                let still = received == before && received > 0;
                still.then_some(())
            },
        )
        .await;
        Ok(readers)
    }

    /// Runs the scrapes and the upgrades in parallel.
    async fn work(&self) -> Work {
        let (scrapes, upgrades) = tokio::join!(self.scrape(), self.upgrade());
        let mut work = Work {
            scrapes: Vec::new(),
            upgrades: Vec::new(),
            failed: 0,
        };
        for (results, times) in [(scrapes, &mut work.scrapes), (upgrades, &mut work.upgrades)] {
            for result in results {
                match result {
                    Ok(took) => times.push(took),
                    Err(error) => {
                        work.failed += 1;
                        let _no_receiver = writeln!(std::io::stderr(), "{error:#}");
                    }
                }
            }
            times.sort();
        }
        work
    }

    async fn scrape(&self) -> Vec<Result<Duration>> {
        let mut callers = JoinSet::new();
        for _ in 0..SCRAPERS {
            let (endpoint, host) = (self.endpoint(), self.host());
            callers.spawn(async move {
                let mut results = Vec::new();
                let get = RawRequest::new("GET", &format!("/size/{PAGE}"), &host);
                let client = async { KeepAliveClient::connect(endpoint?).await };
                let mut client = match client.await {
                    Ok(client) => client,
                    Err(error) => return vec![Err(error)],
                };
                for _ in 0..SCRAPES / SCRAPERS {
                    let asked = Instant::now();
                    let reply = timeout(WAIT_TIMEOUT, client.request(&get)).await;
                    results.push(check_reply(reply.context("no answer").flatten(), asked));
                }
                results
            });
        }
        callers.join_all().await.into_iter().flatten().collect()
    }

    async fn upgrade(&self) -> Vec<Result<Duration>> {
        let mut results = Vec::new();
        for _ in 0..UPGRADES {
            let asked = Instant::now();
            let one = async {
                let stream = UpgradeClient::spdy(&self.host(), "/exec/ns/pod/c?script=echo")
                    .connect(self.endpoint()?)
                    .await?
                    .switched()?;
                let reading = stream.talk(&[7; 4096]).await?;
                ensure!(
                    reading.bytes == [7; 4096],
                    "{} bytes came back",
                    reading.bytes.len()
                );
                Ok(asked.elapsed())
            };
            results.push(
                timeout(WAIT_TIMEOUT, one)
                    .await
                    .context("no answer")
                    .flatten(),
            );
        }
        results
    }

    /// Waits until the readers' streams are gone.
    async fn quiet(&mut self) {
        eventually(
            "the readers' streams to be gone",
            WAIT_TIMEOUT,
            async || {
                let nodes = self.server.nodes().await?;
                let streams = nodes
                    .iter()
                    .map(|node| node["streams"].as_u64())
                    .next()
                    .flatten();
                ensure!(streams == Some(0), "{streams:?}");
                let endpoint = self.endpoint()?;
                let reply = request(endpoint, &RawRequest::get(&self.host(), "/healthz")).await?;
                ensure!(reply.status == 200, "{}", reply.text());
                Ok(())
            },
        )
        .await;
    }
}

fn check_reply(reply: Result<tunnel_tests::client::HttpReply>, asked: Instant) -> Result<Duration> {
    let reply = reply?;
    ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    ensure!(reply.body.len() == PAGE, "{} bytes", reply.body.len());
    Ok(asked.elapsed())
}

fn service_address(line: &str) -> Option<SocketAddr> {
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = line.get("fields").unwrap_or(&line);
    (fields["message"] == "listening" && fields["listener"] == "service")
        .then(|| fields["address"].as_str()?.parse().ok())
        .flatten()
}
