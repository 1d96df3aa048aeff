//! Logging: text on a terminal, JSON elsewhere. Our crates log at the configured level, and
//! libraries at a lower one.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write as _};
use std::sync::{Arc, OnceLock, mpsc};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

mod access;
mod audit;
mod dropped;
mod json;
mod line_file;
mod log_throttle;
mod log_writer;
mod output;
mod rate_limit;
mod recent;
mod sanitize;
mod settings;
mod source_budget;
mod stream_lines;

use access::SWITCH;
pub use access::{AccessLogMode, AccessLogOutput, AccessLogSettings, admits_access};
pub(crate) use audit::audit_condition;
pub use audit::{
    AuditGuard, AuditLog, AuditOutput, AuditSettings, LeftOutEvents, RawAudit, RefusedSource,
    audit_log, start_audit,
};
pub use dropped::DroppedLines;
use dropped::{DROPPED, DroppedCounts};
use json::JsonLines;
pub use json::append_json_text;
pub use line_file::Rotation;
pub use log_throttle::LogThrottle;
pub use log_writer::ACCESS;
use log_writer::{BatchWriter, FLUSH_TIMEOUT, Flusher, LogReporter};
use output::LogOutput;
pub use rate_limit::LogRateLimit;
pub use recent::{enable_recent_lines, recent_lines};
pub use sanitize::is_hidden;
use sanitize::{MakeLineWriter, Sanitizer};
pub use settings::{LogSettings, RawLog};
pub use source_budget::{LineForm, SourceBudget};
pub use stream_lines::{StreamLines, StreamStage};

crate::named! {
    /// The format of log lines.
    pub enum LogFormat: FromStr {
        /// Human-readable text, one line per event.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

impl LogFormat {
    /// Returns [`LogFormat::Text`] if standard error is a terminal, else [`LogFormat::Json`].
    pub fn detect() -> Self {
        if io::stderr().is_terminal() {
            Self::Text
        } else {
            Self::Json
        }
    }
}

/// A guard for the started logging. Keep it until the process ends. Dropping it waits at most 1 s
/// for each output until the last lines are written.
#[derive(Debug)]
#[must_use = "dropping the guard writes the last lines"]
pub struct LogGuard {
    _access: Option<Flusher<LogOutput>>,
    _flusher: Flusher<LogOutput>,
}

/// Starts logging to standard error. Libraries log only errors, whatever `level` is. Later panics
/// are logged as lines, too. `access` decides about access log lines ([`ACCESS`]), which may have
/// an output of their own.
///
/// A dedicated thread for each output writes the lines, so that no task waits for the output. If an
/// output is too slow, lines are dropped and counted ([`DroppedLines`]), access log lines first.
/// When the output accepts lines again, one line reports how many were dropped. Access log lines
/// are written in batches within 50 ms, and before any other line of their output. A process
/// that is killed loses the pending batch.
///
/// # Errors
/// When logging was started before, the output of the access log cannot be opened, or a thread
/// cannot be started.
pub fn start(
    level: LevelFilter,
    format: LogFormat,
    access: &AccessLogSettings,
) -> io::Result<LogGuard> {
    super::panics::install_hook();
    let own_output = access.open()?;
    SWITCH.set(access);
    let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log_writer = BatchWriter::new(LogOutput::Stderr(io::stderr()), &DROPPED);
    let lines = line_layer(format, ansi, log_writer.clone());
    let (filter, handle) = reload::Layer::new(filter(level, access.level_on_stderr()));
    let lines = lines.with_filter(filter);
    let mut layers = vec![lines.boxed()];
    let access_writer = own_output.map(|output| BatchWriter::new(output, &DROPPED));
    if let Some(access_writer) = &access_writer {
        let only_access = Targets::new().with_target(ACCESS, LevelFilter::INFO);
        let lines = line_layer(format, false, access_writer.clone());
        layers.push(lines.with_filter(only_access).boxed());
    }
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(io::Error::other)?;
    let _started_once = FILTER.set(handle);
    let start_access = |writer| Flusher::start(writer, SilentReporter);
    Ok(LogGuard {
        _access: access_writer.map(start_access).transpose()?,
        _flusher: Flusher::start(log_writer, SelfReporter)?,
    })
}

/// Replaces the level and the selection of access log lines while the process runs. The output of the
/// access log stays as it was at the start. Without [`start`] this does nothing.
pub fn replace_levels(level: LevelFilter, access: &AccessLogSettings) {
    let Some(handle) = FILTER.get() else {
        return;
    };
    SWITCH.set(access);
    // The subscriber lives as long as the process.
    let _subscriber_gone = handle.reload(filter(level, access.level_on_stderr()));
}

/// The filter of the lines on standard error. A process has one.
static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// Returns the layer that formats lines for an output. `ansi` says whether text has colors.
fn line_layer(
    format: LogFormat,
    ansi: bool,
    log_writer: Arc<BatchWriter<LogOutput>>,
) -> Box<dyn Layer<Registry> + Send + Sync> {
    let (json, colors) = match format {
        LogFormat::Text => (false, ansi),
        LogFormat::Json => (true, false),
    };
    let make_writer = MakeLineWriter {
        sanitizer: Sanitizer { json, colors },
        log_writer,
    };
    match format {
        LogFormat::Text => fmt::layer::<Registry>()
            .with_writer(make_writer)
            .with_ansi(colors)
            .log_internal_errors(false)
            .with_target(false)
            .boxed(),
        LogFormat::Json => fmt::layer::<Registry>()
            .fmt_fields(JsonFields::new())
            .event_format(JsonLines::new())
            .log_internal_errors(false)
            .with_writer(make_writer)
            .boxed(),
    }
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

/// Returns a line of text of others with visible characters only, as log lines have them. Hidden
/// characters are escaped; those of JSON as in its strings.
pub fn visible(line: &str, format: LogFormat) -> Cow<'_, str> {
    let json = match format {
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    let sanitizer = Sanitizer {
        json,
        colors: false,
    };
    sanitizer.escaped(line)
}

/// Returns the filter for a level, and for access log lines. A peer can cause some library warnings
/// a thousand times a second.
fn filter(level: LevelFilter, access: LevelFilter) -> Targets {
    Targets::new()
        .with_default(level.min(LevelFilter::ERROR))
        // kube logs an ERROR line for each failed call without naming what failed. The callers log
        // their failures.
        .with_target("kube_client::client::builder", LevelFilter::OFF)
        .with_target(OURS, level)
        .with_target(ACCESS, access)
}

/// What the names of all crates of this workspace begin with.
const OURS: &str = "tunnel_";

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

/// The reporter for an output of the access log alone. The thread of the other output reports.
struct SilentReporter;

impl LogReporter for SilentReporter {
    fn dropped(&mut self, _dropped: DroppedCounts) {}

    fn report_due(&mut self, _is_last: bool) -> bool {
        false
    }
}

/// Returns `None` for an empty field, so that the log omits it.
pub fn non_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn libraries_log_errors_only_whatever_the_level() {
        for level in [LevelFilter::WARN, LevelFilter::INFO, LevelFilter::TRACE] {
            let filter = filter(level, LevelFilter::INFO);
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
            for ours in ["tunnel_server::session", "tunnel_agent", dropped::NOTICE] {
                assert!(filter.would_enable(ours, &Level::WARN), "{ours}");
            }
            assert!(filter.would_enable(ACCESS, &Level::INFO));
        }
        let (most, off) = (LevelFilter::TRACE, LevelFilter::OFF);
        assert!(filter(most, off).would_enable("tunnel_server", &Level::TRACE));
        assert!(!filter(most, off).would_enable(ACCESS, &Level::ERROR));
        assert!(!filter(off, off).would_enable("h2", &Level::ERROR));
    }
}
