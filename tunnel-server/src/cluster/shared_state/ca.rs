//! Reconciler for the CA Secret. The first writer creates the CA, all others adopt it, and an
//! emptied Secret is filled again. The ConfigMap of the CA certificates follows the Secret.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::PostParams;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info;
use tunnel_process::shutdown::Shutdown;
use zeroize::Zeroizing;

use super::super::api_call::{CALL_LIMIT, count_write, with_limit};
use super::super::failure::{ApiError, ApiErrorKind, CallBackoff};
use super::super::objects::{
    CA_CERTIFICATE_KEY, CA_PRIVATE_KEY, CA_ROTATION_KEY, Object, REPLACES_CA_ANNOTATION,
};
use super::super::watches::{Observed, follow_one};
use super::ca_bundle;
use super::cluster_objects::{ClusterObjects, conflicts};
use crate::cluster::conditions::Condition;
use tunnel_ca::rotation::{Rotation, SharedCa};
use tunnel_ca::{CaError, CaMaterial, SourceNames};

/// Interval at which the Secret and the ConfigMap are read again, in addition to the watches.
const RESYNC: Duration = Duration::from_secs(300);

/// Pure decision on the observed Secret.
#[derive(Debug)]
pub(super) enum Plan {
    /// The Secret contains a CA.
    Adopt(SharedCa),
    /// The Secret is empty.
    Fill,
    /// The Secret contains something else, which must not be overwritten.
    Refuse(String),
}

/// The task that keeps the CA of this server equal to that of the Secret.
pub(super) struct CaReconciler {
    pub(super) cluster_objects: ClusterObjects,
    /// Name of the Secret.
    pub(super) secret: String,
    /// Name of the ConfigMap.
    pub(super) map: String,
    pub(super) current: watch::Sender<Option<Arc<CaMaterial>>>,
    /// The rotation in progress of the last CA that was adopted. It alone has the key of the other CA.
    pub(super) rotation: Mutex<Option<Rotation>>,
    /// Is sent to after `current` changed.
    pub(super) changes: watch::Sender<()>,
}

impl CaReconciler {
    /// Watches both objects until `shutdown` stops.
    pub(super) fn start(self, shutdown: &Shutdown) {
        let due = watch::Sender::new(());
        let when = due.subscribe();
        let (secrets, name) = (self.cluster_objects.secrets.clone(), self.secret.clone());
        let context = self.cluster_objects.cluster.watch_context(Object::Ca);
        let changed = due.clone();
        shutdown.spawn_service(async move {
            follow_one(secrets, &name, context, |_: Observed<Secret>| {
                changed.send_replace(());
            })
            .await;
        });
        let (maps, name) = (self.cluster_objects.maps.clone(), self.map.clone());
        let context = self.cluster_objects.cluster.watch_context(Object::CaBundle);
        shutdown.spawn_service(async move {
            follow_one(maps, &name, context, |_: Observed<ConfigMap>| {
                due.send_replace(());
            })
            .await;
        });
        shutdown.spawn_service(self.run(when));
    }

    async fn run(self, mut due: watch::Receiver<()>) {
        let throttle = &self.cluster_objects.cluster.connection.throttle;
        let mut backoff = CallBackoff::default();
        loop {
            // An event during the reconciliation triggers another one.
            due.mark_unchanged();
            let reconciled = self.reconcile().await;
            let now = Instant::now();
            let wait = match reconciled {
                Ok(()) => {
                    backoff.reset();
                    RESYNC
                }
                Err(failure) => {
                    let wait = backoff.next_delay(&failure, now, rand::random());
                    wait.max(throttle.remaining(now))
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                changed = due.changed() => {
                    if changed.is_err() { return }
                    tokio::time::sleep(throttle.remaining(Instant::now())).await;
                }
            }
        }
    }

    /// Applies the CA of the Secret to this server, and its certificates to the ConfigMap. Both are
    /// tried.
    async fn reconcile(&self) -> Result<(), ApiError> {
        let adopted = self.adopt().await;
        self.report(Condition::CaSecret, Object::Ca, &self.secret, &adopted);
        let material = adopted?;
        let is_changed = self.current.send_if_modified(|current| {
            let is_other = current
                .as_ref()
                .is_none_or(|current_ca| !current_ca.is_same(&material));
            if is_other {
                *current = Some(material.clone());
            }
            is_other
        });
        if is_changed {
            self.changes.send_replace(());
        }
        let written = ca_bundle::write(
            &self.cluster_objects,
            &self.map,
            material.certificates_pem(),
        )
        .await;
        self.report(Condition::CaBundle, Object::CaBundle, &self.map, &written);
        written
    }

    fn report<T>(
        &self,
        condition: Condition,
        object: Object,
        name: &str,
        result: &Result<T, ApiError>,
    ) {
        let line = match result {
            Ok(_) => {
                self.cluster_objects.cluster.metrics.synced(object);
                None
            }
            Err(failure) => Some(format!(
                "{} {}/{name} cannot be used: {failure}",
                object.kind(),
                self.cluster_objects.namespace
            )),
        };
        self.cluster_objects.condition(condition, line);
    }

    /// Returns the CA of the Secret. An empty Secret is filled with the current CA of this server,
    /// or with a new one.
    async fn adopt(&self) -> Result<Arc<CaMaterial>, ApiError> {
        let mut conflicts = conflicts();
        loop {
            // The ConfigMap is read before the Secret, because servers write it after the Secret.
            let current_ca = self.current.borrow().clone();
            let has_agents = current_ca.is_none()
                && ca_bundle::is_filled(&self.cluster_objects, &self.map).await?;
            let mut secret = self.cluster_objects.secret(&self.secret).await?;
            match plan(&secret, &self.cluster_objects.describe_secret(&self.secret)) {
                Plan::Adopt(ca) => {
                    let unconfirmed = current_ca
                        .as_ref()
                        .filter(|used| !may_replace(&secret, &ca.material, used));
                    return match unconfirmed {
                        None => {
                            *self.rotation.lock() = ca.rotation;
                            Ok(ca.material)
                        }
                        Some(used) => Err(self.other_ca(&ca.material, used)),
                    };
                }
                Plan::Refuse(condition) => {
                    return Err(ApiError::new(ApiErrorKind::Invalid, condition));
                }
                Plan::Fill => {}
            }
            let material = match current_ca {
                Some(current_ca) => current_ca,
                None if has_agents => {
                    let condition = format!(
                        "it is empty, and ConfigMap {}/{} has the certificates of a CA that agents trust: put the CA back from a \
                         backup, or empty that ConfigMap, too, to start over with new agents",
                        self.cluster_objects.namespace, self.map
                    );
                    return Err(ApiError::new(ApiErrorKind::Invalid, condition));
                }
                None => Arc::new(
                    CaMaterial::generate(SystemTime::now())
                        .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?,
                ),
            };
            let rotation = self.rotation_of(&material)?;
            put(
                &mut secret,
                &material,
                rotation.as_ref().map(|content| content.as_slice()),
            );
            // The resource version makes the API server reject this write if another writer was
            // faster.
            let parameters = PostParams::default();
            let ClusterObjects {
                cluster, secrets, ..
            } = &self.cluster_objects;
            let replaced = secrets.replace(&self.secret, &parameters, &secret);
            let written = with_limit(CALL_LIMIT, replaced).await;
            if count_write(&cluster.metrics, Object::Ca, written)?.is_some() {
                info!(secret = self.secret, ca = ?material, "wrote the CA");
                return Ok(material);
            }
            conflicts.wait().await?;
        }
    }
}

impl CaReconciler {
    /// Returns the content of the rotation in progress, if it is that of this CA.
    fn rotation_of(&self, material: &CaMaterial) -> Result<Option<Zeroizing<Vec<u8>>>, ApiError> {
        let rotation = self.rotation.lock();
        let content = rotation.as_ref().map(|rotation| {
            let is_same = rotation.material()?.is_same(material);
            is_same.then(|| rotation.to_json()).transpose()
        });
        let invalid = |error: CaError| ApiError::new(ApiErrorKind::Invalid, error.to_string());
        Ok(content.transpose().map_err(invalid)?.flatten())
    }

    /// Returns the error for a CA that would end all tunnels. A Secret that was restored or applied
    /// by mistake looks like this.
    fn other_ca(&self, other: &CaMaterial, used: &CaMaterial) -> ApiError {
        let (namespace, secret) = (&self.cluster_objects.namespace, &self.secret);
        let condition = format!(
            "its CA {} does not continue the CA in use, {}, so that all agents would need new tokens; this server goes on with \
             the CA in use. To keep that one, empty the Secret, and a server fills it again. To replace it: kubectl -n \
             {namespace} annotate secret {secret} --overwrite {REPLACES_CA_ANNOTATION}={}",
            short(&other.signer()),
            short(&used.signer()),
            used.signer(),
        );
        ApiError::new(ApiErrorKind::Invalid, condition)
    }
}

/// Returns the beginning of a hash, for people.
fn short(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}

/// Returns whether the CA of the Secret may replace the one in use: it continues that one, or an
/// operator has confirmed it in the annotation.
fn may_replace(secret: &Secret, new: &CaMaterial, used: &CaMaterial) -> bool {
    let annotations = secret.metadata.annotations.as_ref();
    let replaced = annotations.and_then(|all| all.get(REPLACES_CA_ANNOTATION));
    let mut replaced = replaced.map_or("", String::as_str).split(',');
    new.continues(used) || replaced.any(|hash| hash.trim().eq_ignore_ascii_case(&used.signer()))
}

pub(super) fn plan(secret: &Secret, name: &str) -> Plan {
    let value = |key: &str| {
        let data = secret.data.as_ref()?;
        let value = &data.get(key)?.0;
        Some(value.as_slice()).filter(|value| !value.trim_ascii().is_empty())
    };
    let (certificates, key) = (value(CA_CERTIFICATE_KEY), value(CA_PRIVATE_KEY));
    let rotation = value(CA_ROTATION_KEY);
    let (certificates, key) = match (certificates, key) {
        (Some(certificates), Some(key)) => (certificates, key),
        (None, None) if rotation.is_none() => return Plan::Fill,
        (None, None) => {
            return Plan::Refuse(format!(
                "keys {CA_CERTIFICATE_KEY} and {CA_PRIVATE_KEY} are missing; add them next to {CA_ROTATION_KEY}, or remove it, \
                 too, to create a new CA"
            ));
        }
        (Some(_), None) => {
            return Plan::Refuse(format!(
                "key {CA_PRIVATE_KEY} is missing; add it next to {CA_CERTIFICATE_KEY}, or remove both to create a new CA"
            ));
        }
        (None, Some(_)) => {
            return Plan::Refuse(format!(
                "key {CA_CERTIFICATE_KEY} is missing; add it next to {CA_PRIVATE_KEY}, or remove both to create a new CA"
            ));
        }
    };
    let names = SourceNames {
        certificates: &format!("{name}, key {CA_CERTIFICATE_KEY}"),
        key: &format!("{name}, key {CA_PRIVATE_KEY}"),
    };
    let parse = || {
        let material = CaMaterial::parse(certificates, key, names)?;
        let rotation_name = format!("{name}, key {CA_ROTATION_KEY}");
        let check = |content| Rotation::of_secret(content, &rotation_name, names.key, &material);
        let rotation = rotation.map(check).transpose()?;
        Ok::<_, CaError>(SharedCa {
            material: Arc::new(material),
            rotation,
            version: secret.metadata.resource_version.clone(),
        })
    };
    match parse() {
        Ok(ca) => Plan::Adopt(ca),
        Err(error) => Plan::Refuse(error.to_string()),
    }
}

/// Puts the CA and the rotation in progress, if any, into the Secret.
pub(super) fn put(secret: &mut Secret, material: &CaMaterial, rotation: Option<&[u8]>) {
    let data = secret.data.get_or_insert_default();
    let put = |content: &[u8]| ByteString(content.to_vec());
    let certificates = material.certificates_pem().as_bytes();
    data.insert(CA_CERTIFICATE_KEY.into(), put(certificates));
    data.insert(CA_PRIVATE_KEY.into(), put(material.key_pem().as_bytes()));
    match rotation {
        Some(rotation) => data.insert(CA_ROTATION_KEY.into(), put(rotation)),
        None => data.remove(CA_ROTATION_KEY),
    };
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry as MetricsRegistry;
    use serde_json::json;
    use tunnel_process::meta::Readiness;

    use super::super::super::client::{ClusterHandle, Connection};
    use super::super::super::failure::Throttle;
    use super::super::super::testing::{NAMESPACE, api_server};
    use super::*;

    fn secret(values: &[(&str, &str)]) -> Secret {
        let put = |(key, value): &(&str, &str)| {
            ((*key).to_owned(), ByteString(value.as_bytes().to_vec()))
        };
        Secret {
            data: (!values.is_empty()).then(|| values.iter().map(put).collect()),
            ..Secret::default()
        }
    }

    fn generate() -> CaMaterial {
        CaMaterial::generate(SystemTime::now()).unwrap()
    }

    fn adopted(secret: &Secret) -> SharedCa {
        match plan(secret, "Secret ns/ca") {
            Plan::Adopt(ca) => ca,
            other => panic!("{other:?}"),
        }
    }

    fn refused(secret: &Secret) -> String {
        match plan(secret, "Secret ns/ca") {
            Plan::Refuse(condition) => condition,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_a_secret_without_a_ca_is_filled() {
        let ca = generate();
        let mut empty = secret(&[]);
        assert!(matches!(plan(&empty, ""), Plan::Fill));
        let blank = secret(&[(CA_CERTIFICATE_KEY, ""), (CA_PRIVATE_KEY, "\n"), ("x", "y")]);
        assert!(matches!(plan(&blank, ""), Plan::Fill));
        put(&mut empty, &ca, None);
        assert!(adopted(&empty).material.is_same(&ca));
    }

    #[tokio::test(start_paused = true)]
    async fn secret_that_is_emptied_during_a_rotation_is_filled_with_both_keys() {
        let (old, new) = (generate(), generate());
        let rotation = Rotation::new(&old, &new, SystemTime::now()).unwrap();
        let (client, mut server) = api_server();
        let connection = Connection {
            client,
            throttle: Throttle::default(),
            clock: crate::cluster::ApiServerClock::default(),
            namespace: NAMESPACE.into(),
        };
        let mut metrics = MetricsRegistry::default();
        let cluster =
            ClusterHandle::with_connection(connection, &Readiness::default(), &mut metrics);
        let reconciler = CaReconciler {
            cluster_objects: ClusterObjects::new(&cluster),
            secret: "ca".into(),
            map: "ca".into(),
            current: watch::Sender::new(Some(Arc::new(old))),
            rotation: Mutex::default(),
            changes: watch::Sender::new(()),
        };
        let mut filled = secret(&[]);
        filled.metadata.resource_version = Some("1".into());
        let (both, content) = (rotation.material().unwrap(), rotation.to_json().unwrap());
        put(&mut filled, &both, Some(content.as_slice()));
        let playing = async {
            server.call().await.answer(&json!(filled));
        };
        let (adopted, ()) = tokio::join!(reconciler.adopt(), playing);
        reconciler.current.send_replace(Some(adopted.unwrap()));
        let playing = async {
            let empty = json!({"metadata": {"name": "ca", "resourceVersion": "2"}});
            server.call().await.answer(&empty);
            let put = server.call().await;
            assert!(put.what.starts_with("PUT "), "{}", put.what);
            assert_eq!(put.body["data"], json!(filled.data), "both keys");
            put.accept();
        };
        let (written, ()) = tokio::join!(reconciler.adopt(), playing);
        assert!(written.unwrap().is_same(&both));
    }

    #[test]
    fn incomplete_or_damaged_secrets_are_reported_and_not_changed() {
        let (ca, other) = (generate(), generate());
        let half = secret(&[(CA_CERTIFICATE_KEY, ca.certificates_pem())]);
        assert!(refused(&half).contains("ca.key is missing"));
        let half = secret(&[(CA_PRIVATE_KEY, ca.key_pem())]);
        assert!(refused(&half).contains("ca.crt is missing"));
        let damaged = secret(&[
            (CA_CERTIFICATE_KEY, ca.certificates_pem()),
            (CA_PRIVATE_KEY, "x"),
        ]);
        assert!(refused(&damaged).contains("Secret ns/ca, key ca.key"));
        let pair = secret(&[
            (CA_CERTIFICATE_KEY, ca.certificates_pem()),
            (CA_PRIVATE_KEY, other.key_pem()),
        ]);
        assert!(refused(&pair).contains("do not belong together"));
    }

    #[test]
    fn both_are_trusted_while_a_ca_is_replaced() {
        let (old, new) = (generate(), generate());
        let both = format!("{}{}", old.certificates_pem(), new.certificates_pem());
        let by = |key: &str| {
            let secret = secret(&[(CA_CERTIFICATE_KEY, &both), (CA_PRIVATE_KEY, key)]);
            adopted(&secret).material
        };
        assert!(!by(old.key_pem()).is_same(&by(new.key_pem())));
        assert!(!by(old.key_pem()).is_same(&old));
    }

    #[test]
    fn ca_that_does_not_continue_the_one_in_use_needs_the_annotation_that_names_it() {
        let [old, new, other] = [generate(), generate(), generate()];
        let by = |certificates: &[&CaMaterial], key: &CaMaterial| {
            let certificates = certificates.iter().map(|ca| ca.certificates_pem());
            let certificates: String = certificates.collect();
            let names = SourceNames {
                certificates: "",
                key: "",
            };
            CaMaterial::parse(certificates.as_bytes(), key.key_pem().as_bytes(), names).unwrap()
        };
        let stages = [
            by(&[&old], &old),
            by(&[&old, &new], &old),
            by(&[&old, &new], &new),
            by(&[&new], &new),
        ];
        let plain = Secret::default();
        for stage in stages.windows(2) {
            assert!(may_replace(&plain, &stage[1], &stage[0]));
            assert!(may_replace(&plain, &stage[0], &stage[1]), "abort");
        }
        let [first, .., last] = &stages;
        assert!(!may_replace(&plain, last, first), "stages were missed");
        assert!(!may_replace(&plain, &other, &stages[1]));
        let annotated = |hashes: &str| {
            let mut secret = Secret::default();
            let annotation = (REPLACES_CA_ANNOTATION.to_owned(), hashes.to_owned());
            secret.metadata.annotations = Some([annotation].into());
            secret
        };
        let both = format!("{}, {}", new.signer(), old.signer().to_uppercase());
        assert!(may_replace(&annotated(&both), last, first));
        // A backup names the CA that its own one replaced.
        for hashes in [other.signer(), new.signer(), String::new(), ",".to_owned()] {
            assert!(!may_replace(&annotated(&hashes), &other, first), "{hashes}");
        }
    }

    #[test]
    fn rotation_is_adopted_with_its_ca_alone_and_a_hostile_one_is_refused() {
        let (old, new) = (generate(), generate());
        let rotation = Rotation::new(&old, &new, SystemTime::now()).unwrap();
        let both = rotation.material().unwrap();
        let both = both.certificates_pem();
        let json = String::from_utf8(rotation.to_json().unwrap().to_vec()).unwrap();
        let with = |key: &str, rotation: &str| {
            secret(&[
                (CA_CERTIFICATE_KEY, both),
                (CA_PRIVATE_KEY, key),
                (CA_ROTATION_KEY, rotation),
            ])
        };
        let mut announced = with(old.key_pem(), &json);
        assert!(adopted(&announced).rotation.is_some());
        assert!(adopted(&with(old.key_pem(), "\n")).rotation.is_none());
        let other_stage = refused(&with(new.key_pem(), &json));
        assert!(other_stage.contains("does not belong to the key Secret ns/ca, key ca.key"));
        let secret_text = r#"{"stage":"announced","new":"private"}"#;
        let long_life = json.replace("\"secs\":0", "\"secs\":99999999999");
        let one_ca = Rotation::new(&old, &old, SystemTime::now()).unwrap();
        let one_ca = String::from_utf8(one_ca.to_json().unwrap().to_vec()).unwrap();
        let large = " ".repeat(1 << 20) + &json;
        for hostile in ["{}", "\0", secret_text, &*long_life, &*one_ca, &*large] {
            let condition = refused(&with(old.key_pem(), hostile));
            assert!(condition.contains("key ca-rotation.json holds no usable"));
            assert!(!condition.contains("private\""), "{condition}");
        }
        let alone = secret(&[(CA_ROTATION_KEY, &json)]);
        assert!(refused(&alone).contains("next to ca-rotation.json"));
        put(&mut announced, &new, None);
        assert!(adopted(&announced).rotation.is_none());
    }
}
