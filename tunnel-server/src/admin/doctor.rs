//! The command `doctor`: looks for what keeps requests from reaching nodes, and says how to fix it.
//!
//! `facts` gathers, `checks` decides and is pure. The command only reads.

use std::path::PathBuf;
use std::time::Duration;

use tunnel_doctor::{Explanation, Report};
use tunnel_process::output::OutputFormat;
use tunnel_proto::wire::name::NodeName;

use super::verbs::{VerbError, load_names};
use crate::config::Config;

mod checks;
mod facts;
mod report;
mod survey;

/// The flags of `doctor`, except for those of `run`.
#[derive(Debug, Clone, clap::Args)]
pub struct DoctorOptions {
    /// Format of the report
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Node to check; repeatable [default: all]
    #[arg(long, value_name = "NAME")]
    pub node: Vec<NodeName>,
    /// File with more nodes to check, one name a line, with comments after #; - is standard input
    #[arg(long, value_name = "FILE")]
    pub node_file: Option<PathBuf>,
    /// Check to do, as in D09; repeatable, or separated by commas [default: all]
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = check_id)]
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
/// Returns [`VerbError::NamesFile`] if the file of names cannot be used, and [`VerbError::File`] if
/// standard output cannot be written.
pub async fn run(config: &Config, options: &DoctorOptions) -> Result<u8, VerbError> {
    let nodes = load_names(&options.node, options.node_file.as_deref())?;
    let examine = async || examine(config, options, &nodes).await;
    Ok(Report::print_when_done(options.wait, options.output, examine).await?)
}

/// Prints the explanation of a check.
///
/// # Errors
/// Returns [`VerbError::File`] if standard output cannot be written.
pub fn explain(id: &str, format: OutputFormat) -> Result<(), VerbError> {
    Ok(Explanation::print_from(report::EXPLANATIONS, id, format)?)
}

async fn examine(config: &Config, options: &DoctorOptions, nodes: &[NodeName]) -> Report {
    let gathered = facts::gather(config, nodes, options.timeout);
    let mut report = checks::examine(&Box::pin(gathered).await);
    report.retain(&options.only);
    report
}

/// Parses the id of a check.
fn check_id(text: &str) -> Result<String, String> {
    Explanation::parse_id(report::EXPLANATIONS, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_known_in_either_case_and_others_are_refused() {
        assert_eq!(check_id("d09").as_deref(), Ok("D09"));
        assert!(check_id("D99").unwrap_err().contains("D01, D02"));
    }
}
