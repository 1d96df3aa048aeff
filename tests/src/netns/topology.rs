//! A cloud and two edge sites behind NAT.

use std::fs;
use std::net::Ipv4Addr;

use super::Namespace;
use crate::process::ScratchDir;
use crate::tools::{Skip, Tool, require};

/// A cloud and two edge sites with the same addresses:
///
/// ```text
///                                  router-1  masquerades        edge of worker-1
///              10.77.1.1 -------- 10.77.1.2 | 192.168.33.1 ---- 192.168.33.221
///   cloud
///   10.77.0.1
///              10.77.2.1 -------- 10.77.2.2 | 192.168.33.1 ---- 192.168.33.221
///                                  router-2  masquerades        edge of worker-2
/// ```
///
/// The routers drop unsolicited traffic, so that edges can only dial out. In the cloud the names of
/// the nodes resolve to the cloud's own address, as with an operator's DNS.
#[derive(Debug)]
pub struct Topology {
    edges: [Edge; 2],
    cloud: Namespace,
    /// Directory of the files that are mounted over `/etc/hosts`.
    _scratch: ScratchDir,
}

/// One site: a node and its router.
#[derive(Debug)]
pub struct Edge {
    node_name: &'static str,
    node: Namespace,
    router: Namespace,
}

impl Topology {
    /// Creates the topology, in some 100 ms.
    pub fn new() -> Result<Self, Skip> {
        require(&[Tool::Unshare, Tool::Nsenter, Tool::Ip, Tool::Nft])?;
        let failed = |error: std::io::Error| Skip::because(format!("cannot write hosts: {error}"));
        let scratch = ScratchDir::new().map_err(failed)?;
        let [cloud_hosts, edge_hosts] = ["cloud", "edge"].map(|name| scratch.path().join(name));
        let localhost = "127.0.0.1 localhost\n";
        fs::write(&edge_hosts, localhost).map_err(failed)?;
        let names = NODES.join(" ");
        fs::write(
            &cloud_hosts,
            format!("{localhost}{CLOUD_ADDRESS} cloud {names}\n"),
        )
        .map_err(failed)?;
        let cloud = Namespace::new("cloud", &cloud_hosts)?;
        cloud.script(&format!("$IP address add {CLOUD_ADDRESS}/32 dev lo"))?;
        let site = |site: usize| -> Result<Edge, Skip> {
            let router = cloud.neighbor(&format!("router-{site}"), &edge_hosts)?;
            let node = cloud.neighbor(&format!("edge-{site}"), &edge_hosts)?;
            connect(&cloud, &router, &node, site)?;
            Ok(Edge {
                node_name: NODES[site - 1],
                node,
                router,
            })
        };
        let edges = [site(1)?, site(2)?];
        Ok(Self {
            edges,
            cloud,
            _scratch: scratch,
        })
    }

    /// Returns the namespace of the server.
    pub fn cloud(&self) -> &Namespace {
        &self.cloud
    }

    /// Returns the edges with the agents, in the order of [`NODES`].
    pub fn edges(&self) -> &[Edge; 2] {
        &self.edges
    }
}

impl Edge {
    /// Returns the node's name, one of [`NODES`].
    pub fn node_name(&self) -> &'static str {
        self.node_name
    }

    /// Returns the namespace of the agent and its targets.
    pub fn node(&self) -> &Namespace {
        &self.node
    }

    /// Returns the router between the node and the cloud. The router can dial the node.
    pub fn router(&self) -> &Namespace {
        &self.router
    }
}

/// Links the three namespaces and sets up addresses, routes and a firewall.
fn connect(
    cloud: &Namespace,
    router: &Namespace,
    node: &Namespace,
    site: usize,
) -> Result<(), Skip> {
    cloud.script(&format!(
        "$IP link add site{site} type veth peer name wan netns {router}
         $IP address add 10.77.{site}.1/30 dev site{site}
         $IP link set site{site} up",
        router = router.holder(),
    ))?;
    router.script(&format!(
        "$IP address add 10.77.{site}.2/30 dev wan
         $IP link set wan up
         $IP route add default via 10.77.{site}.1
         $IP link add lan type veth peer name eth0 netns {node}
         $IP address add {ROUTER_ADDRESS}/24 dev lan
         $IP link set lan up
         echo 1 >/proc/sys/net/ipv4/ip_forward
         $NFT -f - <<'RULES'
{NAT}
RULES",
        node = node.holder(),
    ))?;
    node.script(&format!(
        "$IP address add {EDGE_ADDRESS}/24 dev eth0
         $IP link set eth0 up
         $IP route add default via {ROUTER_ADDRESS}"
    ))?;
    Ok(())
}

/// The names of the two nodes.
pub const NODES: [&str; 2] = ["worker-1", "worker-2"];

/// The address of both nodes.
pub const EDGE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 33, 221);

/// The server's address, as seen from all namespaces.
pub const CLOUD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

const ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 168, 33, 1);

const NAT: &str = "table ip site {
  chain postrouting {
    type nat hook postrouting priority 100; policy accept;
    oifname wan masquerade
  }
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname lan oifname wan accept
  }
}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::or_skip;

    #[test]
    fn namespaces_end_with_their_value() {
        let Some(sites) = or_skip(Topology::new()) else {
            return;
        };
        let holders: Vec<u32> = std::iter::once(sites.cloud())
            .chain(
                sites
                    .edges()
                    .iter()
                    .flat_map(|edge| [edge.node(), edge.router()]),
            )
            .map(Namespace::holder)
            .collect();
        drop(sites);
        for holder in holders {
            assert!(!std::path::Path::new(&format!("/proc/{holder}")).exists());
        }
    }
}
