//! What a link does to the traffic that passes it, as plain values.

use std::time::Duration;

/// A part of a link: which protocol, and which direction of it.
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
    /// Datagrams.
    Udp,
    /// Connections.
    Tcp,
    /// Datagrams and connections.
    Both,
}

/// The directions of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From agents to the server.
    Up,
    /// From the server to agents.
    Down,
    /// Up and down.
    Both,
}

impl TrafficClass {
    /// The whole link.
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

    /// The same protocol, only towards the server.
    #[must_use]
    pub const fn up(self) -> Self {
        Self {
            direction: Direction::Up,
            ..self
        }
    }

    /// The same protocol, only towards the agents.
    #[must_use]
    pub const fn down(self) -> Self {
        Self {
            direction: Direction::Down,
            ..self
        }
    }

    /// Whether this part of the link includes that one.
    #[must_use]
    pub fn covers(self, protocol: Protocol, direction: Direction) -> bool {
        (self.protocol == Protocol::Both || self.protocol == protocol)
            && (self.direction == Direction::Both || self.direction == direction)
    }
}

/// The state of one way of a link. The default is a clean way: all passes at once, in order.
///
/// Shares are from 0 (never) to 1 (always). What happens to a packet is decided when it reaches the link, in the order
/// of the fields here: a black hole comes before a cap, a cap before loss, loss before the rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Impairment {
    /// Nothing passes. Datagrams vanish, also those that are under way. A TCP connection freezes: both of its sockets
    /// stay open, but no byte, end or reset passes this way. New TCP connections are accepted and hang while either
    /// direction is frozen; what was frozen passes after it. Some bytes of a frozen connection are taken by the
    /// kernel's buffers, so its sender sees a peer with a closed window, not one that acknowledges nothing.
    pub black_hole: bool,
    /// New TCP connections are reset at once when either direction refuses; others live on. Datagrams vanish.
    pub refuse: bool,
    /// Datagrams with a larger payload vanish. UDP only.
    pub size_cap: Option<usize>,
    /// Share of packets that are lost. A lost datagram vanishes. TCP repairs losses, so what a loss costs there is
    /// time: whatever was read with a lost segment (1460 bytes) waits for [`Impairment::RETRANSMISSION`] more, and all
    /// that follows in its connection waits behind it.
    pub loss: f64,
    /// Losses in bursts, besides `loss`.
    pub burst: Option<Burst>,
    /// Share of datagrams in which one random bit is flipped. UDP only.
    pub corrupt: f64,
    /// Share of datagrams that arrive twice. UDP only.
    pub duplicate: f64,
    /// Bytes per second that pass this way, all connections and datagrams of the protocol together.
    pub rate: Option<u64>,
    /// How many bytes wait. With a `rate`, datagrams that find more than that before them vanish, and a TCP connection
    /// holds `rate * delay + queue` before it takes no more; without one, a TCP connection holds `queue`. `None` is
    /// 256 KiB with a rate, and without one 4 MiB.
    pub queue: Option<usize>,
    /// How long everything is under way, except TCP's handshake, which the relay answers by itself.
    pub delay: Duration,
    /// A random part of this is added to the delay. It never changes the order.
    pub jitter: Duration,
    /// Share of datagrams that are held back by `reorder_by`, so that later ones overtake them. UDP only.
    pub reorder: f64,
    /// By how much; 10 ms unless set.
    pub reorder_by: Duration,
}

/// Losses in bursts (the model of Gilbert and Elliott): in its bad state a way loses everything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Chance, at each packet, that a burst begins with it.
    pub enter: f64,
    /// Chance, after each packet of a burst, that it was the last: bursts have `1 / leave` packets on average.
    pub leave: f64,
}

impl Default for Impairment {
    fn default() -> Self {
        Self {
            black_hole: false,
            refuse: false,
            size_cap: None,
            loss: 0.0,
            burst: None,
            corrupt: 0.0,
            duplicate: 0.0,
            rate: None,
            queue: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            reorder: 0.0,
            reorder_by: REORDER_BY,
        }
    }
}

impl Impairment {
    /// What a lost TCP segment costs: Linux' shortest retransmission timeout.
    pub const RETRANSMISSION: Duration = Duration::from_millis(200);

    /// Nothing passes.
    #[must_use]
    pub fn black_hole() -> Self {
        Self {
            black_hole: true,
            ..Self::default()
        }
    }

    /// New TCP connections are reset, datagrams vanish.
    #[must_use]
    pub fn refusing() -> Self {
        Self {
            refuse: true,
            ..Self::default()
        }
    }

    /// This share of the packets is lost.
    #[must_use]
    pub fn lossy(share: f64) -> Self {
        Self::default().with_loss(share)
    }

    /// Everything is under way for that long.
    #[must_use]
    pub fn delayed(delay: Duration) -> Self {
        Self::default().with_delay(delay)
    }

    /// Larger datagrams vanish.
    #[must_use]
    pub fn capped(payload_bytes: usize) -> Self {
        Self::default().with_size_cap(payload_bytes)
    }

    /// No more than that passes.
    #[must_use]
    pub fn limited(bytes_per_second: u64) -> Self {
        Self::default().with_rate(bytes_per_second)
    }

    /// Changes [`Impairment::size_cap`].
    #[must_use]
    pub fn with_size_cap(mut self, payload_bytes: usize) -> Self {
        self.size_cap = Some(payload_bytes);
        self
    }

    /// Changes [`Impairment::loss`].
    #[must_use]
    pub fn with_loss(mut self, share: f64) -> Self {
        self.loss = share;
        self
    }

    /// Changes [`Impairment::burst`].
    #[must_use]
    pub fn with_burst(mut self, enter: f64, leave: f64) -> Self {
        self.burst = Some(Burst { enter, leave });
        self
    }

    /// Changes [`Impairment::corrupt`].
    #[must_use]
    pub fn with_corrupt(mut self, share: f64) -> Self {
        self.corrupt = share;
        self
    }

    /// Changes [`Impairment::duplicate`].
    #[must_use]
    pub fn with_duplicate(mut self, share: f64) -> Self {
        self.duplicate = share;
        self
    }

    /// Changes [`Impairment::rate`].
    #[must_use]
    pub fn with_rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = Some(bytes_per_second);
        self
    }

    /// Changes [`Impairment::queue`].
    #[must_use]
    pub fn with_queue(mut self, bytes: usize) -> Self {
        self.queue = Some(bytes);
        self
    }

    /// Changes [`Impairment::delay`].
    #[must_use]
    pub fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Changes [`Impairment::jitter`].
    #[must_use]
    pub fn with_jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// Changes [`Impairment::reorder`] and [`Impairment::reorder_by`].
    #[must_use]
    pub fn with_reorder(mut self, share: f64, by: Duration) -> Self {
        self.reorder = share;
        self.reorder_by = by;
        self
    }

    /// Whether everything passes at once and unchanged.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self
            == Self {
                queue: self.queue,
                reorder_by: self.reorder_by,
                ..Self::default()
            }
    }
}

/// Longer than the gap between packets of a busy sender, shorter than the timeout of its loss detection.
const REORDER_BY: Duration = Duration::from_millis(10);
