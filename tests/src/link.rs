//! A relay between agents and a server on loopback that impairs traffic: a bad network that is
//! reproducible from its seed.
//!
//! A [`Link`] listens on one port number for UDP and TCP, so that an agent whose server is
//! [`Link::addr`] reaches the real server through it with either. The link needs no privileges.
//! Each direction of each protocol ([`TrafficClass`]) has an [`Impairment`], which [`Link::set`]
//! replaces at once.
//!
//! The treatment of the n-th datagram of a direction depends only on the seed, the direction, n and
//! the impairments up to that time. With several agents n counts the datagrams of all. TCP is
//! decided by segments of 1460 bytes, in pieces as the relay happens to read them, so a TCP replay
//! is only similar.
//!
//! ```no_run
//! # use std::net::SocketAddr;
//! # use std::time::Duration;
//! # use tunnel_tests::link::{Impairment, Link, TrafficClass};
//! # fn example(server: SocketAddr) -> std::io::Result<()> {
//! let link = Link::start(server, 7)?;
//! link.set(TrafficClass::UDP.up(), Impairment::lossy(0.05).with_delay(Duration::from_millis(20)));
//! link.rebind();
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

mod counters;
mod decide;
mod impairment;
mod pump;
mod tcp;
mod udp;

pub use counters::{Count, Counters, DirectionCounts, Tally};
pub use impairment::{Direction, Impairment, Protocol, TrafficClass};

use decide::PacketDecider;
use tcp::Tcp;
use udp::Udp;

/// A relay from one local address to one server. Dropping it closes its ports and resets its
/// connections.
pub struct Link {
    addr: SocketAddr,
    halves: Arc<Halves>,
    tasks: Mutex<JoinSet<()>>,
}

struct Halves {
    udp: Udp,
    tcp: Arc<Tcp>,
}

impl Link {
    /// Starts a clean link to the server's UDP and TCP port, from a free port of the loopback
    /// address. Must be called inside a tokio runtime.
    pub fn start(upstream: SocketAddr, seed: u64) -> io::Result<Self> {
        let (loopback, any): (IpAddr, IpAddr) = match upstream {
            SocketAddr::V4(_) => (Ipv4Addr::LOCALHOST.into(), Ipv4Addr::UNSPECIFIED.into()),
            SocketAddr::V6(_) => (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into()),
        };
        let mut server = upstream;
        if server.ip().is_unspecified() {
            server.set_ip(loopback);
        }
        let (front, listener) = bind(loopback)?;
        let addr = listener.local_addr()?;
        let mut tasks = JoinSet::new();
        let deciders = (PacketDecider::new(seed, 0), PacketDecider::new(seed, 1));
        let udp = Udp::start(front, server, any, deciders, &mut tasks);
        let deciders = (PacketDecider::new(seed, 2), PacketDecider::new(seed, 3));
        let tcp = Tcp::start(listener, server, any, deciders, &mut tasks);
        Ok(Self {
            addr,
            halves: Arc::new(Halves { udp, tcp }),
            tasks: Mutex::new(tasks),
        })
    }

    /// Returns the address where agents reach the server over UDP and TCP.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Replaces the impairment of the traffic class from the next packet on. Packets in flight keep
    /// their due time, except that a black hole also drops datagrams in flight.
    pub fn set(&self, class: TrafficClass, impairment: Impairment) {
        self.halves.set(class, &impairment);
    }

    /// Removes all impairments. Ports and addresses do not change.
    pub fn heal(&self) {
        self.halves.set(TrafficClass::ALL, &Impairment::default());
    }

    /// Rebinds the NAT (UDP). The ports towards the server are closed, and the next datagram of an
    /// agent opens a new one. Datagrams of the server to the old port are lost; those already
    /// received on it still arrive.
    pub fn rebind(&self) {
        self.halves.udp.rebind();
    }

    /// Moves to another local source address towards the server, of the server's family
    /// (`127.0.0.x`): UDP as in [`Link::rebind`], TCP with the next connections. With an address
    /// that the machine does not have, datagrams are dropped and connections reset.
    pub fn move_to(&self, source: IpAddr) {
        self.halves.udp.move_to(source);
        self.halves.tcp.move_to(source);
    }

    /// Sends new flows and connections to another server of the same family, or drops them.
    /// Existing flows and connections stay with their server, as behind a Service of a cluster.
    pub fn lead_to(&self, server: Option<SocketAddr>) {
        self.halves.udp.lead_to(server);
        self.halves.tcp.lead_to(server);
    }

    /// Resets all TCP connections towards both sides, including frozen ones.
    pub fn reset_tcp(&self) {
        self.halves.tcp.reset();
    }

    /// Passes the traffic class for `up_for` and loses all of it for `down_for`, so many times, in
    /// the background. The link ends working.
    pub fn flap(&self, class: TrafficClass, up_for: Duration, down_for: Duration, times: u32) {
        let halves = self.halves.clone();
        let mut next = Instant::now();
        lock(&self.tasks).spawn(async move {
            for _ in 0..times {
                next += up_for;
                sleep_until(next).await;
                halves.set(class, &Impairment::black_hole());
                next += down_for;
                sleep_until(next).await;
                halves.set(class, &Impairment::default());
            }
        });
    }

    /// Returns the counters. The counts of different directions are not taken at the same instant.
    pub fn counters(&self) -> Counters {
        let Halves { udp, tcp } = &*self.halves;
        Counters {
            udp: DirectionCounts {
                up: udp.up.count(),
                down: udp.down.count(),
            },
            tcp: DirectionCounts {
                up: tcp.up.count(),
                down: tcp.down.count(),
            },
            udp_flows: udp.flows(),
            tcp_live: tcp.live(),
            tcp_total: tcp.total(),
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Link")
            .field("addr", &self.addr)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Halves {
    fn set(&self, class: TrafficClass, impairment: &Impairment) {
        let Self { udp, tcp } = self;
        if class.covers(Protocol::Udp, Direction::Up) {
            udp.up.set(impairment.clone());
        }
        if class.covers(Protocol::Udp, Direction::Down) {
            udp.down.set(impairment.clone());
        }
        if class.covers(Protocol::Tcp, Direction::Up) {
            tcp.up.set(impairment.clone());
        }
        if class.covers(Protocol::Tcp, Direction::Down) {
            tcp.down.set(impairment.clone());
        }
    }
}

/// Binds one free port for both protocols.
fn bind(address: IpAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let mut tries = 0;
    loop {
        let front = udp::bind(SocketAddr::new(address, 0))?;
        match tcp::listen(front.local_addr()?) {
            Ok(listener) => return Ok((front, listener)),
            Err(error) if tries == BIND_TRIES => return Err(error),
            Err(_) => tries += 1,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
fn spawn(future: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(future))
}

/// Maximum number of tries. A port that is free for UDP is seldom taken for TCP.
const BIND_TRIES: u32 = 64;

#[cfg(test)]
mod tests;
