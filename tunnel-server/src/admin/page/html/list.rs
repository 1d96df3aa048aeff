//! The list of nodes: its filters, the heads of its columns, and its rows. Pure.

use std::time::SystemTime;

use tunnel_proto::wire::name::NodeName;

use crate::admin::page::facts::NodeFacts;
use crate::admin::page::plot::Plot;
use crate::admin::page::query::{NodesQuery, StateFilter};
use crate::admin::page::survey::NodeCounts;
use crate::admin::page::text::{Figure, RelativeTime, grouped};
use crate::admin::page::visible::{VisibleText, beginning, ending};
use crate::admin::status::{NodeSort, NodeState};

/// A link that selects nodes.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) label: VisibleText,
    pub(super) count: String,
    pub(super) link: String,
    pub(super) is_selected: bool,
}

impl Filter {
    pub(super) fn all(counts: &NodeCounts, query: &NodesQuery) -> Vec<Self> {
        let mut filters = Self::of_states(counts, query);
        type Slot = fn(&mut NodesQuery) -> &mut Option<String>;
        let transport: Slot = |query| &mut query.transport;
        let version: Slot = |query| &mut query.version;
        let server: Slot = |query| &mut query.server;
        for (values, selected, slot) in [
            (&counts.transports, &query.transport, transport),
            (&counts.servers, &query.server, server),
            (&counts.versions, &query.version, version),
        ] {
            // One value selects nothing.
            let has_choice = values.len() > 1 || selected.is_some();
            for (value, count) in values.iter().filter(|_| has_choice).take(FILTERS_OF_A_KIND) {
                let is_selected = selected.as_ref() == Some(value);
                let link = query.link(|query| {
                    *slot(query) = (!is_selected).then(|| value.clone());
                });
                filters.push(Self::new(value, *count, link, is_selected));
            }
        }
        filters
    }

    /// Returns the links to all nodes and to those in each state but the usual one.
    pub(super) fn of_states(counts: &NodeCounts, query: &NodesQuery) -> Vec<Self> {
        let all = query.link(NodesQuery::select_all);
        let is_all = query.link(|_| {}) == all;
        let mut filters = vec![Self::new("All", counts.all, all, is_all)];
        let named = [
            ("Not live", StateFilter::NotLive, counts.not_live),
            ("Errors", StateFilter::Errors, counts.errors),
        ];
        let states = NodeState::ALL
            .into_iter()
            .filter(|state| *state != NodeState::Live);
        let states = states.map(|state| {
            let count = counts.states.get(state.label()).copied().unwrap_or(0);
            (state.label(), StateFilter::One(state), count)
        });
        for (label, state, count) in named.into_iter().chain(states) {
            let is_selected = query.state == Some(state);
            if count > 0 || is_selected {
                let link = query.link(|query| query.state = (!is_selected).then_some(state));
                filters.push(Self::new(label, count, link, is_selected));
            }
        }
        filters
    }

    pub(super) fn new(label: &str, count: usize, link: String, is_selected: bool) -> Self {
        Self {
            label: VisibleText::new(label),
            count: grouped(count as u64),
            link,
            is_selected,
        }
    }
}

/// The head of a column, a link that sorts by it.
#[derive(Debug)]
pub(super) struct ColumnHead {
    pub(super) label: &'static str,
    pub(super) link: String,
    /// The value of `aria-sort`; empty if the list is in another order.
    pub(super) order: &'static str,
}

impl ColumnHead {
    pub(super) fn all(query: &NodesQuery) -> Vec<Self> {
        let head = |(label, sort): (_, Option<NodeSort>)| {
            let order = match sort {
                Some(sort) if sort == query.order.sort => {
                    if query.order.is_reversed {
                        "descending"
                    } else {
                        "ascending"
                    }
                }
                Some(_) | None => "",
            };
            let link = sort.map(|sort| query.sorted_by(sort)).unwrap_or_default();
            Self { label, link, order }
        };
        let columns = [
            ("Node", Some(NodeSort::Name)),
            ("State", Some(NodeSort::State)),
            ("Transport", Some(NodeSort::Transport)),
            ("Round trip", Some(NodeSort::Rtt)),
            ("Streams", Some(NodeSort::Streams)),
            ("Throughput", Some(NodeSort::Traffic)),
            ("Errors, 1 h", Some(NodeSort::Errors)),
            ("Seen", Some(NodeSort::Seen)),
            ("Server", Some(NodeSort::Server)),
            ("Version", Some(NodeSort::Version)),
            ("Last 24 h", None),
        ];
        columns.map(head).into()
    }
}

/// A node as its row in the list shows it. A value that is not known is empty.
#[derive(Debug)]
pub(super) struct NodeRow {
    /// The name, cut if it is long.
    pub(super) name: String,
    /// The whole name if it may be cut.
    pub(super) whole: Option<VisibleText>,
    /// Name for the link to the node's page; empty if the name is not that of a node.
    pub(super) link: String,
    pub(super) state: &'static str,
    pub(super) transport: String,
    pub(super) rtt: String,
    pub(super) streams: String,
    pub(super) throughput: String,
    pub(super) errors: String,
    pub(super) has_errors: bool,
    pub(super) seen: Option<RelativeTime>,
    /// Name of the server that carries requests to the node, and its end.
    pub(super) replica: String,
    pub(super) server: String,
    pub(super) version: String,
    /// Path of the traffic of the last day.
    pub(super) trend: String,
}

pub(super) fn rows(nodes: &[NodeFacts], now: SystemTime) -> Vec<NodeRow> {
    nodes.iter().map(|facts| NodeRow::new(facts, now)).collect()
}

impl NodeRow {
    pub(super) fn new(facts: &NodeFacts, now: SystemTime) -> Self {
        let status = &facts.status;
        let name = VisibleText::new(status.node.as_str());
        let is_long = status.node.len() > NAME_SHOWN / 2;
        let link = status.node.parse::<NodeName>();
        let (server, replica) = match &status.gone_server {
            Some(gone) => {
                let end = ending(&gone.name, SERVER_SHOWN - 6);
                (
                    format!("{end}, gone"),
                    format!("{}, gone", beginning(&gone.name, TEXT_SHOWN)),
                )
            }
            None => {
                let name = status.replica.as_deref().unwrap_or_default();
                (ending(name, SERVER_SHOWN), beginning(name, TEXT_SHOWN))
            }
        };
        let text =
            |text: &Option<String>| beginning(text.as_deref().unwrap_or_default(), TEXT_SHOWN);
        let traffic = facts.traffic.as_ref();
        let has_session = status.transport.is_some();
        let trend = traffic.map(|traffic| {
            let levels = traffic.trend.iter().map(|level| Some(u64::from(*level)));
            Plot::new(&levels.collect::<Vec<_>>()).line
        });
        Self {
            name: beginning(&status.node, NAME_SHOWN),
            whole: is_long.then_some(name),
            link: link.map(|name| name.to_string()).unwrap_or_default(),
            state: NodeState::of(status).label(),
            transport: text(&status.transport),
            rtt: status
                .rtt_millis
                .map_or_else(String::new, |millis| format!("{} ms", grouped(millis))),
            streams: if has_session {
                grouped(status.streams)
            } else {
                String::new()
            },
            throughput: traffic
                .filter(|_| has_session)
                .map_or_else(String::new, |traffic| {
                    Figure::rate(traffic.bytes_in_per_second + traffic.bytes_out_per_second)
                        .to_string()
                }),
            errors: traffic.map_or_else(String::new, |traffic| grouped(traffic.errors_last_hour)),
            has_errors: traffic.is_some_and(|traffic| traffic.errors_last_hour > 0),
            seen: status
                .last_seen
                .as_deref()
                .map(|at| RelativeTime::new(at, now)),
            server,
            replica,
            version: text(&status.version),
            trend: trend.unwrap_or_default(),
        }
    }
}

/// Characters of a node's name that a row has.
const NAME_SHOWN: usize = 48;
/// Characters of another text that a row has.
const TEXT_SHOWN: usize = 24;
/// Characters of the end of a server's name in a row.
const SERVER_SHOWN: usize = 12;
/// Transports, versions or servers that have a link.
const FILTERS_OF_A_KIND: usize = 6;
