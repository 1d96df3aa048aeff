use prometheus_client::registry::Registry as MetricsRegistry;
use serde_json::{Value, json};

use tunnel_process::meta::Readiness;

use super::super::client::Connection;
use super::super::clock::ApiServerClock;
use super::super::failure::Throttle;
use super::super::testing::{ApiServer, NAMESPACE, api_server};
use super::*;
use crate::testing::assert_contains;

const ONE: &str = "GET /apis/coordination.k8s.io/v1/namespaces/kube-system/leases/l";
const ACQUIRED: &str = "2026-11-21T10:00:00.000000Z";

fn spec(holder: &str, renewed: i64) -> LeaseSpec {
    let time = Timestamp::from_second(renewed).unwrap();
    LeaseSpec {
        holder_identity: Some(holder.into()),
        lease_duration_seconds: Some(15),
        acquire_time: Some(MicroTime(time)),
        renew_time: Some(MicroTime(time)),
        lease_transitions: Some(3),
        ..LeaseSpec::default()
    }
}

fn candidate() -> Candidate {
    Candidate {
        identity: "me".into(),
        observed: None,
    }
}

fn taken(next_action: LeaseAction) -> LeaseSpec {
    match next_action {
        LeaseAction::Take(spec) => spec,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn anothers_lease_is_taken_when_it_did_not_change_for_its_duration() {
    let (mut me, start, wall) = (candidate(), Instant::now(), Timestamp::UNIX_EPOCH);
    let after = |seconds| start + Duration::from_secs(seconds);
    // The times in the Lease may be of any clock. Only whether the Lease changes counts.
    for (renewed, at) in [(100, 0), (100, 14), (102, 14), (102, 28)] {
        let other = spec("other", renewed);
        let action = me.next_action(Some(&other), after(at), wall);
        assert_eq!(action, LeaseAction::Follow("other".into()), "{at}");
    }
    let mine = taken(me.next_action(Some(&spec("other", 102)), after(29), wall));
    assert_eq!(mine.holder_identity.as_deref(), Some("me"));
    assert_eq!(mine.lease_transitions, Some(4));
    assert_eq!(mine.acquire_time, Some(MicroTime(wall)));
    assert_eq!(mine.lease_duration_seconds, Some(15));
}

#[tokio::test(start_paused = true)]
async fn own_and_free_leases_are_taken_at_once() {
    let (mut me, now, wall) = (candidate(), Instant::now(), Timestamp::UNIX_EPOCH);
    let own = spec("me", 100);
    let renewed = taken(me.next_action(Some(&own), now, wall));
    assert_eq!(renewed.acquire_time, own.acquire_time);
    assert_eq!(renewed.lease_transitions, Some(3));
    assert_eq!(renewed.renew_time, Some(MicroTime(wall)));
    let free = taken(me.next_action(Some(&spec("", 100)), now, wall));
    assert_eq!(free.lease_transitions, Some(4));
    let LeaseAction::Create(made) = me.next_action(None, now, wall) else {
        panic!("not created");
    };
    assert_eq!(made.lease_transitions, Some(0));
}

fn election() -> (Election, ApiServer) {
    election_beside(Throttle::default())
}

/// Creates an election of a server to which the API server has said `throttle`.
fn election_beside(throttle: Throttle) -> (Election, ApiServer) {
    let (client, server) = api_server();
    let connection = Connection {
        client,
        throttle,
        clock: ApiServerClock::default(),
        namespace: NAMESPACE.into(),
    };
    let cluster = ClusterHandle::with_connection(
        connection,
        &Readiness::default(),
        &mut MetricsRegistry::default(),
    );
    let lease = LeaseHandle::new("l".into(), &cluster);
    let election = Election::new(lease, "me".into(), &cluster);
    (election, server)
}

fn lease(holder: &str, version: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "l", "resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 1,
            "acquireTime": ACQUIRED, "renewTime": ACQUIRED},
    })
}

/// F38: the term ends without a renewal.
#[tokio::test(start_paused = true)]
async fn writing_ends_ten_seconds_after_the_last_renewal_and_comes_back_with_the_next() {
    let (mut election, mut server) = election();
    let (mut leadership, stop) = (election.leadership(), CancellationToken::new());
    let playing = async {
        server.expect(ONE).await.refuse(404, "NotFound");
        let made = server.call().await;
        assert_eq!(made.body["spec"]["holderIdentity"], "me");
        let renewed_at = Instant::now();
        made.answer(&lease("me", "1"));
        leadership.changed().await;
        let end = renewed_at + RENEW_DEADLINE;
        assert_eq!(leadership.until(renewed_at), Some(end));
        while leadership.until(Instant::now()).is_some() {
            tokio::select! {
                call = server.call() => call.refuse(500, "InternalError"),
                _ = leadership.changed() => {}
            }
        }
        assert_eq!(Instant::now(), end);
        server.call().await.answer(&lease("me", "7"));
        let put = server.call().await;
        assert!(put.what.starts_with("PUT "), "{}", put.what);
        assert_eq!(put.body["metadata"]["resourceVersion"], "7");
        assert_eq!(put.body["spec"]["acquireTime"], ACQUIRED);
        put.answer(&lease("me", "8"));
        leadership.changed().await;
        assert!(leadership.until(Instant::now()).is_some());
        stop.cancel();
    };
    tokio::join!(election.run(&stop), playing);
    let releasing = async {
        server.call().await.answer(&lease("me", "8"));
        let put = server.call().await;
        assert_eq!(put.body["spec"]["holderIdentity"], "");
        assert_eq!(put.body["spec"]["leaseDurationSeconds"], 1);
        assert_eq!(put.body["spec"]["leaseTransitions"], 1);
        put.answer(&lease("", "9"));
    };
    tokio::join!(election.release(), releasing);
    assert!(leadership.until(Instant::now()).is_none());
}

#[tokio::test(start_paused = true)]
async fn lease_that_another_took_ends_writing_at_once() {
    let (mut election, mut server) = election();
    let (mut leadership, stop) = (election.leadership(), CancellationToken::new());
    let playing = async {
        server.call().await.answer(&lease("", "1"));
        server.call().await.answer(&lease("me", "2"));
        leadership.changed().await;
        assert!(leadership.until(Instant::now()).is_some());
        server.call().await.answer(&lease("other", "3"));
        leadership.changed().await;
        assert!(leadership.until(Instant::now()).is_none());
        stop.cancel();
    };
    tokio::join!(election.run(&stop), playing);
    // Another candidate holds the Lease, so this one does not release it.
    election.release().await;
    server.is_quiet_for(Duration::from_secs(60)).await;
}

/// A server that was paused must not write under a term that ended in the meantime.
#[tokio::test(start_paused = true)]
async fn term_that_is_over_counts_for_nothing_before_anybody_says_so() {
    let (term, leadership) = testing::leadership();
    let end = Instant::now() + RENEW_DEADLINE;
    term.send_replace(Some(end));
    assert_eq!(leadership.until(end - Duration::from_millis(1)), Some(end));
    assert_eq!(leadership.until(end), None);
}

/// The permissions of the manifests do not include `create`.
#[tokio::test(start_paused = true)]
async fn lease_that_may_not_be_created_is_a_condition_with_the_command() {
    let (mut election, mut server) = election();
    let (mut leadership, stop) = (election.leadership(), CancellationToken::new());
    let conditions = election.conditions.clone();
    let lease_conditions = || conditions.of(Condition::Writing(Object::Lease));
    let playing = async {
        server.call().await.refuse(404, "NotFound");
        server.call().await.refuse(403, "Forbidden");
        let found = server.call().await;
        let lines = lease_conditions();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert_contains(&lines[0], "Lease kube-system/l does not exist");
        let command = "| kubectl -n kube-system create -f -";
        assert!(lines[0].ends_with(command), "{lines:?}");
        // An empty Lease, as manifests ship it.
        let mut empty = lease("", "1");
        empty.as_object_mut().unwrap().remove("spec");
        found.answer(&empty);
        let put = server.call().await;
        assert_eq!(put.body["spec"]["holderIdentity"], "me");
        put.answer(&lease("me", "2"));
        leadership.changed().await;
        assert!(leadership.until(Instant::now()).is_some());
        assert_eq!(lease_conditions(), Vec::<String>::new());
        stop.cancel();
    };
    tokio::join!(election.run(&stop), playing);
}

#[tokio::test(start_paused = true)]
async fn refusals_of_other_requests_do_not_end_the_term() {
    let throttle = Throttle::default();
    let (mut election, mut server) = election_beside(throttle.clone());
    let (mut leadership, stop) = (election.leadership(), CancellationToken::new());
    let playing = async {
        server.call().await.refuse(404, "NotFound");
        server.call().await.answer(&lease("me", "1"));
        leadership.changed().await;
        let mut headers = http::HeaderMap::new();
        headers.insert(http::header::RETRY_AFTER, 30.into());
        throttle.observe(http::StatusCode::TOO_MANY_REQUESTS, &headers);
        for version in 1..10 {
            server
                .expect(ONE)
                .await
                .answer(&lease("me", &version.to_string()));
            server.call().await.accept();
            leadership.changed().await;
            assert!(leadership.until(Instant::now()).is_some(), "{version}");
        }
        stop.cancel();
    };
    tokio::join!(election.run(&stop), playing);
}
