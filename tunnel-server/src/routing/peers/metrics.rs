//! Metrics of the connections to other servers.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_process::metrics::{count, set_gauge, with_series};

tunnel_process::label_values! {
    /// The state of the connection to another server.
    pub enum PeerState {
        /// This server can forward streams to it.
        Connected = "connected",
        /// There is no connection, and this server dials.
        Connecting = "connecting",
        /// The other server stops soon. Streams to its nodes are still forwarded.
        Leaving = "leaving",
    }
}

tunnel_process::label_values! {
    /// The direction of a forwarded stream.
    pub(super) enum ForwardDirection {
        /// Another server forwarded the stream to this one.
        In = "in",
        /// This server forwarded the stream.
        Out = "out",
    }
}

tunnel_process::label_values! {
    /// The result of forwarding a stream.
    pub(super) enum ForwardResult {
        /// The stream was opened, and not refused with `not_here` (out), or ended after it was
        /// relayed (in).
        Ok = "ok",
        /// The stream was cut while it was relayed.
        Cut = "cut",
        /// The server has no session of the node.
        NotHere = "not_here",
        /// A limit of streams was reached.
        TooManyStreams = "too_many_streams",
        /// The stream could not be opened.
        Failed = "failed",
    }
}

tunnel_process::label_values! {
    /// What became of a live session whose name another server claims.
    pub(super) enum YieldResult {
        /// The session was closed.
        Yielded = "yielded",
        /// The session stays, because ten sessions were closed in favor of that server within a
        /// minute.
        Limited = "limited",
    }
}

tunnel_process::label_sets! {
    StateLabel { state: PeerState }
    YieldLabel { result: YieldResult }
    ForwardLabels { direction: ForwardDirection, result: ForwardResult }
}

tunnel_process::metrics! {
    /// The metrics of the connections to other servers, and of the streams over them.
    struct Families {
        peers: Family<StateLabel, Gauge> = "peers",
            "Other servers of the installation by state of the connection to them",
            with_series(PeerState::ALL.iter().map(|&state| StateLabel { state }));
        forwarded: Family<ForwardLabels, Counter> = "forwarded_streams",
            "Streams between servers by direction and result; out: ok when opened, in: ok when \
             relayed to the end",
            with_series(forward_labels());
        yielded: Family<YieldLabel, Counter> = "yielded_sessions",
            "Live sessions whose name a live agent at another server has, too, by what became of them",
            with_series(YieldResult::ALL.iter().map(|&result| YieldLabel { result }));
        directory_nodes: Gauge = "directory_nodes",
            "Nodes whose agents are connected to other servers";
    }
}

/// The metrics of the connections to other servers. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct PeerMetrics(Families);

impl PeerMetrics {
    /// Registers the metrics under `tunnel_server_`.
    pub fn new(root: &mut Registry) -> Self {
        let registry = root.sub_registry_with_prefix("tunnel_server");
        Self(Families::register(registry))
    }

    pub(super) fn forwarded(&self, direction: ForwardDirection, result: ForwardResult) {
        self.counter(direction, result).inc();
    }

    pub(super) fn counter(&self, direction: ForwardDirection, result: ForwardResult) -> Counter {
        let labels = ForwardLabels { direction, result };
        Counter::clone(&self.0.forwarded.get_or_create(&labels))
    }

    pub(super) fn yielded(&self, result: YieldResult) {
        count(&self.0.yielded, &YieldLabel { result });
    }

    /// Records the number of servers in each state.
    pub(super) fn set_peers(&self, states: &[PeerState]) {
        for state in PeerState::ALL {
            let count = states.iter().filter(|other| **other == state).count();
            set_gauge(&self.0.peers.get_or_create(&StateLabel { state }), count);
        }
    }

    pub(super) fn set_directory_nodes(&self, nodes: usize) {
        set_gauge(&self.0.directory_nodes, nodes);
    }
}

/// Returns the labels of every result in both directions.
fn forward_labels() -> impl Iterator<Item = ForwardLabels> {
    let directions = ForwardDirection::ALL.iter();
    directions.flat_map(|&direction| {
        let results = ForwardResult::ALL.iter();
        results.map(move |&result| ForwardLabels { direction, result })
    })
}
