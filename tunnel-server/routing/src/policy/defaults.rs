//! The rules that hold without a file: safe for each listener, and open as in yurt-tunnel on request.

use std::collections::BTreeMap;

use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::ports::PortSet;

use super::listener::Listener;
use super::rules::{CallerClass, CallerSet, DestinationKind, Effect, Rule, RulePorts, RuleTable};
use crate::operation::{Operation, OperationSet};

/// What the settings of ports and listeners add to the rules that hold without a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DefaultPorts {
    /// Ports whose settings name the CONNECT listener.
    pub connect: PortSet,
    /// Ports whose settings have operations.
    pub operations: BTreeMap<Port, OperationSet>,
    /// The targets that CONNECT listeners dial without an agent are listed.
    pub has_direct_list: bool,
}

impl RuleTable {
    /// Returns the rules that hold without a file.
    pub fn defaults(ports: &DefaultPorts) -> Self {
        let allow = |name: &str| Rule::new(name, Effect::Allow);
        let listeners = |listener: Listener| Some(listener.into());
        let callers = |class: CallerClass| Some(CallerSet::of(class));
        let kubelet = |numbers: PortSet| {
            Some(RulePorts {
                numbers,
                has_kubelet: true,
            })
        };
        let destinations = |kind: DestinationKind| Some([kind].into_iter().collect());
        // kube-apiserver's egress selector over TCP presents a certificate.
        let of_direct = |name: &str, operations: OperationSet| Rule {
            callers: (!ports.has_direct_list).then(|| CallerSet::of(CallerClass::Certificate)),
            listeners: listeners(Listener::Connect),
            operations: Some(operations),
            destinations: destinations(DestinationKind::Direct),
            ..allow(name)
        };
        let reads = OperationSet::OBSERVE.union(OperationSet::of(&[Operation::Read]));
        let mut rules = vec![
            // The specifications of pods and their logs can have secrets.
            Rule {
                operations: Some(reads),
                destinations: destinations(DestinationKind::Node),
                ..allow("default-read")
            },
            // The kubelet reviews the token.
            Rule {
                callers: callers(CallerClass::Token),
                listeners: listeners(Listener::Https),
                ports: kubelet(PortSet::default()),
                ..allow("default-token")
            },
            Rule {
                callers: callers(CallerClass::Delegation),
                listeners: listeners(Listener::Https),
                ..allow("default-delegation")
            },
            // A kubelet asks for credentials inside the tunnel.
            Rule {
                listeners: listeners(Listener::Connect),
                destinations: destinations(DestinationKind::Node),
                operations: Some(OperationSet::BYTES),
                ports: kubelet(ports.connect.clone()),
                ..allow("default-connect")
            },
            of_direct("default-direct", OperationSet::BYTES),
            of_direct("default-direct-read", reads),
            // The file system decides who opens it.
            Rule {
                listeners: listeners(Listener::Unix),
                ..allow("default-unix")
            },
            // The operator has chosen listener and target.
            Rule {
                listeners: listeners(Listener::Service),
                ..allow("default-service")
            },
            // The targets of the cloud have lists of nodes.
            Rule {
                listeners: listeners(Listener::Agent),
                ..allow("default-agent")
            },
        ];
        let of_ports = ports.operations.iter().map(|(port, operations)| Rule {
            operations: Some(*operations),
            ports: Some(RulePorts {
                numbers: PortSet::of([*port]),
                has_kubelet: false,
            }),
            ..allow(&format!("default-port-{port}"))
        });
        rules.extend(of_ports);
        Self {
            rules,
            ..Self::default()
        }
    }

    /// Returns the one rule that allows what yurt-tunnel does: everything at the listed ports.
    pub fn yurt_tunnel() -> Self {
        Self {
            rules: vec![Rule::new("compat-yurt-tunnel", Effect::Allow)],
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests;
