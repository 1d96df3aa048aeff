//! Shutdown in two steps: *drain* (no new work) and *stop* (now), with one deadline between them. A
//! process whose callers need time to find another one *leaves* first: it reports that it stops,
//! and still accepts work.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

/// The shutdown state of a process. Clones share one state.
#[derive(Debug, Clone)]
pub struct Shutdown {
    /// A child of `drain`, so that a drain that begins at once is seen by both.
    leaving: CancellationToken,
    drain: CancellationToken,
    stop: CancellationToken,
    /// Work that a drain waits for: streams and requests.
    work: TaskTracker,
    /// Other tasks. They are dropped at `stop`, and no drain waits for them.
    services: TaskTracker,
    /// Canceled when the listeners close, and the listeners that are open.
    listeners_close: CancellationToken,
    listeners: TaskTracker,
    /// Set when a listener panicked. The log contains the panic.
    listener_panicked: Arc<AtomicBool>,
    drain_expired: DrainExpired,
    /// Counts the requests to read files again at once.
    reloads: watch::Sender<u64>,
}

impl Default for Shutdown {
    fn default() -> Self {
        let drain = CancellationToken::new();
        Self {
            leaving: drain.child_token(),
            drain,
            stop: CancellationToken::new(),
            work: TaskTracker::new(),
            services: TaskTracker::new(),
            listeners_close: CancellationToken::new(),
            listeners: TaskTracker::new(),
            listener_panicked: Arc::default(),
            drain_expired: DrainExpired::default(),
            reloads: watch::Sender::default(),
        }
    }
}

impl Shutdown {
    /// Creates a state in which no step has begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the token that is canceled when the process has begun to leave: peers and load
    /// balancers are informed, and new work is accepted until the drain. A drain cancels this token,
    /// too. This is the time that a preStop hook of a Kubernetes pod would otherwise wait.
    pub fn leaving(&self) -> &CancellationToken {
        &self.leaving
    }

    /// Returns the token that is canceled when no new work may begin.
    pub fn drain(&self) -> &CancellationToken {
        &self.drain
    }

    /// Returns the token that is canceled when everything must end at once.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Returns what is set when a drain has reached its deadline.
    pub fn drain_expired(&self) -> &DrainExpired {
        &self.drain_expired
    }

    /// Requests that all files are read again.
    pub fn reload(&self) {
        self.reloads.send_modify(|count| *count += 1);
    }

    /// Returns a receiver that changes whenever files should be read again.
    pub fn reloads(&self) -> watch::Receiver<u64> {
        self.reloads.subscribe()
    }

    /// Runs a task that a drain waits for and that `stop` drops.
    pub fn spawn_work(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.work.spawn(run_until_stopped(self.stop.clone(), work));
    }

    /// Runs a service that `stop` drops and that no drain waits for.
    pub fn spawn_service(&self, service: impl Future<Output = ()> + Send + 'static) {
        self.services
            .spawn(run_until_stopped(self.stop.clone(), service));
    }

    /// Runs an accept loop as a service, until [`Self::close_listeners`]. If the listener panics, the
    /// process drains and exits with a failure, so that its supervisor restarts it.
    pub fn spawn_listener(&self, listener: impl Future<Output = ()> + Send + 'static) {
        let guard = ListenerPanicGuard(self.clone());
        let close = self.listeners_close.clone();
        // The tracker counts a listener until its socket is closed.
        self.spawn_service(self.listeners.track_future(async move {
            let _guard = guard;
            tokio::select! {
                biased;
                () = close.cancelled() => {}
                () = listener => {}
            }
        }));
    }

    /// Ends all accept loops and waits until their sockets are closed. Connections go on.
    pub async fn close_listeners(&self) {
        self.listeners_close.cancel();
        self.listeners.close();
        self.listeners.wait().await;
    }

    /// Returns whether a listener panicked. The log contains the panic.
    pub fn has_listener_panicked(&self) -> bool {
        self.listener_panicked.load(Ordering::Relaxed)
    }

    /// Returns the number of unfinished work tasks.
    pub fn work_left(&self) -> usize {
        self.work.len()
    }

    /// Begins the drain and waits until all work has ended, `deadline` has elapsed or `stop` was
    /// requested. Returns which of these happened.
    pub async fn drain_within(&self, deadline: Duration) -> DrainOutcome {
        self.drain.cancel();
        self.work.close();
        tokio::select! {
            biased;
            () = self.stop.cancelled() => DrainOutcome::Stopped,
            () = self.work.wait() => DrainOutcome::Complete,
            () = tokio::time::sleep(deadline) => {
                self.drain_expired.0.store(true, Ordering::Relaxed);
                DrainOutcome::Deadline
            }
        }
    }

    /// Stops all tasks and waits for them.
    pub async fn finish(&self) {
        self.stop.cancel();
        self.work.close();
        self.services.close();
        self.work.wait().await;
        self.services.wait().await;
    }
}

/// Returns a future that runs `task` and drops it at `stop`. The task is boxed, because a future
/// that is moved into an `async` block takes its space there twice, and the tasks of sessions and
/// streams are long-lived.
fn run_until_stopped(
    stop: CancellationToken,
    task: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    let task = Box::pin(task);
    async move {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = task => {}
        }
    }
}

/// A guard that begins the drain if a listener panics.
struct ListenerPanicGuard(Shutdown);

impl Drop for ListenerPanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!(
                "a listener panicked; draining, then exiting so that the supervisor restarts the process"
            );
            self.0.listener_panicked.store(true, Ordering::Relaxed);
            self.0.drain.cancel();
        }
    }
}

/// Whether a drain has reached its deadline. Work that is left then ends because this process stops.
/// Each request keeps one, so it is no token, whose clones take a lock.
#[derive(Debug, Clone, Default)]
pub struct DrainExpired(Arc<AtomicBool>);

impl DrainExpired {
    /// Returns whether the deadline is over.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The way in which a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainOutcome {
    /// All work completed before the deadline.
    Complete,
    /// The deadline elapsed and cut the remaining work.
    Deadline,
    /// An immediate stop was requested.
    Stopped,
}

/// Installs signal handlers. The first SIGTERM or SIGINT cancels `first`, which is
/// [`Shutdown::leaving`] or [`Shutdown::drain`]. The second stops at once. SIGHUP requests a reload
/// of files.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn handle_signals(shutdown: &Shutdown, first: &CancellationToken) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let state = shutdown.clone();
    shutdown.spawn_service(async move {
        while hangup.recv().await.is_some() {
            info!(signal = "SIGHUP", "reading files again");
            state.reload();
        }
    });
    let (state, first) = (shutdown.clone(), first.clone());
    shutdown.spawn_service(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        let signal = next().await;
        info!(
            signal,
            streams = state.work_left(),
            "draining; a second signal stops at once"
        );
        first.cancel();
        let signal = next().await;
        warn!(signal, streams = state.work_left(), "stopping at once");
        state.stop.cancel();
    });
    Ok(())
}

/// Handles the signals that end a command from now on, and returns a future of the name of the first:
/// SIGINT, SIGTERM, or SIGHUP of a terminal that has gone. Cancel-safe.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn interruption() -> io::Result<impl Future<Output = &'static str>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
            _ = hangup.recv() => "SIGHUP",
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_work_but_not_for_services() {
        let shutdown = Shutdown::new();
        shutdown.spawn_work(tokio::time::sleep(Duration::from_secs(5)));
        shutdown.spawn_service(std::future::pending());
        let end = shutdown.drain_within(Duration::from_secs(30)).await;
        assert_eq!(end, DrainOutcome::Complete);
        shutdown.finish().await;
    }

    #[test]
    fn leaving_does_not_begin_the_drain_and_a_drain_is_seen_as_leaving() {
        let shutdown = Shutdown::new();
        shutdown.leaving().cancel();
        assert!(!shutdown.drain().is_cancelled());
        let shutdown = Shutdown::new();
        shutdown.drain().cancel();
        assert!(shutdown.leaving().is_cancelled());
        assert!(!shutdown.stop().is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn f36_panicking_work_and_services_end_alone() {
        let shutdown = Shutdown::new();
        let (done, others) = tokio::sync::oneshot::channel();
        shutdown.spawn_work(async { panic!("work") });
        shutdown.spawn_service(async { panic!("service") });
        shutdown.spawn_work(async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            done.send(()).unwrap();
        });
        others.await.unwrap();
        assert!(!shutdown.has_listener_panicked());
        assert!(!shutdown.drain().is_cancelled());
        // The drain does not wait for a panicked task.
        let end = shutdown.drain_within(Duration::from_secs(30)).await;
        assert_eq!(end, DrainOutcome::Complete);
        shutdown.finish().await;
    }

    #[tokio::test(start_paused = true)]
    async fn f36_panicking_listener_drains_the_process() {
        let shutdown = Shutdown::new();
        shutdown.spawn_listener(async {});
        shutdown.spawn_listener(std::future::pending());
        tokio::task::yield_now().await;
        assert!(!shutdown.has_listener_panicked());
        shutdown.spawn_listener(async { panic!("listener") });
        let drained = tokio::time::timeout(Duration::from_secs(60), shutdown.drain().cancelled());
        drained.await.unwrap();
        assert!(shutdown.has_listener_panicked());
        shutdown.finish().await;
    }

    #[tokio::test]
    async fn listeners_close_while_their_connections_go_on() {
        let shutdown = Shutdown::new();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (accepted, mut connections) = tokio::sync::mpsc::channel(1);
        shutdown.spawn_listener(async move {
            loop {
                accepted
                    .send(listener.accept().await.unwrap().0)
                    .await
                    .unwrap();
            }
        });
        let client = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut connection = connections.recv().await.unwrap();
        shutdown.close_listeners().await;
        let refused = tokio::net::TcpStream::connect(address).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(!shutdown.drain().is_cancelled());
        // A listener that is bound too late closes at once.
        shutdown.spawn_listener(std::future::pending());
        shutdown.close_listeners().await;
        drop(client);
        let end = tokio::io::AsyncReadExt::read(&mut connection, &mut [0]).await;
        assert_eq!(end.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_and_stop_end_a_drain() {
        let shutdown = Shutdown::new();
        shutdown.spawn_work(std::future::pending());
        let end = shutdown.drain_within(Duration::from_secs(1)).await;
        assert_eq!(end, DrainOutcome::Deadline);
        shutdown.stop().cancel();
        let end = shutdown.drain_within(Duration::from_secs(1)).await;
        assert_eq!(end, DrainOutcome::Stopped);
        shutdown.finish().await;
        assert_eq!(shutdown.work_left(), 0);
    }
}
