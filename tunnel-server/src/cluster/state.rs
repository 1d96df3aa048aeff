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
use super::service::{self, ListenerPorts};
use super::watches::Observed;
use crate::dns::{Addresses, RecordSet};
use crate::policy::PortPolicy;

/// What is kept on disk, for a start without the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PersistedState {
    pub(super) nodes: FactMap,
    /// Which node has which alias.
    pub(super) aliases: AliasOwners,
    pub(super) tunnel_addresses: Vec<IpAddr>,
    /// Values of the ports ConfigMap, if there was one.
    pub(super) ports: Option<BTreeMap<String, String>>,
}

/// Everything that is followed.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterState {
    /// Nodes as heard, or as kept before the first list.
    pub(super) nodes: Arc<NodeSet>,
    /// Whether the nodes were heard.
    pub(super) is_listed: bool,
    /// The Service, JSON.
    pub(super) service: Observed<Arc<Value>>,
    /// The nodes ConfigMap.
    pub(super) records_map: Observed<Arc<ConfigMap>>,
    /// The ports ConfigMap.
    pub(super) ports_map: Observed<Arc<ConfigMap>>,
    /// Networks of Services that can be believed, when they are followed.
    pub(super) service_networks: Arc<[Cidr]>,
    /// What was kept.
    pub(super) persisted: Arc<PersistedState>,
}

/// Facts that do not come from the cluster.
#[derive(Debug, Clone)]
pub(super) struct LocalFacts {
    /// The doors' policy while there is no ports ConfigMap.
    pub(super) policy: PortPolicy,
    /// Numbers of the doors.
    pub(super) listener_ports: ListenerPorts,
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
pub(super) struct DesiredState {
    /// The records, when all that they follow from was heard.
    pub(super) records: Option<Arc<RecordSet>>,
    /// Extra ports of the Service with the doors they lead to, when they were heard.
    pub(super) ports: Option<BTreeMap<Port, u16>>,
}

impl ClusterState {
    /// Before anything was heard; `nodes` are the persisted ones.
    pub(super) fn persisted(persisted: PersistedState, nodes: NodeSet) -> Self {
        Self {
            nodes: Arc::new(nodes),
            persisted: Arc::new(persisted),
            ..Self::default()
        }
    }

    /// Addresses that edge nodes' names answer with; none while the Service has none.
    pub(super) fn tunnel(&self) -> Vec<IpAddr> {
        match &self.service {
            Observed::Unknown => self.persisted.tunnel_addresses.clone(),
            Observed::Absent => Vec::new(),
            Observed::Present(service) => service::addresses(service),
        }
    }

    fn port_lists(&self) -> Option<&BTreeMap<String, String>> {
        match &self.ports_map {
            Observed::Unknown => self.persisted.ports.as_ref(),
            Observed::Absent => None,
            Observed::Present(map) => Some(map.data.as_ref().unwrap_or(&NO_DATA)),
        }
    }

    /// What follows for this server. Without the Service's address nothing is said of records: those there are stay.
    pub(super) fn derive(
        &self,
        own: &LocalFacts,
        has_agent: impl Fn(&NodeName) -> bool,
    ) -> Derived {
        let parsed = self
            .port_lists()
            .map(|lists| ports::read(lists, own.listener_ports.http, &own.policy.own));
        let (policy, mistakes) = parsed.map_or_else(
            || (own.policy.clone(), Vec::new()),
            |parsed| (parsed.policy, parsed.mistakes),
        );
        let tunnel = self.tunnel();
        let can_build_records =
            !tunnel.is_empty() && (self.is_listed || !self.persisted.nodes.is_empty());
        let records = can_build_records
            .then(|| RecordSet::new(&self.nodes.records(has_agent), Addresses::first_of(tunnel)));
        Derived {
            records,
            policy,
            mistakes,
        }
    }

    /// Whether records and ports follow from what was heard, not from what was kept.
    pub(super) fn is_observed(&self) -> (bool, bool) {
        let has_records = self.is_listed && self.service.present().is_some();
        (has_records, self.ports_map.is_known())
    }

    /// What to keep of it.
    pub(super) fn to_persisted(&self) -> PersistedState {
        PersistedState {
            nodes: if self.is_listed {
                self.nodes.facts()
            } else {
                self.persisted.nodes.clone()
            },
            aliases: self.nodes.alias_owners(),
            tunnel_addresses: self.tunnel(),
            ports: self.port_lists().cloned(),
        }
    }
}

static NO_DATA: BTreeMap<String, String> = BTreeMap::new();
