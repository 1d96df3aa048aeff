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

use super::answer::{self, Asked, Transport, Verdict, View};
use super::guard::{Guard, LoopError};
use super::limiter::{Limiter, Share};
use super::metrics::{DnsMetrics, Outcome};
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
pub struct DnsParts<'a> {
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
    guard: Guard,
    metrics: DnsMetrics,
}

/// What is to be done with a message.
#[derive(Debug)]
pub(super) enum Step {
    Nothing,
    Reply(Vec<u8>),
    Forward(Box<Forward>),
}

/// A question for another resolver.
#[derive(Debug)]
pub(super) struct Forward {
    asked: Asked,
    resolvers: Vec<SocketAddr>,
    _held: (OwnedSemaphorePermit, Share),
}

impl Dns {
    /// Serves until `shutdown` stops: names must resolve while running requests end. Keeps the records with each change,
    /// for [`super::restore`] of the next run.
    ///
    /// Answers from `records` as they are at once: whoever knows the nodes already puts them there first, or their names
    /// go to other resolvers.
    #[must_use]
    pub fn start(parts: DnsParts<'_>, shutdown: &Shutdown) -> Self {
        snapshot::keep(parts.data, &parts.records, shutdown);
        let names = Names {
            zone: parts.settings.zone.clone(),
            clusters: parts.settings.clusters.clone(),
            others: others(&parts.settings.others),
        };
        info!(
            zone = names.zone.as_ref().map(tracing::field::display),
            resolvers = ?names.others,
            "answering DNS"
        );
        let server = Arc::new(Server {
            names,
            records: parts.records,
            limits: parts.limits,
            limiter: Limiter::new(parts.limits.per_source),
            forwards: Arc::new(Semaphore::new(parts.limits.forwards)),
            guard: Guard::default(),
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
    pub async fn refuse_loops(&self, shutdown: &Shutdown) -> Result<(), LoopError> {
        if !self.0.names.is_forwarding() {
            return Ok(());
        }
        self.0.guard.probe(&self.0.names).await?;
        let server = self.0.clone();
        shutdown.spawn_service(async move { server.guard.watch(&server.names).await });
        Ok(())
    }
}

impl Server {
    /// Decides on one message of a client and counts it; forwarded ones are counted at their end.
    pub(super) fn look(&self, message: &[u8], client: SocketAddr, transport: Transport) -> Step {
        let count = |outcome| self.metrics.query(transport, outcome);
        // Nobody sends from port 0; an answer there is one to a forged source.
        if client.port() == 0 || !self.limiter.admits(client.ip()) {
            count(Outcome::Limited);
            return Step::Nothing;
        }
        let records = self.records.load();
        let view = View {
            records: &records,
            names: &self.names,
        };
        let (asked, resolvers) = match answer::decide(message, transport, &view) {
            Verdict::Silence(outcome) => {
                count(outcome);
                return Step::Nothing;
            }
            Verdict::Reply(bytes, outcome) => {
                let is_complaint = matches!(outcome, Outcome::Malformed | Outcome::Refused);
                if is_complaint && !self.limiter.complains_to(client.ip()) {
                    count(Outcome::Limited);
                    return Step::Nothing;
                }
                count(outcome);
                return Step::Reply(bytes);
            }
            Verdict::Forward(asked, resolvers) => (*asked, resolvers),
        };
        debug!(%client, query = %asked.query, "asking another resolver");
        if self.guard.hears(&asked.query.name) {
            count(Outcome::Loop);
            return Step::Reply(asked.failed(ResponseCode::NXDomain));
        }
        let Some(held) = self.place_to_forward(client) else {
            count(Outcome::Busy);
            return Step::Reply(asked.failed(ResponseCode::ServFail));
        };
        Step::Forward(Box::new(Forward {
            resolvers: self.guard.without_loops(resolvers),
            asked,
            _held: held,
        }))
    }

    fn place_to_forward(&self, client: SocketAddr) -> Option<(OwnedSemaphorePermit, Share)> {
        let free = self.forwards.available_permits();
        let share = self.limiter.forward(client.ip(), free)?;
        let permit = self.forwards.clone().try_acquire_owned().ok()?;
        Some((permit, share))
    }

    /// The answer of another resolver, or SERVFAIL when the budget is over.
    ///
    /// Cancel-safe: nothing goes on when it is dropped.
    pub(super) async fn forward(&self, forward: Forward) -> Vec<u8> {
        let Forward {
            asked, resolvers, ..
        } = forward;
        let began = Instant::now();
        let (question, transport) = (asked.forwarded(), asked.transport());
        let budget = self.limits.forward_budget;
        let Some(answer) = upstream::ask(&resolvers, &question, transport, budget).await else {
            self.metrics.query(transport, Outcome::UpstreamFailed);
            return asked.failed(ResponseCode::ServFail);
        };
        self.metrics.forwarded(began.elapsed());
        self.metrics.query(transport, Outcome::Forwarded);
        asked.relayed(answer)
    }

    /// Counts that new connections have to wait for others to end.
    pub(super) fn connections_wait(&self) {
        self.metrics.waited();
    }

    /// Counts a connection; `None` when its source has too many.
    pub(super) fn connect(&self, client: SocketAddr) -> Option<Share> {
        let connected = self.limiter.connect(client.ip());
        if connected.is_none() {
            self.metrics.query(Transport::Tcp, Outcome::Limited);
        }
        connected
    }
}

fn others(resolvers: &Resolvers) -> Vec<SocketAddr> {
    match resolvers {
        Resolvers::These(these) => these.clone(),
        Resolvers::Host => {
            let found = upstream::of_host(Path::new(RESOLV_CONF));
            let found = found.unwrap_or_else(|error| {
                debug!(%error, "cannot read {RESOLV_CONF}");
                Vec::new()
            });
            if found.is_empty() {
                warn!(
                    "{RESOLV_CONF} names no resolver: DNS queries for other names are refused; name one with \
                     --dns-upstream"
                );
            }
            found
        }
    }
}

const RESOLV_CONF: &str = "/etc/resolv.conf";
