//! A scripted resolver that records its queries.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// The response of a [`FakeResolver`] to queries.
#[derive(Debug, Clone, Copy)]
pub enum Behavior {
    /// Answers every name with this many addresses, `10.1.0.0` and on.
    Answers(u8),
    /// Answers with this code, without records.
    Says(ResponseCode),
    /// Reads queries and does not answer.
    Silent,
    /// Forwards to this address and returns its answer, as a cache would.
    Asks(SocketAddr),
}

/// A resolver on UDP and TCP that ends on drop.
#[derive(Debug)]
pub struct FakeResolver {
    address: SocketAddr,
    behavior: Arc<Mutex<Behavior>>,
    asked: Arc<Mutex<Vec<String>>>,
    ttl: Arc<AtomicU32>,
    _serving: AbortOnDropHandle<()>,
}

impl FakeResolver {
    /// Starts a resolver on a free loopback port.
    pub async fn start(behavior: Behavior) -> Result<Self> {
        for _ in 0..PORT_TRIES {
            let started = Self::start_on((Ipv4Addr::LOCALHOST, 0).into(), behavior).await;
            if started.is_ok() {
                return started;
            }
        }
        anyhow::bail!("no port is free for UDP and TCP")
    }

    pub async fn start_on(bind: SocketAddr, behavior: Behavior) -> Result<Self> {
        let udp = UdpSocket::bind(bind).await.context("bind UDP")?;
        let address = udp.local_addr()?;
        let tcp = TcpListener::bind(address).await.context("bind TCP")?;
        let behavior = Arc::new(Mutex::new(behavior));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let ttl = Arc::new(AtomicU32::new(60));
        let server = Serving {
            behavior: behavior.clone(),
            asked: asked.clone(),
            ttl: ttl.clone(),
        };
        #[expect(clippy::disallowed_methods, reason = "owned by the returned value")]
        let serving = tokio::spawn(async move {
            tokio::join!(server.datagrams(Arc::new(udp)), server.connections(tcp));
        });
        Ok(Self {
            address,
            behavior,
            asked,
            ttl,
            _serving: AbortOnDropHandle::new(serving),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the behavior for later queries.
    pub fn behave(&self, behavior: Behavior) {
        *self.behavior.lock().unwrap_or_else(PoisonError::into_inner) = behavior;
    }

    /// Sets the TTL of later answers in seconds, 60 at first.
    pub fn expire_after(&self, ttl: u32) {
        self.ttl.store(ttl, Ordering::Relaxed);
    }

    /// Returns all queried names in order, in lower case without a trailing dot.
    pub fn asked(&self) -> Vec<String> {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[derive(Clone)]
struct Serving {
    behavior: Arc<Mutex<Behavior>>,
    asked: Arc<Mutex<Vec<String>>>,
    ttl: Arc<AtomicU32>,
}

impl Serving {
    async fn datagrams(&self, socket: Arc<UdpSocket>) {
        let mut buffer = vec![0; 65_535];
        let mut answers = JoinSet::new();
        loop {
            let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
                continue;
            };
            let query = buffer.get(..length).unwrap_or_default().to_vec();
            let (server, socket) = (self.clone(), socket.clone());
            answers.spawn(async move {
                if let Some(answer) = server.answer(&query, DATAGRAM_MAX).await {
                    // A client that has gone needs no answer.
                    let _ = socket.send_to(&answer, client).await;
                }
            });
            while answers.try_join_next().is_some() {}
        }
    }

    async fn connections(&self, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let server = self.clone();
            connections.spawn(async move {
                // The client observes a failed connection.
                let _ = server.converse(stream).await;
            });
            while connections.try_join_next().is_some() {}
        }
    }

    async fn converse(&self, mut stream: TcpStream) -> Result<()> {
        loop {
            let mut query = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut query).await?;
            let Some(answer) = self.answer(&query, usize::from(u16::MAX)).await else {
                continue;
            };
            stream.write_u16(u16::try_from(answer.len())?).await?;
            stream.write_all(&answer).await?;
        }
    }

    async fn answer(&self, bytes: &[u8], limit: usize) -> Option<Vec<u8>> {
        let query = Message::from_vec(bytes).ok()?;
        let question = query.queries.first()?.clone();
        let name = question.name.to_ascii().to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name).to_owned();
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(name);
        let behavior = *self.behavior.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, code) = match behavior {
            Behavior::Silent => return None,
            Behavior::Asks(other) => return relay(bytes, other).await,
            Behavior::Says(code) => (0, code),
            Behavior::Answers(count) => (count, ResponseCode::NoError),
        };
        let mut answer = Message::error_msg(query.metadata.id, OpCode::Query, code);
        answer.metadata.recursion_available = true;
        for number in 0..count {
            let owner: Name = question.name.clone();
            let data = RData::A(A::new(10, 1, 0, number));
            let ttl = self.ttl.load(Ordering::Relaxed);
            answer.add_answer(Record::from_rdata(owner, ttl, data));
        }
        answer.add_query(question);
        let encoded = answer.to_vec().ok()?;
        if encoded.len() <= limit {
            return Some(encoded);
        }
        answer.truncate().to_vec().ok()
    }
}

async fn relay(query: &[u8], other: SocketAddr) -> Option<Vec<u8>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.ok()?;
    socket.connect(other).await.ok()?;
    socket.send(query).await.ok()?;
    let mut answer = vec![0; 65_535];
    let length = timeout(RELAY, socket.recv(&mut answer)).await.ok()?.ok()?;
    answer.truncate(length);
    Some(answer)
}

/// Datagram size that every client accepts with EDNS.
const DATAGRAM_MAX: usize = 1232;
const RELAY: Duration = Duration::from_secs(2);
const PORT_TRIES: u32 = 16;
