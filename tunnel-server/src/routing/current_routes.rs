//! The route table in use. It is replaced as a whole, so that a lookup takes no lock.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::watch;
use tunnel_proto::wire::name::NodeName;
use tunnel_routing::routes::{IsHeldElsewhere, RouteNode, RouteSource, RouteTable};

use tunnel_store::known_nodes::NodeMap;

/// The current route table, merged from its sources. Clones share the table.
#[derive(Debug, Clone, Default)]
pub struct Routes(Arc<RoutesInner>);

#[derive(Debug, Default)]
struct RoutesInner {
    table: ArcSwap<RouteTable>,
    /// Held while the table changes, so that an older table never replaces a newer one.
    changing: Mutex<()>,
    /// Whether a source has no complete list of its nodes yet.
    is_starting: watch::Sender<bool>,
}

impl Routes {
    /// Creates empty routes. Names that are in no source are looked up with `is_held_elsewhere`.
    pub fn new(is_held_elsewhere: IsHeldElsewhere) -> Self {
        let table = RouteTable::with_held_elsewhere(is_held_elsewhere);
        Self(Arc::new(RoutesInner {
            table: ArcSwap::from_pointee(table),
            ..RoutesInner::default()
        }))
    }

    /// Marks the routes as unknown until [`Self::complete`]: nothing follows from what they lack.
    pub fn begin(&self) {
        self.0.is_starting.send_replace(true);
    }

    /// Marks the routes as known.
    pub fn complete(&self) {
        self.0.is_starting.send_replace(false);
    }

    pub fn are_known(&self) -> bool {
        !*self.0.is_starting.borrow()
    }

    /// Waits until the routes are known. Cancel-safe.
    pub async fn known(&self) {
        let mut is_starting = self.0.is_starting.subscribe();
        // The sender is in `self`.
        let _known = is_starting.wait_for(|is_starting| !is_starting).await;
    }

    pub fn load(&self) -> Arc<RouteTable> {
        self.0.table.load_full()
    }

    /// Returns the current table for one lookup. It must not be kept while a task waits.
    pub fn peek(&self) -> Guard<Arc<RouteTable>> {
        self.0.table.load()
    }

    /// Replaces all nodes of a source.
    pub fn set(&self, source: RouteSource, nodes: Vec<RouteNode>) -> Arc<RouteTable> {
        self.change(|table| table.set(source, nodes))
    }

    /// Replaces these nodes of a source, and removes those without a node.
    pub fn update(
        &self,
        source: RouteSource,
        changes: impl IntoIterator<Item = (NodeName, Option<RouteNode>)>,
    ) -> Arc<RouteTable> {
        self.change(|table| {
            for (name, node) in changes {
                table.replace(source, &name, node);
            }
        })
    }

    /// Updates the known nodes that have changed since `handled`, which is `known` then.
    pub fn follow_known(&self, known: NodeMap, handled: &mut NodeMap) -> Arc<RouteTable> {
        let changed = known.changed_from(handled).into_iter();
        let changed = changed.map(|name| {
            let node = known.get(name);
            (
                name.clone(),
                node.map(|node| RouteNode {
                    labels: node.labels.clone(),
                    ..RouteNode::edge(name.clone(), node.addresses.clone())
                }),
            )
        });
        let table = self.update(RouteSource::Known, changed);
        *handled = known;
        table
    }

    fn change(&self, change: impl FnOnce(&mut RouteTable)) -> Arc<RouteTable> {
        let _changing = self.0.changing.lock();
        let mut table = RouteTable::clone(&self.0.table.load());
        change(&mut table);
        let table = Arc::new(table);
        self.0.table.store(table.clone());
        table
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::{Duration, SystemTime};

    use tunnel_routing::routes::{RouteError, SeveralNodes};
    use tunnel_tables::visits;

    use super::*;
    use tunnel_store::data_dir::testing::Scratch;
    use tunnel_store::known_nodes::{EnrollmentKind, KnownNodes};

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    #[test]
    fn sources_are_merged_and_replaced_one_by_one() {
        let routes = Routes::default();
        let [one, two]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let route = |own: &str, address| RouteNode::edge(name(own), vec![address]);
        routes.set(RouteSource::Known, vec![route("a", one)]);
        let cluster = vec![route("a", two), route("b", one)];
        let table = routes.set(RouteSource::Cluster, cluster);
        assert_eq!(table, routes.load());
        assert_eq!(table.by_address(two), Ok(name("a")));
        let both = SeveralNodes {
            first: vec![name("a"), name("b")],
            more: 0,
        };
        let shared = RouteError::AmbiguousAddress(one, both);
        assert_eq!(table.by_address(one), Err(shared));
        let table = routes.set(RouteSource::Cluster, Vec::new());
        assert_eq!(table.by_address(one), Ok(name("a")));
        assert!(!table.knows(&name("b")));
    }

    #[test]
    fn join_among_20000_nodes_visits_as_many_entries_as_among_1000() {
        let visits = [1000, 20_000].map(|count| {
            let scratch = Scratch::new();
            let nodes = KnownNodes::open(&scratch.0).unwrap();
            for number in 0..count {
                nodes.record(&name(&format!("edge-{number:05}")), &[]);
            }
            let (routes, mut handled) = (Routes::default(), NodeMap::default());
            routes.follow_known(nodes.snapshot(), &mut handled);
            let mut visits_of = |change: &dyn Fn()| {
                let before = visits::count();
                change();
                routes.follow_known(nodes.snapshot(), &mut handled);
                visits::count() - before
            };
            let joined = visits_of(&|| {
                nodes.record(&name("joined"), &["192.0.2.1".parse().unwrap()]);
                nodes.record_enrollment(&name("joined"), EnrollmentKind::JoinToken);
                let now = SystemTime::now();
                nodes.record_connection(&name("joined"), now, now + Duration::from_secs(5_000));
            });
            assert!(routes.load().knows(&name("joined")));
            let forgotten = visits_of(&|| assert!(nodes.forget(&name("edge-00007"))));
            assert!(!routes.load().knows(&name("edge-00007")));
            assert_eq!(routes.load().len(), count);
            // A pass over all nodes is counted.
            let before = visits::count();
            routes.follow_known(nodes.snapshot(), &mut NodeMap::default());
            assert!(visits::count() - before > count as u64);
            [joined, forgotten]
        });
        assert_eq!(visits[0], visits[1]);
    }
}
