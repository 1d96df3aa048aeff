//! The systemd service of the agent: its start, its state, and its return to what it was before.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::SystemTime;

use tunnel_proto::wire::header::one_line;

use super::error::JoinCommandError;
use super::paths::SERVICE;

/// The state of the service before `join`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServiceBefore {
    is_active: bool,
    is_enabled: bool,
}

/// The state of the service while its session is awaited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServiceState {
    /// `active`, `activating`, `failed` or another of systemd's states.
    pub(super) active: String,
    /// Number of restarts after a failure.
    pub(super) restarts: u32,
    /// Why the program ended last, if it has.
    pub(super) end: Option<String>,
}

impl ServiceBefore {
    pub(super) fn observe() -> Self {
        let is = |question: &str| call(SYSTEMCTL, &[question, "--quiet", SERVICE]).is_ok();
        Self {
            is_active: is("is-active"),
            is_enabled: is("is-enabled"),
        }
    }

    /// Restores the files and the service. Returns a text about it for the operator.
    pub(super) fn restore(
        self,
        has_changes: bool,
        restore_files: impl FnOnce() -> std::io::Result<()>,
    ) -> String {
        if !has_changes && self.is_active && self.is_enabled {
            return "nothing was changed, and the service runs on".to_owned();
        }
        let mut failures = Vec::new();
        let mut keep = |result: Result<String, String>| {
            if let Err(failure) = result {
                failures.push(failure);
            }
        };
        // Before the unit is removed.
        if !self.is_active {
            keep(systemctl(&["stop", SERVICE]));
        }
        if !self.is_enabled {
            keep(systemctl(&["disable", "--quiet", SERVICE]));
        }
        let restored = restore_files().map_err(|error| error.to_string());
        keep(restored.map(|()| String::new()));
        keep(systemctl(&["daemon-reload"]));
        if self.is_active {
            keep(systemctl(&["restart", SERVICE]));
        }
        // A service that never failed has nothing to reset.
        let _not_failed = call(SYSTEMCTL, &["reset-failed", SERVICE]);
        if failures.is_empty() {
            "the files and the service are as before".to_owned()
        } else {
            format!("not everything could be undone: {}", failures.join("; "))
        }
    }
}

impl ServiceState {
    /// Observes the service, which was started at `since`.
    pub(super) fn observe(since: SystemTime) -> Self {
        let properties = ["ActiveState", "NRestarts", "ExecMainStatus"];
        let properties = properties.map(|property| format!("--property={property}"));
        let [active, restarts, status] = &properties;
        let shown = call(SYSTEMCTL, &["show", active, restarts, status, SERVICE]);
        let shown = shown.unwrap_or_default();
        let value = |name: &str| {
            let mut lines = shown.lines().filter_map(|line| line.split_once('='));
            let (_, value) = lines.find(|(key, _)| *key == name)?;
            Some(value.to_owned())
        };
        let active = value("ActiveState").unwrap_or_else(|| "unknown".to_owned());
        let restarts = value("NRestarts").and_then(|count| count.parse().ok());
        let restarts = restarts.unwrap_or(0);
        // A service that restarts is active for a moment each time.
        let has_ended = active != "active" || restarts > 0;
        let end = has_ended.then(|| last_error(since)).flatten();
        let end = end.or_else(|| {
            let status = value("ExecMainStatus").filter(|status| status != "0")?;
            Some(format!(
                "the service ended with exit code {status}; journalctl -u {SERVICE} has the reason"
            ))
        });
        Self {
            active,
            restarts,
            end,
        }
    }
}

/// Calls systemctl.
///
/// # Errors
/// Returns the command and the reason.
pub(super) fn systemctl(arguments: &[&str]) -> Result<String, String> {
    call(SYSTEMCTL, arguments).map_err(|reason| format!("'{}' failed: {reason}", shown(arguments)))
}

/// Creates the user of the service from a file of sysusers.d.
pub(super) fn create_user(file: &str) -> Result<(), JoinCommandError> {
    match call(SYSUSERS, &[file]) {
        Ok(_output) => Ok(()),
        Err(reason) => Err(JoinCommandError::User(reason)),
    }
}

pub(super) fn shown(arguments: &[&str]) -> String {
    format!("{SYSTEMCTL} {}", arguments.join(" "))
}

/// Returns the last error that the program printed since a time.
fn last_error(since: SystemTime) -> Option<String> {
    let seconds = since.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    let since = format!("--since=@{seconds}");
    let lines = [
        "--unit",
        SERVICE,
        "--output=cat",
        "--no-pager",
        "--lines=50",
        &since,
    ];
    let text = call(JOURNALCTL, &lines).ok()?;
    let (_, last) = text.rsplit_once(ERROR_PREFIX)?;
    // Errors of a configuration have a line each. systemd's lines follow.
    let lines = last.lines().enumerate();
    let lines = lines.take_while(|(index, line)| *index == 0 || line.starts_with(' '));
    let text: Vec<_> = lines.map(|(_, line)| line.trim()).collect();
    Some(one_line(text.join(" ")))
}

/// Runs a program of the system and returns its output. Ctrl-C in a terminal does not end the program,
/// which may be undoing something.
///
/// # Errors
/// Returns the reason, which is what the program has printed on standard error.
fn call(program: &str, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).process_group(0).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(one_line(text(&output.stderr).trim()))
}

const SYSTEMCTL: &str = "systemctl";
const JOURNALCTL: &str = "journalctl";
const SYSUSERS: &str = "systemd-sysusers";
/// Start of the line with which the program reports the error that ends it.
const ERROR_PREFIX: &str = "tunnel-agent: ";
