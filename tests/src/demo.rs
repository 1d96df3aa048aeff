//! The guided tour (`make demo`), and the fake servers that the tour and the scenarios run inside
//! namespaces.

mod demo_env;
mod fakes;
mod folder;
mod terminal;
mod tour;

use std::io;
use std::process::ExitCode;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use self::demo_env::DemoEnv;
use self::terminal::Terminal;

pub use fakes::{ApiServer, api_server, edge_sites, resolver};

/// Runs the program `demo` with its arguments.
///
/// # Errors
/// Returns an error if the arguments are wrong or the requested action fails.
pub async fn run(arguments: &[String]) -> Result<ExitCode> {
    let args: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *args {
        [] => guide(false).await,
        ["--once"] => guide(true).await,
        ["--help" | "-h"] => {
            io::Write::write_all(&mut io::stdout(), HELP.as_bytes()).context("print help")?;
            Ok(ExitCode::SUCCESS)
        }
        _ => fakes::run(&args).await.map(|()| ExitCode::SUCCESS),
    }
}

/// Shows the whole tour. Stays up until a signal, unless `once` is set.
async fn guide(once: bool) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for TERM")?;
    let stop_signal = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    tokio::pin!(stop_signal);
    let terminal = Terminal::new();
    terminal.title("Culvert: requests by node name reach edges behind NAT");
    let shown = async {
        let demo_env = DemoEnv::start(&terminal).await?;
        let failures = tour::show(&terminal, &demo_env).await?;
        anyhow::Ok((demo_env, failures))
    };
    let (demo_env, failures) = tokio::select! {
        shown = shown => shown?,
        () = &mut stop_signal => return Ok(ExitCode::FAILURE),
    };
    if !once {
        terminal.invite(&demo_env);
        stop_signal.await;
        terminal.message("\nstopping");
    }
    demo_env.stop().await?;
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

Fake servers that the tour and the tests run inside namespaces:
  demo site NODE --exporter ADDR --kubelet ADDR   targets of a node
  demo resolver ADDR answers|silent               a resolver that prints each query
  demo apiserver NAMESPACE/ACCOUNT                an API server that prints the paths of its kubeconfigs
";
