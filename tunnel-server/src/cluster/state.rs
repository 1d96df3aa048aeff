//! What the cluster says, as far as it was heard, and what follows from it; pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tunnel_proto::process::networks::Cidr;
use tunnel_proto::wire::name::{NodeName, Port};

use super::nodes::{AliasOwners, FactMap, NodeSet};
use super::ports;
use super::service::{self, DoorPorts};
use super::watches::Seen;
use crate::dns::{Addresses, RecordSet};
use crate::policy::PortPolicy;

/// What is kept on disk, for a start without the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Kept {
    pub(super) nodes: FactMap,
    /// Which node has which alias.
    pub(super) aliases: AliasOwners,
    pub(super) tunnel_addresses: Vec<IpAddr>,
    /// Values of the ports ConfigMap, if there was one.
    pub(super) ports: Option<BTreeMap<String, String>>,
}

/// Everything that is followed.
#[derive(Debug, Clone, Default)]
pub(super) struct World {
    /// Nodes as heard, or as kept before the first list.
    pub(super) nodes: Arc<NodeSet>,
    /// Whether the nodes were heard.
    pub(super) is_listed: bool,
    /// The Service, JSON.
    pub(super) service: Seen<Arc<Value>>,
    /// The nodes ConfigMap.
    pub(super) records_map: Seen<Arc<ConfigMap>>,
    /// The ports ConfigMap.
    pub(super) ports_map: Seen<Arc<ConfigMap>>,
    /// Networks of Services that can be believed, when they are followed.
    pub(super) service_networks: Arc<[Cidr]>,
    /// What was kept.
    pub(super) kept: Arc<Kept>,
}

/// Facts that do not come from the cluster.
#[derive(Debug, Clone)]
pub(super) struct Own {
    /// The doors' policy while there is no ports ConfigMap.
    pub(super) policy: PortPolicy,
    /// Numbers of the doors.
    pub(super) doors: DoorPorts,
}

/// What follows for this server.
#[derive(Debug)]
pub(super) struct Derived {
    /// The records, when they can be told.
    pub(super) records: Option<RecordSet>,
    /// The doors' policy.
    pub(super) policy: PortPolicy,
    /// Entries of the ports ConfigMap that were left out.
    pub(super) mistakes: Vec<String>,
}

/// What the one that writes should see to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Desired {
    /// The records, when all that they follow from was heard.
    pub(super) records: Option<Arc<RecordSet>>,
    /// Extra ports of the Service with the doors they lead to, when they were heard.
    pub(super) ports: Option<BTreeMap<Port, u16>>,
}

impl World {
    /// Before anything was heard; `nodes` are the persisted ones.
    pub(super) fn kept(kept: Kept, nodes: NodeSet) -> Self {
        Self {
            nodes: Arc::new(nodes),
            kept: Arc::new(kept),
            ..Self::default()
        }
    }

    /// Addresses that edge nodes' names answer with; none while the Service has none.
    pub(super) fn tunnel(&self) -> Vec<IpAddr> {
        match &self.service {
            Seen::Unknown => self.kept.tunnel_addresses.clone(),
            Seen::Absent => Vec::new(),
            Seen::Present(service) => service::addresses(service),
        }
    }

    fn port_lists(&self) -> Option<&BTreeMap<String, String>> {
        match &self.ports_map {
            Seen::Unknown => self.kept.ports.as_ref(),
            Seen::Absent => None,
            Seen::Present(map) => Some(map.data.as_ref().unwrap_or(&NO_DATA)),
        }
    }

    /// What follows for this server. Without the Service's address nothing is said of records: those there are stay.
    pub(super) fn derive(&self, own: &Own, has_agent: impl Fn(&NodeName) -> bool) -> Derived {
        let served = self
            .port_lists()
            .map(|lists| ports::read(lists, own.doors.http, &own.policy.own));
        let (policy, mistakes) = served.map_or_else(
            || (own.policy.clone(), Vec::new()),
            |served| (served.policy, served.mistakes),
        );
        let tunnel = self.tunnel();
        let is_told = !tunnel.is_empty() && (self.is_listed || !self.kept.nodes.is_empty());
        let records = is_told
            .then(|| RecordSet::new(&self.nodes.records(has_agent), Addresses::first_of(tunnel)));
        Derived {
            records,
            policy,
            mistakes,
        }
    }

    /// Whether records and ports follow from what was heard, not from what was kept.
    pub(super) fn is_heard(&self) -> (bool, bool) {
        let has_records = self.is_listed && self.service.present().is_some();
        (has_records, self.ports_map.is_known())
    }

    /// What to keep of it.
    pub(super) fn keep(&self) -> Kept {
        Kept {
            nodes: if self.is_listed {
                self.nodes.facts()
            } else {
                self.kept.nodes.clone()
            },
            aliases: self.nodes.alias_owners(),
            tunnel_addresses: self.tunnel(),
            ports: self.port_lists().cloned(),
        }
    }
}

static NO_DATA: BTreeMap<String, String> = BTreeMap::new();
