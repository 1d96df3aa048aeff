//! The ranges of Services, for what the CONNECT doors dial without an agent; clusters tell them from Kubernetes 1.33 on.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::ListParams;
use kube::{Api, Client};
use tracing::debug;
use tunnel_proto::process::networks::Cidr;

use crate::ingress::connect::ranges::LiveRanges;

/// They hardly ever change.
const EVERY: Duration = Duration::from_secs(60);
/// After a failure: a server may start before its API server does, which calls it then.
const AGAIN: Duration = Duration::from_secs(5);
/// For one list.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Keeps the ranges equal to what the cluster tells. A cluster that does not tell, or does not want to, leaves them as they
/// are. Cancel-safe.
pub(super) async fn follow(client: Client, ranges: LiveRanges) {
    let never: Infallible = async {
        let api = Api::<ServiceCIDR>::all(client);
        loop {
            let everything = ListParams::default();
            let list = api.list(&everything);
            let pause = match tokio::time::timeout(CALL_LIMIT, list).await {
                Ok(Ok(list)) => {
                    ranges.set_services(networks(&list.items));
                    EVERY
                }
                Ok(Err(kube::Error::Api(refused))) if matches!(refused.code, 403 | 404) => {
                    debug!(
                        code = refused.code,
                        "the cluster does not tell the ranges of Services"
                    );
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

fn networks(objects: &[ServiceCIDR]) -> Vec<Cidr> {
    let specs = objects.iter().filter_map(|object| object.spec.as_ref());
    let texts = specs.filter_map(|spec| spec.cidrs.as_ref()).flatten();
    texts.filter_map(|text| text.parse().ok()).collect()
}
