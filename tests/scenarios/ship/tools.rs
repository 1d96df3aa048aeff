//! `tests/tools.sh` with a stand-in for apt.

use std::os::unix::fs::{PermissionsExt, symlink};

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::manifests::repository;
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip};

#[tokio::test(flavor = "multi_thread")]
async fn tools_wait_for_another_apt_and_mark_the_folder_of_the_build() -> Result<()> {
    let Some(bash) = or_skip(Program::tool(Tool::Bash)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let (bin, target) = (scratch.path().join("bin"), scratch.path().join("target"));
    std::fs::create_dir(&bin)?;
    for name in ["bash", "cat", "dirname", "grep", "id", "mkdir", "rm"] {
        let file = ["/usr/bin", "/bin"].map(|folder| std::path::Path::new(folder).join(name));
        let file = file.into_iter().find(|file| file.exists());
        symlink(file.context(name)?, bin.join(name))?;
    }
    for (name, script) in [("apt-get", APT_GET), ("dpkg-deb", DPKG_DEB), ("sleep", "")] {
        let file = scratch.file(&format!("bin/{name}"), format!("#!/bin/bash\n{script}"))?;
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755))?;
    }
    let tools = bash
        .arg(repository().join("tests/tools.sh"))
        .arg("demo")
        .env("PATH", &bin)
        .env("CARGO_TARGET_DIR", &target);
    let printed = tools.run().await?.ok()?;
    ensure_contains(
        &printed,
        &["waiting for another apt: E: Could not get lock"],
    )?;
    ensure!(!printed.contains("missing"), "{printed}");
    ensure!(target.join("CACHEDIR.TAG").is_file());
    Ok(())
}

/// Another process holds the lock at the first call.
const APT_GET: &str = r#"
if mkdir "$CARGO_TARGET_DIR/called" 2>/dev/null; then
  echo "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 42 (apt-get)" >&2
  exit 100
fi
case " $* " in
  *" download "*) : >"${!#}_1_all.deb" ;;
esac
"#;

/// Unpacks no file: the script looks only at the exit code.
const DPKG_DEB: &str = "exit 0\n";
