//! The benchmark detects a slowdown, and reports none where there is none.

use std::path::Path;

use anyhow::{Result, ensure};
use tunnel_tests::process::{Finished, Program, ScratchDir};

/// CPU time that the relays waste on each read, many times the cost of a read.
const WASTE: &str = "500us";

async fn bench(words: &[&str]) -> Result<Finished> {
    let program = Program::at(Path::new(env!("CARGO_BIN_EXE_bench")));
    program.args(words.iter().copied()).run().await
}

/// Runs the floor case alone, which needs no release build.
async fn floor(out: &str, waste: &str) -> Result<()> {
    let run = [
        "run", "--case", "0", "--rounds", "3", "--hurry", "0.1", "--noisy",
    ];
    let ran = bench(&[&run[..], &["--out", out, "--waste", waste]].concat()).await?;
    ensure!(ran.code() == Some(0), "{ran}");
    Ok(())
}

#[tokio::test]
async fn planted_slowdown_is_found() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let folder = |name: &str| scratch.path().join(name).to_string_lossy().into_owned();
    let (before, slower) = (folder("before"), folder("slower"));
    floor(&before, "0s").await?;
    floor(&slower, WASTE).await?;
    let report = |folder: &str| format!("{folder}/report.json");
    let same = bench(&["compare", &report(&before), &report(&before)]).await?;
    ensure!(same.code() == Some(0), "{same}");
    let worse = bench(&["compare", &report(&before), &report(&slower)]).await?;
    ensure!(worse.code() == Some(1), "{worse}");
    ensure!(
        worse.out.contains("case 0, floor, down, server + agent"),
        "{worse}"
    );
    Ok(())
}
