//! Tables of cases that run together, and the two nodes that their requests go to.

use anyhow::Result;
use futures_util::future::join_all;
use tunnel_agent::config::TransportChoice;
use tunnel_server::config::RawConfig;
use tunnel_tests::env::{Agent, TestEnv};

/// Runs all rows in batches, since most of them wait for the end of a connection.
///
/// # Panics
/// Panics with the names and errors of all failed rows, if there are any.
pub(super) async fn run_cases<T>(
    rows: &[T],
    name: impl Fn(&T) -> &str,
    run_case: impl AsyncFn(&T) -> Result<()>,
) {
    let mut wrong = Vec::new();
    for batch in rows.chunks(AT_ONCE) {
        let results = join_all(batch.iter().map(|row| run_case(row))).await;
        for (row, result) in batch.iter().zip(results) {
            let error = result.err();
            wrong.extend(error.map(|error| format!("{}: {error:#}", name(row))));
        }
    }
    let (count, all) = (wrong.len(), rows.len());
    assert!(count == 0, "{count} of {all} rows:\n{}", wrong.join("\n"));
}

const AT_ONCE: usize = 14;

/// An environment with the nodes worker-1 and worker-2.
pub(super) struct TwoNodes {
    pub(super) env: TestEnv,
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
        let env = TestEnv::start_with(change).await?;
        let agent = async |node| {
            let chosen = env.agent_with(node, |config| config.transport = transport);
            chosen.await
        };
        let agents = [agent("worker-1").await?, agent("worker-2").await?];
        Ok(Self {
            env,
            _agents: agents,
        })
    }
}
