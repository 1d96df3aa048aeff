//! Helper programs of the benchmark. Each is a process of this binary with other arguments, so that
//! its CPU time can be read.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tunnel_tests::process::{Process, Program};

pub(crate) mod agents;
pub(crate) mod directory;
pub(crate) mod edge;
pub(crate) mod hostile_agent;
pub(crate) mod relay;
pub(crate) mod transport_relay;

const START: Duration = Duration::from_secs(10);

/// Returns this binary with `arguments`.
pub(crate) fn program(arguments: &[String]) -> Result<Program> {
    let own = std::env::current_exe().context("path of this program")?;
    // Each QUIC endpoint of the simulated agents allocates 3 MiB for datagrams and touches a few
    // pages of it. Without this threshold the allocator may take such a buffer from freed memory
    // and clear all of it, which touches every page. A table that was too small for a directory is
    // returned to the system with it.
    let program = Program::at(&own).args(arguments);
    Ok(program.env("MALLOC_MMAP_THRESHOLD_", "1048576"))
}

/// Starts this binary with `arguments` and waits until the process prints the address on which it
/// listens.
pub(crate) async fn start(arguments: &[String]) -> Result<(Process, SocketAddr)> {
    let mut process = program(arguments)?.start()?;
    let what = arguments.first().map_or("part", String::as_str).to_owned();
    let address = process.wait_for_line(&what, START, |line| {
        line.strip_prefix(LISTENING)?.trim().parse().ok()
    });
    let address = address.await?;
    Ok((process, address))
}

/// Prints the address that [`start`] waits for.
fn listening(address: SocketAddr) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{LISTENING}{address}")?;
    Ok(out.flush()?)
}

const LISTENING: &str = "listening ";
