//! The rights that the server needs, and those that the credentials of the command do not have.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::reader::{Fact, Reader};
use crate::cluster::objects::{RIGHTS, Right, Scope, tokens_namespace};
use crate::config::{Config, KubeletClientCa, KubernetesSettings, ObjectNames};

/// A right to do one thing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NeededRight {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    /// `None` stands for all namespaces and for objects without one.
    namespace: Option<String>,
    /// `None` stands for every object.
    name: Option<String>,
    purpose: &'static str,
}

impl NeededRight {
    fn review(&self) -> Value {
        let mut attributes = json!({
            "verb": self.verb,
            "group": self.group,
            "resource": self.resource,
        });
        for (key, value) in [("namespace", &self.namespace), ("name", &self.name)] {
            if let Some(value) = value {
                attributes[key] = value.as_str().into();
            }
        }
        json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": { "resourceAttributes": attributes },
        })
    }

    fn text(&self) -> String {
        let mut object = self.resource.to_owned();
        for part in [&self.namespace, &self.name].into_iter().flatten() {
            object.push('/');
            object.push_str(part);
        }
        format!("{} {object} ({})", self.verb, self.purpose)
    }
}

/// Returns the rights that a server with these settings needs.
pub(super) fn needed(
    config: &Config,
    settings: &KubernetesSettings,
    namespace: &str,
) -> Vec<NeededRight> {
    let mut needed = Vec::new();
    for right in RIGHTS.iter().filter(|right| uses(right, config, settings)) {
        for (namespace, name) in objects(right, settings, namespace) {
            let of_verb = |verb: &'static str| NeededRight {
                verb,
                group: right.group,
                resource: right.resource,
                namespace: namespace.clone(),
                name: name.clone(),
                purpose: right.purpose,
            };
            needed.extend(right.verbs.iter().copied().map(of_verb));
        }
    }
    needed
}

/// Returns whether a server with these settings uses a right.
fn uses(right: &Right, config: &Config, settings: &KubernetesSettings) -> bool {
    match (right.resource, right.scope) {
        ("servicecidrs", _) => {
            let connect = config.connect.as_ref();
            connect.is_some_and(|connect| connect.direct.is_none())
        }
        ("pods", Scope::Cluster) => settings.pod_lookup,
        ("configmaps", Scope::Exactly(..)) => config.kubelet_client_ca == KubeletClientCa::Cluster,
        ("endpointslices", _) => !settings.single_replica,
        ("certificatesigningrequests", _) => config.targets.signer.is_some(),
        _ => true,
    }
}

/// Returns namespace and name of the objects that a right covers.
fn objects(
    right: &Right,
    settings: &KubernetesSettings,
    namespace: &str,
) -> Vec<(Option<String>, Option<String>)> {
    let own = Some(namespace.to_owned());
    match right.scope {
        Scope::Cluster => vec![(None, None)],
        Scope::Namespace => vec![(own, None)],
        Scope::TokensNamespace => vec![(Some(tokens_namespace(namespace)), None)],
        Scope::Named(flag) => vec![(own, name_of(flag, &settings.names))],
        Scope::AgentNamespaces => {
            let accounts = settings.agent_tokens.accounts.iter();
            accounts
                // system:serviceaccount:NAMESPACE:NAME
                .filter_map(|account| account.split(':').nth(2))
                .map(|namespace| (Some(namespace.to_owned()), None))
                .collect()
        }
        Scope::Exactly(namespace, name) => {
            vec![(Some(namespace.to_owned()), Some(name.to_owned()))]
        }
    }
}

/// Returns the name that a flag gives to an object.
fn name_of(flag: &str, names: &ObjectNames) -> Option<String> {
    let name = match flag {
        "--nodes-config-map" => &names.nodes_config_map,
        "--ports-config-map" => &names.ports_config_map,
        "--internal-service" => &names.internal_service,
        "--leader-lease" => &names.leader_lease,
        "--ca-secret" => &names.ca_secret,
        "--revocations-secret" => &names.revocations_secret,
        "--ca-config-map" => &names.ca_config_map,
        "--peer-service" => &names.peer_service,
        _ => return None,
    };
    Some(name.clone())
}

/// Asks the API server for each right. Returns the rights that are missing.
pub(super) async fn denied(reader: &Reader, needed: &[NeededRight]) -> Fact<Vec<String>> {
    let reviews: Vec<Value> = needed.iter().map(NeededRight::review).collect();
    let answers = reviews.iter().map(|review| reader.review(REVIEWS, review));
    let mut denied = Vec::new();
    for (right, answer) in needed.iter().zip(join_all(answers).await) {
        if answer?["status"]["allowed"] != true {
            denied.push(right.text());
        }
    }
    Ok(denied)
}

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_of_the_table_has_a_name() {
        let names = ObjectNames::default();
        for right in RIGHTS {
            if let Scope::Named(flag) = right.scope {
                assert!(name_of(flag, &names).is_some(), "{flag}");
            }
        }
    }

    #[test]
    fn review_and_text_name_the_object() {
        let right = NeededRight {
            verb: "update",
            group: "",
            resource: "configmaps",
            namespace: Some("kube-system".into()),
            name: Some("yurt-tunnel-nodes".into()),
            purpose: "the records",
        };
        let expected = "update configmaps/kube-system/yurt-tunnel-nodes (the records)";
        assert_eq!(right.text(), expected);
        let attributes = right.review()["spec"]["resourceAttributes"].clone();
        assert_eq!(attributes["name"], "yurt-tunnel-nodes");
        assert_eq!(attributes["verb"], "update");
    }
}
