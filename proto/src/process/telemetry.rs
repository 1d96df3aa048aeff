//! Logging: text on a terminal, JSON elsewhere. Our crates log at the configured level, and
//! libraries at a lower one.

use std::io::{self, IsTerminal, Stderr, Write as _};
use std::str::FromStr;
use std::sync::mpsc;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

mod dropped;
mod json;
mod log_writer;
mod rate_limit;
mod sanitize;

pub use dropped::DroppedLines;
use dropped::{DROPPED, DroppedCounts};
use json::JsonLines;
pub use log_writer::ACCESS;
use log_writer::{BatchWriter, FLUSH_TIMEOUT, Flusher, LogReporter};
pub use rate_limit::LogRateLimit;
use sanitize::{MakeLineWriter, Sanitizer};

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable text, one line per event.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Returns [`LogFormat::Text`] if standard error is a terminal, else [`LogFormat::Json`].
    #[must_use]
    pub fn detect() -> Self {
        if io::stderr().is_terminal() {
            Self::Text
        } else {
            Self::Json
        }
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!(
                "log format {other:?} is neither \"text\" nor \"json\""
            )),
        }
    }
}

/// A guard for the started logging. Keep it until the process ends. Dropping it waits at most 1 s
/// until the last lines are written.
#[derive(Debug)]
#[must_use = "dropping the guard writes the last lines"]
pub struct LogGuard {
    _flusher: Flusher<Stderr>,
}

/// Starts logging to standard error. Libraries log only errors, whatever `level` is. Later panics
/// are logged as lines, too.
///
/// A dedicated thread writes the lines, so that no task waits for the output. If the output is too
/// slow, lines are dropped and counted ([`DroppedLines`]), access log lines ([`ACCESS`]) first.
/// When the output accepts lines again, one line reports how many were dropped. Access log lines
/// are written in batches about 20 ms later, and before any other line. A process that is killed
/// loses the pending batch.
///
/// # Errors
/// When logging was started before, or the thread cannot be started.
pub fn start(level: LevelFilter, format: LogFormat) -> io::Result<LogGuard> {
    super::panics::install_hook();
    let filter = filter(level);
    let registry = tracing_subscriber::registry();
    let log_writer = BatchWriter::new(io::stderr(), &DROPPED);
    let make_writer = |sanitizer| MakeLineWriter {
        sanitizer,
        log_writer: log_writer.clone(),
    };
    let started = match format {
        LogFormat::Text => {
            let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let layer = fmt::layer()
                .with_writer(make_writer(Sanitizer {
                    json: false,
                    colors: ansi,
                }))
                .with_ansi(ansi)
                .log_internal_errors(false)
                .with_target(false);
            registry.with(layer.with_filter(filter)).try_init()
        }
        LogFormat::Json => {
            let layer = fmt::layer()
                .fmt_fields(JsonFields::new())
                .event_format(JsonLines::new())
                .log_internal_errors(false)
                .with_writer(make_writer(Sanitizer {
                    json: true,
                    colors: false,
                }));
            registry.with(layer.with_filter(filter)).try_init()
        }
    };
    started.map_err(io::Error::other)?;
    Ok(LogGuard {
        _flusher: Flusher::start(log_writer, SelfReporter)?,
    })
}

/// Writes a line to standard error when the process cannot continue. Waits at most 1 s, so that an
/// unread output does not block the process.
pub fn print_error(line: &str) {
    let (done, written) = mpsc::channel();
    let text = format!("{line}\n");
    let write = move || {
        let _closed_output = io::stderr().write_all(text.as_bytes());
        let _waited_enough = done.send(());
    };
    // Without a thread, the error cannot be reported.
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _too_late = written.recv_timeout(FLUSH_TIMEOUT);
    }
}

/// Writes the output of a command to standard output. A reader that has closed the pipe, as `head`
/// does, is no error.
///
/// # Errors
/// When the output cannot be written for another reason.
pub fn print(text: &[u8]) -> io::Result<()> {
    let mut output = io::stdout();
    match output.write_all(text).and_then(|()| output.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Returns the filter for a level. A peer can cause some library warnings a thousand times a
/// second.
fn filter(level: LevelFilter) -> Targets {
    let ours = [
        "tunnel_proto",
        "tunnel_server",
        "tunnel_agent",
        "tunnel_tests",
        ACCESS,
    ];
    Targets::new()
        .with_default(level.min(LevelFilter::ERROR))
        // kube logs an ERROR line for each failed call without naming what failed. The callers log
        // their failures.
        .with_target("kube_client::client::builder", LevelFilter::OFF)
        .with_targets(ours.map(|target| (target, level)))
}

/// The reporter of events of the logging itself.
struct SelfReporter;

impl LogReporter for SelfReporter {
    fn dropped(&mut self, dropped: DroppedCounts) {
        dropped.report();
    }

    fn report_due(&mut self, is_last: bool) -> bool {
        rate_limit::report(is_last)
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn libraries_log_errors_only_whatever_the_level() {
        for level in [LevelFilter::WARN, LevelFilter::INFO, LevelFilter::TRACE] {
            let filter = filter(level);
            for library in [
                "h2::proto",
                "hyper::proto",
                "quinn",
                "rustls",
                "kube_runtime",
                "tower",
                "hickory_net",
            ] {
                assert!(filter.would_enable(library, &Level::ERROR), "{library}");
                assert!(!filter.would_enable(library, &Level::WARN), "{library}");
            }
            let empty = "kube_client::client::builder";
            assert!(!filter.would_enable(empty, &Level::ERROR));
            for ours in [
                "tunnel_server::session",
                "tunnel_agent",
                dropped::NOTICE,
                ACCESS,
            ] {
                assert!(filter.would_enable(ours, &Level::WARN), "{ours}");
            }
        }
        assert!(filter(LevelFilter::TRACE).would_enable("tunnel_server", &Level::TRACE));
        assert!(!filter(LevelFilter::OFF).would_enable("h2", &Level::ERROR));
    }
}
