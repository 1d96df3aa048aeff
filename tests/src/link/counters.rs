//! What a link has seen and done.

/// What a link has seen and done since its start, and what it holds at this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams.
    pub udp: DirectionCounts,
    /// Pieces of TCP connections, as the link read them.
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

/// One direction of one protocol. `received` and the duplicates are `forwarded`, `dropped` or still held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// What came.
    pub received: Tally,
    /// What was sent on, with duplicates.
    pub forwarded: Tally,
    /// What vanished for whatever reason.
    pub dropped: Tally,
    /// Taken by `loss` or `burst`: datagrams are in `dropped` too, pieces of TCP connections were only held back.
    pub lost: u64,
    /// Above the size cap; in `dropped` too.
    pub too_big: u64,
    /// Came to a full queue; in `dropped` too.
    pub overflowed: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Sent with a flipped bit.
    pub corrupted: u64,
    /// Held back for later ones to overtake.
    pub reordered: u64,
}

/// A number of packets and the bytes in them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Datagrams, or pieces of TCP connections.
    pub packets: u64,
    /// Their payload.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: usize) {
        self.packets += 1;
        self.bytes += bytes as u64;
    }
}
