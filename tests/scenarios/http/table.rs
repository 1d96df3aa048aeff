//! Tables whose rows are judged together, and the two nodes that their requests go to.

use anyhow::Result;
use futures_util::future::join_all;
use tunnel_agent::config::TransportChoice;
use tunnel_server::config::RawConfig;
use tunnel_tests::world::{Agent, World};

/// Judges all rows, a batch at a time since most of them wait for the end of a connection, and tells which are wrong.
///
/// # Panics
/// When any is.
pub(super) async fn judge_all<T>(
    rows: &[T],
    name: impl Fn(&T) -> &str,
    judge: impl AsyncFn(&T) -> Result<()>,
) {
    let mut wrong = Vec::new();
    for batch in rows.chunks(AT_ONCE) {
        let judged = join_all(batch.iter().map(|row| judge(row))).await;
        for (row, judged) in batch.iter().zip(judged) {
            wrong.extend(
                judged
                    .err()
                    .map(|error| format!("{}: {error:#}", name(row))),
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} rows:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}

const AT_ONCE: usize = 14;

/// A world with the nodes worker-1 and worker-2.
pub(super) struct TwoNodes {
    pub(super) world: World,
    _agents: [Agent; 2],
}

impl TwoNodes {
    pub(super) async fn start() -> Result<Self> {
        Self::start_with(TransportChoice::Auto, |_| {}).await
    }

    pub(super) async fn start_with(
        transport: TransportChoice,
        change: impl FnOnce(&mut RawConfig),
    ) -> Result<Self> {
        let world = World::start_with(change).await?;
        let agent = async |node| {
            let chosen = world.agent_with(node, |config| config.transport = transport);
            chosen.await
        };
        let agents = [agent("worker-1").await?, agent("worker-2").await?];
        Ok(Self {
            world,
            _agents: agents,
        })
    }
}
