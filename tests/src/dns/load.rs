//! Load on the embedded DNS: many records, a steady rate of queries, and the time of each answer.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::{addresses, query};
use crate::eventually::{eventually, scaled};
use crate::process::{Listener, ScratchDir, Server, ServerSetup};

/// A server process with many records.
#[derive(Debug)]
pub struct LoadedServer {
    /// Address of the server's DNS.
    pub address: SocketAddr,
    _process: Server,
}

impl LoadedServer {
    /// Starts a server with `names` names in its configuration: `n0`, `n1` and so on.
    ///
    /// # Panics
    /// Panics if the log does not contain the DNS address.
    pub async fn start(scratch: &ScratchDir, names: u32) -> Result<Self> {
        let mut file = "dnsRecords:\n".to_owned();
        for number in 0..names {
            writeln!(
                file,
                "- {{ name: n{number}, addresses: [{}] }}",
                address_of(number)
            )?;
        }
        let file = scratch.file("server.yaml", file)?;
        let mut server = ServerSetup::on_loopback(&scratch.path().join("data"))
            .args(&["--config", &file.to_string_lossy()])
            .args(&["--dns-listen", "127.0.0.1:0", "--dns-upstream", "off"])
            .start()
            .await?;
        let log = server.process().log().clone();
        let address = eventually("the address of the DNS listener", START, async || {
            log.lines()
                .iter()
                .find_map(|line| Listener::Dns.opened(line))
        })
        .await;
        Ok(Self {
            address,
            _process: server,
        })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub server: SocketAddr,
    pub names: u32,
    /// Queries per second of all clients together.
    pub per_second: u32,
    pub duration: Duration,
}

#[derive(Debug, Default)]
pub struct LoadReport {
    /// Number of queries sent.
    pub asked: usize,
    /// Queries without an answer within a second.
    pub lost: usize,
    pub wrong: usize,
    /// Response times of the correct answers, sorted.
    pub delays: Vec<Duration>,
}

impl Load {
    /// Sends queries from a few sockets, each with its share of the rate. Every name is queried in
    /// turn, and one query in ten is for a name that does not exist.
    pub async fn run(self) -> Result<LoadReport> {
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            clients.spawn(self.client(client));
        }
        let mut all = LoadReport::default();
        while let Some(found) = clients.join_next().await {
            let found = found.context("a client panicked")??;
            all.asked += found.asked;
            all.lost += found.lost;
            all.wrong += found.wrong;
            all.delays.extend(found.delays);
        }
        all.delays.sort_unstable();
        Ok(all)
    }

    async fn client(self, client: u32) -> Result<LoadReport> {
        let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
        socket.connect(self.server).await?;
        let per_tick = f64::from(self.per_second) * TICK.as_secs_f64() / f64::from(CLIENTS);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let began = Instant::now();
        let mut found = LoadReport::default();
        // Indexed by ID. At this rate an ID repeats long after its answer.
        let mut under_way: Vec<Option<(Instant, u32)>> = vec![None; 1 << 16];
        let (mut owed, mut next) = (0.0, client);
        let mut buffer = [0; 2048];
        loop {
            tokio::select! {
                biased;
                length = socket.recv(&mut buffer) => {
                    found.take(&buffer[..length?], &mut under_way)?;
                }
                _ = ticks.tick() => {
                    if began.elapsed() >= self.duration {
                        break;
                    }
                    owed += per_tick;
                    while owed >= 1.0 {
                        owed -= 1.0;
                        let number = if found.asked % 10 == 9 { u32::MAX } else { next % self.names };
                        next = next.wrapping_add(CLIENTS);
                        let mut message = query(&format!("n{number}"), RecordType::A)?;
                        let id = u16::try_from(found.asked & 0xffff)?;
                        message.metadata.id = id;
                        under_way[usize::from(id)] = Some((Instant::now(), number));
                        socket.send(&message.to_vec()?).await?;
                        found.asked += 1;
                    }
                }
            }
        }
        while let Ok(length) = timeout(scaled(LAST), socket.recv(&mut buffer)).await {
            found.take(&buffer[..length?], &mut under_way)?;
        }
        found.lost = found.asked - found.delays.len() - found.wrong;
        Ok(found)
    }
}

impl LoadReport {
    fn take(&mut self, bytes: &[u8], under_way: &mut [Option<(Instant, u32)>]) -> Result<()> {
        let answer = Message::from_vec(bytes)?;
        let slot = under_way.get_mut(usize::from(answer.metadata.id));
        let Some((began, number)) = slot.and_then(Option::take) else {
            return Ok(());
        };
        let is_right = if number == u32::MAX {
            answer.metadata.response_code == ResponseCode::NXDomain
        } else {
            addresses(&answer) == [IpAddr::V4(address_of(number))]
        };
        if is_right {
            self.delays.push(began.elapsed());
        } else {
            self.wrong += 1;
        }
        Ok(())
    }
}

fn address_of(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0a00_0000 + number)
}

const CLIENTS: u32 = 8;
const TICK: Duration = Duration::from_millis(2);
/// Time to wait for the last answers.
const LAST: Duration = Duration::from_secs(1);
const START: Duration = Duration::from_secs(10);
