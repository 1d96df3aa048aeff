//! The verb `join`: writes configuration, join token and systemd unit of an agent, starts the
//! service, and waits for its session.
//!
//! Every file is planned before one is written, so that a mistake or a refusal changes nothing. A
//! service without a session is undone, also when a signal ends the wait.

use std::io::{self, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tunnel_process::files;
use tunnel_process::shutdown::interruption;
use tunnel_process::terminal::{Answer, read_secret};
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::header::one_line;
use zeroize::Zeroizing;

use crate::cli::JoinArgs;
use crate::config::{DEFAULT_DATA_DIR, meta_endpoint, parse_token};
use crate::credentials::CERTIFICATE;

mod config_file;
mod error;
mod paths;
mod plan;
mod service;
mod unit;
mod wait;

use config_file::JoinSettings;
pub use error::JoinCommandError;
use paths::below;
use plan::Plan;
use service::{ServiceBefore, ServiceState};

/// Runs the verb. `ask` asks a question in the terminal, and `print` writes lines to standard
/// output.
///
/// # Errors
/// Returns a [`JoinCommandError`]. The host is as before, unless the text says otherwise.
pub async fn run(
    arguments: &JoinArgs,
    ask: impl FnOnce(&str) -> io::Result<Answer>,
    mut print: impl FnMut(&str) -> io::Result<()>,
) -> Result<(), JoinCommandError> {
    let starts = arguments.root.is_none() && !arguments.no_start;
    if starts && !Path::new(SYSTEMD_RUNS).is_dir() {
        return Err(JoinCommandError::NoSystemd(run_command(arguments)));
    }
    let settings = JoinSettings {
        server: arguments.server.clone(),
        node_name: arguments.node_name.clone(),
    };
    let token = read_token(arguments.token_file.as_deref())?;
    let mut plan = Plan::new(arguments.root.as_deref(), &settings, &token)?;
    let commands = if starts { plan.commands() } else { Vec::new() };
    if arguments.dry_run {
        print(&plan.report("would write"))?;
        for command in commands {
            print(&format!("would run {}\n", service::shown(command)))?;
        }
        return Ok(());
    }
    let differences = plan.differences().join("; ");
    if !differences.is_empty() && !arguments.yes {
        match ask(&format!("{differences}. Replace?"))? {
            Answer::Yes => {}
            Answer::No => return Err(JoinCommandError::Declined),
            Answer::NoTerminal => return Err(JoinCommandError::Differs(differences)),
        }
    }
    let interrupted = if starts { Some(interruption()?) } else { None };
    let before = starts.then(ServiceBefore::observe);
    if let Err(error) = plan.write() {
        plan.restore()?;
        return Err(error);
    }
    // A reader of the output that has gone does not keep the service from its new files.
    let mut printed = print(&plan.report("wrote"));
    let root = arguments.root.as_deref();
    if below(root, DEFAULT_DATA_DIR).join(CERTIFICATE).exists() {
        printed = printed.and_then(|()| print(HAS_CERTIFICATE));
    }
    let (Some(before), Some(interrupted)) = (before, interrupted) else {
        printed?;
        return Ok(print(NOT_STARTED)?);
    };
    let started = tokio::select! {
        biased;
        started = start(&commands, &plan, &mut print) => started,
        signal = interrupted => Err(format!("{signal} before the agent had a session")),
    };
    match started {
        Ok(outcome) => {
            printed?;
            Ok(print(&outcome)?)
        }
        Err(reason) => Err(JoinCommandError::NotJoined {
            reason,
            undone: before.restore(plan.has_changes(), || plan.restore()),
        }),
    }
}

/// Starts the service and waits for a session. Returns the lines for the operator.
///
/// # Errors
/// Returns the reason why there is no session.
async fn start(
    commands: &[&[&str]],
    plan: &Plan,
    print: &mut impl FnMut(&str) -> io::Result<()>,
) -> Result<String, String> {
    let started = SystemTime::now();
    for command in commands {
        if let Err(failure) = service::systemctl(command) {
            return Err(ServiceState::observe(started).end.unwrap_or(failure));
        }
        let _reader_gone = print(&format!("ran {}\n", service::shown(command)));
    }
    let settings = plan.settings().map_err(|error| error.to_string())?;
    let address = meta_endpoint(&settings).map_err(|error| error.to_string())?;
    let sessions = wait::session(&address, started, print).await?;
    Ok(format!("joined: {sessions}"))
}

/// Reads the token from a file, or from standard input. From a terminal only one line is read, and
/// not shown.
fn read_token(file: Option<&Path>) -> Result<JoinToken, JoinCommandError> {
    let stdin = io::stdin();
    let text = match file {
        Some(path) if path != Path::new("-") => files::read_operator_file(path)?,
        None if stdin.is_terminal() => return Err(JoinCommandError::NoToken),
        Some(_) if stdin.is_terminal() => {
            read_secret("join token").map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => JoinCommandError::Interrupted,
                _ => JoinCommandError::File(error),
            })?
        }
        Some(_) | None => {
            let mut text = Zeroizing::new(Vec::with_capacity(TOKEN_ROOM));
            stdin.lock().take(TOKEN_MAX_BYTES).read_to_end(&mut text)?;
            text
        }
    };
    check_token(&String::from_utf8_lossy(&text)).map_err(JoinCommandError::InvalidToken)
}

/// Returns the token if an agent can use it without any other file.
fn check_token(text: &str) -> Result<JoinToken, String> {
    if text.trim().is_empty() {
        return Err("is empty; 'tunnel-server token create' prints a token".to_owned());
    }
    let token = parse_token(text)?;
    if token.ca_hash().is_none() {
        return Err("the token pins no CA (it has no third part); copy the whole token".to_owned());
    }
    Ok(token)
}

/// Returns the command that runs an agent without systemd.
fn run_command(arguments: &JoinArgs) -> String {
    let mut command = "tunnel-agent run".to_owned();
    for server in &arguments.server {
        command.push_str(" --server ");
        command.push_str(server);
    }
    if let Some(name) = &arguments.node_name {
        command.push_str(" --node-name ");
        command.push_str(name);
    }
    let file = arguments.token_file.clone();
    let file = file.filter(|file| file != Path::new("-"));
    let file = file.unwrap_or_else(|| PathBuf::from("TOKEN-FILE"));
    one_line(format!("{command} --token-file {}", file.display()))
}

/// Directory that exists while systemd is the init system; see sd_booted(3).
const SYSTEMD_RUNS: &str = "/run/systemd/system";
/// Room for a token, whose text is 142 bytes. A buffer that grows would leave copies in memory.
const TOKEN_ROOM: usize = 4096;
const TOKEN_MAX_BYTES: u64 = 4000;
const HAS_CERTIFICATE: &str =
    "note: /var/lib/tunnel-agent has a certificate, which the agent uses instead of the token\n";
const NOT_STARTED: &str = "not started: 'systemctl enable --now tunnel-agent' starts the service\n";

#[cfg(test)]
mod tests;
