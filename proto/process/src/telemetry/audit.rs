//! The output of audit events: a file that rotates, or standard output, behind a queue of 4 MiB. A full
//! disk or a reader that stands still delays no stream: what the output does not take is dropped and
//! counted, and is a condition. What a source without an identity, or an agent, causes above its budget is
//! left out and counted, as lines of the log are: refused requests cost their caller nothing, and would rotate
//! the events of others away. That is the noise of any network, and no condition.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::access::{AccessLogOutput, AccessLogSettings};
use super::dropped::{AUDIT_DROPPED, DroppedCounts};
use super::line_file::{LineFile, Rotation};
use super::log_writer::{BatchWriter, Flusher, LineKind, LogReporter};
use super::output::LogOutput;
use super::rate_limit::{Quota, Suppressing as _};
use super::source_budget::{Quotas, SourceBudget};
use crate::limits::{count, size};
use crate::query::parameters;
use crate::settings::ConfigErrors;

/// The settings of the audit log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditSettings {
    /// The output of the events.
    pub output: AuditOutput,
    /// When a file is full.
    pub rotation: Rotation,
    /// Parameters of a query that events have.
    pub query: Vec<String>,
    /// Events have the parameters with the command of exec and run, too.
    pub has_command: bool,
}

/// The output of the audit log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum AuditOutput {
    /// Nothing is recorded.
    #[default]
    Off,
    /// The process's standard output.
    Stdout,
    /// A file.
    File(PathBuf),
}

impl FromStr for AuditOutput {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text {
            "off" => Ok(Self::Off),
            "stdout" => Ok(Self::Stdout),
            "" | "stderr" => Err("use a file, stdout or off; stderr has the log"),
            path => Ok(Self::File(path.into())),
        }
    }
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self {
            output: AuditOutput::Off,
            rotation: Rotation {
                max_bytes: DEFAULT_MAX_BYTES,
                backups: DEFAULT_BACKUPS,
            },
            query: DEFAULT_QUERY.map(str::to_owned).into(),
            has_command: false,
        }
    }
}

/// The raw settings of the audit log.
#[derive(Debug, Clone, Copy, Default)]
pub struct RawAudit<'a> {
    /// `--audit-log`.
    pub output: Option<&'a str>,
    /// `--audit-log-max-size`.
    pub max_size: Option<&'a str>,
    /// `--audit-log-max-backups`.
    pub max_backups: Option<&'a str>,
    /// `--audit-log-query`.
    pub query: Option<&'a str>,
    /// `--audit-log-command`.
    pub command: Option<&'a str>,
}

impl AuditSettings {
    /// Parses the settings. Records errors, among them an output that the access log has.
    pub fn check(errors: &mut ConfigErrors, access: &AccessLogSettings, raw: RawAudit<'_>) -> Self {
        let default = Self::default();
        let output = errors.parse("--audit-log", raw.output, AuditOutput::Off);
        let is_shared = match (&output, &access.output) {
            (AuditOutput::Stdout, AccessLogOutput::Stdout) => true,
            (AuditOutput::File(audit), AccessLogOutput::File(access)) => audit == access,
            (_, _) => false,
        };
        if is_shared {
            errors.add(
                "--audit-log",
                "is the output of --access-log-output; choose another one",
            );
        }
        Self {
            output,
            rotation: Rotation {
                max_bytes: errors.parse_with(
                    "--audit-log-max-size",
                    raw.max_size,
                    DEFAULT_MAX_BYTES,
                    size(1 << 20, 1 << 40),
                ),
                backups: errors.parse_with(
                    "--audit-log-max-backups",
                    raw.max_backups,
                    DEFAULT_BACKUPS,
                    count(1000),
                ),
            },
            query: errors.parse_with("--audit-log-query", raw.query, default.query, names),
            has_command: errors.parse("--audit-log-command", raw.command, false),
        }
    }

    /// Returns whether events have this parameter of a query, as a listed one or as a command.
    fn has_parameter(&self, name: &str, is_command: bool) -> bool {
        if is_command {
            return self.has_command && COMMANDS.iter().any(|command| is_decoded(name, command));
        }
        self.query.iter().any(|listed| is_decoded(name, listed))
    }

    fn open(&self) -> io::Result<Option<LogOutput>> {
        Ok(match &self.output {
            AuditOutput::Off => None,
            AuditOutput::Stdout => Some(LogOutput::Stdout(io::stdout())),
            AuditOutput::File(path) => {
                let file = LineFile::open("--audit-log", path, Some(self.rotation))?;
                Some(LogOutput::File(file))
            }
        })
    }
}

/// Parses the names of `--audit-log-query`.
fn names(text: &str) -> Result<Vec<String>, String> {
    let names = text.split(',').map(str::trim);
    let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
    match names.iter().find(|name| COMMANDS.contains(name)) {
        Some(command) => Err(format!(
            "{command} can have passwords; use --audit-log-command to record it"
        )),
        None => Ok(names.into_iter().map(str::to_owned).collect()),
    }
}

/// The audit log of this process.
#[derive(Debug)]
pub struct AuditLog {
    settings: AuditSettings,
    writer: Arc<BatchWriter<LogOutput>>,
    lost: Mutex<LostEvents>,
    refused: SourceBudget<RefusedSource>,
}

/// The events that the output did not take, as they were last observed.
#[derive(Debug, Default)]
struct LostEvents {
    count: u64,
    at: Option<Instant>,
}

/// Where requests come from whose events have a budget if they are refused: a caller without an identity, or
/// an agent, whose node may be compromised.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusedSource {
    /// The address of the caller's connection, or its network.
    Address(IpAddr),
    /// Callers of another server or of the other end, which knows their addresses.
    OtherEnd,
    /// An agent, by the name of the caller in its events.
    Agent(Box<str>),
}

impl fmt::Display for RefusedSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(formatter),
            Self::OtherEnd => formatter.write_str("callers of the other end"),
            Self::Agent(caller) => formatter.write_str(caller),
        }
    }
}

/// Events that were left out because their source had used up its budget.
#[derive(Debug, PartialEq, Eq)]
pub struct LeftOutEvents {
    /// An address, an agent, or the name of a group of sources.
    pub source: String,
    /// Number of events.
    pub events: u64,
}

/// A process has one audit log.
static AUDIT: OnceLock<AuditLog> = OnceLock::new();

/// A guard for the started audit log. Keep it until the process ends. Dropping it waits at most 1 s
/// until the last events are written.
#[derive(Debug)]
#[must_use = "dropping the guard writes the last events"]
pub struct AuditGuard {
    _flusher: Option<Flusher<LogOutput>>,
}

/// Starts the audit log, unless it is off. `on_tick` is called every second or so, at the end of the
/// process with `true`, and writes the events that are due.
///
/// # Errors
/// When the output cannot be opened, the thread cannot be started, or an audit log was started before.
pub fn start_audit(
    settings: &AuditSettings,
    on_tick: impl Fn(&AuditLog, bool) + Send + 'static,
) -> io::Result<AuditGuard> {
    let Some(output) = settings.open()? else {
        return Ok(AuditGuard { _flusher: None });
    };
    let writer = BatchWriter::new(output, &AUDIT_DROPPED);
    let audit_log = AuditLog::new(settings.clone(), writer.clone());
    if AUDIT.set(audit_log).is_err() {
        return Err(io::Error::other("the audit log was started before"));
    }
    let flusher = Flusher::start(writer, AuditReporter(on_tick))?;
    Ok(AuditGuard {
        _flusher: Some(flusher),
    })
}

/// Returns the audit log of this process, if it is on.
pub fn audit_log() -> Option<&'static AuditLog> {
    AUDIT.get()
}

/// Returns the condition of the audit log, if events were lost in the last hour.
pub(crate) fn audit_condition() -> Option<String> {
    let lost = AUDIT_DROPPED.snapshot().other;
    audit_log()?.lost_condition(lost, Instant::now())
}

impl AuditLog {
    fn new(settings: AuditSettings, writer: Arc<BatchWriter<LogOutput>>) -> Self {
        Self {
            settings,
            writer,
            lost: Mutex::default(),
            refused: SourceBudget::with_quotas("audit events of refused requests", REFUSED),
        }
    }

    /// Returns whether there may be an event for a refused request of this source. If not, it is counted.
    pub fn admits_refused(&self, source: RefusedSource) -> bool {
        let is_admitted = self.refused.admit_unlisted(source);
        if !is_admitted {
            AUDIT_DROPPED.add_limited();
        }
        is_admitted
    }

    /// Returns and logs what was left out in minutes that are over, or with `is_last` so far.
    pub fn take_left_out(&self, is_last: bool) -> Vec<LeftOutEvents> {
        let (suppressed, _) = self.refused.take(Instant::now(), is_last);
        let suppressed = suppressed.into_iter();
        let left_out = suppressed.map(|suppressed| {
            suppressed.report();
            LeftOutEvents {
                events: suppressed.lines,
                source: suppressed.source.unwrap_or_default(),
            }
        });
        left_out.collect()
    }

    /// Queues an event, one JSON object in a line whose texts are those of [`append_json_text`], or drops and
    /// counts it. Never waits.
    ///
    /// [`append_json_text`]: super::append_json_text
    pub fn push(&self, line: &[u8]) {
        self.writer.push(line, LineKind::Audit);
    }

    /// Returns the parameters of a query that events have, with their `?`. Commands come first, since
    /// the end of a long text is cut off.
    pub fn query(&self, query: &str) -> String {
        let mut listed = String::new();
        if query.is_empty() {
            return listed;
        }
        for is_command in [true, false] {
            for (name, value) in parameters(query) {
                if self.settings.has_parameter(name, is_command) {
                    listed.push(if listed.is_empty() { '?' } else { '&' });
                    listed.push_str(name);
                    if !value.is_empty() {
                        listed.push('=');
                        listed.push_str(value);
                    }
                }
            }
        }
        listed
    }

    fn lost_condition(&self, count: u64, now: Instant) -> Option<String> {
        self.lost.lock().is_recent(count, now).then(|| {
            let output = match &self.settings.output {
                AuditOutput::Off | AuditOutput::Stdout => "standard output".to_owned(),
                AuditOutput::File(path) => path.display().to_string(),
            };
            match self.writer.error() {
                Some(error) => format!(
                    "audit events are lost, {count} since the start: cannot write {output}: {error}; free space there, or make its folder writable"
                ),
                None => format!(
                    "audit events were lost, {count} since the start: {output} did not take them in time; check its reader or storage"
                ),
            }
        })
    }
}

impl LostEvents {
    /// Returns whether the count has grown in the last hour.
    fn is_recent(&mut self, count: u64, now: Instant) -> bool {
        if count > self.count {
            (self.count, self.at) = (count, Some(now));
        }
        self.at
            .is_some_and(|at| now.duration_since(at) < LOST_SHOWN)
    }
}

/// The reporter of the audit log.
struct AuditReporter<F>(F);

impl<F: Fn(&AuditLog, bool) + Send + 'static> LogReporter for AuditReporter<F> {
    fn dropped(&mut self, dropped: DroppedCounts) {
        warn!(
            events = dropped.other,
            "audit events were lost: their output was blocked or failed; check its reader or its storage"
        );
    }

    /// Streams become due without a line that wakes the thread.
    fn report_due(&mut self, is_last: bool) -> bool {
        if let Some(audit_log) = audit_log() {
            self.0(audit_log, is_last);
        }
        true
    }
}

/// Returns whether a name of a query is `name` when it is decoded, as the target decodes it.
fn is_decoded(encoded: &str, name: &str) -> bool {
    let hex = |byte: Option<&u8>| char::from(*byte?).to_digit(16);
    let (mut encoded, mut name) = (encoded.as_bytes(), name.bytes());
    while let Some((first, others)) = encoded.split_first() {
        let (mut byte, mut next) = (*first, others);
        if byte == b'%' {
            let (Some(high), Some(low)) = (hex(others.first()), hex(others.get(1))) else {
                return false;
            };
            byte = u8::try_from(high * 16 + low).unwrap_or_default();
            next = &others[2..];
        }
        if name.next() != Some(byte) {
            return false;
        }
        encoded = next;
    }
    name.next().is_none()
}

/// Size of a full file without `--audit-log-max-size`.
const DEFAULT_MAX_BYTES: u64 = 100 << 20;
/// Number of full files without `--audit-log-max-backups`.
const DEFAULT_BACKUPS: u32 = 10;
/// Events of requests of callers without an identity, and of agents, that reached no target, about 1 KiB each. One source
/// writes less than 30 MiB a day. Sources at a thousand addresses fill the files of the default rotation in
/// half a day at least.
const REFUSED: Quotas = Quotas {
    source: Quota {
        lines: 20,
        length: Duration::from_secs(60),
    },
    total: Quota {
        lines: 200,
        length: Duration::from_secs(60),
    },
};
/// Time for which lost events are a condition: longer than alerts wait.
const LOST_SHOWN: Duration = Duration::from_secs(3600);
/// Parameters with the command of a kubelet's exec and run.
const COMMANDS: [&str; 2] = ["command", "cmd"];
/// Parameters without `--audit-log-query`: those of a kubelet's exec, attach, portForward and
/// containerLogs that cannot have secrets.
const DEFAULT_QUERY: [&str; 17] = [
    "container",
    "error",
    "follow",
    "input",
    "limitBytes",
    "output",
    "port",
    "ports",
    "previous",
    "sinceSeconds",
    "sinceTime",
    "stderr",
    "stdin",
    "stdout",
    "tailLines",
    "timestamps",
    "tty",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn check(raw: RawAudit<'_>) -> Result<AuditSettings, String> {
        let mut errors = ConfigErrors::default();
        let access = AccessLogSettings {
            output: AccessLogOutput::Stdout,
            ..AccessLogSettings::default()
        };
        let settings = AuditSettings::check(&mut errors, &access, raw);
        errors.finish(settings).map_err(|error| error.to_string())
    }

    fn log(settings: AuditSettings) -> AuditLog {
        let writer = BatchWriter::new(LogOutput::Stdout(io::stdout()), &AUDIT_DROPPED);
        AuditLog::new(settings, writer)
    }

    #[test]
    fn settings_are_parsed_and_mistakes_recorded() {
        assert_eq!(check(RawAudit::default()), Ok(AuditSettings::default()));
        let own = check(RawAudit {
            output: Some("/var/log/a"),
            max_size: Some("2MiB"),
            max_backups: Some("3"),
            query: Some("a, b"),
            command: Some("true"),
        });
        let rotation = Rotation {
            max_bytes: 2 << 20,
            backups: 3,
        };
        let expected = AuditSettings {
            output: AuditOutput::File("/var/log/a".into()),
            rotation,
            query: vec!["a".into(), "b".into()],
            has_command: true,
        };
        assert_eq!(own, Ok(expected));
        let mistakes = check(RawAudit {
            output: Some("stdout"),
            max_size: Some("1KiB"),
            max_backups: Some("0"),
            query: Some("tty,command"),
            ..RawAudit::default()
        });
        let mistakes = mistakes.unwrap_err();
        for setting in [
            "--audit-log: is the output",
            "max-size",
            "max-backups",
            "query",
        ] {
            assert!(mistakes.contains(setting), "{mistakes}");
        }
    }

    #[test]
    fn output_is_no_file_by_mistake() {
        for output in ["", "stderr"] {
            let raw = RawAudit {
                output: Some(output),
                ..RawAudit::default()
            };
            assert!(check(raw).is_err(), "{output:?}");
        }
    }

    #[test]
    fn query_has_only_what_is_listed_and_the_command_only_by_its_setting() {
        let query = "command=mysql&command=-psecret&tty=1&token=secret&comm%61nd=x&container=a";
        let mut settings = AuditSettings::default();
        assert_eq!(log(settings.clone()).query(query), "?tty=1&container=a");
        assert_eq!(log(settings.clone()).query("token=secret"), "");
        settings.has_command = true;
        let commands = "?command=mysql&command=-psecret&comm%61nd=x&tty=1&container=a";
        assert_eq!(log(settings).query(query), commands);
        for (encoded, expected) in [
            ("command", true),
            ("%63ommand", true),
            ("comman%64", true),
            ("comman", false),
            ("commands", false),
            ("comman%6", false),
            ("comman%zz", false),
            ("", false),
        ] {
            assert_eq!(is_decoded(encoded, "command"), expected, "{encoded}");
        }
    }

    #[test]
    fn lost_events_are_a_condition_for_an_hour() {
        let (log, start) = (log(AuditSettings::default()), Instant::now());
        let almost = start + LOST_SHOWN - Duration::from_secs(1);
        assert_eq!(log.lost_condition(0, start), None);
        let text = log.lost_condition(7, start).unwrap();
        assert!(text.contains("7 since the start"), "{text}");
        assert!(log.lost_condition(7, almost).is_some());
        assert_eq!(log.lost_condition(7, start + LOST_SHOWN), None);
    }

    #[test]
    fn source_without_an_identity_has_twenty_events_of_refused_requests_a_minute() {
        let log = log(AuditSettings::default());
        let source = |last| RefusedSource::Address([192, 0, 2, last].into());
        let admitted = |source: RefusedSource, requests: u32| {
            let requests = 0..requests;
            requests
                .filter(|_| log.admits_refused(source.clone()))
                .count()
        };
        assert_eq!(admitted(source(1), 1_000), 20);
        assert_eq!(admitted(source(2), 3), 3);
        assert_eq!(log.take_left_out(false), [], "the minute is not over");
        let left_out = LeftOutEvents {
            source: "192.0.2.1".to_owned(),
            events: 980,
        };
        assert_eq!(log.take_left_out(true), [left_out]);
        assert_eq!(log.take_left_out(true), []);
    }
}
