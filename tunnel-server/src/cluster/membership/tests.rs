use prometheus_client::registry::Registry as MetricsRegistry;
use serde_json::{Value, json};
use tokio::time::sleep;
use tunnel_process::meta::Readiness;

use super::super::clock::ApiServerClock;
use super::super::failure::Throttle;
use super::super::testing::{ApiServer, NAMESPACE, api_server};
use super::*;
use crate::config::{Config, Environment, RawConfig};
use crate::testing::{assert_contains, eventually};
use tunnel_store::data_dir::DataDir;
use tunnel_store::data_dir::testing::Scratch;
use tunnel_store::state_store::OnDamage;

/// Returns a slice of the servers' Service.
fn slice(name: &str, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": "11",
            "labels": {"kubernetes.io/service-name": "tunnel-server-peers"}},
        "endpoints": endpoints,
        "ports": [{"name": "peers", "port": 10269, "protocol": "TCP"}],
    })
}

/// Returns the endpoint of a pod with these conditions.
fn pod(name: &str, address: &str, conditions: &Value) -> Value {
    json!({
        "addresses": [address], "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name, "namespace": NAMESPACE},
    })
}

fn running(name: &str, address: &str) -> Value {
    pod(name, address, &json!({"ready": true}))
}

/// Returns the servers as `NAME=ADDRESS` or `NAME=ADDRESS@ZONE`, and the reasons why endpoints are ignored.
fn derived(slices: &[Value]) -> (Vec<String>, Vec<String>) {
    let mut store = SliceStore::default();
    let objects = slices.iter().cloned();
    let objects = objects.map(|slice| serde_json::from_value::<EndpointSlice>(slice).unwrap());
    let mut events = vec![Event::Init];
    events.extend(objects.map(Event::InitApply));
    events.push(Event::InitDone);
    assert!(store.apply(events));
    let Membership { peers, ignored } = Membership::of(&store.observed);
    (shown(&peers), ignored)
}

fn shown(peers: &[PeerAddress]) -> Vec<String> {
    let peers = peers.iter();
    let zone = |peer: &PeerAddress| {
        peer.zone
            .as_ref()
            .map_or_else(String::new, |zone| format!("@{zone}"))
    };
    peers
        .map(|peer| format!("{}={}{}", peer.id, peer.address, zone(peer)))
        .collect()
}

#[test]
fn endpoints_that_run_are_servers() {
    for (conditions, is_server) in [
        (json!({}), true),
        (json!({"ready": true, "serving": true}), true),
        // A pod that starts, or that drains, behind a Service that publishes such addresses.
        (json!({"ready": true, "serving": false}), true),
        (json!({"ready": true, "terminating": true}), true),
        // The same behind a Service that does not.
        (json!({"ready": false, "serving": false}), false),
        (json!({"ready": false, "terminating": true}), false),
        (json!({"ready": false}), false),
        // A pod that terminates and still serves.
        (json!({"ready": false, "serving": true}), true),
    ] {
        let (servers, ignored) = derived(&[slice("s", &[pod("a", "10.0.0.1", &conditions)])]);
        assert_eq!(servers.len(), usize::from(is_server), "{conditions}");
        assert_eq!(ignored, [""; 0]);
    }
}

#[test]
fn each_pod_is_one_server_with_its_first_address_and_the_named_port() {
    let mut v6 = slice("a-v6", &[running("b", "fd00::2"), running("c", "fd00::3")]);
    v6["addressType"] = "IPv6".into();
    v6["ports"] = json!([{"name": "other", "port": 1}, {"name": "peers", "port": 4433}]);
    let mut two_addresses = running("a", "10.0.0.1");
    two_addresses["addresses"] = json!(["10.0.0.1", "10.0.0.9"]);
    let mut host = running("host", "10.0.0.4");
    host["targetRef"]["kind"] = "Node".into();
    let mut bare = running("bare", "10.0.0.5");
    bare.as_object_mut().unwrap().remove("targetRef");
    let endpoints = [running("b", "10.0.0.2"), two_addresses, host, bare];
    let v4 = slice("b-v4", &endpoints);
    let (servers, ignored) = derived(&[v6, v4]);
    assert_eq!(
        servers,
        ["a=10.0.0.1:10269", "b=10.0.0.2:10269", "c=[fd00::3]:4433"]
    );
    assert_eq!(ignored, [""; 0]);
}

#[test]
fn zone_is_that_of_the_endpoint_or_unknown() {
    let in_zone = |zone: &Value| {
        let mut endpoint = running("a", "10.0.0.1");
        endpoint["zone"] = zone.clone();
        derived(&[slice("s", &[endpoint])]).0
    };
    assert_eq!(in_zone(&json!("eu-1a")), ["a=10.0.0.1:10269@eu-1a"]);
    for unknown in [json!(null), json!(""), json!("a b"), json!("z".repeat(64))] {
        assert_eq!(in_zone(&unknown), ["a=10.0.0.1:10269"], "{unknown}");
    }
}

#[test]
fn port_that_is_missing_or_not_valid_is_the_default() {
    for ports in [
        json!(null),
        json!([]),
        json!([{"port": 1}]),
        json!([{"name": "peers"}]),
        json!([{"name": "peers", "port": 0}]),
        json!([{"name": "peers", "port": -1}, {"name": "peers", "port": 70000}]),
    ] {
        let mut slice = slice("s", &[running("a", "10.0.0.1")]);
        slice["ports"] = ports.clone();
        let (servers, _) = derived(&[slice]);
        assert_eq!(servers, ["a=10.0.0.1:10269"], "{ports}");
    }
}

#[test]
fn hostile_endpoints_are_ignored_with_a_reason() {
    let long = "x".repeat(5000);
    for (name, address, reason) in [
        ("a b", "10.0.0.1", "\"a b\" is ignored"),
        ("", "10.0.0.1", "\"\" is ignored"),
        (&*long, "10.0.0.1", "is ignored"),
        ("a", "", "has no IP address"),
        ("a", "example.com", "has no IP address"),
        ("a", "10.0.0.1:22", "has no IP address"),
        ("a", "169.254.169.254", "cloud metadata"),
        ("a", "::ffff:169.254.169.254", "cloud metadata"),
        ("a", "0.0.0.0", "unspecified"),
        ("a", "ff02::1", "multicast"),
    ] {
        let (servers, ignored) = derived(&[slice("s", &[running(name, address)])]);
        assert_eq!(servers, [""; 0], "{name} {address}");
        assert_eq!(ignored.len(), 1, "{name} {address}");
        assert_contains(&ignored[0], "EndpointSlice s: ");
        assert_contains(&ignored[0], reason);
        assert!(ignored[0].len() < 300, "{}", ignored[0]);
    }
}

#[test]
fn floods_of_servers_endpoints_and_slices_are_bounded() {
    let many = |count: usize| -> Vec<Value> {
        let names = (0..count).map(|number| format!("s-{number:04}"));
        names.map(|name| running(&name, "10.0.0.1")).collect()
    };
    let (servers, ignored) = derived(&[slice("s", &many(REPLICAS_MAX))]);
    assert_eq!((servers.len(), ignored.len()), (REPLICAS_MAX, 0));
    let (servers, ignored) = derived(&[slice("s", &many(REPLICAS_MAX + 3))]);
    assert_eq!(servers.len(), REPLICAS_MAX);
    assert_eq!(servers[0], "s-0000=10.0.0.1:10269");
    assert_contains(&ignored[0], "3 servers are ignored");

    let names = (0..1000).map(|number| format!("s-{number}"));
    let slices: Vec<_> = names.map(|name| slice(&name, &many(1))).collect();
    let (servers, ignored) = derived(&slices);
    assert_eq!(servers.len(), 1);
    assert_eq!(ignored.len(), 1, "{ignored:?}");
    let refused: Vec<_> = (0..1000).map(|_| running("a b", "10.0.0.1")).collect();
    assert_eq!(derived(&[slice("s", &refused)]).1.len(), IGNORED_MAX);
}

/// The handle of a server that follows its peers, and the mock API server.
struct Fixture {
    server: ApiServer,
    /// This server `a`, and the servers that are connected.
    connected: watch::Sender<Arc<[Member]>>,
    peers: watch::Receiver<Arc<[PeerAddress]>>,
    unknown: UnknownMembership,
    readiness: Readiness,
    shutdown: Shutdown,
}

fn fixture(data: &DataDir) -> Fixture {
    let environment = Environment { in_cluster: true };
    let config = Config::check(&RawConfig::default(), environment).unwrap();
    let (client, server) = api_server();
    let connection = Connection {
        client,
        throttle: Throttle::default(),
        clock: ApiServerClock::default(),
        namespace: NAMESPACE.into(),
    };
    let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
    let cluster =
        ClusterHandle::with_connection(connection, &readiness, &mut MetricsRegistry::default());
    let (connected, members) = watch::channel(Arc::from([member("a")]));
    let own = OwnMembership {
        replica: "a".parse().unwrap(),
        members,
    };
    let store = data.store(OnDamage::Stop).unwrap();
    let settings = config.kubernetes.unwrap();
    let (peers, unknown) = follow_peers(&settings, &cluster, own, &store, &shutdown);
    Fixture {
        server,
        connected,
        peers,
        unknown,
        readiness,
        shutdown,
    }
}

fn persisted(data: &DataDir) -> Vec<PeerAddress> {
    let store = data.store(OnDamage::Stop).unwrap();
    restore(&RowSet::load(&store, Table::Cluster, PREFIX))
}

fn member(name: &str) -> Member {
    Member {
        id: name.parse().unwrap(),
        addresses: Vec::new(),
        is_leaving: false,
        zone: None,
    }
}

fn list(slices: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": slices,
        "metadata": {"resourceVersion": "10"},
    })
}

#[tokio::test(start_paused = true)]
async fn servers_are_followed_and_persisted_for_a_start_without_the_api_server() {
    let scratch = Scratch::new();
    let data = &scratch.0;
    let mut first = fixture(data);
    assert!(first.peers.borrow().is_empty());
    let listing = first.server.call().await;
    assert_contains(
        &listing.what,
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices?",
    );
    assert_contains(
        &listing.what,
        "labelSelector=kubernetes.io%2Fservice-name%3Dtunnel-server-peers",
    );
    let one = [running("a", "10.0.0.1"), running("b", "not an address")];
    listing.answer(&list(&[slice("s", &one)]));
    eventually("the list", || {
        shown(&first.peers.borrow()) == ["a=10.0.0.1:10269"]
    })
    .await;
    let conditions = first.readiness.conditions();
    assert_eq!(conditions.len(), 1, "{conditions:?}");
    assert_eq!(conditions[0].0, "peer endpoints");

    let mut two = [running("a", "10.0.0.1"), running("b", "10.0.0.2")];
    two[1]["zone"] = "eu-1a".into();
    let event = json!({"type": "MODIFIED", "object": slice("s", &two)});
    let _watch = first.server.call().await.stream(&[event]);
    let both = ["a=10.0.0.1:10269", "b=10.0.0.2:10269@eu-1a"];
    eventually("the second server", || shown(&first.peers.borrow()) == both).await;
    assert_eq!((first.unknown)(), None);
    assert_eq!(first.readiness.conditions(), []);
    eventually("the rows", || shown(&persisted(data)) == both).await;
    first.shutdown.finish().await;

    let mut second = fixture(data);
    assert_eq!(shown(&second.peers.borrow()), both);
    assert!((second.unknown)().is_some(), "persisted is not observed");
    second.server.call().await.refuse(500, "InternalError");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(shown(&second.peers.borrow()), both);
    second.shutdown.finish().await;
}

#[tokio::test(start_paused = true)]
async fn servers_without_slices_stay_and_those_of_a_list_without_them_while_they_are_connected() {
    let scratch = Scratch::new();
    let mut fixture = fixture(&scratch.0);
    let all = ["a", "b", "c", "d"].map(|name| running(name, "10.0.0.1"));
    let listing = fixture.server.call().await;
    listing.answer(&list(&[slice("s", &all)]));
    let names = |fixture: &Fixture| -> Vec<String> {
        let peers = fixture.peers.borrow();
        peers.iter().map(|peer| peer.id.to_string()).collect()
    };
    eventually("the list", || names(&fixture).len() == 4).await;
    // Of the others, c leaves and d is not connected.
    let leaving = Member {
        is_leaving: true,
        zone: None,
        ..member("c")
    };
    fixture
        .connected
        .send_replace([member("a"), member("b"), leaving].into());
    let gone = json!({"type": "DELETED", "object": slice("s", &all)});
    let watch = fixture.server.call().await.stream(&[gone]);
    eventually("the empty list", || names(&fixture) == ["a", "b", "d"]).await;
    let lines = |fixture: &Fixture| -> Vec<String> {
        let conditions = fixture.readiness.conditions().into_iter();
        conditions.map(|(_component, line)| line).collect()
    };
    let service = "in the EndpointSlices of Service kube-system/tunnel-server-peers";
    let unlisted = format!("no server is {service}, so the known ones stay: a, b, d");
    assert_eq!(lines(&fixture), [unlisted]);
    // Without a list nor a connection nobody knows that they are gone.
    fixture.connected.send_replace([member("a")].into());
    sleep(2 * MISSING_AFTER).await;
    assert_eq!(names(&fixture), ["a", "b", "d"], "however long it takes");
    assert_eq!(shown(&persisted(&scratch.0)).len(), 3);
    assert_contains(
        &lines(&fixture)[0],
        "this server, a, is not in the EndpointSlices",
    );
    fixture
        .connected
        .send_replace([member("a"), member("b")].into());
    let only = json!({"type": "ADDED", "object": slice("s", &all[..1])});
    watch.send(format!("{only}\n")).await.unwrap();
    eventually("the shorter list", || names(&fixture) == ["a", "b"]).await;
    let unlisted = format!(
        "1 connected servers are not {service}: b; they stay until their connections are lost"
    );
    assert_eq!(lines(&fixture), [unlisted]);
    fixture.connected.send_replace([member("a")].into());
    eventually("the connection is lost", || names(&fixture) == ["a"]).await;
    fixture.shutdown.finish().await;
}
