//! Live sessions that were closed in favor of agents at other servers, and the names that two live
//! agents use.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_process::name_list::NameList;
use tunnel_proto::wire::name::{NodeName, ReplicaId};

/// The nodes whose live sessions this server closed in the last minute, by the server that holds the
/// node. Another server is believed only so often, since it alone can tell whether its agents are
/// alive.
#[derive(Debug, Default)]
pub(super) struct Yields(BTreeMap<ReplicaId, BTreeMap<NodeName, Instant>>);

impl Yields {
    /// Returns whether the live sessions of a node may be closed in favor of `replica` at `now`, and
    /// counts the node.
    pub(super) fn admit(&mut self, replica: &ReplicaId, node: &NodeName, now: Instant) -> bool {
        self.0.retain(|_, recent| {
            recent.retain(|_, at| now.saturating_duration_since(*at) < YIELDS_WINDOW);
            !recent.is_empty()
        });
        if self.0.len() >= SERVERS_MAX && !self.0.contains_key(replica) {
            return false;
        }
        let recent = self.0.entry(replica.clone()).or_default();
        let is_admitted = recent.len() < YIELDS_MAX || recent.contains_key(node);
        if is_admitted {
            recent.insert(node.clone(), now);
        }
        is_admitted
    }
}

/// Names of which two servers had a live agent each, with the other server.
#[derive(Debug, Default)]
pub(super) struct NamesUsedTwice(BTreeMap<NodeName, UsedTwice>);

#[derive(Debug)]
struct UsedTwice {
    replica: ReplicaId,
    at: Instant,
}

impl NamesUsedTwice {
    pub(super) fn insert(&mut self, node: &NodeName, replica: &ReplicaId, now: Instant) {
        self.expire(now);
        if self.0.len() < NAMES_MAX || self.0.contains_key(node) {
            let replica = replica.clone();
            self.0.insert(node.clone(), UsedTwice { replica, at: now });
        }
    }

    /// Returns the line for operators, or `None` if no name was used twice for a while.
    pub(super) fn condition(&mut self, now: Instant) -> Option<String> {
        self.expire(now);
        let names: NameList = (self.0.iter())
            .map(|(node, twice)| format!("{node} (here and at {})", twice.replica))
            .collect();
        (!names.is_empty()).then(|| {
            format!(
                "name used twice: {names}; both agents answered, and one session is closed; a cloned disk or a stolen \
                 certificate looks like this"
            )
        })
    }

    fn expire(&mut self, now: Instant) {
        self.0
            .retain(|_, twice| now.saturating_duration_since(twice.at) < REPORTED_FOR);
    }
}

/// Sessions at once that are compared with those of other servers.
pub(super) const CONTESTS_MAX: usize = 1024;
/// Nodes whose live sessions are closed in favor of one server within [`YIELDS_WINDOW`]. Cloned agents are
/// rare, so that this is enough for them, and a hostile server gains little.
const YIELDS_MAX: usize = 10;
const YIELDS_WINDOW: Duration = Duration::from_secs(60);
/// Servers of which yields are counted. More servers than an installation can have.
const SERVERS_MAX: usize = 256;
/// Time for which a name is reported after it was last used twice.
const REPORTED_FOR: Duration = Duration::from_secs(600);
const NAMES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use tunnel_process::name_list::NAMES_SHOWN_MAX;

    use super::*;

    fn replica(name: &str) -> ReplicaId {
        name.parse().unwrap()
    }

    #[test]
    fn ten_sessions_a_minute_yield_to_one_server() {
        let (mut yields, start) = (Yields::default(), Instant::now());
        let node = |number: usize| format!("n{number}").parse().unwrap();
        let admitted = (0..20)
            .filter(|number| yields.admit(&replica("b"), &node(*number), start))
            .count();
        assert_eq!(admitted, YIELDS_MAX);
        assert!(
            yields.admit(&replica("b"), &node(0), start),
            "counted before"
        );
        assert!(
            yields.admit(&replica("c"), &node(11), start),
            "another server"
        );
        let almost = start + YIELDS_WINDOW - Duration::from_millis(1);
        assert!(!yields.admit(&replica("b"), &node(11), almost));
        assert!(yields.admit(&replica("b"), &node(11), start + YIELDS_WINDOW));
        let servers = (0..2 * SERVERS_MAX).map(|number| replica(&format!("s{number}")));
        let now = start + 2 * YIELDS_WINDOW;
        let admitted = servers.filter(|id| yields.admit(id, &node(1), now)).count();
        assert_eq!(admitted, SERVERS_MAX);
    }

    #[test]
    fn names_are_reported_for_a_while_and_a_few_of_many_are_shown() {
        let (mut names, start) = (NamesUsedTwice::default(), Instant::now());
        assert_eq!(names.condition(start), None);
        names.insert(&"x".parse().unwrap(), &replica("b"), start);
        let line = names.condition(start).unwrap();
        assert!(
            line.starts_with("name used twice: x (here and at b);"),
            "{line}"
        );
        assert_eq!(names.condition(start + REPORTED_FOR), None);
        for number in 0..2 * NAMES_MAX {
            let node = format!("n{number}").parse().unwrap();
            names.insert(&node, &replica("b"), start);
        }
        let line = names.condition(start).unwrap();
        assert!(
            line.contains(&format!(" and {} more;", NAMES_MAX - NAMES_SHOWN_MAX)),
            "{line}"
        );
    }
}
