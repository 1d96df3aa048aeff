//! Writers that only the leader runs: records into the nodes ConfigMap, ports into the Service, and
//! conditions as Events.
//!
//! The writers are level-triggered. Any change triggers a comparison of all objects, and an object
//! that is up to date is not written.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::api_call::{CALL_LIMIT, Conflicts, count_write, with_limit};
use super::events::EventRecorder;
use super::failure::{ApiError, ApiErrorKind, CallBackoff, Throttle};
use super::hosts::{self, HostsAction};
use super::metrics::ClusterMetrics;
use super::objects::{CONFIG_MAP_MAX_BYTES, Object};
use super::service;
use super::watches::{Observed, WatchContext, follow_one};
use crate::cluster::conditions::{Condition, Conditions};
use crate::cluster::leader_election::Leadership;
use crate::cluster::state::{ClusterState, DesiredState};
use crate::config::ObjectNames;
use tunnel_dns::LeftOut;

/// Changes wait for this much quiet, so that a burst results in one write.
const QUIET: Duration = Duration::from_millis(300);
/// Maximum delay of a burst of changes.
const BURST_MAX: Duration = Duration::from_secs(1);
/// Number of consecutive write conflicts on one object before the writer backs off.
const CONFLICTS_MAX: u32 = 5;
/// Shortest pause after a conflict. Only one server writes, so the other client is another program.
const CONFLICT_PAUSE_MIN: Duration = Duration::from_millis(20);
/// Interval at which objects are read again, in addition to the watches.
const RESYNC: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Writers {
    pub(super) maps: Api<ConfigMap>,
    pub(super) services: Api<DynamicObject>,
    pub(super) events: EventRecorder,
    pub(super) names: ObjectNames,
    pub(super) observed: watch::Receiver<ClusterState>,
    pub(super) desired: watch::Receiver<DesiredState>,
    /// The ConfigMap of the records, unknown without the Lease.
    pub(super) records_map: watch::Receiver<Observed<Arc<ConfigMap>>>,
    pub(super) leadership: Leadership,
    pub(super) throttle: Throttle,
    pub(super) conditions: Conditions,
    pub(super) metrics: ClusterMetrics,
    /// The last written ConfigMap, with the version that it was based on. The written one is newer
    /// than the observed one until the watch catches up.
    pub(super) written: Option<(Option<String>, ConfigMap)>,
}

/// Follows the ConfigMap of the records while this server leads. Other servers do not read it: it
/// has up to 1 MiB. Cancel-safe.
pub(super) async fn follow_records_as_leader(
    api: Api<ConfigMap>,
    name: &str,
    context: &WatchContext,
    mut leadership: Leadership,
    map: &watch::Sender<Observed<Arc<ConfigMap>>>,
) {
    let mut term = leadership.clone();
    while leadership.acquired().await {
        let change = |observed: Observed<ConfigMap>| {
            map.send_replace(observed.map(|map| map));
        };
        tokio::select! {
            () = follow_one(api.clone(), name, context.clone(), change) => {}
            () = term.lost() => {}
        }
        map.send_replace(Observed::Unknown);
        let watching = Condition::Watching(Object::Records);
        context.conditions.set(watching, Vec::new());
    }
}

/// Returns an API for the Service as JSON, so that unknown fields are preserved.
pub(super) fn services(client: Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client, namespace, &ApiResource::erase::<Service>(&()))
}

impl Writers {
    /// Writes whenever an object differs and this server is the leader, until `stop`.
    pub(super) async fn run(&mut self, stop: &CancellationToken) {
        let mut backoff = CallBackoff::default();
        let mut debounce = Debounce::at(Instant::now());
        let mut resync_at = Instant::now();
        let mut was_leader = false;
        loop {
            let now = Instant::now();
            let is_leader = self.leadership.until(now).is_some();
            if is_leader && !was_leader {
                // Another leader may have written until this moment.
                (debounce, resync_at) = (Debounce::at(now), now);
            }
            if was_leader && !is_leader {
                // The new leader is responsible for failed writes and for the size of the records.
                for object in [Object::Records, Object::Service] {
                    self.conditions.set(Condition::Writing(object), Vec::new());
                }
                self.report_left_out(None);
            }
            was_leader = is_leader;
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changed = self.leadership.changed() => if !changed { return },
                changed = self.observed.changed() => {
                    if changed.is_err() { return }
                    debounce.record_change(Instant::now());
                }
                changed = self.desired.changed() => {
                    if changed.is_err() { return }
                    debounce.record_change(Instant::now());
                }
                changed = self.records_map.changed() => {
                    if changed.is_err() { return }
                    debounce.record_change(Instant::now());
                }
                () = sleep_until(debounce.deadline()), if is_leader => {
                    let is_resync = Instant::now() >= resync_at;
                    // Each write carries the version that it changes, so it can be canceled midway.
                    let synced = tokio::select! {
                        biased;
                        () = stop.cancelled() => return,
                        synced = self.sync(is_resync) => synced,
                    };
                    match synced {
                        Ok(()) => {
                            backoff.reset();
                            if is_resync {
                                resync_at = Instant::now() + RESYNC;
                            }
                            debounce = Debounce::at(resync_at);
                        }
                        Err(failure) => {
                            let now = Instant::now();
                            let wait = backoff.next_delay(&failure, now, rand::random());
                            debounce = Debounce::not_before(now + wait.max(self.throttle.remaining(now)));
                        }
                    }
                }
            }
        }
    }

    /// Brings every object to the desired state. With `is_resync` each object is read again first.
    /// All objects are tried, and the first failure is returned.
    async fn sync(&mut self, is_resync: bool) -> Result<(), ApiError> {
        let observed = self.observed.borrow_and_update().clone();
        let desired = self.desired.borrow_and_update().clone();
        let map = self.records_map.borrow_and_update().clone();
        let records = self.reconcile_records(&map, &desired, is_resync).await;
        self.report(Object::Records, &records);
        let ports = self.reconcile_ports(&observed, &desired, is_resync).await;
        self.report(Object::Service, &ports);
        let events = self.publish(&observed, &map).await;
        if let Err(failure) = &events {
            self.metrics
                .record_write(Object::Events, failure.kind.label());
        }
        // A failed Event does not trigger another sync. The next change publishes the Event again.
        records.and(ports)
    }

    fn report(&self, object: Object, result: &Result<(), ApiError>) {
        match result {
            Ok(()) => {
                self.metrics.synced(object);
                self.conditions.set(Condition::Writing(object), Vec::new());
            }
            Err(failure) => {
                let line = format!("cannot write {}: {failure}", object.label());
                self.conditions.set(Condition::Writing(object), vec![line]);
            }
        }
    }

    async fn reconcile_records(
        &mut self,
        observed: &Observed<Arc<ConfigMap>>,
        desired: &DesiredState,
        is_resync: bool,
    ) -> Result<(), ApiError> {
        let name = self.names.nodes_config_map.clone();
        let mut known = observed.is_known() && !is_resync;
        let mut conflicts = Conflicts::new(CONFLICTS_MAX, CONFLICT_PAUSE_MIN);
        loop {
            let found = if known {
                observed.present().map(|map| self.newest(map))
            } else {
                with_limit(CALL_LIMIT, self.maps.get_opt(&name)).await?
            };
            known = false;
            let based_on = found.as_ref().and_then(ConfigMap::resource_version);
            let parameters = PostParams::default();
            let plan = hosts::plan(&name, found.as_ref(), desired.records.as_deref());
            if desired.records.is_some() {
                self.report_left_out(plan.left_out.as_ref());
            }
            let is_absent = found.is_none();
            let written = match plan.action {
                HostsAction::Nothing => return Ok(()),
                HostsAction::Create(map) => self.write(self.maps.create(&parameters, &map)).await,
                HostsAction::Update(map) => {
                    self.write(self.maps.replace(&name, &parameters, &map))
                        .await
                }
            };
            let written = self
                .record_write(Object::Records, written)
                .map_err(|failure| {
                    let namespace = self.maps.namespace().unwrap_or_default();
                    if is_absent {
                        failure.of_creation(Object::Records, namespace, &name)
                    } else {
                        failure
                    }
                })?;
            match written {
                Some(map) => {
                    info!(
                        config_map = name,
                        records = desired.records.as_ref().map_or(0, |all| all.len()),
                        "wrote the records"
                    );
                    self.written = Some((based_on, map));
                    return Ok(());
                }
                None => conflicts.wait().await?,
            }
        }
    }

    /// Returns the observed ConfigMap, or the last written one if the watch has not caught up with
    /// it.
    fn newest(&self, observed: &ConfigMap) -> ConfigMap {
        match &self.written {
            Some((based_on, ours)) if *based_on == observed.resource_version() => ours.clone(),
            Some(_) | None => observed.clone(),
        }
    }

    fn report_left_out(&self, left_out: Option<&LeftOut>) {
        self.metrics
            .records_left_out(left_out.map_or(0, |left_out| left_out.names));
        let line = left_out.map(|LeftOut { first, names }| {
            format!(
                "names without a record in the ConfigMap {}, which has room for {CONFIG_MAP_MAX_BYTES} bytes: {names}, from {first} on (cloud nodes come first, and names in order); use the embedded DNS, which has no such limit",
                self.names.nodes_config_map
            )
        });
        self.conditions
            .set(Condition::RecordsSize, line.into_iter().collect());
    }

    async fn reconcile_ports(
        &self,
        observed: &ClusterState,
        desired: &DesiredState,
        is_resync: bool,
    ) -> Result<(), ApiError> {
        let Some(desired_ports) = &desired.ports else {
            return Ok(());
        };
        let name = &self.names.internal_service;
        let ports = |service: &Value| {
            service["spec"]["ports"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        };
        if observed.service.is_known() && !is_resync {
            let is_up_to_date = observed
                .service
                .present()
                .is_none_or(|service| service::plan(&ports(service), desired_ports).is_none());
            if is_up_to_date {
                return Ok(());
            }
        }
        let mut conflicts = Conflicts::new(CONFLICTS_MAX, CONFLICT_PAUSE_MIN);
        loop {
            let found = with_limit(CALL_LIMIT, self.services.get_opt(name)).await?;
            let Some(mut found) = found else {
                return Ok(());
            };
            let Some(planned) = service::plan(&ports(&found.data), desired_ports) else {
                return Ok(());
            };
            let spec = found.data.get_mut("spec").and_then(Value::as_object_mut);
            let spec = spec
                .ok_or_else(|| ApiError::new(ApiErrorKind::Invalid, "its spec is not an object"))?;
            spec.insert("ports".to_owned(), planned.into());
            let parameters = PostParams::default();
            let written = self
                .write(self.services.replace(name, &parameters, &found))
                .await;
            if self.record_write(Object::Service, written)?.is_some() {
                info!(service = name, "wrote the ports");
                return Ok(());
            }
            conflicts.wait().await?;
        }
    }

    async fn publish(
        &mut self,
        observed: &ClusterState,
        records_map: &Observed<Arc<ConfigMap>>,
    ) -> Result<(), ApiError> {
        let limit = self.limit()?;
        let ports = self.conditions.of(Condition::PortLists);
        let size = self.conditions.of(Condition::RecordsSize);
        let ports_map = observed.ports_map.present().map(AsRef::as_ref);
        let records_map = records_map.present().map(AsRef::as_ref);
        let publishing = async {
            let names = &self.names;
            self.events
                .publish("BadPorts", &ports, &names.ports_config_map, ports_map)
                .await?;
            self.events
                .publish(
                    "RecordsTooLarge",
                    &size,
                    &names.nodes_config_map,
                    records_map,
                )
                .await
        };
        with_limit(limit, publishing).await
    }

    /// Counts a write and logs its failure. Returns `None` after a conflict or a deletion, which
    /// another read and write may resolve.
    fn record_write<T>(
        &self,
        object: Object,
        written: Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        match count_write(&self.metrics, object, written) {
            Err(failure) if failure.kind == ApiErrorKind::NotFound => Ok(None),
            Err(failure) => {
                warn!(object = object.label(), error = %failure, "cannot write, trying again");
                Err(failure)
            }
            Ok(written) => Ok(written),
        }
    }

    /// Performs a write, which ends with the term at the latest.
    async fn write<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ApiError> {
        with_limit(self.limit()?, call).await
    }

    /// Returns the limit for a write: that of a call, or the rest of the term.
    fn limit(&self) -> Result<Duration, ApiError> {
        let now = Instant::now();
        let term = self.leadership.until(now);
        let term = term.ok_or_else(|| {
            ApiError::new(ApiErrorKind::Deposed, "lost the Lease before the write")
        })?;
        Ok(CALL_LIMIT.min(term - now))
    }
}

/// The time of the next write.
#[derive(Debug, Clone, Copy)]
struct Debounce {
    deadline: Instant,
    /// Time at which the current burst of changes began.
    burst_start: Option<Instant>,
    earliest: Instant,
}

impl Debounce {
    fn at(deadline: Instant) -> Self {
        Self {
            deadline,
            burst_start: None,
            earliest: deadline.min(Instant::now()),
        }
    }

    fn not_before(earliest: Instant) -> Self {
        Self {
            deadline: earliest,
            burst_start: None,
            earliest,
        }
    }

    /// Extends the deadline after a change.
    fn record_change(&mut self, now: Instant) {
        let burst_start = *self.burst_start.get_or_insert(now);
        self.deadline = (now + QUIET).min(burst_start + BURST_MAX);
    }

    fn deadline(&self) -> Instant {
        self.deadline.max(self.earliest)
    }
}

#[cfg(test)]
mod tests;
