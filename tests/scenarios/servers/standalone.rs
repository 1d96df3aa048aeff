//! Two servers without a cluster that share a CA and nothing else: a join token of one enrolls at
//! the other, a node is reached over either, and a revocation holds at both.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_server::admin::revoke_node;
use tunnel_server::ca::{CaMaterial, transfer};
use tunnel_server::config::RawConfig;
use tunnel_server::store::data_dir::DataDir;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, next_loopback};
use tunnel_tests::targets::Exporter;

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
        let page = meta_page(env.bound().meta, path).await?;
        let groups: Value = serde_json::from_str(&page)?;
        let holders = [0, 1].map(|at| &groups[at]["labels"]["__meta_tunnel_server"]);
        ensure!(holders == ["b", "a"], "{page}");
    }
    pair.a.stop_server().await?;
    served(&pair.b, "worker-1", &exporter).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn node_revoked_at_one_server_is_out_at_the_other_within_10_s() -> Result<()> {
    let pair = Pair::start().await?;
    let _agent = pair.enroll("worker-1", &pair.a, &pair.b).await?;
    let node = "worker-1".parse()?;
    // As the verb does at A. The agent's session is at B.
    revoke_node(pair.a.revocations(), pair.a.tokens(), &node)?;
    let at_a = pair.a.revocations().of_node(&node);
    eventually("the node is out at B", WAIT_TIMEOUT, async || {
        let at_b = pair.b.revocations().of_node(&node);
        ensure!(at_b.is_some() && at_b == at_a, "{at_b:?}, not {at_a:?}");
        let sessions = pair.b.registry().of_node(&node);
        let is_out = sessions.iter().all(|session| session.is_withdrawn());
        ensure!(is_out, "still connected");
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
        let ca = CaMaterial::generate(std::time::SystemTime::now())?;
        let [at_a, at_b] = [next_loopback(), next_loopback()].map(|ip| Listener::Peers.on(ip));
        let pair = Self {
            a: server(&ca, "a", at_a, format!("b={at_b}")).await?,
            b: server(&ca, "b", at_b, format!("a={at_a}")).await?,
        };
        for env in [&pair.a, &pair.b] {
            eventually("the servers are connected", WAIT_TIMEOUT, async || {
                let connected = "tunnel_server_peers{state=\"connected\"}";
                ensure!(env.metric(connected).await? == 1, "not connected");
                anyhow::Ok(())
            })
            .await;
        }
        Ok(pair)
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

async fn server(ca: &CaMaterial, name: &str, at: SocketAddr, peer: String) -> Result<TestEnv> {
    let mut imported = Ok(());
    let env = TestEnv::start_with(|settings: &mut RawConfig| {
        imported = import(settings.data_dir.as_deref(), ca);
        settings.replica_name = Some(name.into());
        settings.peer_listen = Some(at.to_string());
        settings.peers = vec![peer];
    });
    let env = env.await?;
    imported?;
    Ok(env)
}

fn import(data_dir: Option<&str>, ca: &CaMaterial) -> Result<()> {
    let data_dir = data_dir.context("no data directory")?;
    Ok(transfer::import(&DataDir::open(data_dir.as_ref())?, ca)?)
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
