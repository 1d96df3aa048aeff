//! What the command `ping` asks the running server: whether the agent of a node answers now, and over
//! which sessions.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::transport::Session;
use tunnel_proto::wire::name::NodeName;

use super::status::NodeSources;
use tunnel_store::data_dir::rfc3339;

/// The answers of a node's agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PingReport {
    pub node: String,
    /// This server.
    pub own: String,
    /// The server that carries requests to the node, if there are several servers.
    pub replica: Option<String>,
    /// The sessions of the node with this server, the one that takes new streams first.
    pub sessions: Vec<PingedSession>,
}

/// A session, and its answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PingedSession {
    /// Number of the session at this server, as in the logs.
    pub session: u64,
    pub transport: String,
    /// Source address of the session.
    pub address: String,
    /// `live`, or `suspect` while the agent does not respond.
    pub state: String,
    /// Time at which the session was admitted, RFC 3339.
    pub connected_since: String,
    /// Smoothed round-trip time, in milliseconds.
    pub rtt_millis: f64,
    /// Time after which the agent answered the probe, in milliseconds. `None` if it did not answer in
    /// time.
    pub answered_millis: Option<f64>,
}

/// Probes the sessions of a node. Returns `None` if no node has the name.
pub(super) async fn ping(sources: &NodeSources, node: &NodeName) -> Option<PingReport> {
    let sessions = sources.sessions.as_ref()?;
    let lookup = sources.clone();
    let name = node.clone();
    let status = tokio::task::spawn_blocking(move || lookup.of_node(&name)).await;
    let status = status.ok().flatten()?;
    let mut agents = sessions.registry.of_node(node);
    // Stable: newer sessions stay before older ones.
    agents.sort_by_key(|agent| !agent.is_routable());
    let probes = agents.iter().map(|agent| {
        let session = agent.session.clone();
        async move { answer_time(&session).await }
    });
    let answers = futures_util::future::join_all(probes).await;
    let pinged = agents.iter().zip(answers).map(|(agent, answer)| {
        let stats = agent.session.stats();
        PingedSession {
            session: agent.id.0,
            transport: agent.session.transport().to_string(),
            address: stats.remote.to_string(),
            state: agent
                .suspect_reason()
                .map_or("live", |_| "suspect")
                .to_owned(),
            connected_since: rfc3339(agent.since),
            rtt_millis: millis(stats.rtt),
            answered_millis: answer.map(millis),
        }
    });
    Some(PingReport {
        node: node.to_string(),
        own: sessions.peers.own().to_string(),
        replica: status.replica,
        sessions: pinged.collect(),
    })
}

/// Returns the time after which a session acknowledges a probe.
async fn answer_time(session: &Arc<dyn Session>) -> Option<Duration> {
    let (before, began) = (session.stats().acknowledged, Instant::now());
    session.probe();
    let answering = async {
        while session.stats().acknowledged <= before {
            sleep(POLL).await;
        }
    };
    timeout(LIMIT, answering).await.ok()?;
    Some(began.elapsed())
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1_000_000.0).round() / 1000.0
}

/// Interval at which the server looks for the answer.
const POLL: Duration = Duration::from_millis(1);
/// Time for an answer: more than the round trip over a satellite link under load.
const LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::SessionSources;
    use crate::routing::routes::Routes;
    use crate::testing::{Bench, node};

    fn sources(bench: &Bench) -> NodeSources {
        let sessions = &bench.sessions;
        NodeSources {
            nodes: sessions.nodes.clone(),
            routes: Routes::default(),
            revocations: sessions.revocations.clone(),
            sessions: Some(SessionSources {
                registry: sessions.registry.clone(),
                peers: sessions.peers.clone(),
                failures: sessions.failures.clone(),
            }),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn agent_is_probed_and_an_unknown_node_is_none() {
        let bench = Bench::new();
        assert_eq!(ping(&sources(&bench), &node()).await, None);
        bench.sessions.nodes.record(&node(), &[]);
        let away = ping(&sources(&bench), &node()).await.unwrap();
        assert!(away.sessions.is_empty() && away.replica.is_none());
        let agent = bench.agent(1).await;
        let report = ping(&sources(&bench), &node()).await.unwrap();
        let [session] = &report.sessions[..] else {
            panic!("{report:?}");
        };
        assert_eq!(session.state, "live");
        assert!(session.answered_millis.is_some(), "{report:?}");
        drop(agent);
    }
}
