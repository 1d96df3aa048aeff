//! Pseudo-random bytes in one direction: written at one end, observed and hashed at the other.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::targets::Sha256;

/// The load of a direction until it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// The direction carries no bytes.
    Quiet,
    /// 1 KiB every 20 ms, as for typing or a log.
    Paced,
    /// The direction carries data at maximum throughput.
    Bulk,
    /// This many bytes at maximum throughput; ends by itself.
    Exactly(u64),
}

/// One direction in progress.
#[derive(Debug)]
pub struct Flow {
    seed: u64,
    progress: Arc<Mutex<Progress>>,
    /// Bytes given to the writing end.
    written: Arc<AtomicU64>,
    stop: CancellationToken,
    writing: AbortOnDropHandle<io::Result<Digest>>,
    reading: AbortOnDropHandle<Read>,
}

/// The progress of the reader.
#[derive(Debug)]
struct Progress {
    began: Instant,
    bytes: u64,
    last: Instant,
    longest_gap: Duration,
    /// Time and byte count of the last [`Flow::mark`].
    mark: Option<(Instant, u64)>,
    after_mark: Option<Duration>,
    ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Digest {
    bytes: u64,
    sha256: String,
}

#[derive(Debug)]
struct Read {
    digest: Digest,
    /// Error kind of a cut; `None` after a clean end.
    cut: Option<io::ErrorKind>,
}

/// The end of a direction.
#[derive(Debug)]
pub struct FlowEnd {
    name: String,
    seed: u64,
    sent: Result<Digest, WriteEnd>,
    /// Result of the reader; `None` if nothing ended the direction in time.
    read: Option<Read>,
    received: u64,
    /// Time from the first byte written to the last one read.
    pub took: Duration,
}

impl Flow {
    /// Writes a load of bytes derived from `seed` into one end, and reads them from the other.
    pub(super) fn start(
        writer: impl AsyncWrite + Send + Unpin + 'static,
        reader: impl AsyncRead + Send + Unpin + 'static,
        seed: u64,
        load: Load,
    ) -> Self {
        let now = Instant::now();
        let progress = Arc::new(Mutex::new(Progress {
            began: now,
            bytes: 0,
            last: now,
            longest_gap: Duration::ZERO,
            mark: None,
            after_mark: None,
            ended: false,
        }));
        let (stop, written) = (CancellationToken::new(), Arc::default());
        let source = Source {
            seed,
            load,
            written: Arc::clone(&written),
            stop: stop.clone(),
        };
        Self {
            seed,
            writing: spawn(source.write(writer)),
            reading: spawn(read(reader, progress.clone())),
            progress,
            written,
            stop,
        }
    }

    pub fn received(&self) -> u64 {
        self.lock().bytes
    }

    /// Restarts the measurement of the longest pause.
    pub fn forget_stalls(&self) {
        let mut progress = self.lock();
        progress.longest_gap = Duration::ZERO;
        progress.last = Instant::now();
    }

    /// Returns the longest time without a byte since the start or [`Flow::forget_stalls`], up to
    /// this moment.
    pub fn stall(&self) -> Duration {
        let progress = self.lock();
        let gap = if progress.ended {
            Duration::ZERO
        } else {
            progress.last.elapsed()
        };
        progress.longest_gap.max(gap)
    }

    /// Makes [`Flow::resumed`] wait for a byte that is not written yet, since buffers on the path
    /// may let older bytes trickle.
    pub fn mark(&self) {
        let mut progress = self.lock();
        progress.mark = Some((Instant::now(), self.written.load(Ordering::Relaxed)));
        progress.after_mark = None;
    }

    /// Returns the time from [`Flow::mark`] to the first byte written after it, once one has
    /// arrived.
    pub fn resumed(&self) -> Option<Duration> {
        self.lock().after_mark
    }

    /// Returns whether the reader has observed an end or a cut.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Lets the writer end its direction after the current piece.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Stops, and waits for both ends at most for `limit`.
    pub(super) async fn finish(mut self, name: &str, limit: Duration) -> FlowEnd {
        self.stop();
        let deadline = Instant::now() + limit;
        let read = timeout(limit, &mut self.reading).await;
        // A writer that is still blocked when its reader is gone has no peer.
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(WRITER_LEFT);
        let sent = match timeout(left, &mut self.writing).await {
            Ok(Ok(Ok(digest))) => Ok(digest),
            Ok(Ok(Err(error))) => Err(WriteEnd::Cut(error.kind())),
            Ok(Err(_panicked)) => Err(WriteEnd::Broken),
            Err(_elapsed) => Err(WriteEnd::Blocked),
        };
        let progress = self.lock();
        FlowEnd {
            name: name.to_owned(),
            seed: self.seed,
            sent,
            read: read.ok().and_then(Result::ok),
            received: progress.bytes,
            took: progress.last.duration_since(progress.began),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason why not everything was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteEnd {
    Cut(io::ErrorKind),
    Blocked,
    /// The task that writes has panicked.
    Broken,
}

impl FlowEnd {
    /// Combines the two directions of one connection at each end. A socket reports a reset only
    /// once: if a write has received it, the next read finds the end.
    pub(super) fn of_sockets(mut one: Self, mut other: Self) -> [Self; 2] {
        let [first, second] = [one.writer_saw(), other.writer_saw()];
        one.cut_by(second);
        other.cut_by(first);
        [one, other]
    }

    fn writer_saw(&self) -> Option<io::ErrorKind> {
        match self.sent {
            Err(WriteEnd::Cut(kind)) => Some(kind),
            Ok(_) | Err(WriteEnd::Blocked | WriteEnd::Broken) => None,
        }
    }

    fn cut_by(&mut self, peer_reset: Option<io::ErrorKind>) {
        if let (
            Some(Read {
                cut: cut @ None, ..
            }),
            Some(kind),
        ) = (&mut self.read, peer_reset)
        {
            *cut = Some(kind);
        }
    }

    /// Returns the number of bytes whose hash was compared with that of the sent bytes.
    pub fn hashed(&self) -> u64 {
        self.read.as_ref().map_or(0, |read| read.digest.bytes)
    }

    /// Returns a description of the failure unless all bytes have arrived.
    pub(super) fn unequal(&self) -> Option<String> {
        match (&self.read, &self.sent) {
            (Some(Read { digest, cut: None }), Ok(sent)) if digest == sent => None,
            _ => Some(self.to_string()),
        }
    }

    /// Returns a description of the failure if bytes are missing or wrong without an error. A cut
    /// after correct bytes counts as reported.
    pub(super) fn unreported_loss(&self) -> Option<String> {
        match &self.read {
            Some(Read {
                digest,
                cut: Some(_),
            }) if *digest == Digest::of_prefix(self.seed, digest.bytes) => None,
            _ => self.unequal(),
        }
    }
}

impl fmt::Display for FlowEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match (&self.read, &self.sent) {
            (None, _) => write!(f, "no end, {} bytes so far", self.received),
            (Some(Read { digest, cut }), sent) => {
                let is_right = *digest == Digest::of_prefix(self.seed, digest.bytes);
                let which = if is_right { "right" } else { "FALSE" };
                write!(f, "{} {which} bytes, then ", digest.bytes)?;
                match cut {
                    Some(kind) => write!(f, "{kind}")?,
                    None => f.write_str("a clean end")?,
                }
                match sent {
                    Ok(sent) => write!(f, "; {} sent", sent.bytes),
                    Err(WriteEnd::Cut(kind)) => write!(f, "; writer: {kind}"),
                    Err(WriteEnd::Blocked) => f.write_str("; writer still blocked"),
                    Err(WriteEnd::Broken) => f.write_str("; writer panicked"),
                }
            }
        }
    }
}

impl Digest {
    fn of_prefix(seed: u64, bytes: u64) -> Self {
        let mut source = SmallRng::seed_from_u64(seed);
        let mut sha256 = Sha256::new();
        let mut piece = vec![0; PACED_PIECE];
        let mut left = bytes;
        while left > 0 {
            source.fill_bytes(&mut piece);
            let len = usize::try_from(left).map_or(piece.len(), |left| left.min(piece.len()));
            sha256.update(&piece[..len]);
            left -= len as u64;
        }
        Self::new(sha256)
    }

    fn new(sha256: Sha256) -> Self {
        Self {
            bytes: sha256.bytes(),
            sha256: sha256.finish(),
        }
    }
}

/// The writing end of a flow.
struct Source {
    seed: u64,
    load: Load,
    written: Arc<AtomicU64>,
    stop: CancellationToken,
}

impl Source {
    async fn write(self, mut writer: impl AsyncWrite + Unpin) -> io::Result<Digest> {
        let Self { load, stop, .. } = &self;
        let mut random = SmallRng::seed_from_u64(self.seed);
        let mut sha256 = Sha256::new();
        let (piece_bytes, most) = match load {
            Load::Quiet => (PACED_PIECE, 0),
            Load::Paced => (PACED_PIECE, u64::MAX),
            Load::Bulk => (BULK_PIECE, u64::MAX),
            Load::Exactly(bytes) => (BULK_PIECE, *bytes),
        };
        let mut piece = vec![0; piece_bytes];
        let mut ticks = interval(PACE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // An exact amount is written completely, even if another task waits for its end.
        while sha256.bytes() < most && !(stop.is_cancelled() && most == u64::MAX) {
            random.fill_bytes(&mut piece);
            let left = usize::try_from(most - sha256.bytes()).unwrap_or(usize::MAX);
            let len = piece.len().min(left);
            self.written.fetch_add(len as u64, Ordering::Relaxed);
            writer.write_all(&piece[..len]).await?;
            sha256.update(&piece[..len]);
            if *load == Load::Paced {
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = stop.cancelled() => {}
                }
            }
        }
        if *load == Load::Quiet {
            stop.cancelled().await;
        }
        writer.shutdown().await?;
        Ok(Digest::new(sha256))
    }
}

async fn read(mut reader: impl AsyncRead + Unpin, progress: Arc<Mutex<Progress>>) -> Read {
    let mut sha256 = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    let cut = loop {
        let read = reader.read(&mut buffer).await;
        let now = Instant::now();
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        let len = match read {
            Ok(0) => break None,
            Err(error) => break Some(error.kind()),
            Ok(len) => len,
        };
        sha256.update(&buffer[..len]);
        progress.bytes += len as u64;
        progress.longest_gap = progress.longest_gap.max(now.duration_since(progress.last));
        progress.last = now;
        if let (Some((mark, written)), None) = (progress.mark, progress.after_mark)
            && progress.bytes > written
        {
            progress.after_mark = Some(now.duration_since(mark));
        }
    };
    progress
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .ended = true;
    Read {
        digest: Digest::new(sha256),
        cut,
    }
}

#[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(tokio::spawn(future))
}

/// Small enough to make a pause of 20 ms visible, and a multiple of the generator's word.
const PACED_PIECE: usize = 1024;
const PACE: Duration = Duration::from_millis(20);
const BULK_PIECE: usize = 16 * 1024;
const READ_BYTES: usize = 64 * 1024;
/// Time limit for a writer whose reader has ended: the writer is woken at once.
const WRITER_LEFT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    const WAIT_TIMEOUT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn truncation_is_unequal_and_unreported() {
        let (near, far) = duplex(4096);
        let flow = Flow::start(near, far.take(10), 7, Load::Exactly(1000));
        let end = flow.finish("x", WAIT_TIMEOUT).await;
        assert!(
            end.unequal().is_some() && end.unreported_loss().is_some(),
            "{end}"
        );
    }

    #[tokio::test]
    async fn a_cut_behind_right_bytes_is_reported() {
        let (near, far) = duplex(4096);
        let cut = Cut(far.take(10));
        let end = Flow::start(near, cut, 7, Load::Exactly(1000))
            .finish("x", WAIT_TIMEOUT)
            .await;
        assert!(end.unequal().is_some(), "{end}");
        assert_eq!(end.unreported_loss(), None);
    }

    /// Ends in a reset instead of a clean end.
    struct Cut<R>(R);

    impl<R: AsyncRead + Unpin> AsyncRead for Cut<R> {
        fn poll_read(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
            buf: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<io::Result<()>> {
            let before = buf.filled().len();
            let polled = std::pin::Pin::new(&mut self.0).poll_read(cx, buf);
            match polled {
                std::task::Poll::Ready(Ok(())) if buf.filled().len() == before => {
                    std::task::Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
                }
                other => other,
            }
        }
    }
}
