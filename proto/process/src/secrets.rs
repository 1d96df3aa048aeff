//! Protection of secrets in the memory of a process.

use std::io;

/// Forbids core dumps of this process, which would contain its keys, and prevents other processes
/// of its user from reading its memory (prctl, `PR_SET_DUMPABLE`). The shell's limit on core dumps
/// is not enough, because collectors that the kernel pipes dumps to ignore that limit.
///
/// # Errors
/// When the system refuses.
#[cfg(target_os = "linux")]
pub fn forbid_core_dumps() -> io::Result<()> {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};

    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Does nothing on other systems, which have no such setting.
///
/// # Errors
/// Never.
#[cfg(not(target_os = "linux"))]
pub fn forbid_core_dumps() -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use parking_lot::Mutex;
    use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};

    use super::*;
    use crate::process::files;
    use crate::wire::enroll::{EnrollRequest, JoinToken, TOKEN_SECRET_BYTES};

    /// A process that forbids dumps cannot read its own memory through `/proc/self/mem` either.
    static DUMPABLE_LOCK: Mutex<()> = Mutex::new(());

    /// Reads the memory of this process at a location that [`location`] returned.
    fn memory((at, length): (u64, usize)) -> io::Result<Vec<u8>> {
        let mut content = vec![0; length];
        File::open("/proc/self/mem")?.read_exact_at(&mut content, at)?;
        Ok(content)
    }

    fn location(bytes: &[u8]) -> (u64, usize) {
        (bytes.as_ptr().addr() as u64, bytes.len())
    }

    /// Drops `value` and asserts that its secret is no longer at `location`. The allocator
    /// overwrites the start of freed memory, so the test compares the end.
    fn assert_wiped<T>(value: T, location: (u64, usize), secret: &[u8]) -> io::Result<()> {
        assert_eq!(memory(location)?, secret);
        drop(value);
        let left = memory(location)?;
        assert_ne!(left[left.len() - 8..], secret[secret.len() - 8..]);
        Ok(())
    }

    #[test]
    fn t21_token_is_wiped_when_it_is_dropped() {
        let _guard = DUMPABLE_LOCK.lock();
        let secret = [0xa5; TOKEN_SECRET_BYTES];
        let token = JoinToken::new("abcdef012345", &secret, None).unwrap();
        let at = location(token.secret());
        assert_wiped(token, at, &secret).unwrap();
        let request = EnrollRequest {
            token: "a ServiceAccount token of some length".to_owned().into(),
            csr: Vec::new(),
            node_name: "worker-1".parse().unwrap(),
            proof: None,
        };
        let at = location(request.token.as_bytes());
        assert_wiped(request, at, b"a ServiceAccount token of some length").unwrap();
    }

    #[test]
    fn t21_files_with_secrets_are_wiped_when_they_are_dropped() {
        let _guard = DUMPABLE_LOCK.lock();
        let name = format!("culvert-secret-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let text = b"-----BEGIN PRIVATE KEY----- and what follows it";
        files::replace(&path, text).unwrap();
        let (given, own) = (files::read_operator_file(&path), files::read_secret(&path));
        std::fs::remove_file(&path).unwrap();
        for content in [given.unwrap(), own.unwrap().unwrap()] {
            let at = location(&content);
            assert_wiped(content, at, text).unwrap();
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
