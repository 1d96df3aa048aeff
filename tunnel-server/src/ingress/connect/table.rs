//! Where a CONNECT leads, in a word, for tables of cases.

use std::net::{IpAddr, SocketAddr};

use http::Request;
use tunnel_proto::wire::name::{NodeName, Port};

use super::dial::judge_all;
use crate::ingress::connect::request::{Goal, Place, Way};
use crate::policy::PortPolicy;
use crate::routing::dial_policy::{Allowed, Claims, LiveRanges};
use crate::routing::routes::RouteTable;

/// A server in a cluster.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) routes: RouteTable,
    pub(crate) ranges: LiveRanges,
    /// Nodes whose agents are connected.
    pub(crate) agents: Vec<NodeName>,
    /// Addresses of the server.
    pub(crate) own: Vec<IpAddr>,
}

impl Setting {
    /// `agent NODE`, `direct ADDRESSES`, `name NAME` for a name that is resolved, or the status of the refusal.
    pub(crate) fn leads(&self, target: &str) -> String {
        let policy = PortPolicy {
            own: Port::new(10264).into_iter().collect(),
            ..PortPolicy::default()
        };
        let request = Request::builder().method("CONNECT").uri(target);
        let request = request.body(()).unwrap();
        let has_agent = |node: &NodeName| self.agents.contains(node);
        let goal = Goal::of(request.method(), request.uri(), request.headers()).unwrap();
        let way = goal.way(&self.routes, &policy, &self.ranges.load(), has_agent);
        let addresses = match way {
            Ok(Way::Agent(destination)) => return format!("agent {}", destination.node),
            Ok(Way::Direct(Place::Name(name))) => return format!("name {name}"),
            Ok(Way::Direct(Place::Addresses(addresses))) => addresses,
            Err(failure) => return failure.outcome.status().as_u16().to_string(),
        };
        let claims = Claims {
            routes: &self.routes,
            has_agent: &has_agent,
            is_own: &|ip| self.own.contains(&ip),
            own_ports: &policy.own,
        };
        let addresses = addresses.into_iter();
        let addresses = addresses.map(|ip| SocketAddr::new(ip, goal.port.get()));
        let allowed = Allowed::Cluster(self.ranges.clone());
        match judge_all(&allowed, addresses.collect(), &claims) {
            Ok(addresses) => {
                let addresses: Vec<_> = addresses.iter().map(|to| to.ip().to_string()).collect();
                format!("direct {}", addresses.join(" "))
            }
            Err(why) => why.failure(target).outcome.status().as_u16().to_string(),
        }
    }
}
