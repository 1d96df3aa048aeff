//! Closes sessions of agents whose CA was removed from `--agent-ca`. Sessions are checked when the
//! file changes. A session is also checked when it is registered, because its handshake may have
//! preceded the change.

use std::collections::HashSet;
use std::sync::Arc;

use tracing::info;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::code::CloseCode;

use crate::routing::registry::Registry;

/// Close reason for sessions whose CA is not trusted.
pub(crate) const DISTRUSTED: &str = "the CA of the agent's certificate is no longer trusted";

/// Checks all sessions after each replacement of the roots. If an agent process has a newer session
/// that the new roots accept, its older sessions stay until their work is done. A session also
/// stays if the agent received a certificate of the new CA on it.
pub fn enforce(trust: &Arc<AgentTrust>, registry: &Arc<Registry>, shutdown: &Shutdown) {
    let (trust, registry, tasks) = (trust.clone(), registry.clone(), shutdown.clone());
    let mut replaced = trust.replaced();
    shutdown.spawn_service(async move {
        while replaced.changed().await.is_ok() {
            let (trust, registry) = (trust.clone(), registry.clone());
            let checking = move || find_distrusted(&trust, &registry);
            // Verifying thousands of signatures takes a while.
            let Ok(distrusted) = tokio::task::spawn_blocking(checking).await else {
                return;
            };
            for agent in distrusted {
                info!(node = %agent.node, session = agent.id.0, "CA is no longer trusted, closing the session");
                agent.withdraw();
                tasks.spawn_service(async move {
                    agent.close(CloseCode::CredentialUntrusted, DISTRUSTED).await;
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
