//! The benchmark detects a slowdown, and reports none where there is none.

use std::path::Path;

use anyhow::{Result, ensure};
use tunnel_tests::process::{Finished, Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip};

#[tokio::test]
async fn planted_slowdown_is_found() -> Result<()> {
    let Some(python) = or_skip(Program::tool(Tool::Python)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let before = relays(&scratch.path().join("before"), "0s").await?;
    let slower = relays(&scratch.path().join("slower"), WASTE).await?;
    let same = report(&python, &["compare", &before, &before]).await?;
    ensure!(same.code() == Some(0), "{same}");
    let worse = report(&python, &["compare", &before, &slower]).await?;
    ensure!(worse.code() == Some(1), "{worse}");
    ensure!(
        worse.out.contains("case 0, relay-h2, down, server + agent"),
        "{worse}"
    );
    Ok(())
}

#[tokio::test]
async fn tables_and_plots_are_written() -> Result<()> {
    let Some(python) = or_skip(Program::tool(Tool::Python)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let json = relays(&scratch.path().join("shown"), "0s").await?;
    let shown = report(&python, &["show", &json]).await?;
    ensure!(shown.code() == Some(0), "{shown}");
    let text = std::fs::read_to_string(scratch.path().join("shown/report.md"))?;
    ensure!(text.contains("| down, MB/s | |"), "{text}");
    ensure!(
        scratch.path().join("shown/case-0.svg").is_file(),
        "no plot: {shown}"
    );
    Ok(())
}

#[tokio::test]
async fn report_script_passes_its_own_tests() -> Result<()> {
    let Some(python) = or_skip(Program::tool(Tool::Python)) else {
        return Ok(());
    };
    let ran = python.arg(REPORT_TESTS).run().await?;
    ensure!(ran.code() == Some(0), "{ran}");
    Ok(())
}

/// Runs the case of the relays alone, which needs no release build. Returns the path of its report.
async fn relays(out: &Path, waste: &str) -> Result<String> {
    let args = [
        "run", "--case", "0", "--rounds", "3", "--hurry", "0.1", "--noisy", "--waste", waste,
    ];
    let program = Program::at(Path::new(env!("CARGO_BIN_EXE_bench")));
    let ran = program.args(args).arg("--out").arg(out).run().await?;
    Ok(ran.ok()?.trim().to_owned())
}

async fn report(python: &Program, args: &[&str]) -> Result<Finished> {
    python
        .clone()
        .arg(REPORT)
        .args(args.iter().copied())
        .run()
        .await
}

/// CPU time that the relay over h2 wastes on each read, many times the cost of a read.
const WASTE: &str = "2ms";
const REPORT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/report.py");
const REPORT_TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/test_report.py");
