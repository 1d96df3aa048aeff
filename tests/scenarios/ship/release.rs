//! `deploy/release.sh` refuses mistakes, and makes a commit and a tag. The script runs in clones that
//! build nothing.

use anyhow::{Result, bail};
use tunnel_tests::manifests::repository;
use tunnel_tests::process::Program;
use tunnel_tests::tools::{Tool, or_skip};

#[tokio::test(flavor = "multi_thread")]
async fn release_needs_equal_versions_and_a_clean_clone() -> Result<()> {
    let Some(bash) = or_skip(Program::tool(Tool::Bash)) else {
        return Ok(());
    };
    let finished = bash
        .arg(repository().join("tests/release.sh"))
        .run()
        .await?;
    if finished.code() != Some(0) {
        bail!("{finished}");
    }
    Ok(())
}
