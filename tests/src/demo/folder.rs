//! The files of the tour, and shell lines that use them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::netns::Namespace;
use crate::process::ScratchDir;
use crate::tools::{bin_dir, target_dir};

/// The directory for the files of all processes, with a name that is short enough to read and to
/// type.
#[derive(Debug)]
pub(super) struct Folder {
    scratch: ScratchDir,
    link: Option<PathBuf>,
}

impl Folder {
    pub(super) fn new() -> Result<Self> {
        let scratch = ScratchDir::new().context("make a temporary folder")?;
        let link = target_dir()
            .map(|target| target.join("demo"))
            .filter(|link| {
                // Only a link of an earlier run is replaced; otherwise the longer name is used.
                if link.is_symlink() {
                    let _ = fs::remove_file(link);
                }
                symlink(scratch.path(), link).is_ok()
            });
        Ok(Self { scratch, link })
    }

    /// Returns the name of a file in the directory, relative to where the tour was started.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        let folder = self.link.as_deref().unwrap_or_else(|| self.scratch.path());
        shorten(folder).join(name)
    }

    /// Returns the path of the directory.
    pub(super) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the shell line that runs one of the binaries.
    pub(super) fn program(&self, name: &str, args: impl IntoIterator<Item = String>) -> String {
        let program =
            bin_dir().map_or_else(|| PathBuf::from(name), |folder| shorten(&folder).join(name));
        let mut line = program.display().to_string();
        for arg in args {
            line.push(' ');
            line.push_str(&quote(&arg));
        }
        line
    }

    /// Writes a script that runs its arguments inside `namespace`.
    pub(super) fn enter_by_script(&self, name: &str, namespace: &Namespace) -> Result<()> {
        let file = self.scratch.path().join(name);
        let args: Vec<String> = namespace
            .enter()
            .iter()
            .map(|arg| quote(&arg.to_string_lossy()))
            .collect();
        let script = format!("#!/bin/sh\nexec {} \"$@\"\n", args.join(" "));
        fs::write(&file, script)
            .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("write {}", file.display()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let Some(link) = &self.link else { return };
        // Another tour may have created its own link there.
        if fs::read_link(link).is_ok_and(|to| to == self.scratch.path()) {
            let _ = fs::remove_file(link);
        }
    }
}

/// Returns `path` relative to the current directory if it lies in it.
fn shorten(path: &Path) -> PathBuf {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(&here).unwrap_or(path).to_owned()
}

/// Quotes `arg` for a shell.
pub(super) fn quote(arg: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+…[]".contains(c);
    if !arg.is_empty() && arg.chars().all(plain) {
        arg.to_owned()
    } else {
        format!("'{}'", arg.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_quoted_where_a_shell_needs_it() {
        assert_eq!(
            quote("http://worker-1:9100/metrics"),
            "http://worker-1:9100/metrics"
        );
        assert_eq!(quote("Host: worker-1"), "'Host: worker-1'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote("a?b&c"), "'a?b&c'");
    }
}
