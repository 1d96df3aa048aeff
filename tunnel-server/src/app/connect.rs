//! The CONNECT doors of the configuration, and the way for `tunnel-server connect` on the admin socket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use tokio::net::{TcpListener, UnixListener};
use tracing::info;
use tunnel_proto::process::reload::Fresh;
use tunnel_proto::process::settings::ConfigError;

use super::identity::Followed;
use super::sockets::{Bound, bound_ports, listen};
use super::targets::door_tls;
use crate::config::{Config, ConnectSettings};
use crate::ingress::connect::basic_auth::{LivePasswords, Passwords, PasswordsError};
use crate::ingress::connect::{Direct, Gate, Tunnels};
use crate::ingress::{Door, DoorLimits, Doors, Mode};
use crate::routing::decision::Scheme;
use crate::routing::dial_policy::{Allowed, LiveRanges};
use crate::unix::{self, Access, SocketFile};

/// Opening a stream takes at most this long here: a scrape that gives up after 10 s is to have heard why.
const OPEN_MAX: Duration = Duration::from_secs(8);

/// What is bound.
#[derive(Debug)]
pub(super) struct ConnectSockets {
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, SocketFile)>,
}

impl ConnectSockets {
    pub(super) async fn bind(settings: Option<&ConnectSettings>) -> anyhow::Result<Self> {
        let tcp = match settings.and_then(|settings| settings.listen) {
            Some(address) => Some(listen(address, "--connect-listen").await?),
            None => None,
        };
        let unix = settings.and_then(|settings| settings.unix.as_ref());
        let unix = unix.map(|door| {
            let access = Access {
                mode: door.mode,
                owner: door.owner,
            };
            let bound = unix::bind(&door.path, access).context("--connect-uds")?;
            info!(listener = "connect", path = %door.path.display(), "listening");
            anyhow::Ok(bound)
        });
        Ok(Self {
            tcp,
            unix: unix.transpose()?,
        })
    }

    pub(super) fn address(&self) -> std::io::Result<Option<SocketAddr>> {
        self.tcp.as_ref().map(TcpListener::local_addr).transpose()
    }

    /// Opens the doors; what is returned serves the admin socket, which reaches nodes alone.
    pub(super) fn start(
        self,
        config: &Config,
        (shared, ranges, bound): (&Arc<Doors>, &LiveRanges, &Bound),
        (certificates, followed): (Arc<dyn ResolvesServerCert>, &Followed<'_>),
    ) -> anyhow::Result<Tunnels> {
        let doors = Arc::new(Doors {
            limits: DoorLimits {
                open: shared.limits.open.min(OPEN_MAX),
                ..shared.limits
            },
            ..Doors::clone(shared)
        });
        let dial_limit = config.limits.target_dial_timeout;
        let settings = config.connect.as_ref();
        let allowed = match settings.and_then(|settings| settings.direct.clone()) {
            Some(listed) => Allowed::Listed(listed, ranges.clone()),
            None => Allowed::Cluster(ranges.clone()),
        };
        let direct = Direct::new(allowed, dial_limit).with_own_ports(bound_ports(bound));
        let direct = Arc::new(direct);
        let door = |tls, passwords, also_plain| {
            Arc::new(Door {
                name: "connect",
                scheme: Scheme::Http,
                implied_port: None,
                tls,
                connect: Some(Gate {
                    passwords,
                    also_plain,
                    direct: direct.clone(),
                }),
            })
        };
        if let (Some(listener), Some(settings)) = (self.tcp, settings) {
            let passwords = passwords(settings, followed)?;
            let tls = match &settings.client_ca {
                Some(path) => {
                    let callers = Some((&**path, passwords.is_none()));
                    Some(door_tls(
                        "connect_client_ca",
                        certificates,
                        callers,
                        followed,
                    )?)
                }
                None => None,
            };
            let also_plain = passwords.is_some();
            doors.start(listener, Mode::Http(door(tls, passwords, also_plain)));
        }
        if let Some((listener, file)) = self.unix {
            doors.start_unix(listener, door(None, None, true), file);
        }
        Ok(Tunnels::new(doors, dial_limit))
    }
}

/// Reads the passwords, and follows their file.
fn passwords(
    settings: &ConnectSettings,
    followed: &Followed<'_>,
) -> anyhow::Result<Option<Arc<LivePasswords>>> {
    let Some(path) = settings.auth.clone() else {
        return Ok(None);
    };
    let (digest, first) = Passwords::load(&path).map_err(|error| match error.is_in_content() {
        true => anyhow::Error::from(ConfigError(vec![format!("--connect-auth: {error}")])),
        false => anyhow::Error::from(error).context("--connect-auth"),
    })?;
    let live = Arc::new(LivePasswords::new(first));
    let swapped = live.clone();
    let load = move || {
        let (digest, value) = Passwords::load(&path)?;
        Ok::<_, PasswordsError>(Fresh { digest, value })
    };
    let apply = move |passwords| {
        swapped.replace(passwords);
        Ok(())
    };
    followed.follow("connect_auth", digest, load, apply);
    Ok(Some(live))
}
