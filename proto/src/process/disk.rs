//! A watch over the file system of the data directory. A process goes on with a full or read-only
//! disk, so an operator learns of the disk from `/readyz?verbose`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{StatVfs, StatVfsMountFlags, statvfs};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{info, warn};

use super::meta::Readiness;
use super::settings::format_size;
use super::shutdown::Shutdown;
use crate::timers::sleep_coalesced;

/// Starts a task that checks the file system of `data_dir` every 10 s at least, and reports a full or
/// read-only one as condition `disk` and in the log. A directory that does not exist has no
/// condition.
pub fn start(data_dir: PathBuf, readiness: Readiness, shutdown: &Shutdown) {
    shutdown.spawn_service(async move {
        let (mut reported, mut running) = (None, None);
        loop {
            // A network file system that does not answer blocks its callers.
            let task = running.get_or_insert_with(|| {
                let path = data_dir.clone();
                spawn_blocking(move || check(&path))
            });
            let answer = timeout(ANSWER_TIMEOUT, task).await;
            let finding = match answer {
                Ok(Ok(finding)) => {
                    running = None;
                    finding
                }
                Ok(Err(_panicked)) => return,
                Err(_elapsed) => Some(format!(
                    "data directory {}: the file system does not answer",
                    data_dir.display()
                )),
            };
            if finding.is_some() != reported.is_some() {
                match &finding {
                    Some(error) => warn!(condition = CONDITION, error, "cannot save state"),
                    None => info!(condition = CONDITION, "state can be saved again"),
                }
            }
            readiness.set_conditions(CONDITION, finding.iter().cloned().collect());
            reported = finding;
            sleep_coalesced(CHECK_INTERVAL).await;
        }
    });
}

/// Returns why files cannot be written to the file system of `data_dir`, and `None` for a directory
/// that does not exist. Blocks while the file system does not answer.
#[must_use]
pub fn check(data_dir: &Path) -> Option<String> {
    let finding = finding(&statvfs(data_dir).ok()?)?;
    Some(format!("data directory {}: {finding}", data_dir.display()))
}

/// Returns why files cannot be written to a file system.
fn finding(disk: &StatVfs) -> Option<String> {
    if disk.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Some("the file system is read-only; mount it writable".to_owned());
    }
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < FREE_MIN_BYTES {
        let free = format_size(free);
        return Some(format!(
            "the disk is full ({free} free), so state cannot be saved; free some space"
        ));
    }
    // Some file systems have no fixed number of files and report 0.
    if disk.f_files > 0 && disk.f_favail == 0 {
        return Some("the file system has no free inode; remove some files".to_owned());
    }
    None
}

/// Name of the condition.
const CONDITION: &str = "disk";
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a file system counts as one that does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Free space below which a disk counts as full. The largest file of a server with thousands of
/// nodes is about as large, and each file is written in full before it replaces the old one.
const FREE_MIN_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_and_read_only_disks_are_found() {
        let disk = |available, files, flags| StatVfs {
            f_bsize: 4096,
            f_frsize: 4096,
            f_blocks: 1 << 20,
            f_bfree: 1 << 19,
            f_bavail: available,
            f_files: files,
            f_ffree: 0,
            f_favail: 0,
            f_fsid: 0,
            f_flag: flags,
            f_namemax: 255,
        };
        let (none, read_only) = (StatVfsMountFlags::empty(), StatVfsMountFlags::RDONLY);
        assert_eq!(finding(&disk(1 << 19, 0, none)), None);
        for (disk, words) in [
            (disk(1 << 19, 0, read_only), "read-only"),
            (disk(3, 0, none), "full (12KiB free)"),
            (disk(1 << 19, 9, none), "inode"),
        ] {
            let text = finding(&disk).unwrap();
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(check(Path::new("/does/not/exist")), None);
    }
}
