//! Simulated installations of several sizes, as a table in Markdown.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use tunnel_scale::{ScaleCase, ScaleOptions, ScaleReport, simulate};

/// The simulations to run: every combination of the values.
#[derive(Debug, clap::Args)]
pub(crate) struct Scale {
    /// Numbers of nodes.
    #[arg(long, value_delimiter = ',', default_value = "1000")]
    nodes: Vec<usize>,
    /// Numbers of servers, 2 to 64.
    #[arg(long, value_delimiter = ',', default_value = "3")]
    replicas: Vec<usize>,
    /// Numbers of sessions that an agent wants.
    #[arg(long, value_delimiter = ',', default_value = "2")]
    k: Vec<usize>,
    /// Cases; all by default.
    #[arg(long, value_delimiter = ',')]
    case: Vec<ScaleCase>,
    /// Handshakes that a server completes in a second.
    #[arg(long, default_value_t = 500)]
    handshakes: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Scale {
    pub(crate) fn run(&self) -> Result<ExitCode> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "| {} |", COLUMNS.join(" | "))?;
        writeln!(out, "|{}", " --- |".repeat(COLUMNS.len()))?;
        for options in self.options() {
            let report = simulate(&options)?;
            writeln!(out, "| {} |", row(&options, &report).join(" | "))?;
            out.flush()?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> Vec<ScaleOptions> {
        let cases = if self.case.is_empty() {
            ScaleCase::value_variants()
        } else {
            self.case.as_slice()
        };
        let mut options = Vec::new();
        for &nodes in &self.nodes {
            for &replicas in &self.replicas {
                for &k in &self.k {
                    options.extend(cases.iter().map(|&case| ScaleOptions {
                        case,
                        nodes,
                        replicas,
                        k,
                        handshakes_per_second: self.handshakes,
                        seed: self.seed,
                    }));
                }
            }
        }
        options
    }
}

const COLUMNS: [&str; 18] = [
    "case",
    "nodes",
    "servers",
    "K",
    "sessions opened",
    "dials (refused)",
    "sessions of a server",
    "announcements/s (peak)",
    "KB/s (peak)",
    "all reachable after",
    "nodes unreachable",
    "for at most",
    "nodes without a session",
    "for at most",
    "all K sessions after",
    "last move after",
    "directory, bytes an entry (estimate)",
    "API writes",
];

fn row(options: &ScaleOptions, report: &ScaleReport) -> [String; COLUMNS.len()] {
    let case = options.case.to_possible_value();
    let missing = format!("never: {} without", report.incomplete_nodes);
    [
        case.map_or_else(String::new, |case| case.get_name().to_owned()),
        options.nodes.to_string(),
        options.replicas.to_string(),
        options.k.to_string(),
        report.moves.to_string(),
        format!("{} ({})", report.dials, report.refused),
        format!("{} to {}", report.sessions_min, report.sessions_max),
        format!(
            "{:.0} ({})",
            report.announcements_mean, report.announcements_peak
        ),
        format!(
            "{:.0} ({})",
            report.bytes_mean / 1e3,
            report.bytes_peak / 1000
        ),
        report
            .reachable_after
            .map_or_else(|| "never".to_owned(), seconds),
        report.unreachable_nodes.to_string(),
        seconds(report.unreachable_longest),
        report.lost_nodes.to_string(),
        seconds(report.lost_longest),
        report.complete_after.map_or(missing, seconds),
        seconds(report.last_move_after),
        format!("{:.0}", report.entry_bytes),
        report.api_writes.to_string(),
    ]
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
