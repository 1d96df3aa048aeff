//! The real kubectl programs that scenarios run: every installed kubectl, including Debian's.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;
use tunnel_tests::process::{Finished, Program, ScratchDir};
use tunnel_tests::tools::{Skip, Tool};

/// A kubectl program with an administrator's credentials and caches of its own. Command lines are
/// split at spaces.
pub(super) struct Kubectl {
    file: PathBuf,
    kubeconfig: PathBuf,
    home: ScratchDir,
}

impl Kubectl {
    pub(super) fn new(file: PathBuf, kubeconfig: PathBuf) -> Result<Self> {
        Ok(Self {
            file,
            kubeconfig,
            home: ScratchDir::new()?,
        })
    }

    /// Returns the program with this command line.
    pub(super) fn program(&self, line: &str) -> Program {
        Program::at(&self.file)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.home.path())
            .args(line.split_whitespace())
    }

    async fn run(&self, line: &str, input: &str) -> Result<Finished> {
        self.program(line).run_with(input.as_bytes()).await
    }

    pub(super) async fn ok(&self, line: &str) -> Result<String> {
        self.run(line, "").await?.ok()
    }

    /// Applies the objects of a file with this content.
    pub(super) async fn apply(&self, flags: &str, content: &str) -> Result<String> {
        let line = format!("apply {flags} -f -");
        self.run(&line, content).await?.ok()
    }
}

/// Returns all installed kubectl programs.
pub(crate) fn kubectls() -> Result<Vec<PathBuf>, Skip> {
    let all = Tool::Kubectl.find_all();
    if all.is_empty() {
        return Err(Skip::because("needs kubectl"));
    }
    Ok(all)
}

/// Returns the kubectl programs that can render the overlays, whose field `patches` begins with 1.21.
pub(crate) fn kustomizers() -> Result<Vec<PathBuf>, Skip> {
    let mut files = kubectls()?;
    files.retain(|file| minor_version(file) >= Some(21));
    if files.is_empty() {
        return Err(Skip::because("needs kubectl 1.21"));
    }
    Ok(files)
}

fn minor_version(kubectl: &Path) -> Option<u32> {
    let version = std::process::Command::new(kubectl)
        .args(["version", "--client", "-o", "json"])
        .output()
        .ok()?;
    let version: Value = serde_json::from_slice(&version.stdout).ok()?;
    let minor = version["clientVersion"]["minor"].as_str()?;
    // Builds of vendors have a "+".
    minor.trim_end_matches('+').parse().ok()
}
