//! Wrong clocks of servers and agents, as processes: what works, what is reported, and that nothing is
//! destroyed. `docs/explanation/promises.md` has the table.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use tunnel_tests::cluster::{Cluster, Kind};
use tunnel_tests::eventually::eventually;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{
    AgentSetup, Listener, Peering, Process, ScratchDir, Server, ServerSetup, ShiftedClock, Signal,
};
use tunnel_tests::tools::or_skip;

/// A row of the table.
#[derive(Debug, Clone, Copy)]
struct Row {
    is_server: bool,
    clock: Clock,
    /// What the agent reports, or `None` if it connects.
    refusal: Option<&'static str>,
}

#[derive(Debug, Clone, Copy)]
enum Clock {
    /// In January 1970.
    Epoch,
    /// Ahead by this many seconds.
    Ahead(i64),
}

impl Clock {
    fn seconds_ahead(self) -> i64 {
        match self {
            Self::Epoch => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                let now = i64::try_from(now.unwrap_or_default().as_secs());
                DAY - now.unwrap_or_default()
            }
            Self::Ahead(seconds) => seconds,
        }
    }
}

/// The certificate of the agent and an unused join token are two hours old.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_clock_of_a_server_or_an_agent_is_reported_and_destroys_nothing() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let Some(shifted) = or_skip(ShiftedClock::build(scratch.path())) else {
        return Ok(());
    };
    for (number, row) in ROWS.into_iter().enumerate() {
        let folder = scratch.path().join(number.to_string());
        std::fs::create_dir(&folder)?;
        let checked = check(&shifted, &folder, row).await;
        checked.with_context(|| format!("{row:?}"))?;
    }
    Ok(())
}

async fn check(shifted: &ShiftedClock, folder: &Path, row: Row) -> Result<()> {
    let setup = ServerSetup::on_loopback(&folder.join("server"));
    let server = shifted.server(setup.clone(), EARLIER).start().await?;
    let address = server.address(Listener::Agents);
    let agent = |node: &str| AgentSetup::on_loopback(node, address, &folder.join(node));
    let token = server.token("worker-1", None).await?;
    let unused = ["token", "create", "--node", "worker-2", "--ttl", "24h"];
    let unused = server.verb(&unused)?.run().await?.ok()?;
    let first = agent("worker-1").args(&["--token", &token]);
    let first = shifted.agent(first, EARLIER).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    stop(server, vec![first]).await?;

    let ahead = row.clock.seconds_ahead();
    let [of_server, of_agent] = if row.is_server {
        [ahead, 0]
    } else {
        [0, ahead]
    };
    let server = shifted.server(setup.clone(), of_server).start().await?;
    let mut wrong = shifted.agent(agent("worker-1"), of_agent).start()?;
    match row.refusal {
        None => server.wait_until_connected(&["worker-1"]).await,
        Some(refusal) => {
            let says = |line: &str| line.contains(refusal).then_some(());
            wrong.wait_for_line(refusal, LIMIT, says).await?;
            server.wait_until_connected(&[]).await;
        }
    }
    stop(server, vec![wrong]).await?;

    // With right clocks everything is as before.
    let server = setup.start().await?;
    let _agents = [
        agent("worker-1").start()?,
        agent("worker-2")
            .args(&["--token", unused.trim()])
            .start()?,
    ];
    server.wait_until_connected(&["worker-1", "worker-2"]).await;
    Ok(())
}

async fn stop(server: Server, agents: Vec<Process>) -> Result<()> {
    for mut process in agents.into_iter().chain([server.into_process()]) {
        process.signal(Signal::Term)?;
        process.end(LIMIT).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_of_two_servers_that_are_90_s_apart_are_a_condition_at_both() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let Some(shifted) = or_skip(ShiftedClock::build(scratch.path())) else {
        return Ok(());
    };
    let peering = Peering::new(2, scratch.path());
    let right = peering.setup(0)?.start().await?;
    let wrong = shifted.server(peering.setup(1)?, 90).start().await?;
    says(&right, "behind that of server s1").await;
    says(&wrong, "ahead of that of server s0").await;
    right.verb(&["ca", "rotate"])?.run().await?.ok()?;
    let next = right.verb(&["ca", "rotate", "--next"])?.run().await?;
    ensure!(next.err.contains("behind that of server s1"), "{next}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn clock_that_differs_from_the_api_server_is_a_condition_until_it_is_right() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let Some(shifted) = or_skip(ShiftedClock::build(scratch.path())) else {
        return Ok(());
    };
    let cluster = Cluster::start(Kind::FakeApiServer).await?;
    let cluster = cluster.context("a stand-in")?;
    let kubeconfig = cluster.server_kubeconfig()?;
    let setup = ServerSetup::in_cluster(&scratch.path().join("a"), &kubeconfig);
    let setup = setup.args(&["--namespace", "kube-system"]);
    let server = shifted.server(setup.clone(), -90).start().await?;
    says(&server, "behind that of the API server").await;
    stop(server, Vec::new()).await?;
    let server = setup.start().await?;
    let meta = server.address(Listener::Meta);
    eventually("a ready server", LIMIT, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        ensure!(!page.contains("[!] clock"), "{page}");
        Ok(())
    })
    .await;
    Ok(())
}

/// Waits until the server reports a difference of about 90 s.
async fn says(server: &Server, text: &str) {
    let meta = server.address(Listener::Meta);
    eventually(text, LIMIT, async || {
        let page = meta_page(meta, "/readyz?verbose").await?;
        let line = page.lines().find(|line| line.contains("[!] clock"));
        let line = line.with_context(|| page.clone())?;
        ensure!(line.contains(text) && line.contains("1m "), "{line}");
        Ok(())
    })
    .await;
}

const DAY: i64 = 86_400;
const ROWS: [Row; 8] = [
    row(true, Clock::Epoch, Some("expired")),
    row(true, Clock::Ahead(40 * DAY), Some("not valid yet")),
    row(true, Clock::Ahead(-3600), None),
    row(true, Clock::Ahead(90), None),
    row(false, Clock::Epoch, Some("not valid yet")),
    row(false, Clock::Ahead(40 * DAY), Some("expired")),
    row(false, Clock::Ahead(-3600), Some("not valid yet")),
    row(false, Clock::Ahead(90), None),
];

const fn row(is_server: bool, clock: Clock, refusal: Option<&'static str>) -> Row {
    Row {
        is_server,
        clock,
        refusal,
    }
}

/// The clock of the first connection.
const EARLIER: i64 = -7200;
/// Limit for a start, and for a report.
const LIMIT: Duration = Duration::from_secs(20);
