//! Observed state of the cluster, and the pure derivation of what follows from it.

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

/// State that is persisted for a start without the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PersistedState {
    pub(super) nodes: FactMap,
    /// Owner of each alias.
    pub(super) aliases: AliasOwners,
    pub(super) tunnel_addresses: Vec<IpAddr>,
    /// Values of the ports ConfigMap, if it existed.
    pub(super) ports: Option<BTreeMap<String, String>>,
}

/// The observed state of all watched objects.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterState {
    /// Nodes as observed, or as persisted before the first list.
    pub(super) nodes: Arc<NodeSet>,
    /// Whether a list of Nodes was received.
    pub(super) is_listed: bool,
    /// The Service as JSON.
    pub(super) service: Observed<Arc<Value>>,
    pub(super) records_map: Observed<Arc<ConfigMap>>,
    pub(super) ports_map: Observed<Arc<ConfigMap>>,
    /// Networks of Services that pass validation, if they are watched.
    pub(super) service_networks: Arc<[Cidr]>,
    /// State from the previous run.
    pub(super) persisted: Arc<PersistedState>,
}

/// Facts that do not come from the cluster.
#[derive(Debug, Clone)]
pub(super) struct LocalFacts {
    /// Port policy of the listeners while there is no ports ConfigMap.
    pub(super) policy: PortPolicy,
    pub(super) listener_ports: ListenerPorts,
}

/// State of this server that follows from the cluster state.
#[derive(Debug)]
pub(super) struct Derived {
    /// The records, if they can be derived.
    pub(super) records: Option<RecordSet>,
    /// Port policy of the listeners.
    pub(super) policy: PortPolicy,
    /// Ignored entries of the ports ConfigMap.
    pub(super) mistakes: Vec<String>,
}

/// State that the leader should write to the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DesiredState {
    /// The records, if all their inputs were observed.
    pub(super) records: Option<Arc<RecordSet>>,
    /// Extra ports of the Service with the listener ports that they target, if they were observed.
    pub(super) ports: Option<BTreeMap<Port, u16>>,
}

impl ClusterState {
    /// Creates the state before the first observation. `nodes` are the persisted nodes.
    pub(super) fn persisted(persisted: PersistedState, nodes: NodeSet) -> Self {
        Self {
            nodes: Arc::new(nodes),
            persisted: Arc::new(persisted),
            ..Self::default()
        }
    }

    /// Returns the addresses for the names of edge nodes. Empty if the Service has no address.
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

    /// Derives the state of this server. Without an address of the Service no records are derived,
    /// so the existing records stay.
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

    /// Returns whether the records and the ports follow from observed state rather than from
    /// persisted state.
    pub(super) fn is_observed(&self) -> (bool, bool) {
        let has_records = self.is_listed && self.service.present().is_some();
        (has_records, self.ports_map.is_known())
    }

    /// Returns the state to persist.
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
