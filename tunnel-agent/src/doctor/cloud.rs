//! Facts about the listeners for targets of the cloud, and about what leads pods to them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustls::client::verify_server_name;
use rustls::server::ParsedCertificate;
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_process::host::is_own_address;
use tunnel_process::meta;
use tunnel_proto::tls;

use super::probe::limited;
use crate::config::CloudListener;
use crate::render::nft_table::{NFT_FILE, TABLE, family};

/// The facts for the checks D16. Empty without listeners.
#[derive(Debug)]
pub(super) struct CloudFacts {
    pub(super) listeners: Vec<ListenerFacts>,
    pub(super) rules: RuleFacts,
    /// A data path of the node that may translate addresses before the rules see them.
    pub(super) data_path: Option<&'static str>,
}

/// A listener of `--cloud-listen`.
#[derive(Debug)]
pub(super) struct ListenerFacts {
    pub(super) listener: CloudListener,
    /// Whether this host has the address. `None` if that cannot be known.
    pub(super) is_on_interface: Option<bool>,
    pub(super) answer: ListenerAnswer,
}

/// The answer on the address of a listener.
#[derive(Debug)]
pub(super) enum ListenerAnswer {
    /// There is no connection.
    Failed(String),
    /// A program accepts connections.
    Connected,
    /// A program accepts connections, and the API server gives no certificate through it.
    NoCertificate(String),
    /// The certificate of the API server, and whether the listener's address is a SAN of it.
    Certificate { has_address: bool },
}

/// The nft table that redirects the Service `kubernetes`.
#[derive(Debug)]
pub(super) struct RuleFacts {
    /// Whether this host has the file of the unit.
    pub(super) is_expected: bool,
    /// The table, unless there is none, or why it cannot be listed.
    pub(super) table: Result<Option<RuleTable>, String>,
}

/// Chains of the table that the kernel calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RuleTable {
    pub(super) chains: Vec<RuleChain>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuleChain {
    name: String,
    pub(super) hook: String,
    pub(super) priority: i64,
    /// Addresses to which its rules redirect connections.
    pub(super) targets: Vec<SocketAddr>,
}

/// Gathers the facts. Each step takes at most `within`.
pub(super) async fn gather(listeners: &[CloudListener], within: Duration) -> CloudFacts {
    // The system chooses the port 0, and the running agent alone knows which one.
    let known = listeners
        .iter()
        .filter(|listener| listener.address.port() != 0);
    let mut dials = JoinSet::new();
    for listener in known {
        dials.spawn(dial(listener.clone(), within));
    }
    let pods = listeners
        .iter()
        .find(|listener| !listener.address.ip().is_loopback());
    let (listeners, rules) = tokio::join!(
        dials.join_all(),
        rules(pods.map(|pods| pods.address.ip()), within)
    );
    let mut markers = DATA_PATHS.iter();
    CloudFacts {
        data_path: markers
            .find(|(path, _)| Path::new(path).exists())
            .filter(|_| !listeners.is_empty())
            .map(|(_, name)| *name),
        listeners,
        rules,
    }
}

/// Connects to a listener, and does a handshake with the API server through it.
async fn dial(listener: CloudListener, within: Duration) -> ListenerFacts {
    let address = meta::dialable(listener.address);
    let is_on_interface = match listener.address.ip() {
        ip @ IpAddr::V4(_) if !ip.is_unspecified() => Some(is_own_address(ip)),
        // A link-local address of IPv6 needs an interface to be looked up.
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    };
    let answer = answer(&listener, address, within).await;
    ListenerFacts {
        listener,
        is_on_interface,
        answer,
    }
}

async fn answer(listener: &CloudListener, address: SocketAddr, within: Duration) -> ListenerAnswer {
    let has_certificate = listener.target.as_str() == APISERVER;
    let socket = match limited(within, TcpStream::connect(address)).await {
        Ok(socket) => socket,
        // A program accepted and reset the connection at once, as the agent does without a session.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            return match has_certificate {
                true => ListenerAnswer::NoCertificate(error.to_string()),
                false => ListenerAnswer::Connected,
            };
        }
        Err(error) => return ListenerAnswer::Failed(error.to_string()),
    };
    if !has_certificate {
        return ListenerAnswer::Connected;
    }
    match limited(within, has_address(socket, address.ip())).await {
        Ok(has_address) => ListenerAnswer::Certificate { has_address },
        Err(error) => ListenerAnswer::NoCertificate(tls::describe(&error)),
    }
}

/// Returns whether the address is a SAN of the certificate at the other end. The certificate is not
/// verified, and nothing is sent after the handshake.
async fn has_address(socket: TcpStream, ip: IpAddr) -> io::Result<bool> {
    let config = tls::target_client(None, None).map_err(io::Error::other)?;
    let name = ServerName::from(ip);
    let stream = TlsConnector::from(config)
        .connect(name.clone(), socket)
        .await?;
    let certificates = stream.get_ref().1.peer_certificates();
    let leaf = certificates.and_then(<[_]>::first);
    let leaf = leaf.ok_or_else(|| io::Error::other("no certificate"))?;
    let leaf = ParsedCertificate::try_from(leaf).map_err(io::Error::other)?;
    Ok(verify_server_name(&leaf, &name).is_ok())
}

/// Lists the table of the rules for pods, if there is a listener for pods.
async fn rules(pods: Option<IpAddr>, within: Duration) -> RuleFacts {
    let Some(ip) = pods else {
        return RuleFacts {
            is_expected: false,
            table: Ok(None),
        };
    };
    let listed = timeout(within, spawn_blocking(move || list(family(ip)))).await;
    let table = match listed {
        Ok(Ok(table)) => table,
        Ok(Err(panicked)) => Err(panicked.to_string()),
        Err(_elapsed) => Err("nft gives no answer in time".to_owned()),
    };
    RuleFacts {
        is_expected: Path::new(NFT_FILE).exists(),
        table,
    }
}

fn list(family: &str) -> Result<Option<RuleTable>, String> {
    let arguments = ["-j", "list", "table", family, TABLE];
    let output = Command::new("nft").args(arguments).output();
    let output = output.map_err(|error| format!("nft: {error}"))?;
    if output.status.success() {
        return RuleTable::parse(&output.stdout).map(Some);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("No such file or directory") {
        return Ok(None);
    }
    let first = error.lines().next().unwrap_or("no output");
    Err(format!("nft: {first}"))
}

impl RuleTable {
    /// Parses the output of `nft -j`.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let document: Value =
            serde_json::from_slice(json).map_err(|error| format!("nft -j: {error}"))?;
        let mut table = Self::default();
        for entry in document["nftables"].as_array().into_iter().flatten() {
            let (chain, rule) = (&entry["chain"], &entry["rule"]);
            if let (Some(name), Some(hook), Some(priority)) = (
                chain["name"].as_str(),
                chain["hook"].as_str(),
                chain["prio"].as_i64(),
            ) {
                table.chains.push(RuleChain {
                    name: name.to_owned(),
                    hook: hook.to_owned(),
                    priority,
                    targets: Vec::new(),
                });
            }
            let mut chains = table.chains.iter_mut();
            let Some(chain) = chains.find(|chain| rule["chain"] == chain.name.as_str()) else {
                continue;
            };
            let expressions = rule["expr"].as_array().into_iter().flatten();
            let targets = expressions.filter_map(|expression| target(&expression["dnat"]));
            chain.targets.extend(targets);
        }
        Ok(table)
    }
}

fn target(dnat: &Value) -> Option<SocketAddr> {
    let ip = dnat["addr"].as_str()?.parse().ok()?;
    let port = u16::try_from(dnat["port"].as_u64()?).ok()?;
    Some(SocketAddr::new(ip, port))
}

/// Name of the target whose clients speak TLS.
const APISERVER: &str = "apiserver";
/// Files of data paths that can take the place of kube-proxy, the most certain one first.
const DATA_PATHS: [(&str, &str); 3] = [
    (
        "/sys/fs/bpf/cilium/socketlb/links/cgroup/cil_sock4_connect",
        "Cilium's load balancer at the socket",
    ),
    ("/sys/class/net/cilium_host", "Cilium"),
    ("/sys/class/net/bpfin.cali", "Calico's eBPF data path"),
];

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use rustls_pki_types::PrivatePkcs8KeyDer;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tunnel_proto::tcp::abort_on_close;
    use tunnel_proto::tls::{ReloadableKey, certified_key, https_server};

    use super::*;

    const LONG: Duration = Duration::from_secs(10);
    const DIALS: usize = 500;

    #[test]
    fn chains_and_targets_are_read_from_the_output_of_nft() {
        let table = RuleTable::parse(NFT_OUTPUT.as_bytes()).unwrap();
        let target = "169.254.2.1:10268".parse().unwrap();
        let chain = |hook: &str, targets| RuleChain {
            name: hook.to_owned(),
            hook: hook.to_owned(),
            priority: -101,
            targets,
        };
        let expected = [
            chain("prerouting", vec![target]),
            chain("output", Vec::new()),
        ];
        assert_eq!(table.chains, expected);
        assert!(RuleTable::parse(b"table ip x {}").is_err());
        assert_eq!(RuleTable::parse(b"[1]"), Ok(RuleTable::default()));
    }

    /// A connection can be reset before the end that dials it knows that it was accepted.
    #[tokio::test(flavor = "multi_thread")]
    async fn listener_that_resets_its_connections_at_once_is_one_that_accepts() {
        let listening = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listening.local_addr().unwrap();
        let mut resets = JoinSet::new();
        resets.spawn(async move {
            loop {
                let (client, _) = listening.accept().await.unwrap();
                abort_on_close(&client).unwrap();
            }
        });
        let listener: CloudListener = format!("dns={address}").parse().unwrap();
        for _ in 0..DIALS {
            let facts = dial(listener.clone(), LONG).await;
            assert!(
                matches!(facts.answer, ListenerAnswer::Connected),
                "{facts:?}"
            );
        }
    }

    #[tokio::test]
    async fn closed_listener_is_a_failure_and_one_without_tls_has_no_certificate() {
        let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = other.local_addr().unwrap();
        let listener =
            |name: &str| -> CloudListener { format!("{name}={address}").parse().unwrap() };
        let facts = gather(&[listener("registry")], LONG).await;
        let [registry] = &facts.listeners[..] else {
            panic!("{facts:?}");
        };
        assert_eq!(registry.is_on_interface, Some(true));
        assert!(matches!(registry.answer, ListenerAnswer::Connected));
        assert_eq!(facts.rules.table, Ok(None), "no listener for pods");
        let apiserver = [listener("apiserver")];
        let accepts = async {
            let (first, _) = other.accept().await.unwrap();
            drop(first);
            drop(other.accept().await.unwrap());
        };
        let (facts, ()) = tokio::join!(gather(&apiserver, LONG), accepts);
        let answer = &facts.listeners[0].answer;
        assert!(matches!(answer, ListenerAnswer::NoCertificate(_)));
        drop(other);
        let facts = gather(&apiserver, LONG).await;
        let answer = &facts.listeners[0].answer;
        assert!(matches!(answer, ListenerAnswer::Failed(_)), "{answer:?}");
    }

    #[tokio::test]
    async fn address_is_looked_for_among_the_names_of_the_certificate() {
        for (names, expected) in [
            (vec!["127.0.0.1".to_owned()], true),
            (vec!["kubernetes.default.svc".to_owned()], false),
        ] {
            let key = KeyPair::generate().unwrap();
            let parameters = CertificateParams::new(names).unwrap();
            let certificate = parameters.self_signed(&key).unwrap();
            let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
            let own = certified_key(vec![certificate.der().clone()], key).unwrap();
            let acceptor = TlsAcceptor::from(https_server(ReloadableKey::new(own), None).unwrap());
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = server.local_addr().unwrap();
            let serve = async { acceptor.accept(server.accept().await.unwrap().0).await };
            let listener = format!("apiserver={address}").parse().unwrap();
            let (facts, _served) = tokio::join!(dial(listener, LONG), serve);
            let ListenerAnswer::Certificate { has_address } = facts.answer else {
                panic!("{facts:?}");
            };
            assert_eq!(has_address, expected);
        }
    }

    const NFT_OUTPUT: &str = r#"{"nftables": [
        {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
        {"table": {"family": "ip", "name": "culvert_edge_apiserver", "handle": 2}},
        {"chain": {"family": "ip", "table": "culvert_edge_apiserver", "name": "prerouting", "handle": 1, "type": "nat", "hook": "prerouting", "prio": -101, "policy": "accept"}},
        {"chain": {"family": "ip", "table": "culvert_edge_apiserver", "name": "output", "handle": 2, "type": "nat", "hook": "output", "prio": -101, "policy": "accept"}},
        {"rule": {"family": "ip", "table": "culvert_edge_apiserver", "chain": "prerouting", "handle": 3, "expr": [
            {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": "10.96.0.1"}},
            {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": 443}},
            {"dnat": {"addr": "169.254.2.1", "port": 10268}}]}}]}"#;
}
