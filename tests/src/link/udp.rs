//! The UDP part of a link: one socket for all agents and, like a NAT, one socket towards the server
//! for each of them.

use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::counters::Count;
use super::decide::PacketDecider;
use super::impairment::Impairment;
use super::{lock, spawn};

/// The UDP part of a link.
pub(super) struct Udp {
    pub(super) up: Arc<UdpDirection>,
    pub(super) down: Arc<UdpDirection>,
    flows: Arc<Flows>,
}

/// One direction: its decider, and the datagrams in flight.
pub(super) struct UdpDirection {
    state: Mutex<State>,
    /// Notified when a datagram arrives that is due before all others.
    earlier: Notify,
    exit: Exit,
}

struct State {
    decider: PacketDecider,
    queued: BinaryHeap<QueuedDatagram>,
    queued_bytes: usize,
    serial: u64,
}

/// A datagram in flight, from or to this agent.
struct QueuedDatagram {
    due: Instant,
    serial: u64,
    agent: SocketAddr,
    payload: Box<[u8]>,
}

enum Exit {
    Server(Arc<Flows>),
    Agents(Arc<UdpSocket>),
}

/// The table of the NAT.
struct Flows {
    down: Arc<UdpDirection>,
    table: Mutex<Table>,
}

struct Table {
    /// Server of new flows; `None` drops them.
    server: Option<SocketAddr>,
    source: IpAddr,
    flows: HashMap<SocketAddr, Flow>,
}

struct Flow {
    server: SocketAddr,
    socket: Arc<UdpSocket>,
    used: Instant,
    _answers: AbortOnDropHandle<()>,
}

impl Udp {
    /// Relays between `front` and the server's address, in tasks of `tasks`.
    pub(super) fn start(
        front: UdpSocket,
        server: SocketAddr,
        source: IpAddr,
        deciders: (PacketDecider, PacketDecider),
        tasks: &mut JoinSet<()>,
    ) -> Self {
        let front = Arc::new(front);
        let down = Arc::new(UdpDirection::new(deciders.1, Exit::Agents(front.clone())));
        let flows = Arc::new(Flows {
            down: down.clone(),
            table: Mutex::new(Table {
                server: Some(server),
                source,
                flows: HashMap::new(),
            }),
        });
        let up = Arc::new(UdpDirection::new(deciders.0, Exit::Server(flows.clone())));
        tasks.spawn(receive(front, up.clone(), Origin::Agents));
        tasks.spawn(deliver(up.clone()));
        tasks.spawn(deliver(down.clone()));
        Self { up, down, flows }
    }

    /// Removes the ports. Datagrams that the server still sends to them are lost.
    pub(super) fn rebind(&self) {
        lock(&self.flows.table).flows.clear();
    }

    pub(super) fn move_to(&self, source: IpAddr) {
        let mut table = lock(&self.flows.table);
        table.source = source;
        table.flows.clear();
    }

    /// Sends new flows to another server, or drops them.
    pub(super) fn lead_to(&self, server: Option<SocketAddr>) {
        lock(&self.flows.table).server = server;
    }

    pub(super) fn flows(&self) -> usize {
        lock(&self.flows.table).flows.len()
    }
}

impl UdpDirection {
    fn new(decider: PacketDecider, exit: Exit) -> Self {
        Self {
            state: Mutex::new(State {
                decider,
                queued: BinaryHeap::new(),
                queued_bytes: 0,
                serial: 0,
            }),
            earlier: Notify::new(),
            exit,
        }
    }

    pub(super) fn set(&self, impairment: Impairment) {
        lock(&self.state).decider.set(impairment);
    }

    pub(super) fn count(&self) -> Count {
        lock(&self.state).decider.count
    }

    async fn take(&self, agent: SocketAddr, payload: &mut [u8]) {
        for _ in 0..self.admit(agent, payload) {
            self.send(agent, payload).await;
        }
    }

    /// Decides on a datagram and queues copies that are due later. Returns how many copies to send
    /// at once.
    fn admit(&self, agent: SocketAddr, payload: &mut [u8]) -> usize {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let Some(delivery) = state.decider.datagram(now, payload.len()) else {
            return 0;
        };
        if let Some(bit) = delivery.flip
            && let Some(byte) = payload.get_mut(bit / 8)
        {
            *byte ^= 1 << (bit % 8);
        }
        let mut at_once = 0;
        for due in [Some(delivery.due), delivery.again].into_iter().flatten() {
            if due <= now {
                at_once += 1;
            } else if state.hold(due, agent, payload) {
                self.earlier.notify_one();
            }
        }
        at_once
    }

    async fn send(&self, agent: SocketAddr, payload: &[u8]) {
        let sent = match &self.exit {
            Exit::Server(flows) => flows.send(agent, payload).await,
            Exit::Agents(front) => front.send_to(payload, agent).await,
        };
        let count = &mut lock(&self.state).decider.count;
        match sent {
            Ok(_) => count.forwarded.add(payload.len()),
            Err(_) => count.dropped.add(payload.len()),
        }
    }
}

impl State {
    /// Queues a datagram and returns whether it is due first.
    fn hold(&mut self, due: Instant, agent: SocketAddr, payload: &[u8]) -> bool {
        if self.queued_bytes + payload.len() > QUEUED_BYTES_MAX {
            self.decider.count.dropped.add(payload.len());
            self.decider.count.overflowed += 1;
            return false;
        }
        let first = self.queued.peek().is_none_or(|queued| due < queued.due);
        self.queued_bytes += payload.len();
        self.serial += 1;
        self.queued.push(QueuedDatagram {
            due,
            serial: self.serial,
            agent,
            payload: payload.into(),
        });
        first
    }

    /// Returns the next datagram that is due, or when to ask again.
    fn next(&mut self, now: Instant) -> Result<QueuedDatagram, Option<Instant>> {
        loop {
            match self.queued.peek() {
                None => return Err(None),
                Some(queued) if queued.due > now => return Err(Some(queued.due)),
                Some(_) => {}
            }
            let Some(queued) = self.queued.pop() else {
                return Err(None);
            };
            self.queued_bytes -= queued.payload.len();
            if !self.decider.impairment().black_hole {
                return Ok(queued);
            }
            self.decider.count.dropped.add(queued.payload.len());
        }
    }
}

impl Flows {
    async fn send(&self, agent: SocketAddr, payload: &[u8]) -> io::Result<usize> {
        let (socket, server) = self.socket(agent)?;
        socket.send_to(payload, server).await
    }

    fn socket(&self, agent: SocketAddr) -> io::Result<(Arc<UdpSocket>, SocketAddr)> {
        let now = Instant::now();
        let mut table = lock(&self.table);
        if let Some(flow) = table.flows.get_mut(&agent) {
            flow.used = now;
            return Ok((flow.socket.clone(), flow.server));
        }
        let server = table.server.ok_or(io::ErrorKind::HostUnreachable)?;
        if table.flows.len() >= MOST_FLOWS {
            let oldest = table.flows.iter().min_by_key(|(_, flow)| flow.used);
            if let Some(oldest) = oldest.map(|(agent, _)| *agent) {
                table.flows.remove(&oldest);
            }
        }
        let socket = Arc::new(bind(SocketAddr::new(table.source, 0))?);
        let origin = Origin::Server { agent, server };
        let flow = Flow {
            server,
            socket: socket.clone(),
            used: now,
            _answers: spawn(receive(socket.clone(), self.down.clone(), origin)),
        };
        table.flows.insert(agent, flow);
        Ok((socket, server))
    }
}

/// The sender of the datagrams that a socket receives.
enum Origin {
    Agents,
    Server {
        agent: SocketAddr,
        server: SocketAddr,
    },
}

async fn receive(socket: Arc<UdpSocket>, direction: Arc<UdpDirection>, origin: Origin) {
    let mut buffer = vec![0; LARGEST_DATAGRAM];
    loop {
        let Ok((len, peer)) = socket.recv_from(&mut buffer).await else {
            sleep(AFTER_ERROR).await;
            continue;
        };
        let agent = match origin {
            Origin::Agents => peer,
            Origin::Server { agent, server } if peer == server => agent,
            Origin::Server { .. } => continue,
        };
        direction.take(agent, &mut buffer[..len]).await;
    }
}

/// Sends queued datagrams when they are due.
async fn deliver(direction: Arc<UdpDirection>) {
    loop {
        let next = lock(&direction.state).next(Instant::now());
        match next {
            Ok(queued) => direction.send(queued.agent, &queued.payload).await,
            Err(None) => direction.earlier.notified().await,
            Err(Some(due)) => {
                tokio::select! {
                    () = direction.earlier.notified() => {}
                    () = sleep_until(due) => {}
                }
            }
        }
    }
}

/// Binds a socket that loses nothing by itself as long as the relay keeps up.
pub(super) fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    socket.set_recv_buffer_size(BUFFER_BYTES)?;
    socket.set_send_buffer_size(BUFFER_BYTES)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

impl Ord for QueuedDatagram {
    /// Orders the datagram that is due first as the greatest, as `BinaryHeap` requires.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.serial).cmp(&(self.due, self.serial))
    }
}

impl PartialOrd for QueuedDatagram {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuedDatagram {
    fn eq(&self, other: &Self) -> bool {
        self.serial == other.serial
    }
}

impl Eq for QueuedDatagram {}

/// Maximum payload of an IP packet.
const LARGEST_DATAGRAM: usize = 65535;
/// A burst of 3000 full packets. More is not available without privileges.
const BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// A second at 500 Mbit/s.
const QUEUED_BYTES_MAX: usize = 64 * 1024 * 1024;
/// More agents than a test has, fewer sockets than a process may have.
const MOST_FLOWS: usize = 4096;
/// A socket that only fails must not occupy the processor.
const AFTER_ERROR: Duration = Duration::from_millis(1);
