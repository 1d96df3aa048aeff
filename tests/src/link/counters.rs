//! Counters of a link.

/// The traffic of a link since its start, and its current state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Counts of UDP datagrams.
    pub udp: DirectionCounts,
    /// Pieces of TCP connections, as read by the link.
    pub tcp: DirectionCounts,
    /// Agents' UDP addresses that have a port towards the server.
    pub udp_flows: usize,
    /// TCP connections accepted from agents and still open.
    pub tcp_live: u64,
    /// TCP connections ever accepted from agents.
    pub tcp_total: u64,
}

/// The counts of both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DirectionCounts {
    /// From agents to the server.
    pub up: Count,
    /// From the server to agents.
    pub down: Count,
}

/// One direction of one protocol. Each received packet and each duplicate is `forwarded`, `dropped`
/// or still queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    pub received: Tally,
    /// Forwarded packets, including duplicates.
    pub forwarded: Tally,
    /// Packets dropped for any reason.
    pub dropped: Tally,
    /// Packets lost by `loss` or `burst`. Datagrams are in `dropped` too; pieces of TCP connections
    /// were only delayed.
    pub lost: u64,
    /// Packets above the size cap; in `dropped` too.
    pub too_big: u64,
    /// Packets that arrived at a full queue; in `dropped` too.
    pub overflowed: u64,
    pub duplicated: u64,
    /// Packets sent with a flipped bit.
    pub corrupted: u64,
    /// Packets delayed so that later ones overtake them.
    pub reordered: u64,
}

/// A number of packets and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Datagrams, or pieces of TCP connections.
    pub packets: u64,
    /// Number of payload bytes.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: usize) {
        self.packets += 1;
        self.bytes += bytes as u64;
    }
}
