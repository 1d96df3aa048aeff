//! Decides what happens to each packet of one direction: pure and deterministic for a seed.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::time::Instant;

use super::counters::Count;
use super::impairment::Impairment;

/// One direction of one protocol: its impairment, counters and random state.
#[derive(Debug)]
pub(super) struct PacketDecider {
    seed: u64,
    /// Number of decided datagrams and TCP segments, which is the next one's number.
    decided: u64,
    impairment: Impairment,
    clean: bool,
    /// Time at which the last admitted byte leaves the rate limit.
    free_at: Option<Instant>,
    /// Arrival of the last packet that is not reordered.
    last_due: Option<Instant>,
    pub(super) count: Count,
}

/// The delivery of a datagram that is not dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Delivery {
    /// Time at which the datagram leaves the link.
    pub(super) due: Instant,
    /// Time at which its duplicate leaves the link.
    pub(super) again: Option<Instant>,
    /// Index of the bit to flip.
    pub(super) flip: Option<usize>,
}

/// The current treatment of TCP connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TcpParams {
    /// Whether the black hole stops all data.
    pub(super) frozen: bool,
    /// Delay of an end or a reset.
    pub(super) delay: Duration,
    /// Maximum number of queued bytes.
    pub(super) hold: usize,
    /// Maximum number of bytes per read.
    pub(super) piece: usize,
}

/// The random numbers of one packet. All are drawn for each packet, so that a change to one
/// impairment does not change the effect of another.
struct Dice {
    loss: f64,
    corrupt: f64,
    bit: u64,
    duplicate: f64,
    reorder: f64,
}

impl PacketDecider {
    /// Creates a decider; `direction` distinguishes the deciders of one link.
    pub(super) fn new(seed: u64, direction: u64) -> Self {
        Self {
            seed: SmallRng::seed_from_u64(seed ^ direction.wrapping_mul(DIRECTION_STEP)).next_u64(),
            decided: 0,
            impairment: Impairment::default(),
            clean: true,
            free_at: None,
            last_due: None,
            count: Count::default(),
        }
    }

    /// Sets the impairment from the next packet on. Packets under the new impairment may overtake
    /// packets in flight.
    pub(super) fn set(&mut self, impairment: Impairment) {
        self.clean = impairment.is_clean();
        self.impairment = impairment;
        self.free_at = None;
        self.last_due = None;
    }

    pub(super) fn impairment(&self) -> &Impairment {
        &self.impairment
    }

    /// Decides on a datagram. Returns `None` if it is dropped.
    pub(super) fn datagram(&mut self, now: Instant, len: usize) -> Option<Delivery> {
        let number = self.next_number();
        self.count.received.add(len);
        if self.clean {
            return Some(Delivery {
                due: now,
                again: None,
                flip: None,
            });
        }
        let delivery = self.delivery(now, len, number);
        if delivery.is_none() {
            self.count.dropped.add(len);
        }
        delivery
    }

    fn delivery(&mut self, now: Instant, len: usize, number: u64) -> Option<Delivery> {
        if self.impairment.black_hole {
            return None;
        }
        if self.impairment.size_cap.is_some_and(|cap| len > cap) {
            self.count.too_big += 1;
            return None;
        }
        let dice = Dice::roll(self.seed, number);
        if dice.loss < self.impairment.loss {
            self.count.lost += 1;
            return None;
        }
        let Some(sent) = self.transmit_or_overflow(now, len) else {
            self.count.overflowed += 1;
            return None;
        };
        let due = self.arrival(sent, &dice);
        let flip = (dice.corrupt < self.impairment.corrupt && len > 0).then(|| {
            self.count.corrupted += 1;
            usize::try_from(dice.bit % (len as u64 * 8)).unwrap_or_default()
        });
        let again = (dice.duplicate < self.impairment.duplicate)
            .then(|| self.transmit_or_overflow(now, len))
            .flatten()
            .map(|sent| {
                self.count.duplicated += 1;
                due.max(sent + self.impairment.delay)
            });
        Some(Delivery { due, again, flip })
    }

    /// Returns when a piece of a TCP connection may be forwarded. Earlier pieces of its connection
    /// go first.
    pub(super) fn piece(&mut self, now: Instant, len: usize) -> Instant {
        self.count.received.add(len);
        let first = self.decided;
        self.decided += len.div_ceil(SEGMENT_BYTES) as u64;
        if self.clean {
            return now;
        }
        let sent = self.transmit(now, len);
        let lost = (first..self.decided)
            .any(|number| Dice::roll(self.seed, number).loss < self.impairment.loss);
        let repair = if lost {
            self.count.lost += 1;
            Impairment::RETRANSMISSION
        } else {
            Duration::ZERO
        };
        sent + self.impairment.delay + repair
    }

    /// Returns the treatment of TCP connections.
    pub(super) fn tcp_params(&self) -> TcpParams {
        let Impairment { rate, delay, .. } = self.impairment;
        let (under_way, piece) = match rate {
            None => (0, LARGEST_PIECE),
            Some(rate) => {
                let rate = usize::try_from(rate).unwrap_or(usize::MAX);
                let millis = usize::try_from(delay.as_millis()).unwrap_or(usize::MAX);
                let under_way = (rate / 1000).saturating_mul(millis);
                let piece = (rate / PIECES_PER_SECOND).clamp(SEGMENT_BYTES, LARGEST_PIECE);
                (under_way, piece)
            }
        };
        TcpParams {
            frozen: self.impairment.black_hole,
            delay,
            hold: self.queue().saturating_add(under_way),
            piece,
        }
    }

    fn next_number(&mut self) -> u64 {
        let number = self.decided;
        self.decided += 1;
        number
    }

    /// Returns when the rate limit releases the last byte, or `None` if the queue is full.
    fn transmit_or_overflow(&mut self, now: Instant, len: usize) -> Option<Instant> {
        if let (Some(rate), Some(free_at)) = (self.impairment.rate, self.free_at) {
            let waiting = free_at.saturating_duration_since(now);
            let room = time_for(self.queue(), rate);
            if !waiting.is_zero() && waiting + time_for(len, rate) > room {
                return None;
            }
        }
        Some(self.transmit(now, len))
    }

    fn transmit(&mut self, now: Instant, len: usize) -> Instant {
        let Some(rate) = self.impairment.rate else {
            return now;
        };
        let start = self.free_at.map_or(now, |free_at| free_at.max(now));
        let end = start + time_for(len, rate);
        self.free_at = Some(end);
        end
    }

    fn arrival(&mut self, sent: Instant, dice: &Dice) -> Instant {
        let in_order = self.last_due.map_or(sent, |last| last.max(sent));
        let due = in_order.max(sent + self.impairment.delay);
        if dice.reorder < self.impairment.reorder {
            self.count.reordered += 1;
            return due + self.impairment.reorder_by;
        }
        self.last_due = Some(due);
        due
    }

    fn queue(&self) -> usize {
        self.impairment.queue.unwrap_or(match self.impairment.rate {
            Some(_) => LIMITED_QUEUE,
            None => UNLIMITED_QUEUE,
        })
    }
}

impl Dice {
    /// Draws the numbers of one packet from a generator of its own, so that they do not depend on
    /// earlier packets.
    fn roll(seed: u64, number: u64) -> Self {
        let mut random =
            SmallRng::seed_from_u64(seed.wrapping_add(number.wrapping_mul(NUMBER_STEP)));
        Self {
            loss: random.random(),
            corrupt: random.random(),
            bit: random.random(),
            duplicate: random.random(),
            reorder: random.random(),
        }
    }
}

/// Returns the transmission time. A rate of zero is treated as one byte per second.
fn time_for(bytes: usize, rate: u64) -> Duration {
    let nanos = bytes as u128 * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Payload of a full TCP segment on Ethernet.
const SEGMENT_BYTES: usize = 1460;
/// Large enough that a read and a write cost little per byte.
const LARGEST_PIECE: usize = 64 * 1024;
/// With a rate limit, pieces are small enough for an even flow: one in 20 ms.
const PIECES_PER_SECOND: usize = 50;
/// Buffer of a home router.
const LIMITED_QUEUE: usize = 256 * 1024;
/// 40 MB/s over a delay of 100 ms.
const UNLIMITED_QUEUE: usize = 4 * 1024 * 1024;
/// Odd, and different from the step by which the generator itself expands a seed, since neighbors
/// would otherwise share numbers.
const NUMBER_STEP: u64 = 0xd134_2543_de82_ef95;
/// Any odd number with set bits in both halves.
const DIRECTION_STEP: u64 = 0xa24b_aed4_963e_e407;
