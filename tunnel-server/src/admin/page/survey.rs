//! One pass over all nodes: the numbers of the console, and the names of the nodes on a page of the
//! list. Holds a key of each node up to the page, and the status of none. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;

use super::query::{Labels, NodesQuery, StateFilter};
use crate::admin::status::{ListedNode, NodeState, NodeSummary, NodeTotals, SortKey};
use crate::admin::traffic::NodeTraffic;

/// What one pass over all nodes found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Totals of all nodes, whatever the query.
    pub(super) totals: NodeTotals,
    pub(super) counts: NodeCounts,
    pub(super) streams: u64,
    pub(super) needing: NeedingNodes,
    /// Number of nodes that match the query, on all pages.
    pub(super) matching: usize,
    pub(super) page: usize,
    pub(super) pages: usize,
    /// The nodes of the page, in its order.
    pub(super) names: Vec<String>,
}

/// The nodes whose state is a fault, whatever the query, by state.
#[derive(Debug, Default)]
pub(super) struct NeedingNodes(pub(super) [NodesOfState; NodeState::ALL.len()]);

#[derive(Debug, Default)]
pub(super) struct NodesOfState {
    pub(super) count: usize,
    /// Those that were seen last, the last one first.
    pub(super) latest: Vec<NeedingNode>,
}

/// A node whose state is a fault.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NeedingNode {
    pub(super) node: String,
    /// Time of its last sign of life, if there was one.
    pub(super) since: Option<SystemTime>,
}

impl NodesOfState {
    fn add(&mut self, node: &NodeSummary<'_>) {
        self.count += 1;
        let since = node.last_seen;
        let at = (self.latest).partition_point(|other| Reverse(other.since) <= Reverse(since));
        if at < NEEDING_SHOWN {
            let node = node.name.to_owned();
            self.latest.insert(at, NeedingNode { node, since });
            self.latest.truncate(NEEDING_SHOWN);
        }
    }
}

/// Numbers of the nodes that match the search and the labels, by what else can be selected.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeCounts {
    pub(super) all: usize,
    pub(super) not_live: usize,
    /// Nodes with failed requests in the last hour.
    pub(super) errors: usize,
    pub(super) states: BTreeMap<&'static str, usize>,
    /// The 16 first transports, versions and servers.
    pub(super) transports: BTreeMap<String, usize>,
    pub(super) versions: BTreeMap<String, usize>,
    pub(super) servers: BTreeMap<String, usize>,
}

/// A pass over all nodes.
#[derive(Debug)]
pub(super) struct SurveyPass<'a> {
    query: &'a NodesQuery,
    survey: Survey,
    /// Numbers of nodes by state.
    states: [usize; NodeState::ALL.len()],
    transports: ValueCounts,
    versions: ValueCounts,
    servers: ValueCounts,
    per_page: usize,
    /// Keys of the nodes that may be on the page.
    keys: Vec<SortKey>,
    /// The last key that may be on the page, once some were dropped.
    last: Option<SortKey>,
}

impl<'a> SurveyPass<'a> {
    pub(super) fn new(query: &'a NodesQuery, per_page: usize) -> Self {
        Self {
            query,
            survey: Survey::default(),
            states: Default::default(),
            transports: ValueCounts::default(),
            versions: ValueCounts::default(),
            servers: ValueCounts::default(),
            per_page,
            keys: Vec::new(),
            last: None,
        }
    }

    /// Adds a node with its traffic.
    pub(super) fn add(&mut self, node: &dyn ListedNode, traffic: Option<&NodeTraffic>) {
        let (summary, query) = (node.summary(), self.query);
        let state = summary.state();
        self.survey.totals.add(state);
        self.survey.streams += summary.streams;
        if state.needs_operator()
            && let Some(of_state) = self.survey.needing.0.get_mut(state as usize)
        {
            of_state.add(&summary);
        }
        let has_labels = |labels: &Labels| labels.selector.matches(&node.selectable_labels());
        let is_searched = query.search.is_empty() || summary.name.contains(&query.search);
        if !is_searched || !query.label.as_ref().is_none_or(has_labels) {
            return;
        }
        let has_errors = traffic.is_some_and(|traffic| traffic.errors_last_hour > 0);
        let counts = &mut self.survey.counts;
        counts.all += 1;
        counts.not_live += usize::from(state.is_not_live());
        counts.errors += usize::from(has_errors);
        if let Some(count) = self.states.get_mut(state as usize) {
            *count += 1;
        }
        self.transports.add(summary.transport);
        self.versions.add(summary.version);
        self.servers.add(summary.replica);
        if is_selected(&summary, state, has_errors, query) {
            self.survey.matching += 1;
            let key = query.order.sort.key(&summary, traffic);
            let is_later = |last: &SortKey| query.order.compare(&key, last).is_gt();
            if !self.last.as_ref().is_some_and(is_later) {
                self.keys.push(key.to_owned());
                self.drop_later_keys();
            }
        }
    }

    /// Drops the keys behind the page whenever they are as many as the others.
    fn drop_later_keys(&mut self) {
        let end = self.per_page.saturating_mul(self.query.page.max(1));
        if self.keys.len() >= end.saturating_mul(2).max(KEYS_MIN) && end < self.keys.len() {
            let compare = |one: &SortKey, other: &SortKey| self.query.order.compare(one, other);
            let (_, last, _) = self.keys.select_nth_unstable_by(end - 1, compare);
            self.last = Some(last.clone());
            self.keys.truncate(end);
        }
    }

    /// Selects the page of the query. A page beyond the last one is the last one.
    pub(super) fn finish(self) -> Survey {
        let (mut survey, mut keys, query) = (self.survey, self.keys, self.query);
        let per_page = self.per_page;
        let states = NodeState::ALL.iter().zip(self.states);
        let states = states.filter(|(_state, count)| *count > 0);
        survey.counts.states = states
            .map(|(state, count)| (state.label(), count))
            .collect();
        survey.counts.transports = self.transports.0.into_iter().collect();
        survey.counts.versions = self.versions.0.into_iter().collect();
        survey.counts.servers = self.servers.0.into_iter().collect();
        survey.pages = survey.matching.div_ceil(per_page).max(1);
        survey.page = query.page.clamp(1, survey.pages);
        let compare = |one: &SortKey, other: &SortKey| query.order.compare(one, other);
        // Only the page is sorted: the keys before it and after it are only put on their side.
        let begin = (survey.page - 1) * per_page;
        if 0 < begin && begin < keys.len() {
            keys.select_nth_unstable_by(begin, compare);
        }
        let mut page = keys.split_off(begin.min(keys.len()));
        if per_page < page.len() {
            page.select_nth_unstable_by(per_page, compare);
            page.truncate(per_page);
        }
        page.sort_unstable_by(compare);
        survey.names = page.into_iter().map(SortKey::into_name).collect();
        survey
    }
}

/// Numbers of nodes by a value that nodes choose: only the first [`VALUES_MAX`] values are counted.
#[derive(Debug, Default)]
struct ValueCounts(Vec<(String, usize)>);

impl ValueCounts {
    fn add(&mut self, value: Option<&str>) {
        let Some(value) = value else {
            return;
        };
        if let Some((_, count)) = self.0.iter_mut().find(|(known, _)| known == value) {
            *count += 1;
        } else if self.0.len() < VALUES_MAX {
            self.0.push((value.to_owned(), 1));
        }
    }
}

fn is_selected(
    node: &NodeSummary<'_>,
    state: NodeState,
    has_errors: bool,
    query: &NodesQuery,
) -> bool {
    let has_state = match query.state {
        None => true,
        Some(StateFilter::One(selected)) => state == selected,
        Some(StateFilter::NotLive) => state.is_not_live(),
        Some(StateFilter::Errors) => has_errors,
    };
    let is = |selected: &Option<String>, value: Option<&str>| {
        selected.is_none() || selected.as_deref() == value
    };
    has_state
        && is(&query.version, node.version)
        && is(&query.transport, node.transport)
        && is(&query.server, node.replica)
}

/// Keys that are held in any case, so that a short page does not drop some for each node.
const KEYS_MIN: usize = 200;
/// Nodes of each state that are named.
const NEEDING_SHOWN: usize = 8;
/// Number of different values that are counted.
const VALUES_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::NodeStatus;

    /// Returns 1,001 nodes: every hundredth is suspect, and the others are live.
    fn nodes() -> Vec<(NodeStatus, Option<NodeTraffic>)> {
        let named = |number: u64| {
            let status = NodeStatus {
                node: format!("worker-{number:04}"),
                connected: true,
                is_edge: true,
                state: Some(if number % 100 == 7 { "suspect" } else { "live" }.to_owned()),
                transport: (number != 3).then(|| {
                    if number.is_multiple_of(2) {
                        "quic"
                    } else {
                        "h2"
                    }
                    .to_owned()
                }),
                rtt_millis: (number != 3).then_some(number),
                labels: [(
                    "site".into(),
                    if number < 5 { "oslo" } else { "bergen" }.into(),
                )]
                .into(),
                ..NodeStatus::default()
            };
            let traffic = NodeTraffic {
                errors_last_hour: if number == 9 { 4 } else { 0 },
                ..NodeTraffic::default()
            };
            (status, Some(traffic))
        };
        (0..1_001).map(named).collect()
    }

    fn survey(query: &str) -> Survey {
        let query = NodesQuery::parse(query).unwrap();
        let mut pass = SurveyPass::new(&query, 50);
        for (node, traffic) in nodes() {
            pass.add(&node, traffic.as_ref());
        }
        pass.finish()
    }

    #[test]
    fn list_is_filtered_sorted_and_cut_into_pages() {
        for (query, (page, pages, matching), first) in [
            ("", (1, 21, 1_001), "worker-0007"),
            ("page=99", (21, 21, 1_001), "worker-1000"),
            ("sort=-state", (1, 21, 1_001), "worker-0000"),
            ("sort=name&page=2", (2, 21, 1_001), "worker-0050"),
            ("sort=rtt", (1, 21, 1_001), "worker-1000"),
            ("sort=-rtt", (1, 21, 1_001), "worker-0003"),
            ("sort=errors", (1, 21, 1_001), "worker-0009"),
            ("sort=transport", (1, 21, 1_001), "worker-0001"),
            ("search=-100", (1, 1, 1), "worker-1000"),
            ("search=site%3Doslo", (1, 1, 5), "worker-0000"),
            (
                "label=site%21%3Doslo&state=suspect",
                (1, 1, 10),
                "worker-0007",
            ),
            ("state=not-live", (1, 1, 10), "worker-0007"),
            ("state=errors", (1, 1, 1), "worker-0009"),
            ("transport=h2&sort=name", (1, 10, 499), "worker-0001"),
        ] {
            let survey = survey(query);
            assert_eq!(
                (survey.page, survey.pages, survey.matching),
                (page, pages, matching),
                "{query}"
            );
            assert_eq!(survey.names[0], first, "{query}");
            assert!(survey.names.len() <= 50);
        }
        let absent = survey("search=absent");
        assert_eq!((absent.page, absent.pages, absent.names.len()), (1, 1, 0));
        let last = survey("sort=rtt&page=21");
        assert_eq!(
            last.names,
            ["worker-0003"],
            "a node without a value is last"
        );
    }

    #[test]
    fn nodes_that_need_somebody_are_counted_and_those_seen_last_are_named() {
        let at = |seconds| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let query = NodesQuery::parse("search=absent").unwrap();
        let mut pass = SurveyPass::new(&query, 50);
        for number in 0..40 {
            let seen = humantime::format_rfc3339(at(number * 7 % 40)).to_string();
            let node = NodeStatus {
                node: format!("worker-{number}"),
                is_edge: number != 1,
                connected: number == 2,
                state: (number == 2).then(|| "live".to_owned()),
                revoked_at: (number == 3).then(|| seen.clone()),
                is_pending: number == 4,
                last_seen: (number != 5).then_some(seen),
                ..NodeStatus::default()
            };
            pass.add(&node, None);
        }
        let needing = &pass.survey.needing.0[NodeState::Away as usize];
        let all = pass.survey.needing.0.iter().map(|of_state| of_state.count);
        assert_eq!(all.sum::<usize>(), needing.count);
        assert_eq!((needing.count, needing.latest.len()), (36, NEEDING_SHOWN));
        let first = NeedingNode {
            node: "worker-17".to_owned(),
            since: Some(at(39)),
        };
        assert_eq!(needing.latest[0], first);
        let times: Vec<_> = needing.latest.iter().map(|node| node.since).collect();
        assert!(times.is_sorted_by_key(|since| Reverse(*since)), "{times:?}");
    }

    #[test]
    fn counts_are_those_of_the_search_whatever_else_is_selected() {
        let counts = survey("search=worker-00&state=suspect&transport=quic").counts;
        assert_eq!((counts.all, counts.not_live, counts.errors), (100, 1, 1));
        assert_eq!(counts.states, [("live", 99), ("suspect", 1)].into());
        assert_eq!(
            counts.transports,
            [("h2".to_owned(), 49), ("quic".to_owned(), 50)].into()
        );
    }

    #[test]
    fn values_of_hostile_nodes_are_a_bounded_number() {
        let node = |number: u32| NodeStatus {
            version: Some(number.to_string()),
            ..NodeStatus::default()
        };
        let query = NodesQuery::default();
        let mut pass = SurveyPass::new(&query, 50);
        for number in 0..1000 {
            pass.add(&node(number % 500), None);
        }
        let counts = pass.finish().counts;
        assert_eq!(counts.versions.len(), VALUES_MAX);
        assert_eq!(counts.versions["0"], 2);
    }
}
