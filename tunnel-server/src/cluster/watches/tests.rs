use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;

use super::super::testing::{ApiServer, Call, NAMESPACE, api_server};
use super::*;
use crate::testing::assert_contains;

fn map(name: &str, version: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": version},
    })
}

fn list(items: &[Value], more: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMapList", "items": items,
        "metadata": {"resourceVersion": "10", "continue": more},
    })
}

/// Observed versions, with `-` for an absent object.
type Versions = Arc<Mutex<Vec<String>>>;

fn followed() -> (ApiServer, Versions, Readiness, Shutdown) {
    let (client, server) = api_server();
    let (versions, tasks) = (Versions::default(), Shutdown::new());
    let (recorder, shown) = (versions.clone(), Readiness::default());
    let readiness = shown.clone();
    tasks.spawn_service(async move {
        let metrics = ClusterMetrics::default();
        let context = WatchContext {
            object: Object::Ports,
            conditions: Conditions::new(readiness),
            metrics,
            throttle: Throttle::default(),
        };
        let maps = Api::<ConfigMap>::namespaced(client, NAMESPACE);
        follow_one(maps, "a", context, |state| {
            let version = state.present().map_or_else(
                || "-".to_owned(),
                |map| map.metadata.resource_version.clone().unwrap_or_default(),
            );
            recorder.lock().push(version);
        })
        .await;
    });
    (server, versions, shown, tasks)
}

async fn until_versions(versions: &Versions, expected: &[&str]) {
    crate::testing::eventually("these versions", || *versions.lock() == expected).await;
}

fn is_list(what: &str) -> bool {
    !what.contains("watch=true")
}

#[tokio::test(start_paused = true)]
async fn pages_make_one_state_and_only_the_named_object_counts() {
    let (mut server, versions, _readiness, _tasks) = followed();
    let first = server.call().await;
    assert_contains(&first.what, "fieldSelector=metadata.name%3Da");
    assert_contains(&first.what, "limit=500");
    first.answer(&list(&[map("b", "1")], "more"));
    let second = server.call().await;
    assert!(second.what.contains("continue=more"), "{}", second.what);
    assert!(versions.lock().is_empty(), "half a list says nothing");
    second.answer(&list(&[map("a", "2")], ""));
    let watch = server.call().await;
    assert!(watch.what.contains("resourceVersion=10") && watch.what.contains("timeoutSeconds=60"));
    let _watch = watch.stream(&[
        json!({"type": "MODIFIED", "object": map("b", "11")}),
        json!({"type": "MODIFIED", "object": map("a", "12")}),
    ]);
    until_versions(&versions, &["2", "12"]).await;
}

/// F21: a watch that is interrupted resumes at its last version, without a list.
#[tokio::test(start_paused = true)]
async fn cut_watch_is_resumed_and_an_absent_server_is_asked_again_soon() {
    let (mut server, versions, _readiness, _tasks) = followed();
    server.call().await.answer(&list(&[], ""));
    let watch = server.call().await;
    drop(watch.stream(&[json!({"type": "ADDED", "object": map("a", "11")})]));
    let cut = Instant::now();
    let mut last = cut;
    while cut.elapsed() < Duration::from_secs(600) {
        let again = server.call().await;
        assert!(!is_list(&again.what), "{}", again.what);
        assert_contains(&again.what, "resourceVersion=11");
        let waited = last.elapsed();
        assert!(waited <= Duration::from_secs(8), "{waited:?}");
        last = Instant::now();
        again.refuse(500, "InternalError");
    }
    let again = server.call().await;
    let _watch = again.stream(&[json!({"type": "DELETED", "object": map("a", "12")})]);
    until_versions(&versions, &["-", "11", "-"]).await;
}

/// F21: repeated status 410, at the start of a watch and within it.
#[tokio::test(start_paused = true)]
async fn expired_version_is_listed_again_at_most_every_thirty_seconds() {
    let (mut server, versions, _readiness, _tasks) = followed();
    let (start, mut lists) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(300) {
        let call = server.call().await;
        if is_list(&call.what) {
            lists += 1;
            call.answer(&list(&[map("a", "2")], ""));
        } else {
            expire(call, lists % 2 == 1);
        }
    }
    assert!((8..=13).contains(&lists), "{lists} lists in 300 s");
    assert!(!versions.lock().is_empty());
}

/// F22: the condition lasts as long as the failure, and clears even if the watch has no events.
#[tokio::test(start_paused = true)]
async fn lost_right_is_a_condition_until_the_watch_runs_again() {
    let (mut server, _versions, readiness, _tasks) = followed();
    let mut call = server.call().await;
    let lost = Instant::now();
    while lost.elapsed() < REPORT_AFTER {
        // It may be an API server that starts.
        assert_eq!(readiness.conditions(), []);
        call.refuse(403, "Forbidden");
        call = server.call().await;
    }
    call.refuse(403, "Forbidden");
    let last = server.call().await;
    let conditions = readiness.conditions();
    assert_eq!(conditions.len(), 1);
    assert_contains(&conditions[0].1, "cannot watch ports: Forbidden");
    last.answer(&list(&[], ""));
    let _watch = server.call().await.stream(&[]);
    tokio::time::sleep(RECOVERED_AFTER + Duration::from_secs(1)).await;
    assert_eq!(readiness.conditions(), []);
}

/// F21: silence during a list is no recovery.
#[tokio::test(start_paused = true)]
async fn list_that_hangs_and_fails_is_a_condition() {
    let (mut server, _versions, readiness, _tasks) = followed();
    server.call().await.refuse(500, "InternalError");
    let slow = server.call().await;
    tokio::time::sleep(RECOVERED_AFTER * 2).await;
    slow.refuse(500, "InternalError");
    let _next = server.call().await;
    assert_eq!(readiness.conditions().len(), 1);
}

/// F21: after a restart of the API server the first watch ends with 410, which is normal.
#[tokio::test(start_paused = true)]
async fn restarted_api_server_is_listed_at_once_and_its_410_is_no_condition() {
    for in_stream in [false, true] {
        let (mut server, versions, readiness, _tasks) = followed();
        server.call().await.answer(&list(&[map("a", "2")], ""));
        drop(server.call().await.stream(&[]));
        for _ in 0..6 {
            server.call().await.refuse(500, "InternalError");
        }
        let first_watch = server.call().await;
        assert!(!is_list(&first_watch.what), "{}", first_watch.what);
        assert_eq!(readiness.conditions().len(), 1, "the outage lasted");
        let back = Instant::now();
        expire(first_watch, in_stream);
        let again = server.call().await;
        assert!(is_list(&again.what), "{}", again.what);
        let waited = back.elapsed();
        assert!(waited < Duration::from_millis(10), "{waited:?}");
        for (_, line) in readiness.conditions() {
            assert!(!line.contains("410"), "{line}");
        }
        again.answer(&list(&[map("a", "3")], ""));
        let watch = server.call().await;
        until_versions(&versions, &["2", "3"]).await;
        // The list shows that the API server is back.
        assert_eq!(readiness.conditions(), []);

        let listed = Instant::now();
        expire(watch, in_stream);
        let limited = server.call().await;
        assert!(is_list(&limited.what), "{}", limited.what);
        let waited = listed.elapsed();
        assert!(waited > Duration::from_secs(25), "{waited:?}");
    }
}

/// A version that expires repeatedly is a condition, which stays between the lists.
#[tokio::test(start_paused = true)]
async fn version_that_keeps_expiring_is_a_condition() {
    let (mut server, _versions, readiness, _tasks) = followed();
    for round in 0..4 {
        let call = server.call().await;
        assert!(is_list(&call.what), "{}", call.what);
        call.answer(&list(&[map("a", "2")], ""));
        let watch = server.call().await;
        let count = readiness.conditions().len();
        assert_eq!(count, usize::from(round > 1), "{round}");
        expire(watch, true);
    }
}

/// A running watch is not a condition, however busy it is.
#[tokio::test(start_paused = true)]
async fn busy_watch_is_no_condition_after_a_while() {
    let (mut server, _versions, readiness, _tasks) = followed();
    for _ in 0..2 {
        server.call().await.answer(&list(&[map("a", "2")], ""));
        expire(server.call().await, true);
    }
    server.call().await.answer(&list(&[map("a", "3")], ""));
    assert_eq!(readiness.conditions().len(), 1, "the version expired twice");
    let watch = server.call().await.stream(&[]);
    for version in 4..18 {
        let object = map("a", &version.to_string());
        let event = json!({"type": "MODIFIED", "object": object});
        watch.send(format!("{event}\n")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(readiness.conditions(), []);
}

fn expire(watch: Call, in_stream: bool) {
    if !in_stream {
        return watch.refuse(410, "Expired");
    }
    let gone = json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "too old resource version", "reason": "Expired", "code": 410,
    }});
    drop(watch.stream(&[gone]));
}

/// The watches of all servers expire together when the API server restarts.
#[tokio::test(start_paused = true)]
async fn first_lists_of_nodes_after_an_expiry_are_spread_and_those_of_single_objects_are_not() {
    let delays = |object: Object| -> Vec<Duration> {
        let delay = |_| {
            let metrics = ClusterMetrics::default();
            let mut errors = WatchErrors::new(WatchContext {
                object,
                conditions: Conditions::new(Readiness::default()),
                metrics,
                throttle: Throttle::default(),
            });
            let wait = errors.next_delay(&ApiError::new(ApiErrorKind::Expired, ""));
            assert!(!errors.is_expiring, "one expiry is normal");
            wait
        };
        (0..50).map(delay).collect()
    };
    assert!(delays(Object::Revocations).iter().all(Duration::is_zero));
    let of_nodes = delays(Object::Nodes);
    let (first, last) = (
        of_nodes.iter().min().unwrap(),
        of_nodes.iter().max().unwrap(),
    );
    assert!(*last <= RELIST_SPREAD, "{last:?}");
    assert!(*last - *first > RELIST_SPREAD / 4, "{first:?} to {last:?}");
}
