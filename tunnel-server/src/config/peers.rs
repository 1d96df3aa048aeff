//! Settings of the connections to the other servers of the installation.

use std::collections::BTreeSet;
use std::net::{Ipv6Addr, SocketAddr};

use tunnel_process::host::host_name;
use tunnel_process::settings::{ConfigErrors, optional, parse_address, parse_quoted};
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::name::{ReplicaId, ZoneName};

use super::RawConfig;
use super::certificates::CredentialFiles;
use super::kubernetes::KubernetesSettings;
use super::listeners::host_and_port;
use crate::routing::peers::PeerAddress;

/// Default port of the listener for other servers.
pub const PORT_PEERS: u16 = 10269;

/// The settings of the connections to other servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSettings {
    /// `--replica-name`: the name of this server among the servers of the installation.
    pub name: ReplicaId,
    /// `--zone`: where this server fails together with others.
    pub zone: Option<ZoneName>,
    /// Address of the listener for other servers, port 10269. `None` means that this server has no
    /// connections to others.
    pub listen: Option<SocketAddr>,
    /// The other servers. The list may contain this server, so that all servers can have one file.
    pub peers: Vec<PeerAddress>,
    /// Certificate files that the operator provides. Without them the local CA issues the
    /// certificate and is trusted.
    pub files: Option<CredentialFiles>,
}

impl PeerSettings {
    pub(super) fn check(
        raw: &RawConfig,
        kubernetes: Option<&KubernetesSettings>,
        errors: &mut ConfigErrors,
    ) -> Self {
        let peers = peers(raw, errors);
        let follows_service =
            kubernetes.is_some_and(|settings| settings.in_cluster && !settings.single_replica);
        let default: Option<SocketAddr> = (follows_service || !peers.is_empty())
            .then(|| (Ipv6Addr::UNSPECIFIED, PORT_PEERS).into());
        let listen = errors.parse_with(
            LISTEN,
            raw.peer_listen.as_deref(),
            default,
            optional("off", parse_address),
        );
        if listen.is_none() && !peers.is_empty() {
            errors.add(LISTEN, "off, but --peer names other servers, which dial it");
        }
        Self {
            name: replica_name(raw, listen.is_some(), errors),
            zone: errors.parse_with(ZONE, raw.zone.as_deref(), None, |text| {
                parse_quoted(text).map(Some)
            }),
            listen,
            peers,
            files: CredentialFiles::for_peers(raw, errors),
        }
    }
}

/// Returns the name of this server: the configured one, or else the host's name. A server that other
/// servers do not know needs no name.
fn replica_name(raw: &RawConfig, has_peers: bool, errors: &mut ConfigErrors) -> ReplicaId {
    let configured = raw.replica_name.as_deref();
    let parsed = match configured {
        Some(name) => parse_quoted(name),
        None => host_name()
            .map_err(|error| format!("cannot read the host's name: {error}"))
            .and_then(|name| parse_quoted::<ReplicaId>(&name.to_ascii_lowercase()))
            .map_err(|error| {
                format!("not given, and the host's name is no name of a server: {error}")
            }),
    };
    let name = if configured.is_some() || has_peers {
        errors.ok_or_record(NAME, parsed)
    } else {
        parsed.ok()
    };
    name.unwrap_or_else(unnamed)
}

/// Returns the name of a server whose host has none.
#[expect(clippy::expect_used, reason = "a constant with the syntax of a name")]
fn unnamed() -> ReplicaId {
    "tunnel-server".parse().expect("name of a server")
}

fn peers(raw: &RawConfig, errors: &mut ConfigErrors) -> Vec<PeerAddress> {
    let texts = raw.peers.iter().filter(|text| !text.trim().is_empty());
    let peers = errors.parse_list(PEER, texts, parse_peer);
    let mut names = BTreeSet::new();
    for peer in &peers {
        if !names.insert(&peer.id) {
            errors.add(PEER, format!("{} is named twice", peer.id));
        }
    }
    if peers.len() > REPLICAS_MAX {
        errors.add(PEER, format!("more than {REPLICAS_MAX} servers"));
    }
    peers
}

fn parse_peer(text: &str) -> Result<PeerAddress, String> {
    let Some((name, address)) = text.trim().split_once('=') else {
        return Err(format!("{text:?} is not NAME=HOST:PORT"));
    };
    Ok(PeerAddress {
        id: parse_quoted(name)?,
        address: host_and_port(address)?,
        zone: None,
    })
}

const NAME: &str = "--replica-name";
const ZONE: &str = "--zone";
const LISTEN: &str = "--peer-listen";
const PEER: &str = "--peer";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{around, yaml};
    use crate::testing::assert_contains;

    fn listen(config: Result<crate::config::Config, String>) -> Option<String> {
        let listen = config.unwrap().peers.listen;
        listen.map(|address| address.to_string())
    }

    #[test]
    fn peer_listener_is_on_in_a_cluster_and_with_other_servers() {
        let wide = Some("[::]:10269".to_owned());
        assert_eq!(listen(yaml("{}")), None);
        assert_eq!(listen(around("{}", true)), wide);
        assert_eq!(listen(around("singleReplica: true", true)), None);
        assert_eq!(listen(around("peerListen: off", true)), None);
        let other = "peers: [b=192.0.2.2:10269]\nreplicaName: a";
        assert_eq!(listen(yaml(other)), wide);
        let settings = yaml(&format!("{other}\npeerListen: 127.0.0.1:1"));
        assert_eq!(listen(settings), Some("127.0.0.1:1".into()));
    }

    #[test]
    fn servers_and_files_are_read() {
        let text = "replicaName: a.example\nzone: eu-1a\npeers: ['b=b.example:1', ' c=[fd00::1]:2']\n\
                    peerCa: /ca\npeerCertFile: /both";
        let peers = yaml(text).unwrap().peers;
        assert_eq!(peers.name.as_str(), "a.example");
        assert_eq!(peers.zone, Some("eu-1a".parse().unwrap()));
        let shown: Vec<_> = (peers.peers.iter())
            .map(|peer| format!("{} {}", peer.id, peer.address))
            .collect();
        assert_eq!(shown, ["b b.example:1", "c [fd00::1]:2"]);
        let files = peers.files.unwrap();
        assert_eq!(files.pair.key, files.pair.certificate);
    }

    #[test]
    fn malformed_settings_are_reported() {
        let many: Vec<_> = (0..=REPLICAS_MAX).map(|n| format!("s{n}=h:1")).collect();
        let many = format!("replicaName: a\npeers: [{}]", many.join(", "));
        for (text, hint) in [
            ("replicaName: a_b", "--replica-name"),
            ("zone: a b", "--zone: \"a b\": zone is not a label value"),
            ("replicaName: a\npeers: [b]", "NAME=HOST:PORT"),
            ("replicaName: a\npeers: [b=c]", "is not HOST:PORT"),
            ("replicaName: a\npeers: ['b b=c:1']", "--peer: \"b b\""),
            ("replicaName: a\npeers: [b=c:1, b=d:1]", "b is named twice"),
            (&*many, "more than 64 servers"),
            (
                "replicaName: a\npeers: [b=c:1]\npeerListen: off",
                "--peer-listen",
            ),
            ("peerCa: /ca", "--peer-cert-file too"),
            ("peerCertFile: /c", "--peer-ca too"),
            ("peerKeyFile: /k", "--peer-cert-file too"),
        ] {
            assert_contains(&yaml(text).unwrap_err(), hint);
        }
    }
}
