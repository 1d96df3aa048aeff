//! The embedded DNS: sockets, limits and forwarding around the pure decision of `answer.rs`.
//!
//! hickory's own server is not used: it takes any number of TCP connections and answers what it cannot read before a
//! limit or a counter sees it. Its messages and its client are.

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

/// Both sockets, on one port.
#[derive(Debug)]
pub struct DnsSockets {
    /// Datagrams.
    pub udp: DnsSocket,
    /// Connections.
    pub tcp: TcpListener,
}

/// What the embedded DNS is made from.
#[derive(Debug)]
pub struct DnsInputs<'a> {
    /// Where to listen.
    pub sockets: DnsSockets,
    /// Names and resolvers.
    pub settings: &'a DnsSettings,
    /// What is answered; whoever knows the nodes puts them there.
    pub records: Records,
    /// Where the last records are kept.
    pub data: &'a DataDir,
    /// Bounds.
    pub limits: DnsLimits,
    /// Counters.
    pub metrics: DnsMetrics,
}

/// A running DNS server.
#[derive(Debug)]
pub struct Dns(Arc<Server>);

/// What both transports share.
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

/// What is to be done with a message.
#[derive(Debug)]
pub(super) enum QueryAction {
    Ignore,
    Reply(Vec<u8>),
    Forward(Box<Forward>),
}

/// A question for another resolver.
#[derive(Debug)]
pub(super) struct Forward {
    client_query: ClientQuery,
    resolvers: Vec<SocketAddr>,
    _permits: (OwnedSemaphorePermit, SourcePermit),
}

impl Dns {
    /// Serves until `shutdown` stops: names must resolve while running requests end. Keeps the records with each change,
    /// for [`super::restore`] of the next run.
    ///
    /// Answers from `records` as they are at once: whoever knows the nodes already puts them there first, or their names
    /// go to other resolvers.
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

    /// Looks once for resolvers that send queries back here, then from time to time until `shutdown` stops. Takes as long
    /// as the slowest of them, a second at most.
    ///
    /// # Errors
    /// When there is one.
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
    /// Decides on one message of a client and counts it; forwarded ones are counted at their end.
    pub(super) fn handle_query(
        &self,
        message: &[u8],
        client: SocketAddr,
        transport: Transport,
    ) -> QueryAction {
        let count = |outcome| self.metrics.query(transport, outcome);
        // Nobody sends from port 0; an answer there is one to a forged source.
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

    /// The answer of another resolver, or SERVFAIL when the budget is over.
    ///
    /// Cancel-safe: nothing goes on when it is dropped.
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

    /// Counts that new connections have to wait for others to end.
    pub(super) fn record_connection_wait(&self) {
        self.metrics.connection_waited();
    }

    /// Counts a connection; `None` when its source has too many.
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
