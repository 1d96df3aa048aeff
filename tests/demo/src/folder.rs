//! The files of the tour, and shell lines that use them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tunnel_tests::netns::Namespace;
use tunnel_tests::process::ScratchDir;
use tunnel_tests::tools::{Tool, bin_dir, target_dir};

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

    /// Returns the path of a file in the directory, relative to where the tour was started.
    pub(super) fn path(&self, name: &str) -> String {
        let folder = self.link.as_deref().unwrap_or_else(|| self.scratch.path());
        shorten(folder).join(name).display().to_string()
    }

    /// Returns the path of the directory.
    pub(super) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the word that runs `tool` in a shell line. A tool that was only unpacked needs its
    /// libraries, so its word is a script.
    pub(super) fn tool(&self, tool: Tool) -> Result<String> {
        let command = tool.command()?;
        let mut argv = vec!["env".to_owned()];
        for (name, value) in command.get_envs() {
            let value = value.unwrap_or_default().to_string_lossy();
            argv.push(format!("{}={value}", name.to_string_lossy()));
        }
        let name = tool.program();
        if argv.len() == 1 {
            return Ok(name.to_owned());
        }
        argv.push(command.get_program().to_string_lossy().into_owned());
        self.write_script(name, &argv)?;
        Ok(self.path(name))
    }

    /// Returns the shell line that runs `line` inside `namespace`, if there is one. Its script must
    /// have been written.
    pub(super) fn inside(&self, namespace: Option<&Namespace>, line: &str) -> String {
        match namespace {
            Some(namespace) => format!("{} {line}", self.path(namespace.name())),
            None => line.to_owned(),
        }
    }

    /// Writes a script that runs its arguments inside `namespace`.
    pub(super) fn enter_by_script(&self, namespace: &Namespace) -> Result<()> {
        let enter = namespace.enter();
        let argv: Vec<_> = enter.iter().map(|arg| arg.to_string_lossy()).collect();
        self.write_script(namespace.name(), &argv)
    }

    /// Writes a script that runs `argv` with its own arguments behind it.
    fn write_script(&self, name: &str, argv: &[impl AsRef<str>]) -> Result<()> {
        let file = self.scratch.path().join(name);
        let script = format!("#!/bin/sh\nexec {} \"$@\"\n", shell_line(argv));
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

/// Returns the word that runs one of the binaries in a shell line.
pub(super) fn binary(name: &str) -> String {
    let file = bin_dir().map_or_else(|| PathBuf::from(name), |folder| shorten(&folder).join(name));
    file.display().to_string()
}

pub(super) fn shell_line<W: AsRef<str>>(words: impl IntoIterator<Item = W>) -> String {
    let words: Vec<_> = words.into_iter().map(|arg| quote(arg.as_ref())).collect();
    words.join(" ")
}

/// Returns `path` relative to the current directory if it lies in it.
fn shorten(path: &Path) -> PathBuf {
    relative_to(&std::env::current_dir().unwrap_or_default(), path)
}

/// Returns `.` for the directory itself: a shell looks for a program without a slash in `PATH`.
fn relative_to(here: &Path, path: &Path) -> PathBuf {
    match path.strip_prefix(here) {
        Ok(rest) if rest.as_os_str().is_empty() => PathBuf::from("."),
        Ok(rest) => rest.to_owned(),
        Err(_) => path.to_owned(),
    }
}

/// Quotes `arg` for a shell.
fn quote(arg: &str) -> String {
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
    fn paths_are_relative_to_the_current_directory_and_keep_a_slash() {
        let shorten = |path: &str| relative_to(Path::new("/a"), Path::new(path)).join("agent");
        assert_eq!(shorten("/a"), Path::new("./agent"));
        assert_eq!(shorten("/a/target"), Path::new("target/agent"));
        assert_eq!(shorten("/b"), Path::new("/b/agent"));
    }

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
