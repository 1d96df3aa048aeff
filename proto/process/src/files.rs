//! Files in a data directory: private, replaced atomically, and never accessed through a symbolic
//! link. A file that root creates belongs to the owner of its directory, which is the user of the
//! service.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use zeroize::Zeroizing;

/// Largest file of the data directory that is read, in bytes. A known-nodes file of 10,000 nodes is
/// a few MiB.
const DATA_FILE_MAX_BYTES: u64 = 64 * 1024 * 1024;
const PRIVATE_MODE: u32 = 0o600;
/// Mode bits that let the group and others write.
const OTHERS_WRITE: u32 = 0o022;
/// The mode bit that lets the owner's group write.
const GROUP_WRITES: u32 = 0o020;
/// Mode bits that give the group and others any access.
const OTHERS: u32 = 0o077;
/// Largest file of the operator that is read, in bytes. A bundle of a hundred CAs is about 200 KiB.
const OPERATOR_FILE_MAX_BYTES: u64 = 4 * 1024 * 1024;
/// User number of root.
const ROOT: u32 = 0;
const NOT_A_FILE: &str = "is not a regular file";

/// Creates a directory for private files, unless it exists.
///
/// # Errors
/// When the directory cannot be created.
pub fn make_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Checks that nobody else can put a file into a directory, or has put one there: the directory and
/// its files belong to this user or to root, and others cannot write the directory. The owner's
/// private group counts as the owner. Of a mounted file system only the files are checked, because
/// volumes of containers are often writable for everybody who sees them.
///
/// # Errors
/// `PermissionDenied` with the command that corrects it, or the system's error with the path.
pub fn check_private_dir(path: &Path) -> io::Result<()> {
    let directory = fs::metadata(path).map_err(|error| with_path(path, &error))?;
    let user = rustix::process::geteuid().as_raw();
    if !is_mount_point(path)? {
        check_owner(path, &directory, user)?;
        let mode = directory.mode();
        let is_private_group = directory.uid() == directory.gid();
        let forbidden = if is_private_group {
            OTHERS_WRITE & !GROUP_WRITES
        } else {
            OTHERS_WRITE
        };
        if mode & forbidden != 0 {
            let (mode, shown) = (mode & 0o7777, path.display());
            return Err(denied(format!(
                "{shown} can be written by others (mode {mode:04o}), who could replace keys; run: chmod go-w {shown}"
            )));
        }
    }
    for entry in fs::read_dir(path).map_err(|error| with_path(path, &error))? {
        let entry = entry.map_err(|error| with_path(path, &error))?;
        match entry.metadata() {
            Ok(file) if file.is_file() => check_owner(&entry.path(), &file, user)?,
            // A file that is gone is no danger, and no other type is read.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

fn check_owner(path: &Path, found: &fs::Metadata, user: u32) -> io::Result<()> {
    let owner = found.uid();
    if owner == user || owner == ROOT {
        return Ok(());
    }
    let shown = path.display();
    Err(denied(format!(
        "{shown} belongs to the user {owner}, neither to this process (user {user}) nor to root; remove it, or run: chown {user} {shown}"
    )))
}

/// Returns whether a directory is mounted. A bind mount can be of the file system of its parent.
fn is_mount_point(path: &Path) -> io::Result<bool> {
    let found = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS)
        .map_err(|error| with_path(path, &error.into()))?;
    if found
        .stx_attributes_mask
        .contains(StatxAttributes::MOUNT_ROOT)
    {
        return Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    }
    // Linux before 5.8.
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev());
    let parent = path.join("..");
    Ok(device(path)? != device(&parent).map_err(|error| with_path(&parent, &error))?)
}

fn denied(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, problem)
}

/// Reads a file. Returns `None` if it does not exist. Refuses symbolic links, other file types, and
/// files that others can write.
///
/// # Errors
/// The system's error with the path; `InvalidData` for a refused file.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let content = read_no_follow(path, OTHERS_WRITE)?;
    Ok(content.map(|mut content| std::mem::take(&mut *content)))
}

/// Reads a key file like [`read`] does. Also refuses files that others can read. The content is
/// wiped when it is dropped.
///
/// # Errors
/// As in [`read`].
pub fn read_secret(path: &Path) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    read_no_follow(path, OTHERS)
}

/// Reads a file that the operator provides. Follows symbolic links, because mounted Secrets and the
/// kubelet's certificates are links. Group and others may read the file (a Secret is 0644 or 0640),
/// but not write it. The file may hold a secret, so the content is wiped when it is dropped.
/// A byte order mark, which editors on Windows write, is removed: these files are text.
///
/// # Errors
/// The system's error with the path; `InvalidData` for a refused file.
pub fn read_operator_file(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    read_following_links(path, OTHERS_WRITE).map(|(content, _)| without_byte_order_mark(content))
}

fn without_byte_order_mark(mut content: Zeroizing<Vec<u8>>) -> Zeroizing<Vec<u8>> {
    if content.starts_with(BYTE_ORDER_MARK) {
        content.drain(..BYTE_ORDER_MARK.len());
    }
    content
}

/// The byte order mark, U+FEFF, in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a configuration file like [`read_operator_file`] does. In addition, the owner's group may
/// write the file, because a umask of 002 creates such files. Returns a warning next to the content
/// if that group, by number, is not the owner's private group.
///
/// # Errors
/// As in [`read_operator_file`].
pub fn read_config(path: &Path) -> io::Result<(Zeroizing<Vec<u8>>, Option<String>)> {
    let (content, opened) = read_following_links(path, OTHERS_WRITE & !GROUP_WRITES)?;
    let content = without_byte_order_mark(content);
    let (mode, group) = (opened.mode(), opened.gid());
    let warning = is_written_by_others(mode, opened.uid(), group).then(|| {
        let shown = path.display();
        format!("{shown} can be written by the group {group}, which is not the private group of its owner; run: chmod g-w {shown}")
    });
    Ok((content, warning))
}

/// Returns whether members of a shared group may write the file. Systems that give each user a
/// private group use the same number for both.
fn is_written_by_others(mode: u32, user: u32, group: u32) -> bool {
    mode & GROUP_WRITES != 0 && user != group
}

fn read_following_links(
    path: &Path,
    forbidden: u32,
) -> io::Result<(Zeroizing<Vec<u8>>, fs::Metadata)> {
    let file = File::open(path).map_err(|error| with_path(path, &error))?;
    let opened = file.metadata().map_err(|error| with_path(path, &error))?;
    if !opened.is_file() {
        return Err(invalid_file(path, NOT_A_FILE));
    }
    if opened.mode() & forbidden != 0 {
        return Err(invalid_mode(path, &opened, forbidden));
    }
    let mut content = buffer_for(&opened, OPERATOR_FILE_MAX_BYTES);
    file.take(OPERATOR_FILE_MAX_BYTES + 1)
        .read_to_end(&mut content)
        .map_err(|error| with_path(path, &error))?;
    if content.len() as u64 > OPERATOR_FILE_MAX_BYTES {
        return Err(invalid_file(path, "is larger than 4 MiB"));
    }
    Ok((content, opened))
}

/// Returns a buffer with room for a whole file and for the check beyond its end. A buffer that
/// grows would leave copies of the content in memory.
fn buffer_for(file: &fs::Metadata, max_bytes: u64) -> Zeroizing<Vec<u8>> {
    let bytes = usize::try_from(file.len().min(max_bytes)).unwrap_or_default();
    Zeroizing::new(Vec::with_capacity(bytes + 64))
}

fn read_no_follow(path: &Path, forbidden: u32) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let Some(file) = open_no_follow(path, OpenOptions::new().read(true), forbidden)? else {
        return Ok(None);
    };
    let opened = file.metadata().map_err(|error| with_path(path, &error))?;
    if opened.len() > DATA_FILE_MAX_BYTES {
        return Err(invalid_file(path, "is larger than 64 MiB"));
    }
    let mut content = buffer_for(&opened, DATA_FILE_MAX_BYTES);
    file.take(DATA_FILE_MAX_BYTES)
        .read_to_end(&mut content)
        .map_err(|error| with_path(path, &error))?;
    Ok(Some(content))
}

/// Opens a file with secrets. Returns `None` if it does not exist. Refuses what [`read_secret`]
/// refuses.
///
/// # Errors
/// As in [`read`].
pub fn open_private(path: &Path, how: &OpenOptions) -> io::Result<Option<File>> {
    open_no_follow(path, how, OTHERS)
}

fn open_no_follow(path: &Path, how: &OpenOptions, forbidden: u32) -> io::Result<Option<File>> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(with_path(path, &error)),
    };
    if !metadata.is_file() {
        return Err(invalid_file(path, NOT_A_FILE));
    }
    if metadata.mode() & forbidden != 0 {
        return Err(invalid_mode(path, &metadata, forbidden));
    }
    let file = how.open(path).map_err(|error| with_path(path, &error))?;
    let opened = file.metadata().map_err(|error| with_path(path, &error))?;
    if (opened.dev(), opened.ino()) != (metadata.dev(), metadata.ino()) {
        return Err(invalid_file(
            path,
            "changed while the server or agent opened it",
        ));
    }
    Ok(Some(file))
}

/// Replaces the whole content of a file, with mode 0600. Readers see the old content or the new
/// one, also after a crash and when several processes replace the file at once.
///
/// # Errors
/// The system's error with the path. The old content is unchanged.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_with(path, content, FileAccess::PRIVATE)
}

/// Mode and owner of a file that [`replace_with`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileAccess {
    /// Permission bits, whatever the umask is.
    pub mode: u32,
    /// Owner of the file. `None` means user and group of this process.
    pub owner: Option<FileOwner>,
}

/// Owner of a file, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    /// Number of the user.
    pub user: u32,
    /// Number of the group.
    pub group: u32,
}

impl FileAccess {
    /// Mode 0600, for files with secrets.
    pub const PRIVATE: Self = Self {
        mode: PRIVATE_MODE,
        owner: None,
    };
    /// Mode 0644, for files without secrets.
    pub const READABLE: Self = Self {
        mode: 0o644,
        owner: None,
    };

    /// Returns the access of an existing file.
    ///
    /// # Errors
    /// The system's error with the path.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path).map_err(|error| with_path(path, &error))?;
        Ok(Self {
            mode: metadata.mode() & 0o777,
            owner: Some(FileOwner {
                user: metadata.uid(),
                group: metadata.gid(),
            }),
        })
    }
}

/// Replaces the whole content of a file like [`replace`] does, with another mode or owner. Only root
/// may give a file to another user. The file is private until its mode is set. The name of the
/// temporary file begins with a dot, because the kubelet runs every other file in a directory of
/// static pods.
///
/// # Errors
/// As in [`replace`].
pub fn replace_with(path: &Path, content: &[u8], access: FileAccess) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut temporary = OsString::from(".");
    temporary.push(path.file_name().unwrap_or_default());
    temporary.push(format!(".{}.{count}.new", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written =
        write_new(&temporary, content, access).and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        let _nothing_to_remove = fs::remove_file(temporary);
        return Err(with_path(path, &error));
    }
    sync_parent(path);
    Ok(())
}

/// Removes a file, if it exists.
///
/// # Errors
/// The system's error with the path.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => {
            sync_parent(path);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(with_path(path, &error)),
    }
}

/// Makes a new name or a removal survive a crash. If the directory cannot be synced, the content is
/// still complete.
fn sync_parent(path: &Path) {
    if let Ok(directory) = File::open(folder(path)) {
        let _best_effort = directory.sync_all();
    }
}

/// Creates a file with mode 0600. An existing file is not changed.
///
/// # Errors
/// The system's error with the path; `AlreadyExists` for an existing file.
pub fn create(path: &Path, content: &[u8]) -> io::Result<()> {
    create_with(path, content, FileAccess::PRIVATE)
}

/// Creates a file like [`create`] does, with another mode or owner.
///
/// # Errors
/// As in [`create`].
pub fn create_with(path: &Path, content: &[u8], access: FileAccess) -> io::Result<()> {
    let file = open_new(path).map_err(|error| with_path(path, &error))?;
    write_synced(file, content, access).map_err(|error| {
        let _incomplete = fs::remove_file(path);
        with_path(path, &error)
    })?;
    sync_parent(path);
    Ok(())
}

/// Returns whether an error means that nothing can be written: the file system is read-only or full,
/// or this user has no right to write.
pub fn is_unwritable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
    )
}

/// Opens a lock file, and creates it if it does not exist. A lock needs no right to write, so a file
/// that exists is opened where nothing can be written, too.
///
/// # Errors
/// The system's error with the path; `InvalidData` for a link or another file type.
pub fn open_lock(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(invalid_file(path, NOT_A_FILE));
    }
    let mut create = OpenOptions::new();
    create.create(true).append(true).mode(PRIVATE_MODE);
    let opened = create.open(path).or_else(|error| {
        let existing = is_unwritable(&error).then(|| File::open(path));
        existing.and_then(Result::ok).ok_or(error)
    });
    let file = opened.map_err(|error| with_path(path, &error))?;
    let _best_effort = give_to_service(&file, path);
    Ok(file)
}

/// Acquires the lock of a data directory. Returns `None` if another process holds it. Dropping the
/// file releases the lock.
///
/// # Errors
/// When the lock file cannot be opened.
pub fn try_lock(path: &Path) -> io::Result<Option<File>> {
    let file = open_lock(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(with_path(path, &error)),
    }
}

fn write_new(path: &Path, content: &[u8], access: FileAccess) -> io::Result<()> {
    // Remove a leftover of a killed process with the same id. `open_new` refuses a file that
    // appears in between.
    let _nothing_left_over = fs::remove_file(path);
    write_synced(open_new(path)?, content, access)
}

fn open_new(path: &Path) -> io::Result<File> {
    let mut create = OpenOptions::new();
    create.write(true).create_new(true).mode(PRIVATE_MODE);
    let file = create.open(path)?;
    // A process without the capability CHOWN keeps its files.
    let _best_effort = give_to_service(&file, path);
    Ok(file)
}

/// Gives a file of root to the owner of its directory. Otherwise a verb that root runs would leave
/// files that the service cannot read.
fn give_to_service(file: &File, path: &Path) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() || file.metadata()?.uid() != ROOT {
        return Ok(());
    }
    let folder = fs::metadata(folder(path))?;
    if folder.uid() != ROOT {
        fchown(file, Some(folder.uid()), Some(folder.gid()))?;
    }
    Ok(())
}

/// Returns the directory of a file. The parent of a bare name is an empty path, which cannot be
/// opened.
fn folder(path: &Path) -> &Path {
    let parent = path.parent();
    parent
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."))
}

fn write_synced(mut file: File, content: &[u8], access: FileAccess) -> io::Result<()> {
    if let Some(owner) = access.owner {
        fchown(&file, Some(owner.user), Some(owner.group))?;
    }
    if access.mode != PRIVATE_MODE {
        file.set_permissions(fs::Permissions::from_mode(access.mode))?;
    }
    file.write_all(content)?;
    file.sync_all()
}

/// Returns the error of an access to a file, with its path.
pub fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn invalid_file(path: &Path, reason: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{} {reason}", path.display()),
    )
}

/// Returns the error for a forbidden mode, with the command that fixes it.
fn invalid_mode(path: &Path, metadata: &fs::Metadata, forbidden: u32) -> io::Error {
    let mode = metadata.mode() & 0o7777;
    let (what, change) = if forbidden & mode & OTHERS_WRITE == 0 {
        ("read", "600")
    } else if forbidden == OTHERS {
        ("written", "600")
    } else {
        ("written", "go-w")
    };
    let shown = path.display();
    invalid_file(
        path,
        &format!("can be {what} by others (mode {mode:04o}); run: chmod {change} {shown}"),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::ScratchDir;

    #[test]
    fn replaced_files_are_private_and_whole() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("key");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(read(&path).unwrap().unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let left = fs::read_dir(dir).unwrap().count();
        assert_eq!(left, 1, "no temporary file is left");
    }

    #[test]
    fn replaced_files_have_the_access_that_is_asked_for() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("config");
        replace_with(&path, b"one", FileAccess::READABLE).unwrap();
        let access = FileAccess::of(&path).unwrap();
        assert_eq!(access.mode, 0o644);
        // The owner of a file may give the file to itself.
        let access = FileAccess {
            mode: 0o640,
            ..access
        };
        replace_with(&path, b"two", access).unwrap();
        assert_eq!(FileAccess::of(&path).unwrap(), access);
        assert_eq!(read(&path).unwrap().unwrap(), b"two");
    }

    #[test]
    fn files_of_root_belong_to_the_owner_of_their_directory() {
        let scratch = ScratchDir::new().unwrap();
        let directory = scratch.path();
        let owner = FileOwner {
            user: 65_532,
            group: 65_533,
        };
        // Only root can give files away.
        if std::os::unix::fs::chown(directory, Some(owner.user), Some(owner.group)).is_err() {
            return;
        }
        let [replaced, created, lock] = ["a", "b", "lock"].map(|name| directory.join(name));
        replace(&replaced, b"x").unwrap();
        create(&created, b"x").unwrap();
        open_lock(&lock).unwrap();
        for path in [&replaced, &created, &lock] {
            let access = FileAccess::of(path).unwrap();
            assert_eq!((access.mode, access.owner), (PRIVATE_MODE, Some(owner)));
        }
        replace_with(
            &replaced,
            b"y",
            FileAccess {
                owner: Some(FileOwner { user: 0, group: 0 }),
                ..FileAccess::PRIVATE
            },
        )
        .unwrap();
        assert_eq!(FileAccess::of(&replaced).unwrap().owner.unwrap().user, ROOT);
    }

    #[test]
    fn created_files_are_private_and_existing_ones_stay() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("key");
        create(&path, b"one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = create(&path, b"two").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert!(error.to_string().contains("/key"), "{error}");
        assert_eq!(read(&path).unwrap().unwrap(), b"one");
        remove(&path).unwrap();
        remove(&path).unwrap();
        create_with(&path, b"two", FileAccess::READABLE).unwrap();
        assert_eq!(FileAccess::of(&path).unwrap().mode, 0o644);
    }

    #[test]
    fn files_replaced_by_several_threads_at_once_stay_whole() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("key");
        let contents = [[b'a'; 4096], [b'b'; 4096], [b'c'; 4096], [b'd'; 4096]];
        std::thread::scope(|scope| {
            for content in &contents {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        replace(path, content).unwrap();
                    }
                });
            }
        });
        let left = read(&path).unwrap().unwrap();
        assert!(contents.iter().any(|content| content[..] == left));
        assert_eq!(fs::read_dir(dir).unwrap().count(), 1);
    }

    #[test]
    fn s09_directory_that_others_may_write_is_refused_with_the_chmod() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let file = dir.join("ca.key");
        replace(&file, b"x").unwrap();
        let set = |mode| fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
        for (mode, is_taken) in [
            (0o700, true),
            (0o755, true),
            (0o777, false),
            (0o1777, false),
            (0o702, false),
        ] {
            set(mode);
            let checked = check_private_dir(dir);
            assert_eq!(checked.is_ok(), is_taken, "{mode:o}: {checked:?}");
            if let Err(error) = checked {
                assert!(error.to_string().contains("run: chmod go-w"), "{error}");
            }
        }
        set(0o700);
        // A file of somebody else, which only root can make.
        if fchown(File::open(&file).unwrap(), Some(4_000_000), None).is_ok() {
            let error = check_private_dir(dir).unwrap_err().to_string();
            assert!(
                error.contains("ca.key belongs to the user 4000000"),
                "{error}"
            );
        }
    }

    /// S09: checks which modes and file types are refused, for data files, for key files, and for
    /// files that the operator provides.
    #[test]
    fn s09_table_of_modes_and_links() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("file");
        assert!(read(&path).unwrap().is_none());
        replace(&path, b"x").unwrap();
        for (mode, own, secret, operator, config) in [
            (0o600, true, true, true, true),
            (0o400, true, true, true, true),
            (0o640, true, false, true, true),
            (0o440, true, false, true, true),
            (0o644, true, false, true, true),
            (0o604, true, false, true, true),
            (0o660, false, false, false, true),
            (0o620, false, false, false, true),
            (0o664, false, false, false, true),
            (0o602, false, false, false, false),
            (0o666, false, false, false, false),
            (0o777, false, false, false, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let results = [
                (read(&path).map(drop), own),
                (read_secret(&path).map(drop), secret),
                (read_operator_file(&path).map(drop), operator),
                (read_config(&path).map(drop), config),
            ];
            for (result, accepted) in results {
                assert_eq!(result.is_ok(), accepted, "{mode:o}: {result:?}");
                if let Err(error) = result {
                    let text = error.to_string();
                    assert!(text.contains("chmod") && text.contains("/file"), "{text}");
                }
            }
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let link = dir.join("link");
        symlink(&path, &link).unwrap();
        let error = read(&link).unwrap_err().to_string();
        assert!(error.contains("regular file"), "{error}");
        assert!(read_secret(&link).is_err());
        assert_eq!(*read_operator_file(&link).unwrap(), b"x");
        assert!(try_lock(&link).is_err(), "a lock is no link either");
        symlink(dir.join("nowhere"), dir.join("dangling")).unwrap();
        assert!(try_lock(&dir.join("dangling")).is_err());
        assert!(!dir.join("nowhere").exists());
        for other in [dir, &dir.join("nowhere")] {
            assert!(read_operator_file(other).is_err());
        }
        assert!(read(dir).is_err());
    }

    /// Covers a checkout by a user with umask 002.
    #[test]
    fn only_a_group_of_several_users_is_warned_about() {
        for (mode, user, group, expected) in [
            (0o664, 1000, 1000, false),
            (0o664, 0, 0, false),
            (0o664, 1000, 100, true),
            (0o660, 1000, 0, true),
            (0o644, 1000, 100, false),
        ] {
            let found = is_written_by_others(mode, user, group);
            assert_eq!(found, expected, "{mode:o} {user}:{group}");
        }
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let path = dir.join("server.yaml");
        replace(&path, b"logLevel: info").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        let (content, warning) = read_config(&path).unwrap();
        assert_eq!(*content, b"logLevel: info");
        let is_foreign = metadata.uid() != metadata.gid();
        assert_eq!(warning.is_some(), is_foreign, "{warning:?}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let error_text = read_config(&path).unwrap_err().to_string();
        assert!(error_text.contains("chmod go-w"), "{error_text}");
    }

    #[test]
    fn lock_is_held_by_one() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        let held = try_lock(&dir.join("lock")).unwrap().unwrap();
        assert!(try_lock(&dir.join("lock")).unwrap().is_none());
        drop(held);
        assert!(try_lock(&dir.join("lock")).unwrap().is_some());
    }
}
