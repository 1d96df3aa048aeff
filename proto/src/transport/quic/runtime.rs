//! A tokio runtime for quinn. Its send buffers grow only for connections that send much. It limits
//! the datagrams that wait for a connection (`backlog.rs`), and it limits the run time of a
//! connection's task. It samples what a connection receives (`receive_clock.rs`).
//!
//! quinn allocates room for a whole batch of datagrams (13 KiB) when a connection first sends two
//! at once, which every handshake does. quinn keeps the buffer as long as the connection lives, and
//! an idle session never fills it again.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use tokio::task::coop;
use tunnel_process::wakeups::Wakeups;

use super::backlog::{Backlog, EndpointEvents, LastRun, QueueState, RunOutcome};
use super::delivery::DeliveryClock;
use super::receive_clock::{SampleSchedule, SessionSampler};
use super::timer::ConnTimer;

/// Datagrams that a connection sends one by one before it may send batches. They include the bursts
/// of a handshake. Bulk transfers need a few more system calls.
const UNBATCHED_DATAGRAMS: u32 = 16;

/// tokio's budget for a run. A connection uses one unit for each datagram.
const DATAGRAMS_PER_RUN: usize = 128;
/// Polls of a quinn task in a run. The endpoint's task stops after a datagram or more to let others
/// run, wakes itself, and mostly finds nothing then. A task that wakes itself is scheduled again, which
/// wakes another thread: two system calls of each datagram.
const ROUNDS_PER_RUN: usize = 2;
/// Target for the duration of a run, because a run blocks other tasks on its runtime thread.
/// Datagrams that are expensive to process take up to some milliseconds each.
const RUN_TIME_TARGET: Duration = Duration::from_millis(4);

tokio::task_local! {
    /// The quinn task that currently runs.
    static DRIVER: Driver;
}

/// Returns the clock of the connection that is being created, or else of the one whose task runs.
pub(super) fn delivery_clock() -> Arc<DeliveryClock> {
    let of_task = || {
        DRIVER
            .try_with(|driver| driver.sampler.clone())
            .ok()
            .flatten()
    };
    SessionSampler::of_new_connection()
        .or_else(of_task)
        .map(|sampler| sampler.delivery_clock().clone())
        .unwrap_or_default()
}

/// [`TokioRuntime`] for one endpoint. It limits the batches of a young connection and the datagrams
/// that wait for a slow one.
#[derive(Debug, Default)]
pub(super) struct EndpointRuntime {
    backlog: Arc<Backlog>,
    endpoint_events: Arc<EndpointEvents>,
}

/// A task of quinn: one for each connection, and one for the endpoint. Only the endpoint's task
/// receives.
#[derive(Debug)]
struct Driver {
    /// Number of datagrams that the connection must still send one by one.
    left: Cell<u32>,
    receives: Cell<bool>,
    peer: Cell<Option<SocketAddr>>,
    queue: Cell<QueueState>,
    backlog: Arc<Backlog>,
    last_run: Cell<LastRun>,
    /// Number of datagrams that the next run may process.
    datagrams: Cell<usize>,
    endpoint_events: Arc<EndpointEvents>,
    sampler: Option<Arc<SessionSampler>>,
    schedule: Cell<SampleSchedule>,
}

impl Driver {
    fn new(backlog: Arc<Backlog>, endpoint_events: Arc<EndpointEvents>) -> Self {
        Self {
            left: Cell::new(UNBATCHED_DATAGRAMS),
            receives: Cell::default(),
            peer: Cell::default(),
            queue: Cell::default(),
            backlog,
            last_run: Cell::default(),
            datagrams: Cell::new(DATAGRAMS_PER_RUN),
            endpoint_events,
            sampler: SessionSampler::of_new_connection(),
            schedule: Cell::default(),
        }
    }

    /// Returns whether the task may run. If not, the task is woken later.
    fn is_admitted(&self, cx: &Context<'_>) -> bool {
        if self.receives.get() {
            return true;
        }
        let mut last = self.last_run.get();
        let had_waited = last.is_waiting();
        let admitted = self.endpoint_events.try_admit(&mut last, cx);
        self.last_run.set(last);
        if !admitted {
            // Datagrams that arrive in the meantime count.
            self.runs();
        } else if had_waited {
            // tokio may run a woken task with what the endpoint has left of its budget. The next run has all of it.
            cx.waker().wake_by_ref();
            return false;
        }
        admitted
    }

    fn sends(&self, transmit: &Transmit<'_>) {
        self.left.set(self.left.get().saturating_sub(1));
        if let Some(sampler) = &self.sampler {
            sampler.record_sent(transmit.contents);
        }
        let to = transmit.destination;
        if self.receives.get() || self.peer.get() == Some(to) {
            return;
        }
        let from = self.peer.replace(Some(to));
        self.backlog.migrate(from, Some(to), self.queue.get());
    }

    /// Marks the task as the endpoint's, which does not count as a connection that is behind.
    fn receives(&self) {
        if !self.receives.get() {
            self.ran(true, Duration::ZERO);
            self.receives.set(true);
        }
    }

    /// Samples the session for the run that `choose` returns, if any.
    fn sample(&self, choose: impl FnOnce(&mut SampleSchedule) -> Option<tokio::time::Instant>) {
        let Some(sampler) = &self.sampler else {
            return;
        };
        let mut schedule = self.schedule.get();
        let run_at = choose(&mut schedule);
        self.schedule.set(schedule);
        if let Some(run_at) = run_at {
            sampler.sample(run_at);
        }
    }

    /// Begins a run. Returns how many datagrams the run may process.
    fn runs(&self) -> usize {
        if self.receives.get() {
            return DATAGRAMS_PER_RUN;
        }
        let queue = self.backlog.runs(self.peer.get(), self.queue.get());
        self.queue.set(queue);
        self.datagrams.get()
    }

    /// Ends a run. A run that used all of tokio's budget has not emptied its queue, because each
    /// datagram uses one unit.
    fn ran(&self, emptied: bool, elapsed: Duration) {
        if self.receives.get() {
            self.endpoint_events.endpoint_run_finished(emptied);
            return;
        }
        let datagrams = self.datagrams.get();
        let run = if emptied {
            RunOutcome::Emptied
        } else {
            RunOutcome::Processed(datagrams)
        };
        let queue = self.backlog.ran(self.peer.get(), self.queue.get(), run);
        self.queue.set(queue);
        self.datagrams.set(next_run_size(run, datagrams, elapsed));
    }
}

/// Returns how many datagrams a run may process after a run that took `elapsed`. Only a run that
/// processed as many as it might shows that more are cheap.
fn next_run_size(run: RunOutcome, datagrams: usize, elapsed: Duration) -> usize {
    if elapsed > RUN_TIME_TARGET {
        (datagrams / 2).max(1)
    } else if run != RunOutcome::Emptied && elapsed < RUN_TIME_TARGET / 4 {
        (datagrams * 2).min(DATAGRAMS_PER_RUN)
    } else {
        datagrams
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.ran(true, Duration::ZERO);
        self.backlog
            .migrate(self.peer.get(), None, self.queue.get());
    }
}

impl Runtime for EndpointRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        Box::pin(ConnTimer::new(at))
    }

    fn spawn(&self, mut future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        let wakeups = Arc::<Wakeups>::default();
        let driven = poll_fn(move |cx| {
            // Outside of the scope there is no driver, and the task runs without limits.
            if DRIVER.try_with(|driver| driver.is_admitted(cx)) == Ok(false) {
                return Poll::Pending;
            }
            let datagrams = DRIVER.try_with(Driver::runs).unwrap_or(DATAGRAMS_PER_RUN);
            for _ in datagrams..DATAGRAMS_PER_RUN {
                let _used = pin!(coop::consume_budget()).poll(cx);
            }
            let began = Instant::now();
            let run_at = tokio::time::Instant::from_std(began);
            let _inside_the_scope =
                DRIVER.try_with(|driver| driver.sample(|schedule| schedule.begin_run(run_at)));
            let polled = wakeups.poll(cx, ROUNDS_PER_RUN, |cx| future.as_mut().poll(cx));
            let emptied = coop::has_budget_remaining();
            let _inside_the_scope = DRIVER.try_with(|driver| {
                driver.ran(emptied, began.elapsed());
                driver.sample(|schedule| schedule.end_run(run_at));
            });
            if !emptied {
                // The run may have used its last unit of budget and emptied its queue as well. The
                // next run shows which.
                cx.waker().wake_by_ref();
            }
            polled
        });
        let driver = Driver::new(self.backlog.clone(), self.endpoint_events.clone());
        TokioRuntime.spawn(Box::pin(DRIVER.scope(driver, driven)));
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(Socket {
            system: TokioRuntime.wrap_udp_socket(socket)?,
            backlog: self.backlog.clone(),
        }))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

#[derive(Debug)]
struct Socket {
    system: Arc<dyn AsyncUdpSocket>,
    backlog: Arc<Backlog>,
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.system.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // Access fails outside of quinn's tasks, where nothing is counted.
        let _counted = DRIVER.try_with(|driver| driver.sends(transmit));
        // Paths exist that drop packets marked for ECN, from the first one on, and quinn would mark
        // each repetition (RFC 9000, section 13.4.2). BBR does not react to the marks of routers.
        let unmarked = Transmit {
            ecn: None,
            ..*transmit
        };
        self.system.try_send(&unmarked)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let _counted = DRIVER.try_with(Driver::receives);
        let received = self.system.poll_recv(cx, buffers, meta);
        if let Poll::Ready(Ok(count)) = received {
            for datagrams in meta.iter_mut().take(count) {
                let count = datagrams.len.div_ceil(datagrams.stride.max(1));
                if !self.backlog.try_admit(datagrams.addr, count) {
                    // quinn ignores empty datagrams.
                    datagrams.len = 0;
                }
            }
        }
        received
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.system.local_addr()
    }

    /// Returns 1 while the connection must send one by one. quinn calls this function before each
    /// round of sending, which has at most 20 datagrams.
    fn max_transmit_segments(&self) -> usize {
        if DRIVER
            .try_with(|driver| driver.left.get() > 0)
            .unwrap_or(false)
        {
            1
        } else {
            self.system.max_transmit_segments()
        }
    }

    fn max_receive_segments(&self) -> usize {
        self.system.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.system.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use quinn::udp::EcnCodepoint;
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    const WAITING: usize = 100_000;

    fn bound() -> UdpSocket {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    fn datagram(destination: SocketAddr) -> Transmit<'static> {
        Transmit {
            destination,
            ecn: None,
            contents: &[0],
            segment_size: None,
            src_ip: None,
        }
    }

    /// Each connection has its own count, and sends the system's batches in the end.
    #[tokio::test]
    async fn only_the_first_datagrams_of_a_connection_go_singly() {
        let system = TokioRuntime.wrap_udp_socket(bound()).unwrap();
        let runtime = EndpointRuntime::default();
        let socket = runtime.wrap_udp_socket(bound()).unwrap();
        for _connection in 0..2 {
            let (sender, receiver) = oneshot::channel();
            let socket = socket.clone();
            runtime.spawn(Box::pin(async move {
                let mut segments = Vec::new();
                for _ in 0..=UNBATCHED_DATAGRAMS {
                    segments.push(socket.max_transmit_segments());
                    let _full = socket.try_send(&datagram(socket.local_addr().unwrap()));
                    tokio::task::yield_now().await;
                }
                sender.send(segments).unwrap();
            }));
            let mut segments = receiver.await.unwrap();
            assert_eq!(segments.pop(), Some(system.max_transmit_segments()));
            assert!(segments.iter().all(|&count| count == 1), "{segments:?}");
        }
    }

    #[tokio::test]
    async fn task_that_wakes_itself_once_runs_on_before_others() {
        let (runtime, (sender, mut runs)) = (EndpointRuntime::default(), mpsc::channel(8));
        for task in 0..2 {
            let (sender, mut polls) = (sender.clone(), 0..3);
            runtime.spawn(Box::pin(poll_fn(move |cx| {
                let Some(_poll) = polls.next() else {
                    return Poll::Ready(());
                };
                sender.try_send(task).unwrap();
                cx.waker().wake_by_ref();
                Poll::Pending
            })));
        }
        drop(sender);
        let mut order = Vec::new();
        while let Some(task) = runs.recv().await {
            order.push(task);
        }
        assert_eq!(order, [0, 0, 1, 1, 0, 1]);
    }

    #[tokio::test]
    async fn datagrams_are_not_marked_for_ecn() {
        let (runtime, receiver) = (EndpointRuntime::default(), bound());
        let address = receiver.local_addr().unwrap();
        let receiver = TokioRuntime.wrap_udp_socket(receiver).unwrap();
        let socket = runtime.wrap_udp_socket(bound()).unwrap();
        let marked = Transmit {
            ecn: Some(EcnCodepoint::Ect0),
            ..datagram(address)
        };
        let system = TokioRuntime.wrap_udp_socket(bound()).unwrap();
        for (sender, ecn) in [(system, Some(EcnCodepoint::Ect0)), (socket, None)] {
            while sender.try_send(&marked).is_err() {
                tokio::task::yield_now().await;
            }
            let (mut bytes, mut meta) = ([0; 1], [RecvMeta::default()]);
            let mut buffers = [IoSliceMut::new(&mut bytes)];
            let received = poll_fn(|cx| receiver.poll_recv(cx, &mut buffers, &mut meta)).await;
            assert_eq!(received.unwrap(), 1);
            assert_eq!(meta[0].ecn, ecn);
        }
    }

    #[test]
    fn runs_that_are_long_become_shorter_and_grow_again() {
        let run = |datagrams, millis| {
            let run = RunOutcome::Processed(datagrams);
            next_run_size(run, datagrams, Duration::from_millis(millis))
        };
        assert_eq!(run(DATAGRAMS_PER_RUN, 5), DATAGRAMS_PER_RUN / 2);
        assert_eq!(run(1, 100), 1);
        assert_eq!(run(16, 2), 16);
        assert_eq!(run(16, 0), 32);
        assert_eq!(run(DATAGRAMS_PER_RUN, 0), DATAGRAMS_PER_RUN);
    }

    /// Simulates quinn's connection tasks: each datagram arrives through a tokio channel.
    #[tokio::test]
    async fn peers_of_a_task_that_does_not_empty_its_queue_are_limited() {
        let runtime = EndpointRuntime::default();
        let socket = runtime.wrap_udp_socket(bound()).unwrap();
        let peer = socket.local_addr().unwrap();
        // The current_thread runtime polls the task some 61 times for one yield of the test.
        let (datagrams, mut queue) = mpsc::channel(WAITING);
        for _ in 0..WAITING {
            datagrams.try_send(()).unwrap();
        }
        runtime.spawn(Box::pin(async move {
            let _full = socket.try_send(&datagram(peer));
            while queue.recv().await.is_some() {}
        }));
        let admitted = || {
            let datagrams = (0..10_000).filter(|_| runtime.backlog.try_admit(peer, 1));
            datagrams.count()
        };
        assert_eq!(admitted(), 10_000);
        tokio::task::yield_now().await;
        assert!(admitted() < 10_000, "the queue is not empty yet");
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        assert_eq!(admitted(), 10_000, "the queue is empty");
        drop(datagrams);
    }
}
