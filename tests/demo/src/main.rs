//! The guided tour (`make demo`): two edges with the same address behind NAT, reached by their
//! names.

mod demo_env;
mod folder;
mod output;
mod promises;
mod terminal;
mod tour;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use self::demo_env::DemoEnv;
use self::terminal::Terminal;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments).await {
        Ok(code) => code,
        Err(error) => {
            // Errors are lost if standard error is closed.
            let _ = writeln!(io::stderr(), "demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &[String]) -> Result<ExitCode> {
    let args: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *args {
        [] => guide(false).await,
        ["--once"] => guide(true).await,
        ["--help" | "-h"] => {
            io::stdout()
                .write_all(HELP.as_bytes())
                .context("print help")?;
            Ok(ExitCode::SUCCESS)
        }
        _ => bail!("unknown arguments {args:?}; see --help"),
    }
}

/// Shows the whole tour. Stays up until a signal, unless `once` is set.
async fn guide(once: bool) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for TERM")?;
    // Of a terminal that is closed.
    let mut hangup = signal(SignalKind::hangup()).context("listen for HUP")?;
    let stop_signal = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    };
    tokio::pin!(stop_signal);
    let terminal = Terminal::new();
    terminal.title("Culvert: requests by node name reach edges behind NAT");
    let shown = async {
        let mut demo_env = DemoEnv::start(&terminal).await?;
        let failures = tour::show(&terminal, &mut demo_env).await?;
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
";
