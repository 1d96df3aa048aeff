//! The runtimes of the processes: of a server or an agent, and of a short verb.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Tasks that a thread polls before it looks at sockets and timers again. tokio's 61 are too many for a
/// transfer whose tasks always have something to do: each of their polls passes hundreds of KiB, and
/// others' requests wait in their sockets meanwhile.
const EVENT_INTERVAL: u32 = 8;

/// Builds a runtime with this many threads, or with one for each processor. One thread is the current
/// one: there, tasks wake each other without a system call.
///
/// # Errors
/// When the system gives no thread or file descriptor.
pub fn build(threads: Option<usize>) -> io::Result<Runtime> {
    let mut builder = match threads {
        Some(1) => Builder::new_current_thread(),
        Some(_) | None => Builder::new_multi_thread(),
    };
    if let Some(threads) = threads {
        builder.worker_threads(threads);
    }
    let built = builder.event_interval(EVENT_INTERVAL).enable_all().build();
    built
        .map_err(|error| io::Error::new(error.kind(), format!("cannot start the runtime: {error}")))
}
