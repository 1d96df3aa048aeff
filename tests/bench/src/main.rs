//! The benchmark. Compares the throughput, the latency and the cost of the tunnel with those of a
//! direct connection and of two plain relays. `make bench` runs it.

use std::process::ExitCode;

use anyhow::Result;
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
mod nginx;
mod report;
mod scale;
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
    /// Runs cases, writes report.json and prints its path. tests/bench/report.py shows the report.
    Run(driver::Run),
    /// Counts instructions and allocations with valgrind; exits with 1 when a count is above its
    /// limit.
    Guards,
    /// Simulates many agents and several servers in virtual time, and prints a table.
    Scale(scale::Scale),
    #[command(hide = true)]
    Work(guards::Worker),
    #[command(hide = true)]
    Edge(components::edge::Edge),
    #[command(hide = true)]
    Relay(components::relay::Relay),
    #[command(hide = true)]
    TransportRelay(components::transport_relay::TransportRelay),
    #[command(hide = true)]
    Agents(components::agents::Agents),
    #[command(hide = true)]
    HostileAgent(components::hostile_agent::HostileAgent),
    #[command(hide = true)]
    FillDirectory(components::directory::FillDirectory),
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    match Cli::parse().verb {
        Verb::Run(run) => run.run().await,
        Verb::Guards => guards::run(),
        Verb::Scale(scale) => scale.run(),
        Verb::Work(worker) => worker.run().await,
        Verb::Edge(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::Relay(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::TransportRelay(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::Agents(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::HostileAgent(part) => part.run().await.map(|()| ExitCode::SUCCESS),
        Verb::FillDirectory(part) => part.run().map(|()| ExitCode::SUCCESS),
    }
}
