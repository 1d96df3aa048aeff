//! The lock of the host, by which one agent of a node hands over to the next one.
//!
//! ```text
//! Standby --the holder has ended or released--> Held --SIGTERM, listeners closed--> Released
//! ```
//!
//! The lock is an abstract Unix socket, which exists once in a network namespace and ends with its
//! process. Its name is that of the node and of the data directory, so that agents of several
//! installations on one host have a lock each. The agent that has bound the name holds the lock. Any
//! other one is a *standby*: it connects to the socket, which ends with the lock, and shows the
//! holder that somebody waits. The lock decides nothing that a server or the kernel decides: an agent
//! without it dials, serves if it is admitted, and binds the addresses that are free. It says
//! which agent waits for another one, and so when to try again, and whether an address or a name that
//! is in use is a fault.
//!
//! Every user of the host can bind and connect. Both ends therefore ask the kernel for the other
//! one's user (`SO_PEERCRED`): only the own one and root count. A lock of another user is a condition.
//! Where a security module forbids the connection, the holder cannot be asked, and counts as an
//! agent of this user: no user can cause that.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::name::NodeName;

/// The lock of an agent on this host.
#[derive(Debug)]
pub(crate) struct HostLock {
    /// Name of the socket, behind a zero byte.
    name: String,
    /// The users whose processes are agents of this installation.
    trusted: [u32; 2],
    state: watch::Sender<LockState>,
    /// Canceled when a standby waits while this agent drains.
    is_wanted: CancellationToken,
    release: CancellationToken,
}

/// Who has the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LockState {
    /// This agent, since this time.
    Held(Instant),
    /// An agent of this user, of which the process is known unless it is in another namespace.
    Standby(Option<i32>),
    /// A process of another user.
    Foreign,
    /// Nobody: this agent has released the lock, or this system has no such sockets.
    None,
}

impl LockState {
    /// Returns whether another agent of this user serves the node on this host.
    pub(crate) fn is_standby(&self) -> bool {
        matches!(self, Self::Standby(_))
    }

    /// Returns the wait before the server is asked again whether the name is free, or `None` if this
    /// agent has not taken over from another one just now. The server may not have read yet that the
    /// other one has withdrawn.
    pub(crate) fn takeover_retry(&self, now: Instant) -> Option<Duration> {
        let Self::Held(since) = *self else {
            return None;
        };
        let age = now.duration_since(since);
        (age < TAKEOVER).then(|| (age / 2).clamp(TAKEOVER_RETRY_MIN, TAKEOVER_RETRY_MAX))
    }
}

impl HostLock {
    /// Takes the lock, or waits for it in a task.
    pub(crate) fn start(
        node: &NodeName,
        data_dir: &Path,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) -> Arc<Self> {
        let lock = Self::new(name(node, data_dir), [own_user(), ROOT]);
        let bound = UnixListener::bind(lock.path());
        let task = LockTask {
            lock: lock.clone(),
            node: node.clone(),
            readiness: readiness.clone(),
            drain: shutdown.drain().clone(),
        };
        task.set_first_state(&bound);
        shutdown.spawn_service(task.run(bound));
        lock
    }

    /// Returns a lock that nobody else has and that this agent does not take.
    #[cfg(test)]
    pub(crate) fn none() -> Arc<Self> {
        Self::new(String::new(), [ROOT; 2])
    }

    fn new(name: String, trusted: [u32; 2]) -> Arc<Self> {
        Arc::new(Self {
            name,
            trusted,
            state: watch::Sender::new(LockState::None),
            is_wanted: CancellationToken::new(),
            release: CancellationToken::new(),
        })
    }

    pub(crate) fn state(&self) -> LockState {
        self.state.borrow().clone()
    }

    /// Returns a receiver of the changes from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<LockState> {
        self.state.subscribe()
    }

    /// Returns whether another agent of this user serves the node on this host.
    pub(crate) fn is_standby(&self) -> bool {
        self.state.borrow().is_standby()
    }

    /// Returns whether another process, of this user or another one, has the lock.
    pub(crate) fn has_other_holder(&self) -> bool {
        let state = self.state.borrow();
        matches!(*state, LockState::Standby(_) | LockState::Foreign)
    }

    /// Waits until an address that was in use may be free: often just after this agent took over,
    /// else once in [`BIND_INTERVAL`]. Cancel-safe.
    pub(crate) async fn address_may_be_free(&self) {
        let mut state = self.subscribe();
        let is_new = self.state().takeover_retry(Instant::now()).is_some();
        let wait = if is_new {
            TAKEOVER_RETRY_MIN
        } else {
            BIND_INTERVAL
        };
        tokio::select! {
            () = sleep(wait) => {}
            Ok(()) = state.changed() => {}
        }
    }

    /// Waits until this agent drains and a standby waits. Cancel-safe.
    pub(crate) async fn wanted(&self) {
        self.is_wanted.cancelled().await;
    }

    /// Releases the lock. The standby then binds the addresses of this agent.
    pub(crate) fn release(&self) {
        self.release.cancel();
    }

    fn path(&self) -> String {
        format!("\0{}", self.name)
    }

    fn is_trusted(&self, socket: &UnixStream) -> bool {
        let user = socket.peer_cred().map(|peer| peer.uid());
        user.is_ok_and(|user| self.trusted.contains(&user))
    }
}

struct LockTask {
    lock: Arc<HostLock>,
    node: NodeName,
    readiness: Readiness,
    drain: CancellationToken,
}

impl LockTask {
    fn set_first_state(&self, bound: &io::Result<UnixListener>) {
        let state = match bound {
            Ok(_) => LockState::Held(
                Instant::now()
                    .checked_sub(TAKEOVER)
                    .unwrap_or_else(Instant::now),
            ),
            // Until the holder's user is known.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => LockState::Foreign,
            Err(_) => LockState::None,
        };
        self.lock.state.send_replace(state);
    }

    /// Waits for the lock, and holds it until it is released.
    async fn run(self, bound: io::Result<UnixListener>) {
        let listener = match bound {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => tokio::select! {
                biased;
                () = self.drain.cancelled() => return,
                acquired = self.acquire() => acquired.inspect(|_| {
                    info!(node = %self.node, "the other agent on this host has released the lock; taking over");
                    self.lock.state.send_replace(LockState::Held(Instant::now()));
                }),
            },
            bound => bound,
        };
        self.readiness.set_conditions(CONDITION, Vec::new());
        match listener {
            Ok(listener) => self.hold(listener).await,
            Err(error) => {
                warn!(node = %self.node, %error, "no lock on this host; the next agent cannot wait for this one");
            }
        }
        self.lock.state.send_replace(LockState::None);
    }

    /// Waits until nobody else has the lock, and takes it.
    async fn acquire(&self) -> io::Result<UnixListener> {
        let (mut pause, mut refusals) = (Duration::ZERO, 0_u32);
        loop {
            // Fails at once if the holder does not accept: nobody can make this task wait.
            let socket = UnixStream::connect(self.lock.path()).await;
            let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            refusals = if socket.as_ref().is_err_and(is_refused) {
                refusals + 1
            } else {
                0
            };
            if refusals == REFUSALS_REPORTED {
                self.report(&Err(io::Error::other("it does not listen")));
            }
            self.report(&socket);
            let began = Instant::now();
            match &socket {
                // The holder sends nothing: what can be read is the end.
                Ok(socket) => drop(timeout(POLL, socket.readable()).await),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(_) => sleep(BLIND_POLL).await,
            }
            match UnixListener::bind(self.lock.path()) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                bound => return bound,
            }
            // A holder that ends each connection is not asked in a tight loop.
            pause = match began.elapsed() < PAUSE_MAX {
                true => (pause * 2).clamp(PAUSE_MIN, PAUSE_MAX),
                false => Duration::ZERO,
            };
            sleep(pause).await;
        }
    }

    /// Sets the state by the process at the other end.
    fn report(&self, socket: &io::Result<UnixStream>) {
        let (state, condition) = match socket {
            Ok(socket) if self.lock.is_trusted(socket) => {
                let process = socket.peer_cred().ok().and_then(|peer| peer.pid());
                (LockState::Standby(process.filter(|id| *id > 0)), None)
            }
            Ok(socket) => {
                let holder = socket.peer_cred().map_or_else(
                    |_unknown| "a process of another user".to_owned(),
                    |peer| {
                        format!(
                            "a process of user {}{}",
                            peer.uid(),
                            process_text(peer.pid())
                        )
                    },
                );
                (LockState::Foreign, Some(holder))
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                (LockState::Standby(None), None)
            }
            // It may end just now, or its backlog may be full for a moment.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.lock.is_standby() => {
                return;
            }
            Err(_) => {
                let holder = "a process that accepts no connection".to_owned();
                (LockState::Foreign, Some(holder))
            }
        };
        let condition = condition.map(|holder| {
            format!(
                "{holder} has the lock of this node's agent (abstract Unix socket @{}): is another agent of the \
                 node running, such as a unit next to a DaemonSet? Stop one of them",
                self.lock.name
            )
        });
        let is_new = self
            .lock
            .state
            .send_if_modified(|current| std::mem::replace(current, state.clone()) != state);
        if is_new && matches!(state, LockState::Standby(_)) {
            info!(node = %self.node, "standby: another agent of this node runs on this host");
        }
        let conditions = self.readiness.conditions();
        if let Some(condition) = &condition
            && !conditions.iter().any(|(_, line)| line == condition)
        {
            warn!(node = %self.node, reason = condition, "not the only agent of this node on this host");
        }
        self.readiness
            .set_conditions(CONDITION, condition.into_iter().collect());
    }

    /// Holds the lock until it is released, and reports a standby that waits in the drain.
    async fn hold(&self, listener: UnixListener) {
        let mut accepting = RetryingListener::new(listener, "handover");
        let mut standbys: Vec<UnixStream> = Vec::new();
        let (mut is_draining, mut refused) = (false, 0_u32);
        loop {
            tokio::select! {
                biased;
                () = self.lock.release.cancelled() => break,
                () = self.drain.cancelled(), if !is_draining => is_draining = true,
                socket = accepting.accept() => {
                    standbys.retain(is_open);
                    if self.lock.is_trusted(&socket) && standbys.len() < STANDBYS_MAX {
                        standbys.push(socket);
                    } else {
                        drop(socket);
                        refused = refused.wrapping_add(1);
                        // Other users must not fill the backlog before the standby.
                        if refused.is_multiple_of(REFUSED_BURST) {
                            sleep(REFUSED_PAUSE).await;
                        }
                    }
                }
            }
            if is_draining {
                standbys.retain(is_open);
                if !standbys.is_empty() {
                    self.lock.is_wanted.cancel();
                }
            }
        }
        // The name is free before a standby sees the end of its connection.
        drop(accepting);
        drop(standbys);
    }
}

fn is_open(standby: &UnixStream) -> bool {
    let read = standby.try_read(&mut [0]);
    read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Returns the name of the lock: readable, and of a bounded length.
fn name(node: &NodeName, data_dir: &Path) -> String {
    let identity = [node.to_string().as_bytes(), data_dir.as_os_str().as_bytes()].join(&0);
    let hash: String = sha256(&identity)
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let node: String = node.to_string().chars().take(NAME_MAX).collect();
    format!("culvert-agent/{node}/{hash}")
}

/// Returns the user of this process, as other processes of its user namespace see it.
fn own_user() -> u32 {
    let pair = UnixStream::pair().and_then(|(one, _other)| one.peer_cred());
    // Nobody's: then only root counts.
    pair.map_or(u32::MAX, |own| own.uid())
}

/// Returns a part of a sentence that names a process, if it has a name in this namespace.
pub(crate) fn process_text(process: Option<i32>) -> String {
    let process = process.filter(|id| *id > 0);
    process.map_or_else(String::new, |id| format!(", process {id}"))
}

/// Name of the condition in `/readyz?verbose`.
const CONDITION: &str = "handover";
const ROOT: u32 = 0;
/// Longest part of a node's name in that of the lock. The system allows 107 bytes for all.
const NAME_MAX: usize = 63;
/// Standbys that the holder remembers. There is one at a time.
const STANDBYS_MAX: usize = 8;
/// Pause of the holder after a connection that does not count.
/// Refused connections in a row after which the holder is one that does not listen.
const REFUSALS_REPORTED: u32 = 10;
const REFUSED_BURST: u32 = 64;
const REFUSED_PAUSE: Duration = Duration::from_millis(1);
/// Time after which a standby tries the lock although its connection to the holder is open. A hostile
/// holder may keep the connection and not the lock.
const POLL: Duration = Duration::from_secs(10);
/// Interval of a standby that cannot connect to the holder.
const BLIND_POLL: Duration = Duration::from_millis(250);
/// Pauses between connections to a holder that ends them.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time after a takeover in which servers and addresses are tried often.
const TAKEOVER: Duration = Duration::from_secs(10);
const TAKEOVER_RETRY_MIN: Duration = Duration::from_millis(20);
const TAKEOVER_RETRY_MAX: Duration = Duration::from_secs(1);
/// Time between attempts to bind an address that another process has.
const BIND_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent's lock with its task.
    struct Agent {
        lock: Arc<HostLock>,
        readiness: Readiness,
        shutdown: Shutdown,
    }

    impl Agent {
        /// Starts a lock that trusts `user`. The sockets are those of the test's own user.
        fn start(test: &str, user: u32) -> Self {
            let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
            let node: NodeName = "worker-1".parse().unwrap();
            let folder = format!("/{}/{test}", std::process::id());
            let lock = HostLock::new(name(&node, Path::new(&folder)), [user; 2]);
            let bound = UnixListener::bind(lock.path());
            let task = LockTask {
                lock: lock.clone(),
                node,
                readiness: readiness.clone(),
                drain: shutdown.drain().clone(),
            };
            task.set_first_state(&bound);
            shutdown.spawn_service(task.run(bound));
            Self {
                lock,
                readiness,
                shutdown,
            }
        }

        fn own(test: &str) -> Self {
            Self::start(test, own_user())
        }

        async fn until(&self, is_reached: impl Fn(&LockState) -> bool) {
            let mut state = self.lock.subscribe();
            let reached = timeout(LONG, state.wait_for(|state| is_reached(state)));
            let _state = reached.await.unwrap().unwrap();
        }
    }

    const LONG: Duration = Duration::from_secs(30);
    /// The user of no process.
    const OTHER: u32 = 4_000_000;

    fn is_held(state: &LockState) -> bool {
        matches!(state, LockState::Held(_))
    }

    fn is_standby(state: &LockState) -> bool {
        matches!(state, LockState::Standby(_))
    }

    #[tokio::test]
    async fn standby_takes_over_when_the_holder_drains_and_releases() {
        let first = Agent::own("order");
        assert!(is_held(&first.lock.state()));
        assert_eq!(first.lock.state().takeover_retry(Instant::now()), None);
        let second = Agent::own("order");
        second.until(is_standby).await;
        let process = i32::try_from(std::process::id()).ok();
        assert_eq!(second.lock.state(), LockState::Standby(process));
        assert!(second.readiness.conditions().is_empty());
        assert!(
            timeout(Duration::from_millis(50), first.lock.wanted())
                .await
                .is_err()
        );
        first.shutdown.drain().cancel();
        timeout(LONG, first.lock.wanted()).await.unwrap();
        assert!(
            is_standby(&second.lock.state()),
            "the lock is not released yet"
        );
        first.lock.release();
        second.until(is_held).await;
        assert!(second.lock.state().takeover_retry(Instant::now()).is_some());
        first.until(|state| *state == LockState::None).await;
        first.shutdown.finish().await;
        second.shutdown.finish().await;
    }

    #[tokio::test]
    async fn standby_that_arrives_in_the_drain_is_waited_for_and_one_that_is_gone_is_not() {
        let first = Agent::own("late");
        let gone = Agent::own("late");
        gone.until(is_standby).await;
        gone.shutdown.finish().await;
        first.shutdown.drain().cancel();
        assert!(
            timeout(Duration::from_millis(50), first.lock.wanted())
                .await
                .is_err()
        );
        let second = Agent::own("late");
        timeout(LONG, first.lock.wanted()).await.unwrap();
        first.lock.release();
        second.until(is_held).await;
        second.shutdown.finish().await;
        first.shutdown.finish().await;
    }

    #[tokio::test]
    async fn lock_ends_with_its_process_and_one_of_two_standbys_has_it_next() {
        let (first, second, third) = (Agent::own("two"), Agent::own("two"), Agent::own("two"));
        second.until(is_standby).await;
        third.until(is_standby).await;
        first.shutdown.finish().await;
        tokio::select! {
            () = second.until(is_held) => third.until(is_standby).await,
            () = third.until(is_held) => second.until(is_standby).await,
        }
        second.shutdown.finish().await;
        third.until(is_held).await;
        third.shutdown.finish().await;
    }

    #[tokio::test]
    async fn lock_of_another_user_is_a_condition_and_is_taken_when_it_is_free() {
        let hostile = Agent::own("user");
        let agent = Agent::start("user", OTHER);
        let reported = async {
            while agent.readiness.conditions().is_empty() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, reported).await.unwrap();
        assert_eq!(agent.lock.state(), LockState::Foreign);
        let (condition, line) = &agent.readiness.conditions()[0];
        assert_eq!(*condition, CONDITION);
        assert!(line.contains(&format!("of user {}", own_user())), "{line}");
        hostile.shutdown.finish().await;
        agent.until(is_held).await;
        assert!(agent.readiness.conditions().is_empty());
        agent.shutdown.finish().await;
    }

    #[tokio::test]
    async fn standby_of_another_user_is_not_waited_for() {
        let holder = Agent::start("waits", OTHER);
        let other = Agent::own("waits");
        other.until(is_standby).await;
        holder.shutdown.drain().cancel();
        assert!(
            timeout(Duration::from_millis(100), holder.lock.wanted())
                .await
                .is_err()
        );
        holder.shutdown.finish().await;
        other.until(is_held).await;
        other.shutdown.finish().await;
    }

    #[test]
    fn name_fits_whatever_the_node_is_called_and_is_of_node_and_folder() {
        let long: NodeName = format!("{}.{}", "a".repeat(63), "b".repeat(63))
            .parse()
            .unwrap();
        assert!(name(&long, Path::new("/x")).len() <= 107);
        let node: NodeName = "worker-1".parse().unwrap();
        let names = ["/a", "/b"].map(|folder| name(&node, Path::new(folder)));
        assert_ne!(names[0], names[1]);
        assert!(names[0].starts_with("culvert-agent/worker-1/"), "{names:?}");
    }
}
