use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tunnel_process::meta;
use tunnel_proto::calibration::scaled;
use tunnel_proto::session::control::{ControlReader, ControlWriter};
use tunnel_proto::transport::Session;
use tunnel_proto::wire::code::{CloseCode, EnrollCode};
use tunnel_proto::wire::control::ControlMessage;
use tunnel_proto::wire::enroll::EnrollReply;

use super::*;
use crate::config::{RawConfig, Secret};
use crate::testing::ScratchDir;
use crate::testing::net::{self, Busy};
use crate::testing::server::Server;

mod cloud;

const LONG: Duration = Duration::from_secs(10);

fn settings(server: &Server, dir: &Path) -> RawConfig {
    RawConfig {
        server: vec![server.address().to_string()],
        node_name: Some("worker-1".into()),
        node_ip: Some("127.0.0.1".into()),
        data_dir: Some(dir.to_owned()),
        meta_listen: Some("127.0.0.1:0".into()),
        token: Some(Secret(server.token().reveal())),
        ..RawConfig::default()
    }
}

async fn start(settings: RawConfig) -> anyhow::Result<App> {
    App::start(Config::check(settings).unwrap()).await
}

/// A running agent and its server.
struct TestEnv {
    server: Server,
    scratch: ScratchDir,
    meta: SocketAddr,
    cloud: Vec<SocketAddr>,
    shutdown: Shutdown,
    running: JoinSet<anyhow::Result<()>>,
}

impl TestEnv {
    /// Starts an agent that has not enrolled yet.
    async fn start(change: impl FnOnce(&mut RawConfig)) -> Self {
        let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
        let mut settings = settings(&server, scratch.path());
        change(&mut settings);
        let app = start(settings).await.unwrap();
        let (meta, shutdown) = (app.meta_addr().unwrap(), app.shutdown().clone());
        let cloud = app.cloud_addrs().to_vec();
        let mut running = JoinSet::new();
        running.spawn(app.run());
        Self {
            server,
            scratch,
            meta,
            cloud,
            shutdown,
            running,
        }
    }

    /// Returns the agent's next session over a transport.
    async fn session(&self, transport: &str) -> Arc<dyn Session> {
        let session = async {
            match transport {
                "h2" => self.server.session_over_tcp().await,
                _ => self.server.session().await,
            }
        };
        timeout(LONG, session).await.unwrap()
    }

    async fn enroll(&self) {
        let answer = |_| {
            let dir = self.scratch.path();
            Some(self.server.issue(dir, "culvert://agent/worker-1"))
        };
        let served = timeout(LONG, self.server.enrollment(answer)).await;
        served.unwrap().unwrap();
    }

    /// Runs the server's end of a session up to Welcome.
    async fn welcome(&self) -> (Arc<dyn Session>, ControlReader, ControlWriter) {
        welcome(timeout(LONG, self.server.session()).await.unwrap()).await
    }

    /// Waits for the end of the agent.
    async fn ended(&mut self) {
        let ended = timeout(LONG, self.running.join_next()).await;
        ended.unwrap().unwrap().unwrap().unwrap();
    }
}

async fn welcome(session: Arc<dyn Session>) -> (Arc<dyn Session>, ControlReader, ControlWriter) {
    let admitted = timeout(LONG, net::admit(&*session, net::welcome())).await;
    let (reader, writer) = admitted.unwrap();
    (session, reader, writer)
}

async fn until_ready(address: SocketAddr) {
    timeout(LONG, async {
        while !meta::get(address, "/readyz").await.unwrap().0.is_success() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
}

/// Expects that the agent has cut a stream without an end to either side.
async fn expect_cut(mut busy: Busy) {
    busy.stream.read_u8().await.unwrap_err();
    let cut = busy.socket.read_u8().await.unwrap_err();
    assert_eq!(cut.kind(), std::io::ErrorKind::ConnectionReset);
}

fn exit(error: &anyhow::Error) -> (u8, String) {
    (exit_code(error), format!("{error:#}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_ends_with_the_drain_arrives_whole() {
    for transport in ["quic", "h2"] {
        drain_under_way(transport).await;
    }
}

async fn drain_under_way(transport: &str) {
    let mut env = TestEnv::start(|settings| settings.transport = Some(transport.into())).await;
    let (status, body) = meta::get(env.meta, "/readyz?verbose").await.unwrap();
    assert!(!status.is_success(), "{body}");
    env.enroll().await;
    let session = env.session(transport).await;
    assert_eq!(session.transport().label(), transport);
    let (session, mut reader, _writer) = welcome(session).await;
    until_ready(env.meta).await;

    let mut busy = Busy::on(&*session).await;
    busy.stream.shutdown().await.unwrap();
    let answer: Vec<u8> = (0..1 << 20)
        .map(|index: u32| index.to_le_bytes()[1])
        .collect();
    busy.socket.write_all(&answer).await.unwrap();
    drop(busy.socket);
    env.shutdown.drain().cancel();

    let mut received = Vec::new();
    let read = timeout(LONG, busy.stream.read_to_end(&mut received)).await;
    read.unwrap().unwrap();
    assert!(received == answer, "{} bytes", received.len());
    let sent = timeout(LONG, async {
        let mut sent = Vec::new();
        while let Some(message) = reader.receive().await.unwrap() {
            sent.push(message);
        }
        sent
    });
    let sent = sent.await.unwrap();
    assert!(
        matches!(sent[..], [ControlMessage::Withdraw, ControlMessage::Bye(_)]),
        "{sent:?}"
    );
    let reason = timeout(LONG, session.closed()).await.unwrap();
    assert_eq!(reason.code, CloseCode::Normal);
    env.ended().await;
    assert!(meta::get(env.meta, "/livez").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_certificate_is_used_again_and_lost_sessions_come_back() {
    let soon = scaled(Duration::from_secs(2));
    let mut env = TestEnv::start(|_| {}).await;
    env.enroll().await;
    let (session, _reader, _writer) = env.welcome().await;
    session.close(CloseCode::Draining, "restarting").await;
    // The first retry is immediate.
    let (_session, _reader, _writer) = timeout(soon, env.welcome()).await.unwrap();
    env.shutdown.stop().cancel();
    timeout(soon, env.ended()).await.unwrap();

    let mut again = settings(&env.server, env.scratch.path());
    // The token was deleted with its secret and is not needed again.
    again.token = None;
    again.token_file = Some("/nonexistent/token".into());
    let app = start(again).await.unwrap();
    env.running.spawn(app.run());
    let (session, _reader, _writer) = env.welcome().await;
    // An aborted agent leaves no tasks behind.
    env.running.shutdown().await;
    timeout(LONG, session.closed()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn second_signal_does_not_wait_for_streams() {
    let mut env = TestEnv::start(|_| {}).await;
    env.enroll().await;
    let (session, mut reader, _writer) = env.welcome().await;
    let busy = Busy::on(&*session).await;
    env.shutdown.drain().cancel();
    let withdraw = timeout(LONG, reader.receive()).await.unwrap().unwrap();
    assert_eq!(withdraw, Some(ControlMessage::Withdraw));
    assert!(env.running.try_join_next().is_none());
    env.shutdown.stop().cancel();
    let soon = scaled(Duration::from_secs(2));
    timeout(soon, env.ended()).await.unwrap();
    expect_cut(busy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_has_a_deadline() {
    let brief = |settings: &mut RawConfig| settings.drain_timeout = Some("50ms".into());
    let mut env = TestEnv::start(brief).await;
    env.enroll().await;
    let (session, _reader, _writer) = env.welcome().await;
    let busy = Busy::on(&*session).await;
    env.shutdown.drain().cancel();
    env.ended().await;
    expect_cut(busy).await;
}

#[tokio::test]
async fn refused_enrollment_ends_the_agent() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let app = start(settings(&server, scratch.path())).await.unwrap();
    let detail = "token abcdef012345 was used by another key";
    let refused = EnrollReply::Refused(EnrollCode::TokenUsed, detail.into());
    let (ended, _) = tokio::join!(app.run(), server.enrollment(|_| Some(refused)));
    let (code, text) = exit(&ended.unwrap_err());
    assert_eq!(code, EXIT_FAILURE);
    assert!(text.contains("used by another key"), "{text}");
    assert!(text.contains("create a new token"), "{text}");
}

#[tokio::test]
async fn drain_ends_an_agent_that_cannot_enroll() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let app = start(settings(&server, scratch.path())).await.unwrap();
    app.shutdown().drain().cancel();
    timeout(LONG, app.run()).await.unwrap().unwrap();
}

#[tokio::test]
async fn exit_code_distinguishes_configuration_from_failure() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let with = |change: fn(&mut RawConfig)| {
        let mut settings = settings(&server, scratch.path());
        change(&mut settings);
        start(settings)
    };
    let no_token = with(|settings| settings.token = None).await.unwrap_err();
    // A disk that is mounted later, or an operator, may bring the certificate and the token.
    let (code, text) = exit(&no_token);
    assert_eq!(code, EXIT_FAILURE);
    let advice = "tunnel-server token create --node worker-1";
    assert!(text.contains(advice), "{text}");

    let no_file = with(|settings| {
        settings.token = None;
        settings.token_file = Some("/nonexistent/token".into());
    });
    assert_eq!(exit(&no_file.await.unwrap_err()).0, EXIT_FAILURE);

    let bad_token = scratch.path().join("bad.token");
    std::fs::write(&bad_token, "no token").unwrap();
    let mut bad = settings(&server, scratch.path());
    bad.token = None;
    bad.token_file = Some(bad_token);
    let (code, text) = exit(&start(bad).await.unwrap_err());
    assert_eq!(code, EXIT_USAGE);
    assert!(text.contains("bad.token"), "{text}");

    let no_dir = with(|settings| settings.data_dir = Some("/proc/nothing".into()));
    let (code, text) = exit(&no_dir.await.unwrap_err());
    assert_eq!(code, EXIT_FAILURE);
    assert!(text.contains("--data-dir"), "{text}");

    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut busy = settings(&server, scratch.path());
    busy.meta_listen = Some(taken.local_addr().unwrap().to_string());
    let (code, text) = exit(&start(busy).await.unwrap_err());
    assert_eq!(code, EXIT_FAILURE);
    assert!(text.contains("--meta-listen"), "{text}");
}
