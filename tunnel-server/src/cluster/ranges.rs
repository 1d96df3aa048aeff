//! Networks of Services, which the CONNECT listeners dial without an agent. Clusters publish them
//! since Kubernetes 1.33.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::watch;
use tracing::debug;
use tunnel_process::networks::Cidr;

use super::client::ClusterHandle;
use super::client::Connection;
use crate::cluster::conditions::Condition;
use crate::cluster::state::ClusterState;

/// The networks hardly ever change.
const EVERY: Duration = Duration::from_secs(60);
/// Delay after a failure. A server may start before its API server, which then calls the server.
const AGAIN: Duration = Duration::from_secs(5);
/// The condition for clusters before Kubernetes 1.33.
const UNPUBLISHED: &str = "this cluster does not publish the ranges of its Services, so webhooks and other Services are not \
                           reached by their addresses: say them with --connect-direct, next to those of Pods and nodes";
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Keeps the networks equal to those that the cluster publishes. The networks stay as they are if
/// the cluster does not publish them or refuses access. If Services are dialed by these networks
/// alone (`are_needed`), the conditions receive the remedy for that. The conditions also receive
/// networks that fail validation. Cancel-safe.
pub(super) async fn follow(
    cluster: ClusterHandle,
    state: watch::Sender<ClusterState>,
    are_needed: bool,
) {
    let Connection {
        client, namespace, ..
    } = cluster.connection;
    let conditions = cluster.conditions;
    let report = |line: Option<String>| {
        if are_needed {
            conditions.set(Condition::ServiceRanges, line.into_iter().collect());
        }
    };
    let never: Infallible = async {
        let api = Api::<ServiceCIDR>::all(client);
        loop {
            let everything = ListParams::default();
            let list = api.list(&everything);
            let pause = match tokio::time::timeout(CALL_LIMIT, list).await {
                Ok(Ok(list)) => {
                    let (networks, wrong) = networks(&list.items);
                    conditions.set(Condition::ServiceNetworks, wrong);
                    state.send_if_modified(|state| {
                        let is_other = *state.service_networks != *networks;
                        if is_other {
                            state.service_networks = networks.into();
                        }
                        is_other
                    });
                    report(None);
                    EVERY
                }
                Ok(Err(kube::Error::Api(refused))) if refused.code == 403 => {
                    report(Some(missing_right_condition(&refused.message, &namespace)));
                    AGAIN
                }
                Ok(Err(kube::Error::Api(refused))) if refused.code == 404 => {
                    report(Some(UNPUBLISHED.to_owned()));
                    EVERY
                }
                Ok(Err(error)) => {
                    debug!(%error, "cannot list the ranges of Services, trying again");
                    AGAIN
                }
                Err(_elapsed) => AGAIN,
            };
            tokio::time::sleep(pause).await;
        }
    }
    .await;
    match never {}
}

/// Returns the remedy for a refusal. The ServiceAccount is that of the manifests.
fn missing_right_condition(refusal: &str, namespace: &str) -> String {
    let name = "tunnel-server-ranges";
    format!(
        "{refusal}; webhooks and other Services are not reached by their addresses: apply the overlay egress-selector, say \
         --connect-direct, or run: kubectl create clusterrole {name} --verb=list --resource=servicecidrs.networking.k8s.io && \
         kubectl create clusterrolebinding {name} --clusterrole={name} --serviceaccount={namespace}:tunnel-server"
    )
}

/// Returns the networks that pass validation, and the reasons why others are refused.
fn networks(objects: &[ServiceCIDR]) -> (Vec<Cidr>, Vec<String>) {
    let (mut networks, mut refused) = (Vec::new(), Vec::new());
    for object in objects {
        let spec = object.spec.as_ref();
        let texts = spec.and_then(|spec| spec.cidrs.as_ref());
        for network in texts
            .into_iter()
            .flatten()
            .filter_map(|text| text.parse::<Cidr>().ok())
        {
            match network.check_claimed() {
                Ok(()) => networks.push(network),
                Err(why) => {
                    let name = object.metadata.name.as_deref().unwrap_or_default();
                    refused.push(format!(
                        "ServiceCIDR {name}: {network} is not used, since {why}; list in --connect-direct what is meant"
                    ));
                }
            }
        }
    }
    (networks, refused)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn networks_of_services_are_validated_like_those_of_pods() {
        let object = |name: &str, cidrs: &[&str]| {
            let object = json!({"metadata": {"name": name}, "spec": {"cidrs": cidrs}});
            serde_json::from_value::<ServiceCIDR>(object).unwrap()
        };
        let objects = [
            object("kubernetes", &["10.96.0.0/12", "fd00:10:96::/112"]),
            object("odd", &["127.0.0.0/8", "0.0.0.0/0", "::/0", "none"]),
        ];
        let (networks, refused) = networks(&objects);
        let networks: Vec<_> = networks.iter().map(ToString::to_string).collect();
        assert_eq!(networks, ["10.96.0.0/12", "fd00:10:96::/112"]);
        assert_eq!(refused.len(), 3, "{refused:?}");
        assert!(refused[0].starts_with("ServiceCIDR odd: 127.0.0.0/8 is not used"));
    }
}
