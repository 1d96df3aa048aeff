//! The file of the store, and its database.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::path::{Path, PathBuf};

use redb::backends::{FileBackend, InMemoryBackend};
use redb::{
    Builder, CommitError, CompactionError, Database, DatabaseError, ReadableDatabase,
    ReadableTable, StorageBackend, StorageError, TableDefinition, TableError, TransactionError,
};
use tunnel_process::files;
use zeroize::Zeroizing;

use super::pending::Batch;
use super::rows::{Content, Table, Target};

/// Where the bytes of the database are.
pub(super) trait Medium: Send + 'static {
    type Backend: StorageBackend;

    /// Opens the bytes for reading and writing. What does not exist is created as a whole.
    fn open(&mut self) -> Result<Self::Backend, DbError>;

    /// Reads all bytes. There are none if there is no file.
    fn read(&mut self) -> io::Result<Vec<u8>>;

    /// Reads all bytes of what was opened or read last, also after it was removed or replaced.
    fn read_opened(&self) -> io::Result<Vec<u8>>;

    /// Returns the number of bytes, as far as it is known.
    fn bytes(&self) -> u64;

    /// Returns whether somebody removed or replaced what was opened or read last.
    fn is_replaced(&self) -> bool;

    /// Moves the bytes to another name, which is returned.
    fn set_aside(&self) -> io::Result<PathBuf>;
}

/// A file, and what was opened or read last.
#[derive(Debug)]
pub(super) struct FileMedium {
    path: PathBuf,
    opened: Option<OpenedFile>,
}

/// A file that stays readable when its name is gone. Locks belong to an open file, so this one has
/// none of the database's.
#[derive(Debug)]
struct OpenedFile {
    file: File,
    identity: (u64, u64),
}

impl OpenedFile {
    /// Opens a file for reading. Returns `None` if it does not exist.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let Some(file) = files::open_private(path, File::options().read(true))? else {
            return Ok(None);
        };
        let identity = identity(&file.metadata()?);
        Ok(Some(Self { file, identity }))
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let length = self.file.metadata()?.len();
        let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut content, 0)?;
        Ok(content)
    }
}

impl FileMedium {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            opened: None,
        }
    }
}

impl FileMedium {
    /// Creates an empty database under another name first, so that there is never a part of one.
    fn create(&self) -> Result<(), DbError> {
        let mut new = self.path.as_os_str().to_owned();
        new.push(format!(".{}.new", std::process::id()));
        let new = PathBuf::from(new);
        if let Err(error) = fs::remove_file(&new)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error.into());
        }
        let linked = files::create(&new, b"")
            .map_err(DbError::from)
            .and_then(|()| {
                let file = File::options().read(true).write(true).open(&new)?;
                drop(builder().create_with_backend(FileBackend::new(file)?)?);
                // Another process may have created one meanwhile.
                match fs::hard_link(&new, &self.path) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error.into()),
                    Ok(()) | Err(_) => Ok(()),
                }
            })
            .and_then(|()| {
                let folder = self.path.parent().unwrap_or_else(|| Path::new("."));
                Ok(File::open(folder)?.sync_all()?)
            });
        let _best_effort = fs::remove_file(&new);
        linked
    }
}

impl Medium for FileMedium {
    type Backend = FileBackend;

    fn open(&mut self) -> Result<FileBackend, DbError> {
        let mut how = File::options();
        how.read(true).write(true);
        let file = match files::open_private(&self.path, &how)? {
            Some(file) => file,
            None => {
                self.create()?;
                let created = files::open_private(&self.path, &how)?;
                created.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?
            }
        };
        let again = OpenedFile::open(&self.path)?;
        let is_same = |again: &OpenedFile, file: &fs::Metadata| again.identity == identity(file);
        let metadata = file.metadata()?;
        let again = again.filter(|again| is_same(again, &metadata));
        self.opened = Some(again.ok_or_else(|| io::Error::other("changed while it was opened"))?);
        Ok(FileBackend::new(file)?)
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        match OpenedFile::open(&self.path)? {
            Some(opened) => self.opened.insert(opened).read(),
            None => Ok(Vec::new()),
        }
    }

    fn read_opened(&self) -> io::Result<Vec<u8>> {
        self.opened
            .as_ref()
            .map_or(Ok(Vec::new()), OpenedFile::read)
    }

    fn bytes(&self) -> u64 {
        fs::symlink_metadata(&self.path).map_or(0, |found| found.len())
    }

    fn is_replaced(&self) -> bool {
        let found = match fs::symlink_metadata(&self.path) {
            Ok(metadata) => Some(identity(&metadata)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(_unknown) => return false,
        };
        self.opened
            .as_ref()
            .is_some_and(|opened| found != Some(opened.identity))
    }

    fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = self.path.with_extension("redb.damaged");
        fs::rename(&self.path, &aside)?;
        Ok(aside)
    }
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Why the database cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum DbError {
    /// Another process has it open.
    #[error("another process uses it")]
    InUse,
    #[error("is damaged: {0}")]
    Damaged(String),
    #[error("{0}")]
    Io(io::Error),
}

/// A database that is open, or a copy of one in memory.
#[derive(Debug)]
pub(super) struct Db {
    database: Database,
    /// Why the database is a copy in memory, to which nothing is written.
    pub(super) read_only: Option<String>,
}

impl Db {
    /// Opens the database, or a copy of it in memory where it can be read only.
    pub(super) fn open(medium: &mut impl Medium) -> Result<Self, DbError> {
        let problem = match Self::open_writable(medium) {
            Err(DbError::Io(error)) => error,
            opened => return opened,
        };
        // Nothing can be read either: the first problem is the better one.
        let Ok(bytes) = medium.read() else {
            return Err(DbError::Io(problem));
        };
        Self::copy(&bytes, problem.to_string())
    }

    /// Opens a copy of the database in memory, to which nothing is written because of `problem`.
    pub(super) fn copy(bytes: &[u8], problem: String) -> Result<Self, DbError> {
        let copy = InMemoryBackend::new();
        copy.set_len(bytes.len() as u64)?;
        copy.write(0, bytes)?;
        Ok(Self {
            database: builder().create_with_backend(copy)?,
            read_only: Some(problem),
        })
    }

    /// Opens the database for writing.
    pub(super) fn open_writable(medium: &mut impl Medium) -> Result<Self, DbError> {
        Ok(Self {
            database: builder().create_with_backend(medium.open()?)?,
            read_only: None,
        })
    }

    pub(super) fn rows(&self, table: Table) -> Result<Vec<(String, Content)>, DbError> {
        let reading = self.database.begin_read()?;
        let rows = match reading.open_table(definition(table)) {
            Ok(rows) => rows,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let rows = rows.iter()?.map(|row| {
            let (key, value) = row?;
            let content = Zeroizing::new(value.value().to_vec());
            Ok((key.value().to_owned(), Content::new(content)))
        });
        rows.collect()
    }

    /// Writes rows, all or none, and waits until they are on the disk.
    pub(super) fn write(&self, batch: &Batch) -> Result<(), DbError> {
        if let Some(problem) = &self.read_only {
            return Err(DbError::Io(io::Error::other(problem.clone())));
        }
        if batch.changes.is_empty() {
            return Ok(());
        }
        let mut writing = self.database.begin_write()?;
        // Agents and other servers choose some of the content.
        writing.set_two_phase_commit(true);
        let mut changes = batch.changes.iter().peekable();
        while let Some((Target::Row(table, _), _)) = changes.peek() {
            let table = *table;
            let mut rows = writing.open_table(definition(table))?;
            let of_table = |(target, _): &&(Target, Option<Content>)| matches!(target, Target::Row(other, _) if *other == table);
            while let Some((Target::Row(_, key), content)) = changes.next_if(of_table) {
                match content {
                    Some(content) => rows.insert(&**key, content.as_slice())?,
                    None => rows.remove(&**key)?,
                };
            }
        }
        writing.commit()?;
        Ok(())
    }

    /// Returns the rows of all tables.
    pub(super) fn all(&self) -> Result<Batch, DbError> {
        let mut all = Vec::new();
        for table in Table::ALL {
            let rows = self.rows(table)?.into_iter();
            all.extend(rows.map(|(key, content)| (Target::Row(table, key.into()), Some(content))));
        }
        Ok(Batch::of_rows(all))
    }

    /// Frees what the file does not need.
    pub(super) fn compact(&mut self) -> Result<(), DbError> {
        match self.database.compact() {
            Ok(_) => Ok(()),
            Err(CompactionError::Storage(error)) => Err(error.into()),
            Err(error) => Err(io::Error::other(error.to_string()).into()),
        }
    }
}

fn builder() -> Builder {
    let mut builder = Database::builder();
    builder
        .set_cache_size(CACHE_BYTES)
        // A file that was damaged outside of redb may panic otherwise.
        .set_check_integrity_on_open(true);
    builder
}

fn definition(table: Table) -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(table.label())
}

impl From<io::Error> for DbError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<StorageError> for DbError {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::Corrupted(problem) => Self::Damaged(problem),
            // Other content than a database, or a part of one.
            StorageError::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
                ) =>
            {
                Self::Damaged(error.to_string())
            }
            StorageError::Io(error) => Self::Io(error),
            other => Self::Io(io::Error::other(other.to_string())),
        }
    }
}

impl From<DatabaseError> for DbError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::DatabaseAlreadyOpen => Self::InUse,
            DatabaseError::Storage(error) => error.into(),
            // The format of another version.
            other => Self::Damaged(other.to_string()),
        }
    }
}

impl From<TableError> for DbError {
    fn from(error: TableError) -> Self {
        match error {
            TableError::Storage(error) => error.into(),
            other => Self::Damaged(other.to_string()),
        }
    }
}

impl From<TransactionError> for DbError {
    fn from(error: TransactionError) -> Self {
        match error {
            TransactionError::Storage(error) => error.into(),
            other => Self::Io(io::Error::other(other.to_string())),
        }
    }
}

impl From<CommitError> for DbError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Storage(error) => error.into(),
            other => Self::Io(io::Error::other(other.to_string())),
        }
    }
}

/// Memory for pages of the file. Rows are in memory elsewhere, so little is read again.
const CACHE_BYTES: usize = 4 * 1024 * 1024;
