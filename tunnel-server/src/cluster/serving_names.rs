//! Names for the HTTPS serving certificate in a cluster: the names and addresses of the Service,
//! and those of its annotation.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;
use tokio::sync::watch;
use tracing::info;
use tunnel_proto::wire::name::NodeName;

use super::objects::NAMES_ANNOTATION;
use super::watches::Observed;
use crate::cluster::conditions::{Condition, Conditions};
use crate::cluster::state::ClusterState;
use tunnel_ca::ServingNames;

/// Maximum number of names in the annotation. Each name makes the certificate larger, and every
/// handshake sends the certificate.
const FURTHER_MAX: usize = 64;

/// Keeps the names of the serving certificate equal to those of the Service. The last names stay
/// while the Service does not exist.
pub(super) async fn follow(
    names: ServingNames,
    namespace: String,
    domain: String,
    mut observed: watch::Receiver<ClusterState>,
    conditions: Conditions,
) {
    loop {
        let service = observed.borrow_and_update().service.clone();
        if let Observed::Present(service) = service {
            let service_names = names_of_service(&service, &namespace, &domain);
            conditions.set(Condition::ServingNames, service_names.mistakes);
            if names.set_additional(&service_names.names, &service_names.addresses) {
                info!(
                    names = service_names.names.len(),
                    addresses = service_names.addresses.len(),
                    "names of the HTTPS serving certificate changed"
                );
            }
        }
        if observed.changed().await.is_err() {
            return;
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct ServiceNames {
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    mistakes: Vec<String>,
}

impl ServiceNames {
    fn add(&mut self, text: &str) -> bool {
        if let Ok(address) = text.parse() {
            self.addresses.insert(address);
            return true;
        }
        // Names must be DNS subdomains, as node names must.
        match text.parse().and_then(NodeName::for_dns) {
            Ok(name) => self.names.insert(name.to_string()),
            Err(_no_name) => return false,
        };
        true
    }
}

/// Returns all names and addresses under which callers reach the Service. Pure.
fn names_of_service(service: &Value, namespace: &str, domain: &str) -> ServiceNames {
    let mut service_names = ServiceNames::default();
    let metadata = &service["metadata"];
    if let Some(name) = metadata["name"].as_str() {
        service_names.add(name);
        service_names.add(&format!("{name}.{namespace}"));
        service_names.add(&format!("{name}.{namespace}.svc"));
        service_names.add(&format!("{name}.{namespace}.svc.{domain}"));
    }
    let spec = &service["spec"];
    let ingress = &service["status"]["loadBalancer"]["ingress"];
    let entry_points = ingress.as_array().into_iter().flatten();
    let lists = ["clusterIPs", "externalIPs"].map(|list| spec[list].as_array());
    let texts = lists.into_iter().flatten().flatten();
    let texts = texts.chain([&spec["clusterIP"], &spec["loadBalancerIP"]]);
    let texts = texts.chain(entry_points.flat_map(|entry| [&entry["ip"], &entry["hostname"]]));
    for text in texts.filter_map(Value::as_str) {
        // A headless Service has the address "None", which is not a name either.
        if text != "None" && !text.is_empty() {
            service_names.add(text);
        }
    }
    let further = metadata["annotations"][NAMES_ANNOTATION].as_str();
    let further = further.unwrap_or_default().split(',').map(str::trim);
    for (index, text) in further.filter(|text| !text.is_empty()).enumerate() {
        if index >= FURTHER_MAX {
            let line = format!("{NAMES_ANNOTATION}: only the first {FURTHER_MAX} names are used");
            service_names.mistakes.push(line);
            break;
        }
        if !service_names.add(text) {
            let line = format!("{NAMES_ANNOTATION}: {text:?} is neither a DNS name nor an IP");
            service_names.mistakes.push(line);
        }
    }
    service_names
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn joined<T: ToString>(set: &BTreeSet<T>) -> String {
        let texts: Vec<_> = set.iter().map(T::to_string).collect();
        texts.join(" ")
    }

    #[test]
    fn a_service_is_called_by_its_names_addresses_and_annotation() {
        let service = json!({
            "metadata": { "name": "edge", "annotations": { NAMES_ANNOTATION: "tunnel.example, 192.0.2.9,,no name" } },
            "spec": { "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "fd00::7"], "externalIPs": ["198.51.100.4"] },
            "status": { "loadBalancer": { "ingress": [{ "ip": "203.0.113.5" }, { "hostname": "lb.example" }] } },
        });
        let service_names = names_of_service(&service, "ns", "cluster.local");
        let names = "edge edge.ns edge.ns.svc edge.ns.svc.cluster.local lb.example tunnel.example";
        assert_eq!(joined(&service_names.names), names);
        let addresses = "10.96.0.7 192.0.2.9 198.51.100.4 203.0.113.5 fd00::7";
        assert_eq!(joined(&service_names.addresses), addresses);
        let mistakes = &service_names.mistakes;
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert!(mistakes[0].contains("no name"));
    }

    #[test]
    fn headless_services_have_names_alone_and_annotations_have_a_limit() {
        let many: Vec<_> = (0..100).map(|n| format!("n{n}.example")).collect();
        let service = json!({
            "metadata": { "name": "edge", "annotations": { NAMES_ANNOTATION: many.join(",") } },
            "spec": { "clusterIP": "None", "clusterIPs": ["None"] },
        });
        let service_names = names_of_service(&service, "ns", "cluster.local");
        assert_eq!(service_names.names.len(), 4 + FURTHER_MAX);
        assert!(service_names.addresses.is_empty());
        assert_eq!(service_names.mistakes.len(), 1);
    }
}
