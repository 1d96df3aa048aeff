//! Two servers without a cluster that share a CA and nothing else: a join token of one enrolls at
//! the other, a node is reached over either, and a revocation holds at both.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_ca::revocation::OrderAction;
use tunnel_proto::wire::name::NodeName;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::Peering;
use tunnel_tests::targets::Exporter;

use crate::scripted::ScriptedAgent;

#[tokio::test(flavor = "multi_thread")]
async fn token_of_one_server_enrolls_at_the_other_and_each_serves_the_others_nodes() -> Result<()> {
    let mut pair = Pair::start().await?;
    // Each agent has a token of one server and a session with the other one.
    let _first = pair.enroll("worker-1", &pair.a, &pair.b).await?;
    let _second = pair.enroll("worker-2", &pair.b, &pair.a).await?;
    let exporter = Exporter::start("page").await?;
    for env in [&pair.a, &pair.b] {
        for node in ["worker-1", "worker-2"] {
            served(env, node, &exporter).await;
        }
        // Each server lists the nodes of both, worker-1 at b and worker-2 at a.
        let path = "/sd/prometheus?port=9100&connected=true";
        let page = meta_page(env.meta(), path).await?;
        let groups: Value = serde_json::from_str(&page)?;
        let holders = [0, 1].map(|at| &groups[at]["labels"]["__meta_tunnel_server"]);
        ensure!(holders == ["s1", "s0"], "{page}");
    }
    pair.a.stop_server().await?;
    served(&pair.b, "worker-1", &exporter).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn node_revoked_at_one_server_is_out_at_the_other_within_2_s() -> Result<()> {
    let pair = Pair::start().await?;
    let _agent = pair.enroll("worker-1", &pair.a, &pair.b).await?;
    let node = "worker-1".parse()?;
    // As the verb does at A. The agent's session is at B.
    let nodes = std::slice::from_ref(&node);
    let revocations = pair.a.revocations();
    let began = Instant::now();
    revocations.order(OrderAction::Revoke, nodes, SystemTime::now());
    let at_a = pair.a.revocations().of_node(&node);
    eventually("the node is out at B", WAIT_TIMEOUT, async || {
        let at_b = pair.b.revocations().of_node(&node);
        ensure!(at_b.is_revoked && at_b == at_a, "{at_b:?}, not {at_a:?}");
        let sessions = pair.b.registry().of_node(&node);
        let is_out = sessions.iter().all(|session| session.is_withdrawn());
        ensure!(is_out, "still connected");
        anyhow::Ok(())
    })
    .await;
    let took = began.elapsed();
    ensure!(took <= scaled(Duration::from_secs(2)), "{took:?}");
    Ok(())
}

/// The clock of A was wrong: its orders count by their numbers, and one command at B ends them all.
#[tokio::test(flavor = "multi_thread")]
async fn orders_of_a_server_with_a_wrong_clock_are_ended_by_one_command_at_another() -> Result<()> {
    let pair = Pair::start().await?;
    let names = (0..50).map(|number| format!("worker-{number}").parse());
    let names: Vec<NodeName> = names.collect::<Result<_, _>>()?;
    let far = SystemTime::now() + Duration::from_secs(1_000_000_000);
    let [a, b] = [&pair.a, &pair.b].map(TestEnv::revocations);
    a.order(OrderAction::Revoke, &names, far);
    eventually("the orders at B", WAIT_TIMEOUT, async || {
        let count = b.in_force().len();
        ensure!(count == names.len(), "{count}");
        anyhow::Ok(())
    })
    .await;
    let ended = b.order(OrderAction::Unrevoke, &names, SystemTime::now());
    ensure!(ended.len() == names.len());
    eventually("their end at A", WAIT_TIMEOUT, async || {
        let count = a.in_force().len();
        ensure!(count == 0 && a.all() == b.all(), "{count}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Nobody knows whether the agent is connected, which is not the same as a node that does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn node_that_only_a_server_knew_that_is_gone_is_listed_as_unknown() -> Result<()> {
    let mut pair = Pair::start().await?;
    let _agent = ScriptedAgent::connect(&pair.a, "worker-1").await?;
    let of_b = pair.b.meta();
    let listed = async || -> Result<Value> {
        let document: Vec<Value> = serde_json::from_str(&meta_page(of_b, "/nodes").await?)?;
        // A server that is about to leave still knows of a node that left it; no other one lists that.
        document.into_iter().next().context("no node is listed")
    };
    eventually("the node at B", WAIT_TIMEOUT, async || {
        let node = listed().await?;
        ensure!(
            node["connected"] == true && node["server"] == "s0",
            "{node}"
        );
        anyhow::Ok(())
    })
    .await;
    pair.a.stop_server().await?;
    eventually("the loss of its server", WAIT_TIMEOUT, async || {
        let node = listed().await?;
        let gone = &node["goneServer"];
        ensure!(
            node["node"] == "worker-1" && node["connected"] == false,
            "{node}"
        );
        ensure!(gone["name"] == "s0" && gone["since"].is_string(), "{node}");
        anyhow::Ok(())
    })
    .await;
    // Its agent comes to B and leaves that: now its state is known.
    let agent = ScriptedAgent::connect(&pair.b, "worker-1").await?;
    pair.b.connected("worker-1").await;
    agent.leave().await;
    eventually("the node is away", WAIT_TIMEOUT, async || {
        let node = listed().await?;
        ensure!(
            node["connected"] == false && node["goneServer"].is_null(),
            "{node}"
        );
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Two connected servers.
pub(super) struct Pair {
    pub(super) a: TestEnv,
    pub(super) b: TestEnv,
}

impl Pair {
    pub(super) async fn start() -> Result<Self> {
        let mut servers = Peering::in_process(2)
            .start_in_process(|_number, _settings| {})
            .await?;
        let b = servers.pop().context("no server")?;
        let a = servers.pop().context("no server")?;
        Ok(Self { a, b })
    }

    /// Starts an agent with a token of `creator` that has one session, with `holder`.
    async fn enroll(&self, node: &str, creator: &TestEnv, holder: &TestEnv) -> Result<Agent> {
        let config = creator.agent_config_with(node, |settings| {
            settings.server = vec![holder.bound().agents.to_string()];
            settings.replicas = Some("1".into());
        })?;
        let agent = Agent::start(config).await?;
        holder.connected(node).await;
        Ok(agent)
    }
}

async fn served(env: &TestEnv, node: &str, exporter: &Exporter) {
    let host = format!("{node}:{}", exporter.addr().port());
    eventually(&format!("{node} is reached"), WAIT_TIMEOUT, async || {
        let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
        anyhow::Ok(())
    })
    .await;
}
