//! Start-up and shutdown of the server: builds all components from a configuration, and stops them
//! in order.

use std::sync::Arc;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::net::TcpListener;
use tracing::{info, warn};
use tunnel_process::host::Resources;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::wire::ALPN_SESSION;

use crate::config::{Capacity, Config, DescriptorUses};
use crate::routing::peers::Peers;
use crate::routing::registry::Registry;
use crate::session::saved_connections;
use tunnel_ca::LocalCa;
use tunnel_ca::revocation::Revocations;
use tunnel_ca::tokens::TokenStore;
use tunnel_dns::Records;
use tunnel_store::known_nodes::KnownNodes;

mod admin;
mod authority;
mod bind;
mod clocks;
mod cluster;
mod config_difference;
mod config_files;
mod connect;
mod context;
mod credential_watcher;
mod drain;
mod failures;
mod listeners;
mod membership;
mod peers;
mod proxy_ports;
mod records;
mod reload;
mod revocations;
mod rotation;
mod services;
mod serving;
mod sessions;
mod sockets;
mod status_page;
mod targets;
mod try_ports;

use authority::{AgentAuth, Authority};
use bind::listen;
use cluster::{ClusterServices, start_cluster};
pub use config_files::check_config_files;
use context::{ProcessContext, ServerContext};
use proxy_ports::ProxyPorts;
use serving::ServingCredentials;
use sessions::SessionInputs;
pub use sockets::BoundAddrs;
pub use try_ports::{busy_proxy_ports, check_ports};

/// A running server, created by [`App::start`] and served by [`App::run`].
#[derive(Debug)]
pub struct App {
    bound: BoundAddrs,
    quic: Arc<QuicAcceptor>,
    ca: Arc<LocalCa>,
    tokens: Arc<TokenStore>,
    revocations: Arc<Revocations>,
    cluster: ClusterServices,
    // Dropped last, because it has the lock of the data directory.
    context: ServerContext,
}

impl App {
    /// Starts every component. Returns when all sockets are bound.
    ///
    /// # Errors
    /// Returns an error if the data directory is in use or damaged, a file cannot be read, or an
    /// address cannot be bound.
    pub async fn start(config: Config, shutdown: Shutdown) -> anyhow::Result<Self> {
        let process = ProcessContext::open(config, shutdown)?;
        let starting = process.readiness.block("listeners");
        let mut metrics_registry = MetricsRegistry::default();
        let meta_listener = match process.config.meta_listen {
            Some(address) => Some(listen(address, "--meta-listen").await?),
            None => None,
        };
        let mut authority =
            Authority::load(&process, meta_listener.as_ref(), &mut metrics_registry).await?;
        let capacity = capacity(&process.config);
        let context = ServerContext::build(process, &capacity, &mut metrics_registry)?;
        let agents = AgentAuth::build(&authority, &context)?;
        let serving = ServingCredentials::build(&authority.ca, &context)?;
        let mut sockets = sockets::bind(
            agents.session_tls(ALPN_SESSION)?,
            &authority.keys,
            &serving.tls,
            (meta_listener.as_ref())
                .map(TcpListener::local_addr)
                .transpose()?,
            &context,
        )
        .await?;
        let dns = records::start(sockets.dns, capacity.dns, &mut metrics_registry, &context);
        let advertised = publish_addresses(&sockets.bound, &context)?;
        let targets = targets::build(&context)?;
        let membership = membership::membership(&mut authority, &context);
        clocks::report(&authority, &context);
        let cluster = start_cluster(
            authority.cluster_handle.take(),
            &sockets.bound,
            &agents,
            &targets,
            &serving.names,
            &context,
        );
        context.peers.advertise(advertised.clone());
        peers::start(sockets.peers, membership, &authority, &agents, &context)?;
        let ingress = listeners::start(sockets.listeners, targets, &cluster, capacity, &context);
        let proxy_ports = ProxyPorts::bind(ingress.clone(), serving.tls, &context).await;
        let services = services::ServiceListeners::start(
            sockets.services,
            ingress.clone(),
            sockets.bound.tcp_ports(),
            &context,
        );
        sockets.bound.proxy = proxy_ports.addresses();
        proxy_ports.start();
        let tunnels = (sockets.connect).start(&ingress, serving.certificates.clone(), &context)?;
        let inputs = SessionInputs {
            quic: sockets.quic.clone(),
            tcp: sockets.tcp,
            agents: &agents,
            authority: &authority,
            attestor: cluster.attestor.clone(),
            capacity,
        };
        let sessions = sessions::start(inputs, &context)?;
        failures::report(&context);
        let followers = reload::Followers {
            ingress,
            sessions,
            services,
            reserved_ports: sockets.bound.reserved_ports(),
        };
        let configuration = followers.start(&context);
        let sources = admin::node_sources(&authority, &context);
        let operator = admin::OperatorInputs {
            advertised,
            tunnels,
            configuration,
        };
        admin::start_socket(&authority, sources.clone(), operator, &context)?;
        admin::start_meta(sources.clone(), meta_listener, metrics_registry, &context);
        status_page::start(sockets.status, serving.certificates, sources, &context)?;
        if let Some(dns) = &dns {
            let readiness = context.readiness.clone();
            let report = move |lines| readiness.report_conditions("resolvers", lines);
            dns.follow_resolvers(report, &context.shutdown).await;
        }
        drop(starting);
        sockets.bound.log();
        Ok(Self {
            bound: sockets.bound,
            quic: sockets.quic,
            ca: authority.ca,
            tokens: authority.tokens,
            revocations: authority.revocations,
            cluster,
            context,
        })
    }

    pub fn bound(&self) -> &BoundAddrs {
        &self.bound
    }

    /// Returns the shutdown handle. Cancel its token `leaving` to stop the server gracefully, or
    /// `drain` to skip `--drain-delay`.
    pub fn shutdown(&self) -> &Shutdown {
        &self.context.shutdown
    }

    pub fn ca(&self) -> &Arc<LocalCa> {
        &self.ca
    }

    pub fn tokens(&self) -> &Arc<TokenStore> {
        &self.tokens
    }

    pub fn nodes(&self) -> &Arc<KnownNodes> {
        &self.context.nodes
    }

    /// Returns the records of the embedded DNS: the known nodes, and the names of the
    /// configuration.
    pub fn records(&self) -> &Records {
        &self.context.records
    }

    /// Returns the nodes whose certificates are revoked.
    pub fn revocations(&self) -> &Arc<Revocations> {
        &self.revocations
    }

    /// Returns the other servers.
    pub fn peers(&self) -> &Arc<Peers> {
        &self.context.peers
    }

    pub fn registry(&self) -> &Arc<Registry> {
        &self.context.registry
    }

    /// Serves until the server has to leave, then stops: agents and other servers learn that at
    /// once, the listeners accept work until the drain delay is over, running work may finish
    /// within the drain timeout, and sessions close after all sent data has arrived.
    pub async fn run(mut self) {
        tokio::select! {
            () = self.context.shutdown.leaving().cancelled() => {}
            () = self.context.shutdown.stop().cancelled() => {}
        }
        let _not_ready = self.context.readiness.drain();
        let agents_leave_until = self.leave().await;
        self.drain(agents_leave_until).await;
        self.context.shutdown.finish().await;
        self.context.drivers.close();
        self.context.drivers.wait().await;
        saved_connections::clear(&self.context.store);
        info!("stopped");
    }
}

/// Stores the addresses that agents dial and the ports of this server, and returns the addresses.
fn publish_addresses(bound: &BoundAddrs, context: &ServerContext) -> anyhow::Result<Vec<String>> {
    let advertised = bound.advertised(&context.config.advertise);
    context.data.set_advertised(&advertised)?;
    context.ports.send_replace(context.config.ports.clone());
    let policy = context.config.access_policy(bound.reserved_ports());
    context.policy.replace(&policy);
    Ok(advertised)
}

/// Returns the number of connections that the process carries. Logs a warning if the limits exceed
/// its resources.
fn capacity(config: &Config) -> Capacity {
    let resources = Resources::of_process();
    let capacity = Capacity::new(&config.limits, DescriptorUses::of(config), resources);
    if let Some(warning) = capacity.warning(&config.limits, resources) {
        warn!("{warning}");
    }
    capacity.log(resources);
    capacity
}
