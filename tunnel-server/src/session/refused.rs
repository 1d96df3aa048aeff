//! Closes sessions of agents whose certificate is refused: the node was revoked or reissued, or the CA
//! was removed from `--agent-ca`. Sessions are checked after each change. A session is also checked
//! when it is registered, because its handshake may have preceded the change.

use std::collections::HashSet;
use std::sync::Arc;

use tracing::info;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::code::CloseCode;

use crate::routing::registry::{AgentSession, Registry};
use tunnel_ca::revocation::Revocations;

/// Close reason for sessions whose certificate is revoked.
pub(crate) const REVOKED: &str = "the node's certificate was revoked";
/// Close reason for sessions whose CA is not trusted.
pub(crate) const DISTRUSTED: &str = "the CA of the agent's certificate is no longer trusted";

/// Closes all sessions whose certificate is revoked.
pub(crate) fn close_revoked(revocations: &Revocations, registry: &Registry, tasks: &Shutdown) {
    for agent in registry.all() {
        if revocations.is_revoked(agent.session.peer()) && !agent.is_closing() {
            close(agent, CloseCode::CredentialRevoked, REVOKED, tasks);
        }
    }
}

/// Closes sessions whose CA is not trusted after each replacement of the roots. If an agent process
/// has a newer session that the new roots accept, its older sessions stay until their work is done. A
/// session also stays if the agent received a certificate of the new CA on it.
pub(crate) fn follow_trust(trust: &Arc<AgentTrust>, registry: &Arc<Registry>, tasks: &Shutdown) {
    let (trust, registry, shutdown) = (trust.clone(), registry.clone(), tasks.clone());
    let mut replaced = trust.replaced();
    tasks.spawn_service(async move {
        while replaced.changed().await.is_ok() {
            let (trust, registry) = (trust.clone(), registry.clone());
            let checking = move || find_distrusted(&trust, &registry);
            // Verifying thousands of signatures takes a while.
            let Ok(distrusted) = tokio::task::spawn_blocking(checking).await else {
                return;
            };
            for agent in distrusted {
                close(agent, CloseCode::CredentialUntrusted, DISTRUSTED, &shutdown);
            }
        }
    });
}

fn close(agent: Arc<AgentSession>, code: CloseCode, reason: &'static str, tasks: &Shutdown) {
    info!(node = %agent.node, session = agent.id.0, reason, "closing the session of a refused certificate");
    agent.withdraw();
    tasks.spawn_service(async move {
        agent.close(code, reason).await;
    });
}

fn find_distrusted(trust: &AgentTrust, registry: &Registry) -> Vec<Arc<AgentSession>> {
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
