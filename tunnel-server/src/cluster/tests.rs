use std::collections::BTreeMap;
use std::time::Duration;

use prometheus_client::registry::Registry as MetricsRegistry;
use serde_json::{Value, json};
use tokio::sync::mpsc::Sender;
use tunnel_proto::transport::BufferPool;
use tunnel_proto::wire::name::{InstanceId, NodeName, Port, ReplicaId};
use tunnel_proto::wire::peer::{HeldNode, Holds};

use super::failure::Throttle;
use super::metrics::ClusterMetrics;
use super::objects::Object;
use super::testing::{ApiServer, Call, NAMESPACE, api_server};
use super::*;
use crate::config::{Config, Environment, ObjectNames, RawConfig};
use crate::routing::peers::{PeerAddress, Peers};
use crate::routing::pod_lookup::{Pod, PodLookupError, PodResolver};
use crate::routing::registry::{Registry, RegistryLimits};
use crate::testing::{POOL, eventually};
use tunnel_routing::policy::PortPolicy;
use tunnel_store::data_dir::testing::Scratch;
use tunnel_store::state_store::OnDamage;

/// The cluster controllers with their inputs and outputs, and the mock API server.
struct Fixture {
    server: ApiServer,
    cluster: Cluster,
    routes: Routes,
    records: Records,
    policy: SharedPolicy,
    peers: Arc<Peers>,
    readiness: Readiness,
    pods: PodResolver,
    shutdown: Shutdown,
    writing: WritersHandle,
}

/// Starts the controllers. The cluster has these nodes.
fn fixture(data: &DataDir, nodes: &[Value]) -> Fixture {
    let raw = RawConfig {
        http_proxy_ports: Some("9200".into()),
        edge_nodes: Some("label-or-agent".into()),
        ..RawConfig::default()
    };
    let config = Config::check(&raw, Environment { in_cluster: true }).unwrap();
    let (client, server) = api_server();
    let connection = Connection {
        client,
        throttle: Throttle::default(),
        clock: ApiServerClock::default(),
        namespace: NAMESPACE.into(),
    };
    let mut counters = MetricsRegistry::default();
    let (pods, pod_lookups) = PodResolver::new();
    let policy = SharedPolicy::default();
    policy.replace(&PortPolicy::new(config.ports.clone(), Vec::new()).into());
    let registry = Registry::new(RegistryLimits {
        streams_per_agent: 1,
        buffer_pool: POOL,
    });
    let peers = Peers::alone("server-1".parse().unwrap(), Vec::new());
    let inputs = ClusterInputs {
        routes: Routes::default(),
        records: Records::default(),
        policy: policy.clone(),
        ports: watch::channel(config.ports.clone()).1,
        own_ports: Vec::new(),
        routing: Routing::new(Arc::new(registry), peers.clone()),
        metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
        readiness: Readiness::default(),
        data: data.clone(),
        store: data.store(OnDamage::Stop).unwrap(),
        shutdown: Shutdown::new(),
        listener_ports: ListenerPorts {
            http: 10264,
            https: 10263,
        },
        serving_names: ServingNames::new(Vec::new(), Vec::new()),
        pod_lookups: Some(pod_lookups),
        reviews: None,
        attestations: None,
        kubelet_client_ca: None,
        ranges: None,
        labeled_nodes: LabeledNodes::default(),
        dials_by_ranges: false,
        signer: None,
    };
    let (routes, records) = (inputs.routes.clone(), inputs.records.clone());
    let (readiness, shutdown) = (inputs.readiness.clone(), inputs.shutdown.clone());
    let settings = config.kubernetes.unwrap();
    let handle = ClusterHandle::with_connection(connection, &readiness, &mut counters);
    Fixture {
        server,
        cluster: Cluster {
            nodes: list(nodes),
            watches: BTreeMap::new(),
        },
        routes,
        records,
        policy,
        peers,
        readiness,
        pods,
        shutdown,
        writing: start(&settings, handle, inputs),
    }
}

fn list(items: &[Value]) -> Value {
    json!({"metadata": {"resourceVersion": "10"}, "items": items})
}

fn node(name: &str, address: &str) -> Value {
    json!({
        "metadata": {"name": name, "resourceVersion": "11", "labels": {"openyurt.io/is-edge-worker": "true"}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "x-tunnel-server-internal-svc", "resourceVersion": "1"},
        "spec": {"clusterIP": "10.106.217.16", "ports": [
            {"name": "dnat-9100", "port": 9100, "protocol": "TCP", "targetPort": 10263},
        ]},
    })
}

fn ports(lists: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": lists,
        "metadata": {"name": "yurt-tunnel-server-cfg", "namespace": NAMESPACE, "resourceVersion": "12", "uid": "u"},
    })
}

/// A mock cluster that answers every request as an idle cluster would. Keeps the open watches by
/// object.
struct Cluster {
    nodes: Value,
    watches: BTreeMap<&'static str, Sender<String>>,
}

impl Cluster {
    /// Answers a request of the start-up. Returns other requests.
    fn answer(&mut self, call: Call) -> Option<Call> {
        let what = call.what.clone();
        let of = |part: &str| what.contains(part);
        let (object, items) = if of("/nodes?") {
            ("nodes", self.nodes.clone())
        } else if of("/services?") {
            ("service", list(&[service()]))
        } else if of("metadata.name%3Dyurt-tunnel-server-cfg") {
            let lists = json!({"https-proxy-ports": "9100, x"});
            ("ports", list(&[ports(&lists)]))
        } else if of("/leases") {
            call.refuse(403, "Forbidden");
            return None;
        } else {
            return Some(call);
        };
        if what.contains("watch=true") {
            self.watches.insert(object, call.stream(&[]));
        } else {
            call.answer(&items);
        }
        None
    }
}

impl Fixture {
    /// Answers requests of the start-up until another one, such as a lookup, arrives.
    async fn lookup(&mut self) -> Call {
        loop {
            let call = self.server.call().await;
            if let Some(call) = self.cluster.answer(call) {
                return call;
            }
        }
    }

    /// Answers requests until a condition holds.
    async fn play_until(&mut self, what: &str, holds: impl FnMut() -> bool) {
        tokio::select! {
            call = self.lookup() => panic!("unexpected {}", call.what),
            () = eventually(what, holds) => {}
        }
    }

    /// Answers requests until all watches are open. A server that does not lead does not read the
    /// ConfigMap of the records.
    async fn play_until_watched(&mut self) {
        while self.cluster.watches.len() < 3 {
            let call = self.server.call().await;
            assert!(self.cluster.answer(call).is_none());
        }
    }

    async fn send_event(&self, object: &str, kind: &str, event: &Value) {
        let line = format!("{}\n", json!({"type": kind, "object": event}));
        self.cluster.watches[object].send(line).await.unwrap();
    }
}

fn serves(policy: &SharedPolicy, port: u16) -> bool {
    policy.load().ports.entry(Port::new(port).unwrap()).is_ok()
}

#[tokio::test(start_paused = true)]
async fn cluster_feeds_routes_records_and_policy_and_a_start_without_it_serves_the_last() {
    let scratch = Scratch::new();
    let mut first = fixture(&scratch.0, &[node("worker-1", "192.168.33.221")]);
    assert!(serves(&first.policy, 9200), "the flags' list");
    assert_eq!(first.readiness.read().0, ["nodes of the cluster"]);
    let (records, policy) = (first.records.clone(), first.policy.clone());
    let readiness = first.readiness.clone();
    let is_applied = || {
        records.load().hosts() == "10.106.217.16\tworker-1"
            && serves(&policy, 9100)
            && !serves(&policy, 9200)
            && readiness.read().0.is_empty()
    };
    first.play_until("nodes and ports", is_applied).await;
    let address = "192.168.33.221".parse().unwrap();
    assert!(first.routes.load().by_address(address).is_ok());
    first.play_until_watched().await;

    let twin = node("worker-2", "192.168.33.221");
    first.send_event("nodes", "ADDED", &twin).await;
    let both = "10.106.217.16\tworker-1\n10.106.217.16\tworker-2";
    let sent_at = tokio::time::Instant::now();
    let has_both = || records.load().hosts() == both;
    first.play_until("the other node", has_both).await;
    let waited = sent_at.elapsed();
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    let shared = first.routes.load().by_address(address);
    assert!(shared.is_err(), "shared by two");

    let is_on_disk = || {
        let store = scratch.0.store(OnDamage::Stop).unwrap();
        let (facts, _owners) = Snapshot::load(&store).take_nodes();
        facts.contains_key("worker-2")
    };
    first.play_until("the last on disk", is_on_disk).await;
    first.shutdown.drain().cancel();
    first.writing.ended().await;
    first.shutdown.finish().await;

    let second = fixture(&scratch.0, &[]);
    // The API server is unavailable, so no request is answered.
    drop(second.server);
    let has_both = || second.records.load().hosts() == both && second.readiness.read().0.is_empty();
    eventually("the persisted records", has_both).await;
    assert!(serves(&second.policy, 9100));
    assert!(second.routes.load().knows(&"worker-2".parse().unwrap()));
    tokio::time::sleep(Duration::from_secs(11)).await;
    let conditions = second.readiness.conditions();
    let is_said = |(component, line): &(&str, String)| {
        *component == "node list" && line.contains("the 2 persisted nodes are served meanwhile")
    };
    assert!(conditions.iter().any(is_said), "{conditions:?}");
    second.shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn server_that_knows_no_list_of_nodes_is_not_ready_until_it_is_complete() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0, &[node("worker-1", "192.168.33.221")]);
    tokio::time::sleep(Duration::from_secs(11)).await;
    let (records, readiness) = (fixture.records.clone(), fixture.readiness.clone());
    assert_eq!(readiness.read().0, ["nodes of the cluster"]);
    assert_eq!(records.known(), None, "not known, rather than none");
    let is_said = || {
        let conditions = readiness.conditions();
        conditions
            .iter()
            .any(|(component, _)| *component == "node list")
    };
    assert!(is_said());
    let is_ready = || readiness.read().0.is_empty() && records.known().is_some() && !is_said();
    fixture.play_until("the list", is_ready).await;
    fixture.shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn agent_of_another_server_makes_its_node_an_edge_node_while_that_server_holds_it() {
    let scratch = Scratch::new();
    let mut unlabeled = node("worker-1", "192.168.33.221");
    unlabeled["metadata"]["labels"] = json!({});
    let mut fixture = fixture(&scratch.0, &[unlabeled]);
    let (records, peers) = (fixture.records.clone(), fixture.peers.clone());
    let resolves_to = |address: &str| records.load().hosts() == format!("{address}\tworker-1");
    let (own, tunnel) = ("192.168.33.221", "10.106.217.16");
    fixture
        .play_until("its own address", || resolves_to(own))
        .await;
    let other: ReplicaId = "server-2".parse().unwrap();
    peers.expect(&PeerAddress {
        id: other.clone(),
        address: "192.0.2.2:10269".to_owned(),
        zone: None,
    });
    let announce = |added| {
        let holds = Holds {
            is_full: true,
            added,
            ..Holds::default()
        };
        peers.apply(&other, holds);
    };
    let held = HeldNode {
        node: "worker-1".parse().unwrap(),
        instance: InstanceId::new([1; 16]),
        since: std::time::SystemTime::UNIX_EPOCH,
    };
    announce(vec![held]);
    fixture
        .play_until("the tunnel", || resolves_to(tunnel))
        .await;
    announce(Vec::new());
    fixture
        .play_until("its own address again", || resolves_to(own))
        .await;
    fixture.shutdown.finish().await;
}

/// DNS-7: without the ports ConfigMap the lists of the flags apply. Without the Service the records
/// stay unchanged.
#[tokio::test(start_paused = true)]
async fn deleted_objects_give_the_flags_lists_and_frozen_records() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0, &[node("worker-1", "192.168.33.221")]);
    fixture.play_until_watched().await;
    let deleted = ports(&json!({}));
    fixture.send_event("ports", "DELETED", &deleted).await;
    let policy = fixture.policy.clone();
    let has_flags = || serves(&policy, 9200) && !serves(&policy, 9100);
    fixture.play_until("the flags' list", has_flags).await;
    fixture.send_event("service", "DELETED", &service()).await;
    let other = node("worker-2", "10.0.0.2");
    fixture.send_event("nodes", "ADDED", &other).await;
    let (routes, records) = (fixture.routes.clone(), fixture.records.clone());
    let has_other = || routes.load().knows(&"worker-2".parse().unwrap());
    fixture.play_until("the other node", has_other).await;
    assert_eq!(records.load().hosts(), "10.106.217.16\tworker-1");
    let mut moved = service();
    moved["spec"]["clusterIP"] = "10.9.9.9".into();
    fixture.send_event("service", "ADDED", &moved).await;
    let has_moved = || records.load().hosts() == "10.9.9.9\tworker-1\n10.9.9.9\tworker-2";
    fixture.play_until("the new address", has_moved).await;
    fixture.shutdown.finish().await;
}

fn pod(name: &str) -> Pod {
    Pod {
        namespace: "default".into(),
        name: name.into(),
    }
}

fn pod_on(node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-0"},
        "spec": {"nodeName": node, "containers": []},
    })
}

impl Fixture {
    /// Returns the node of a pod, and the number of calls for the lookup. `answer` answers each
    /// call.
    async fn look_up(
        &mut self,
        answer: impl Fn(Call),
    ) -> (Result<NodeName, PodLookupError>, Vec<String>) {
        let mut calls = Vec::new();
        let mut asking = std::pin::pin!(self.pods.node_of(pod("web-0")));
        loop {
            tokio::select! {
                biased;
                found = &mut asking => return (found, calls),
                call = self.server.call() => if let Some(call) = self.cluster.answer(call) {
                    calls.push(call.what.clone());
                    answer(call);
                }
            }
        }
    }
}

/// A pod with the same name may run on another node a moment later, so nothing is cached.
#[tokio::test(start_paused = true)]
async fn moved_pod_is_found_on_its_new_node_at_once() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0, &[]);
    fixture.play_until_watched().await;
    for name in ["worker-1", "worker-2"] {
        let answer = |call: Call| call.answer(&pod_on(name));
        let (found, calls) = fixture.look_up(answer).await;
        assert_eq!(found.unwrap().as_str(), name);
        assert_eq!(calls, ["GET /api/v1/namespaces/default/pods/web-0"]);
    }
    fixture.shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn missing_right_to_get_pods_is_named_and_shown_until_it_is_granted() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0, &[]);
    fixture.play_until_watched().await;
    let shown = |fixture: &Fixture| {
        let conditions = fixture.readiness.conditions();
        let mut conditions = conditions.iter().filter(|(part, _)| *part == "pod lookup");
        conditions.any(|(_, line)| line.contains("verb get on resource pods"))
    };
    let refuse = |call: Call| call.refuse(403, "Forbidden");
    let (found, _) = fixture.look_up(refuse).await;
    assert_eq!(found, Err(PodLookupError::Forbidden));
    assert!(found.unwrap_err().to_string().contains("'pods get'"));
    eventually("the condition", || shown(&fixture)).await;
    // A failure of another kind shows nothing about permissions.
    let fail = |call: Call| call.refuse(503, "ServiceUnavailable");
    let (found, _) = fixture.look_up(fail).await;
    let is_failed = matches!(found, Err(PodLookupError::Unavailable(_)));
    assert!(is_failed && shown(&fixture), "{found:?}");
    let missing = |call: Call| call.refuse(404, "NotFound");
    let (found, _) = fixture.look_up(missing).await;
    assert_eq!(found, Err(PodLookupError::NotFound));
    eventually("no condition", || !shown(&fixture)).await;
    let unbound = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-0"}, "spec": {"containers": []},
    });
    let answer = |call: Call| call.answer(&unbound);
    let (found, _) = fixture.look_up(answer).await;
    assert_eq!(found, Err(PodLookupError::Unbound));
    fixture.shutdown.finish().await;
}

/// 200 concurrent execs: 16 lookups run at a time, and the others wait.
#[tokio::test(start_paused = true)]
async fn two_hundred_questions_at_once_are_all_answered_sixteen_at_a_time() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0, &[]);
    fixture.play_until_watched().await;
    let mut asking = tokio::task::JoinSet::new();
    for number in 0..200 {
        let pods = fixture.pods.clone();
        asking.spawn(async move { pods.node_of(pod(&format!("web-{number}"))).await });
    }
    let mut waiting = Vec::new();
    let mut answered = 0;
    while answered < 200 {
        while waiting.len() < 16.min(200 - answered) {
            waiting.push(fixture.lookup().await);
        }
        let more = tokio::time::timeout(Duration::from_millis(10), fixture.lookup());
        if let Ok(call) = more.await {
            panic!("a seventeenth call: {}", call.what);
        }
        answered += waiting.len();
        for call in waiting.drain(..) {
            call.answer(&pod_on("worker-1"));
        }
    }
    let answers = asking.join_all().await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    fixture.shutdown.finish().await;
}

/// Every permission has a user in the code, and no other verb is requested.
#[test]
fn rights_are_least() {
    for right in objects::RIGHTS {
        assert!(!right.resource.contains('*'), "{right:?}");
        for verb in ["*", "delete", "patch"] {
            // The namespace of the tokens has nothing else.
            let is_refused = verb != "delete" || right.scope != objects::Scope::TokensNamespace;
            assert!(!right.verbs.contains(&verb) || !is_refused, "{right:?}");
        }
        // The API server does not store reviews.
        let is_review = right.resource.ends_with("reviews");
        let is_create = right.verbs == ["create"] && !is_review;
        // A list by label cannot be limited to a name either.
        let is_by_label = right.resource == "endpointslices" && right.verbs == ["list", "watch"];
        let in_namespace = right.scope == objects::Scope::Namespace;
        assert_eq!(is_create || is_by_label, in_namespace, "{right:?}");
    }
}

/// The reference names every object, key, label and port as the code does.
#[test]
fn reference_says_what_the_code_does() {
    let page = include_str!("../../../docs/reference/kubernetes.md");
    let names = ObjectNames::default();
    let http_port = tunnel_proto::wire::PORT_HTTP.to_string();
    let https_port = tunnel_proto::wire::PORT_HTTPS.to_string();
    for word in [
        &*names.nodes_config_map,
        &names.ports_config_map,
        &names.internal_service,
        &names.leader_lease,
        &names.peer_service,
        objects::PEER_PORT_NAME,
        crate::config::EDGE_LABEL,
        crate::config::LOCALHOST_PORTS,
        objects::RECORDS_KEY,
        objects::HTTP_PORTS_KEY,
        objects::HTTPS_PORTS_KEY,
        objects::LOCALHOST_PORTS_KEY,
        objects::PORT_PAIRS_KEY,
        objects::EXTRA_PORT_PREFIX,
        objects::KUBELET_CLIENT_NAME,
        &http_port,
        &https_port,
    ] {
        assert!(page.contains(word), "{word} is not in the reference");
    }
    let mut counters = MetricsRegistry::default();
    let metrics = ClusterMetrics::new(&mut counters);
    metrics.record_write(Object::Records, "ok");
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &counters).unwrap();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(page.contains(name), "{name} is not in the reference");
    }
}
