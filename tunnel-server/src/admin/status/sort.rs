//! The order of lists of nodes. Pure.

use std::cmp::Ordering;
use std::fmt;
use std::time::UNIX_EPOCH;

use super::NodeSummary;
use crate::admin::traffic::NodeTraffic;

tunnel_process::named! {
    /// What a list of nodes is sorted by. Nodes without the value are last, and equal ones are sorted by
    /// name.
    pub enum NodeSort: label, FromStr {
        /// The worst state first.
        State = "state",
        Name = "name",
        Transport = "transport",
        /// The longest round trip first.
        Rtt = "rtt",
        /// The most streams first.
        Streams = "streams",
        /// The highest throughput first.
        Traffic = "traffic",
        /// The most failed requests of the last hour first.
        Errors = "errors",
        /// The longest silence first.
        Seen = "seen",
        Server = "server",
        Version = "version",
    }
}

/// The order of a list, as in `rtt`, or `-rtt` for the other way around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListOrder {
    pub sort: NodeSort,
    pub is_reversed: bool,
}

impl Default for ListOrder {
    /// Returns the worst state first.
    fn default() -> Self {
        Self {
            sort: NodeSort::State,
            is_reversed: false,
        }
    }
}

impl ListOrder {
    /// Parses the name of an order.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (name, is_reversed) = match text.strip_prefix('-') {
            Some(name) => (name, true),
            None => (text, false),
        };
        let sort = name.parse().ok()?;
        Some(Self { sort, is_reversed })
    }

    /// Sorts keys. Those that are equal are in the order of their names.
    pub(crate) fn compare<A, B>(self, one: &SortKey<A>, other: &SortKey<B>) -> Ordering
    where
        A: AsRef<str>,
        B: AsRef<str>,
    {
        let order = (one.number.cmp(&other.number))
            .then_with(|| one.text.as_ref().cmp(other.text.as_ref()));
        let order = if self.is_reversed {
            order.reverse()
        } else {
            order
        };
        order.then_with(|| one.name.as_ref().cmp(other.name.as_ref()))
    }
}

impl fmt::Display for ListOrder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let minus = if self.is_reversed { "-" } else { "" };
        write!(formatter, "{minus}{}", self.sort.label())
    }
}

/// The position of a node in a list: by number, then by text, then by name. Its texts are those of the node
/// or its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SortKey<T = String> {
    number: u64,
    text: T,
    name: T,
}

impl NodeSort {
    pub(crate) fn key<'a>(
        self,
        node: &NodeSummary<'a>,
        traffic: Option<&NodeTraffic>,
    ) -> SortKey<&'a str> {
        let highest = |number: Option<u64>| number.map_or(u64::MAX, |number| u64::MAX - 1 - number);
        let text = |text: Option<&'a str>| {
            let missing = u64::from(text.is_none());
            (missing, text.unwrap_or_default())
        };
        let number = |number: u64| (number, "");
        let errors = traffic.map(|traffic| traffic.errors_last_hour);
        let (number, text) = match self {
            // Of the nodes in one state, those with the most errors are first.
            Self::State => {
                let errors = errors.unwrap_or_default().min(u32::MAX.into());
                number(((node.state() as u64 + 1) << 32) - errors)
            }
            Self::Name => number(0),
            Self::Transport => text(node.transport),
            Self::Rtt => number(highest(node.rtt_millis)),
            Self::Streams => number(highest(node.transport.map(|_| node.streams))),
            Self::Traffic => {
                let sum = |traffic: &NodeTraffic| {
                    traffic.bytes_in_per_second + traffic.bytes_out_per_second
                };
                number(highest(traffic.map(sum)))
            }
            Self::Errors => number(highest(errors)),
            Self::Seen => {
                let since_epoch = node
                    .last_seen
                    .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                number(since_epoch.map_or(u64::MAX, |since| since.as_secs()))
            }
            Self::Server => text(node.replica),
            Self::Version => text(node.version),
        };
        let name = node.name;
        SortKey { number, text, name }
    }
}

impl SortKey<&str> {
    /// Returns the key with texts of its own.
    pub(crate) fn to_owned(&self) -> SortKey {
        SortKey {
            number: self.number,
            text: self.text.to_owned(),
            name: self.name.to_owned(),
        }
    }
}

impl SortKey {
    pub(crate) fn into_name(self) -> String {
        self.name
    }
}
