//! The rotation of the CA at this server: what it observes, what other servers learn from it, and that
//! agents are asked to renew.

use std::collections::BTreeSet;
use std::sync::Arc;

use tracing::debug;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::NodeName;

use super::authority::Authority;
use super::clocks::OtherClocks;
use super::context::ServerContext;
use crate::admin::NoRotation;
use crate::routing::peers::KnownCertificates;
use crate::routing::registry::Registry;
use tunnel_ca::CaError;
use tunnel_ca::rotation::{CaRotator, FOLLOWERS_INTERVAL, Surroundings, known_certificates};

/// Builds what rotates the CA, and starts what observes who follows and asks agents to renew.
pub(super) fn rotator(
    authority: &Authority,
    context: &ServerContext,
) -> Result<Arc<CaRotator>, NoRotation> {
    if context.config.agent_files.is_some() {
        return Err(NoRotation::OwnCertificates);
    }
    let (ca, nodes) = (authority.ca.clone(), context.nodes.clone());
    let rotator = match &authority.ca_secret {
        Some(secret) => CaRotator::of_secret(ca, secret.clone(), nodes),
        None => CaRotator::new(ca, context.data.clone(), nodes),
    };
    let (peers, unknown) = (context.peers.clone(), authority.unknown_servers.clone());
    let (clocks, registry) = (
        OtherClocks::new(authority, context),
        context.registry.clone(),
    );
    let observe = move || {
        let connected = connected(&registry);
        Surroundings {
            unknown: unknown(),
            cas: peers.announced_cas(),
            clocks: clocks.differences(),
            gone: peers.gone_nodes(&connected),
            connected,
            moving: peers.agents_move_for(),
        }
    };
    let rotator = Arc::new(rotator.observing(Arc::new(observe)));
    let (observing, registry) = (rotator.clone(), context.registry.clone());
    context.shutdown.spawn_service(async move {
        loop {
            sleep_coalesced(FOLLOWERS_INTERVAL).await;
            let (rotator, registry) = (observing.clone(), registry.clone());
            let observed = tokio::task::spawn_blocking(move || {
                rotator.observe_followers()?;
                ask_to_renew(&rotator, &registry)
            });
            if let Ok(Err(error)) = observed.await {
                debug!(%error, "cannot observe who follows the rotation of the CA");
            }
        }
    });
    Ok(rotator)
}

/// Asks the connected agents for which the next stage of the rotation waits to renew their certificates.
fn ask_to_renew(rotator: &CaRotator, registry: &Registry) -> Result<(), CaError> {
    let Some((since, nodes)) = rotator.due_agents()? else {
        return Ok(());
    };
    for agent in nodes.iter().flat_map(|node| registry.of_node(node)) {
        agent.ask_to_renew(since);
    }
    Ok(())
}

/// Returns the function that returns what other servers learn from this one of the certificates of agents.
pub(super) fn own_certificates(context: &ServerContext) -> KnownCertificates {
    let (nodes, registry) = (context.nodes.clone(), context.registry.clone());
    let peers = context.peers.clone();
    Box::new(move || {
        let connected = connected(&registry);
        let gone = peers.gone_nodes(&connected);
        known_certificates(&nodes.snapshot(), &connected, &gone)
    })
}

fn connected(registry: &Registry) -> BTreeSet<NodeName> {
    let agents = registry.all().into_iter();
    agents.map(|agent| agent.node.clone()).collect()
}
