//! Connections to the other servers: this server's certificate for them, the CA that it trusts, and
//! the start of the listener and of the dialing.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tunnel_proto::tls::{self, PeerTrust};
use tunnel_proto::transport::SessionSettings;

use super::authority::{AgentAuth, Authority, trust_ca};
use super::context::ServerContext;
use super::credential_watcher::{CredentialWatcher, watch_pair};
use super::membership::report_unconnected;
use super::revocations;
use super::rotation::own_certificates;
use crate::config::CredentialFiles;
use crate::ingress::recent_requests::RecentRequests;
use crate::routing::peers::{
    ForwardPolicy, OnEnroll, OnStream, PeerAddress, PeerEndpoint, PeerTls,
};
use tunnel_ca::LocalCa;
use tunnel_ca::enrollment::Enrollment;

/// Starts the connections to the servers of `membership` if there is a listener for them.
pub(super) fn start(
    listener: Option<TcpListener>,
    membership: watch::Receiver<Arc<[PeerAddress]>>,
    authority: &Authority,
    agents: &AgentAuth,
    context: &ServerContext,
) -> anyhow::Result<()> {
    report_unconnected(context.peers.clone(), listener.is_some(), context);
    announce_ca(&authority.ca, context);
    let Some(listener) = listener else {
        return Ok(());
    };
    let limits = &context.config.limits;
    let endpoint = PeerEndpoint {
        peers: context.peers.clone(),
        registry: context.registry.clone(),
        tls: peer_tls(authority, context)?,
        settings: SessionSettings {
            streams: u32::try_from(limits.peer_streams)?.saturating_add(CONTROL_STREAMS),
            ..context.session_settings.clone()
        },
        handshake_timeout: limits.handshake_timeout,
        policy: ForwardPolicy {
            policy: context.policy.clone(),
            routes: context.routes.clone(),
        },
        list_linger: LIST_LINGER,
        open_timeout: limits.open_timeout,
        shutdown: context.shutdown.clone(),
        on_orders: revocations::exchange(&authority.revocations, context),
        on_stream: on_stream(context.recent.clone()),
        known_certificates: own_certificates(context),
        on_enroll: on_enroll(authority, agents, context),
    };
    endpoint.start(listener, membership);
    Ok(())
}

/// Announces the CA of this server to the others, at the start and whenever it is replaced.
fn announce_ca(ca: &Arc<LocalCa>, context: &ServerContext) {
    let (ca, peers, mut changed) = (ca.clone(), context.peers.clone(), ca.changed());
    peers.set_ca(ca.digest());
    context.shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            peers.set_ca(ca.digest());
        }
    });
}

/// Builds the TLS configurations from files of the operator, which are watched, or else from the
/// local CA.
fn peer_tls(authority: &Authority, context: &ServerContext) -> anyhow::Result<PeerTls> {
    match &context.config.peers.files {
        Some(files) => from_files(files, &context.watcher),
        None => from_ca(&authority.ca, context),
    }
}

fn from_ca(ca: &Arc<LocalCa>, context: &ServerContext) -> anyhow::Result<PeerTls> {
    let own = ca.peer_resolver(context.peers.own().clone());
    let (new, replace) = (PeerTrust::new, PeerTrust::replace);
    let trust = trust_ca("peer_ca", ca, &context.shutdown, new, replace)?;
    Ok(PeerTls {
        client: tls::peer_client(own.clone(), trust.clone())?,
        server: tls::peer_server(own, trust)?,
    })
}

fn from_files(files: &CredentialFiles, watcher: &CredentialWatcher) -> anyhow::Result<PeerTls> {
    let metrics = watcher.metrics.clone();
    let record_expiry = move |not_after| metrics.credential(CERTIFICATE, not_after);
    let own = watch_pair(CERTIFICATE, &files.pair, watcher, record_expiry)
        .context("--peer-cert-file, --peer-key-file")?;
    let (new, replace) = (PeerTrust::new, PeerTrust::replace);
    let trust = watcher.trust_file("peer_ca", "--peer-ca", &files.ca, new, replace)?;
    Ok(PeerTls {
        client: tls::peer_client(own.clone(), trust.clone())?,
        server: tls::peer_server(own, trust)?,
    })
}

/// Returns the function that serves enrollments which other servers forward. The servers of a
/// cluster share all join tokens and forward none.
fn on_enroll(
    authority: &Authority,
    agents: &AgentAuth,
    context: &ServerContext,
) -> Option<OnEnroll> {
    if context.config.kubernetes.is_some() {
        return None;
    }
    let enrollment = Enrollment {
        renewals: agents.renewals.clone(),
        tokens: authority.tokens.clone(),
        nodes: context.nodes.clone(),
        is_taken: context.is_taken(),
        attestor: None,
        peers: None,
    };
    Some(Box::new(move |stream, replica| {
        let enrollment = enrollment.clone();
        Box::pin(async move { enrollment.serve_forwarded(stream, &replica).await })
    }))
}

/// Returns the function that stores the last streams which other servers forward.
fn on_stream(recent: Option<Arc<RecentRequests>>) -> OnStream {
    Box::new(move |record| {
        if let Some(recent) = &recent {
            recent.record(record);
        }
    })
}

/// Time for which the list of a lost connection stays. Most connections are back before that.
const LIST_LINGER: Duration = Duration::from_secs(5);
/// Name of the operator's certificate in logs and metrics.
const CERTIFICATE: &str = "peer_certificate";
/// Streams of a connection in addition to the forwarded ones: the control stream, and refused ones.
const CONTROL_STREAMS: u32 = 16;
