//! Monitors of the Prometheus operator that select kubelets or node exporters. Pure.

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MonitorKind {
    Service,
    Pod,
}

/// A monitor of kubelets or of node exporters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MonitorFacts {
    pub(crate) kind: MonitorKind,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Label of a target that has the name of its node.
    pub(crate) node_label: &'static str,
    pub(crate) endpoints: Vec<EndpointFacts>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EndpointFacts {
    pub(crate) has_proxy: bool,
    /// Whether the endpoint has a list of rules.
    pub(crate) has_rules: bool,
    /// The rules that write the address of a target.
    pub(crate) address_rules: Vec<AddressRule>,
}

/// A rule that writes the address of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AddressRule {
    /// Number of the rule.
    pub(crate) number: usize,
    pub(crate) regex: String,
}

impl MonitorKind {
    /// Returns the name of the kind for kubectl.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Self::Service => "servicemonitor",
            Self::Pod => "podmonitor",
        }
    }

    /// Returns the field with the endpoints.
    pub(crate) fn endpoints(self) -> &'static str {
        match self {
            Self::Service => "endpoints",
            Self::Pod => "podMetricsEndpoints",
        }
    }
}

impl MonitorFacts {
    /// Returns the monitors of kubelets and node exporters among those of a kind.
    pub(super) fn all(kind: MonitorKind, objects: &[Value]) -> Vec<Self> {
        objects
            .iter()
            .filter_map(|object| Self::of(kind, object))
            .collect()
    }

    fn of(kind: MonitorKind, object: &Value) -> Option<Self> {
        let (metadata, spec) = (&object["metadata"], &object["spec"]);
        let name = metadata["name"].as_str()?;
        let labels = spec["selector"]["matchLabels"].as_object();
        let values = labels.into_iter().flatten();
        let texts: Vec<&str> = values
            .filter_map(|(_label, value)| value.as_str())
            .chain([name])
            .collect();
        let selects = |words: &[&str]| {
            texts
                .iter()
                .any(|text| words.iter().any(|word| text.contains(word)))
        };
        let node_label = if selects(&["node-exporter", "node_exporter"]) {
            "__meta_kubernetes_pod_node_name"
        } else if selects(&["kubelet"]) {
            "__meta_kubernetes_endpoint_address_target_name"
        } else {
            return None;
        };
        let endpoints = spec[kind.endpoints()].as_array().into_iter().flatten();
        Some(Self {
            kind,
            namespace: metadata["namespace"].as_str()?.to_owned(),
            name: name.to_owned(),
            node_label,
            endpoints: endpoints.map(EndpointFacts::of).collect(),
        })
    }
}

impl EndpointFacts {
    fn of(endpoint: &Value) -> Self {
        let rules = endpoint["relabelings"].as_array();
        let numbered = rules.into_iter().flatten().enumerate();
        let of_address = numbered.filter(|(_, rule)| rule["targetLabel"] == "__address__");
        Self {
            has_proxy: !endpoint["proxyUrl"].is_null(),
            has_rules: rules.is_some(),
            address_rules: of_address
                .map(|(number, rule)| AddressRule {
                    number,
                    regex: rule["regex"].as_str().unwrap_or("(.*)").to_owned(),
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn monitors_of_kubelets_and_node_exporters_are_found() {
        let rule = json!({"targetLabel": "__address__", "regex": "(.*);.*:(.*)"});
        let monitor = |name: &str, label: &str| {
            json!({
                "metadata": {"name": name, "namespace": "monitoring"},
                "spec": {
                    "selector": {"matchLabels": {"app": label}},
                    "endpoints": [{"relabelings": [{}, rule]}, {"proxyUrl": "http://x"}],
                },
            })
        };
        let objects = [
            monitor("edge", "node-exporter"),
            monitor("kubelet", "x"),
            monitor("other", "x"),
        ];
        let found = MonitorFacts::all(MonitorKind::Service, &objects);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].node_label, "__meta_kubernetes_pod_node_name");
        let [relabeled, proxied] = &found[0].endpoints[..] else {
            panic!("{found:?}");
        };
        assert_eq!(
            relabeled.address_rules,
            [AddressRule {
                number: 1,
                regex: "(.*);.*:(.*)".to_owned()
            }]
        );
        assert!(proxied.has_proxy && !proxied.has_rules);
    }
}
