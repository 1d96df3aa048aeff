//! An agent that waits for another one of its node on the same host.

use super::*;
use crate::handover::LockState;

#[tokio::test(start_paused = true)]
async fn standby_is_ready_and_dials_at_once_when_it_has_the_lock() {
    let mut env = TestEnv::start(AUTO);
    env.context.host_lock.set(LockState::Standby(Some(7)));
    reject(env.net.arrival().await, CloseCode::NameInUse).await;
    env.until(|env| env.is_ready()).await;
    let (_, condition) = env.readiness.conditions().remove(0);
    assert!(condition.contains("standby: another agent"), "{condition}");
    env.lap();
    env.context.host_lock.set(LockState::Held(Instant::now()));
    for _ in 0..3 {
        // The server has not read yet that the other agent withdrew.
        reject(env.net.arrival().await, CloseCode::NameInUse).await;
        assert!(env.is_ready());
    }
    let _peer = env.peer(TransportKind::Quic).await;
    env.expect_lap(..1.0);
    env.until(|env| env.readiness.conditions().is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn standby_that_finds_no_server_is_not_ready() {
    let mut env = TestEnv::start(AUTO);
    env.context.host_lock.set(LockState::Standby(None));
    reject(env.net.arrival().await, CloseCode::NameInUse).await;
    env.until(|env| env.is_ready()).await;
    env.net.set(Path::Refused);
    env.until(|env| !env.is_ready()).await;
    env.expect_lap(60.0..);
}

#[tokio::test(start_paused = true)]
async fn name_that_another_host_uses_makes_no_agent_ready() {
    for state in [LockState::None, LockState::Foreign] {
        let mut env = TestEnv::start(AUTO);
        env.context.host_lock.set(state);
        reject(env.net.arrival().await, CloseCode::NameInUse).await;
        let second = env.net.arrival().await;
        assert!(!env.is_ready());
        env.expect_lap(60.0..);
        reject(second, CloseCode::NameInUse).await;
        // The other host's agent is gone, and this one has had the lock for long.
        let _peer = env.peer(TransportKind::Quic).await;
    }
}
