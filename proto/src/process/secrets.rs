//! What keeps secrets in a process's memory from leaving it with its end.

use std::io;

/// Forbids core dumps of this process, which would hold its keys, and reading its memory by others of its user (prctl,
/// `PR_SET_DUMPABLE`). Not only for what limits of the shell allow: collectors that the kernel pipes dumps to ignore those.
///
/// # Errors
/// When the system refuses.
#[cfg(target_os = "linux")]
pub fn forbid_core_dumps() -> io::Result<()> {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};

    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Other systems have no such switch.
///
/// # Errors
/// Never.
#[cfg(not(target_os = "linux"))]
pub fn forbid_core_dumps() -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::process::{DumpableBehavior, dumpable_behavior};

    use super::*;

    #[test]
    fn t21_process_is_not_dumped() {
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
        forbid_core_dumps().unwrap();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
    }
}
