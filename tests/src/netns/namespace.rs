//! One network namespace, alive as long as its value.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::tools::{Skip, Tool};

/// A network namespace with a mount namespace of its own, so that it also has its own `/etc/hosts`.
///
/// The namespace has no name on the machine. A process holds it and ends with the last clone of
/// this value, or with this program however that ends. The namespace, its interfaces and its
/// firewall end with that process. Without root, the namespaces are in a user namespace.
#[derive(Debug, Clone)]
pub struct Namespace {
    name: String,
    holder: Arc<Holder>,
    in_user_namespace: bool,
}

/// The process that keeps a namespace alive.
#[derive(Debug)]
struct Holder(Child);

impl Namespace {
    /// Creates a namespace whose `/etc/hosts` shows `hosts`. Only its loopback interface is up.
    /// `name` is for messages.
    ///
    /// # Errors
    /// Returns [`Skip`] if a tool is missing or the machine does not allow namespaces, neither as
    /// root nor in a user namespace.
    pub fn new(name: &str, hosts: &Path) -> Result<Self, Skip> {
        crate::tools::require(&[Tool::Unshare, Tool::Nsenter, Tool::Ip])?;
        let mut as_root = Tool::Unshare.command()?;
        match hold(&mut as_root, name, hosts, false) {
            Ok(namespace) => Ok(namespace),
            Err(denied) => {
                let mut as_user = Tool::Unshare.command()?;
                as_user.arg("-Ur");
                hold(&mut as_user, name, hosts, true)
                    .map_err(|also| Skip::because(format!("{denied}; in a user namespace: {also}")))
            }
        }
    }

    /// Creates another namespace that a link can connect with this one.
    pub fn neighbor(&self, name: &str, hosts: &Path) -> Result<Self, Skip> {
        let mut unshare = self.command(Tool::Unshare.program());
        hold(&mut unshare, name, hosts, self.in_user_namespace)
    }

    /// Returns the same network with its own files, written to `folder`: an empty `/etc/hosts`,
    /// this `/etc/resolv.conf`, and an `/etc/nsswitch.conf` that makes programs use both and
    /// nothing else.
    pub fn with_resolver(
        &self,
        name: &str,
        folder: &Path,
        resolv_conf: &str,
    ) -> Result<Self, Skip> {
        let mut mounts = String::new();
        for (file, content) in [
            ("hosts", "127.0.0.1 localhost\n"),
            ("resolv.conf", resolv_conf),
            ("nsswitch.conf", "hosts: files dns\n"),
        ] {
            let own = folder.join(format!("{name}.{file}"));
            std::fs::write(&own, content)
                .map_err(|error| Skip::because(format!("cannot write {file}: {error}")))?;
            mounts.push_str(&format!("mount --bind '{}' /etc/{file}\n", own.display()));
        }
        let mut unshare = self.command(Tool::Unshare.program());
        let spawned = unshare
            .args(["-m", "--propagation", "private", "sh", "-ec"])
            .arg(format!("{mounts}echo ready; exec cat >&2"));
        start_holder(spawned, name, self.in_user_namespace)
    }

    /// Returns the name that [`Self::new`] was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the ID of the process that holds the namespace.
    pub fn holder(&self) -> u32 {
        self.holder.0.id()
    }

    /// Returns the command prefix that runs a command in the namespace, in the same directory and
    /// with the same process ID.
    pub fn enter(&self) -> Vec<OsString> {
        let nsenter = Tool::Nsenter
            .find()
            .unwrap_or_else(|| Tool::Nsenter.program().into());
        let holder = self.holder().to_string();
        let mut argv: Vec<OsString> = vec![nsenter.into(), "-t".into(), holder.into()];
        if self.in_user_namespace {
            argv.extend(["-U".into(), "--preserve-credentials".into()]);
        }
        argv.extend(["-m", "-n", "-w", "--"].map(OsString::from));
        argv
    }

    /// Returns a command that runs `program` in the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut argv = self.enter().into_iter();
        let nsenter = argv
            .next()
            .unwrap_or_else(|| Tool::Nsenter.program().into());
        let mut command = Command::new(nsenter);
        command.args(argv).arg(program);
        command
    }

    /// Runs a shell script in the namespace until its first failure. `$IP` and `$NFT` are the
    /// tools. Returns its output.
    ///
    /// # Errors
    /// Returns [`Skip`] with the script's message: namespaces work on this machine, but the
    /// script's requirement does not.
    pub fn script(&self, script: &str) -> Result<String, Skip> {
        let mut command = self.command("sh");
        command.arg("-ec").arg(script);
        for (variable, tool) in [("IP", Tool::Ip), ("NFT", Tool::Nft)] {
            let Ok(found) = tool.command() else { continue };
            command.env(variable, found.get_program());
            command.envs(
                found
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            );
        }
        let ran = command.stdin(Stdio::null()).output();
        let output = ran.map_err(|error| Skip::because(format!("cannot run nsenter: {error}")))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        Err(Skip::because(format!(
            "cannot set up namespace {}: {}",
            self.name,
            complaint.trim()
        )))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // Both fail only for a holder that has ended, and then its namespace is gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the process that holds a new namespace and waits until the namespace is set up.
fn hold(
    unshare: &mut Command,
    name: &str,
    hosts: &Path,
    in_user_namespace: bool,
) -> Result<Namespace, Skip> {
    let ip = Tool::Ip.find().unwrap_or_else(|| Tool::Ip.program().into());
    let holder = unshare
        .args(["-m", "-n", "--propagation", "private"])
        .args(["sh", "-ec", HOLD, "sh"])
        .args([hosts.as_os_str(), ip.as_os_str()]);
    start_holder(holder, name, in_user_namespace)
}

/// Starts a holder that reports when it is ready and ends with its standard input.
fn start_holder(
    holder: &mut Command,
    name: &str,
    in_user_namespace: bool,
) -> Result<Namespace, Skip> {
    let failed = |what: String| Skip::because(format!("cannot make namespace {name}: {what}"));
    let spawned = holder
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut holder = spawned.map_err(|error| failed(error.to_string()))?;
    let mut ready = String::new();
    let reported = holder
        .stdout
        .take()
        .map(|out| BufReader::new(out).read_line(&mut ready));
    if matches!(reported, Some(Ok(n)) if n > 0) {
        let name = name.to_owned();
        let holder = Arc::new(Holder(holder));
        return Ok(Namespace {
            name,
            holder,
            in_user_namespace,
        });
    }
    let mut complaint = String::new();
    let read = holder
        .stderr
        .take()
        .map(|mut err| err.read_to_string(&mut complaint));
    // The holder has closed its output, so it has ended or is about to.
    let _ = holder.kill();
    let _ = holder.wait();
    match read {
        Some(Ok(n)) if n > 0 => Err(failed(complaint.trim().to_owned())),
        _ => Err(failed("no output of its holder".to_owned())),
    }
}

/// The script ends with its standard input, that is with the program that started it.
const HOLD: &str = r#"mount --bind "$1" /etc/hosts; "$2" link set lo up; echo ready; exec cat >&2"#;
