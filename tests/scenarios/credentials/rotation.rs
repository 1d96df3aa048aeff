//! F20: the operator's CA is replaced in three steps: the old CA, both, the new CA. The server and
//! two agents reload in all six orders.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::load::Load;
use tunnel_tests::targets::Exporter;

use super::credential_files::Files;

const NODES: [&str; 2] = ["worker-1", "worker-2"];
const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];

/// A process that reads credential files: the server, or one of two agents.
struct Party<'a> {
    bundle: PathBuf,
    leaf: &'static str,
    is_server: bool,
    reload: Box<dyn Fn() + 'a>,
}

#[tokio::test(flavor = "multi_thread")]
async fn f20_ca_is_replaced_in_all_six_orders_without_a_failed_request() -> Result<()> {
    let mut files = Files::new()?;
    let env = files.env().await?;
    let exporter = Exporter::start("worker-1").await?;
    let mut agents: Vec<Agent> = Vec::new();
    for node in NODES {
        agents.push(files.agent(&env, node).await?);
    }
    let hosts = NODES.map(|node| format!("{node}:{}", exporter.addr().port()));
    let load = Load::start(env.http(), &hosts, 1).await?;
    for order in ORDERS {
        let next = TestCa::new("next")?;
        let parties = parties(&files, &env, &agents);
        let both = format!("{}{}", files.ca.pem(), next.pem());
        for party in order.map(|index| &parties[index]) {
            replace(&party.bundle, both.as_bytes())?;
            settled(&load, party).await?;
        }
        let leaves_since = SystemTime::now();
        for party in order.map(|index| &parties[index]) {
            let leaf = if party.is_server {
                Leaf::server()
            } else {
                Leaf::agent(party.leaf)
            };
            next.issue(&leaf)?.write(files.scratch.path(), party.leaf)?;
            settled(&load, party).await?;
        }
        // A party that trusts only the new CA rejects old leaves, so each node must have a session
        // with a new leaf first.
        for node in NODES {
            moved(&env, node, leaves_since).await;
        }
        for party in order.map(|index| &parties[index]) {
            replace(&party.bundle, next.pem().as_bytes())?;
            settled(&load, party).await?;
        }
        drop(parties);
        files.ca = next;
    }
    load.end().await?.check()?;
    // The remaining files work for a new agent.
    let _late = files.agent(&env, "worker-3").await?;
    Ok(())
}

fn parties<'a>(files: &Files, env: &'a TestEnv, agents: &'a [Agent]) -> Vec<Party<'a>> {
    let server = Party {
        bundle: files.path("server-ca.pem"),
        leaf: "server",
        is_server: true,
        reload: Box::new(|| env.reload()),
    };
    let agent = |index: usize| Party {
        bundle: files.path(&format!("{}-ca.pem", NODES[index])),
        leaf: NODES[index],
        is_server: false,
        reload: Box::new(move || agents[index].reload()),
    };
    vec![server, agent(0), agent(1)]
}

/// Makes a party reload its files, and waits until 20 more requests have been answered.
async fn settled(load: &Load, party: &Party<'_>) -> Result<()> {
    (party.reload)();
    let before = load.answered();
    eventually("requests go on", WAIT_TIMEOUT, async || {
        (load.answered() > before + 20).then_some(())
    })
    .await;
    Ok(())
}

/// Waits until a node has a session that began after `leaves_since`. Such a session uses a new
/// leaf.
async fn moved(env: &TestEnv, node: &str, leaves_since: SystemTime) {
    let what = format!("{node} moves to its new certificate");
    eventually(&what, Duration::from_secs(20), async || {
        let sessions = env.registry().of_node(&node.parse()?);
        let newest = sessions.iter().find(|session| !session.is_withdrawn());
        let newest = newest.context("no session")?;
        ensure!(newest.since >= leaves_since, "still the old one");
        Ok(())
    })
    .await;
}
