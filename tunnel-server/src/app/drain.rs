//! The end of a server: agents and listeners learn of it, running work ends, sessions close.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};
use tunnel_process::shutdown::DrainOutcome;
use tunnel_proto::wire::code::CloseCode;

use super::App;
use crate::session::can_agents_move;

impl App {
    /// Announces that this server stops, and lets the listeners accept on until the drain delay is
    /// over. Agents have learned from their sessions that they should move. Returns the time until
    /// which they need this server.
    pub(super) async fn leave(&self) -> Instant {
        let (shutdown, delay) = (&self.context.shutdown, self.context.config.drain_delay);
        let agents_leave_until = Instant::now() + self.agents_leave_within();
        self.context.peers.leave();
        if !delay.is_zero() {
            info!(
                delay = delay.as_secs_f64(),
                "not ready; the listeners accept on until the drain begins"
            );
        }
        tokio::select! {
            biased;
            () = shutdown.stop().cancelled() => {}
            () = shutdown.drain().cancelled() => {}
            () = sleep(delay) => {}
        }
        agents_leave_until
    }

    /// Accepts no new work, waits for agents to move and for running work within the drain timeout,
    /// then closes all sessions.
    pub(super) async fn drain(&mut self, agents_leave_until: Instant) {
        let (shutdown, config) = (&self.context.shutdown, &self.context.config);
        let deadline = Instant::now() + config.drain_timeout;
        shutdown.drain().cancel();
        // First, because other servers send streams here as long as agents are connected.
        self.wait_for_agents_to_leave(deadline.min(agents_leave_until))
            .await;
        let left = deadline.saturating_duration_since(Instant::now());
        match shutdown.drain_within(left).await {
            DrainOutcome::Complete => info!("all requests are finished"),
            DrainOutcome::Deadline => warn!(
                streams = shutdown.work_left(),
                "drain timeout is over, resetting the remaining streams"
            ),
            DrainOutcome::Stopped => debug!("stopping without waiting"),
        }
        let closing = TaskTracker::new();
        for agent in self.context.registry.all() {
            closing
                .spawn(async move { agent.close(CloseCode::Draining, "server is stopping").await });
        }
        closing.close();
        let (cluster, peers) = (&mut self.cluster, &self.context.peers);
        let quiet = async {
            closing.wait().await;
            // A forwarded stream that has ended may still be in the buffers of its connection.
            tokio::join!(peers.close(), self.quic.wait_idle(), cluster.ended());
        };
        tokio::select! {
            () = quiet => {}
            () = shutdown.stop().cancelled() => {}
        }
    }

    /// Returns the time that agents need to connect to another server, or zero if none may take
    /// over at once. Until the network routes new connections only to that server, this server must
    /// refuse them: a QUIC dial to a stopped server would get no answer for seconds.
    fn agents_leave_within(&self) -> Duration {
        let config = &self.context.config;
        if can_agents_move(
            &self.context.peers.members().borrow(),
            self.context.peers.own(),
        ) {
            return config.move_within() + AGENTS_LEAVE_TIMEOUT;
        }
        match &config.kubernetes {
            // A server that starts at this moment is not known yet.
            Some(settings) if !settings.single_replica => AGENTS_LEAVE_TIMEOUT,
            Some(_) | None => Duration::ZERO,
        }
    }

    /// Waits until every agent has connected to another server, at most until `deadline`.
    async fn wait_for_agents_to_leave(&self, deadline: Instant) {
        let left = async {
            let mut interval = tokio::time::interval(AGENTS_LEAVE_POLL);
            let registry = &self.context.registry;
            while registry.all().iter().any(|agent| !agent.is_withdrawn()) {
                interval.tick().await;
            }
        };
        tokio::select! {
            _either_way = timeout_at(deadline, left) => {}
            () = self.context.shutdown.stop().cancelled() => {}
        }
    }
}

/// Time for agents to connect to another server once they have begun. Agents dial within 0.5 s, and
/// again until the cluster's network knows that this server is stopping, which takes about a
/// second.
const AGENTS_LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
const AGENTS_LEAVE_POLL: Duration = Duration::from_millis(20);
