//! A session that uses all the time of a thread at both ends, while servers and agents have 1, 2
//! and 4 threads.
//!
//! In the full gear the delays of others have a bound, so it needs release binaries on an idle
//! machine.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, sleep, timeout};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::{meta_page, sum};
use tunnel_tests::process::{AgentSetup, Listener, ScratchDir, next_loopback};
use tunnel_tests::stats::{millis, percentile};

use super::{CONNECT, NODE, Stack};
use crate::abuse::report_figure;

tests_of! {
    fn session_that_burns_its_thread_delays_no_other_with_one_thread() = burned(1);
    fn session_that_burns_its_thread_delays_no_other_with_two_threads() = burned(2);
    fn session_that_burns_its_thread_delays_no_other_with_four_threads() = burned(4);
}

/// A caller reads an endless answer of another node as fast as it can. Callers of the first node
/// are measured before and meanwhile.
async fn burned(threads: usize) -> Result<()> {
    let (scratch, count) = (ScratchDir::new()?, threads.to_string());
    let stack = Stack::start_with_env(
        &[("TOKIO_WORKER_THREADS", count.as_str())],
        &[],
        &["--worker-threads", &count],
    )
    .await?;
    let port = stack.exporter.addr().port();
    for (node, transport) in [("worker-2", "quic"), ("worker-3", "h2")] {
        let before = stack.slow_delay().await?;
        let machine = match Gear::current().pick(false, true) {
            true => Some(stack.slow_delay_of_a_busy_machine().await?),
            false => None,
        };
        // Callers may reach the port of the exporter. This target has it at another address.
        let address = next_loopback();
        let target = TcpListener::bind((address, port))?;
        thread::spawn(move || answer_without_end(&target));
        let (folder, agents) = (scratch.path().join(node), Listener::Agents);
        let busy = AgentSetup::new(node, stack.server.address(agents), &folder, None)
            .args(&["--token", &stack.server.token(node, None).await?])
            .args(&["--node-ip", &address.to_string()])
            .args(&["--meta-listen", "127.0.0.1:0", "--transport", transport])
            .args(&["--worker-threads", &count])
            .start()?;
        stack.server.wait_until_connected(&[NODE, node]).await;
        let reader = Reader::start(stack.http(), &format!("{node}:{port}"))?;
        eventually("the first bytes", CONNECT, async || {
            ensure!(reader.bytes() > 0, "{busy}");
            anyhow::Ok(())
        })
        .await;

        let (began, bytes, cpu) = (Instant::now(), reader.bytes(), stack.cpu_seconds().await?);
        let during = stack.slow_delay().await?;
        let (bytes, time) = (reader.bytes() - bytes, began.elapsed().as_secs_f64());
        let share = (stack.cpu_seconds().await? - cpu) / time;
        report_figure(&format!(
            "{threads} threads, {transport}: p99 of others {} ms before, {} ms while other processes \
             do as much, {} ms during; {} MiB; the server used {share:.2} processors",
            millis(before),
            machine.map_or_else(|| "?".to_owned(), millis),
            millis(during),
            bytes >> 20,
        ));
        ensure!(bytes > BYTES_MIN, "only {bytes} bytes");
        let bound = (before * 2).max(scaled(P99_FREE));
        let is_checked = Gear::current().pick(false, true);
        ensure!(
            !is_checked || during <= bound,
            "{during:?}, allowed {bound:?}"
        );
        drop(reader);
        busy.stop(CONNECT).await?;
        stack.server.wait_until_connected(&[NODE]).await;
    }
    Ok(())
}

/// Accepts one connection, and answers its request until the connection is cut.
fn answer_without_end(target: &TcpListener) -> io::Result<()> {
    let (mut socket, _) = target.accept()?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte)?;
        head.extend(byte);
    }
    socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")?;
    loop {
        socket.write_all(&[7; 64 << 10])?;
    }
}

/// A caller that reads one answer in a thread of its own, until it is dropped: the runtime of the
/// test measures others.
struct Reader {
    socket: TcpStream,
    bytes: Arc<AtomicU64>,
}

impl Reader {
    fn start(http: SocketAddr, host: &str) -> io::Result<Self> {
        let mut socket = TcpStream::connect(http)?;
        socket.write_all(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
        let (bytes, mut answer) = (Arc::<AtomicU64>::default(), socket.try_clone()?);
        let counted = bytes.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 256 << 10];
            while let Ok(count @ 1..) = answer.read(&mut buffer) {
                counted.fetch_add(count as u64, Ordering::Relaxed);
            }
        });
        Ok(Self { socket, bytes })
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ended_before = self.socket.shutdown(Shutdown::Both);
    }
}

/// A process that uses all the time of a processor until it is dropped.
struct BusyProcess(Child);

impl BusyProcess {
    fn start() -> io::Result<Self> {
        let args = ["-c", "while :; do :; done"];
        Command::new("sh").args(args).spawn().map(Self)
    }
}

impl Drop for BusyProcess {
    fn drop(&mut self) {
        let _ended_before = self.0.kill();
        let _status = self.0.wait();
    }
}

impl Stack {
    /// Returns the 99th percentile of delays while a caller reads an endless answer from its target
    /// without the tunnel, and two processes use as much time as server and agent would.
    async fn slow_delay_of_a_busy_machine(&self) -> Result<Duration> {
        let target = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = target.local_addr()?;
        thread::spawn(move || answer_without_end(&target));
        let _reader = Reader::start(address, "target")?;
        let _busy = [BusyProcess::start()?, BusyProcess::start()?];
        self.slow_delay().await
    }

    /// Sends requests to the node, each of which must be served in time. Returns the 99th
    /// percentile of their delays.
    async fn slow_delay(&self) -> Result<Duration> {
        let (host, began) = (self.host(), Instant::now());
        let window = Gear::current().pick(scaled(Duration::from_secs(2)), Duration::from_secs(15));
        let mut delays = Vec::new();
        while began.elapsed() < window || delays.len() < REQUESTS_MIN {
            let asked = Instant::now();
            let reply = self.server.get_ok(&host, "/metrics");
            let reply = timeout(scaled(SLOWEST), reply).await;
            reply.context("others are not served in time")??;
            delays.push(asked.elapsed());
            // Requests without a pause would take processor time from the busy session.
            sleep(PAUSE).await;
        }
        delays.sort_unstable();
        Ok(percentile(&delays, 0.99))
    }

    /// Returns the processor time of the server so far.
    async fn cpu_seconds(&self) -> Result<f64> {
        let page = meta_page(self.server.address(Listener::Meta), "/metrics").await?;
        Ok(sum(&page, "process_cpu_seconds_total"))
    }
}

/// Far more than a refusal, and less than the slowest machine relays.
const BYTES_MIN: u64 = 4 << 20;
const REQUESTS_MIN: usize = 100;
const PAUSE: Duration = Duration::from_millis(10);
/// Longest time of a request, some thousand times that of an idle machine.
const SLOWEST: Duration = Duration::from_secs(1);
/// The 99th percentile of others may be twice as high as before, or this: a few time slices of a
/// machine whose processors are all in use.
const P99_FREE: Duration = Duration::from_millis(10);
