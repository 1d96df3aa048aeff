//! Streams that the agent opens to targets of the cloud.

use super::*;

/// Takes a session up to a Welcome that offers targets of the cloud.
async fn ready_for_cloud(mut env: TestEnv) -> (TestEnv, ControlReader, ControlWriter) {
    let welcome = Welcome {
        capabilities: vec![CAPABILITY_CLOUD.to_owned()],
        ..welcome()
    };
    let (reader, writer) = net::admit(&*env.server, welcome).await;
    env.expect_admission().await;
    (env, reader, writer)
}

fn cloud() -> StreamHeader {
    StreamHeader::new(StreamKind::Cloud("apiserver".parse().unwrap()))
}

#[tokio::test(start_paused = true)]
async fn session_is_registered_for_the_cloud_while_it_is_live_and_takes_new_streams() {
    let context = context(Limits::default());
    let sessions = context.cloud_sessions.clone();
    let (mut env, mut reader, _writer) = ready_for_cloud(TestEnv::with(context)).await;
    assert_eq!(sessions.live(), 1);
    env.agent_session.script().is_silent = true;
    assert_eq!(env.session_event().await, SessionEvent::Suspect);
    assert_eq!(sessions.live(), 0);
    env.agent_session.script().is_silent = false;
    assert_eq!(env.session_event().await, SessionEvent::Live);
    assert_eq!(sessions.live(), 1);
    env.retire.cancel();
    while recv_control(&mut reader).await != Some(ControlMessage::Withdraw) {}
    assert_eq!(sessions.live(), 0);
}

#[tokio::test(start_paused = true)]
async fn session_that_the_server_ends_is_no_longer_registered_for_the_cloud() {
    let context = context(Limits::default());
    let sessions = context.cloud_sessions.clone();
    let (mut env, _reader, _writer) = ready_for_cloud(TestEnv::with(context)).await;
    assert_eq!(sessions.live(), 1);
    env.server.close(CloseCode::Normal, "stopping").await;
    env.outcome().await.unwrap();
    assert_eq!(sessions.live(), 0);
}

#[tokio::test(start_paused = true)]
async fn session_with_a_server_without_targets_of_the_cloud_is_not_registered() {
    let context = context(Limits::default());
    let sessions = context.cloud_sessions.clone();
    let (_env, _reader, _writer) = TestEnv::with(context).welcomed().await;
    assert_eq!(sessions.live(), 0);
}

#[tokio::test(start_paused = true)]
async fn retired_session_ends_after_the_last_stream_that_the_agent_opened() {
    let env = TestEnv::with(context(Limits::default()));
    let (mut env, _reader, _writer) = ready_for_cloud(env).await;
    let stream = env.agent_session.open(&cloud(), AGES).await.unwrap();
    let _incoming = env.server.accept().await.unwrap();
    env.retire.cancel();
    let ended = timeout(Duration::from_secs(50), env.server.closed()).await;
    assert!(ended.is_err(), "{ended:?}");
    drop(stream);
    env.expect_closed_for(CloseCode::Normal).await;
}
