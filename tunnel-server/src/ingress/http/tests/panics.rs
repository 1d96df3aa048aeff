//! F36: a panic in the task of one caller's connection ends that connection, releases everything it
//! holds, and is counted.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_process::panics;
use tunnel_proto::transport::memory;
use tunnel_proto::wire::name::InstanceId;

use super::fixture::{Fixture, get};
use crate::routing::registry::AgentSession;
use crate::testing::{STREAMS, eventually, node};

#[tokio::test]
async fn f36_panic_in_a_request_costs_its_connection_alone() {
    panics::install_hook();
    let fixture = Fixture::new();
    let request = format!("{}Connection: close\r\n\r\n", get("/"));
    let mut waiting = fixture.send("GET").await;
    let (near, _far) = memory::pair();
    near.script().is_panicking = true;
    let registry = fixture.registry.clone();
    let entry = AgentSession::new(registry.next_id(), node(), InstanceId::new([9; 16]), near);
    let broken = registry.register(entry, &[]).unwrap();
    let before = panics::count();
    // More than the limit, so that a permit that is not released would be noticed.
    for _ in 0..2 * STREAMS {
        assert_eq!(fixture.ask(&request).await, "");
    }
    assert_eq!(panics::count() - before, 2 * STREAMS as u64);
    drop(broken);
    let is_alone = || fixture.ingress.shutdown.work_left() == 1;
    let is_empty = || fixture.metric("tunnel_server_streams_open") == 0;
    eventually("nothing is left", || is_empty() && is_alone()).await;
    let agent = fixture.agent();
    let rest = request.strip_prefix("GET").unwrap();
    let others = async {
        waiting.write_all(rest.as_bytes()).await.unwrap();
        let mut answer = String::new();
        waiting.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let (answer, _) = tokio::join!(others, agent.answers());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(!fixture.ingress.shutdown.drain().is_cancelled());
}
