//! Requests with kubelet paths: the requests that look up the Pod, and the result of the lookup.

use std::sync::Arc;

use tokio::sync::mpsc::Receiver;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{StreamKind, Target};
use tunnel_proto::wire::name::Port;
use tunnel_routing::policy::{DelegationPolicy, Policy};

use super::fixture::{Agent, Fixture};
use crate::routing::pod_lookup::{PodLookupError, PodLookupRequest, PodResolver};
use crate::routing::routes::{RouteNode, RouteSource};
use crate::testing::{assert_contains, node};

const EXEC: &str = "POST /exec/default/web-0/nginx?command=ls HTTP/1.1\r\nHost: 10.77.100.3:6443\r\n\
                    Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n";

/// Returns a listener whose Pod lookups the test answers.
fn fixture() -> (Fixture, Agent, Receiver<PodLookupRequest>) {
    let mut fixture = Fixture::new();
    let (pods, questions) = PodResolver::new();
    Arc::get_mut(&mut fixture.ingress).unwrap().pods = Some(pods);
    let of_cluster = RouteNode {
        kubelet_port: Port::new(10350),
        ..RouteNode::edge(node(), vec!["10.0.0.1".parse().unwrap()])
    };
    let routes = &fixture.ingress.routes;
    routes.set(RouteSource::Cluster, vec![of_cluster]);
    let agent = fixture.agent();
    (fixture, agent, questions)
}

/// Refuses the next stream, which must go to the kubelet. The caller receives the refusal.
async fn refuses_at_the_kubelet(agent: &Agent) {
    let (header, stream) = agent.asked().await;
    let kubelet = Target::Node(Port::new(10350).unwrap());
    assert_eq!(header.kind, StreamKind::Target(kubelet));
    stream.refuse(RefusalCode::TargetRefused, "").await;
}

#[tokio::test(start_paused = true)]
async fn exec_without_a_node_in_tls_goes_to_the_node_of_its_pod() {
    let (fixture, agent, mut questions) = fixture();
    let answering = async {
        let question = questions.recv().await.unwrap();
        assert_eq!(question.pod.to_string(), "default/web-0");
        question.answer.send(Ok(node())).unwrap();
        refuses_at_the_kubelet(&agent).await;
    };
    let (answer, ()) = tokio::join!(fixture.ask_delegated(None, EXEC), answering);
    assert_contains(&answer, "X-Tunnel-Error: target_refused\r\n");
}

#[tokio::test(start_paused = true)]
async fn exec_with_its_node_in_tls_asks_nobody() {
    let (fixture, agent, mut questions) = fixture();
    let asking = fixture.ask_delegated(Some("worker-1"), EXEC);
    let (answer, ()) = tokio::join!(asking, refuses_at_the_kubelet(&agent));
    assert_contains(&answer, "X-Tunnel-Error: target_refused\r\n");
    assert!(questions.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn failed_lookup_opens_no_stream() {
    let (fixture, agent, mut questions) = fixture();
    let exec = EXEC.replace("10.77.100.3:6443", "worker-1:10350");
    let answering = async {
        let question = questions.recv().await.unwrap();
        let forbidden = Err(PodLookupError::Forbidden);
        question.answer.send(forbidden).unwrap();
    };
    let (answer, ()) = tokio::join!(fixture.ask_delegated(None, &exec), answering);
    assert_contains(&answer, "X-Tunnel-Error: unknown_node\r\n");
    assert_contains(&answer, "pods get");
    assert!(agent.is_left_alone().await);
}

/// Only callers with delegation on the HTTPS listener can cause API requests. Neither other callers
/// nor those of the plain listener can.
#[tokio::test(start_paused = true)]
async fn other_callers_never_cause_a_question() {
    let (fixture, agent, mut questions) = fixture();
    for host in ["10.9.9.9:10250", "unknown-1:10250"] {
        let exec = EXEC.replace("10.77.100.3:6443", host);
        for answer in [fixture.ask_secure(&exec).await, fixture.ask(&exec).await] {
            assert_contains(&answer, "X-Tunnel-Error: unknown_node\r\n");
        }
    }
    assert!(questions.try_recv().is_err() && agent.is_left_alone().await);
}

/// The file of the configuration may name other callers while a connection is open.
#[tokio::test(start_paused = true)]
async fn caller_that_is_no_longer_named_has_no_delegation() {
    let (fixture, agent, mut questions) = fixture();
    let policy = &fixture.ingress.policy;
    policy.replace(&Policy {
        delegation: DelegationPolicy::default(),
        ..Policy::clone(&policy.load())
    });
    let exec = EXEC.replace("10.77.100.3:6443", "unknown-1:10250");
    let answer = fixture.ask_delegated(Some("worker-1"), &exec).await;
    assert_contains(&answer, "X-Tunnel-Error: unknown_node\r\n");
    assert!(questions.try_recv().is_err() && agent.is_left_alone().await);
}

#[tokio::test(start_paused = true)]
async fn selectors_of_a_caller_with_delegation_are_not_judged() {
    let (fixture, agent, _questions) = fixture();
    let request = "GET /pods HTTP/1.1\r\nHost: 10.77.100.3:6443\r\nX-Tunnel-Proxy-Host: a b\r\n\
                   X-Tunnel-Proxy-Dest: worker-9:22\r\nConnection: close\r\n\r\n";
    let asking = fixture.ask_delegated(Some("worker-1"), request);
    let (answer, ()) = tokio::join!(asking, refuses_at_the_kubelet(&agent));
    assert_contains(&answer, "X-Tunnel-Error: target_refused\r\n");
}
