//! Runs the images if a container engine and static binaries are present. `make static` builds the
//! binaries, which takes too long for `make test`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use tunnel_tests::manifests::repository;
use tunnel_tests::process::Program;
use tunnel_tests::tools::{Skip, Tool, or_skip, target_dir};

/// Exit code of the script if a requirement is missing.
const SKIPPED: i32 = 77;

/// Returns the folder where `deploy/static.sh` puts this machine's binaries.
fn binaries() -> Result<PathBuf, Skip> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let folder = target_dir().map(|target| target.join("static").join(triple).join("dist"));
    folder
        .filter(|folder| folder.join("tunnel-server").is_file())
        .ok_or_else(|| Skip::because("needs static binaries (make static)"))
}

#[tokio::test(flavor = "multi_thread")]
async fn images_run_read_only_without_capabilities_enroll_and_pass_a_request() -> Result<()> {
    let Some(binaries) = or_skip(binaries()) else {
        return Ok(());
    };
    let Some(bash) = or_skip(Program::tool(Tool::Bash)) else {
        return Ok(());
    };
    let run = bash.arg(repository().join("tests/images.sh")).arg(binaries);
    let finished = run.run().await?;
    if finished.code() == Some(SKIPPED) {
        let reason = finished
            .out
            .lines()
            .find_map(|line| line.strip_prefix("skip: "));
        let skipped: Result<(), Skip> = Err(Skip::because(reason.unwrap_or("no reason")));
        or_skip(skipped);
        return Ok(());
    }
    if finished.code() != Some(0) {
        bail!("{finished}");
    }
    Ok(())
}
