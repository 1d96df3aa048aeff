//! The guided tour (`make demo`), and the small programs that the tour and the scenarios run inside namespaces.

mod errand;
mod stage;
mod terminal;
mod tour;

use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use self::stage::Stage;
use self::terminal::Terminal;

pub use errand::{ApiServer, Tally, api_server, dial, get, resolver, site, tally};

/// What the program `demo` does with its arguments.
///
/// # Errors
/// The arguments are wrong, or what they ask for cannot be done.
pub async fn run(arguments: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *words {
        [] => guide(false).await,
        ["--once"] => guide(true).await,
        ["--help" | "-h"] => {
            io::Write::write_all(&mut io::stdout(), HELP.as_bytes()).context("print help")?;
            Ok(ExitCode::SUCCESS)
        }
        [errand, ref rest @ ..] if !errand.starts_with('-') => errand::run(errand, rest).await,
        [unknown, ..] => bail!("unknown argument {unknown}; --help tells what there is"),
    }
}

/// Shows everything; then stays up until it is told to end, unless `once`.
async fn guide(once: bool) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for TERM")?;
    let told_to_end = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::pin!(told_to_end);
    let terminal = Terminal::new();
    terminal.title("Culvert: requests by node name reach edges behind NAT");
    let shown = async {
        let stage = Stage::set(&terminal).await?;
        let failures = tour::show(&terminal, &stage).await?;
        anyhow::Ok((stage, failures))
    };
    let (stage, failures) = tokio::select! {
        shown = shown => shown?,
        () = &mut told_to_end => return Ok(ExitCode::FAILURE),
    };
    if !once {
        terminal.invite(&stage);
        told_to_end.await;
        terminal.say("\nstopping");
    }
    stage.clear().await?;
    Ok(if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

const HELP: &str = "\
The guided tour of Culvert: one server, two edge sites, and what can be done with them.

Usage: demo [--once]

  --once    show the tour, check each answer, exit with 0 or 1; without it everything stays up until Ctrl-C

Small programs that the tour and the tests run inside namespaces:
  demo site NODE [--exporter ADDR] [--kubelet ADDR]   stand-in targets of a node
  demo get ADDR HOST PATH [--ca FILE] [--head] [--lines N]
                                                      one request to ADDR, with that Host
  demo exec ADDR HOST PATH TEXT [--ca FILE]           upgrades, sends TEXT, prints what comes back
  demo tally ADDR HOST PATH COUNT CONNECTIONS         counts the answers to many requests by status and first line
  demo dns ADDR NAME                                  the addresses that the DNS at ADDR has for NAME
  demo resolver ADDR answers|silent                   a stand-in resolver that tells what it is asked
  demo apiserver NAMESPACE/ACCOUNT...                 a stand-in API server; tells where its kubeconfigs are
  demo dial ADDR                                      tells whether ADDR takes a TCP connection
";
