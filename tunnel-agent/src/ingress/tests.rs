use std::io::ErrorKind;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{Session, Stream};
use tunnel_proto::wire::code::{CloseCode, ResetCode};

use super::sessions::CloudSessionGuard;
use super::*;

const LONG: Duration = Duration::from_secs(10);

/// An agent's ingress without a session.
struct Agent {
    ingress: Arc<Ingress>,
    sessions: Arc<CloudSessions>,
    loop_detector: Arc<LoopDetector>,
    metrics: Metrics,
    connections: JoinSet<()>,
}

/// The server's end of a session that is registered for the cloud.
struct Server {
    session: Arc<MemorySession>,
    guard: CloudSessionGuard,
}

impl Agent {
    fn start(cloud_streams: u32) -> Self {
        let (sessions, metrics) = (Arc::new(CloudSessions::default()), Metrics::default());
        let loop_detector = Arc::new(LoopDetector::default());
        let limits = Limits {
            cloud_streams,
            ..Limits::default()
        };
        let node = "worker-1".parse().unwrap();
        let ingress = Ingress::new(
            node,
            sessions.clone(),
            loop_detector.clone(),
            &limits,
            metrics.clone(),
        );
        Self {
            ingress: Arc::new(ingress),
            sessions,
            loop_detector,
            metrics,
            connections: JoinSet::new(),
        }
    }

    fn server(&self, id: u64) -> Server {
        let (session, agent) = memory::pair();
        Server {
            session,
            guard: self.sessions.register(SessionId(id), agent),
        }
    }

    /// Returns a client whose connection to the target `apiserver` is being served.
    async fn client(&mut self) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(client, listener.accept());
        let ((tcp, peer), ingress) = (accepted.unwrap(), self.ingress.clone());
        let target: CloudTarget = "apiserver".parse().unwrap();
        self.connections
            .spawn(async move { ingress.serve(tcp, peer, &target).await });
        client.unwrap()
    }

    /// Waits for the end of a connection, and expects that it is the only one with this result.
    async fn expect_end(&mut self, end: StreamEnd) {
        let ended = timeout(LONG, self.connections.join_next()).await;
        ended.unwrap().unwrap().unwrap();
        assert_eq!(self.metrics.cloud_streams(end), (0, 1), "{end:?}");
    }
}

impl Server {
    /// Returns the next stream of the agent, without a reply.
    async fn stream(&self) -> Stream {
        let incoming = timeout(LONG, self.session.accept()).await.unwrap();
        let header = incoming.unwrap().header(Instant::now() + LONG).await;
        let (header, stream) = header.unwrap();
        let apiserver = StreamKind::Cloud("apiserver".parse().unwrap());
        assert_eq!(header.kind, apiserver);
        stream
    }
}

async fn expect_reset(mut client: TcpStream) {
    let read = timeout(LONG, client.read(&mut [0])).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn bytes_pass_both_ways_and_each_half_ends_by_itself() {
    let mut agent = Agent::start(8);
    let server = agent.server(1);
    let mut client = agent.client().await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut stream = server.stream().await;
    stream.accept("192.0.2.1:6443").await.unwrap();
    let mut question = Vec::new();
    stream.read_to_end(&mut question).await.unwrap();
    assert_eq!(question, b"question");
    stream.write_all(b"answer").await.unwrap();
    let mut answer = Vec::new();
    let (ended, read) = tokio::join!(stream.shutdown(), client.read_to_end(&mut answer));
    ended.unwrap();
    read.unwrap();
    assert_eq!(answer, b"answer");
    agent.expect_end(StreamEnd::Ok).await;
}

#[tokio::test]
async fn connection_without_a_live_session_is_reset_at_once() {
    let mut agent = Agent::start(8);
    let server = agent.server(1);
    server.guard.set_live(false);
    expect_reset(agent.client().await).await;
    agent.expect_end(StreamEnd::NoSession).await;
    server.guard.set_live(true);
    let client = agent.client().await;
    let stream = server.stream().await;
    drop(server.guard);
    // The open stream goes on, a new one has no session.
    expect_reset(agent.client().await).await;
    drop((stream, client));
}

#[tokio::test]
async fn stream_goes_to_another_session_if_a_server_stops_or_its_session_is_lost() {
    for is_lost in [false, true] {
        let mut agent = Agent::start(8);
        let (older, newest) = (agent.server(1), agent.server(2));
        let mut client = agent.client().await;
        client.write_all(b"question").await.unwrap();
        let stream = newest.stream().await;
        if is_lost {
            newest.session.close(CloseCode::Dead, "of the test").await;
        } else {
            stream.refuse(RefusalCode::Draining, "stopping").await;
        }
        let mut stream = older.stream().await;
        stream.accept("").await.unwrap();
        let mut question = [0; 8];
        stream.read_exact(&mut question).await.unwrap();
        assert_eq!(&question, b"question", "lost: {is_lost}");
    }
}

#[tokio::test]
async fn connection_that_waits_for_a_suspect_session_goes_to_another_one_or_is_reset() {
    let mut agent = Agent::start(8);
    let (older, newest) = (agent.server(1), agent.server(2));
    let client = agent.client().await;
    let _silent = newest.stream().await;
    newest.guard.set_live(false);
    let _also_silent = older.stream().await;
    older.guard.set_live(false);
    expect_reset(client).await;
    agent.expect_end(StreamEnd::CutByPeer).await;
    // An end of the registration alone leaves it waiting.
    let retired = agent.server(3);
    let mut client = agent.client().await;
    let mut stream = retired.stream().await;
    drop(retired.guard);
    stream.accept("").await.unwrap();
    stream.write_all(b"answer").await.unwrap();
    client.read_exact(&mut [0; 6]).await.unwrap();
}

#[tokio::test]
async fn other_refusals_are_final() {
    let mut agent = Agent::start(8);
    let (_older, newest) = (agent.server(1), agent.server(2));
    for code in [RefusalCode::UnknownTarget, RefusalCode::Policy] {
        let client = agent.client().await;
        newest.stream().await.refuse(code, "no").await;
        expect_reset(client).await;
        agent.expect_end(StreamEnd::Refused(code)).await;
    }
}

#[tokio::test]
async fn connection_of_the_agents_own_egress_is_reset_and_opens_no_stream() {
    let mut agent = Agent::start(8);
    let server = agent.server(1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let client = TcpStream::connect(address).await.unwrap();
    let loop_detector = agent.loop_detector.clone();
    let dialed = loop_detector.dialed(&client, address).unwrap();
    assert!(dialed.is_some());
    let (tcp, peer) = listener.accept().await.unwrap();
    let target = "apiserver".parse().unwrap();
    agent.ingress.serve(tcp, peer, &target).await;
    expect_reset(client).await;
    let refused = StreamEnd::Refused(RefusalCode::Policy);
    assert_eq!(agent.metrics.cloud_streams(refused), (0, 1));
    // Other clients are served.
    let _client = agent.client().await;
    server.stream().await;
}

#[tokio::test]
async fn cut_of_either_side_is_a_reset_of_the_other() {
    let mut agent = Agent::start(8);
    let server = agent.server(1);
    let mut client = agent.client().await;
    let mut stream = server.stream().await;
    stream.accept("").await.unwrap();
    stream.write_all(b"part").await.unwrap();
    client.read_exact(&mut [0; 4]).await.unwrap();
    stream.cut_behind(ResetCode::Dropped);
    expect_reset(client).await;
    agent.expect_end(StreamEnd::CutByPeer).await;

    let client = agent.client().await;
    let mut stream = server.stream().await;
    stream.accept("").await.unwrap();
    tunnel_proto::tcp::abort_on_close(&client).unwrap();
    drop(client);
    let read = timeout(LONG, stream.read(&mut [0])).await.unwrap();
    assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    agent.expect_end(StreamEnd::CutByCaller).await;
}

#[tokio::test]
async fn one_address_has_three_quarters_of_the_connections() {
    let mut agent = Agent::start(4);
    let server = agent.server(1);
    let mut open = Vec::new();
    for _ in 0..3 {
        let client = agent.client().await;
        open.push((client, server.stream().await));
    }
    expect_reset(agent.client().await).await;
    assert_eq!(agent.metrics.reached(Limit::CloudStreams), 1);
    let refused = StreamEnd::Refused(RefusalCode::TooManyStreams);
    assert_eq!(agent.metrics.cloud_streams(refused), (3, 1));
}
