//! State on disk that follows a value in memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

type Write<T> = dyn Fn(&T) -> io::Result<()> + Send + Sync;

/// The last state of a value in the data directory.
pub(crate) struct Snapshot<T> {
    /// Name of the state in log messages, such as `cluster state`.
    subject: &'static str,
    /// Changes within this time are written together.
    pause: Duration,
    /// The state on disk, if it is known.
    persisted: Option<T>,
    write: Arc<Write<T>>,
}

impl<T: PartialEq + Send + 'static> Snapshot<T> {
    /// Creates a snapshot that `write` writes. `write` may block the thread.
    pub(crate) fn new(
        subject: &'static str,
        pause: Duration,
        persisted: Option<T>,
        write: impl Fn(&T) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            subject,
            pause,
            persisted,
            write: Arc::new(write),
        }
    }

    /// Writes the state now and soon after each change of `source`, if it differs from the state on
    /// disk. `state` returns the state of the value, or `None` if there is nothing to write yet. A
    /// failure is logged, and the next change writes again. When `drain` is canceled, writes once
    /// more and returns.
    pub(crate) async fn follow<S>(
        mut self,
        mut source: watch::Receiver<S>,
        state: impl Fn(&S) -> Option<T>,
        drain: CancellationToken,
    ) {
        loop {
            let current = state(&source.borrow_and_update());
            if let Some(current) = current
                && self.persisted.as_ref() != Some(&current)
            {
                self.save(current).await;
            }
            if drain.is_cancelled() {
                return;
            }
            tokio::select! {
                () = drain.cancelled() => {}
                changed = source.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    tokio::select! {
                        () = drain.cancelled() => {}
                        () = tokio::time::sleep(self.pause) => {}
                    }
                }
            }
        }
    }

    async fn save(&mut self, current: T) {
        let write = self.write.clone();
        let saving = tokio::task::spawn_blocking(move || write(&current).map(|()| current));
        match saving.await {
            Ok(Ok(current)) => self.persisted = Some(current),
            Ok(Err(error)) => warn!(%error, "cannot persist the {}", self.subject),
            Err(error) => warn!(%error, "task that persists the {} failed", self.subject),
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tunnel_proto::process::shutdown::Shutdown;

    use super::*;
    use crate::testing::eventually;

    const PAUSE: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn burst_is_written_once_and_a_failed_write_is_repeated_at_the_next_change() {
        let (values, source) = watch::channel(0);
        let written = Arc::new(Mutex::new(Vec::new()));
        let log = written.clone();
        let write = move |value: &i32| {
            let mut log = log.lock();
            log.push(*value);
            if log.len() == 1 {
                return Err(io::Error::other("no space"));
            }
            Ok(())
        };
        let (shutdown, drain) = (Shutdown::new(), CancellationToken::new());
        let snapshot = Snapshot::new("value", PAUSE, Some(0), write);
        let following = snapshot.follow(source, |value| Some(*value), drain.clone());
        shutdown.spawn_service(following);
        tokio::time::sleep(PAUSE).await;
        values.send_replace(1);
        values.send_replace(2);
        eventually("the burst", || *written.lock() == [2]).await;
        values.send_replace(2);
        eventually("the next try", || *written.lock() == [2, 2]).await;
        values.send_replace(2);
        tokio::time::sleep(PAUSE * 2).await;
        values.send_replace(3);
        drain.cancel();
        eventually("the last value", || *written.lock() == [2, 2, 3]).await;
        shutdown.finish().await;
    }
}
