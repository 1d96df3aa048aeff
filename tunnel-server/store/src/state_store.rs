//! The store of the data directory: one file with what grows with the number of nodes. Writes cost
//! what changed, and survive a crash at any moment.
//!
//! One thread owns the file. Changes wait for it in memory, one for each row, until they are on the
//! disk: a full disk, one that is read-only or one that does not answer delays nobody, is a
//! condition, and is written to when it can be again. Nobody reads the file after the start: rows
//! are in memory where they are used.
//!
//! What an operator decided (orders, tokens) is written at once, apart from what the server observed,
//! which is written in batches.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::de::DeserializeOwned;
use tracing::{info, warn};
use tunnel_process::disk::{ANSWER_TIMEOUT, FileActivity};
use tunnel_process::files;
use tunnel_process::meta::Readiness;
use tunnel_process::name_list::NameList;
use tunnel_process::panics;
use zeroize::Zeroizing;

use super::document::block_current_thread;

mod database;
mod pending;
mod row_set;
mod rows;

use database::{Db, DbError, FileMedium, Medium};
use pending::{Batch, Pending};
pub use row_set::{RowSet, follow};
#[cfg(feature = "test-util")]
pub use rows::check_value;
use rows::{Class, Content, Target};
pub use rows::{Loaded, RowChange, Table, UnreadableValue, json_text};

/// The store of a data directory. Clones refer to the same store, which is closed with the last one.
#[derive(Clone)]
pub struct StateStore(Arc<Handle>);

/// A reference that does not keep the store open.
#[derive(Default)]
pub struct WeakStore(Weak<Handle>);

impl WeakStore {
    pub fn upgrade(&self) -> Option<StateStore> {
        self.0.upgrade().map(StateStore)
    }
}

tunnel_process::partial_debug!(WeakStore);

/// What happens to a file that is damaged as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDamage {
    /// The start stops: the file alone has orders and tokens.
    Stop,
    /// The file is set aside and created again: a Secret has the orders.
    SetAside,
}

struct Handle {
    name: String,
    activity: FileActivity,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notifies the thread of requests.
    requested: Condvar,
    /// Notifies those who wait for the thread.
    progressed: Condvar,
}

struct State {
    pending: [Pending; Class::ALL.len()],
    loads: VecDeque<LoadRequest>,
    /// Rows that a later version wrote, which observations do not replace.
    later: BTreeSet<Target>,
    /// What was found when rows were loaded, for operators.
    findings: Vec<String>,
    /// Why the file cannot be used, while nothing has to be written.
    problem: Option<String>,
    readiness: Option<Readiness>,
    is_closing: bool,
    is_closed: bool,
}

struct LoadRequest {
    table: Table,
    done: SyncSender<Result<Rows, String>>,
}

type Rows = Vec<(String, Content)>;

impl StateStore {
    /// Opens the store in a file, or creates it. Where the file system can only be read, the store
    /// has what was read, and keeps changes in memory.
    ///
    /// # Errors
    /// Returns an error with the path if another process has the store open for 5 s, if the file
    /// cannot be read, or if it is damaged; the error then has the command that repairs it.
    pub fn open(path: &Path, activity: &FileActivity, on_damage: OnDamage) -> io::Result<Self> {
        let name = path.display().to_string();
        Self::with_medium(FileMedium::new(path), name, activity, on_damage)
    }

    fn with_medium(
        medium: impl Medium,
        name: String,
        activity: &FileActivity,
        on_damage: OnDamage,
    ) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let mut owner = Owner {
            medium,
            name: name.clone(),
            activity: activity.clone(),
            shared: shared.clone(),
            db: None,
            carried: Batch::default(),
            compacted_bytes: 0,
        };
        let (opened, outcome) = sync_channel(1);
        thread::Builder::new()
            .name("data-store".to_owned())
            .spawn(move || {
                let result = owner.open(on_damage);
                let is_open = result.is_ok();
                let _nobody_waits_any_more = opened.try_send(result);
                if is_open {
                    owner.run();
                }
            })?;
        let store = Self(Arc::new(Handle {
            name,
            activity: activity.clone(),
            shared,
        }));
        let opened = block_current_thread(|| outcome.recv_timeout(OPEN_TIMEOUT));
        let problem = match opened {
            Ok(Ok(())) => return Ok(store),
            Ok(Err(problem)) => problem,
            Err(RecvTimeoutError::Timeout) => NO_ANSWER.to_owned(),
            Err(RecvTimeoutError::Disconnected) => "its thread failed".to_owned(),
        };
        store.0.shared.state.lock().is_closed = true;
        Err(store.error(&problem))
    }

    pub fn downgrade(&self) -> WeakStore {
        WeakStore(Arc::downgrade(&self.0))
    }

    /// Reports conditions to `readiness` from then on.
    pub fn report_to(&self, readiness: &Readiness) {
        let mut state = self.0.shared.state.lock();
        state.readiness = Some(readiness.clone());
        state.report();
    }

    /// Changes rows of a table, all or none. Does not wait for the disk.
    pub fn change(&self, table: Table, changes: Vec<RowChange>) {
        if changes.is_empty() {
            return;
        }
        let mut state = self.0.shared.state.lock();
        for change in changes {
            let target = Target::Row(table, change.key);
            if table.class() == Class::Observed && state.later.contains(&target) {
                continue;
            }
            state.add(target, change.content);
        }
        self.0.shared.requested.notify_one();
    }

    /// Replaces a file of the data directory, whose content may be secret. Does not wait for the
    /// disk.
    pub fn replace_file(&self, path: PathBuf, content: Zeroizing<Vec<u8>>) {
        let mut state = self.0.shared.state.lock();
        state.add(Target::File(path), Some(Arc::new(content)));
        self.0.shared.requested.notify_one();
    }

    /// Waits until the changes of a table so far are on the disk, for at most 5 s.
    ///
    /// # Errors
    /// Returns the problem. The changes stay in memory and are written when that is possible.
    pub fn flush(&self, table: Table) -> io::Result<()> {
        let (class, shared) = (table.class(), &self.0.shared);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut state = shared.state.lock();
        let ticket = state.pending[class as usize].hurry();
        if let Some(Ok(())) = state.pending[class as usize].outcome(ticket) {
            return Ok(());
        }
        shared.requested.notify_one();
        // Callers do not wait one after the other while the first one waits.
        if self.0.activity.is_blocked() {
            return Err(self.error(NO_ANSWER));
        }
        block_current_thread(|| {
            loop {
                if let Some(outcome) = state.pending[class as usize].outcome(ticket) {
                    return outcome.map_err(io::Error::other);
                }
                if shared
                    .progressed
                    .wait_until(&mut state, deadline)
                    .timed_out()
                {
                    return Err(self.error(NO_ANSWER));
                }
            }
        })
    }

    /// Returns why the last changes of a table are not on the disk, or the name of the file while
    /// they are being written.
    pub fn unsaved(&self, table: Table) -> Option<String> {
        let state = self.0.shared.state.lock();
        let pending = &state.pending[table.class() as usize];
        (pending.count() > 0).then(|| match pending.problem() {
            Some(problem) => problem.to_owned(),
            None => self.0.name.clone(),
        })
    }

    /// Returns why the last changes of a table could not be written, if the last attempt failed.
    pub fn problem(&self, table: Table) -> Option<String> {
        let state = self.0.shared.state.lock();
        let problem = state.pending[table.class() as usize].problem();
        problem.map(str::to_owned)
    }

    /// Loads the rows of a table whose keys begin with `prefix`, by the rest of their keys.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read.
    pub fn load<T: DeserializeOwned>(&self, table: Table, prefix: &str) -> io::Result<Loaded<T>> {
        Ok(Loaded::of(self.rows(table)?, prefix))
    }

    /// Loads rows like [`StateStore::load`]. What cannot be read is set aside and is a condition. Values
    /// of later versions are skipped.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read.
    pub fn load_readable<T: DeserializeOwned>(
        &self,
        table: Table,
        prefix: &str,
    ) -> io::Result<BTreeMap<String, T>> {
        let loaded = self.load(table, prefix)?;
        self.skip_later(table, &loaded.later);
        self.set_aside(table, loaded.damaged);
        Ok(loaded.values)
    }

    /// Reports values of later versions, which are skipped and stay on the disk.
    fn skip_later(&self, table: Table, later: &[UnreadableValue]) {
        if later.is_empty() {
            return;
        }
        let mut state = self.0.shared.state.lock();
        let targets = later.iter();
        let targets = targets.map(|value| Target::Row(table, value.key.as_str().into()));
        state.later.extend(targets);
        let keys: NameList = later.iter().map(|value| &value.key).collect();
        let finding = format!(
            "{}: a later version wrote values that this one cannot read, and that stay as they are: {} {keys}",
            self.0.name,
            table.label()
        );
        state.find(finding);
    }

    /// Loads rows like [`StateStore::load_readable`], or none if the file cannot be read, which is a
    /// condition: what was observed is observed again.
    pub fn load_observed<T: DeserializeOwned>(
        &self,
        table: Table,
        prefix: &str,
    ) -> BTreeMap<String, T> {
        self.load_readable(table, prefix).unwrap_or_else(|error| {
            self.0.shared.state.lock().find(error.to_string());
            BTreeMap::new()
        })
    }

    /// Moves values that cannot be read to the table of damaged ones. They stay while their copies
    /// cannot be saved.
    pub fn set_aside(&self, table: Table, damaged: Vec<UnreadableValue>) {
        let (Some(first), count) = (damaged.first(), damaged.len()) else {
            return;
        };
        let problem = format!("{} ({})", first.key, first.problem);
        let finding = format!(
            "{}: {count} values of {} could not be read and were set aside, among them {problem}; 'tunnel-server data dump' \
             prints them",
            self.0.name,
            table.label()
        );
        self.0.shared.state.lock().find(finding);
        self.copy_aside(table, &damaged);
        if self.flush(Table::Damaged).is_err() {
            return;
        }
        let removed = damaged.iter().map(|value| RowChange::remove(&value.key));
        self.change(table, removed.collect());
    }

    /// Copies values that cannot be read to the table of damaged ones. Does not wait for the disk.
    /// Vital rows that replace the values later are written after the copies, or with them.
    pub fn copy_aside(&self, table: Table, values: &[UnreadableValue]) {
        let copies = values.iter().map(|value| {
            let key = format!("{}/{}", table.label(), value.key);
            RowChange::upsert(&key, &String::from_utf8_lossy(&value.content))
        });
        self.change(Table::Damaged, copies.collect());
    }

    /// Removes all rows of a table, and waits until that is on the disk. Waits for a file system that
    /// does not answer for 5 s at most.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read or written.
    pub fn clear(&self, table: Table) -> io::Result<()> {
        if self.0.activity.is_blocked() {
            return Err(self.error(NO_ANSWER));
        }
        let rows = self.rows_within(table, ANSWER_TIMEOUT)?;
        let removed = rows.iter().map(|(key, _)| RowChange::remove(key));
        self.change(table, removed.collect());
        self.flush(table)
    }

    /// Returns the rows of a table as they are in the file, with the changes that are not there yet.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read.
    pub fn rows(&self, table: Table) -> io::Result<Vec<(String, Content)>> {
        self.rows_within(table, OPEN_TIMEOUT)
    }

    fn rows_within(&self, table: Table, limit: Duration) -> io::Result<Rows> {
        let (done, rows) = sync_channel(1);
        {
            let mut state = self.0.shared.state.lock();
            state.loads.push_back(LoadRequest { table, done });
            self.0.shared.requested.notify_one();
        }
        let rows = block_current_thread(|| rows.recv_timeout(limit));
        let rows = rows.map_err(|error| match error {
            RecvTimeoutError::Timeout => self.error(NO_ANSWER),
            RecvTimeoutError::Disconnected => self.error("the database failed"),
        })?;
        rows.map_err(|problem| self.error(&problem))
    }

    /// Returns what was found when the file and its rows were loaded, for operators.
    pub fn findings(&self) -> Vec<String> {
        self.0.shared.state.lock().findings.clone()
    }

    /// Returns the error for a value without which the server does not start.
    pub fn damaged(&self, table: Table, value: &UnreadableValue) -> io::Error {
        let problem = format!(
            "{} of {} is damaged: {}; {REPAIR}",
            value.key,
            table.label(),
            value.problem
        );
        self.error(&problem)
    }

    fn error(&self, problem: &str) -> io::Error {
        io::Error::other(with_name(&self.0.name, problem))
    }
}

impl fmt::Debug for StateStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.0.name;
        formatter.debug_tuple("StateStore").field(name).finish()
    }
}

impl Drop for Handle {
    /// Writes what is pending, and waits until the file is closed, for at most 5 s.
    fn drop(&mut self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut state = self.shared.state.lock();
        state.is_closing = true;
        for pending in &mut state.pending {
            pending.hurry();
        }
        self.shared.requested.notify_one();
        block_current_thread(|| {
            while !state.is_closed && !self.activity.is_blocked() {
                if self
                    .shared
                    .progressed
                    .wait_until(&mut state, deadline)
                    .timed_out()
                {
                    warn!(path = self.name, "{NO_ANSWER}; the last changes are lost");
                    return;
                }
            }
        });
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            pending: Class::ALL.map(|class| Pending::new(class.pause())),
            loads: VecDeque::new(),
            later: BTreeSet::new(),
            findings: Vec::new(),
            problem: None,
            readiness: None,
            is_closing: false,
            is_closed: false,
        }
    }
}

impl State {
    fn add(&mut self, target: Target, content: Option<Content>) {
        self.pending[target.class() as usize].add(target, content, Instant::now());
    }

    fn find(&mut self, finding: String) {
        if self.findings.contains(&finding) {
            return;
        }
        warn!(condition = CONDITION, "{finding}");
        self.findings.push(finding);
        self.report();
    }

    /// Reports what an operator should fix.
    fn report(&self) {
        let Some(readiness) = &self.readiness else {
            return;
        };
        let unsaved = self.pending.iter().filter_map(|pending| {
            let (problem, count) = (pending.problem()?, pending.count());
            Some(format!(
                "{problem}; {count} changes are in memory only, and the server tries again"
            ))
        });
        let mut lines: Vec<_> = unsaved.collect();
        if let (true, Some(problem)) = (lines.is_empty(), &self.problem) {
            lines.push(format!(
                "{problem}; the server runs from memory, and tries again"
            ));
        }
        lines.extend(self.findings.iter().cloned());
        readiness.set_conditions(CONDITION, lines);
    }
}

/// What the thread does next.
enum Work {
    Load(LoadRequest),
    Write(Class),
    /// Looks whether the file is still there.
    Check,
    Close,
}

impl Shared {
    /// Waits until there is something to do.
    fn next(&self) -> Work {
        let check_at = Instant::now() + CHECK_INTERVAL;
        let mut state = self.state.lock();
        loop {
            if let Some(load) = state.loads.pop_front() {
                return Work::Load(load);
            }
            let now = Instant::now();
            let due = Class::ALL.map(|class| (state.pending[class as usize].due(), class));
            let is_due = |(at, _): &&(Option<Instant>, Class)| at.is_some_and(|at| at <= now);
            if let Some((_, class)) = due.iter().find(is_due) {
                return Work::Write(*class);
            }
            if state.is_closing {
                return Work::Close;
            }
            if now >= check_at {
                return Work::Check;
            }
            let next = due.iter().filter_map(|(at, _)| *at).min();
            let until = next.map_or(check_at, |next| next.min(check_at));
            self.requested.wait_until(&mut state, until);
        }
    }
}

/// The thread's side of a store.
struct Owner<M> {
    medium: M,
    name: String,
    activity: FileActivity,
    shared: Arc<Shared>,
    /// `None` after an error, since a database does not recover from one, until it is opened again.
    db: Option<Db>,
    /// All rows of a file that was removed, until they are in the new one.
    carried: Batch,
    /// Size of the file after it was compacted.
    compacted_bytes: u64,
}

impl<M: Medium> Owner<M> {
    fn open(&mut self, on_damage: OnDamage) -> Result<(), String> {
        let _accessing = self.activity.begin();
        let deadline = Instant::now() + IN_USE_TIMEOUT;
        loop {
            match self.open_once() {
                Ok(db) => {
                    let problem = db.read_only.clone();
                    self.db = Some(db);
                    self.set_problem(problem.as_deref());
                    return Ok(());
                }
                Err(DbError::InUse) if Instant::now() < deadline => {
                    let mut state = self.shared.state.lock();
                    let pause = Instant::now() + IN_USE_POLL;
                    self.shared.requested.wait_until(&mut state, pause);
                }
                Err(DbError::InUse) => {
                    return Err("another process uses it: a tunnel-server that starts or stops, or a command; try again".to_owned());
                }
                Err(DbError::Damaged(problem)) if on_damage == OnDamage::SetAside => {
                    let aside = self.medium.set_aside().map_err(|error| error.to_string())?;
                    let finding = format!(
                        "{}: damaged, and created again: {problem}; the damaged file is {}",
                        self.name,
                        aside.display()
                    );
                    self.shared.state.lock().find(finding);
                }
                Err(error @ DbError::Damaged(_)) => return Err(format!("{error}; {REPAIR}")),
                Err(error @ DbError::Io(_)) => return Err(error.to_string()),
            }
        }
    }

    /// Opens the database. One that panics is damaged.
    fn open_once(&mut self) -> Result<Db, DbError> {
        let opened = catch_unwind(AssertUnwindSafe(|| Db::open(&mut self.medium)));
        opened.unwrap_or_else(|panic| Err(DbError::Damaged(panic_text(&*panic))))
    }

    fn run(mut self) {
        loop {
            let work = self.shared.next();
            let _accessing = self.activity.begin();
            let is_last = matches!(work, Work::Close);
            // A bug in the database must not end the thread.
            let worked = catch_unwind(AssertUnwindSafe(|| self.work(work)));
            if let Err(panic) = worked {
                self.recover(&panic_text(&*panic));
            }
            if is_last {
                self.shared.state.lock().is_closed = true;
                self.shared.progressed.notify_all();
                return;
            }
        }
    }

    fn work(&mut self, work: Work) {
        match work {
            Work::Load(LoadRequest { table, done }) => {
                let rows = self.rows(table).map_err(|error| {
                    self.discard();
                    error.to_string()
                });
                let _nobody_waits_any_more = done.try_send(rows);
            }
            Work::Write(class) => self.write(class),
            Work::Check => self.check(),
            Work::Close => self.db = None,
        }
    }

    /// Closes the database after a panic, so that it is opened again. What is pending stays pending.
    fn recover(&mut self, panic: &str) {
        let db = self.db.take();
        let _closed_or_not = catch_unwind(AssertUnwindSafe(|| drop(db)));
        self.set_problem(Some(panic));
        let mut state = self.shared.state.lock();
        let problem = state.problem.clone().unwrap_or_default();
        for class in [Class::Vital, Class::Observed] {
            let pending = &mut state.pending[class as usize];
            if pending.count() > 0 {
                let batch = pending.batch();
                pending.failed(&batch, problem.clone(), Instant::now());
            }
        }
        state.report();
        self.shared.progressed.notify_all();
    }

    /// Closes a database that failed, since it does not recover. A copy in memory stays.
    fn discard(&mut self) {
        self.db = self.db.take().filter(|db| db.read_only.is_some());
    }

    /// Reports why the file cannot be used, if so.
    fn set_problem(&self, problem: Option<&str>) {
        let problem = problem.map(|problem| with_name(&self.name, problem));
        let mut state = self.shared.state.lock();
        if state.problem == problem {
            return;
        }
        match &problem {
            Some(problem) => {
                warn!(
                    condition = CONDITION,
                    error = problem,
                    "cannot use the file; the server runs from memory and tries again"
                );
            }
            None => info!(path = self.name, "the file can be used again"),
        }
        state.problem = problem;
        state.report();
    }

    /// Looks whether the file is still there and can be written, and makes up for what failed.
    fn check(&mut self) {
        let checked = self.carry_over().and_then(|()| {
            let is_written = |db: &Db| db.read_only.is_none();
            if self.carried.is_empty() && self.db.as_ref().is_some_and(is_written) {
                return Ok(());
            }
            self.writable().map(|_| ())
        });
        match checked {
            Ok(()) => self.set_problem(None),
            Err(error) => {
                self.discard();
                self.set_problem(Some(&error.to_string()));
            }
        }
    }

    fn rows(&mut self, table: Table) -> Result<Rows, DbError> {
        let carrying = self.carry_over();
        let mut rows: BTreeMap<_, _> = if self.carried.is_empty() {
            carrying?;
            let db = match self.db.take() {
                Some(db) => db,
                None => Db::open(&mut self.medium)?,
            };
            self.db.insert(db).rows(table)?.into_iter().collect()
        } else {
            self.carried.rows(table).collect()
        };
        let state = self.shared.state.lock();
        for (target, content) in state.pending[table.class() as usize].changes() {
            match (target, content) {
                (Target::Row(other, _), _) if *other != table => {}
                (Target::Row(_, key), Some(content)) => {
                    rows.insert(key.to_string(), content.clone());
                }
                (Target::Row(_, key), None) => {
                    rows.remove(&**key);
                }
                (Target::File(_), _) => {}
            }
        }
        Ok(rows.into_iter().collect())
    }

    fn write(&mut self, class: Class) {
        let batch = self.shared.state.lock().pending[class as usize].batch();
        let written = match class {
            Class::Files => write_files(&batch),
            Class::Vital | Class::Observed => self.write_rows(&batch).map_err(|error| {
                self.discard();
                with_name(&self.name, &error.to_string())
            }),
        };
        if class != Class::Files && written.is_ok() {
            self.set_problem(None);
        }
        let mut state = self.shared.state.lock();
        let pending = &mut state.pending[class as usize];
        let now = Instant::now();
        match written {
            Ok(()) => {
                if pending.written(&batch, now) {
                    info!(path = self.name, "state is saved again");
                }
            }
            Err(problem) => {
                if pending.problem() != Some(&problem) {
                    warn!(
                        condition = CONDITION,
                        path = self.name,
                        error = problem,
                        "cannot save state; trying again"
                    );
                }
                pending.failed(&batch, problem, now);
            }
        }
        state.report();
        self.shared.progressed.notify_all();
    }

    fn write_rows(&mut self, batch: &Batch) -> Result<(), DbError> {
        self.carry_over()?;
        self.writable()?.write(batch)?;
        self.compact_if_large()
    }

    /// Returns the database, opened again after an error, with all that a removed file had.
    fn writable(&mut self) -> Result<&mut Db, DbError> {
        let db = match self.db.take() {
            Some(db) if db.read_only.is_none() => db,
            copy => {
                // The copy stays if the file cannot be opened.
                self.db = copy;
                Db::open_writable(&mut self.medium)?
            }
        };
        let db = self.db.insert(db);
        if !self.carried.is_empty() {
            db.write(&self.carried)?;
            self.carried = Batch::default();
        }
        Ok(db)
    }

    /// Creates the file again if somebody removed it, with all that it had.
    fn carry_over(&mut self) -> Result<(), DbError> {
        if !self.medium.is_replaced() {
            return Ok(());
        }
        // What is carried already is all that there was: it is written before anything else.
        if self.carried.is_empty() {
            warn!(
                path = self.name,
                "the file was removed or replaced while the server runs; writing it again"
            );
            match self.removed_rows() {
                Ok(rows) => self.carried = rows,
                Err(DbError::Damaged(problem)) => {
                    let finding = format!(
                        "{}: a damaged file was removed or replaced while the server runs, and what it had is lost: {problem}",
                        self.name
                    );
                    self.shared.state.lock().find(finding);
                }
                Err(error) => return Err(error),
            }
        }
        self.db = None;
        self.writable().map(|_| ())
    }

    /// Returns all rows of the file that was removed. After an error its database is closed, but not
    /// the file.
    fn removed_rows(&self) -> Result<Batch, DbError> {
        match self.db.as_ref().map(Db::all) {
            Some(Ok(rows)) => Ok(rows),
            Some(Err(_)) | None => {
                let bytes = self.medium.read_opened()?;
                let copied = || Db::copy(&bytes, String::new())?.all();
                // As in `open_once`: what makes the database panic is damaged.
                let copied = catch_unwind(AssertUnwindSafe(copied));
                copied.unwrap_or_else(|panic| Err(DbError::Damaged(panic_text(&*panic))))
            }
        }
    }

    fn compact_if_large(&mut self) -> Result<(), DbError> {
        let bytes = self.medium.bytes();
        if !is_compaction_due(bytes, self.compacted_bytes) {
            return Ok(());
        }
        self.writable()?.compact()?;
        self.compacted_bytes = self.medium.bytes();
        info!(path = self.name, "compacted");
        Ok(())
    }
}

/// Returns whether a file of this size should be compacted that had another size after the last time.
fn is_compaction_due(bytes: u64, compacted_bytes: u64) -> bool {
    bytes > COMPACT_ABOVE_BYTES && bytes / 2 >= compacted_bytes
}

/// Writes all files. Returns the first problem.
fn write_files(batch: &Batch) -> Result<(), String> {
    let mut written = Ok(());
    for (target, content) in &batch.changes {
        if let (Target::File(path), Some(content)) = (target, content) {
            let replaced = files::replace(path, content).map_err(|error| error.to_string());
            written = written.and(replaced);
        }
    }
    written
}

/// Returns the text of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    format!("the database panicked: {}", panics::message(panic))
}

/// Returns a problem with the name of the file, which some have.
fn with_name(name: &str, problem: &str) -> String {
    if problem.starts_with(name) {
        return problem.to_owned();
    }
    let separator = if problem.starts_with("is damaged") {
        " "
    } else {
        ": "
    };
    format!("{name}{separator}{problem}")
}

/// Name of the condition in `/readyz?verbose`.
const CONDITION: &str = "saved state";
const NO_ANSWER: &str = "the file system does not answer";
const REPAIR: &str =
    "with the server stopped, 'tunnel-server data repair' sets it aside, and says what to do again";
/// Time for a command or a server that ends to close the file.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(5);
const IN_USE_POLL: Duration = Duration::from_millis(50);
/// Time for opening a file, which is read and checked, on a slow disk.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which the thread looks whether the file is still there.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Size above which a file is compacted: half of the `sizeLimit` of the manifests' emptyDir, so that
/// there is room for the copy of each page that moves.
const COMPACT_ABOVE_BYTES: u64 = 128 * 1024 * 1024;

#[cfg(test)]
mod tests;
