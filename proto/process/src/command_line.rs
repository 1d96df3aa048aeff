//! What the command lines of both binaries have in common: usage errors, the variables that flags
//! read, and the runtime of short verbs.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::process::ExitCode;

use clap::{Arg, Command, Parser};

use crate::{runtime, telemetry};

/// Parses the command line and runs its verb. Prints an error of either, and returns the exit code:
/// for an error of the verb that of `exit_code`.
pub fn run<C: Parser, E: Display>(
    name: &str,
    verb: impl FnOnce(C) -> Result<ExitCode, E>,
    exit_code: impl FnOnce(&E) -> u8,
) -> ExitCode {
    match C::try_parse() {
        Ok(arguments) => verb(arguments).unwrap_or_else(|error| {
            telemetry::print_error(&format!("{name}: {error:#}"));
            exit_code(&error).into()
        }),
        Err(usage) => {
            let _closed_output = usage.print();
            let code = if usage.use_stderr() { EXIT_USAGE } else { 0 };
            code.into()
        }
    }
}

/// Runs a short verb on a runtime of its own, which has one thread.
///
/// # Errors
/// When the runtime cannot be started.
pub fn block_on<T>(verb: impl Future<Output = T>) -> io::Result<T> {
    let runtime = runtime::build(Some(1))?;
    let output = runtime.block_on(verb);
    // A thread may still be blocked, by a name lookup, a directory listing or standard input.
    runtime.shutdown_background();
    Ok(output)
}

/// Returns the environment variables that begin with `prefix` and that no flag reads. Kubernetes
/// injects such variables for every Service.
pub fn unknown_variables(prefix: &str, command: &Command) -> Vec<String> {
    let known = known_variables(command);
    std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with(prefix) && !known.contains(name))
        .collect()
}

/// Returns the names of all environment variables that the flags of a command and of its verbs read.
fn known_variables(command: &Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(Arg::get_env);
    let mut names: BTreeSet<String> = own
        .filter_map(|name| name.to_str())
        .map(str::to_owned)
        .collect();
    for verb in command.get_subcommands() {
        names.extend(known_variables(verb));
    }
    names
}

/// Exit code for usage and configuration errors (EX_USAGE of sysexits.h).
pub const EXIT_USAGE: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_a_verb_and_of_its_verbs_are_known() {
        let flag = |id: &'static str, variable: &'static str| Arg::new(id).env(variable);
        let nested = Command::new("show").arg(flag("output", "CULVERT_OUTPUT"));
        let verb = Command::new("run")
            .args([flag("server", "CULVERT_SERVER"), Arg::new("node")])
            .subcommand(nested);
        let known = known_variables(&Command::new("culvert").subcommand(verb));
        let expected = ["CULVERT_OUTPUT", "CULVERT_SERVER"].map(str::to_owned);
        assert_eq!(known, BTreeSet::from(expected));
    }
}
