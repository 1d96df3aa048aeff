//! The systemd unit: that of the package where it is installed, else that of deploy/systemd, and the
//! user of both.

use std::path::Path;

use tunnel_process::files::{self, FileOwner};

use super::error::JoinCommandError;
use super::paths::{PACKAGE_UNITS, PROGRAM, USER, below};

/// Returns whether a package has installed its unit.
pub(super) fn has_package(root: Option<&Path>) -> bool {
    let mut paths = PACKAGE_UNITS.iter();
    paths.any(|path| below(root, path).exists())
}

/// Returns the user of the service, or `None` if the host does not have it yet.
pub(super) fn service_user(root: Option<&Path>) -> Result<Option<FileOwner>, JoinCommandError> {
    let passwd = files::read(&below(root, "/etc/passwd"))?.unwrap_or_default();
    Ok(user(&String::from_utf8_lossy(&passwd)))
}

/// Returns the numbers of [`USER`]; see passwd(5).
fn user(passwd: &str) -> Option<FileOwner> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (USER, _password) = (fields.next()?, fields.next()?) else {
            return None;
        };
        Some(FileOwner {
            user: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
        })
    })
}

/// Returns the program that the unit starts: this one, or below another root the one that is
/// installed there.
pub(super) fn program(root: Option<&Path>) -> Result<String, JoinCommandError> {
    if root.is_some() {
        return Ok(PROGRAM.to_owned());
    }
    let program = std::env::current_exe()?;
    let shown = program.display().to_string();
    if is_usable(&shown) {
        Ok(shown)
    } else {
        Err(JoinCommandError::Program(shown))
    }
}

/// Returns whether a service of the unit can run a program: directories of users and temporary ones
/// are hidden from the service, and other characters would need quotes.
fn is_usable(program: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._+-".contains(&byte);
    program.bytes().all(is_plain) && !HIDDEN.iter().any(|folder| program.starts_with(*folder))
}

/// Returns the unit for a program.
pub(super) fn text(program: &str) -> String {
    let sections = DEPLOYED
        .split_once("\n\n")
        .map_or(DEPLOYED, |(_, sections)| sections);
    format!("{HEAD}{}", sections.replace(PROGRAM, program))
}

/// Line of sysusers.d that creates the user.
pub(super) const SYSUSERS_LINE: &str = "u tunnel-agent - \"Culvert tunnel-agent\"\n";
/// Line of tmpfiles.d that gives the token to the user, once an image has it.
pub(super) const TMPFILES_LINE: &str =
    "z /etc/culvert/tunnel-agent.token 0600 tunnel-agent tunnel-agent -\n";
const DEPLOYED: &str = include_str!("../../../deploy/systemd/tunnel-agent.service");
/// Directories that `ProtectHome=` and `PrivateTmp=` of the unit hide.
const HIDDEN: [&str; 5] = ["/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/"];
const HEAD: &str = "\
# Written by `tunnel-agent join`. Settings: /etc/culvert/tunnel-agent.yaml. Change this unit with:
# systemctl edit tunnel-agent

";

#[cfg(test)]
mod tests {
    use super::super::paths::TOKEN;
    use super::*;

    #[test]
    fn unit_has_the_program_and_nothing_that_systemd_239_cannot_load() {
        let unit = text("/opt/culvert/tunnel-agent");
        let start =
            "\nExecStart=/opt/culvert/tunnel-agent run --config /etc/culvert/tunnel-agent.yaml\n";
        assert!(unit.contains(start), "{unit}");
        // Specifiers and credentials of later versions end the start there.
        for other in ["/usr/local", "%", "Credential"] {
            assert!(!unit.contains(other), "{other}: {unit}");
        }
        assert!(unit.contains("\n\n[Unit]\n"), "{unit}");
        assert!(unit.contains(&format!("\nUser={USER}\n")), "{unit}");
        for line in [SYSUSERS_LINE, TMPFILES_LINE] {
            assert!(line.contains(USER), "{line}");
        }
        assert!(TMPFILES_LINE.contains(TOKEN));
    }

    #[test]
    fn user_is_found_by_its_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\ntunnel-agent-2:x:1:1::/:/bin/false\n\
                      tunnel-agent:!*:997:996:Culvert tunnel-agent:/:/usr/sbin/nologin\n";
        let owner = user(passwd).unwrap();
        assert_eq!((owner.user, owner.group), (997, 996));
        for passwd in ["", "tunnel-agent", "tunnel-agent:x:a:b::/:"] {
            assert!(user(passwd).is_none(), "{passwd}");
        }
    }

    #[test]
    fn programs_that_a_service_cannot_run_are_refused() {
        for (program, usable) in [
            ("/usr/bin/tunnel-agent", true),
            ("/opt/culvert-0.1/tunnel-agent", true),
            ("/home/a/tunnel-agent", false),
            ("/tmp/tunnel-agent", false),
            ("/opt/a b/tunnel-agent", false),
            ("/usr/bin/tunnel-agent (deleted)", false),
        ] {
            assert_eq!(is_usable(program), usable, "{program}");
        }
    }
}
