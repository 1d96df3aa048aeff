use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::calibration::scaled;
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{Session, StreamCut, find_cause};
use tunnel_proto::wire::code::ResetCode;
use tunnel_proto::wire::name::Port;

use super::*;
use crate::config::NodeIpSetting;
use crate::node_ip::NodeIpLookup;

const LONG: Duration = Duration::from_secs(10);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Returns the agent's limit of a dial. All targets but a silent one answer at once.
fn dial_timeout() -> Duration {
    scaled(Duration::from_millis(500))
}

/// An agent's egress behind a session in memory.
struct Agent {
    server: Arc<dyn Session>,
    egress: Arc<Egress>,
    params: Arc<SessionParams>,
    loop_detector: Arc<LoopDetector>,
    metrics: Metrics,
    draining: CancellationToken,
    session: Arc<MemorySession>,
    tasks: JoinSet<()>,
}

impl Agent {
    fn start() -> Self {
        Self::with(DialPolicy::default(), Some(LOCALHOST), 8)
    }

    /// Creates an agent whose node address counts as configured by the operator.
    fn with(dial_policy: DialPolicy, node_ip: Option<IpAddr>, streams: u32) -> Self {
        let (server, session) = memory::pair();
        let limits = Limits {
            streams_per_agent: streams,
            target_dial_timeout: dial_timeout(),
            ..Limits::default()
        };
        let (metrics, draining) = (Metrics::default(), CancellationToken::new());
        let loop_detector = Arc::new(LoopDetector::default());
        let egress = Arc::new(Egress::new(
            "worker-1".parse().unwrap(),
            dial_policy.into(),
            loop_detector.clone(),
            limits.into(),
            metrics.clone(),
            draining.clone(),
        ));
        let setting = node_ip.map_or(NodeIpSetting::Unset, NodeIpSetting::Fixed);
        let node_ip = NodeIpLookup::new(egress.node.clone(), setting, Readiness::default());
        let of_server = SocketAddr::from((LOCALHOST, 10262));
        let params = Arc::new(SessionParams {
            session: SessionId(1),
            node_ip: SessionNodeIp::new(node_ip, SessionId(1), of_server, None),
            dial_timeout: Duration::ZERO,
        });
        let mut agent = Self {
            server,
            egress,
            params,
            loop_detector,
            metrics,
            draining,
            session: session.clone(),
            tasks: JoinSet::new(),
        };
        let (egress, params) = (agent.egress.clone(), agent.params.clone());
        agent.tasks.spawn(async move {
            let mut streams = JoinSet::new();
            while let Ok(incoming) = session.accept().await {
                let (egress, params) = (egress.clone(), params.clone());
                let has_room = session.has_room();
                streams.spawn(async move { egress.serve(incoming, has_room, &params).await });
            }
        });
        agent
    }

    async fn open(&self, target: Target) -> Stream {
        self.open_kind(StreamKind::Target(target)).await
    }

    async fn open_kind(&self, kind: StreamKind) -> Stream {
        let header = StreamHeader::new(kind);
        self.server.open(&header, scaled(LONG)).await.unwrap()
    }

    /// Opens a stream to a target, and returns it with the target's end and port.
    async fn connect(&self) -> (Stream, TcpStream, Port) {
        let (listener, port) = target().await;
        let stream = self.open(Target::Node(port)).await;
        (stream, accept(&listener).await, port)
    }

    /// Serves a stream without a session, as a task of `shutdown`.
    fn serve(&self, incoming: IncomingStream, shutdown: &Shutdown) {
        let (egress, params) = (self.egress.clone(), self.params.clone());
        shutdown.spawn_work(async move { egress.serve(incoming, true, &params).await });
    }

    /// Returns the refusal that the opener of a stream reads.
    async fn refusal(&self, target: Target) -> Refusal {
        refusal(self.open(target).await).await
    }
}

async fn refusal(mut stream: Stream) -> Refusal {
    let error = stream.read_u8().await.unwrap_err();
    find_cause::<Refusal>(&error).expect("a refusal").clone()
}

async fn target() -> (TcpListener, Port) {
    let listener = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
    let port = Port::new(listener.local_addr().unwrap().port()).unwrap();
    (listener, port)
}

async fn unused_port() -> Port {
    target().await.1
}

async fn accept(listener: &TcpListener) -> TcpStream {
    timeout(scaled(LONG), listener.accept())
        .await
        .unwrap()
        .unwrap()
        .0
}

#[tokio::test]
async fn connection_is_known_to_the_loop_detector_before_it_is_relayed() {
    let agent = Agent::start();
    let (listener, port) = target().await;
    let mut stream = agent.open(Target::Node(port)).await;
    let (socket, peer) = timeout(scaled(LONG), listener.accept())
        .await
        .unwrap()
        .unwrap();
    stream.accepted().await.unwrap();
    assert!(
        agent
            .loop_detector
            .accepted(&socket, peer)
            .unwrap()
            .is_none()
    );
}

#[tokio::test]
async fn optimistic_data_arrives_and_each_half_ends_by_itself() {
    let agent = Agent::start();
    let (listener, port) = target().await;
    let mut stream = agent.open(Target::Node(port)).await;
    stream.write_all(b"question").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut socket = accept(&listener).await;
    let mut question = Vec::new();
    socket.read_to_end(&mut question).await.unwrap();
    assert_eq!(question, b"question");
    let answer = vec![7; 300_000];
    let (_, received) = tokio::join!(
        async {
            socket.write_all(&answer).await.unwrap();
            socket.shutdown().await.unwrap();
        },
        async {
            let mut received = Vec::new();
            stream.read_to_end(&mut received).await.unwrap();
            received
        }
    );
    assert_eq!(received, answer);
    assert_eq!(agent.metrics.bytes().read(), (300_000, 8));
}

#[tokio::test]
async fn opener_learns_which_address_was_dialed() {
    let agent = Agent::start();
    let (listener, port) = target().await;
    let mut stream = agent.open(Target::Node(port)).await;
    let dialed = stream.accepted().await.unwrap();
    assert_eq!(dialed, listener.local_addr().unwrap().to_string());
}

#[tokio::test]
async fn cut_of_the_stream_becomes_a_reset_of_the_target() {
    let agent = Agent::start();
    let (mut stream, mut socket, _) = agent.connect().await;
    stream.write_all(b"half a requ").await.unwrap();
    let mut half = [0; 11];
    socket.read_exact(&mut half).await.unwrap();
    drop(stream);
    let error = timeout(scaled(LONG), socket.read(&mut half)).await.unwrap();
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn reset_of_the_target_becomes_a_cut_of_the_stream() {
    let agent = Agent::start();
    let (mut stream, mut socket, _) = agent.connect().await;
    socket.write_all(b"half an answ").await.unwrap();
    let mut half = [0; 12];
    stream.read_exact(&mut half).await.unwrap();
    socket.set_zero_linger().unwrap();
    drop(socket);
    let error = timeout(scaled(LONG), stream.read(&mut half)).await.unwrap();
    let error = error.unwrap_err();
    let cut = find_cause::<StreamCut>(&error);
    assert_eq!(cut, Some(&StreamCut::Reset(ResetCode::PeerCut)));
}

#[tokio::test]
async fn agent_that_stops_at_once_resets_the_target() {
    let mut agent = Agent::start();
    let (_stream, mut socket, _) = agent.connect().await;
    agent.tasks.shutdown().await;
    let read = timeout(scaled(LONG), socket.read_u8()).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn dial_policy_is_named_in_the_refusal() {
    let dial_policy = DialPolicy {
        localhost_ports: "10250".parse().unwrap(),
        deny_ports: "2379".parse().unwrap(),
        allow_targets: "10.0.0.0/8:5432".parse().unwrap(),
        ..DialPolicy::default()
    };
    let agent = Agent::with(dial_policy, Some([192, 0, 2, 1].into()), 8);
    let port = |number| Port::new(number).unwrap();
    let host = |name: &str, number| Target::Host(name.into(), port(number));
    let loopback = "--localhost-ports does not list 9999";
    let unlisted = "--allow-targets does not list 10.0.0.1:80";
    let metadata = "built-in rule forbids cloud metadata addresses (169.254.169.254)";
    for (target, detail) in [
        (Target::Loopback(port(9999)), loopback),
        (Target::Node(port(2379)), "--deny-ports lists 2379"),
        (host("10.0.0.1", 80), unlisted),
        (host("localhost", 5432), "built-in rule forbids"),
        (host("169.254.169.254", 80), metadata),
    ] {
        let refusal = agent.refusal(target).await;
        assert_eq!(refusal.code, RefusalCode::Policy);
        let begin = format!("agent's {detail}");
        assert!(refusal.detail.starts_with(&begin), "{}", refusal.detail);
    }
}

#[tokio::test]
async fn refused_dial_names_node_address_and_reason() {
    let agent = Agent::start();
    let port = unused_port().await;
    let refusal = agent.refusal(Target::Node(port)).await;
    assert_eq!(refusal.code, RefusalCode::TargetRefused);
    let detail = format!("127.0.0.1:{port}: connection refused");
    assert_eq!(refusal.detail, detail);
}

#[tokio::test]
async fn refusal_arrives_after_optimistic_data() {
    let agent = Agent::start();
    let mut stream = agent.open(Target::Node(unused_port().await)).await;
    stream.write_all(&[0; 64 * 1024]).await.unwrap();
    assert_eq!(refusal(stream).await.code, RefusalCode::TargetRefused);
}

#[tokio::test]
async fn silent_target_is_a_timeout() {
    let agent = Agent::start();
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((LOCALHOST, 0).into()).unwrap();
    let listener = socket.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    // If no task accepts and the queue is full, Linux does not answer further attempts.
    let (mut queued, patience) = (Vec::new(), scaled(Duration::from_millis(200)));
    while let Ok(connected) = timeout(patience, TcpStream::connect(address)).await {
        queued.push(connected.unwrap());
    }
    let port = Port::new(address.port()).unwrap();
    let refusal = agent.refusal(Target::Node(port)).await;
    assert_eq!(refusal.code, RefusalCode::TargetTimeout);
    let expected = format!("{address}: no answer within {:?}", dial_timeout());
    assert_eq!(refusal.detail, expected);
}

#[tokio::test]
async fn host_is_dialed_at_the_address_that_was_checked() {
    let Some(own) = own_address() else {
        return;
    };
    let listener = TcpListener::bind((own, 0)).await.unwrap();
    let port = Port::new(listener.local_addr().unwrap().port()).unwrap();
    let dial_policy = DialPolicy {
        allow_targets: format!("{own}:{port}").parse().unwrap(),
        ..DialPolicy::default()
    };
    let agent = Agent::with(dial_policy, None, 8);
    let mut stream = agent.open(Target::Host(own.to_string().into(), port)).await;
    assert_eq!(stream.accepted().await.unwrap(), format!("{own}:{port}"));
}

/// Returns an address of this host that is not loopback, if there is one.
fn own_address() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[tokio::test]
async fn second_control_stream_is_refused() {
    let agent = Agent::start();
    let control = StreamKind::Control {
        version_min: 1,
        version_max: 1,
    };
    let refusal = refusal(agent.open_kind(control).await).await;
    assert_eq!(refusal.code, RefusalCode::BadHeader);
}

#[tokio::test]
async fn full_buffer_pool_refuses_new_streams_and_keeps_old_ones() {
    let agent = Agent::start();
    let (listener, port) = target().await;
    let mut first = agent.open(Target::Node(port)).await;
    let mut socket = accept(&listener).await;
    agent.session.script().is_full = true;
    let refusal = agent.refusal(Target::Node(port)).await;
    assert_eq!(refusal.code, RefusalCode::TooManyStreams);
    assert!(refusal.detail.contains("limits.bufferPool"), "{refusal}");
    socket.write_all(b"late").await.unwrap();
    drop(socket);
    let mut answer = Vec::new();
    first.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"late");
    agent.session.script().is_full = false;
    let mut second = agent.open(Target::Node(port)).await;
    second.accepted().await.unwrap();
}

#[tokio::test]
async fn draining_agent_refuses_new_streams_and_keeps_old_ones() {
    let agent = Agent::start();
    let (mut first, mut socket, port) = agent.connect().await;
    agent.draining.cancel();
    let refusal = agent.refusal(Target::Node(port)).await;
    assert_eq!(refusal.code, RefusalCode::Draining);
    socket.write_all(b"late").await.unwrap();
    drop(socket);
    let mut answer = Vec::new();
    first.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"late");
}

#[tokio::test]
async fn loopback_is_tried_on_both_families() {
    // The port is taken on the other family too, so that no other test listens there. A bound
    // socket that does not listen refuses.
    let (_listener, address, _refuses) = loop {
        let Ok(listener) = TcpListener::bind("[::1]:0").await else {
            return;
        };
        let address: SocketAddr = listener.local_addr().unwrap();
        let other = TcpSocket::new_v4().unwrap();
        if other.bind((LOCALHOST, address.port()).into()).is_ok() {
            break (listener, address, other);
        }
    };
    let dial_policy = DialPolicy {
        localhost_ports: address.port().to_string().parse().unwrap(),
        ..DialPolicy::default()
    };
    let agent = Agent::with(dial_policy, None, 8);
    let port = Port::new(address.port()).unwrap();
    let mut stream = agent.open(Target::Loopback(port)).await;
    assert_eq!(stream.accepted().await.unwrap(), address.to_string());
}

#[tokio::test]
async fn own_listeners_for_targets_of_the_cloud_are_not_dialed() {
    let (listener, port) = target().await;
    let wildcard = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port.get()));
    for cloud_listener in [listener.local_addr().unwrap(), wildcard] {
        let dial_policy = DialPolicy {
            localhost_ports: "1-65535".parse().unwrap(),
            allow_targets: "127.0.0.0/8:1-65535".parse().unwrap(),
            cloud_listeners: vec![cloud_listener],
            ..DialPolicy::default()
        };
        let agent = Agent::with(dial_policy, Some(LOCALHOST), 8);
        let host = Target::Host("localhost".into(), port);
        for target in [Target::Node(port), Target::Loopback(port), host] {
            let refusal = agent.refusal(target).await;
            assert_eq!(refusal.code, RefusalCode::Policy, "{}", refusal.detail);
            let detail = "agent's --cloud-listen listens on ";
            assert!(refusal.detail.starts_with(detail), "{}", refusal.detail);
        }
    }
}

/// F36: panics in streams that are being served, and in streams before their header, release all
/// resources.
#[tokio::test]
async fn f36_panic_in_a_stream_costs_that_stream_alone() {
    tunnel_process::panics::install_hook();
    let before = tunnel_process::panics::count();
    let agent = Agent::with(DialPolicy::default(), Some(LOCALHOST), 2);
    let (listener, port) = target().await;
    let shutdown = Shutdown::new();
    let serve = |incoming| agent.serve(incoming, &shutdown);
    let mut header = bytes::BytesMut::new();
    let kind = StreamKind::Target(Target::Node(port));
    StreamHeader::new(kind).encode(&mut header).unwrap();
    // Sequential, and more than there are permits.
    for _ in 0..3 {
        serve(memory::incoming_stream(&header, true));
        let mut socket = accept(&listener).await;
        let ended = timeout(scaled(LONG), socket.read_u8()).await.unwrap();
        ended.expect_err("the target sees a cut");
        serve(memory::incoming_stream(&[9, 1], true));
    }
    timeout(scaled(LONG), async {
        while shutdown.work_left() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(tunnel_process::panics::count() - before, 6);
    serve(memory::incoming_stream(&header, false));
    let _served = accept(&listener).await;
    assert!(!shutdown.drain().is_cancelled());
    shutdown.stop().cancel();
}

/// S22: all streams that send only one byte end at `requestHeadTimeout` and are counted.
#[tokio::test(start_paused = true)]
async fn s22_streams_of_one_byte_are_given_up_at_the_head_timeout() {
    const STREAMS: usize = 256 * 100;
    let agent = Agent::with(DialPolicy::default(), Some(LOCALHOST), 512);
    let shutdown = Shutdown::new();
    for _ in 0..STREAMS {
        agent.serve(memory::incoming_stream(&[20], false), &shutdown);
    }
    let head_timeout = agent.egress.limits.load().request_head_timeout;
    tokio::time::sleep(head_timeout - Duration::from_millis(20)).await;
    assert_eq!(shutdown.work_left(), STREAMS, "shortly before");
    tokio::time::sleep(Duration::from_millis(40)).await;
    assert_eq!(shutdown.work_left(), 0, "shortly after");
    let given_up = agent.metrics.reached(Limit::RequestHeadTimeout);
    assert_eq!(given_up, STREAMS as u64);
}

#[tokio::test]
async fn streams_per_agent_hold_for_one_below_at_and_above() {
    let agent = Agent::with(DialPolicy::default(), Some(LOCALHOST), 3);
    let (_listener, port) = target().await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut stream = agent.open(Target::Node(port)).await;
        stream.accepted().await.unwrap();
        open.push(stream);
    }
    assert_eq!(agent.metrics.reached(Limit::StreamsPerAgent), 0);
    let refusal = agent.refusal(Target::Node(port)).await;
    assert_eq!(refusal.code, RefusalCode::TooManyStreams);
    assert!(refusal.detail.contains("limits.streamsPerAgent"));
    assert_eq!(agent.metrics.reached(Limit::StreamsPerAgent), 1);
    drop(open.pop());
    let room_comes_back = async {
        loop {
            let mut stream = agent.open(Target::Node(port)).await;
            if stream.accepted().await.is_ok() {
                break;
            }
        }
    };
    timeout(scaled(LONG), room_comes_back).await.unwrap();
}
