//! The settings of the log, the access log and the audit log, which both binaries have.

use tracing::level_filters::LevelFilter;
use tunnel_networks::none_of;

use super::LogFormat;
use super::access::AccessLogSettings;
use super::audit::{AuditSettings, RawAudit};
use crate::settings::ConfigErrors;

/// Declares a structure of settings as [`layered!`](crate::layered) does, and adds those of the logs.
/// `prefix` is what the names of their environment variables begin with.
#[macro_export]
macro_rules! layered_with_logs {
    (prefix $prefix:tt; $(#[$($meta:tt)*])* pub struct $name:ident { $($fields:tt)* }) => {
        $crate::layered! {
            $(#[$($meta)*])*
            pub struct $name {
                $($fields)*
                /// Minimum level of log lines: error, warn, info, debug or trace [default: info]
                #[arg(long, env = concat!($prefix, "LOG_LEVEL"), value_name = "LEVEL", help_heading = "Process")]
                pub log_level: Option<String>,
                /// Format of log lines: text or json [default: text on a terminal, else json]
                #[arg(long, env = concat!($prefix, "LOG_FORMAT"), value_name = "FORMAT", help_heading = "Process")]
                pub log_format: Option<String>,
                /// Requests that have a line in the access log: off, errors (those whose code is not ok) or all.
                /// Independent of --log-level when it is set [default: all; off if --log-level is error or
                /// warn]
                #[arg(long, value_name = "MODE", env = concat!($prefix, "ACCESS_LOG"), help_heading = "Process")]
                pub access_log: Option<String>,
                /// Output of the access log: stderr, stdout or a file, to which lines are appended; rotate it
                /// with copytruncate [default: stderr]
                #[arg(long, value_name = "OUTPUT", env = concat!($prefix, "ACCESS_LOG_OUTPUT"), help_heading = "Process")]
                pub access_log_output: Option<String>,
                /// Write one of COUNT access log lines of requests with code ok; other lines are always written
                /// [default: 1]
                #[arg(long, value_name = "COUNT", env = concat!($prefix, "ACCESS_LOG_SAMPLE"), help_heading = "Process")]
                pub access_log_sample: Option<String>,
                /// Output of the audit log, one JSON line for each request or stream in the form of Kubernetes'
                /// audit.k8s.io/v1 Event: a file, stdout, or off [default: off]
                #[arg(long, value_name = "OUTPUT", env = concat!($prefix, "AUDIT_LOG"), help_heading = "Process")]
                pub audit_log: Option<String>,
                /// Size of the file of --audit-log above which it becomes FILE.1 and a new one begins
                /// [default: 100MiB]
                #[arg(long, value_name = "SIZE", env = concat!($prefix, "AUDIT_LOG_MAX_SIZE"), help_heading = "Process")]
                pub audit_log_max_size: Option<String>,
                /// Number of full files of --audit-log that are retained [default: 10]
                #[arg(long, value_name = "COUNT", env = concat!($prefix, "AUDIT_LOG_MAX_BACKUPS"), help_heading = "Process")]
                pub audit_log_max_backups: Option<String>,
                /// Parameters of a request's query that its audit event has; the others are left out, and "" leaves
                /// out all [default: those of a kubelet's exec, attach, portForward and containerLogs except for
                /// the command]
                #[arg(long, value_name = "NAMES", env = concat!($prefix, "AUDIT_LOG_QUERY"), help_heading = "Process")]
                #[serde(deserialize_with = "tunnel_process::yaml::text_or_list")]
                pub audit_log_query: Option<String>,
                /// Record the command of a kubelet's exec and run in audit events, too. Commands can have
                /// passwords [default: false]
                #[arg(long, value_name = "BOOL", env = concat!($prefix, "AUDIT_LOG_COMMAND"), num_args = 0..=1, default_missing_value = "true", require_equals = true, help_heading = "Process")]
                pub audit_log_command: Option<String>,
            }
        }

        impl $name {
            /// Checks the settings of the logs. Records errors.
            pub fn check_logs(
                &self,
                errors: &mut $crate::settings::ConfigErrors,
            ) -> $crate::telemetry::LogSettings {
                let raw = $crate::telemetry::RawLog {
                    level: self.log_level.as_deref(),
                    format: self.log_format.as_deref(),
                    access: self.access_log.as_deref(),
                    access_output: self.access_log_output.as_deref(),
                    access_sample: self.access_log_sample.as_deref(),
                    audit: $crate::telemetry::RawAudit {
                        output: self.audit_log.as_deref(),
                        max_size: self.audit_log_max_size.as_deref(),
                        max_backups: self.audit_log_max_backups.as_deref(),
                        query: self.audit_log_query.as_deref(),
                        command: self.audit_log_command.as_deref(),
                    },
                };
                $crate::telemetry::LogSettings::check(errors, raw)
            }
        }
    };
}

/// The settings of the log, the access log and the audit log.
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// Minimum level of log lines.
    pub level: LevelFilter,
    /// Format of log lines.
    pub format: LogFormat,
    /// Settings of the access log.
    pub access: AccessLogSettings,
    /// Settings of the audit log.
    pub audit: AuditSettings,
}

/// The raw settings of the logs.
#[derive(Debug, Clone, Copy)]
pub struct RawLog<'a> {
    /// `--log-level`.
    pub level: Option<&'a str>,
    /// `--log-format`.
    pub format: Option<&'a str>,
    /// `--access-log`.
    pub access: Option<&'a str>,
    /// `--access-log-output`.
    pub access_output: Option<&'a str>,
    /// `--access-log-sample`.
    pub access_sample: Option<&'a str>,
    /// Settings of the audit log.
    pub audit: RawAudit<'a>,
}

impl LogSettings {
    /// Parses the settings. Records errors.
    pub fn check(errors: &mut ConfigErrors, raw: RawLog<'_>) -> Self {
        let level = errors.parse_with("--log-level", raw.level, LevelFilter::INFO, parse_level);
        let format = errors.parse("--log-format", raw.format, LogFormat::detect());
        let access = AccessLogSettings::check(
            errors,
            level,
            raw.access,
            raw.access_output,
            raw.access_sample,
        );
        let audit = AuditSettings::check(errors, &access, raw.audit);
        Self {
            level,
            format,
            access,
            audit,
        }
    }
}

fn parse_level(text: &str) -> Result<LevelFilter, String> {
    match text {
        "error" => Ok(LevelFilter::ERROR),
        "warn" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        "trace" => Ok(LevelFilter::TRACE),
        other => Err(none_of(other, &["error", "warn", "info", "debug", "trace"])),
    }
}
