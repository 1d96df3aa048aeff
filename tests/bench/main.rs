//! The benchmark. Compares the throughput, the latency and the cost of the tunnel with those of a
//! direct connection and of two plain relays. `make bench` runs it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

mod bench;
mod cases;
mod client;
mod components;
mod driver;
mod guards;
mod load;
mod machine;
mod metric;
mod report;
mod systems;
mod target;

#[derive(Debug, Parser)]
#[command(about = "Compares Culvert with a direct connection and two plain relays")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Runs cases and writes target/bench/report.{md,json} and one plot per case.
    Run(driver::Run),
    /// Prints an existing report.
    Show {
        /// Path of report.json; target/bench/report.json by default.
        report: Option<PathBuf>,
        /// Document whose tables are replaced by those of the report.
        #[arg(long)]
        docs: Option<PathBuf>,
    },
    /// Compares two reports; exits with 1 when CPU time, memory or failures became worse.
    Compare {
        /// Path of the older report.json.
        base: PathBuf,
        /// Path of the newer report.json; target/bench/report.json by default.
        new: Option<PathBuf>,
    },
    /// Counts instructions and allocations with valgrind; exits with 1 when a count is above its
    /// limit.
    Guards,
    #[command(hide = true)]
    Work(guards::Worker),
    #[command(hide = true)]
    Edge(components::edge::Edge),
    #[command(hide = true)]
    Relay(components::relay::Relay),
    #[command(hide = true)]
    Raw(components::raw::Sender),
    #[command(hide = true)]
    Agents(components::agents::Agents),
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    match Cli::parse().verb {
        Verb::Run(run) => run.run().await,
        Verb::Show { report, docs } => {
            report::show(&read(&newest(report)?)?, docs.as_deref())?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Compare { base, new } => report::compare::run(&read(&base)?, &read(&newest(new)?)?),
        Verb::Guards => guards::run(),
        Verb::Work(worker) => worker.run().await,
        Verb::Edge(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::Relay(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::Raw(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::Agents(part) => part.run().await.map(|()| ExitCode::SUCCESS),
    }
}

fn newest(requested: Option<PathBuf>) -> Result<PathBuf> {
    match requested {
        Some(requested) => Ok(requested),
        None => Ok(report::folder()?.join("report.json")),
    }
}

fn read(path: &Path) -> Result<report::Report> {
    report::json::read(path).with_context(|| format!("report {}", path.display()))
}
