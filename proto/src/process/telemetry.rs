//! Logging: text on a terminal, JSON elsewhere, one level for our crates and a quieter one for libraries.

use std::io::{self, IsTerminal, Stderr, Write as _};
use std::str::FromStr;
use std::sync::mpsc;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

mod dropped;
mod log_writer;
mod rate_limit;
mod sanitize;

pub use dropped::DroppedLines;
use dropped::{DROPPED, DroppedCounts};
use log_writer::{BatchWriter, FLUSH_TIMEOUT, Flusher, LogReporter};
pub use rate_limit::LogRateLimit;
use sanitize::{MakeLineWriter, Sanitizer};

/// The `target` of access records.
pub const ACCESS: &str = "access";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// Text when standard error is a terminal, else JSON.
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

/// Logging that was started. To be kept until the process ends: dropped, it waits until the last lines are written, for at
/// most 1 s.
#[derive(Debug)]
#[must_use = "dropping the guard writes the last lines"]
pub struct LogGuard {
    _flusher: Flusher<Stderr>,
}

/// Starts logging to standard error. Libraries log errors only, whatever `level` is. Panics are lines like others from here on.
///
/// A thread of its own writes, so that no task waits for the output: lines that it does not take in time are dropped, access
/// lines ([`ACCESS`]) first, and counted ([`DroppedLines`]); one line says how many when it takes lines again. Access lines
/// are written some 20 ms later, many at once, and before any other line; a process that is killed takes those with it.
///
/// # Errors
/// Logging was started before, or there can be no further thread.
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
                .json()
                .log_internal_errors(false)
                .flatten_event(true)
                // Events have a field of that name: what a request was for.
                .with_target(false)
                .with_current_span(true)
                .with_span_list(false);
            let layer = layer.with_writer(make_writer(Sanitizer {
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

/// Writes a line to standard error when the process cannot go on. Waits at most 1 s: an output that is not read does not keep
/// the process.
pub fn print_error(line: &str) {
    let (done, written) = mpsc::channel();
    let text = format!("{line}\n");
    let write = move || {
        let _closed_output = io::stderr().write_all(text.as_bytes());
        let _waited_enough = done.send(());
    };
    // Without a thread there is nothing left to report it with.
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _too_late = written.recv_timeout(FLUSH_TIMEOUT);
    }
}

/// What is logged at a level. What a library warns about a peer can be caused a thousand times a second.
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
        // An ERROR line for each failed call, without saying what failed; the callers log their failures.
        .with_target("kube_client::client::builder", LevelFilter::OFF)
        .with_targets(ours.map(|target| (target, level)))
}

/// LogGuard what the logging itself has to report.
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
