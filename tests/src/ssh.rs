//! An sshd of a test, and how ssh logs in there.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::eventually::eventually;
use crate::netns::Namespace;
use crate::process::{Process, Program};
use crate::tools::{Skip, Tool};

const PORT: u16 = 22;
const START: Duration = Duration::from_secs(20);

/// Makes the key of the hosts and the key with which root logs in.
pub async fn make_keys(scratch: &Path) -> Result<()> {
    for name in ["id", "host"] {
        let keygen = Program::tool(Tool::SshKeygen)?
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(scratch.join(name));
        keygen.run().await?.ok()?;
    }
    Ok(())
}

/// Returns the options of ssh with which root logs in, in the form of `ssh -o` and of an `ssh_config`.
pub fn login_options(scratch: &Path) -> [String; 6] {
    let file = |name: &str| scratch.join(name).display().to_string();
    [
        format!("IdentityFile={}", file("id")),
        "IdentitiesOnly=yes".to_owned(),
        "StrictHostKeyChecking=no".to_owned(),
        format!("UserKnownHostsFile={}", file("known")),
        "LogLevel=ERROR".to_owned(),
        "User=root".to_owned(),
    ]
}

/// Makes these options the ones of each ssh inside `namespace`.
///
/// # Errors
/// Returns [`Skip`] where the namespace is not of root, or no ssh is installed.
pub fn configure(namespace: &Namespace, scratch: &Path) -> Result<(), Skip> {
    let file = scratch.join("ssh_config");
    let written = fs::write(&file, login_options(scratch).join("\n"));
    written.map_err(|error| Skip::because(format!("cannot write ssh_config: {error}")))?;
    namespace.script(&format!(
        "mount --bind '{}' /etc/ssh/ssh_config",
        file.display()
    ))?;
    Ok(())
}

/// Starts an sshd of `node` on port 22 of `address` inside `namespace`, which gets a `/run` and an
/// `/etc/passwd` of its own. Each session receives the node's name in `CULVERT_NODE`.
///
/// # Errors
/// Returns [`Skip`] where there is no sshd, or the namespace is not of root.
pub fn start_sshd(
    namespace: &Namespace,
    address: IpAddr,
    node: &str,
    scratch: &Path,
) -> Result<Result<Process>, Skip> {
    let failed = |error: std::io::Error| Skip::because(format!("cannot prepare sshd: {error}"));
    // sshd needs a user and a folder. Both exist only in this mount namespace.
    let passwd = scratch.join("passwd");
    let users = fs::read_to_string("/etc/passwd").map_err(failed)?;
    let others = users.lines().filter(|line| !line.starts_with("sshd:"));
    let own = ["sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin", ""];
    let users: Vec<&str> = others.chain(own).collect();
    fs::write(&passwd, users.join("\n")).map_err(failed)?;
    namespace.script(&format!(
        "test \"$(id -u)\" = 0
         mount --bind '{}' /etc/passwd
         mount -t tmpfs -o mode=755 tmpfs /run
         mkdir -m 755 /run/sshd",
        passwd.display()
    ))?;
    let config = scratch.join(format!("{node}.sshd"));
    let (host, keys) = (scratch.join("host"), scratch.join("id.pub"));
    let text = format!(
        "ListenAddress {address}:{PORT}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
         StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n\
         SetEnv CULVERT_NODE={node}\nSubsystem sftp internal-sftp\n",
        host.display(),
        keys.display()
    );
    fs::write(&config, text).map_err(failed)?;
    let sshd = Program::tool(Tool::Sshd)?
        .args(["-D", "-e", "-f"])
        .arg(config);
    Ok(sshd.inside(Some(namespace)).start())
}

/// Waits until an sshd accepts connections at `address`.
pub async fn wait_for_sshd(namespace: &Namespace, address: IpAddr) {
    let script = format!("exec 3<>/dev/tcp/{address}/{PORT}");
    eventually("sshd", START, async || {
        let mut bash = namespace.command("bash");
        let status = bash.args(["-c", &script]).status()?;
        ensure!(status.success(), "{status}");
        Ok(())
    })
    .await;
}
