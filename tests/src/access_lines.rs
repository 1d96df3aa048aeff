//! The access log of servers and agents that run in the process of the test.

use std::io;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use serde_json::Value;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{self, MakeWriter};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tunnel_process::telemetry::ACCESS;

/// Collects the lines of this process from now on. Later calls do nothing.
pub fn collect_access_lines() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let only_access = Targets::new().with_target(ACCESS, LevelFilter::INFO);
        let lines = fmt::layer().json().with_writer(Collector);
        // Nothing else in a test process starts logging.
        let _started_before = tracing_subscriber::registry()
            .with(lines.with_filter(only_access))
            .try_init();
    });
}

/// Returns the fields of the collected lines of a node, in the order of their ends.
pub fn access_lines(node: &str) -> Vec<Value> {
    let lines = lines();
    let of_node = lines.iter().filter(|fields| fields["node"] == node);
    of_node.cloned().collect()
}

static LINES: Mutex<Vec<Value>> = Mutex::new(Vec::new());

fn lines() -> MutexGuard<'static, Vec<Value>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Receives each line as one write.
struct Collector;

impl MakeWriter<'_> for Collector {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

impl io::Write for Collector {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let length = line.len();
        let mut line: Value = serde_json::from_slice(line)?;
        lines().push(line["fields"].take());
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
