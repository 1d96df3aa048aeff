//! Paths and names of the service, which are those of the Debian package, and where they are below
//! another root.

use std::path::{Path, PathBuf};

pub(super) const CONFIG: &str = "/etc/culvert/tunnel-agent.yaml";
pub(super) const TOKEN: &str = "/etc/culvert/tunnel-agent.token";
/// Path of the unit where no package has one.
pub(super) const UNIT: &str = "/etc/systemd/system/tunnel-agent.service";
pub(super) const PACKAGE_UNITS: [&str; 2] = [
    "/lib/systemd/system/tunnel-agent.service",
    "/usr/lib/systemd/system/tunnel-agent.service",
];
/// Paths of the files from which the user of the unit is created, and which give the token to it,
/// where no package has the unit.
pub(super) const SYSUSERS: &str = "/etc/sysusers.d/tunnel-agent.conf";
pub(super) const TMPFILES: &str = "/etc/tmpfiles.d/tunnel-agent.conf";
/// Path of the program in the unit of deploy/systemd.
pub(super) const PROGRAM: &str = "/usr/local/bin/tunnel-agent";
/// Name of the service, for systemctl.
pub(super) const SERVICE: &str = "tunnel-agent";
/// User of the service.
pub(super) const USER: &str = "tunnel-agent";

/// Returns where a path of the host is below `root`.
pub(super) fn below(root: Option<&Path>, path: &str) -> PathBuf {
    match root {
        None => PathBuf::from(path),
        Some(root) => root.join(path.trim_start_matches('/')),
    }
}
