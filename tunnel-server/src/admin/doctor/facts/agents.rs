//! What the agents of some connected nodes say of themselves: their conditions, such as a full disk.

use std::path::Path;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde_json::Value;
use tokio::time::timeout;
use tunnel_proto::wire::header::one_line;
use tunnel_proto::wire::name::NodeName;

use super::socket::connect;

/// The conditions of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::admin::doctor) struct AgentReport {
    pub(in crate::admin::doctor) node: String,
    /// One text of an agent each, as `disk: the disk is full`: one printable line.
    pub(in crate::admin::doctor) conditions: Vec<String>,
}

/// Asks agents for their conditions. An agent that does not answer, that another server holds or that sends
/// no facts is left out.
pub(super) async fn ask_all(data_dir: &Path, nodes: Vec<NodeName>) -> Vec<AgentReport> {
    let asked = nodes.into_iter().map(|node| async move {
        let ask = async {
            let client = connect(data_dir).await.ok()??;
            client.agent_diag(&node).await.ok()
        };
        let document = timeout(ASK_LIMIT, ask).await.ok()??;
        Some(AgentReport {
            node: node.to_string(),
            conditions: conditions(&document),
        })
    });
    let reports = stream::iter(asked).buffer_unordered(SAMPLE_MAX);
    let mut reports: Vec<_> = reports.filter_map(async |report| report).collect().await;
    reports.sort_by(|one, other| one.node.cmp(&other.node));
    reports
}

fn conditions(document: &Value) -> Vec<String> {
    let conditions = document["conditions"].as_array().into_iter().flatten();
    let conditions = conditions.filter_map(Value::as_str).map(one_line);
    conditions.take(CONDITIONS_MAX).collect()
}

/// Maximum number of agents that are asked, all at the same time. A fault of all agents shows in some.
pub(super) const SAMPLE_MAX: usize = 8;
const CONDITIONS_MAX: usize = 16;
/// Limit of an agent.
const ASK_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_an_agent_are_lines_and_few() {
        let texts: Vec<_> = (0..99).map(|number| format!("disk:\n{number}")).collect();
        let read = conditions(&serde_json::json!({ "conditions": texts }));
        assert_eq!((read.len(), read[1].as_str()), (CONDITIONS_MAX, "disk: 1"));
        assert!(conditions(&serde_json::json!({ "conditions": 1 })).is_empty());
    }
}
