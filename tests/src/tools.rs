//! Finds the real programs that scenarios use. A test without its programs is reported as skipped.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    SystemdAnalyze,
    /// Debian's `promtool`, of `prometheus`.
    Promtool,
    Bash,
    /// The C compiler, which Rust needs to link.
    Cc,
    /// The program `prometheus` from Debian.
    Prometheus,
    /// The program `prometheus-node-exporter` from Debian.
    NodeExporter,
    Curl,
    /// The program `dig` of bind9-dnsutils.
    Dig,
    /// The program `ip` of iproute2.
    Ip,
    /// The program `nft` of nftables.
    Nft,
    /// The program `iptables`, with nftables or the legacy back end.
    Iptables,
    IptablesSave,
    /// The program `unshare` of util-linux.
    Unshare,
    /// The program `nsenter` of util-linux.
    Nsenter,
    /// The program `prlimit` of util-linux.
    Prlimit,
    Kubectl,
    Containerd,
    /// The program `ctr` of containerd.
    Ctr,
    Runc,
    /// The static program `busybox`, for container images.
    Busybox,
    Helm,
    Jq,
    /// The program `openssl`, for the script of a guide.
    Openssl,
    /// The program `ssh` of OpenSSH.
    Ssh,
    /// The program `ssh-keygen` of OpenSSH.
    SshKeygen,
    /// The program `sshd` of OpenSSH.
    Sshd,
    /// The program `ansible` of ansible-core.
    Ansible,
    Python,
    /// A Python that has aioquic.
    Aioquic,
    /// The program `chromium` from Debian.
    Chromium,
    /// NodeLocal DNSCache, built from kubernetes/dns.
    NodeCache,
    /// The program `unbound` from Debian.
    Unbound,
    /// The script of axe-core, which checks the accessibility of pages in a browser.
    Axe,
}

impl Tool {
    /// Returns the file name of the program.
    pub fn program(self) -> &'static str {
        match self {
            Self::SystemdAnalyze => "systemd-analyze",
            Self::Promtool => "promtool",
            Self::Bash => "bash",
            Self::Cc => "cc",
            Self::Prometheus => "prometheus",
            Self::NodeExporter => "prometheus-node-exporter",
            Self::Curl => "curl",
            Self::Dig => "dig",
            Self::Ip => "ip",
            Self::Nft => "nft",
            Self::Iptables => "iptables",
            Self::IptablesSave => "iptables-save",
            Self::Unshare => "unshare",
            Self::Nsenter => "nsenter",
            Self::Prlimit => "prlimit",
            Self::Kubectl => "kubectl",
            Self::Containerd => "containerd",
            Self::Ctr => "ctr",
            Self::Runc => "runc",
            Self::Busybox => "busybox",
            Self::Helm => "helm",
            Self::Jq => "jq",
            Self::Openssl => "openssl",
            Self::Ssh => "ssh",
            Self::SshKeygen => "ssh-keygen",
            Self::Sshd => "sshd",
            Self::Ansible => "ansible",
            Self::Python => "python3",
            Self::Aioquic => "aioquic-python",
            Self::Chromium => "chromium",
            Self::NodeCache => "node-cache",
            Self::Unbound => "unbound",
            Self::Axe => "axe.min.js",
        }
    }

    /// Returns the path of the program: in the search path, in the directories of administrators'
    /// programs, or where `tests/tools.sh` unpacked it.
    pub fn find(self) -> Option<PathBuf> {
        self.find_all().into_iter().next()
    }

    /// Returns all programs of that name, in the order of [`Tool::find`]. Two names of one file
    /// count once.
    pub fn find_all(self) -> Vec<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let unpacked = unpacked_root();
        let files = std::env::split_paths(&path)
            .chain(ADMIN_FOLDERS.iter().map(PathBuf::from))
            .chain(unpacked.iter().flat_map(|root| {
                [
                    root.join("usr/bin"),
                    root.join("usr/sbin"),
                    root.join("sbin"),
                    root.with_file_name("venv/bin"),
                ]
            }))
            .map(|folder| folder.join(self.program()))
            .filter(|file| file.is_file());
        let mut found: Vec<PathBuf> = Vec::new();
        for file in files {
            if found
                .iter()
                .all(|other| other.canonicalize().ok() != file.canonicalize().ok())
            {
                found.push(file);
            }
        }
        found
    }

    /// Returns a command that runs the program, with the libraries that were unpacked next to it.
    ///
    /// # Errors
    /// Returns [`Skip`] if the program is not installed.
    pub fn command(self) -> Result<Command, Skip> {
        let file = self.find().ok_or_else(|| Skip::needs(&[self]))?;
        let mut command = Command::new(&file);
        if let Some(libraries) = libraries_of(&file) {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        Ok(command)
    }
}

/// Checks that all `tools` are installed.
///
/// # Errors
/// Returns [`Skip`] with the names of the missing ones.
pub fn require(tools: &[Tool]) -> Result<(), Skip> {
    let missing: Vec<Tool> = tools
        .iter()
        .copied()
        .filter(|tool| tool.find().is_none())
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(Skip::needs(&missing))
    }
}

/// The reason why a test cannot run on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skip {
    reason: String,
}

impl Skip {
    /// Creates a skip for any other reason; `reason` continues "skipped: TEST: ".
    pub fn because(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
        }
    }

    fn needs(tools: &[Tool]) -> Self {
        let names: Vec<&str> = tools.iter().map(|tool| tool.program()).collect();
        Self::because(format!("needs {}", names.join(", ")))
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Skip {}

/// Returns the value that a test needs, or records the test as skipped:
/// `let Some(edges) = or_skip(Topology::new()) else { return };`
///
/// The record is one line on stderr and one file under `target/test-skips`, which `make test` lists
/// and counts at its end, since with nextest each test is a process of its own.
///
/// # Panics
/// Panics if `CULVERT_NO_SKIPS` is set, for machines that must have every program, and if the skip
/// cannot be recorded.
#[expect(
    clippy::panic,
    reason = "a skip that is forbidden, or that nobody would see, is a failed test"
)]
pub fn or_skip<T>(needed: Result<T, Skip>) -> Option<T> {
    let skip = match needed {
        Ok(found) => return Some(found),
        Err(skip) => skip,
    };
    if std::env::var_os("CULVERT_NO_SKIPS").is_some() {
        panic!("skips are not allowed here: {skip}");
    }
    let test = running_test();
    let line = format!("skipped: {test}: {skip}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Err(error) = record(&test, &line) {
        panic!("cannot record the skip: {error:#}");
    }
    None
}

/// Returns the directory with the binaries of the build that this program belongs to.
pub fn bin_dir() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("CULVERT_BIN_DIR") {
        return Some(folder.into());
    }
    let exe = std::env::current_exe().ok()?;
    let folder = exe.parent()?;
    // Test programs are in `deps` next to the binaries.
    let folder = if folder.ends_with("deps") {
        folder.parent()?
    } else {
        folder
    };
    Some(folder.to_owned())
}

/// Returns the build's `target` directory.
pub fn target_dir() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    // Cargo marks the directory. With `--target` there is one more directory between it and the
    // profile's.
    exe.ancestors()
        .find(|folder| folder.join("CACHEDIR.TAG").is_file())
        .map(Path::to_owned)
}

fn record(test: &str, line: &str) -> Result<()> {
    let target = target_dir().context("no folder with CACHEDIR.TAG above the test program")?;
    let folder = target.join("test-skips");
    fs::create_dir_all(&folder)?;
    Ok(fs::write(folder.join(test.replace("::", ".")), line)?)
}

fn running_test() -> String {
    std::env::var("NEXTEST_TEST_NAME")
        .ok()
        .or_else(|| std::thread::current().name().map(str::to_owned))
        .unwrap_or_else(|| "unnamed".to_owned())
}

fn unpacked_root() -> Option<PathBuf> {
    Some(target_dir()?.join("tools/root")).filter(|root| root.is_dir())
}

/// Returns the directories of the libraries that were unpacked with `file`, if it was unpacked.
fn libraries_of(file: &Path) -> Option<OsString> {
    let root = unpacked_root().filter(|root| file.starts_with(root))?;
    let folders = ["usr/lib", "lib"]
        .iter()
        .filter_map(|lib| fs::read_dir(root.join(lib)).ok())
        .flatten();
    let folders = folders
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|folder| folder.is_dir());
    std::env::join_paths(folders).ok()
}

/// Often missing from the search path of users other than root.
const ADMIN_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
