//! Requests of kubelet paths whose Host leads nowhere.

use std::sync::Arc;

use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{StreamKind, Target};
use tunnel_proto::wire::name::Port;

use super::bench::Bench;
use crate::pods::{Kubelet, Pod, PodFinder};
use crate::testing::node;

/// An old kube-apiserver dials the kubelet by an address: the pod in the path tells the node.
#[tokio::test(start_paused = true)]
async fn kubelet_path_with_a_host_that_leads_nowhere_goes_to_the_node_of_its_pod() {
    let mut bench = Bench::new();
    let (pods, mut questions) = PodFinder::new();
    Arc::get_mut(&mut bench.doors).unwrap().pods = Some(pods);
    let agent = bench.agent();
    let exec = "POST /exec/default/web-0/nginx?command=ls HTTP/1.1\r\nHost: 10.9.9.9:10250\r\n\
                Content-Length: 0\r\nConnection: close\r\n\r\n";
    let known = async {
        let question = questions.recv().await.unwrap();
        assert_eq!(
            question.pod,
            Pod::of_path("/exec/default/web-0/nginx").unwrap()
        );
        let port = Port::new(10350).unwrap();
        let kubelet = Kubelet { node: node(), port };
        question.answer.send(Some(kubelet)).unwrap();
        let (header, stream) = agent.asked().await;
        assert_eq!(header.kind, StreamKind::Target(Target::Node(port)));
        stream.refuse(RefusalCode::TargetRefused, "").await;
    };
    let (answer, ()) = tokio::join!(bench.ask_secure(exec), known);
    assert!(
        answer.contains("X-Tunnel-Error: target_refused\r\n"),
        "{answer}"
    );
    let unknown = async {
        let question = questions.recv().await.unwrap();
        question.answer.send(None).unwrap();
    };
    let (answer, ()) = tokio::join!(bench.ask_secure(exec), unknown);
    assert!(
        answer.contains("X-Tunnel-Error: unknown_node\r\n"),
        "{answer}"
    );
    // Other paths, and hosts that lead somewhere, ask nobody.
    let elsewhere = exec.replace("/exec/default/web-0/nginx?command=ls", "/metrics");
    let answer = bench.ask_secure(&elsewhere).await;
    assert!(
        answer.contains("X-Tunnel-Error: unknown_node\r\n"),
        "{answer}"
    );
    // Nor does the plain door.
    let answer = bench.ask(exec).await;
    assert!(
        answer.contains("X-Tunnel-Error: unknown_node\r\n"),
        "{answer}"
    );
    assert!(questions.try_recv().is_err());
}
