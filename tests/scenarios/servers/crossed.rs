//! Two agents of one name that arrive at two servers at once.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use futures_util::future::try_join_all;
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;

use super::standalone::Pair;
use crate::scripted::{Admission, ScriptedAgent, agent_key};

#[tokio::test(flavor = "multi_thread")]
async fn of_two_agents_that_arrive_at_once_one_stays() -> Result<()> {
    let rounds = Gear::current().pick(1, 10);
    for round in 0..rounds {
        // Ten sessions a minute yield to one server.
        let pair = Pair::start().await?;
        // Each seed has a node of its own, and its agents arrive at different moments.
        let seeds = (0..SEEDS).map(|seed| contend(&pair, round * SEEDS + seed));
        try_join_all(seeds).await?;
    }
    Ok(())
}

async fn contend(pair: &Pair, seed: u64) -> Result<()> {
    let node = format!("worker-{seed}");
    let (one, other) = if seed.is_multiple_of(2) {
        (&pair.a, &pair.b)
    } else {
        (&pair.b, &pair.a)
    };
    let (one_key, other_key) = (agent_key(one, &node)?, agent_key(other, &node)?);
    let second = async {
        sleep(STAGGER.mul_f64((seed % SEEDS) as f64)).await;
        ScriptedAgent::handshake(other, other_key, &node, [2; 16]).await
    };
    let first = ScriptedAgent::handshake(one, one_key, &node, [1; 16]);
    let (first, second) = tokio::join!(first, second);
    let (first, second) = (first?, second?);
    let admitted = Instant::now();
    let name: NodeName = node.parse()?;
    eventually(&format!("one owner of {node}"), ONE_OWNER, async || {
        let owners = owners(one, &name) + owners(other, &name);
        ensure!(owners == 1, "{owners} owners");
        Ok(())
    })
    .await;
    let settled = admitted.elapsed();
    // One of the two has lost the name, and the other one keeps its session.
    match tokio::join!(end_of(&first), end_of(&second)) {
        (Some(CloseCode::NameInUse), None) | (None, Some(CloseCode::NameInUse)) => {}
        ends => bail!("seed {seed}: {ends:?} after {settled:?}"),
    }
    let owners = owners(one, &name) + owners(other, &name);
    ensure!(owners == 1, "seed {seed}: {owners} owners later");
    Ok(())
}

/// Returns the number of sessions that the server has for the node.
fn owners(env: &TestEnv, node: &NodeName) -> usize {
    let sessions = env.registry().of_node(node);
    let owners = sessions.iter().filter(|session| !session.is_withdrawn());
    owners.count()
}

/// Returns why an agent was refused, or why its session ended within [`END`].
async fn end_of(admission: &Admission) -> Option<CloseCode> {
    match admission {
        Admission::Refused(code, _) => Some(*code),
        Admission::Admitted(agent) => {
            let closed = timeout(scaled(END), agent.closed()).await;
            closed.ok().map(|reason| reason.code)
        }
    }
}

/// Pairs of agents at once.
const SEEDS: u64 = 20;
/// Difference of the arrivals of two seeds. Servers announce new sessions within 100 ms.
const STAGGER: Duration = Duration::from_millis(8);
/// Longest time for which two agents may own one name.
const ONE_OWNER: Duration = Duration::from_secs(2);
/// Time for the close message of a session that has lost its name.
const END: Duration = Duration::from_millis(500);
