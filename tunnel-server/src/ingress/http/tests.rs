use std::time::Duration;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tunnel_proto::process::places::{PlaceLimits, Places};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls;
use tunnel_proto::transport::{BufferPool, Session, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::name::InstanceId;

use super::*;
use crate::ingress::DoorLimits;
use crate::ingress::target::Scheme;
use crate::metrics::Metrics;
use crate::policy::PortPolicy;
use crate::registry::{AgentSession, Registration, Registry, RegistryLimits};
use crate::routes::{RouteTable, Routes};
use crate::testing::{PATIENCE, POOL, node, session, within};

/// A plain door, and agents that the test plays.
struct Bench {
    doors: Arc<Doors>,
}

/// An agent's end, newest first.
struct Agent {
    far: Arc<dyn Session>,
    _registered: Registration,
}

impl Agent {
    async fn stream(&self) -> Stream {
        let incoming = within(self.far.accept()).await.unwrap();
        incoming.header(Instant::now() + PATIENCE).await.unwrap().1
    }

    async fn refuses(&self, code: RefusalCode) {
        self.stream().await.refuse(code, "as the agent says").await;
    }

    /// Takes a request and returns it as it came.
    async fn answers(&self) -> String {
        let mut stream = self.stream().await;
        stream.accept("").await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
        stream.write_all(answer).await.unwrap();
        stream.shutdown().await.unwrap();
        String::from_utf8(head).unwrap()
    }
}

impl Bench {
    fn new() -> Self {
        let routes = Routes::default();
        routes.replace(RouteTable::new([(&node(), &[][..])]));
        let limits = RegistryLimits {
            streams_per_agent: 4,
            buffer_pool: POOL,
        };
        let mut counters = MetricsRegistry::default();
        let doors = Doors {
            routes,
            registry: Arc::new(Registry::new(limits)),
            policy: PortPolicy {
                http: "9100".parse().unwrap(),
                ..PortPolicy::default()
            },
            target_tls: tls::target_client().unwrap(),
            limits: DoorLimits {
                handshake: Duration::from_secs(5),
                request_head_time: Duration::from_secs(10),
                request_head_bytes: 64 << 10,
                idle: Duration::from_secs(180),
                open: Duration::from_secs(10),
            },
            strangers: Places::new(PlaceLimits {
                per_source: 8,
                total: 8,
            }),
            metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
            shutdown: Shutdown::new(),
            drivers: TaskTracker::new(),
        };
        Self {
            doors: Arc::new(doors),
        }
    }

    fn agent(&self) -> Agent {
        let (near, far) = session();
        let id = self.doors.registry.next_id();
        let entry = AgentSession::new(id, node(), InstanceId::new([1; 16]), near);
        Agent {
            far,
            _registered: self.doors.registry.register(entry, &[]).unwrap(),
        }
    }

    /// The whole answer to a request.
    async fn ask(&self, request: &str) -> String {
        let (mut caller, served) = tokio::io::duplex(64 << 10);
        let door = Arc::new(Door {
            name: "http",
            scheme: Scheme::Http,
            implied_port: None,
            tls: None,
        });
        let peer: SocketAddr = "192.0.2.1:5".parse().unwrap();
        let line = Line {
            peer,
            fate: Arc::default(),
            hangup: Hangup::never(),
            place: self.doors.strangers.enter(peer.ip()),
        };
        let serve = serve(self.doors.clone(), door, served, line);
        let ask = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            within(caller.read_to_string(&mut answer)).await.unwrap();
            answer
        };
        tokio::join!(serve, ask).1
    }
}

const GET: &str = "GET /a HTTP/1.1\r\nHost: worker-1:9100\r\nX-Own: 1\r\nConnection: close\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn request_without_a_body_that_a_stopping_agent_refuses_goes_over_another_session() {
    let bench = Bench::new();
    let (staying, stopping) = (bench.agent(), bench.agent());
    let (answer, (), head) = tokio::join!(
        bench.ask(GET),
        stopping.refuses(RefusalCode::Draining),
        staying.answers()
    );
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(head.starts_with("GET /a HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("X-Own: 1\r\n"), "{head}");
}

#[tokio::test(start_paused = true)]
async fn refusal_of_the_only_session_is_the_answer() {
    let bench = Bench::new();
    let stopping = bench.agent();
    let (answer, ()) = tokio::join!(bench.ask(GET), stopping.refuses(RefusalCode::Draining));
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("X-Tunnel-Error: draining\r\n"), "{answer}");
    assert!(answer.contains("as the agent says"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn request_is_moved_once_only() {
    let bench = Bench::new();
    let (first, second, third) = (bench.agent(), bench.agent(), bench.agent());
    let (answer, (), ()) = tokio::join!(
        bench.ask(GET),
        third.refuses(RefusalCode::Draining),
        second.refuses(RefusalCode::Draining)
    );
    assert!(answer.contains("X-Tunnel-Error: draining\r\n"), "{answer}");
    assert_eq!(first.far.health().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn request_with_a_body_and_other_refusals_are_not_moved() {
    let post = "POST /a HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab";
    for (request, code, label) in [
        (post, RefusalCode::Draining, "draining"),
        (GET, RefusalCode::TargetRefused, "target_refused"),
        (GET, RefusalCode::TooManyStreams, "too_many_streams"),
    ] {
        let bench = Bench::new();
        let (other, refusing) = (bench.agent(), bench.agent());
        let (answer, ()) = tokio::join!(bench.ask(request), refusing.refuses(code));
        let told = format!("X-Tunnel-Error: {label}\r\n");
        assert!(answer.contains(&told), "{label}: {answer}");
        let untouched = tokio::time::timeout(Duration::from_millis(20), other.far.accept());
        assert!(untouched.await.is_err(), "{label}");
    }
}

#[tokio::test(start_paused = true)]
async fn stream_that_is_cut_after_the_request_was_sent_is_not_moved() {
    let bench = Bench::new();
    let (other, dying) = (bench.agent(), bench.agent());
    let cut = async {
        let mut stream = dying.stream().await;
        stream.accept("").await.unwrap();
        stream.read_u8().await.unwrap();
    };
    let (answer, ()) = tokio::join!(bench.ask(GET), cut);
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    let untouched = tokio::time::timeout(Duration::from_millis(20), other.far.accept());
    assert!(untouched.await.is_err());
}
