//! The verb `doctor`: looks for what keeps this node from being reached, and says how to fix it.
//!
//! `facts` gathers, `checks` decides and is pure. The command only reads: it enrolls with no
//! server, and its connections end after their handshake.

use std::io;
use std::time::Duration;

use tunnel_doctor::{Explanation, Report};
use tunnel_process::output::OutputFormat;
use tunnel_proto::wire::name::Port;

use crate::config::Config;

mod checks;
mod cloud;
mod credential;
mod facts;
mod names;
mod probe;
mod report;

/// The flags of `doctor`, except for those of `run`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DoctorOptions {
    /// Format of the report
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Port of this node that callers need: may the agent dial it, and does a program listen there;
    /// repeatable, or separated by commas
    #[arg(long, value_name = "PORT", value_delimiter = ',')]
    pub port: Vec<Port>,
    /// Check to do, as in D19.udp, or D19 for all of them; repeatable, or separated by commas
    /// [default: all]
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = check_group)]
    pub only: Vec<String>,
    /// Print what a check looks at, and how its faults are fixed, and exit
    #[arg(long, value_name = "ID", value_parser = check_id)]
    pub explain: Option<String>,
    /// Repeat the checks until there is no error, or for this time
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = humantime::parse_duration)]
    pub wait: Duration,
    /// Time limit of the checks, or of each repetition
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// Does the checks and prints the report. Returns the exit code: 0 without faults, 1 with warnings,
/// 2 with errors.
///
/// # Errors
/// Returns an error if standard output cannot be written.
pub async fn run(config: &Config, options: &DoctorOptions) -> io::Result<u8> {
    let examine = async || examine(config, options).await;
    Report::print_when_done(options.wait, options.output, examine).await
}

/// Does the checks once.
pub async fn examine(config: &Config, options: &DoctorOptions) -> Report {
    let gathered = facts::gather(config, &options.port, options.timeout);
    let mut report = checks::examine(&Box::pin(gathered).await);
    report.retain(&selected(&options.only));
    report
}

/// Prints the explanation of a check.
///
/// # Errors
/// Returns an error if standard output cannot be written.
pub fn explain(id: &str, format: OutputFormat) -> io::Result<()> {
    Explanation::print_from(report::EXPLANATIONS, id, format)
}

/// Returns the ids of the checks that `only` names, alone or as a group.
fn selected(only: &[String]) -> Vec<String> {
    let ids = report::EXPLANATIONS.iter().map(|known| known.id);
    let ids = ids.filter(|id| only.iter().any(|only| id == only || group(id) == only));
    ids.map(str::to_owned).collect()
}

/// Returns the group of a check, which is the id up to the dot.
fn group(id: &str) -> &str {
    id.split_once('.').map_or(id, |(group, _name)| group)
}

/// Parses the id of a check.
fn check_id(text: &str) -> Result<String, String> {
    Explanation::parse_id(report::EXPLANATIONS, text)
}

/// Parses the id of a check, or of a group of checks.
fn check_group(text: &str) -> Result<String, String> {
    let mut groups = report::EXPLANATIONS.iter().map(|known| group(known.id));
    match groups.find(|group| group.eq_ignore_ascii_case(text)) {
        Some(group) => Ok(group.to_owned()),
        None => check_id(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_groups_are_known_in_either_case_and_others_are_refused() {
        assert_eq!(check_id("d19.UDP").as_deref(), Ok("D19.udp"));
        assert!(
            check_id("D19")
                .unwrap_err()
                .contains("D19.resolve, D19.tcp")
        );
        assert_eq!(check_group("d19").as_deref(), Ok("D19"));
        assert_eq!(check_group("d21").as_deref(), Ok("D21"));
        assert!(check_group("D1").is_err());
    }

    #[test]
    fn group_selects_all_of_its_checks_and_an_id_one() {
        let selected = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|id| (*id).to_owned()).collect();
            selected(&only)
        };
        assert!(selected(&[]).is_empty());
        assert_eq!(selected(&["D20", "D19.udp"]), ["D19.udp", "D20"]);
        assert_eq!(selected(&["D19"]).len(), 8);
        assert_eq!(selected(&["D16"]).len(), 5);
    }
}
