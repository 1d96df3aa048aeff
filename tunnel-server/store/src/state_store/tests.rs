use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::StorageBackend;
use redb::backends::FileBackend;

use super::*;
use crate::data_dir::testing::Scratch;

/// A disk in memory. What is written is lost with the power until it is synced.
#[derive(Debug, Clone, Default)]
struct Disk(Arc<(Mutex<DiskState>, Condvar)>);

#[derive(Debug, Default)]
struct DiskState {
    bytes: Vec<u8>,
    synced: Vec<u8>,
    /// Writes since the last sync.
    unsynced: Vec<DiskWrite>,
    /// Number of writes after which the process is killed, in the middle of the next one.
    writes_left: Option<u64>,
    writes: u64,
    /// Error of each write.
    write_error: Option<io::ErrorKind>,
    is_read_only: bool,
    is_hanging: bool,
    /// Whether the next write panics, as a bug of the database does.
    is_panicking: bool,
}

#[derive(Debug, Clone)]
enum DiskWrite {
    Bytes(usize, Vec<u8>),
    Length(usize),
}

impl DiskWrite {
    fn apply(&self, disk: &mut Vec<u8>) {
        match self {
            Self::Bytes(offset, bytes) => {
                let end = offset + bytes.len();
                disk.resize(disk.len().max(end), 0);
                disk[*offset..end].copy_from_slice(bytes);
            }
            Self::Length(length) => disk.resize(*length, 0),
        }
    }
}

impl Disk {
    fn set(&self, change: impl FnOnce(&mut DiskState)) {
        change(&mut self.0.0.lock());
        self.0.1.notify_all();
    }

    fn write(&self, write: DiskWrite) -> io::Result<()> {
        let mut disk = self.0.0.lock();
        while disk.is_hanging {
            self.0.1.wait(&mut disk);
        }
        if let Some(kind) = disk.write_error {
            return Err(kind.into());
        }
        let state = &mut *disk;
        assert!(!std::mem::take(&mut state.is_panicking), "a bug");
        state.writes += 1;
        if let Some(left) = &mut state.writes_left {
            let Some(fewer) = left.checked_sub(1) else {
                if let DiskWrite::Bytes(offset, bytes) = &write {
                    let part = bytes[..bytes.len() / 2].to_vec();
                    DiskWrite::Bytes(*offset, part).apply(&mut state.bytes);
                }
                state.write_error = Some(io::ErrorKind::BrokenPipe);
                return Err(io::ErrorKind::BrokenPipe.into());
            };
            *left = fewer;
        }
        write.apply(&mut state.bytes);
        state.unsynced.push(write);
        Ok(())
    }

    /// Returns the disk after the process was killed, or after the power was lost: then each write
    /// since the last sync is there or not.
    fn after(&self, lost: Option<u64>) -> Self {
        let disk = self.0.0.lock();
        let mut bytes = disk.bytes.clone();
        if let Some(lost) = lost {
            bytes.clone_from(&disk.synced);
            for (number, write) in disk.unsynced.iter().enumerate() {
                if lost >> (number % 64) & 1 == 0 {
                    write.apply(&mut bytes);
                }
            }
        }
        let after = Self::default();
        after.set(|disk| (disk.bytes, disk.synced) = (bytes.clone(), bytes));
        after
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.0.lock().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let disk = self.0.0.lock();
        let offset = usize::try_from(offset).unwrap();
        let bytes = disk.bytes.get(offset..offset + out.len());
        let bytes = bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Self::write(self, DiskWrite::Length(usize::try_from(len).unwrap()))
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut disk = self.0.0.lock();
        if let Some(kind) = disk.write_error {
            return Err(kind.into());
        }
        disk.synced = disk.bytes.clone();
        disk.unsynced.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap();
        Self::write(self, DiskWrite::Bytes(offset, data.to_vec()))
    }
}

impl Medium for Disk {
    type Backend = Self;

    fn open(&mut self) -> Result<Self, DbError> {
        if self.0.0.lock().is_read_only {
            return Err(io::Error::from(io::ErrorKind::ReadOnlyFilesystem).into());
        }
        Ok(self.clone())
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        self.read_opened()
    }

    fn read_opened(&self) -> io::Result<Vec<u8>> {
        Ok(self.0.0.lock().bytes.clone())
    }

    fn bytes(&self) -> u64 {
        self.0.0.lock().bytes.len() as u64
    }

    fn is_replaced(&self) -> bool {
        false
    }

    fn set_aside(&self) -> io::Result<PathBuf> {
        self.set(|disk| disk.bytes.clear());
        Ok("aside".into())
    }
}

/// A file on a disk that may be full.
#[derive(Debug)]
struct FullDisk<T> {
    file: T,
    is_full: Arc<AtomicBool>,
}

impl StorageBackend for FullDisk<FileBackend> {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.write(offset, data)
    }
}

impl Medium for FullDisk<FileMedium> {
    type Backend = FullDisk<FileBackend>;

    fn open(&mut self) -> Result<FullDisk<FileBackend>, DbError> {
        Ok(FullDisk {
            file: self.file.open()?,
            is_full: self.is_full.clone(),
        })
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        self.file.read()
    }

    fn read_opened(&self) -> io::Result<Vec<u8>> {
        self.file.read_opened()
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn is_replaced(&self) -> bool {
        self.file.is_replaced()
    }

    fn set_aside(&self) -> io::Result<PathBuf> {
        self.file.set_aside()
    }
}

fn open(disk: &Disk) -> StateStore {
    let activity = FileActivity::default();
    StateStore::with_medium(disk.clone(), "store".to_owned(), &activity, OnDamage::Stop).unwrap()
}

fn put(store: &StateStore, table: Table, key: &str, value: u32) {
    store.change(table, vec![RowChange::upsert(key, &value)]);
}

fn values(store: &StateStore, table: Table) -> Vec<(String, u32)> {
    let loaded = store.load(table, "").unwrap();
    loaded.values.into_iter().collect()
}

fn conditions(readiness: &Readiness) -> String {
    let lines = readiness.conditions().into_iter();
    lines.map(|(_, line)| format!("{line}\n")).collect()
}

#[test]
fn full_disk_keeps_changes_in_memory_with_a_condition_and_they_are_written_when_it_has_room() {
    let (disk, readiness) = (Disk::default(), Readiness::default());
    let store = open(&disk);
    store.report_to(&readiness);
    put(&store, Table::Nodes, "a", 1);
    store.flush(Table::Nodes).unwrap();
    disk.set(|disk| disk.write_error = Some(io::ErrorKind::StorageFull));
    put(&store, Table::Nodes, "b", 2);
    store.change(Table::Nodes, vec![RowChange::remove("a")]);
    let error = store.flush(Table::Nodes).unwrap_err().to_string();
    assert!(error.contains("no storage space"), "{error}");
    assert_eq!(store.unsaved(Table::Nodes), Some(error.clone()));
    put(&store, Table::Orders, "a", 1);
    store.flush(Table::Orders).unwrap_err();
    let shown = conditions(&readiness);
    assert!(shown.contains("2 changes are in memory only"), "{shown}");
    assert!(shown.contains("1 changes are in memory only"), "{shown}");
    // What is in memory only is read, too.
    assert_eq!(values(&store, Table::Nodes), [("b".to_owned(), 2)]);
    disk.set(|disk| disk.write_error = None);
    store.flush(Table::Orders).unwrap();
    store.flush(Table::Nodes).unwrap();
    assert_eq!(conditions(&readiness), "");
    drop(store);
    let store = open(&disk);
    assert_eq!(values(&store, Table::Nodes), [("b".to_owned(), 2)]);
    assert_eq!(values(&store, Table::Orders), [("a".to_owned(), 1)]);
}

#[test]
fn read_only_disk_is_served_from_memory() {
    let (disk, readiness) = (Disk::default(), Readiness::default());
    let store = open(&disk);
    put(&store, Table::Orders, "a", 1);
    drop(store);
    disk.set(|disk| disk.is_read_only = true);
    let store = open(&disk);
    store.report_to(&readiness);
    let shown = conditions(&readiness);
    assert!(shown.contains("the server runs from memory"), "{shown}");
    put(&store, Table::Orders, "b", 2);
    store.flush(Table::Orders).unwrap_err();
    let shown = conditions(&readiness);
    assert!(shown.contains("read-only"), "{shown}");
    let both = [("a".to_owned(), 1), ("b".to_owned(), 2)];
    assert_eq!(values(&store, Table::Orders), both);
    disk.set(|disk| disk.is_read_only = false);
    store.flush(Table::Orders).unwrap();
    drop(store);
    assert_eq!(values(&open(&disk), Table::Orders), both);
}

#[test]
fn disk_that_does_not_answer_fails_changes_in_time_and_they_are_made_later() {
    let (disk, activity) = (Disk::default(), FileActivity::default());
    let opened =
        StateStore::with_medium(disk.clone(), "store".to_owned(), &activity, OnDamage::Stop);
    let store = opened.unwrap();
    disk.set(|disk| disk.is_hanging = true);
    put(&store, Table::Orders, "a", 1);
    let began = Instant::now();
    let error = store.flush(Table::Orders).unwrap_err().to_string();
    assert!(error.ends_with("does not answer"), "{error}");
    assert!(began.elapsed() >= ANSWER_TIMEOUT);
    while !activity.is_blocked() {
        thread::yield_now();
    }
    // Nobody waits behind the first one.
    let sent = Instant::now();
    put(&store, Table::Orders, "b", 2);
    store.flush(Table::Orders).unwrap_err();
    assert!(sent.elapsed() < ANSWER_TIMEOUT);
    disk.set(|disk| disk.is_hanging = false);
    while activity.is_blocked() {
        thread::yield_now();
    }
    store.flush(Table::Orders).unwrap();
    drop(store);
    assert_eq!(values(&open(&disk), Table::Orders).len(), 2);
}

#[test]
fn rows_are_not_cleared_while_a_disk_does_not_answer_and_that_is_known_soon() {
    let (disk, activity) = (Disk::default(), FileActivity::default());
    let opened =
        StateStore::with_medium(disk.clone(), "store".to_owned(), &activity, OnDamage::Stop);
    let store = opened.unwrap();
    put(&store, Table::Sessions, "a", 1);
    store.flush(Table::Sessions).unwrap();
    disk.set(|disk| disk.is_hanging = true);
    // Its write begins, and what is read waits behind it.
    put(&store, Table::Orders, "b", 2);
    let began = Instant::now();
    let error = store.clear(Table::Sessions).unwrap_err().to_string();
    assert!(error.ends_with("does not answer"), "{error}");
    assert!(began.elapsed() < OPEN_TIMEOUT);
    disk.set(|disk| disk.is_hanging = false);
    while activity.is_blocked() {
        thread::yield_now();
    }
    store.flush(Table::Orders).unwrap();
    store.clear(Table::Sessions).unwrap();
    assert!(values(&store, Table::Sessions).is_empty());
}

/// Makes 20 changes in the order of their values, until a write fails. Returns the last value that
/// is on the disk.
fn work(disk: &mut Disk) -> u32 {
    let mut saved = 0;
    let Ok(db) = Db::open_writable(disk) else {
        return saved;
    };
    for value in 1..=20 {
        let long = "x".repeat(value as usize * 200);
        let row =
            |table, key: &str, change: RowChange| (Target::Row(table, key.into()), change.content);
        let changes = vec![
            row(Table::Orders, "last", RowChange::upsert("last", &value)),
            row(Table::Nodes, "long", RowChange::upsert("long", &long)),
            row(
                Table::Nodes,
                "odd",
                match value % 2 {
                    0 => RowChange::remove("odd"),
                    _ => RowChange::upsert("odd", &value),
                },
            ),
        ];
        if db.write(&Batch::of_rows(changes)).is_err() {
            return saved;
        }
        saved = value;
    }
    saved
}

#[test]
fn store_opens_and_has_all_that_was_saved_after_a_kill_or_a_loss_of_power_at_each_of_1000_writes() {
    let mut fresh = Disk::default();
    drop(Db::open_writable(&mut fresh).unwrap());
    let fresh = fresh.after(None);
    let mut counted = fresh.after(None);
    assert_eq!(work(&mut counted), 20);
    let writes = counted.0.0.lock().writes;
    assert!(writes > 50, "{writes}");
    let (mut kills, mut kept) = (0_u64, 0);
    while kills < 1000 {
        let mut disk = fresh.after(None);
        disk.set(|disk| disk.writes_left = Some(kills % writes));
        let saved = work(&mut disk);
        // Each round loses other writes: none, all, and then others by a multiplicative hash.
        let lost = match kills / writes {
            0 => None,
            1 => Some(u64::MAX),
            round => Some((kills + round).wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        };
        let store = open(&disk.after(lost));
        let last = values(&store, Table::Orders)
            .pop()
            .map_or(0, |(_, value)| value);
        assert!(
            last == saved || last == saved + 1,
            "kill {kills}: {last} after {saved}"
        );
        let nodes = store.load::<serde_json::Value>(Table::Nodes, "").unwrap();
        assert_eq!(
            nodes.values.contains_key("odd"),
            last % 2 == 1,
            "kill {kills}"
        );
        let long = nodes
            .values
            .get("long")
            .map(|text| text.as_str().unwrap().len());
        assert_eq!(
            long,
            (last > 0).then_some(last as usize * 200),
            "kill {kills}"
        );
        put(&store, Table::Nodes, "odd", 0);
        store.flush(Table::Nodes).unwrap();
        (kills, kept) = (kills + 1, kept + u64::from(last > 0));
    }
    assert!(kept > 500, "{kept}");
}

#[test]
fn damaged_bytes_are_found_when_the_store_is_opened() {
    let mut disk = Disk::default();
    work(&mut disk);
    let disk = disk.after(None);
    let length = disk.0.0.lock().bytes.len();
    let mut found = 0;
    for round in 0..100 {
        let mut damaged = disk.after(None);
        let at = round * 7919 * 31 % length;
        damaged.set(|disk| disk.bytes[at..(at + 64).min(length)].fill(0xA5));
        match Db::open_writable(&mut damaged) {
            // Pages that are not in use.
            Ok(db) => assert!(db.rows(Table::Orders).is_ok()),
            Err(DbError::Damaged(_)) => found += 1,
            Err(error) => panic!("byte {at}: {error:?}"),
        }
    }
    assert!(found > 10, "{found}");
}

#[test]
fn damaged_file_stops_a_start_with_the_command_or_is_set_aside() {
    let scratch = Scratch::new();
    for content in [&b"{\"nodes\": {}}"[..], &[0xA5; 200_000]] {
        files::replace(&scratch.0.state(), content).unwrap();
        let error = scratch.0.store(OnDamage::Stop).unwrap_err().to_string();
        assert!(error.contains("state.redb is damaged"), "{error}");
        assert!(error.contains("tunnel-server data repair"), "{error}");
        assert_eq!(fs::read(scratch.0.state()).unwrap(), content);
        let readiness = Readiness::default();
        let store = scratch.0.store(OnDamage::SetAside).unwrap();
        store.report_to(&readiness);
        let shown = conditions(&readiness);
        assert!(shown.contains("state.redb.damaged"), "{shown}");
        let aside = scratch.0.path().join("state.redb.damaged");
        assert_eq!(fs::read(aside).unwrap(), content);
    }
}

#[test]
fn values_that_cannot_be_read_are_set_aside_and_those_of_later_versions_stay() {
    let scratch = Scratch::new();
    let mut medium = FileMedium::new(&scratch.0.state());
    let row = |key: &str, content: &[u8]| {
        let content = Content::new(content.to_vec().into());
        (Target::Row(Table::Nodes, key.into()), Some(content))
    };
    let rows = vec![row("a", b"\x011"), row("b", b"\x01{"), row("c", b"\x02?")];
    let db = Db::open_writable(&mut medium).unwrap();
    db.write(&Batch::of_rows(rows)).unwrap();
    drop(db);
    let readiness = Readiness::default();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    store.report_to(&readiness);
    let loaded: BTreeMap<String, u32> = store.load_observed(Table::Nodes, "");
    assert_eq!(loaded, BTreeMap::from([("a".to_owned(), 1)]));
    let shown = conditions(&readiness);
    assert!(
        shown.contains("1 values of nodes could not be read"),
        "{shown}"
    );
    assert!(shown.contains("stay as they are: nodes c"), "{shown}");
    for key in ["b", "c"] {
        put(&store, Table::Nodes, key, 5);
    }
    store.flush(Table::Nodes).unwrap();
    drop(store);
    let db = Db::open_writable(&mut medium).unwrap();
    let rows = db.rows(Table::Nodes).unwrap();
    let contents: Vec<&[u8]> = rows
        .iter()
        .map(|(_, content)| &***content.as_ref())
        .collect();
    assert_eq!(contents, [b"\x011", b"\x015", b"\x02?"]);
    assert_eq!(db.rows(Table::Damaged).unwrap()[0].0, "nodes/b");
}

#[test]
fn file_that_is_removed_is_written_again_with_all_that_it_had() {
    let scratch = Scratch::new();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    put(&store, Table::Orders, "a", 1);
    store.flush(Table::Orders).unwrap();
    fs::remove_file(scratch.0.state()).unwrap();
    put(&store, Table::Nodes, "b", 2);
    store.flush(Table::Nodes).unwrap();
    drop(store);
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    assert_eq!(values(&store, Table::Orders), [("a".to_owned(), 1)]);
    assert_eq!(values(&store, Table::Nodes), [("b".to_owned(), 2)]);
}

#[test]
fn file_that_is_removed_after_a_write_failed_is_written_again_with_all_that_it_had() {
    let scratch = Scratch::new();
    let is_full = Arc::new(AtomicBool::new(false));
    let medium = FullDisk {
        file: FileMedium::new(&scratch.0.state()),
        is_full: is_full.clone(),
    };
    let activity = FileActivity::default();
    let store = StateStore::with_medium(medium, "store".to_owned(), &activity, OnDamage::Stop);
    let store = store.unwrap();
    put(&store, Table::Orders, "a", 1);
    store.flush(Table::Orders).unwrap();
    is_full.store(true, Ordering::Relaxed);
    put(&store, Table::Tokens, "b", 2);
    store.flush(Table::Tokens).unwrap_err();
    // An operator makes room by it, once more while there is none, and then there is.
    fs::remove_file(scratch.0.state()).unwrap();
    store.flush(Table::Tokens).unwrap_err();
    assert_eq!(values(&store, Table::Orders), [("a".to_owned(), 1)]);
    let _created_again_or_not = fs::remove_file(scratch.0.state());
    store.flush(Table::Tokens).unwrap_err();
    is_full.store(false, Ordering::Relaxed);
    store.flush(Table::Tokens).unwrap();
    drop(store);
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    assert_eq!(values(&store, Table::Orders), [("a".to_owned(), 1)]);
    assert_eq!(values(&store, Table::Tokens), [("b".to_owned(), 2)]);
}

#[test]
fn rows_that_are_read_before_a_removed_file_is_written_again_are_those_that_it_had() {
    let scratch = Scratch::new();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    put(&store, Table::Orders, "a", 1);
    store.flush(Table::Orders).unwrap();
    let path = scratch.0.state();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    put(&store, Table::Orders, "b", 2);
    store.flush(Table::Orders).unwrap_err();
    let both = [("a".to_owned(), 1), ("b".to_owned(), 2)];
    assert_eq!(values(&store, Table::Orders), both);
    fs::remove_dir(&path).unwrap();
    assert_eq!(values(&store, Table::Orders), both);
    store.flush(Table::Orders).unwrap();
    drop(store);
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    assert_eq!(values(&store, Table::Orders), both);
}

#[test]
fn database_that_panics_is_opened_again_with_a_condition_meanwhile() {
    let (disk, readiness) = (Disk::default(), Readiness::default());
    let store = open(&disk);
    store.report_to(&readiness);
    put(&store, Table::Orders, "a", 1);
    store.flush(Table::Orders).unwrap();
    disk.set(|disk| disk.is_panicking = true);
    put(&store, Table::Orders, "b", 2);
    let error = store.flush(Table::Orders).unwrap_err().to_string();
    assert!(error.contains("the database panicked: a bug"), "{error}");
    assert!(conditions(&readiness).contains("1 changes are in memory only"));
    let both = [("a".to_owned(), 1), ("b".to_owned(), 2)];
    assert_eq!(values(&store, Table::Orders), both);
    store.flush(Table::Orders).unwrap();
    assert_eq!(conditions(&readiness), "");
    drop(store);
    // One that panics when it is opened is damaged.
    disk.set(|disk| disk.is_panicking = true);
    let activity = FileActivity::default();
    let opened =
        StateStore::with_medium(disk.clone(), "store".to_owned(), &activity, OnDamage::Stop);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("data repair"), "{error}");
    assert_eq!(values(&open(&disk), Table::Orders), both);
}

#[test]
fn file_is_private_has_one_user_and_files_beside_it_are_written() {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = Scratch::new();
    let store = scratch.0.store(OnDamage::Stop).unwrap();
    assert_eq!(
        fs::metadata(scratch.0.state()).unwrap().mode() & 0o777,
        0o600
    );
    let mut other = FileMedium::new(&scratch.0.state());
    let refused = Db::open_writable(&mut other);
    assert!(matches!(refused, Err(DbError::InUse)), "{refused:?}");
    let path = scratch.0.path().join("file");
    store.replace_file(path.clone(), b"one".to_vec().into());
    store.replace_file(path.clone(), b"two".to_vec().into());
    drop(store);
    assert_eq!(fs::read(path).unwrap(), b"two");
    let names = fs::read_dir(scratch.0.path()).unwrap();
    assert_eq!(names.count(), 2, "no temporary file is left");
}

#[test]
fn file_is_compacted_when_it_is_large_and_has_doubled() {
    let mebibytes = |size: u64| size << 20;
    for (bytes, compacted, is_due) in [
        (100, 0, false),
        (129, 0, true),
        (140, 100, false),
        (200, 100, true),
    ] {
        let found = is_compaction_due(mebibytes(bytes), mebibytes(compacted));
        assert_eq!(found, is_due, "{bytes} after {compacted}");
    }
}
