//! The command `nodes`: lists the known nodes and the revocations, and revokes, unrevokes, reissues or
//! forgets nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tunnel_proto::wire::name::NodeName;

use super::table::{self, NodeColumns};
use super::{
    NodesArgs, NodesOutput, NodesVerb, OutputFormat, VerbError, VerbOutput, json,
    require_standalone, write_all,
};
use crate::admin::status::{CONFLICTS_MAX, NodeStatus, NodeTotals};
use crate::admin::{AdminClient, NodesOrder, ORDER_NODES_MAX, OrderOutcome, RevocationInfo};
use crate::ca::revocation::{OrderAction, Revocations};
use crate::routing::known_nodes::KnownNodes;
use crate::store::data_dir::{DataDir, rfc3339};

impl NodesArgs {
    /// Runs the command and prints the result.
    ///
    /// # Errors
    /// Returns a [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        if self.watch && self.verb.is_none() {
            return self.print_changes().await;
        }
        self.execute().await?.print()
    }

    /// Prints the list of the running server, and later the nodes that changed, until the output is
    /// closed or no server runs.
    async fn print_changes(self) -> Result<(), VerbError> {
        let dir = DataDir::open_existing(&self.data_dir.data_dir)?;
        let mut watch = NodesWatch::default();
        let mut ticks = interval(WATCH_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_first = true;
        loop {
            ticks.tick().await;
            let Some(server) = AdminClient::connect(&dir).await? else {
                let path = dir.path().display();
                let text = format!("no tunnel-server runs with {path}");
                return Err(VerbError::NotReady(text));
            };
            let nodes = self.listed(&server).await?;
            let totals = NodeTotals::of(&nodes);
            let changed = watch.observe(nodes);
            if changed.is_empty() && !is_first {
                continue;
            }
            is_first = false;
            let text = self.format(&changed, totals, SystemTime::now())?;
            match write_all(&mut io::stdout(), &text) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(super) async fn execute(self) -> Result<VerbOutput, VerbError> {
        let dir = DataDir::open_existing(&self.data_dir.data_dir)?;
        let server = AdminClient::connect(&dir).await?;
        match &self.verb {
            None => self.list(&dir, server).await,
            Some(NodesVerb::Revoke { names }) => {
                order(&dir, server, OrderAction::Revoke, names).await
            }
            Some(NodesVerb::Unrevoke { names }) => {
                order(&dir, server, OrderAction::Unrevoke, names).await
            }
            Some(NodesVerb::Reissue { names }) => {
                order(&dir, server, OrderAction::Reissue, names).await
            }
            Some(NodesVerb::Revocations { output }) => revocations(&dir, server, *output).await,
            Some(NodesVerb::Forget { name }) => forget(&dir, server, name).await,
        }
    }

    async fn list(
        &self,
        dir: &DataDir,
        server: Option<AdminClient>,
    ) -> Result<VerbOutput, VerbError> {
        let is_running = server.is_some();
        let nodes = match server {
            Some(server) => self.listed(&server).await?,
            None if self.selector.is_some() => {
                return Err(VerbError::NotRunning(dir.path().to_owned()));
            }
            None => {
                let known = KnownNodes::open(dir)?;
                self.select(stored_nodes(&known, &stored_revocations(dir)?))?
            }
        };
        Ok(VerbOutput {
            out: self.format(&nodes, NodeTotals::of(&nodes), SystemTime::now())?,
            err: if is_running {
                String::new()
            } else {
                format!("no tunnel-server runs with {}\n", dir.path().display())
            },
        })
    }

    /// Returns the nodes of the running server that the arguments select.
    async fn listed(&self, server: &AdminClient) -> Result<Vec<NodeStatus>, VerbError> {
        if let Some(selector) = &self.selector {
            selector.check(&server.node_labels().await?)?;
        }
        self.select(server.nodes().await?)
    }

    /// Returns the nodes that the arguments select, in the order of the list.
    fn select(&self, mut nodes: Vec<NodeStatus>) -> Result<Vec<NodeStatus>, VerbError> {
        if !self.names.is_empty() {
            let wanted: BTreeSet<&str> = self.names.iter().map(NodeName::as_str).collect();
            nodes.retain(|node| wanted.contains(node.node.as_str()));
            let found: BTreeSet<&str> = nodes.iter().map(|node| node.node.as_str()).collect();
            let unknown = self
                .names
                .iter()
                .find(|name| !found.contains(name.as_str()));
            if let Some(name) = unknown {
                return Err(VerbError::UnknownNode(name.clone()));
            }
        }
        if self.away {
            nodes.retain(|node| !node.connected);
        }
        if let Some(selector) = &self.selector {
            nodes.retain(|node| selector.matches(&node.labels));
        }
        Ok(nodes)
    }

    /// Formats nodes with the totals of all nodes that the arguments select.
    fn format(
        &self,
        nodes: &[NodeStatus],
        totals: NodeTotals,
        now: SystemTime,
    ) -> Result<String, VerbError> {
        Ok(match self.output {
            NodesOutput::Table | NodesOutput::Wide if nodes.is_empty() => {
                let text = match &self.selector {
                    Some(_) => NONE_SELECTED,
                    None if self.away => NONE_AWAY,
                    None => NONE_KNOWN,
                };
                text.to_owned()
            }
            NodesOutput::Table => {
                format!("{}{totals}\n", table::nodes(nodes, NodeColumns::Usual, now))
            }
            NodesOutput::Wide => {
                format!("{}{totals}\n", table::nodes(nodes, NodeColumns::All, now))
            }
            NodesOutput::Json => json(&NodeListDocument {
                schema_version: SCHEMA_VERSION,
                totals,
                nodes,
            })?,
            NodesOutput::Name => nodes
                .iter()
                .flat_map(|node| [node.node.as_str(), "\n"])
                .collect(),
        })
    }
}

/// The nodes as they were last observed, without what changes all the time.
#[derive(Debug, Default)]
struct NodesWatch {
    observed: BTreeMap<String, NodeStatus>,
}

impl NodesWatch {
    /// Returns the nodes that are new or have changed since the last call.
    fn observe(&mut self, nodes: Vec<NodeStatus>) -> Vec<NodeStatus> {
        let mut observed = BTreeMap::new();
        let mut changed = Vec::new();
        for node in nodes {
            let lasting = NodeStatus {
                last_seen: None,
                rtt_millis: None,
                streams: 0,
                bytes_in: 0,
                bytes_out: 0,
                ..node.clone()
            };
            let is_changed = self.observed.get(&node.node) != Some(&lasting);
            observed.insert(node.node.clone(), lasting);
            if is_changed {
                changed.push(node);
            }
        }
        self.observed = observed;
        changed
    }
}

/// The output of `nodes revocations -o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RevocationListDocument<'a> {
    /// Raised when a field is removed or changes its meaning.
    schema_version: u32,
    revocations: &'a [RevocationInfo],
}

/// The output of `nodes -o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeListDocument<'a> {
    /// Raised when a field is removed or changes its meaning.
    schema_version: u32,
    totals: NodeTotals,
    nodes: &'a [NodeStatus],
}

/// Orders something about nodes, and says where that is in force and saved.
async fn order(
    dir: &DataDir,
    server: Option<AdminClient>,
    action: OrderAction,
    names: &[NodeName],
) -> Result<VerbOutput, VerbError> {
    let is_running = server.is_some();
    let outcome = if let Some(server) = server {
        let mut outcome = OrderOutcome::default();
        for names in names.chunks(ORDER_NODES_MAX) {
            let nodes = names.iter().map(NodeName::to_string).collect();
            let OrderOutcome {
                changed,
                in_force,
                pending,
            } = server.order(&NodesOrder { action, nodes }).await?;
            outcome.changed.extend(changed);
            // The server answers for all of its orders.
            (outcome.in_force, outcome.pending) = (in_force, pending);
        }
        outcome
    } else {
        // Only the running server needs to know whether the CA is local.
        let revocations = Revocations::open(require_standalone(dir)?, true)?;
        let changed = revocations.order(action, names, SystemTime::now());
        revocations.flush()?;
        OrderOutcome {
            changed: changed.iter().map(NodeName::to_string).collect(),
            ..OrderOutcome::default()
        }
    };
    let changed: BTreeSet<&str> = outcome.changed.iter().map(String::as_str).collect();
    let (mut out, mut err) = (String::new(), String::new());
    // The order is in force, whatever becomes of this check.
    let known = KnownNodes::open(dir);
    for name in names {
        let is_changed = changed.contains(name.as_str());
        let line = match action {
            _ if !is_changed => format!("note: {}\n", VerbError::NotRevoked(name.clone())),
            OrderAction::Revoke => format!("node {name} revoked\n"),
            OrderAction::Unrevoke => format!(
                "node {name} is no longer revoked; an agent that runs connects within about half a minute\n"
            ),
            OrderAction::Reissue => format!(
                "certificates of node {name} revoked; a new token admits it: tunnel-server token create --node {name}\n"
            ),
        };
        if is_changed { &mut out } else { &mut err }.push_str(&line);
        let is_unknown = known.as_ref().is_ok_and(|known| !known.knows(name));
        if is_changed && action != OrderAction::Unrevoke && is_unknown {
            let hint = format!("note: no node of this name is known: {name}; check the spelling\n");
            err.push_str(&hint);
        }
    }
    if let Err(error) = known {
        err.push_str(&format!(
            "note: whether the names are known was not checked: {error}\n"
        ));
    }
    if let (true, Some(name)) = (changed.is_empty(), names.first()) {
        return Err(VerbError::NotRevoked(name.clone()));
    }
    out.push_str(&if is_running {
        format!("in force at {}\n", outcome.in_force.join(", "))
    } else {
        "no tunnel-server runs with this data directory\n".to_owned()
    });
    if !outcome.pending.is_empty() {
        let pending = outcome.pending.join("; ");
        err.push_str(&format!(
            "pending, and tried until it succeeds: {pending}\n"
        ));
    }
    Ok(VerbOutput { out, err })
}

/// Lists the revocations in force.
async fn revocations(
    dir: &DataDir,
    server: Option<AdminClient>,
    output: OutputFormat,
) -> Result<VerbOutput, VerbError> {
    let revocations = match server {
        Some(server) => server.revocations().await?,
        None => stored_revocations(require_standalone(dir)?)?,
    };
    Ok(VerbOutput::out(match output {
        OutputFormat::Table => table::revocations(&revocations),
        OutputFormat::Json => json(&RevocationListDocument {
            schema_version: SCHEMA_VERSION,
            revocations: &revocations,
        })?,
    }))
}

async fn forget(
    dir: &DataDir,
    server: Option<AdminClient>,
    node: &NodeName,
) -> Result<VerbOutput, VerbError> {
    let found = if let Some(server) = server {
        server.forget_node(node).await?
    } else {
        let nodes = KnownNodes::open(dir)?;
        let found = nodes.forget(node);
        nodes.save()?;
        found
    };
    if found {
        Ok(VerbOutput::out(format!("node {node} forgotten\n")))
    } else {
        Err(VerbError::UnknownNode(node.clone()))
    }
}

/// Returns the revocations in the files of a directory.
fn stored_revocations(dir: &DataDir) -> Result<Vec<RevocationInfo>, VerbError> {
    let in_force = Revocations::open(dir, true)?.in_force().into_iter();
    Ok(in_force.map(RevocationInfo::from).collect())
}

/// Returns the known nodes as a running server without connected agents would list them.
pub(super) fn stored_nodes(nodes: &KnownNodes, revocations: &[RevocationInfo]) -> Vec<NodeStatus> {
    let revoked: BTreeMap<&NodeName, SystemTime> = revocations
        .iter()
        .map(|revocation| (&revocation.node, revocation.revoked_at))
        .collect();
    let conflicts = nodes.conflicts();
    let shared = |address: &IpAddr| {
        let names = conflicts.get(address)?.iter().take(CONFLICTS_MAX);
        Some((*address, names.map(NodeName::to_string).collect()))
    };
    nodes
        .snapshot()
        .iter()
        .map(|(name, node)| NodeStatus {
            node: name.to_string(),
            is_edge: true,
            last_seen: node.last_seen.map(rfc3339),
            revoked_at: revoked.get(name).copied().map(rfc3339),
            enrollment: node.enrollment,
            certificate_not_after: node.certificate_not_after.map(rfc3339),
            address_conflicts: node.addresses.iter().filter_map(shared).collect(),
            addresses: node.addresses.clone(),
            ..NodeStatus::default()
        })
        .collect()
}

const NONE_KNOWN: &str = "no node is known; 'tunnel-server token create --node NAME' makes one\n";
const NONE_SELECTED: &str = "no such node has these labels\n";
const NONE_AWAY: &str = "no node is away\n";
/// Interval at which `--watch` asks the server.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Version of the documents that `nodes -o json` and `nodes revocations -o json` print.
const SCHEMA_VERSION: u32 = 1;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Cli {
        #[command(flatten)]
        nodes: NodesArgs,
    }

    fn listed(arguments: &str) -> Result<String, VerbError> {
        let words = ["nodes"].into_iter().chain(arguments.split_whitespace());
        let args = Cli::try_parse_from(words).unwrap().nodes;
        let status = |name: &str, connected, state: Option<&str>| NodeStatus {
            node: name.to_owned(),
            connected,
            state: state.map(str::to_owned),
            labels: [("zone".into(), name.into())].into(),
            // The session of the first node has a later certificate.
            revoked_at: (name != "worker-2").then(|| rfc3339(SystemTime::UNIX_EPOCH)),
            ..NodeStatus::default()
        };
        let nodes = args.select(vec![
            status("worker-1", true, Some("live")),
            status("worker-2", true, Some("suspect")),
            status("worker-3", false, None),
        ])?;
        args.format(&nodes, NodeTotals::of(&nodes), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn names_and_state_select_nodes() {
        for (arguments, expected) in [
            ("-o name", "worker-1\nworker-2\nworker-3\n"),
            ("-o name --away", "worker-3\n"),
            ("-o name worker-2 worker-1", "worker-1\nworker-2\n"),
            ("-o name Worker-2", "worker-2\n"),
            ("-o name --away worker-1", ""),
            ("--away worker-1", "no node is away\n"),
            ("-o name --selector zone!=worker-2", "worker-1\nworker-3\n"),
            ("-o name -l zone!=worker-2 --away", "worker-3\n"),
            ("-l zone=a", "no such node has these labels\n"),
        ] {
            assert_eq!(listed(arguments).unwrap(), expected, "{arguments}");
        }
    }

    #[test]
    fn unknown_name_fails_and_prints_no_other_node() {
        for output in ["table", "wide", "json", "name"] {
            let error = listed(&format!("-o {output} worker-1 worker-9")).unwrap_err();
            assert!(matches!(&error, VerbError::UnknownNode(name) if name.as_str() == "worker-9"));
            assert_eq!(error.exit_code(), 1);
        }
    }

    #[test]
    fn tables_end_in_the_totals_of_what_they_list() {
        for (arguments, totals) in [
            (
                "",
                "total: 3; connected: 2 (suspect: 1); away: 1 (revoked: 1)",
            ),
            (
                "-o wide",
                "total: 3; connected: 2 (suspect: 1); away: 1 (revoked: 1)",
            ),
            (
                "--away",
                "total: 1; connected: 0 (suspect: 0); away: 1 (revoked: 1)",
            ),
        ] {
            let text = listed(arguments).unwrap();
            assert_eq!(text.lines().last(), Some(totals), "{text}");
        }
    }

    #[test]
    fn watch_shows_changes_of_state_and_no_traffic() {
        let status = |name: &str, connected, streams| NodeStatus {
            node: name.to_owned(),
            connected,
            streams,
            ..NodeStatus::default()
        };
        let mut watch = NodesWatch::default();
        let mut names = |nodes: Vec<NodeStatus>| -> Vec<String> {
            let changed = watch.observe(nodes).into_iter();
            changed.map(|node| node.node).collect()
        };
        let both = |streams| vec![status("a", true, streams), status("b", true, streams)];
        assert_eq!(names(both(0)), ["a", "b"]);
        assert!(names(both(7)).is_empty());
        assert_eq!(
            names(vec![status("a", false, 0), status("b", true, 0)]),
            ["a"]
        );
        // A node that was not selected for a while is new.
        assert!(names(vec![status("b", true, 0)]).is_empty());
        assert_eq!(
            names(vec![status("a", false, 0), status("b", true, 0)]),
            ["a"]
        );
    }

    #[test]
    fn document_has_a_version_and_totals() {
        let document: serde_json::Value =
            serde_json::from_str(&listed("-o json --away").unwrap()).unwrap();
        assert_eq!(document["schemaVersion"], 1);
        assert_eq!(document["totals"]["nodes"], 1);
        assert_eq!(document["totals"]["away"], 1);
        assert_eq!(document["totals"]["revoked"], 1);
        assert_eq!(document["nodes"][0]["node"], "worker-3");
        assert_eq!(document["nodes"][0]["lastClose"], serde_json::Value::Null);
    }
}
