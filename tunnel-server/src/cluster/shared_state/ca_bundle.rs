//! ConfigMap with the CA certificates for agents that mount it. Manifests ship it empty. The server
//! creates a missing ConfigMap if it has the permission, and repairs changes by others.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, PostParams};
use tracing::info;

use super::super::api_call::{CALL_LIMIT, count_write, with_limit};
use super::super::failure::ApiError;
use super::super::objects::{CA_CERTIFICATE_KEY, Object};
use super::cluster_objects::{ClusterObjects, conflicts};

#[derive(Debug, PartialEq)]
enum Plan {
    Nothing,
    Create(ConfigMap),
    Update(ConfigMap),
}

/// Brings the ConfigMap to these certificates. All servers of a cluster write the same content, so
/// no Lease is needed.
pub(super) async fn write(
    cluster_objects: &ClusterObjects,
    name: &str,
    certificates: &str,
) -> Result<(), ApiError> {
    let ClusterObjects {
        cluster,
        namespace,
        maps,
        ..
    } = cluster_objects;
    let parameters = PostParams::default();
    let mut conflicts = conflicts();
    loop {
        let found = with_limit(CALL_LIMIT, maps.get_opt(name)).await?;
        let written = match plan(name, found, certificates) {
            Plan::Nothing => return Ok(()),
            Plan::Create(map) => {
                let created = with_limit(CALL_LIMIT, maps.create(&parameters, &map)).await;
                created.map_err(|failure| failure.of_creation(Object::CaBundle, namespace, name))
            }
            Plan::Update(map) => {
                with_limit(CALL_LIMIT, maps.replace(name, &parameters, &map)).await
            }
        };
        if count_write(&cluster.metrics, Object::CaBundle, written)?.is_some() {
            info!(config_map = name, "wrote the CA's certificates");
            return Ok(());
        }
        conflicts.wait().await?;
    }
}

/// Returns `true` if the ConfigMap contains certificates.
pub(super) async fn is_filled(
    cluster_objects: &ClusterObjects,
    name: &str,
) -> Result<bool, ApiError> {
    let found = with_limit(CALL_LIMIT, cluster_objects.maps.get_opt(name)).await?;
    let data = found.and_then(|map| map.data).unwrap_or_default();
    let text = data.get(CA_CERTIFICATE_KEY);
    Ok(text.is_some_and(|text| text.contains("BEGIN CERTIFICATE")))
}

fn plan(name: &str, found: Option<ConfigMap>, certificates: &str) -> Plan {
    let Some(mut map) = found else {
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        };
        let data = BTreeMap::from([(CA_CERTIFICATE_KEY.to_owned(), certificates.to_owned())]);
        return Plan::Create(ConfigMap {
            metadata,
            data: Some(data),
            ..ConfigMap::default()
        });
    };
    let data = map.data.get_or_insert_default();
    if data.get(CA_CERTIFICATE_KEY).map(String::as_str) == Some(certificates) {
        return Plan::Nothing;
    }
    data.insert(CA_CERTIFICATE_KEY.to_owned(), certificates.to_owned());
    Plan::Update(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_is_made_foreign_edits_are_repaired_and_other_keys_stay() {
        let Plan::Create(mut map) = plan("tunnel-ca", None, "PEM") else {
            panic!("not made");
        };
        assert_eq!(plan("tunnel-ca", Some(map.clone()), "PEM"), Plan::Nothing);
        let data = map.data.as_mut().unwrap();
        data.insert("ca.crt".into(), "other".into());
        data.insert("note".into(), "of a person".into());
        let Plan::Update(repaired) = plan("tunnel-ca", Some(map), "PEM") else {
            panic!("not repaired");
        };
        let data = repaired.data.unwrap();
        assert_eq!((&*data["ca.crt"], &*data["note"]), ("PEM", "of a person"));
        let bare = ConfigMap::default();
        assert!(matches!(plan("x", Some(bare), "PEM"), Plan::Update(_)));
    }
}
