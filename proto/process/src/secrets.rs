//! Protection of secrets in the memory of a process.

use std::io;

/// Forbids core dumps of this process, which would contain its keys, and prevents other processes
/// of its user from reading its memory (prctl, `PR_SET_DUMPABLE`). The shell's limit on core dumps
/// is not enough, because collectors that the kernel pipes dumps to ignore that limit.
///
/// # Errors
/// When the system refuses.
pub fn forbid_core_dumps() -> io::Result<()> {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};

    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Drops `value` and asserts that the secret in it is no longer in memory. The allocator overwrites
/// the start of freed memory, so the ends are compared. A process that forbids core dumps cannot read
/// its own memory.
///
/// # Errors
/// When the memory cannot be read.
///
/// # Panics
/// When the secret is still in memory.
#[cfg(any(test, feature = "test-util"))]
pub fn assert_wiped<T>(value: T, secret: impl Fn(&T) -> &[u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;

    let expected = secret(&value).to_vec();
    let location = secret(&value).as_ptr().addr() as u64;
    let memory = std::fs::File::open("/proc/self/mem")?;
    let mut found = vec![0; expected.len()];
    memory.read_exact_at(&mut found, location)?;
    assert_eq!(found, expected);
    drop(value);
    memory.read_exact_at(&mut found, location)?;
    let end = expected.len() - 8;
    assert_ne!(found[end..], expected[end..]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};

    use super::*;
    use crate::files;
    use crate::scratch::ScratchDir;

    static DUMPABLE_LOCK: Mutex<()> = Mutex::new(());

    #[test]
    fn t21_files_with_secrets_are_wiped_when_they_are_dropped() {
        let _guard = DUMPABLE_LOCK.lock();
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.path().join("key");
        let text = b"-----BEGIN PRIVATE KEY----- and what follows it";
        files::replace(&path, text).unwrap();
        let (given, own) = (files::read_operator_file(&path), files::read_secret(&path));
        for content in [given.unwrap(), own.unwrap().unwrap()] {
            assert_eq!(&content[..], text);
            assert_wiped(content, |content| &content[..]).unwrap();
        }
    }

    #[test]
    fn t21_process_is_not_dumped() {
        let _guard = DUMPABLE_LOCK.lock();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::Dumpable);
        forbid_core_dumps().unwrap();
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
    }
}
