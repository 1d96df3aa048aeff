use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tunnel_proto::process::meta::Readiness;

use super::super::testing::{ApiServer, NAMESPACE, api_server};
use super::super::watches::Observed;
use super::*;
use crate::cluster::leader_election::testing::leadership;
use crate::dns::{Addresses, Node, NodeLocation, RecordSet};

const MAP: &str = "/api/v1/namespaces/kube-system/configmaps/yurt-tunnel-nodes";
const SERVICE: &str = "/api/v1/namespaces/kube-system/services/x-tunnel-server-internal-svc";
const FIXTURE: &str = "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1";

struct Fixture {
    server: ApiServer,
    world: watch::Sender<ClusterState>,
    desired: watch::Sender<DesiredState>,
    lead: watch::Sender<Option<Instant>>,
    problems: Conditions,
    stop: CancellationToken,
}

fn fixture() -> (Fixture, Writers) {
    let (client, server) = api_server();
    let (world, desired) = (watch::Sender::default(), watch::Sender::default());
    let (lead, leadership) = leadership();
    let metrics = ClusterMetrics::default();
    let problems = Conditions::new(Readiness::default(), metrics.clone());
    let writers = Writers {
        maps: Api::namespaced(client.clone(), NAMESPACE),
        services: services(client.clone(), NAMESPACE),
        events: EventRecorder::new(
            Api::namespaced(client, NAMESPACE),
            NAMESPACE.into(),
            "me".into(),
        ),
        names: ObjectNames::default(),
        world: world.subscribe(),
        desired: desired.subscribe(),
        leadership,
        throttle: Throttle::default(),
        problems: problems.clone(),
        metrics,
        written: None,
    };
    let fixture = Fixture {
        server,
        world,
        desired,
        lead,
        problems,
        stop: CancellationToken::new(),
    };
    (fixture, writers)
}

impl Fixture {
    fn lead(&self) {
        let hour = Instant::now() + Duration::from_secs(3600);
        self.lead.send_replace(Some(hour));
    }

    fn set_desired_records(&self, edge_nodes: &[&str]) {
        let mut nodes: Vec<_> = edge_nodes
            .iter()
            .map(|name| Node {
                name: name.parse().unwrap(),
                hostname: None,
                location: NodeLocation::Edge,
            })
            .collect();
        nodes.push(Node {
            name: "master-1".parse().unwrap(),
            hostname: None,
            location: NodeLocation::Cloud(vec!["192.168.33.220".parse().unwrap()]),
        });
        let tunnel = Addresses::first_of(["10.106.217.16".parse().unwrap()]);
        let records = Arc::new(RecordSet::new(&nodes, tunnel));
        self.desired
            .send_modify(|desired| desired.records = Some(records));
    }

    fn observe_records_map(&self, map: &Value) {
        let map: ConfigMap = serde_json::from_value(map.clone()).unwrap();
        self.world
            .send_modify(|world| world.records_map = Observed::Present(Arc::new(map)));
    }
}

fn map(version: &str, data: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": data,
        "metadata": {"name": "yurt-tunnel-nodes", "namespace": NAMESPACE, "resourceVersion": version},
    })
}

/// DNS-1, DNS-7, F22: a missing ConfigMap is created, and created again after a deletion.
#[tokio::test(start_paused = true)]
async fn records_are_written_byte_for_byte_and_again_after_a_deletion() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        fixture.lead();
        fixture.set_desired_records(&["worker-1"]);
        for version in ["1", "2"] {
            if version == "1" {
                fixture
                    .server
                    .expect(&format!("GET {MAP}"))
                    .await
                    .refuse(404, "NotFound");
            }
            let made = fixture.server.call().await;
            assert_eq!(made.what, "POST /api/v1/namespaces/kube-system/configmaps?");
            assert_eq!(made.body["data"], json!({"tunnel-nodes": FIXTURE}));
            made.answer(&map(version, &json!({"tunnel-nodes": FIXTURE})));
            fixture.observe_records_map(&map(version, &json!({"tunnel-nodes": FIXTURE})));
            fixture.server.is_quiet_for(Duration::from_secs(30)).await;
            fixture
                .world
                .send_modify(|world| world.records_map = Observed::Absent);
        }
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// The permissions of the manifests do not include `create`. The condition has the command, and
/// clears after an operator has run it.
#[tokio::test(start_paused = true)]
async fn map_that_may_not_be_created_is_a_condition_with_the_command() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        fixture
            .world
            .send_modify(|world| world.records_map = Observed::Absent);
        fixture.lead();
        fixture.set_desired_records(&["worker-1"]);
        fixture
            .server
            .expect(&format!("GET {MAP}"))
            .await
            .refuse(404, "NotFound");
        fixture.server.call().await.refuse(403, "Forbidden");
        let again = loop {
            let call = fixture.server.call().await;
            if call.what.starts_with("GET") {
                break call;
            }
            call.refuse(403, "Forbidden");
        };
        let conditions = fixture.problems.of(Condition::Writing(Object::Records));
        let command = "kubectl -n kube-system create configmap yurt-tunnel-nodes";
        assert!(conditions[0].ends_with(command), "{conditions:?}");
        let empty = map("1", &Value::Null);
        again.answer(&empty);
        let put = fixture.server.call().await;
        assert_eq!(put.what, format!("PUT {MAP}?"));
        assert_eq!(put.body["data"], json!({"tunnel-nodes": FIXTURE}));
        let written = put.body.clone();
        put.answer(&written);
        fixture.observe_records_map(&map("2", &json!({"tunnel-nodes": FIXTURE})));
        fixture.server.is_quiet_for(Duration::from_secs(5)).await;
        let conditions = fixture.problems.of(Condition::Writing(Object::Records));
        assert_eq!(conditions, Vec::<String>::new());
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// F22, T14: only the server's key is repaired, within two seconds.
#[tokio::test(start_paused = true)]
async fn foreign_edit_is_repaired_and_foreign_keys_are_kept() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        fixture.lead();
        fixture.set_desired_records(&["worker-1"]);
        let good = map("1", &json!({"tunnel-nodes": FIXTURE}));
        fixture
            .server
            .expect(&format!("GET {MAP}"))
            .await
            .answer(&good);
        fixture.observe_records_map(&good);
        fixture.server.is_quiet_for(Duration::from_secs(5)).await;
        fixture.observe_records_map(&map(
            "2",
            &json!({"tunnel-nodes": "6.6.6.6\tworker-1", "theirs": "kept"}),
        ));
        let edited = Instant::now();
        let put = fixture.server.call().await;
        assert!(edited.elapsed() <= Duration::from_secs(2));
        assert_eq!(put.what, format!("PUT {MAP}?"));
        assert_eq!(put.body["metadata"]["resourceVersion"], "2");
        assert_eq!(
            put.body["data"],
            json!({"tunnel-nodes": FIXTURE, "theirs": "kept"})
        );
        let repaired = put.body.clone();
        put.answer(&repaired);
        fixture.server.is_quiet_for(Duration::from_secs(5)).await;
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// F23: the loser of a conflict reads again and writes on top of the winner's version.
#[tokio::test(start_paused = true)]
async fn conflict_is_retried_on_a_fresh_copy_and_a_burst_is_one_write() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        fixture.observe_records_map(&map("1", &json!({"tunnel-nodes": ""})));
        fixture.lead();
        fixture
            .server
            .call()
            .await
            .answer(&map("1", &json!({"tunnel-nodes": ""})));
        for count in 1..=20 {
            let names: Vec<String> = (0..count).map(|number| format!("edge-{number}")).collect();
            fixture.set_desired_records(&names.iter().map(String::as_str).collect::<Vec<_>>());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let put = fixture.server.call().await;
        let lines = put.body["data"]["tunnel-nodes"]
            .as_str()
            .unwrap()
            .lines()
            .count();
        assert_eq!(lines, 21, "all of the burst at once");
        put.refuse(409, "Conflict");
        let get = fixture.server.expect(&format!("GET {MAP}")).await;
        get.answer(&map("5", &json!({"tunnel-nodes": "other", "more": "x"})));
        let put = fixture.server.call().await;
        assert_eq!(put.body["metadata"]["resourceVersion"], "5");
        assert_eq!(put.body["data"]["more"], "x");
        let written = put.body.clone();
        put.answer(&written);
        fixture.server.is_quiet_for(Duration::from_secs(5)).await;
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// F38: a server that lost the Lease does not write, and does not report failed writes.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_without_the_lease() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        fixture.set_desired_records(&["worker-1"]);
        fixture.server.is_quiet_for(Duration::from_secs(60)).await;
        fixture.lead();
        let get = fixture.server.expect(&format!("GET {MAP}")).await;
        fixture.lead.send_replace(None);
        get.refuse(404, "NotFound");
        fixture.server.is_quiet_for(Duration::from_secs(60)).await;
        assert_eq!(
            fixture.problems.of(Condition::Writing(Object::Records)),
            Vec::<String>::new()
        );
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// T14: the old records stay, with a condition and an Event.
#[tokio::test(start_paused = true)]
async fn records_that_do_not_fit_stay_old_with_an_alarm_and_an_event() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        let full = "x".repeat(CONFIG_MAP_MAX_BYTES - 20);
        let found = map("1", &json!({"tunnel-nodes": "old", "theirs": full}));
        fixture.observe_records_map(&found);
        fixture.set_desired_records(&["worker-1"]);
        fixture.lead();
        fixture
            .server
            .expect(&format!("GET {MAP}"))
            .await
            .answer(&found);
        let event = fixture.server.call().await;
        assert_eq!(
            event.what,
            "POST /apis/events.k8s.io/v1/namespaces/kube-system/events?"
        );
        assert_eq!(event.body["reason"], "RecordsTooLarge");
        assert_eq!(event.body["regarding"]["name"], "yurt-tunnel-nodes");
        let body = event.body.clone();
        event.answer(&body);
        fixture.server.is_quiet_for(Duration::from_secs(60)).await;
        assert_eq!(fixture.problems.of(Condition::RecordsSize).len(), 1);
        fixture.observe_records_map(&map("2", &json!({"tunnel-nodes": "old"})));
        let put = fixture.server.call().await;
        let written = put.body.clone();
        put.answer(&written);
        fixture.server.is_quiet_for(Duration::from_secs(5)).await;
        assert_eq!(
            fixture.problems.of(Condition::RecordsSize),
            Vec::<String>::new()
        );
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// F21, F22: refusals are reported, retried with growing delays, and cleared after a success.
#[tokio::test(start_paused = true)]
async fn refused_writes_are_retried_and_reported() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let playing = async {
        let found = map("1", &json!({"tunnel-nodes": "old"}));
        fixture.observe_records_map(&found);
        fixture.set_desired_records(&["worker-1"]);
        fixture.lead();
        fixture.server.call().await.answer(&found);
        let start = Instant::now();
        let mut tries = 0;
        while start.elapsed() < Duration::from_secs(120) {
            let call = fixture.server.call().await;
            if call.what.starts_with("GET") {
                call.answer(&found);
                continue;
            }
            tries += 1;
            call.refuse(403, "Forbidden");
        }
        assert!((25..=60).contains(&tries), "{tries}");
        assert_eq!(
            fixture
                .problems
                .of(Condition::Writing(Object::Records))
                .len(),
            1
        );
        let returned = Instant::now();
        loop {
            let call = fixture.server.call().await;
            if call.what.starts_with("GET") {
                call.answer(&found);
                continue;
            }
            let written = call.body.clone();
            call.answer(&written);
            break;
        }
        assert!(
            returned.elapsed() <= Duration::from_secs(10),
            "{:?}",
            returned.elapsed()
        );
        fixture.server.is_quiet_for(Duration::from_secs(1)).await;
        assert_eq!(
            fixture.problems.of(Condition::Writing(Object::Records)),
            Vec::<String>::new()
        );
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}

/// The Service of guide 000, with fields that this build does not know.
#[tokio::test(start_paused = true)]
async fn extra_ports_reach_the_service_and_unknown_fields_survive() {
    let (mut fixture, mut writers) = fixture();
    let stop = fixture.stop.clone();
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "x-tunnel-server-internal-svc", "resourceVersion": "1"},
        "spec": {"clusterIP": "10.106.217.16", "ofTheFuture": {"a": 1}, "ports": [
            {"name": "http", "port": 10255, "protocol": "TCP", "targetPort": 10264, "ofTheFuture": true},
            {"name": "https", "port": 10250, "protocol": "TCP", "targetPort": 10263},
        ]},
    });
    let playing = async {
        let empty = map("1", &json!({"tunnel-nodes": ""}));
        fixture.observe_records_map(&empty);
        fixture
            .world
            .send_modify(|world| world.service = Observed::Present(Arc::new(service.clone())));
        let port = tunnel_proto::wire::name::Port::new(9100).unwrap();
        fixture
            .desired
            .send_modify(|desired| desired.ports = Some([(port, 10263)].into()));
        fixture.lead();
        fixture.server.call().await.answer(&empty);
        fixture
            .server
            .expect(&format!("GET {SERVICE}"))
            .await
            .answer(&service);
        let put = fixture.server.call().await;
        assert_eq!(put.what, format!("PUT {SERVICE}?"));
        let mut expected = service.clone();
        let added =
            json!({"name": "dnat-9100", "port": 9100, "protocol": "TCP", "targetPort": 10263});
        expected["spec"]["ports"]
            .as_array_mut()
            .unwrap()
            .push(added);
        assert_eq!(put.body, expected);
        put.answer(&expected);
        fixture
            .world
            .send_modify(|world| world.service = Observed::Present(Arc::new(expected)));
        fixture.server.is_quiet_for(Duration::from_secs(60)).await;
        fixture.stop.cancel();
    };
    tokio::join!(writers.run(&stop), playing);
}
