use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tunnel_process::meta::Readiness;
use tunnel_proto::wire::name::Port;

use super::super::testing::{ApiServer, Call, NAMESPACE, api_server};
use super::*;
use crate::cluster::leader_election::testing::leadership;
use crate::testing::eventually;
use tunnel_dns::{Addresses, Node, NodeLocation, RecordSet};

const MAP: &str = "/api/v1/namespaces/kube-system/configmaps/yurt-tunnel-nodes";
const SERVICE: &str = "/api/v1/namespaces/kube-system/services/x-tunnel-server-internal-svc";
const FIXTURE: &str = "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1";

struct Fixture {
    server: ApiServer,
    observed: watch::Sender<ClusterState>,
    desired: watch::Sender<DesiredState>,
    records_map: watch::Sender<Observed<Arc<ConfigMap>>>,
    lead: watch::Sender<Option<Instant>>,
    conditions: Conditions,
    stop: CancellationToken,
    writing: AbortOnDropHandle<()>,
}

impl Fixture {
    /// Starts the writers, without the Lease.
    fn new() -> Self {
        let (client, server) = api_server();
        let (observed, desired) = (watch::Sender::default(), watch::Sender::default());
        let records_map = watch::Sender::default();
        let (lead, leadership) = leadership();
        let metrics = ClusterMetrics::default();
        let conditions = Conditions::new(Readiness::default());
        let mut writers = Writers {
            maps: Api::namespaced(client.clone(), NAMESPACE),
            services: services(client.clone(), NAMESPACE),
            events: EventRecorder::new(
                Api::namespaced(client, NAMESPACE),
                NAMESPACE.into(),
                "me".into(),
            ),
            names: ObjectNames::default(),
            observed: observed.subscribe(),
            desired: desired.subscribe(),
            records_map: records_map.subscribe(),
            leadership,
            throttle: Throttle::default(),
            conditions: conditions.clone(),
            metrics,
            written: None,
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let writing = TaskTracker::new().spawn(async move { writers.run(&stopped).await });
        Self {
            server,
            observed,
            desired,
            records_map,
            lead,
            conditions,
            stop,
            writing: AbortOnDropHandle::new(writing),
        }
    }

    fn lead(&self) {
        let hour = Instant::now() + Duration::from_secs(3600);
        self.lead.send_replace(Some(hour));
    }

    fn set_desired_records(&self, edge_nodes: &[&str]) {
        let node = |name: &str, location| Node {
            name: name.parse().unwrap(),
            hostname: None,
            location,
        };
        let edge_nodes = edge_nodes.iter();
        let mut nodes: Vec<_> = edge_nodes
            .map(|name| node(name, NodeLocation::Edge))
            .collect();
        let own = vec!["192.168.33.220".parse().unwrap()];
        nodes.push(node("master-1", NodeLocation::Cloud(own)));
        let tunnel = Addresses::first_of(["10.106.217.16".parse().unwrap()]);
        let records = Arc::new(RecordSet::new(&nodes, tunnel));
        self.desired
            .send_modify(|desired| desired.records = Some(records));
    }

    fn observe(&self, map: Observed<Arc<ConfigMap>>) {
        self.records_map.send_replace(map);
    }

    fn observe_map(&self, map: &Value) {
        let map: ConfigMap = serde_json::from_value(map.clone()).unwrap();
        self.observe(Observed::Present(Arc::new(map)));
    }

    /// Returns the next request, which reads the ConfigMap.
    async fn read(&mut self) -> Call {
        self.server.expect(&format!("GET {MAP}")).await
    }

    /// Returns the next request that writes. `found` answers those that read.
    async fn write(&mut self, found: &Value) -> Call {
        loop {
            let call = self.server.call().await;
            if !call.what.starts_with("GET") {
                return call;
            }
            call.answer(found);
        }
    }

    async fn is_quiet_for(&mut self, seconds: u64) {
        let time = Duration::from_secs(seconds);
        self.server.is_quiet_for(time).await;
    }

    /// Returns what an operator should fix about the ConfigMap.
    fn conditions(&self) -> Vec<String> {
        self.conditions.of(Condition::Writing(Object::Records))
    }

    async fn finish(self) {
        self.stop.cancel();
        self.writing.await.unwrap();
    }
}

fn map(version: &str, data: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": data,
        "metadata": {"name": "yurt-tunnel-nodes", "namespace": NAMESPACE, "resourceVersion": version},
    })
}

/// Returns the ConfigMap with these records.
fn records(version: &str, text: &str) -> Value {
    map(version, &json!({"tunnel-nodes": text}))
}

/// DNS-1, DNS-7, F22: a missing ConfigMap is created, and created again after a deletion.
#[tokio::test(start_paused = true)]
async fn records_are_written_byte_for_byte_and_again_after_a_deletion() {
    let mut fixture = Fixture::new();
    fixture.lead();
    fixture.set_desired_records(&["worker-1"]);
    fixture.read().await.refuse(404, "NotFound");
    for version in ["1", "2"] {
        let made = fixture.server.call().await;
        assert_eq!(made.what, "POST /api/v1/namespaces/kube-system/configmaps?");
        assert_eq!(made.body["data"], json!({"tunnel-nodes": FIXTURE}));
        let written = records(version, FIXTURE);
        made.answer(&written);
        fixture.observe_map(&written);
        fixture.is_quiet_for(30).await;
        fixture.observe(Observed::Absent);
    }
    fixture.finish().await;
}

/// The permissions of the manifests do not include `create`. The condition has the command, and
/// clears after an operator has run it.
#[tokio::test(start_paused = true)]
async fn map_that_may_not_be_created_is_a_condition_with_the_command() {
    let mut fixture = Fixture::new();
    fixture.observe(Observed::Absent);
    fixture.lead();
    fixture.set_desired_records(&["worker-1"]);
    fixture.read().await.refuse(404, "NotFound");
    fixture.server.call().await.refuse(403, "Forbidden");
    let again = loop {
        let call = fixture.server.call().await;
        if call.what.starts_with("GET") {
            break call;
        }
        call.refuse(403, "Forbidden");
    };
    let conditions = fixture.conditions();
    let command = "kubectl -n kube-system create configmap yurt-tunnel-nodes";
    assert!(conditions[0].ends_with(command), "{conditions:?}");
    again.answer(&map("1", &Value::Null));
    let put = fixture.server.expect(&format!("PUT {MAP}?")).await;
    assert_eq!(put.body["data"], json!({"tunnel-nodes": FIXTURE}));
    put.accept();
    fixture.observe_map(&records("2", FIXTURE));
    fixture.is_quiet_for(5).await;
    assert_eq!(fixture.conditions(), Vec::<String>::new());
    fixture.finish().await;
}

/// F22, T14: only the server's key is repaired, within two seconds.
#[tokio::test(start_paused = true)]
async fn foreign_edit_is_repaired_and_foreign_keys_are_kept() {
    let mut fixture = Fixture::new();
    fixture.lead();
    fixture.set_desired_records(&["worker-1"]);
    let good = records("1", FIXTURE);
    fixture.read().await.answer(&good);
    fixture.observe_map(&good);
    fixture.is_quiet_for(5).await;
    let edit = json!({"tunnel-nodes": "6.6.6.6\tworker-1", "theirs": "kept"});
    fixture.observe_map(&map("2", &edit));
    let edited = Instant::now();
    let put = fixture.server.expect(&format!("PUT {MAP}?")).await;
    assert!(edited.elapsed() <= Duration::from_secs(2));
    assert_eq!(put.body["metadata"]["resourceVersion"], "2");
    let repaired = json!({"tunnel-nodes": FIXTURE, "theirs": "kept"});
    assert_eq!(put.body["data"], repaired);
    put.accept();
    fixture.is_quiet_for(5).await;
    fixture.finish().await;
}

/// F23: the loser of a conflict reads again and writes on top of the winner's version.
#[tokio::test(start_paused = true)]
async fn conflict_is_retried_on_a_fresh_copy_and_a_burst_is_one_write() {
    let mut fixture = Fixture::new();
    let empty = records("1", "");
    fixture.observe_map(&empty);
    fixture.lead();
    fixture.server.call().await.answer(&empty);
    for count in 1..=20 {
        let names: Vec<String> = (0..count).map(|number| format!("edge-{number}")).collect();
        fixture.set_desired_records(&names.iter().map(String::as_str).collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let put = fixture.server.call().await;
    let text = put.body["data"]["tunnel-nodes"].as_str().unwrap();
    assert_eq!(text.lines().count(), 21, "all of the burst at once");
    put.refuse(409, "Conflict");
    let winner = map("5", &json!({"tunnel-nodes": "other", "more": "x"}));
    fixture.read().await.answer(&winner);
    let put = fixture.server.call().await;
    assert_eq!(put.body["metadata"]["resourceVersion"], "5");
    assert_eq!(put.body["data"]["more"], "x");
    put.accept();
    fixture.is_quiet_for(5).await;
    fixture.finish().await;
}

/// F38: a server that lost the Lease does not write, and does not report failed writes.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_without_the_lease() {
    let mut fixture = Fixture::new();
    fixture.set_desired_records(&["worker-1"]);
    fixture.is_quiet_for(60).await;
    fixture.lead();
    let get = fixture.read().await;
    fixture.lead.send_replace(None);
    get.refuse(404, "NotFound");
    fixture.is_quiet_for(60).await;
    assert_eq!(fixture.conditions(), Vec::<String>::new());
    fixture.finish().await;
}

/// T14: the records that fit are maintained. The others are counted by a condition, an Event and a
/// metric, until they fit or another server leads.
#[tokio::test(start_paused = true)]
async fn records_that_fit_are_maintained_and_the_others_are_a_condition_and_an_event() {
    let mut fixture = Fixture::new();
    let theirs = "x".repeat(CONFIG_MAP_MAX_BYTES - FIXTURE.len());
    let filled = |version: &str, text: &str| {
        let data = json!({"tunnel-nodes": text, "theirs": theirs});
        map(version, &data)
    };
    let found = filled("1", "10.106.217.16\tgone-now");
    fixture.observe_map(&found);
    fixture.set_desired_records(&["worker-1", "worker-2", "worker-3"]);
    fixture.lead();
    fixture.read().await.answer(&found);
    let put = fixture.server.expect(&format!("PUT {MAP}?")).await;
    assert_eq!(put.body["data"]["tunnel-nodes"], FIXTURE);
    put.accept();
    let events = "POST /apis/events.k8s.io/v1/namespaces/kube-system/events?";
    let event = fixture.server.expect(events).await;
    assert_eq!(event.body["reason"], "RecordsTooLarge");
    assert_eq!(event.body["regarding"]["name"], "yurt-tunnel-nodes");
    event.accept();
    fixture.observe_map(&filled("2", FIXTURE));
    fixture.is_quiet_for(60).await;
    let size = |fixture: &Fixture| fixture.conditions.of(Condition::RecordsSize);
    let line = size(&fixture).remove(0);
    assert!(line.contains(": 2, from worker-2 on"), "{line}");
    assert!(line.contains("embedded DNS"), "{line}");

    // A node that goes makes room for the next one.
    fixture.set_desired_records(&["worker-2"]);
    let put = fixture.server.expect(&format!("PUT {MAP}?")).await;
    let text = FIXTURE.replace("worker-1", "worker-2");
    assert_eq!(put.body["data"]["tunnel-nodes"], text);
    put.accept();
    fixture.observe_map(&filled("3", &text));
    fixture.is_quiet_for(60).await;
    assert_eq!(size(&fixture), Vec::<String>::new());

    fixture.set_desired_records(&["worker-2", "worker-3"]);
    fixture.server.expect(events).await.accept();
    fixture.is_quiet_for(60).await;
    assert_eq!(size(&fixture).len(), 1);
    fixture.lead.send_replace(None);
    eventually("no condition at a follower", || size(&fixture).is_empty()).await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn only_the_leader_follows_the_map() {
    let (client, mut server) = api_server();
    let (lead, leadership) = leadership();
    let sender = watch::Sender::new(Observed::Unknown);
    let observed = sender.subscribe();
    let metrics = ClusterMetrics::default();
    let context = WatchContext {
        object: Object::Records,
        conditions: Conditions::new(Readiness::default()),
        metrics,
        throttle: Throttle::default(),
    };
    let api = Api::namespaced(client, NAMESPACE);
    let following = TaskTracker::new().spawn(async move {
        follow_records_as_leader(api, "yurt-tunnel-nodes", &context, leadership, &sender).await;
    });
    let following = AbortOnDropHandle::new(following);
    server.is_quiet_for(Duration::from_secs(600)).await;
    for _term in 0..2 {
        lead.send_replace(Some(Instant::now() + Duration::from_secs(10)));
        let listed = server.call().await;
        assert!(
            listed.what.contains("metadata.name%3Dyurt-tunnel-nodes"),
            "{}",
            listed.what
        );
        listed.answer(&json!({
            "apiVersion": "v1", "kind": "ConfigMapList",
            "metadata": {"resourceVersion": "10"}, "items": [records("9", FIXTURE)],
        }));
        let _watch = server.call().await.stream(&[]);
        let is_present = || observed.borrow().present().is_some();
        eventually("the map", is_present).await;
        // The term ends, without a word of the election.
        server.is_quiet_for(Duration::from_secs(600)).await;
        assert!(!observed.borrow().is_known());
    }
    drop(lead);
    following.await.unwrap();
}

/// F21, F22: refusals are reported, retried with growing delays, and cleared after a success.
#[tokio::test(start_paused = true)]
async fn refused_writes_are_retried_and_reported() {
    let mut fixture = Fixture::new();
    let found = records("1", "old");
    fixture.observe_map(&found);
    fixture.set_desired_records(&["worker-1"]);
    fixture.lead();
    fixture.server.call().await.answer(&found);
    let start = Instant::now();
    let mut tries = 0;
    while start.elapsed() < Duration::from_secs(120) {
        fixture.write(&found).await.refuse(403, "Forbidden");
        tries += 1;
    }
    assert!((25..=60).contains(&tries), "{tries}");
    assert_eq!(fixture.conditions().len(), 1);
    let returned = Instant::now();
    fixture.write(&found).await.accept();
    let waited = returned.elapsed();
    assert!(waited <= Duration::from_secs(10), "{waited:?}");
    fixture.is_quiet_for(1).await;
    assert_eq!(fixture.conditions(), Vec::<String>::new());
    fixture.finish().await;
}

/// The Service of guide 000, with fields that this build does not know.
#[tokio::test(start_paused = true)]
async fn extra_ports_reach_the_service_and_unknown_fields_survive() {
    let mut fixture = Fixture::new();
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "x-tunnel-server-internal-svc", "resourceVersion": "1"},
        "spec": {"clusterIP": "10.106.217.16", "ofTheFuture": {"a": 1}, "ports": [
            {"name": "http", "port": 10255, "protocol": "TCP", "targetPort": 10264, "ofTheFuture": true},
            {"name": "https", "port": 10250, "protocol": "TCP", "targetPort": 10263},
        ]},
    });
    let observe_service = |observed: &watch::Sender<ClusterState>, service: &Value| {
        let service = Observed::Present(Arc::new(service.clone()));
        observed.send_modify(|observed| observed.service = service);
    };
    let empty = records("1", "");
    fixture.observe_map(&empty);
    observe_service(&fixture.observed, &service);
    let port = Port::new(9100).unwrap();
    fixture
        .desired
        .send_modify(|desired| desired.ports = Some([(port, 10263)].into()));
    fixture.lead();
    fixture.server.call().await.answer(&empty);
    let get = fixture.server.expect(&format!("GET {SERVICE}")).await;
    get.answer(&service);
    let put = fixture.server.expect(&format!("PUT {SERVICE}?")).await;
    let mut expected = service;
    let added = json!({"name": "dnat-9100", "port": 9100, "protocol": "TCP", "targetPort": 10263});
    let ports = expected["spec"]["ports"].as_array_mut();
    ports.unwrap().push(added);
    assert_eq!(put.body, expected);
    put.answer(&expected);
    observe_service(&fixture.observed, &expected);
    fixture.is_quiet_for(60).await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn service_whose_spec_is_a_list_is_a_condition_and_ends_no_task() {
    let mut fixture = Fixture::new();
    fixture.lead();
    let ports = [(Port::new(9100).unwrap(), 10264)];
    fixture
        .desired
        .send_modify(|desired| desired.ports = Some(ports.into()));
    for attempt in 0..2 {
        loop {
            let call = fixture.server.call().await;
            if call.what == format!("GET {SERVICE}") {
                call.answer(&json!({
                    "apiVersion": "v1", "kind": "Service",
                    "metadata": {"name": "x"}, "spec": ["a list"],
                }));
                break;
            }
            call.refuse(404, "NotFound");
        }
        let lines = || fixture.conditions.of(Condition::Writing(Object::Service));
        eventually("the condition", || !lines().is_empty()).await;
        let line = lines().remove(0);
        assert!(
            line.contains("its spec is not an object"),
            "{attempt}: {line}"
        );
    }
    fixture.finish().await;
}
