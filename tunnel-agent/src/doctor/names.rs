//! Facts about the names of this node: which resolvers its pods and its programs ask, and whether
//! these answer.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;
use tunnel_doctor::NO_ANSWER;
use tunnel_process::host::interfaces_of;

use super::probe::limited;

/// The facts for the check D21.
#[derive(Debug)]
pub(super) struct NameFacts {
    /// The resolvers that the kubelet gives to pods, or why they are not known.
    pub(super) pods: Result<Vec<ResolverFacts>, String>,
    /// The resolvers of this host's programs, the agent among them.
    pub(super) host: Vec<IpAddr>,
}

/// A resolver that pods ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResolverFacts {
    pub(super) address: IpAddr,
    /// Interfaces of this host that have the address.
    pub(super) interfaces: Vec<String>,
    /// Whether it answers over UDP, or why not.
    pub(super) answer: Result<(), String>,
}

impl ResolverFacts {
    /// Returns whether a program of this host has the address. kube-proxy adds the addresses of all
    /// Services to its own interface, and leads connections elsewhere.
    pub(super) fn is_of_this_host(&self) -> bool {
        let mut interfaces = self.interfaces.iter();
        interfaces.any(|interface| interface != IPVS_INTERFACE)
    }
}

/// Gathers the facts, if the agent has listeners for targets of the cloud. Each step takes at most
/// `within`.
pub(super) async fn gather(has_listeners: bool, within: Duration) -> NameFacts {
    if !has_listeners {
        return NameFacts {
            pods: Ok(Vec::new()),
            host: Vec::new(),
        };
    }
    let read = timeout(within, spawn_blocking(|| read(Path::new("/")))).await;
    let (pods, host) = match read {
        Ok(Ok(read)) => read,
        Ok(Err(panicked)) => (Err(panicked.to_string()), Vec::new()),
        Err(_elapsed) => (Err(NO_ANSWER.to_owned()), Vec::new()),
    };
    let pods = match pods {
        Ok(addresses) => {
            let mut probes = JoinSet::new();
            for address in addresses {
                probes.spawn(probe(address, within));
            }
            let mut resolvers = probes.join_all().await;
            resolvers.sort_by_key(|resolver| resolver.address);
            Ok(resolvers)
        }
        Err(reason) => Err(reason),
    };
    NameFacts { pods, host }
}

/// Returns the resolvers of pods, and those of the host, below `root`.
fn read(root: &Path) -> (Result<Vec<IpAddr>, String>, Vec<IpAddr>) {
    let resolv_conf = fs::read_to_string(root.join("etc/resolv.conf")).unwrap_or_default();
    let nameservers = resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == "nameserver")?;
        words.next()?.parse::<IpAddr>().ok()
    });
    (cluster_dns(root), nameservers.collect())
}

/// Returns the resolvers that the kubelet gives to pods. A flag overrides its configuration.
fn cluster_dns(root: &Path) -> Result<Vec<IpAddr>, String> {
    let command = kubelet(&root.join("proc"));
    let flag = |name: &str| flag(command.as_deref()?, name);
    if let Some(list) = flag("cluster-dns") {
        let addresses = list
            .split(',')
            .map(|address| address.trim().parse::<IpAddr>());
        let addresses = addresses.collect::<Result<Vec<_>, _>>();
        return addresses.map_err(|_error| format!("--cluster-dns of the kubelet is {list:?}"));
    }
    let file = flag("config").map_or_else(|| PathBuf::from(KUBELET_CONFIG), PathBuf::from);
    let shown = file.display();
    let path = root.join(file.strip_prefix("/").unwrap_or(&file));
    let text = fs::read_to_string(path).map_err(|error| match (error.kind(), &command) {
        (io::ErrorKind::NotFound, None) => {
            format!("no kubelet runs on this host, and there is no {shown}")
        }
        _ => format!("{shown}: {error}"),
    })?;
    cluster_dns_of(&text).ok_or_else(|| format!("{shown} has no clusterDNS that can be read"))
}

/// Returns the command line of the kubelet, if one runs. One in another network, as that of a node in
/// a container, is not this node's.
fn kubelet(proc: &Path) -> Option<Vec<String>> {
    let processes = fs::read_dir(proc).ok()?;
    let network = |process: &Path| fs::read_link(process.join("ns/net")).ok();
    let own = network(&proc.join("self"));
    processes.flatten().find_map(|process| {
        let name = fs::read_to_string(process.path().join("comm")).ok()?;
        (name.trim() == "kubelet").then_some(())?;
        // Only root may read that of the kubelet.
        let other = network(&process.path());
        (own.is_none() || other.is_none() || own == other).then_some(())?;
        let command = fs::read(process.path().join("cmdline")).ok()?;
        let words = command.split(|byte| *byte == 0);
        Some(
            words
                .map(|word| String::from_utf8_lossy(word).into_owned())
                .collect(),
        )
    })
}

/// Returns the value of a flag, in the spellings that Go programs take.
fn flag(command: &[String], name: &str) -> Option<String> {
    let mut words = command.iter();
    while let Some(word) = words.next() {
        let body = word.trim_start_matches('-');
        if body == word {
            continue;
        }
        let (flag, value) = match body.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (body, None),
        };
        if flag.replace('_', "-") == name {
            return value.or_else(|| words.next().cloned());
        }
    }
    None
}

/// Returns the list `clusterDNS` of a kubelet's configuration, in block or flow style.
fn cluster_dns_of(config: &str) -> Option<Vec<IpAddr>> {
    let mut lines = config.lines();
    let list = lines.find_map(|line| line.strip_prefix("clusterDNS:"))?;
    let list = list.split('#').next().unwrap_or_default().trim();
    let entries: Vec<&str> = if list.is_empty() {
        let entries = lines.map_while(|line| line.trim_start().strip_prefix("- "));
        entries.collect()
    } else {
        let list = list.strip_prefix('[')?.strip_suffix(']')?;
        list.split(',').collect()
    };
    let addresses = entries.into_iter().map(|entry| {
        let entry = entry.split('#').next().unwrap_or_default();
        entry
            .trim()
            .trim_matches(['"', '\''])
            .parse::<IpAddr>()
            .ok()
    });
    let addresses: Vec<IpAddr> = addresses.collect::<Option<_>>()?;
    (!addresses.is_empty()).then_some(addresses)
}

async fn probe(address: IpAddr, within: Duration) -> ResolverFacts {
    let answer = limited(within, ask((address, 53).into())).await;
    ResolverFacts {
        address,
        interfaces: interfaces_of(address),
        answer: answer.map_err(|error| error.to_string()),
    }
}

/// Asks a resolver for the name servers of the root. Any answer counts.
async fn ask(resolver: SocketAddr) -> io::Result<()> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    let id: [u8; 2] = rand::random();
    let mut query = id.to_vec();
    query.extend(ROOT_QUERY);
    socket.send(&query).await?;
    let mut answer = [0; 512];
    loop {
        let length = socket.recv(&mut answer).await?;
        if answer
            .get(..length)
            .is_some_and(|answer| answer.starts_with(&id))
        {
            return Ok(());
        }
    }
}

/// The query after its number: recursion desired, one question, for records NS of the root
/// (RFC 1035, section 4.1).
const ROOT_QUERY: [u8; 15] = [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];
/// The file in which kubeadm writes the kubelet's configuration.
const KUBELET_CONFIG: &str = "/var/lib/kubelet/config.yaml";
/// The interface of kube-proxy in the mode IPVS.
const IPVS_INTERFACE: &str = "kube-ipvs0";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ScratchDir;

    fn addresses(list: &[&str]) -> Vec<IpAddr> {
        list.iter()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    #[test]
    fn addresses_are_read_from_every_form_of_the_list() {
        for (config, expected) in [
            (
                "clusterDNS:\n- 10.96.0.10\n- fd00::a\nb: 1\n",
                Some(&["10.96.0.10", "fd00::a"][..]),
            ),
            (
                "a: 1\nclusterDNS:\n  - \"10.96.0.10\" # old\n",
                Some(&["10.96.0.10"]),
            ),
            (
                "clusterDNS: ['10.96.0.10', 10.96.0.11] # two\n",
                Some(&["10.96.0.10", "10.96.0.11"]),
            ),
            ("clusterDNS: []\n", None),
            ("clusterDNS: 10.96.0.10\n", None),
            ("clusterDNS:\n- dns.example.com\n", None),
            ("a: 1\n", None),
        ] {
            assert_eq!(cluster_dns_of(config), expected.map(addresses), "{config}");
        }
    }

    #[test]
    fn flag_of_the_running_kubelet_overrides_its_file() {
        let scratch = ScratchDir::new().unwrap();
        let root = scratch.path();
        let process = root.join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::create_dir_all(root.join("etc")).unwrap();
        let resolv_conf = "# mine\nnameserver 192.0.2.53\nsearch a b\nnameserver ::1\n";
        fs::write(root.join("etc/resolv.conf"), resolv_conf).unwrap();
        let (pods, host) = read(root);
        assert!(pods.unwrap_err().starts_with("no kubelet runs"));
        assert_eq!(host, addresses(&["192.0.2.53", "::1"]));
        let config = root.join("own.yaml");
        fs::write(process.join("comm"), "kubelet\n").unwrap();
        for (command, expected) in [
            ("kubelet\0--config=/own.yaml\0", "10.96.0.10"),
            (
                "kubelet\0-config\0/own.yaml\0--cluster_dns\x00169.254.20.10\0",
                "169.254.20.10",
            ),
            (
                "kubelet\0--cluster-dns=169.254.20.10\0--config=/none\0",
                "169.254.20.10",
            ),
        ] {
            fs::write(&config, "clusterDNS: [10.96.0.10]\n").unwrap();
            fs::write(process.join("cmdline"), command).unwrap();
            assert_eq!(read(root).0, Ok(addresses(&[expected])), "{command:?}");
        }
        fs::write(process.join("cmdline"), "kubelet\0--cluster-dns=a\0").unwrap();
        assert!(read(root).0.unwrap_err().contains("--cluster-dns"));
        for (process, network) in [("7", "net:[2]"), ("self", "net:[1]")] {
            let folder = root.join("proc").join(process).join("ns");
            fs::create_dir_all(&folder).unwrap();
            std::os::unix::fs::symlink(network, folder.join("net")).unwrap();
        }
        assert!(read(root).0.unwrap_err().starts_with("no kubelet runs"));
    }

    #[tokio::test]
    async fn any_answer_counts_and_silence_is_a_reason() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        let serve = async {
            let mut query = [0; 64];
            let (length, client) = server.recv_from(&mut query).await.unwrap();
            assert_eq!(length, 17);
            // Of another query, then of this one.
            server.send_to(&[0; 12], client).await.unwrap();
            query[2] = 0x80;
            server.send_to(&query[..length], client).await.unwrap();
        };
        let (answered, ()) = tokio::join!(ask(address), serve);
        answered.unwrap();
        drop(server);
        assert!(ask(address).await.is_err());
    }
}
