//! The embedded DNS server: sockets, limits and forwarding around the pure decision in `answer.rs`.
//!
//! hickory's own server is not used. That server accepts any number of TCP connections, and answers
//! malformed messages before a limit or a counter sees them. This module uses hickory's messages
//! and its client.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use hickory_proto::op::ResponseCode;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{debug, info, warn};
use tunnel_proto::process::shutdown::Shutdown;

use super::answer::{self, AnswerContext, ClientQuery, Decision, Transport};
use super::limiter::{Limiter, SourcePermit};
use super::loop_detection::{LoopDetector, LoopError};
use super::metrics::{DnsMetrics, QueryOutcome};
use super::udp::DnsSocket;
use super::{DnsLimits, DnsSettings, Names, Records, Resolvers, tcp, udp, upstream};
use crate::dns::snapshot;
use crate::store::data_dir::DataDir;

/// The UDP and TCP sockets, bound to one port.
#[derive(Debug)]
pub struct DnsSockets {
    /// Socket for queries over UDP.
    pub udp: DnsSocket,
    /// Listener for queries over TCP.
    pub tcp: TcpListener,
}

/// Inputs of [`Dns::start`].
#[derive(Debug)]
pub struct DnsInputs<'a> {
    /// Sockets to serve.
    pub sockets: DnsSockets,
    /// Names and resolvers.
    pub settings: &'a DnsSettings,
    /// Records to answer from. The source of the nodes updates them.
    pub records: Records,
    /// Data directory with the record snapshot.
    pub data: &'a DataDir,
    /// Limits of the server.
    pub limits: DnsLimits,
    /// Metrics of the server.
    pub metrics: DnsMetrics,
}

/// A running DNS server.
#[derive(Debug)]
pub struct Dns(Arc<Server>);

/// State that both transports share.
#[derive(Debug)]
pub(super) struct Server {
    names: Names,
    records: Records,
    limits: DnsLimits,
    limiter: Limiter,
    forwards: Arc<Semaphore>,
    loop_detection: LoopDetector,
    metrics: DnsMetrics,
}

/// Action for one message.
#[derive(Debug)]
pub(super) enum QueryAction {
    Ignore,
    Reply(Vec<u8>),
    Forward(Box<Forward>),
}

/// A query for another resolver.
#[derive(Debug)]
pub(super) struct Forward {
    client_query: ClientQuery,
    resolvers: Vec<SocketAddr>,
    _permits: (OwnedSemaphorePermit, SourcePermit),
}

impl Dns {
    /// Serves until `shutdown` stops, because names must resolve while running requests end.
    /// Persists the records after each change for [`super::restore`] in the next run.
    ///
    /// Answers from `records` immediately. Fill them before the start if nodes are already known.
    /// Otherwise queries for their names go to other resolvers.
    #[must_use]
    pub fn start(parts: DnsInputs<'_>, shutdown: &Shutdown) -> Self {
        snapshot::persist(parts.data, &parts.records, shutdown);
        let names = Names {
            zone: parts.settings.zone.clone(),
            clusters: parts.settings.clusters.clone(),
            default_resolvers: default_resolvers(&parts.settings.default_resolvers),
        };
        info!(
            zone = names.zone.as_ref().map(tracing::field::display),
            resolvers = ?names.default_resolvers,
            "answering DNS"
        );
        let server = Arc::new(Server {
            names,
            records: parts.records,
            limits: parts.limits,
            limiter: Limiter::new(parts.limits.per_source),
            forwards: Arc::new(Semaphore::new(parts.limits.forwards)),
            loop_detection: LoopDetector::default(),
            metrics: parts.metrics,
        });
        shutdown.spawn_listener(udp::serve(server.clone(), parts.sockets.udp));
        shutdown.spawn_listener(tcp::serve(
            server.clone(),
            parts.sockets.tcp,
            parts.limits.connections,
        ));
        Self(server)
    }

    /// Probes for forwarding loops once, then periodically until `shutdown` stops. The first probe
    /// takes as long as the slowest resolver, at most one second.
    ///
    /// # Errors
    /// Returns [`LoopError`] if a resolver forwards queries back to this server.
    pub async fn start_loop_detection(&self, shutdown: &Shutdown) -> Result<(), LoopError> {
        if !self.0.names.is_forwarding() {
            return Ok(());
        }
        self.0.loop_detection.probe(&self.0.names).await?;
        let server = self.0.clone();
        shutdown.spawn_service(async move { server.loop_detection.run(&server.names).await });
        Ok(())
    }
}

impl Server {
    /// Decides how to handle one message and counts it. Forwarded queries are counted when they
    /// end.
    pub(super) fn handle_query(
        &self,
        message: &[u8],
        client: SocketAddr,
        transport: Transport,
    ) -> QueryAction {
        let count = |outcome| self.metrics.query(transport, outcome);
        // Port 0 is never a valid source port, so an answer would go to a forged source.
        if client.port() == 0 || !self.limiter.admit_query(client.ip()) {
            count(QueryOutcome::Limited);
            return QueryAction::Ignore;
        }
        let records = self.records.load();
        let context = AnswerContext {
            records: &records,
            names: &self.names,
        };
        let (client_query, resolvers) = match answer::decide(message, transport, &context) {
            Decision::Ignore(outcome) => {
                count(outcome);
                return QueryAction::Ignore;
            }
            Decision::Reply(bytes, outcome) => {
                let is_error_reply =
                    matches!(outcome, QueryOutcome::Malformed | QueryOutcome::Refused);
                if is_error_reply && !self.limiter.can_send_error(client.ip()) {
                    count(QueryOutcome::Limited);
                    return QueryAction::Ignore;
                }
                count(outcome);
                return QueryAction::Reply(bytes);
            }
            Decision::Forward(client_query, resolvers) => (*client_query, resolvers),
        };
        debug!(%client, query = %client_query.query, "forwarding a DNS query");
        if self.loop_detection.is_own_probe(&client_query.query.name) {
            count(QueryOutcome::Loop);
            return QueryAction::Reply(client_query.failed(ResponseCode::NXDomain));
        }
        let Some(permits) = self.acquire_forward_permits(client) else {
            count(QueryOutcome::Busy);
            return QueryAction::Reply(client_query.failed(ResponseCode::ServFail));
        };
        QueryAction::Forward(Box::new(Forward {
            resolvers: self.loop_detection.without_loops(resolvers),
            client_query,
            _permits: permits,
        }))
    }

    fn acquire_forward_permits(
        &self,
        client: SocketAddr,
    ) -> Option<(OwnedSemaphorePermit, SourcePermit)> {
        let free = self.forwards.available_permits();
        let source_permit = self.limiter.forward(client.ip(), free)?;
        let permit = self.forwards.clone().try_acquire_owned().ok()?;
        Some((permit, source_permit))
    }

    /// Returns the answer of another resolver, or SERVFAIL when the budget is exhausted.
    ///
    /// Cancel-safe: dropping the future stops all work.
    pub(super) async fn forward(&self, forward: Forward) -> Vec<u8> {
        let Forward {
            client_query,
            resolvers,
            ..
        } = forward;
        let began = Instant::now();
        let (question, transport) = (client_query.forwarded(), client_query.transport());
        let budget = self.limits.forward_budget;
        let Some(answer) = upstream::resolve(&resolvers, &question, transport, budget).await else {
            self.metrics.query(transport, QueryOutcome::UpstreamFailed);
            return client_query.failed(ResponseCode::ServFail);
        };
        self.metrics.forwarded(began.elapsed());
        self.metrics.query(transport, QueryOutcome::Forwarded);
        client_query.relayed(answer)
    }

    /// Counts a new connection that waits for another one to end.
    pub(super) fn record_connection_wait(&self) {
        self.metrics.connection_waited();
    }

    /// Counts a connection. Returns `None` if the client has too many.
    pub(super) fn admit_connection(&self, client: SocketAddr) -> Option<SourcePermit> {
        let connection_permit = self.limiter.admit_connection(client.ip());
        if connection_permit.is_none() {
            self.metrics.query(Transport::Tcp, QueryOutcome::Limited);
        }
        connection_permit
    }
}

fn default_resolvers(resolvers: &Resolvers) -> Vec<SocketAddr> {
    match resolvers {
        Resolvers::These(these) => these.clone(),
        Resolvers::Host => {
            let found = upstream::host_resolvers(Path::new(RESOLV_CONF));
            let found = found.unwrap_or_else(|error| {
                debug!(%error, "cannot read {RESOLV_CONF}");
                Vec::new()
            });
            if found.is_empty() {
                warn!(
                    "{RESOLV_CONF} names no resolver; DNS queries for other names are refused; set one with \
                     --dns-upstream"
                );
            }
            found
        }
    }
}

const RESOLV_CONF: &str = "/etc/resolv.conf";
