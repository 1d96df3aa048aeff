//! Ends sessions of agents whose CA was taken out of `--agent-ca`: judged when the file has changed, and when a session is
//! registered whose handshake may have been before that.

use std::collections::HashSet;
use std::sync::Arc;

use tracing::info;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::code::CloseCode;

use crate::routing::registry::Registry;

/// What agents are told.
pub(crate) const DISTRUSTED: &str = "the CA of the agent's certificate is no longer trusted";

/// Judges all sessions after each replacement of the roots. Agents' processes that have proven themselves by the new ones,
/// over a newer session, keep their older ones until these have done their work; so do those that were issued a
/// certificate of the new ones over a live session.
pub fn enforce(trust: &Arc<AgentTrust>, registry: &Arc<Registry>, shutdown: &Shutdown) {
    let (trust, registry, tasks) = (trust.clone(), registry.clone(), shutdown.clone());
    let mut replaced = trust.replaced();
    shutdown.spawn_service(async move {
        while replaced.changed().await.is_ok() {
            let (trust, registry) = (trust.clone(), registry.clone());
            let checking = move || find_distrusted(&trust, &registry);
            // Thousands of signatures take a while.
            let Ok(distrusted) = tokio::task::spawn_blocking(checking).await else {
                return;
            };
            for agent in distrusted {
                info!(agent = %agent.node, session = %agent.id, "CA is no longer trusted, closing the session");
                agent.withdraw();
                tasks.spawn_service(async move {
                    agent.close(CloseCode::CredentialRevoked, DISTRUSTED).await;
                });
            }
        }
    });
}

fn find_distrusted(
    trust: &AgentTrust,
    registry: &Registry,
) -> Vec<Arc<crate::routing::registry::AgentSession>> {
    let (trusted, mut others): (Vec<_>, Vec<_>) = registry.all().into_iter().partition(|agent| {
        trust.still_accepts(&agent.session.peer_chain()) || trust.still_accepts(&agent.issued())
    });
    let proven: HashSet<_> = trusted
        .iter()
        .map(|agent| (agent.node.clone(), agent.instance))
        .collect();
    others.retain(|agent| {
        !agent.is_closing() && !proven.contains(&(agent.node.clone(), agent.instance))
    });
    others
}
