//! S13, T18: forged, changed, truncated and repeated datagrams on the path of a session, in both
//! directions; resets of TCP connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tunnel_tests::checks::{ensure_status, get_ok};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::link::Link;
use tunnel_tests::targets::{Exporter, sha256_hex};

use super::report_figure;

/// Interval of the forged datagrams in each direction: 1,000 a second.
const EVERY: Duration = Duration::from_millis(1);
/// Seconds of downloads by default; `CULVERT_FORGED_SECONDS` sets another number. Long runs use 60.
const SECONDS: u64 = 3;
const BODY: usize = 4 << 20;

/// A UDP relay between an agent and the server that injects forged datagrams.
struct Forger {
    front: SocketAddr,
    forged: Arc<AtomicU64>,
    _tasks: JoinSet<Result<()>>,
}

impl Forger {
    async fn start(server: SocketAddr, seed: u64, forges: bool) -> Result<Self> {
        let front = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
        let back = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
        back.connect(server).await?;
        let address = front.local_addr()?;
        let forged = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let count = forged.clone();
        tasks.spawn(async move {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut up, mut down) = (vec![0; 2048], vec![0; 2048]);
            let mut agent = None;
            // The last datagram of each direction, from which the next forged one is made.
            let (mut last_up, mut last_down) = (Vec::new(), Vec::new());
            let mut ticks = interval(EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            loop {
                tokio::select! {
                    got = front.recv_from(&mut up) => {
                        let (length, from) = got?;
                        agent = Some(from);
                        last_up = up[..length].to_vec();
                        // Loss at a full socket buffer is acceptable, as on a real network.
                        let _lost = back.send(&last_up).await;
                    }
                    got = back.recv(&mut down) => {
                        let Ok(length) = got else { continue };
                        last_down = down[..length].to_vec();
                        if let Some(agent) = agent {
                            let _lost = front.send_to(&last_down, agent).await;
                        }
                    }
                    _ = ticks.tick(), if forges => {
                        let Some(agent) = agent else { continue };
                        let (up, down) = (forge(&last_up, &mut random), forge(&last_down, &mut random));
                        let _lost = back.send(&up).await;
                        let _lost = front.send_to(&down, agent).await;
                        count.fetch_add(2, Ordering::Relaxed);
                    }
                }
            }
        });
        Ok(Self {
            front: address,
            forged,
            _tasks: tasks,
        })
    }
}

/// Returns a forged datagram that resembles the last real one.
fn forge(real: &[u8], random: &mut StdRng) -> Vec<u8> {
    let mut forged = real.to_vec();
    if forged.is_empty() {
        return vec![0x40; 40];
    }
    match random.random_range(0..6) {
        // An unchanged copy.
        0 => {}
        1 => forged.truncate(random.random_range(0..forged.len())),
        // Random bytes after the first byte and the connection id of 8 bytes.
        2 => forged
            .iter_mut()
            .skip(9)
            .for_each(|byte| *byte = random.random()),
        3 => forged.iter_mut().for_each(|byte| *byte = random.random()),
        // A long header: a handshake packet, or one of an unknown version.
        4 => forged[0] |= 0x80,
        _ => {
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(0..forged.len());
                forged[at] ^= 1 << random.random_range(0..8);
            }
        }
    }
    forged
}

/// Downloads for `seconds` and verifies every byte. Returns the rate in bytes per second.
async fn downloads(env: &TestEnv, exporter: &Exporter, seconds: u64) -> Result<f64> {
    let host = format!("worker-1:{}", exporter.addr().port());
    let get = RawRequest::get(&host, &format!("/size/{BODY}?seed=7"));
    let own = RawRequest::get("own", &format!("/size/{BODY}?seed=7"));
    let expected = sha256_hex(&request(exporter.addr(), &own).await?.body);
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(seconds) {
        let reply = request(env.http(), &get).await?;
        ensure_status(&reply, 200)?;
        ensure!(reply.ended.is_clean(), "{:?}", reply.ended);
        ensure!(sha256_hex(&reply.body) == expected, "a wrong byte");
        bytes += reply.body.len();
    }
    #[expect(clippy::cast_precision_loss, reason = "a figure")]
    Ok(bytes as f64 / began.elapsed().as_secs_f64())
}

async fn agent_behind(env: &TestEnv, path: SocketAddr, transport: &str) -> Result<Agent> {
    let config = env.agent_config_with("worker-1", |settings| {
        settings.transport = Some(transport.to_owned());
        settings.server = vec![path.to_string()];
    })?;
    let agent = Agent::start(config).await?;
    env.connected("worker-1").await;
    Ok(agent)
}

#[tokio::test(flavor = "multi_thread")]
async fn s13_t18_forged_datagrams_cost_a_session_nothing_but_time() -> Result<()> {
    let seconds = std::env::var("CULVERT_FORGED_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(SECONDS);
    let seed = rand::random();
    let exporter = Exporter::start("worker-1").await?;
    let mut goodput = Vec::new();
    for forges in [false, true] {
        let env = TestEnv::start().await?;
        // Enrollment uses TCP, so the agent enrolls before its traffic goes through the forger.
        drop(env.agent("worker-1").await?);
        let path = Forger::start(env.bound().agents, seed, forges).await?;
        let _agent = agent_behind(&env, path.front, "quic").await?;
        let node = "worker-1".parse()?;
        let session = |env: &TestEnv| {
            let sessions = env.registry().of_node(&node);
            sessions.first().map(|session| session.id)
        };
        let before = session(&env).context("no session")?;
        let rate = downloads(&env, &exporter, seconds).await;
        let rate = rate.with_context(|| format!("seed {seed}"))?;
        goodput.push(rate);
        let after = session(&env).context("no session any more")?;
        ensure!(before == after, "seed {seed}: the session was lost");
        let forged = path.forged.load(Ordering::Relaxed);
        let is_flood = forged > 500 * seconds;
        ensure!(is_flood || !forges, "only {forged} were forged");
        let rate = rate / 1e6;
        report_figure(&format!("S13: {forged} forged, {rate:.1} MB/s"));
    }
    // The forger uses the same processors.
    ensure!(goodput[1] >= goodput[0] * 0.3, "seed {seed}: {goodput:?}");
    Ok(())
}

/// T18 over TCP: resets the agent's connection three times. Each time the agent reconnects, and
/// requests succeed again.
#[tokio::test(flavor = "multi_thread")]
async fn t18_reset_of_tcp_costs_a_reconnect() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let env = TestEnv::start().await?;
    drop(env.agent("worker-1").await?);
    let link = Link::start(env.bound().agents, 7)?;
    let _agent = agent_behind(&env, link.addr(), "h2").await?;
    for _ in 0..3 {
        let host = format!("worker-1:{}", exporter.addr().port());
        link.reset_tcp();
        eventually("served again", WAIT_TIMEOUT, async || {
            get_ok(env.http(), &host, "/metrics").await
        })
        .await;
    }
    Ok(())
}
