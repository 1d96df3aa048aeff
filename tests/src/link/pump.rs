//! One direction of one TCP connection: forwards bytes, the end and a reset, each when it is due.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::counters::Count;
use super::decide::{PacketDecider, TcpParams};
use super::impairment::Impairment;
use super::lock;

/// One direction, shared by all connections.
#[derive(Debug)]
pub(super) struct TcpDirection {
    decider: Mutex<PacketDecider>,
    changes: watch::Sender<()>,
}

/// One of the two sockets of a connection.
pub(super) struct End {
    stream: TcpStream,
    /// A write has failed. That failure may have been the only report of the reset.
    gone: AtomicBool,
    gone_notify: Notify,
}

/// The end of a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The end has been forwarded.
    Fin,
    /// A reset is to be forwarded.
    Reset,
}

impl TcpDirection {
    pub(super) fn new(decider: PacketDecider) -> Self {
        Self {
            decider: Mutex::new(decider),
            changes: watch::Sender::new(()),
        }
    }

    pub(super) fn set(&self, impairment: Impairment) {
        lock(&self.decider).set(impairment);
        self.changes.send_replace(());
    }

    pub(super) fn count(&self) -> Count {
        lock(&self.decider).count
    }

    /// Waits until the direction is not frozen.
    pub(super) async fn thawed(&self) {
        let mut changes = self.changes.subscribe();
        while self.tcp_params().frozen {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn tcp_params(&self) -> TcpParams {
        lock(&self.decider).tcp_params()
    }
}

impl End {
    /// Takes the socket. Dropping the value resets the connection, so that the peer never takes a
    /// cut for a clean end.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_zero_linger()?;
        Ok(Self {
            stream,
            gone: AtomicBool::new(false),
            gone_notify: Notify::new(),
        })
    }

    /// Lets the kernel deliver the written data and close.
    pub(super) fn close(self) -> io::Result<()> {
        SockRef::from(&self.stream).set_linger(None)
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    fn mark_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.gone_notify.notify_one();
    }

    /// Waits until this end has reset its connection, even if nothing is read from it.
    async fn reset(&self) {
        loop {
            if self.is_gone() {
                return;
            }
            tokio::select! {
                () = self.gone_notify.notified() => {}
                ready = self.stream.ready(Interest::ERROR) => {
                    if !ready.is_ok_and(|ready| !ready.is_error()) {
                        return;
                    }
                }
            }
        }
    }
}

/// Forwards both directions until both have ended or one was reset.
pub(super) async fn carry(
    agent: &End,
    server: &End,
    up: &TcpDirection,
    down: &TcpDirection,
) -> Ended {
    let mut upwards = Box::pin(pump(agent, server, up));
    let mut downwards = Box::pin(pump(server, agent, down));
    let (first, second, quiet, direction) = tokio::select! {
        ended = &mut upwards => (ended, downwards, agent, up),
        ended = &mut downwards => (ended, upwards, server, down),
    };
    if first == Ended::Reset {
        return Ended::Reset;
    }
    // An end that has closed its direction can still reset the other one.
    let quiet_resets = async {
        quiet.reset().await;
        direction.thawed().await;
        Ended::Reset
    };
    tokio::select! {
        ended = second => ended,
        ended = quiet_resets => ended,
    }
}

async fn pump(from: &End, to: &End, direction: &TcpDirection) -> Ended {
    let mut changes = direction.changes.subscribe();
    let mut queue = Queue::new(direction);
    let mut buffer = vec![0; LARGEST_READ];
    let mut read_to_end = false;
    loop {
        changes.mark_unchanged();
        let tcp_params = direction.tcp_params();
        let open = !tcp_params.frozen;
        let now = Instant::now();
        let due = queue.due().unwrap_or(now);
        let waits = !queue.items.is_empty();
        let has_room = queue.bytes < tcp_params.hold;
        tokio::select! {
            biased;
            _ = changes.changed() => {}
            _ = to.stream.writable(), if open && waits && due <= now => {
                match queue.pass_on(&to.stream, now) {
                    Ok(None) => {}
                    Ok(Some(ended)) => return ended,
                    Err(_) => {
                        // The peer reads no more. The other direction reports the reset when its
                        // state lets the reset pass.
                        to.mark_gone();
                        return std::future::pending().await;
                    }
                }
            }
            () = sleep_until(due), if open && waits && due > now => {}
            _ = from.stream.readable(), if open && !read_to_end && has_room => {
                let wanted = &mut buffer[..tcp_params.piece.min(LARGEST_READ)];
                let item = match from.stream.try_read(wanted) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Ok(0) if !from.is_gone() => Item::Fin,
                    Ok(0) | Err(_) => Item::Reset,
                    Ok(len) => {
                        queue.push_bytes(&wanted[..len]);
                        continue;
                    }
                };
                read_to_end = true;
                queue.push(Instant::now() + tcp_params.delay, item);
            }
            () = from.reset(), if open && !read_to_end && !has_room => return Ended::Reset,
        }
    }
}

/// Data that was read and not yet forwarded, in order.
struct Queue<'a> {
    direction: &'a TcpDirection,
    items: VecDeque<(Instant, Item)>,
    bytes: usize,
}

enum Item {
    /// A piece, and how much of it has been forwarded.
    Bytes(Box<[u8]>, usize),
    Fin,
    Reset,
}

impl<'a> Queue<'a> {
    fn new(direction: &'a TcpDirection) -> Self {
        Self {
            direction,
            items: VecDeque::new(),
            bytes: 0,
        }
    }

    fn due(&self) -> Option<Instant> {
        self.items.front().map(|(due, _)| *due)
    }

    fn push_bytes(&mut self, bytes: &[u8]) {
        let due = lock(&self.direction.decider).piece(Instant::now(), bytes.len());
        self.bytes += bytes.len();
        self.push(due, Item::Bytes(bytes.into(), 0));
    }

    fn push(&mut self, due: Instant, item: Item) {
        self.items.push_back((due, item));
    }

    /// Writes the data that is due and fits. Returns the end of the direction once that is
    /// forwarded.
    fn pass_on(&mut self, to: &TcpStream, now: Instant) -> io::Result<Option<Ended>> {
        while let Some((due, item)) = self.items.front_mut() {
            if *due > now {
                break;
            }
            match item {
                Item::Fin => {
                    SockRef::from(to).shutdown(Shutdown::Write)?;
                    return Ok(Some(Ended::Fin));
                }
                Item::Reset => return Ok(Some(Ended::Reset)),
                Item::Bytes(bytes, done) => {
                    let written = match to.try_write(&bytes[*done..]) {
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        written => written?,
                    };
                    *done += written;
                    let is_complete = *done == bytes.len();
                    self.bytes -= written;
                    let forwarded = &mut lock(&self.direction.decider).count.forwarded;
                    forwarded.bytes += written as u64;
                    if is_complete {
                        forwarded.packets += 1;
                        self.items.pop_front();
                    }
                }
            }
        }
        Ok(None)
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        let pieces = self.items.iter();
        let pieces = pieces.filter(|(_, item)| matches!(item, Item::Bytes(..)));
        let dropped = &mut lock(&self.direction.decider).count.dropped;
        dropped.packets += pieces.count() as u64;
        dropped.bytes += self.bytes as u64;
    }
}

/// No smaller than the largest piece of a `PacketDecider`.
const LARGEST_READ: usize = 64 * 1024;
