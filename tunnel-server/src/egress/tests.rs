use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;
use tunnel_proto::transport::find_cause;
use tunnel_proto::wire::control::{CAPABILITY_CLOUD, ControlMessage};
use tunnel_proto::wire::header::Target as PortTarget;

use super::*;
use crate::config::{CloudNodes, Limits};
use crate::testing::{Agent, Bench, WAIT_TIMEOUT, within};
use tunnel_routing::policy::Policy;
use tunnel_routing::policy::rules::RuleTable;

fn target(name: &str, address: SocketAddr, nodes: Option<&str>) -> CloudTargetSettings {
    CloudTargetSettings {
        name: name.parse().unwrap(),
        addresses: vec![address.to_string()],
        nodes: nodes.map_or(CloudNodes::All, |name| {
            CloudNodes::Named([name.parse().unwrap()].into())
        }),
    }
}

fn open_policy() -> SharedPolicy {
    let policy = SharedPolicy::default();
    policy.replace(&Policy {
        rules: RuleTable::yurt_tunnel().into(),
        ..Policy::default()
    });
    policy
}

fn egress(
    targets: &[CloudTargetSettings],
    limits: &Limits,
    metrics: Metrics,
    shutdown: Shutdown,
    policy: SharedPolicy,
) -> CloudEgress {
    let egress = CloudEgress::new(
        targets,
        Followed::default(),
        LabeledNodes::new(targets),
        SharedLimits::from(*limits),
        limits.cloud_streams_total,
        metrics,
        shutdown,
        AccessControl {
            policy,
            ..AccessControl::default()
        },
    );
    egress.unwrap()
}

/// A server with targets of the cloud, and an agent of worker-1.
async fn server(targets: &[CloudTargetSettings], limits: Limits) -> (Bench, Agent) {
    server_with(targets, limits, open_policy()).await
}

async fn server_with(
    targets: &[CloudTargetSettings],
    limits: Limits,
    policy: SharedPolicy,
) -> (Bench, Agent) {
    let mut bench = Bench::new();
    let (metrics, shutdown) = (
        bench.sessions.metrics.clone(),
        bench.sessions.shutdown.clone(),
    );
    let egress = egress(targets, &limits, metrics, shutdown, policy);
    bench.sessions.cloud = Some(Arc::new(egress));
    let agent = bench.agent(7).await;
    (bench, agent)
}

fn header(name: &str) -> StreamHeader {
    StreamHeader::new(StreamKind::Cloud(name.parse().unwrap()))
}

async fn open(agent: &Agent, header: &StreamHeader) -> Result<Stream, RefusalCode> {
    let mut stream = agent.far.open(header, WAIT_TIMEOUT).await.unwrap();
    match within(stream.accepted()).await.map(|_| ()) {
        Ok(()) => Ok(stream),
        Err(error) => Err(find_cause::<Refusal>(&error).unwrap().code),
    }
}

/// Starts a target that echoes each connection to its end.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tasks, connections) = (TaskTracker::new(), TaskTracker::new());
    tasks.spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            connections.spawn(async move {
                let (mut read, mut write) = socket.split();
                let _cut = tokio::io::copy(&mut read, &mut write).await;
                let _cut = write.shutdown().await;
            });
        }
    });
    address
}

#[tokio::test]
async fn stream_of_an_agent_is_relayed_to_its_target_in_both_directions() {
    let (_bench, agent) = server(&[target("echo", echo().await, None)], Limits::default()).await;
    let mut stream = open(&agent, &header("echo")).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut text = String::new();
    within(stream.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "hello");
}

/// Neither file allows the target: one offers it and has no rule that allows it, and the other one does not
/// offer it.
#[tokio::test(flavor = "multi_thread")]
async fn no_stream_meets_the_targets_of_one_file_and_the_rules_of_another_one() {
    let (offered, policy) = (
        [target("echo", echo().await, None)],
        SharedPolicy::default(),
    );
    let (bench, agent) = server_with(&offered, Limits::default(), policy.clone()).await;
    let cloud = bench.sessions.cloud.clone().unwrap();
    let open_rules = open_policy().load();
    let replacing = tokio::task::spawn_blocking(move || {
        for _ in 0..20_000 {
            cloud.replace(&[], 100, || policy.replace(&open_rules));
            cloud.replace(&offered, 100, || policy.replace(&Policy::default()));
        }
    });
    while !replacing.is_finished() {
        let opened = open(&agent, &header("echo")).await.map(|_| ());
        assert!(opened.is_err(), "neither file allows it");
    }
    replacing.await.unwrap();
}

#[tokio::test]
async fn streams_to_nothing_that_is_offered_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    let targets = [
        target("closed", closed, None),
        target("others", closed, Some("worker-2")),
    ];
    let (bench, agent) = server(&targets, Limits::default()).await;
    let port = StreamKind::Target(PortTarget::Node(Port::new(10250).unwrap()));
    for (header, expected) in [
        (header("closed"), RefusalCode::TargetRefused),
        (header("others"), RefusalCode::Policy),
        (header("unknown"), RefusalCode::UnknownTarget),
        (StreamHeader::new(port), RefusalCode::BadHeader),
        (
            StreamHeader::new(StreamKind::Enroll),
            RefusalCode::BadHeader,
        ),
    ] {
        assert_eq!(
            open(&agent, &header).await.map(|_| ()),
            Err(expected),
            "{header:?}"
        );
    }
    bench.sessions.shutdown.drain().cancel();
    let draining = open(&agent, &header("closed")).await.map(|_| ());
    assert_eq!(draining, Err(RefusalCode::Draining));
}

/// An agent tries again at another server after `Draining`, not after `TooManyStreams`.
#[tokio::test]
async fn server_that_stops_says_so_to_an_agent_above_its_rate() {
    let limits = Limits {
        cloud_stream_rate: 1,
        ..Limits::default()
    };
    let (bench, agent) = server(&[target("echo", echo().await, None)], limits).await;
    let unknown = header("unknown");
    while open(&agent, &unknown).await.map(|_| ()) != Err(RefusalCode::TooManyStreams) {}
    bench.sessions.shutdown.drain().cancel();
    for _ in 0..5 {
        let draining = open(&agent, &header("echo")).await.map(|_| ());
        assert_eq!(draining, Err(RefusalCode::Draining));
    }
}

#[tokio::test]
async fn agent_that_opens_too_many_streams_or_too_fast_is_refused() {
    let limits = Limits {
        cloud_streams_per_agent: 3,
        cloud_stream_rate: 4,
        ..Limits::default()
    };
    let (_bench, agent) = server(&[target("echo", echo().await, None)], limits).await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(open(&agent, &header("echo")).await.unwrap());
    }
    let fourth = open(&agent, &header("echo")).await.map(|_| ());
    assert_eq!(fourth, Err(RefusalCode::TooManyStreams));
    drop(streams);
    let mut refused = 0;
    for _ in 0..20 {
        refused += usize::from(
            open(&agent, &header("unknown")).await.map(|_| ()) == Err(RefusalCode::TooManyStreams),
        );
    }
    assert!(refused > 5, "{refused} of 20");
}

#[tokio::test]
async fn streams_of_all_agents_hold_at_and_above_their_limit_and_one_agent_has_an_eighth() {
    let limits = Limits {
        cloud_streams_total: 16,
        ..Limits::default()
    };
    let bench = Bench::new();
    let targets = [target("x", "127.0.0.1:1".parse().unwrap(), None)];
    let (metrics, shutdown) = (
        bench.sessions.metrics.clone(),
        bench.sessions.shutdown.clone(),
    );
    let egress = egress(&targets, &limits, metrics, shutdown, open_policy());
    let name = "x".parse().unwrap();
    let admit = |node: u32| {
        let node = format!("worker-{node}").parse().unwrap();
        egress
            .admit(&node, &name, true, true)
            .map_err(|refusal| refusal.code)
    };
    let mut streams = Vec::new();
    for node in 0..8 {
        streams.push(admit(node).unwrap());
        streams.push(admit(node).unwrap());
        assert_eq!(admit(node).err(), Some(RefusalCode::TooManyStreams));
    }
    assert_eq!(admit(8).err(), Some(RefusalCode::TooManyStreams));
    streams.pop();
    assert!(admit(8).is_ok());
}

#[tokio::test]
async fn capability_is_in_welcome_of_agents_that_have_a_target() {
    let address = "127.0.0.1:1".parse().unwrap();
    for (nodes, expected) in [
        (None, true),
        (Some("worker-1"), true),
        (Some("worker-2"), false),
    ] {
        let mut bench = Bench::new();
        let (metrics, shutdown) = (
            bench.sessions.metrics.clone(),
            bench.sessions.shutdown.clone(),
        );
        let targets = [target("x", address, nodes)];
        let limits = Limits::default();
        let egress = egress(&targets, &limits, metrics, shutdown, open_policy());
        bench.sessions.cloud = Some(Arc::new(egress));
        let (_agent, answer) = bench.connect_agent(7, 4096).await;
        let ControlMessage::Welcome(welcome) = answer else {
            panic!("{answer:?}");
        };
        let has_cloud = welcome
            .capabilities
            .iter()
            .any(|name| name == CAPABILITY_CLOUD);
        assert_eq!(has_cloud, expected, "{nodes:?}");
    }
}
