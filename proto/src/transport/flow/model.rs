//! Random sessions against a model of the transports: what peers have sent unread never exceeds
//! what is reserved, and reservations never exceed the pool.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::test_transport::TestTransport;
use super::*;

const WINDOW: u64 = 512 << 10;
const PERCENT: u64 = 150;

/// The receiving end of a transport with a peer that sends as much as it may. Credit works as in
/// quinn's `set_receive_window` and `add_read_credits`.
#[derive(Debug)]
struct Transport {
    window: u64,
    excess: u64,
    unread: u64,
}

impl Transport {
    fn set_window(&mut self, window: u64) {
        self.excess += self.window.saturating_sub(window);
        self.window = window;
    }

    /// Returns the bytes that the peer may send now.
    fn sendable(&self) -> u64 {
        (self.window + self.excess).saturating_sub(self.unread)
    }

    fn read(&mut self, bytes: u64) {
        self.unread -= bytes;
        self.excess = self.excess.saturating_sub(bytes);
    }
}

struct ModelStream {
    read_monitor: Arc<ReadMonitor>,
    unread: u64,
}

struct ModelSession {
    flow: Arc<SessionFlow>,
    transport: Arc<Mutex<Transport>>,
    streams: Vec<ModelStream>,
    peer_opens: bool,
}

impl ModelSession {
    fn new(pool: &Arc<BufferPool>, peer_opens: bool) -> Self {
        let transport = Arc::new(Mutex::new(Transport {
            window: BASE_WINDOW,
            excess: 0,
            unread: 0,
        }));
        let settings = FlowSettings {
            stream_window: StreamWindow::fixed(u32::try_from(WINDOW).unwrap()),
            memory_percent: PERCENT,
            peer_opens,
        };
        let set = transport.clone();
        let set_windows = move |windows: ReceiveWindows| {
            set.lock().set_window(windows.connection);
        };
        let flow = pool.session(settings, TestTransport::new(set_windows));
        Self {
            flow,
            transport,
            streams: Vec::new(),
            peer_opens,
        }
    }

    fn act(&mut self, random: &mut SmallRng) {
        let index = random.random_range(0..self.streams.len().max(1));
        match random.random_range(0..10) {
            0..3 => self.open(),
            3 if index < self.streams.len() => {
                // The rest of the stream is discarded.
                let ended = self.streams.swap_remove(index);
                self.transport.lock().read(ended.unread);
            }
            4..7 => {
                let Some(stream) = self.streams.get_mut(index) else {
                    return;
                };
                let mut transport = self.transport.lock();
                let room = (WINDOW - stream.unread).min(transport.sendable());
                let sent = room - random.random_range(0..=room) / 4;
                stream.unread += sent;
                transport.unread += sent;
            }
            _ => {
                let Some(stream) = self.streams.get_mut(index) else {
                    return;
                };
                let read = random.random_range(0..=stream.unread);
                stream.unread -= read;
                self.transport.lock().read(read);
                stream.read_monitor.end_read();
                stream
                    .read_monitor
                    .count_read(usize::try_from(read).unwrap());
            }
        }
    }

    fn open(&mut self) {
        let read_monitor = if self.peer_opens {
            Some(self.flow.accept()).filter(|_| self.flow.has_room())
        } else {
            self.flow.has_room().then(|| self.flow.open(0)).flatten()
        };
        self.streams
            .extend(read_monitor.map(|read_monitor| ModelStream {
                read_monitor,
                unread: 0,
            }));
    }

    /// Returns the memory that unread bytes pin, and that they could pin.
    fn check(&self) -> u64 {
        let transport = self.transport.lock();
        let reserved = self.flow.lock().reserved;
        let sendable = transport.window + transport.excess;
        let can_arrive = if self.peer_opens && !self.streams.is_empty() {
            sendable
        } else if self.peer_opens {
            transport.window - BASE_WINDOW
        } else {
            sendable.min(self.streams.len() as u64 * WINDOW)
        };
        let pinned = can_arrive * PERCENT / 100;
        assert!(pinned <= reserved, "{pinned} of {reserved}: {transport:?}");
        transport.unread * PERCENT / 100
    }
}

#[tokio::test(start_paused = true)]
async fn unread_bytes_never_exceed_reservations_nor_these_the_pool() {
    for seed in 0..60 {
        let mut random = SmallRng::seed_from_u64(seed);
        // Only the larger pools have first windows of another size.
        let unit = random.random_range(20..25);
        let pool = BufferPool::new(random.random_range(1..16) << unit);
        let mut sessions: Vec<_> = (0..12)
            .map(|number| ModelSession::new(&pool, number % 4 == 0))
            .collect();
        let mut most = 0;
        for step in 0..4000 {
            let index = random.random_range(0..sessions.len());
            sessions[index].act(&mut random);
            if step % 16 == 0 {
                pool.sample();
            }
            if random.random_range(0..500) == 0 {
                sessions[index] = ModelSession::new(&pool, index % 4 == 0);
            }
            let pinned: u64 = sessions.iter().map(ModelSession::check).sum();
            let reserved: u64 = sessions
                .iter()
                .map(|session| session.flow.lock().reserved)
                .sum();
            assert_eq!(reserved, pool.reserved(), "seed {seed}, step {step}");
            assert!(reserved <= pool.limit(), "seed {seed}, step {step}");
            assert!(pinned <= reserved, "seed {seed}, step {step}");
            most = most.max(pinned);
        }
        assert!(most > 256 << 10, "seed {seed}: peers have sent {most} only");
        drop(sessions);
        assert_eq!(pool.reserved(), 0);
    }
}
