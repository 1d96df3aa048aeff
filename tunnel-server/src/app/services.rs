//! The listeners of TCP services, which follow the file of the configuration. Connections go on when
//! their listener closes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::info;
use tunnel_process::followed::Followed;
use tunnel_process::meta::Readiness;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::Port;

use super::context::ServerContext;
use super::sockets::ServiceSocket;
use crate::config::Config;
use crate::ingress::{ClosableListener, IngressContext, ListenerKind};
use tunnel_routing::destination::TcpService;

/// What the configuration says about listeners that it may change.
#[derive(Debug, Clone, Default)]
pub(super) struct Services {
    /// The services with the addresses of their listeners.
    pub(super) services: Vec<(SocketAddr, TcpService)>,
    /// Ports on which the server may listen next to the HTTP and HTTPS listeners.
    extra_ports: Vec<Port>,
}

impl Services {
    pub(super) fn of(config: &Config) -> Self {
        let extra = config.extra_listeners().into_iter();
        Self {
            services: config.listeners.services.clone(),
            extra_ports: extra.map(|(_, port, _)| port).collect(),
        }
    }
}

/// The listeners of TCP services that are open.
pub(super) struct ServiceListeners {
    ingress: Arc<IngressContext>,
    /// Ports of all listeners of this server.
    own_ports: Followed<Vec<Port>>,
    /// Those that never change.
    fixed_ports: Vec<Port>,
    extra_ports: Vec<Port>,
    open: BTreeMap<ServiceKey, OpenService>,
}

/// The configured address of a listener. Where the system chooses the port, the name of the service
/// distinguishes several.
type ServiceKey = (SocketAddr, Option<String>);

fn key(address: SocketAddr, service: &TcpService) -> ServiceKey {
    (address, (address.port() == 0).then(|| service.name.clone()))
}

/// A service whose listener is open.
struct OpenService {
    service: Followed<TcpService>,
    port: u16,
    listener: ClosableListener,
}

impl From<OpenService> for ClosableListener {
    fn from(open: OpenService) -> Self {
        open.listener
    }
}

impl ServiceListeners {
    pub(super) fn start(
        sockets: Vec<ServiceSocket>,
        ingress: Arc<IngressContext>,
        fixed_ports: Vec<Port>,
        context: &ServerContext,
    ) -> Self {
        let mut listeners = Self {
            ingress,
            own_ports: context.own_ports.clone(),
            fixed_ports,
            extra_ports: Services::of(&context.config).extra_ports,
            open: BTreeMap::new(),
        };
        for ServiceSocket {
            listener,
            address,
            service,
        } in sockets
        {
            listeners.open(listener, address, service);
        }
        listeners.publish();
        listeners
    }

    /// Follows the services until the server stops. A listener that cannot be bound is a condition,
    /// and is tried again.
    pub(super) async fn follow(
        mut self,
        mut services: watch::Receiver<Services>,
        readiness: Readiness,
    ) {
        loop {
            let wanted = services.borrow_and_update().clone();
            let failures = self.apply(wanted).await;
            let has_failures = !failures.is_empty();
            readiness.report_conditions(LABEL, failures);
            tokio::select! {
                changed = services.changed() => if changed.is_err() {
                    // Without a file nothing changes, and the listeners stay.
                    return std::future::pending().await;
                },
                () = sleep_coalesced(BIND_PAUSE), if has_failures => {}
            }
        }
    }

    /// Makes the open listeners those of `wanted`. Returns what cannot be bound.
    async fn apply(&mut self, wanted: Services) -> Vec<String> {
        let Services {
            services: wanted,
            extra_ports,
        } = wanted;
        self.extra_ports = extra_ports;
        ClosableListener::close_others(&mut self.open, |open| {
            let mut wanted = wanted.iter();
            wanted.any(|(address, service)| key(*address, service) == *open)
        })
        .await;
        let mut failures = Vec::new();
        for (address, service) in wanted {
            if let Some(open) = self.open.get(&key(address, &service)) {
                if *open.service.load() != service {
                    open.service.replace(service);
                }
                continue;
            }
            let name = service.name.clone();
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    info!(listener = "service", service = name, %address, "listening");
                    self.open(listener, address, service);
                }
                Err(error) => {
                    failures.push(format!("{name}: cannot listen on {address}: {error}"));
                }
            }
        }
        self.publish();
        failures
    }

    fn open(&mut self, listener: TcpListener, address: SocketAddr, service: TcpService) {
        let port = listener
            .local_addr()
            .map_or_else(|_| address.port(), |bound| bound.port());
        let key = key(address, &service);
        let service = Followed::from(service);
        let kind = ListenerKind::TcpService(service.clone());
        let open = OpenService {
            service,
            port,
            listener: self.ingress.start_closable(listener, kind),
        };
        self.open.insert(key, open);
    }

    /// Publishes the ports of the open listeners.
    fn publish(&self) {
        let ports = self.open.values().filter_map(|open| Port::new(open.port));
        let others = self.fixed_ports.iter().chain(&self.extra_ports).copied();
        let all = others.chain(ports);
        self.own_ports.replace(all.collect());
    }
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "services";
/// Pause before a listener that could not be bound is tried again.
const BIND_PAUSE: Duration = Duration::from_secs(1);
