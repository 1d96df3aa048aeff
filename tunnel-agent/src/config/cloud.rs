//! The listeners for targets of the cloud: `--cloud-listen` and `--cloud-listen-wide`.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use tunnel_process::settings::{ConfigErrors, parse_address};
use tunnel_proto::wire::name::CloudTarget;

use super::RawConfig;

/// A listener of this host whose connections become streams to a target of the cloud.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudListener {
    /// Name of the target in the server's configuration.
    pub target: CloudTarget,
    /// Address of the listener. With port 0 the system chooses the port.
    pub address: SocketAddr,
}

impl FromStr for CloudListener {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = text.trim().split_once('=').ok_or_else(|| {
            format!("{text:?} is not NAME=ADDR:PORT, as in apiserver=127.0.0.1:10268")
        })?;
        let target = name
            .parse::<CloudTarget>()
            .map_err(|error| format!("{text:?}: {error}"))?;
        let address = parse_address(address)?;
        let address = match address.ip().to_canonical() {
            IpAddr::V4(v4) => SocketAddr::from((v4, address.port())),
            IpAddr::V6(_) => address,
        };
        Ok(Self { target, address })
    }
}

/// Returns the listeners of `settings`. Only this host may reach them, unless the operator set
/// otherwise.
pub(super) fn listeners(
    settings: &RawConfig,
    meta_listen: Option<SocketAddr>,
    errors: &mut ConfigErrors,
) -> Vec<CloudListener> {
    let is_wide = errors.parse(WIDE, settings.cloud_listen_wide.as_deref(), false);
    let texts = match &settings.cloud_listen[..] {
        [off] if off.trim() == OFF => &[],
        texts => texts,
    };
    let listeners = errors.parse_list(LISTEN, texts, str::parse::<CloudListener>);
    let mut addresses: BTreeSet<SocketAddr> = meta_listen.into_iter().collect();
    for listener in &listeners {
        let address = listener.address;
        if !is_wide && !is_local(address.ip()) {
            let problem = format!(
                "{address} is neither a loopback nor a link-local address, so other hosts could \
                 reach the cloud through it; set {WIDE} if they should"
            );
            errors.add(LISTEN, problem);
        }
        if address.port() != 0 && !addresses.insert(address) {
            let problem = format!("{address} is set twice, here or as --meta-listen");
            errors.add(LISTEN, problem);
        }
    }
    listeners
}

/// Returns whether only this host, or its link, can have connections to the address.
pub(crate) fn is_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
    }
}

/// The value without listeners.
const OFF: &str = "off";
const LISTEN: &str = "--cloud-listen";
const WIDE: &str = "--cloud-listen-wide";
