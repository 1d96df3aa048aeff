//! The panic hook: logs each panic as one ERROR line and counts it. A panic ends only its own task.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use tracing::error;

/// The `target` of panic log lines.
pub(super) const TARGET: &str = module_path!();

/// A process has one panic hook, so it has one counter.
static COUNT: AtomicU64 = AtomicU64::new(0);
static INSTALLED: Once = Once::new();

/// Installs a hook that counts and logs every later panic of this process. The log line has the
/// span of the task that panicked: its connection, session or stream. Before logging is started,
/// Rust's default hook reports panics.
pub fn install_hook() {
    INSTALLED.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            COUNT.fetch_add(1, Ordering::Relaxed);
            if !tracing::dispatcher::has_been_set() {
                return before(panic);
            }
            let backtrace = Backtrace::capture();
            let backtrace =
                (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
            error!(
                location = panic.location().map(tracing::field::display),
                // The debug form quotes and escapes the text, which may come from a peer.
                error = ?message(panic.payload()),
                backtrace,
                "a task panicked; other tasks continue"
            );
        }));
    });
}

/// Returns the number of panics since [`install_hook`].
pub fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Runs `work` on bytes from an unauthenticated peer, in a task that must survive a panic. Returns
/// `None` if `work` panicked.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// Returns the message of a panic.
pub fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// The collector that exports [`count`] as `panics_total`.
#[derive(Debug)]
pub struct PanicCollector;

impl Collector for PanicCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counter = ConstCounter::new(count());
        let help = "Number of tasks that panicked, each with an ERROR line in the log; every panic is a bug";
        let metric = encoder.encode_descriptor("panics", help, None, counter.metric_type())?;
        counter.encode(metric)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f36_panics_are_counted_and_contained() {
        install_hook();
        install_hook();
        let before = count();
        assert_eq!(catch_panic(|| 1), Some(1));
        assert_eq!(catch_panic(|| panic!("{}", "of a String")), None::<()>);
        assert_eq!(catch_panic(|| panic!("of a literal")), None::<()>);
        assert_eq!(count() - before, 2, "once each");
        let mut registry = prometheus_client::registry::Registry::with_prefix("x");
        registry.register_collector(Box::new(PanicCollector));
        let mut shown = String::new();
        prometheus_client::encoding::text::encode(&mut shown, &registry).unwrap();
        let line = format!("x_panics_total {}\n", count());
        assert!(shown.contains(&line), "{shown}");
    }
}
