//! A Lease, which one server holds at a time: get, take or renew, and release.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use tunnel_process::host::host_name;

use super::api_call::{CALL_LIMIT, with_limit};
use super::client::ClusterHandle;
use super::failure::ApiError;
use super::objects::Object;

/// Limit for releasing a Lease at a clean stop.
pub(super) const RELEASE_LIMIT: Duration = Duration::from_secs(2);
/// `leaseDurationSeconds`: other candidates for leadership take a Lease that was not renewed for
/// this long.
const DURATION_SECONDS: i32 = 15;

#[derive(Debug)]
pub(super) struct LeaseHandle {
    api: Api<Lease>,
    name: String,
}

impl LeaseHandle {
    pub(super) fn new(name: String, cluster: &ClusterHandle) -> Self {
        let connection = &cluster.connection;
        Self {
            api: Api::namespaced(connection.client.clone(), &connection.namespace),
            name,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the Lease, or `None` if it does not exist.
    pub(super) async fn get(&self) -> Result<Option<Lease>, ApiError> {
        with_limit(CALL_LIMIT, self.api.get_opt(&self.name)).await
    }

    /// Writes `spec` into the Lease that [`LeaseHandle::get`] returned, or creates the Lease. Fails
    /// with a conflict if another server wrote the Lease in the meantime.
    pub(super) async fn write(
        &self,
        found: Option<Lease>,
        spec: LeaseSpec,
    ) -> Result<Lease, ApiError> {
        let parameters = PostParams::default();
        if let Some(mut lease) = found {
            lease.spec = Some(spec);
            let replaced = self.api.replace(&self.name, &parameters, &lease);
            return with_limit(CALL_LIMIT, replaced).await;
        }
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(spec),
        };
        let created = with_limit(CALL_LIMIT, self.api.create(&parameters, &lease)).await;
        let namespace = self.api.namespace().unwrap_or_default();
        created.map_err(|failure| failure.of_creation(Object::Lease, namespace, &self.name))
    }

    /// Clears the holder of the Lease if it is `holder`, so that other servers need not wait for
    /// the end of the Lease. `change` sets further fields. Takes at most [`RELEASE_LIMIT`].
    pub(super) async fn release(
        &self,
        holder: &str,
        change: fn(&mut LeaseSpec),
    ) -> Result<(), ApiError> {
        let releasing = async {
            let mut lease = self.api.get(&self.name).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(holder) {
                return Ok(lease);
            }
            spec.holder_identity = Some(String::new());
            change(spec);
            let parameters = PostParams::default();
            self.api.replace(&self.name, &parameters, &lease).await
        };
        let released = with_limit(RELEASE_LIMIT, releasing).await;
        released.map(|_lease| ())
    }
}

/// Returns the spec with which `holder` takes or renews a Lease whose spec is `before`. Pure.
pub(super) fn spec_for(before: &LeaseSpec, holder: &str, wall: Timestamp) -> LeaseSpec {
    let is_ours = before.holder_identity.as_deref() == Some(holder);
    let transitions = before.lease_transitions.unwrap_or_default();
    LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(DURATION_SECONDS),
        acquire_time: if is_ours {
            before.acquire_time.clone()
        } else {
            Some(MicroTime(wall))
        },
        renew_time: Some(MicroTime(wall)),
        lease_transitions: Some(transitions.saturating_add(i32::from(!is_ours))),
        ..LeaseSpec::default()
    }
}

/// Returns a new identity of this server as a holder: host name and a random suffix, as client-go
/// users do. A restarted server is therefore a different candidate.
pub(super) fn identity() -> String {
    let host = host_name().unwrap_or_default();
    let random: u128 = rand::random();
    format!("{host}_{random:032x}")
}
