//! Files that are watched while the process runs. They are read every few seconds and on SIGHUP,
//! and applied when their content has changed. If the new content is not usable, the last good
//! content stays in use and an error is logged.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{debug, error, info};

use crate::timers::sleep_coalesced;

/// Delay before a second attempt. A file that is replaced together with another one may not match
/// it for a moment.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Loaded content with its digest.
#[derive(Debug)]
pub struct Loaded<T> {
    /// Digest of the content, to detect changes.
    pub digest: [u8; 32],
    /// The content in parsed form.
    pub value: T,
}

/// A task that reads files again at an interval and on request.
#[derive(Debug)]
pub struct FileWatcher {
    /// Name of the files, for the log.
    pub what: &'static str,
    /// Time between two reads.
    pub interval: Duration,
    /// Changes when the files should be read at once.
    pub reload_signal: watch::Receiver<u64>,
    /// Digest of the content that is in use.
    pub digest: [u8; 32],
}

/// The result of a reading of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadOutcome<'a> {
    /// The files have the content that is in use, as before.
    Unchanged,
    /// New content is in use.
    Changed,
    /// The new content is not usable, for this reason. The last good content stays in use.
    Failed(&'a str),
    /// The files are not usable for the same reason as at the last reading.
    StillFailed,
    /// After a failure, the files again have the content that is in use.
    Recovered,
}

impl ReloadOutcome<'_> {
    /// Returns whether the files are unusable, or `None` if that is as before.
    pub fn is_unusable(self) -> Option<bool> {
        match self {
            Self::Unchanged | Self::StillFailed => None,
            Self::Changed | Self::Recovered => Some(false),
            Self::Failed(_) => Some(true),
        }
    }

    /// Returns the lines of the condition that the files are unusable, or `None` if they are as
    /// before.
    pub fn condition(self) -> Option<Vec<String>> {
        match self {
            Self::Unchanged | Self::StillFailed => None,
            Self::Changed | Self::Recovered => Some(Vec::new()),
            Self::Failed(error) => Some(vec![format!(
                "the changed files cannot be used, and the last good content stays in use: {error}"
            )]),
        }
    }
}

impl FileWatcher {
    /// Reads the files again for as long as the future is polled. `load` blocks its thread, `apply`
    /// receives new content, and `on_reload` receives the outcome of each reading. Cancel-safe.
    pub async fn run<T, E>(
        mut self,
        load: impl Fn() -> Result<Loaded<T>, E> + Send + Sync + 'static,
        mut apply: impl FnMut(T) -> Result<(), E>,
        mut on_reload: impl FnMut(ReloadOutcome<'_>),
    ) where
        T: Send + 'static,
        E: Display + Send + 'static,
    {
        let load = Arc::new(load);
        let what = self.what;
        let mut last_error: Option<String> = None;
        loop {
            tokio::select! {
                () = sleep_coalesced(self.interval) => {}
                Ok(()) = self.reload_signal.changed() => {
                    debug!(what, "reading files again on request");
                }
            }
            let mut read = load_once(&load).await;
            if read.is_err() && last_error.is_none() {
                tokio::time::sleep(RETRY_DELAY).await;
                read = load_once(&load).await;
            }
            let applied = read.and_then(|loaded| {
                if loaded.digest == self.digest {
                    return Ok(false);
                }
                apply(loaded.value).map_err(|error| error.to_string())?;
                self.digest = loaded.digest;
                Ok(true)
            });
            match applied {
                Ok(true) => {
                    info!(what, "files changed; the new content is in use");
                    last_error = None;
                    on_reload(ReloadOutcome::Changed);
                }
                Ok(false) => {
                    if last_error.take().is_some() {
                        info!(what, "files are valid again; their content is in use");
                        on_reload(ReloadOutcome::Recovered);
                    } else {
                        on_reload(ReloadOutcome::Unchanged);
                    }
                }
                Err(new) if last_error.as_ref() == Some(&new) => {
                    on_reload(ReloadOutcome::StillFailed);
                }
                Err(new) => {
                    error!(
                        what,
                        error = new,
                        "cannot use the changed files; the last good content stays in use"
                    );
                    on_reload(ReloadOutcome::Failed(&new));
                    last_error = Some(new);
                }
            }
        }
    }
}

async fn load_once<T: Send + 'static, E: Display + Send + 'static>(
    load: &Arc<impl Fn() -> Result<Loaded<T>, E> + Send + Sync + 'static>,
) -> Result<Loaded<T>, String> {
    let load = load.clone();
    match tokio::task::spawn_blocking(move || load()).await {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(panic) => Err(panic.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    fn watcher(interval: Duration, reload_signal: watch::Receiver<u64>) -> FileWatcher {
        FileWatcher {
            what: "test",
            interval,
            reload_signal,
            digest: [1; 32],
        }
    }

    #[tokio::test]
    async fn only_other_content_is_handed_on_and_bad_content_keeps_the_last() {
        let content = Arc::new(Mutex::new(Ok::<u8, String>(1)));
        let (ask, reload_signal) = watch::channel(0);
        let (events, mut received) = tokio::sync::mpsc::channel(16);
        let watcher = watcher(Duration::from_secs(3600), reload_signal);
        let source = content.clone();
        let load = move || {
            let value = source.lock().clone()?;
            Ok(Loaded {
                digest: [value; 32],
                value,
            })
        };
        let apply_events = events.clone();
        let apply = move |value: u8| {
            apply_events.try_send(format!("use {value}")).unwrap();
            Ok::<(), String>(())
        };
        let running = watcher.run(load, apply, move |reload| {
            events.try_send(format!("{reload:?}")).unwrap();
        });
        let script = async {
            let steps = [
                (Ok(2), &["use 2", "Changed"][..]),
                (Ok(2), &["Unchanged"]),
                (Err("broken".to_owned()), &[r#"Failed("broken")"#]),
                (Err("broken".to_owned()), &["StillFailed"]),
                (Ok(2), &["Recovered"]),
                (Err("broken".to_owned()), &[r#"Failed("broken")"#]),
                (Ok(3), &["use 3", "Changed"]),
            ];
            for (next, expected) in steps {
                *content.lock() = next;
                ask.send_modify(|count| *count += 1);
                for word in expected {
                    assert_eq!(received.recv().await.unwrap(), *word);
                }
            }
        };
        tokio::select! {
            () = running => unreachable!(),
            () = script => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn files_are_read_again_at_their_time_and_not_before() {
        use std::sync::atomic::{AtomicU32, Ordering};

        let interval = Duration::from_secs(10);
        let (_ask, reload_signal) = watch::channel(0);
        let watcher = watcher(interval, reload_signal);
        let reads = Arc::new(AtomicU32::new(0));
        let counted = reads.clone();
        let load = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok::<_, String>(Loaded {
                digest: [1; 32],
                value: (),
            })
        };
        let script = async {
            let just = Duration::from_millis(20);
            tokio::time::sleep(interval - just).await;
            assert_eq!(reads.load(Ordering::Relaxed), 0, "shortly before");
            tokio::time::sleep(2 * just).await;
            assert_eq!(reads.load(Ordering::Relaxed), 1, "shortly after");
            tokio::time::sleep(interval).await;
            assert_eq!(reads.load(Ordering::Relaxed), 2);
        };
        tokio::select! {
            () = watcher.run(load, |()| Ok(()), |_reload| {}) => unreachable!(),
            () = script => {}
        }
    }
}
