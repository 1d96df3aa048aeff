//! The impairments of a link, as plain values.

use std::time::Duration;

/// A part of a link: a protocol and a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrafficClass {
    /// UDP, TCP or both.
    pub protocol: Protocol,
    /// Towards the server, towards the agents, or both.
    pub direction: Direction,
}

/// The protocols that a link carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Udp,
    Tcp,
    Both,
}

/// The directions of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From agents to the server.
    Up,
    /// From the server to agents.
    Down,
    Both,
}

impl TrafficClass {
    /// All traffic of the link.
    pub const ALL: Self = Self::of(Protocol::Both);
    /// UDP in both directions.
    pub const UDP: Self = Self::of(Protocol::Udp);
    /// TCP in both directions.
    pub const TCP: Self = Self::of(Protocol::Tcp);

    const fn of(protocol: Protocol) -> Self {
        Self {
            protocol,
            direction: Direction::Both,
        }
    }

    /// Returns this protocol in the direction of the server only.
    pub const fn up(self) -> Self {
        Self {
            direction: Direction::Up,
            ..self
        }
    }

    /// Returns this protocol in the direction of the agents only.
    pub const fn down(self) -> Self {
        Self {
            direction: Direction::Down,
            ..self
        }
    }

    /// Returns whether this class includes the given protocol and direction.
    pub fn covers(self, protocol: Protocol, direction: Direction) -> bool {
        (self.protocol == Protocol::Both || self.protocol == protocol)
            && (self.direction == Direction::Both || self.direction == direction)
    }
}

/// The impairment of one direction of a link. The default is clean: all packets pass at once, in
/// order.
///
/// Shares are from 0 (never) to 1 (always). The link decides on a packet when the packet arrives,
/// in the order of the fields here: a black hole comes before a cap, a cap before loss, loss before
/// the rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Impairment {
    /// Nothing passes. Datagrams vanish, including those in flight. A TCP connection freezes: both
    /// of its sockets stay open, but no byte, end or reset passes in this direction. New TCP
    /// connections are accepted and hang while either direction is frozen. Frozen data passes after
    /// the freeze. The kernel's buffers accept some bytes of a frozen connection, so its sender
    /// observes a peer with a closed window, not one that acknowledges nothing.
    pub black_hole: bool,
    /// Datagrams with a larger payload vanish. UDP only.
    pub size_cap: Option<usize>,
    /// Share of packets that are lost. A lost datagram vanishes. TCP repairs losses, so a loss
    /// there costs time: data read with a lost segment (1460 bytes) waits for
    /// [`Impairment::RETRANSMISSION`] more, and all later data of its connection waits for it.
    pub loss: f64,
    /// Share of datagrams in which one random bit is flipped. UDP only.
    pub corrupt: f64,
    /// Share of datagrams that arrive twice. UDP only.
    pub duplicate: f64,
    /// Bytes per second in this direction, for all connections and datagrams of the protocol
    /// together.
    pub rate: Option<u64>,
    /// Maximum number of queued bytes. With a `rate`, datagrams that find a longer queue vanish,
    /// and a TCP connection queues `rate * delay + queue` before it accepts no more; without a
    /// rate, a TCP connection queues `queue`. `None` is 256 KiB with a rate, and 4 MiB without one.
    pub queue: Option<usize>,
    /// Delay of all data except TCP's handshake, which the relay answers itself.
    pub delay: Duration,
    /// Share of datagrams that are delayed by `reorder_by`, so that later ones overtake them. UDP
    /// only.
    pub reorder: f64,
    /// Delay of reordered datagrams; 10 ms by default.
    pub reorder_by: Duration,
}

impl Default for Impairment {
    fn default() -> Self {
        Self {
            black_hole: false,
            size_cap: None,
            loss: 0.0,
            corrupt: 0.0,
            duplicate: 0.0,
            rate: None,
            queue: None,
            delay: Duration::ZERO,
            reorder: 0.0,
            reorder_by: REORDER_BY,
        }
    }
}

impl Impairment {
    /// Cost of a lost TCP segment: the shortest retransmission timeout of Linux.
    pub const RETRANSMISSION: Duration = Duration::from_millis(200);

    /// Returns an impairment in which nothing passes.
    pub fn black_hole() -> Self {
        Self {
            black_hole: true,
            ..Self::default()
        }
    }

    /// Returns an impairment that loses this share of the packets.
    pub fn lossy(share: f64) -> Self {
        Self::default().with_loss(share)
    }

    /// Returns an impairment that delays all packets.
    pub fn delayed(delay: Duration) -> Self {
        Self::default().with_delay(delay)
    }

    /// Returns an impairment in which larger datagrams vanish.
    pub fn capped(payload_bytes: usize) -> Self {
        Self::default().with_size_cap(payload_bytes)
    }

    /// Returns an impairment with this rate limit.
    pub fn limited(bytes_per_second: u64) -> Self {
        Self::default().with_rate(bytes_per_second)
    }

    pub fn with_size_cap(mut self, payload_bytes: usize) -> Self {
        self.size_cap = Some(payload_bytes);
        self
    }

    pub fn with_loss(mut self, share: f64) -> Self {
        self.loss = share;
        self
    }

    pub fn with_corrupt(mut self, share: f64) -> Self {
        self.corrupt = share;
        self
    }

    pub fn with_duplicate(mut self, share: f64) -> Self {
        self.duplicate = share;
        self
    }

    pub fn with_rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = Some(bytes_per_second);
        self
    }

    pub fn with_queue(mut self, bytes: usize) -> Self {
        self.queue = Some(bytes);
        self
    }

    pub fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets [`Impairment::reorder`] and [`Impairment::reorder_by`].
    pub fn with_reorder(mut self, share: f64, by: Duration) -> Self {
        self.reorder = share;
        self.reorder_by = by;
        self
    }

    /// Returns whether everything passes at once and unchanged.
    pub fn is_clean(&self) -> bool {
        *self
            == Self {
                queue: self.queue,
                reorder_by: self.reorder_by,
                ..Self::default()
            }
    }
}

/// Longer than the gap between packets of a busy sender, shorter than the timeout of its loss
/// detection.
const REORDER_BY: Duration = Duration::from_millis(10);
