//! A watch over the file system of the data directory. A process goes on with a disk that is full or
//! read-only or does not answer, so an operator learns of the disk from `/readyz?verbose`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{StatVfs, StatVfsMountFlags, statvfs};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{info, warn};

use super::meta::Readiness;
use super::settings::format_size;
use super::shutdown::Shutdown;
use crate::timers::sleep_coalesced;

/// The accesses to files that have not ended, which block for as long as the file system does not
/// answer. Clones share one state.
#[derive(Debug, Clone, Default)]
pub struct FileActivity(Arc<Mutex<Accesses>>);

#[derive(Debug, Default)]
struct Accesses {
    last: u64,
    /// When each access began, oldest first.
    began: BTreeMap<u64, Instant>,
}

/// A guard that exists while files are accessed.
#[derive(Debug)]
pub struct FileAccessGuard {
    activity: FileActivity,
    number: u64,
}

impl FileActivity {
    /// Records that an access begins. It ends with the returned guard.
    pub fn begin(&self) -> FileAccessGuard {
        let mut accesses = self.0.lock();
        accesses.last += 1;
        let number = accesses.last;
        accesses.began.insert(number, Instant::now());
        FileAccessGuard {
            activity: self.clone(),
            number,
        }
    }

    /// Returns whether an access takes so long that the file system does not answer.
    pub fn is_blocked(&self) -> bool {
        let accesses = self.0.lock();
        let oldest = accesses.began.first_key_value();
        oldest.is_some_and(|(_, began)| began.elapsed() >= ANSWER_TIMEOUT)
    }
}

impl Drop for FileAccessGuard {
    fn drop(&mut self) {
        self.activity.0.lock().began.remove(&self.number);
    }
}

/// Starts a task that checks the file system of `data_dir` every 10 s at least, and reports one that
/// is full or read-only, or in which an access of `activity` does not end, as condition `disk` and
/// in the log. A directory that does not exist has no condition.
pub fn start(data_dir: PathBuf, activity: FileActivity, readiness: Readiness, shutdown: &Shutdown) {
    shutdown.spawn_service(async move {
        let (mut reported, mut running, mut has_local_disk) = (None, None, false);
        loop {
            let finding = if activity.is_blocked() {
                Some(no_answer(&data_dir))
            } else if has_local_disk {
                // Another thread costs three wakeups for each check.
                check(&data_dir)
            } else {
                // A network file system that does not answer blocks its callers.
                let task = running.get_or_insert_with(|| {
                    let path = data_dir.clone();
                    spawn_blocking(move || (check(&path), is_local(&path)))
                });
                match timeout(ANSWER_TIMEOUT, task).await {
                    Ok(Ok((finding, is_local))) => {
                        running = None;
                        has_local_disk = is_local;
                        finding
                    }
                    Ok(Err(_panicked)) => return,
                    Err(_elapsed) => Some(no_answer(&data_dir)),
                }
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
pub fn check(data_dir: &Path) -> Option<String> {
    let finding = finding(&statvfs(data_dir).ok()?)?;
    Some(format!("data directory {}: {finding}", data_dir.display()))
}

fn no_answer(data_dir: &Path) -> String {
    let shown = data_dir.display();
    format!("data directory {shown}: the file system does not answer, so state cannot be saved")
}

/// Returns whether the file system of `data_dir` is known to answer from memory.
fn is_local(data_dir: &Path) -> bool {
    rustix::fs::statfs(data_dir).is_ok_and(|disk| LOCAL_TYPES.contains(&disk.f_type))
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

/// Types of file systems on disks of this host and in its memory: ext4, XFS, tmpfs and overlayfs
/// (`linux/magic.h`).
const LOCAL_TYPES: [rustix::fs::FsWord; 4] = [0xEF53, 0x5846_5342, 0x0102_1994, 0x794C_7630];
/// Name of the condition.
const CONDITION: &str = "disk";
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a file system counts as one that does not answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
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
