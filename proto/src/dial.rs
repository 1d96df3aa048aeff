//! Dials targets over TCP: resolves a name, orders its addresses, and dials those that the caller's
//! policy allows until one accepts (RFC 8305).

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nix::sys::socket::{setsockopt, sockopt::IpBindAddressNoPort};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

/// An address to dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The address of the target.
    pub address: SocketAddr,
    /// Where the connection comes from.
    pub source: Source,
}

impl From<SocketAddr> for Candidate {
    fn from(address: SocketAddr) -> Self {
        Self {
            address,
            source: Source::Any,
        }
    }
}

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The address that the system chooses.
    Any,
    /// The dialed address, which this host must have. The system refuses the connection of a host
    /// that has lost the address, and sends nothing to the host that has it now.
    Target,
}

/// The reasons why no candidate accepted.
#[derive(Debug)]
pub struct DialError<R> {
    /// The dialed addresses in the order of their failures. One that did not answer has
    /// [`io::ErrorKind::TimedOut`].
    pub failures: Vec<(SocketAddr, io::Error)>,
    /// Why others were not dialed.
    pub refusals: Vec<R>,
}

impl<R> DialError<R> {
    /// Returns the last failure, unless no address was dialed.
    pub fn into_last(self) -> Option<(SocketAddr, io::Error)> {
        self.failures.into_iter().next_back()
    }
}

impl<R> From<DialError<R>> for io::Error {
    fn from(error: DialError<R>) -> Self {
        let none = || Self::new(io::ErrorKind::NotFound, "name has no address");
        error.into_last().map_or_else(none, |(_, error)| error)
    }
}

/// Dials until a candidate accepts or `deadline` has passed. The next one is dialed when another
/// one has failed, or after [`ATTEMPT_DELAY`]. It is taken from the iterator only then. `Err` is a
/// candidate that the caller refuses to dial. Cancel-safe.
///
/// # Errors
/// Returns the failures and refusals of all candidates.
pub async fn dial<R>(
    candidates: impl Iterator<Item = Result<Candidate, R>>,
    deadline: Instant,
) -> Result<(TcpStream, SocketAddr), DialError<R>> {
    dial_with(candidates, deadline, connect).await
}

async fn dial_with<R, T, F>(
    candidates: impl Iterator<Item = Result<Candidate, R>>,
    deadline: Instant,
    connect: impl Fn(Candidate) -> F,
) -> Result<(T, SocketAddr), DialError<R>>
where
    F: Future<Output = io::Result<T>>,
{
    let mut refusals = Vec::new();
    let attempts = candidates
        .take_while(|_| Instant::now() < deadline)
        .filter_map(|candidate| candidate.map_err(|refusal| refusals.push(refusal)).ok())
        .map(async |candidate| {
            let address = candidate.address;
            match timeout_at(deadline, connect(candidate)).await {
                Ok(Ok(socket)) => Ok((socket, address)),
                Ok(Err(error)) => Err((address, error)),
                Err(_elapsed) => Err((address, io::ErrorKind::TimedOut.into())),
            }
        });
    // A short limit leaves time for some more addresses, too.
    let limit = deadline.saturating_duration_since(Instant::now());
    let delay = ATTEMPT_DELAY.min(limit / ATTEMPTS_MIN);
    let dialed = staggered(attempts, delay).await;
    dialed.map_err(|failures| DialError { failures, refusals })
}

/// Resolves HOST:PORT and dials it until `deadline`, without a policy: the operator wrote the name.
/// Cancel-safe.
///
/// # Errors
/// The error of the resolver, or of the last address.
pub async fn dial_host(text: &str, deadline: Instant) -> io::Result<TcpStream> {
    let (host, port) = split_host_port(text).ok_or_else(|| {
        let what = format!("{text:?} is not HOST:PORT");
        io::Error::new(io::ErrorKind::InvalidInput, what)
    })?;
    // One lookup for each caller.
    let resolver = SystemResolver::new(1);
    let found = timeout_at(deadline, resolver.resolve(host, port)).await??;
    let candidates = found
        .into_iter()
        .map(|address| Ok::<_, Infallible>(address.into()));
    let (socket, _address) = dial(candidates, deadline).await?;
    Ok(socket)
}

/// Splits HOST:PORT. The host has no brackets.
pub fn split_host_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    Some((host.trim_matches(['[', ']']), port.parse().ok()?))
}

/// Runs attempts until one succeeds. The next attempt begins when another one has failed, or `delay`
/// after the last one began. Cancel-safe if the attempts are.
///
/// # Errors
/// Returns the errors of all attempts, in the order of their ends.
pub async fn staggered<T, E, F>(
    attempts: impl Iterator<Item = F>,
    delay: Duration,
) -> Result<T, Vec<E>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut attempts = attempts.fuse();
    let mut running = FuturesUnordered::new();
    let mut failures = Vec::new();
    loop {
        let next = attempts.next();
        let is_last = next.is_none();
        running.extend(next);
        tokio::select! {
            biased;
            ended = running.next() => match ended {
                Some(Ok(success)) => return Ok(success),
                Some(Err(failure)) => failures.push(failure),
                None => return Err(failures),
            },
            () = sleep(delay), if !is_last => {}
        }
    }
}

/// Connects to one address. Cancel-safe.
///
/// # Errors
/// The error of the system. [`io::ErrorKind::AddrNotAvailable`] means that this host does not have
/// the address of [`Source::Target`].
pub async fn connect(candidate: Candidate) -> io::Result<TcpStream> {
    socket(candidate)?.connect(candidate.address).await
}

fn socket(Candidate { address, source }: Candidate) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if source == Source::Target {
        // Without the option the socket gets a port that no other connection of this host can have,
        // whatever its destination. There are 28,000 such ports.
        setsockopt(&socket, IpBindAddressNoPort, &true)?;
        socket.bind(SocketAddr::new(address.ip(), 0))?;
    }
    Ok(socket)
}

/// The future of a lookup.
pub type ResolveFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Resolves names to addresses.
pub trait Resolve: std::fmt::Debug + Send + Sync {
    /// Returns the addresses of a name or of an IP address without brackets, at most
    /// [`ADDRESSES_MAX`], each once and in the order in which they should be dialed. Cancel-safe.
    ///
    /// # Errors
    /// The error of the resolver.
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a>;
}

/// The system's resolver. It occupies a thread for each name that it looks up.
#[derive(Debug, Clone)]
pub struct SystemResolver {
    lookups: Arc<Semaphore>,
}

impl SystemResolver {
    /// Creates a resolver for `lookups` names at a time.
    pub fn new(lookups: usize) -> Self {
        Self {
            lookups: Arc::new(Semaphore::new(lookups)),
        }
    }
}

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a> {
        Box::pin(async move {
            if let Ok(ip) = host.parse() {
                return Ok(vec![SocketAddr::new(ip, port)]);
            }
            let permit = self.lookups.clone().acquire_owned().await;
            let permit = permit.map_err(io::Error::other)?;
            let host = host.to_owned();
            let lookup = tokio::task::spawn_blocking(move || {
                // The lookup goes on when nobody waits for it, and keeps the permit.
                let _permit = permit;
                Ok(in_order_of_attempts(
                    (host.as_str(), port).to_socket_addrs()?,
                ))
            });
            lookup.await.map_err(io::Error::other)?
        })
    }
}

/// Returns the addresses in the order in which they should be dialed (RFC 8305, section 4): the
/// families alternate, and the preferred one is that of the first address.
pub fn in_order_of_attempts(found: impl IntoIterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut families: [Vec<SocketAddr>; 2] = [Vec::new(), Vec::new()];
    let mut is_v6_preferred = None;
    for address in found {
        let preferred = *is_v6_preferred.get_or_insert_with(|| address.is_ipv6());
        let [first, second] = &mut families;
        let family = if address.is_ipv6() == preferred {
            first
        } else {
            second
        };
        if !family.contains(&address) {
            family.push(address);
        }
    }
    let [first, second] = families;
    let mut ordered = Vec::new();
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    loop {
        let pair = [first.next(), second.next()];
        if pair == [None, None] || ordered.len() >= ADDRESSES_MAX {
            ordered.truncate(ADDRESSES_MAX);
            return ordered;
        }
        ordered.extend(pair.into_iter().flatten());
    }
}

/// Time between the beginnings of two attempts (RFC 8305, section 5): a silent address costs no
/// more.
pub const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Attempts that begin within any limit, however short.
const ATTEMPTS_MIN: u32 = 4;
/// Addresses of one name that are dialed. A balancer of a public cloud has up to eight in an answer.
pub const ADDRESSES_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures_util::FutureExt as _;
    use parking_lot::Mutex;
    use tokio::net::TcpListener;

    use super::*;

    /// What an address does when it is dialed.
    #[derive(Clone, Copy)]
    enum Behavior {
        Accepts(Duration),
        Refuses(Duration),
        Silent,
    }

    const SOON: Duration = Duration::from_millis(10);
    const LATE: Duration = Duration::from_millis(400);
    const LIMIT: Duration = Duration::from_secs(5);

    fn number(index: usize) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], u16::try_from(index).unwrap()))
    }

    /// Dials one address for each behavior. Returns the outcome, the time that it took, and when
    /// each attempt began.
    async fn race(
        behaviors: &[Behavior],
        limit: Duration,
    ) -> (
        Result<SocketAddr, Vec<(u16, io::ErrorKind)>>,
        Duration,
        Vec<u128>,
    ) {
        let start = Instant::now();
        let began = Mutex::new(Vec::new());
        let candidates = (0..behaviors.len()).map(|index| Ok::<_, ()>(number(index).into()));
        let dialed = dial_with(candidates, start + limit, async |candidate: Candidate| {
            began.lock().push(start.elapsed().as_millis());
            match behaviors[usize::from(candidate.address.port())] {
                Behavior::Accepts(after) => {
                    sleep(after).await;
                    Ok(())
                }
                Behavior::Refuses(after) => {
                    sleep(after).await;
                    Err(io::ErrorKind::ConnectionRefused.into())
                }
                Behavior::Silent => pending().await,
            }
        });
        let outcome = dialed.await.map(|((), address)| address).map_err(|error| {
            let failures = error.failures.iter();
            failures
                .map(|(address, error)| (address.port(), error.kind()))
                .collect()
        });
        let elapsed = start.elapsed();
        (outcome, elapsed, began.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn next_address_is_dialed_after_a_failure_or_a_quarter_of_a_second() {
        use Behavior::{Accepts, Refuses, Silent};
        let cases: &[(&[Behavior], usize, &[u128], u128)] = &[
            (&[Accepts(SOON), Accepts(SOON)], 0, &[0], 10),
            (&[Silent, Accepts(SOON)], 1, &[0, 250], 260),
            (&[Silent, Silent, Accepts(SOON)], 2, &[0, 250, 500], 510),
            (&[Refuses(SOON), Accepts(SOON)], 1, &[0, 10], 20),
            (
                &[Silent, Refuses(SOON), Accepts(SOON)],
                2,
                &[0, 250, 260],
                270,
            ),
            // An attempt goes on while the next one runs.
            (&[Accepts(LATE), Silent], 0, &[0, 250], 400),
            (
                &[Refuses(LATE), Silent, Accepts(SOON)],
                2,
                &[0, 250, 400],
                410,
            ),
        ];
        for (index, (behaviors, winner, began, elapsed)) in cases.iter().enumerate() {
            let (outcome, took, attempts) = race(behaviors, LIMIT).await;
            assert_eq!(outcome, Ok(number(*winner)), "case {index}");
            assert_eq!(attempts, *began, "case {index}");
            assert_eq!(took.as_millis(), *elapsed, "case {index}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_complete_and_in_time() {
        use Behavior::{Accepts, Refuses, Silent};
        use io::ErrorKind::{ConnectionRefused, TimedOut};
        let (outcome, took, _) = race(&[], LIMIT).await;
        assert_eq!((outcome, took), (Err(Vec::new()), Duration::ZERO));
        let (outcome, took, _) = race(&[Silent, Refuses(SOON)], LIMIT).await;
        let failures = vec![(1, ConnectionRefused), (0, TimedOut)];
        assert_eq!((outcome, took), (Err(failures), LIMIT));
        // A short limit is shared, and nothing is dialed after its end.
        let short = Duration::from_millis(100);
        let (outcome, _, began) = race(&[Silent, Accepts(SOON)], short).await;
        assert_eq!((outcome, began), (Ok(number(1)), vec![0, 25]));
        let (outcome, took, began) = race(&[Silent; 9], short).await;
        assert_eq!((outcome.unwrap_err().len(), took), (4, short));
        assert_eq!(began, [0, 25, 50, 75]);
    }

    #[tokio::test(start_paused = true)]
    async fn refused_candidate_is_not_dialed_and_delays_no_other() {
        let start = Instant::now();
        let candidates = [Err("loopback"), Ok(number(1).into()), Err("metadata")];
        let dialed = dial_with(candidates.into_iter(), start + LIMIT, async |_| {
            Err::<(), _>(io::ErrorKind::ConnectionRefused.into())
        });
        let error = dialed.await.unwrap_err();
        assert_eq!(error.refusals, ["loopback", "metadata"]);
        assert_eq!(error.into_last().unwrap().0, number(1));
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[test]
    fn families_alternate_and_addresses_come_once() {
        let address = |text: &&str| -> SocketAddr { text.parse().unwrap() };
        for (found, ordered) in [
            (
                &["[::1]:1", "[::2]:1", "1.1.1.1:1", "1.1.1.2:1"][..],
                &["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1"][..],
            ),
            (
                &["1.1.1.1:1", "1.1.1.2:1", "[::1]:1"],
                &["1.1.1.1:1", "[::1]:1", "1.1.1.2:1"],
            ),
            (
                &["1.1.1.1:1", "1.1.1.1:1", "[::1]:1", "[::1]:1"],
                &["1.1.1.1:1", "[::1]:1"],
            ),
            (&["[::1]:1"], &["[::1]:1"]),
            (&[], &[]),
        ] {
            let ordered: Vec<_> = ordered.iter().map(address).collect();
            assert_eq!(in_order_of_attempts(found.iter().map(address)), ordered);
        }
        // Many addresses of one family leave no other family out.
        let v6 = (1..100).map(|last| SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, last], 1)));
        let many: Vec<_> = v6.chain([address(&"1.1.1.1:1")]).collect();
        let ordered = in_order_of_attempts(many);
        assert_eq!(ordered.len(), ADDRESSES_MAX);
        assert!(ordered[1].is_ipv4());
    }

    #[tokio::test]
    async fn address_needs_no_lookup_and_names_wait_for_a_thread() {
        let resolver = SystemResolver::new(0);
        let found = resolver.resolve("::1", 80).await.unwrap();
        assert_eq!(found, [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 80))]);
        let mut waiting = resolver.resolve("localhost", 80);
        assert!((&mut waiting).now_or_never().is_none());
        resolver.lookups.add_permits(1);
        let found = waiting.await.unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback()));
    }

    #[test]
    fn address_is_split_at_its_port() {
        assert_eq!(split_host_port("[::1]:80"), Some(("::1", 80)));
        assert_eq!(split_host_port("a.b:1"), Some(("a.b", 1)));
        assert_eq!(split_host_port("a"), None);
    }

    fn from_itself(address: &str) -> Candidate {
        Candidate {
            address: address.parse().unwrap(),
            source: Source::Target,
        }
    }

    #[tokio::test]
    async fn connection_comes_from_the_address_that_it_goes_to() {
        for address in ["127.0.0.77:0", "[::1]:0"] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(address).await else {
                continue;
            };
            let address = listener.local_addr().unwrap();
            let socket = connect(from_itself(&address.to_string())).await.unwrap();
            assert_eq!(socket.local_addr().unwrap().ip(), address.ip());
        }
    }

    #[tokio::test]
    async fn address_of_another_host_is_refused_before_it_is_dialed() {
        for address in ["203.0.113.9:9", "[2001:db8::9]:9"] {
            let error = connect(from_itself(address)).await;
            let kind = error.unwrap_err().kind();
            // A host without IPv6 has no such sockets.
            let is_refused = kind == io::ErrorKind::AddrNotAvailable || address.starts_with('[');
            assert!(is_refused, "{address}: {kind:?}");
        }
    }

    #[tokio::test]
    async fn port_is_not_taken_before_the_destination_is_known() {
        for address in ["127.0.0.1:9", "[::1]:9"] {
            // A host without IPv6.
            if let Ok(socket) = socket(from_itself(address)) {
                assert_eq!(socket.local_addr().unwrap().port(), 0, "{address}");
            }
        }
    }
}
