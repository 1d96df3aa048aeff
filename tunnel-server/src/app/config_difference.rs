//! The condition that another server has another configuration for longer than a rollout takes.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::ReplicaId;

use super::context::ServerContext;

/// Reports the differences until the server stops.
pub(super) fn report(context: &ServerContext) {
    let peers = context.peers.clone();
    let readiness = context.readiness.clone();
    context.shutdown.spawn_service(async move {
        let mut differences = Differences::default();
        loop {
            let (own, others) = peers.configurations();
            if let Some(own) = own {
                let lines = differences.lines(own, &others, Instant::now());
                readiness.report_conditions(LABEL, lines);
            }
            sleep_coalesced(POLL).await;
        }
    });
}

/// The servers with another configuration, with the time of the first observation.
#[derive(Debug, Default)]
struct Differences(BTreeMap<ReplicaId, Instant>);

impl Differences {
    /// Returns a line for each server whose hash has not been `own` for [`REPORT_AFTER`].
    fn lines(
        &mut self,
        own: [u8; 32],
        others: &BTreeMap<ReplicaId, [u8; 32]>,
        now: Instant,
    ) -> Vec<String> {
        let is_other = |replica: &ReplicaId| others.get(replica).is_some_and(|hash| *hash != own);
        self.0.retain(|replica, _since| is_other(replica));
        for replica in others.keys().filter(|replica| is_other(replica)) {
            self.0.entry(replica.clone()).or_insert(now);
        }
        let overdue = self
            .0
            .iter()
            .filter(|(_, since)| now - **since >= REPORT_AFTER);
        let lines = overdue.map(|(replica, _)| {
            format!(
                "server {replica} has another configuration; compare the files, and what \
                 tunnel-server reload prints on each server"
            )
        });
        lines.take(LINES_MAX).collect()
    }
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "configuration of servers";
const POLL: Duration = Duration::from_secs(5);
/// Longer than the kubelet takes to update a mounted ConfigMap on all nodes, in most cases.
const REPORT_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of servers that the condition names.
const LINES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn difference_is_reported_after_a_rollout_and_until_it_ends() {
        let start = Instant::now();
        let mut differences = Differences::default();
        for (seconds, other, expected) in [
            (0, Some([2; 32]), 0),
            (59, Some([3; 32]), 0),
            (60, Some([3; 32]), 1),
            (61, Some([1; 32]), 0),
            (62, Some([2; 32]), 0),
            (121, None, 0),
            (122, Some([2; 32]), 0),
        ] {
            let others = other.map(|hash| ("b".parse().unwrap(), hash));
            let others = others.into_iter().collect();
            let now = start + Duration::from_secs(seconds);
            let lines = differences.lines([1; 32], &others, now);
            assert_eq!(lines.len(), expected, "{seconds}: {lines:?}");
        }
    }
}
