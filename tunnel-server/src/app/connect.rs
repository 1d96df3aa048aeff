//! The configured CONNECT listeners, and the tunnels for `tunnel-server connect` on the admin
//! socket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tunnel_process::unix_socket::SocketPermissions;

use super::bind::listen;
use super::context::ServerContext;
use super::credential_watcher::CredentialWatcher;
use super::serving::{CallerCa, PasswordFile, listener_tls, passwords};
use crate::config::ConnectSettings;
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::connect::{AdminTunnels, DirectDialer};
use crate::ingress::{ConnectProxy, HttpListener, IngressContext, ListenerKind, SharedSocket};
use tunnel_routing::destination::Scheme;
use tunnel_routing::dial_policy::DialPolicy;

/// Maximum time for opening a stream on these listeners. A scrape that times out after 10 s must
/// receive the reason before that.
const OPEN_MAX: Duration = Duration::from_secs(8);

#[derive(Debug)]
pub(super) struct ConnectSockets {
    tcp: Option<TcpListener>,
    unix: Option<SharedSocket>,
}

impl ConnectSockets {
    pub(super) async fn bind(settings: Option<&ConnectSettings>) -> anyhow::Result<Self> {
        let tcp = match settings.and_then(|settings| settings.listen) {
            Some(address) => Some(listen(address, "--connect-listen").await?),
            None => None,
        };
        let unix = settings.and_then(|settings| settings.unix.as_ref());
        let unix = unix.map(|listener| {
            let access = SocketPermissions {
                mode: listener.mode,
                owner: listener.owner,
            };
            SharedSocket::bind(listener.path.clone(), access).context("--connect-uds")
        });
        Ok(Self {
            tcp,
            unix: unix.transpose()?,
        })
    }

    pub(super) fn address(&self) -> std::io::Result<Option<SocketAddr>> {
        self.tcp.as_ref().map(TcpListener::local_addr).transpose()
    }

    /// Starts the listeners, which do not dial the ports of this server. Returns the tunnels for
    /// the admin socket, which reach only nodes.
    pub(super) fn start(
        self,
        ingress: &IngressContext,
        certificates: Arc<dyn ResolvesServerCert>,
        context: &ServerContext,
    ) -> anyhow::Result<AdminTunnels> {
        let (config, watcher) = (&context.config, &context.watcher);
        let ingress = Arc::new(IngressContext {
            limits: ingress.limits.with_open_timeout_max(OPEN_MAX),
            ..ingress.clone()
        });
        let target_dial_timeout = config.limits.target_dial_timeout;
        let settings = config.connect.as_ref();
        let dial_policy = match settings.and_then(|settings| settings.direct.clone()) {
            Some(listed) => DialPolicy::Listed(listed, context.ranges.clone()),
            None => DialPolicy::Cluster(context.ranges.clone()),
        };
        let direct = DirectDialer::new(dial_policy, target_dial_timeout)
            .with_own_ports(context.own_ports.clone());
        let direct = Arc::new(direct);
        let connect_listener = |tls, passwords, is_tls_optional| {
            Arc::new(HttpListener {
                name: "connect",
                scheme: Scheme::Http,
                implied_port: None,
                tls,
                connect: Some(ConnectProxy {
                    passwords,
                    is_tls_optional,
                    direct: direct.clone(),
                }),
            })
        };
        if let (Some(listener), Some(settings)) = (self.tcp, settings) {
            let auth = settings.auth.as_deref();
            let passwords = auth.map(|path| {
                let file = PasswordFile {
                    what: "connect_auth",
                    setting: "--connect-auth",
                    path,
                };
                passwords(&file, watcher)
            });
            let passwords = passwords.transpose()?;
            let is_tls_optional = passwords.is_some();
            let tls = caller_tls(settings, certificates, !is_tls_optional, watcher)?;
            ingress.start(
                listener,
                ListenerKind::Http(connect_listener(tls, passwords, is_tls_optional)),
            );
        }
        if let Some(socket) = self.unix {
            ingress.start_unix(socket, connect_listener(None, None, true));
        }
        Ok(AdminTunnels::new(ingress, target_dial_timeout))
    }
}

/// Returns the TLS configuration of the TCP listener if callers authenticate by certificates.
fn caller_tls(
    settings: &ConnectSettings,
    certificates: Arc<dyn ResolvesServerCert>,
    is_required: bool,
    watcher: &CredentialWatcher,
) -> anyhow::Result<Option<Arc<ListenerTls>>> {
    let Some(path) = &settings.client_ca else {
        return Ok(None);
    };
    let callers = CallerCa {
        what: "connect_client_ca",
        path,
        is_required,
    };
    listener_tls(certificates, Some(callers), watcher).map(Some)
}
