//! Files that are followed while the process runs: read again every few seconds and on SIGHUP, handed on when their
//! content is another. What cannot be used changes nothing: the last good content stays, with an alarm.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{debug, error, info};

/// A file that is being replaced together with another one may not fit it for a moment.
const SECOND_LOOK: Duration = Duration::from_millis(200);

/// What was read, and what tells it from other content.
#[derive(Debug)]
pub struct Fresh<T> {
    /// Equal for equal content.
    pub digest: [u8; 32],
    /// What it means.
    pub value: T,
}

/// How files are followed.
#[derive(Debug)]
pub struct Follow {
    /// What they are, for the log.
    pub what: &'static str,
    /// How often they are read.
    pub every: Duration,
    /// Changes when they are to be read at once.
    pub asked: watch::Receiver<u64>,
    /// The content that is in use already.
    pub digest: [u8; 32],
}

/// What came of reading again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// Other content is in use.
    Changed,
    /// It cannot be used; the last good content stays.
    Failed,
    /// After a failure, it is again what is in use.
    Recovered,
}

impl Follow {
    /// Reads again for as long as it is polled; `load` blocks its thread, `apply` takes what is new, `told` hears of each
    /// change. Cancel-safe.
    pub async fn run<T, E>(
        mut self,
        load: impl Fn() -> Result<Fresh<T>, E> + Send + Sync + 'static,
        mut apply: impl FnMut(T) -> Result<(), E>,
        mut told: impl FnMut(Reload),
    ) where
        T: Send + 'static,
        E: Display + Send + 'static,
    {
        let load = Arc::new(load);
        let what = self.what;
        let mut problem: Option<String> = None;
        let mut asking = true;
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.every) => {}
                asked = self.asked.changed(), if asking => {
                    asking = asked.is_ok();
                    if !asking {
                        continue;
                    }
                    debug!(what, "reading again, as asked");
                }
            }
            let mut read = once(&load).await;
            if read.is_err() && problem.is_none() {
                tokio::time::sleep(SECOND_LOOK).await;
                read = once(&load).await;
            }
            let taken = read.and_then(|fresh| {
                if fresh.digest == self.digest {
                    return Ok(false);
                }
                apply(fresh.value).map_err(|error| error.to_string())?;
                self.digest = fresh.digest;
                Ok(true)
            });
            match taken {
                Ok(true) => {
                    info!(what, "files were replaced and are in use");
                    problem = None;
                    told(Reload::Changed);
                }
                Ok(false) => {
                    if problem.take().is_some() {
                        info!(what, "files are again as they are in use");
                        told(Reload::Recovered);
                    }
                }
                Err(new) => {
                    if problem.as_ref() != Some(&new) {
                        error!(
                            what,
                            error = new,
                            "files cannot be used; the last good ones stay in use"
                        );
                        told(Reload::Failed);
                    }
                    problem = Some(new);
                }
            }
        }
    }
}

async fn once<T: Send + 'static, E: Display + Send + 'static>(
    load: &Arc<impl Fn() -> Result<Fresh<T>, E> + Send + Sync + 'static>,
) -> Result<Fresh<T>, String> {
    let load = load.clone();
    match tokio::task::spawn_blocking(move || load()).await {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(panic) => Err(panic.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn only_other_content_is_handed_on_and_bad_content_keeps_the_last() {
        let content = Arc::new(Mutex::new(Ok::<u8, String>(1)));
        let (ask, asked) = watch::channel(0);
        let (told, mut heard) = tokio::sync::mpsc::channel(16);
        let follow = Follow {
            what: "test",
            every: Duration::from_secs(3600),
            asked,
            digest: [1; 32],
        };
        let source = content.clone();
        let load = move || {
            let value = source.lock().unwrap().clone()?;
            Ok(Fresh {
                digest: [value; 32],
                value,
            })
        };
        let told_value = told.clone();
        let apply = move |value: u8| {
            told_value.try_send(format!("use {value}")).unwrap();
            Ok::<(), String>(())
        };
        let running = follow.run(load, apply, move |reload| {
            told.try_send(format!("{reload:?}")).unwrap();
        });
        let script = async {
            let steps = [
                (Ok(2), &["use 2", "Changed"][..]),
                (Err("broken".to_owned()), &["Failed"]),
                (Ok(2), &["Recovered"]),
                (Err("broken".to_owned()), &["Failed"]),
                (Ok(3), &["use 3", "Changed"]),
            ];
            for (next, expected) in steps {
                *content.lock().unwrap() = next;
                ask.send_modify(|count| *count += 1);
                for word in expected {
                    assert_eq!(heard.recv().await.unwrap(), *word);
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

        let every = Duration::from_secs(10);
        let (_ask, asked) = watch::channel(0);
        let follow = Follow {
            what: "test",
            every,
            asked,
            digest: [1; 32],
        };
        let reads = Arc::new(AtomicU32::new(0));
        let counted = reads.clone();
        let load = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok::<_, String>(Fresh {
                digest: [1; 32],
                value: (),
            })
        };
        let script = async {
            let just = Duration::from_millis(20);
            tokio::time::sleep(every - just).await;
            assert_eq!(reads.load(Ordering::Relaxed), 0, "shortly before");
            tokio::time::sleep(2 * just).await;
            assert_eq!(reads.load(Ordering::Relaxed), 1, "shortly after");
            tokio::time::sleep(every).await;
            assert_eq!(reads.load(Ordering::Relaxed), 2);
        };
        tokio::select! {
            () = follow.run(load, |()| Ok(()), |_reload| {}) => unreachable!(),
            () = script => {}
        }
    }
}
