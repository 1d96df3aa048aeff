//! The changes that are not on disk yet, and when the next attempt to write them is due. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::rows::{Content, Table, Target};

/// Changes of one class. The last change of a target replaces the earlier ones, so there are never
/// more than there are targets, and sessions that have ended are none.
#[derive(Debug)]
pub(super) struct Pending {
    /// Time for which changes wait for others, which are written with them.
    pause: Duration,
    changes: BTreeMap<Target, Change>,
    /// Number of the last change.
    last: u64,
    /// All changes up to this number are on disk.
    written: u64,
    /// Whether the changes are written without a pause, also after a failure.
    is_urgent: bool,
    /// Number of failed attempts to write.
    failures: u64,
    /// When the oldest change was made that is not on disk.
    since: Option<Instant>,
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Change {
    number: u64,
    content: Option<Content>,
}

/// The last attempt to write, if it failed.
#[derive(Debug)]
struct Failure {
    problem: String,
    /// Number of the last change that the attempt included.
    up_to: u64,
    retry_at: Instant,
}

/// What somebody waits for: the first attempt from now on to write the changes so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    up_to: u64,
    failures: u64,
}

/// Changes that are written together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Number of the last change.
    up_to: u64,
    /// In the order of their targets.
    pub(super) changes: Vec<(Target, Option<Content>)>,
}

impl Batch {
    /// Returns a batch of rows that are in the order of their tables and keys.
    pub(super) fn of_rows(changes: Vec<(Target, Option<Content>)>) -> Self {
        Self { up_to: 0, changes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the rows of a table that the batch inserts.
    pub(super) fn rows(&self, table: Table) -> impl Iterator<Item = (String, Content)> {
        let changes = self.changes.iter();
        changes.filter_map(move |(target, content)| match target {
            Target::Row(other, key) if *other == table => Some((key.to_string(), content.clone()?)),
            Target::Row(..) | Target::File(_) => None,
        })
    }
}

impl Pending {
    pub(super) fn new(pause: Duration) -> Self {
        Self {
            pause,
            changes: BTreeMap::new(),
            last: 0,
            written: 0,
            is_urgent: false,
            failures: 0,
            since: None,
            failure: None,
        }
    }

    /// Adds a change. `None` removes the target.
    pub(super) fn add(&mut self, target: Target, content: Option<Content>, now: Instant) {
        self.last += 1;
        let number = self.last;
        self.changes.insert(target, Change { number, content });
        self.since.get_or_insert(now);
    }

    /// Makes the changes so far due at once, also after a failure.
    pub(super) fn hurry(&mut self) -> Ticket {
        self.is_urgent = !self.changes.is_empty();
        Ticket {
            up_to: self.last,
            failures: self.failures,
        }
    }

    /// Returns when the changes should be written, or `None` if there are none.
    pub(super) fn due(&self) -> Option<Instant> {
        let since = self.since?;
        Some(match &self.failure {
            _ if self.is_urgent => since,
            Some(failure) => failure.retry_at,
            None => since + self.pause,
        })
    }

    /// Returns the changes to write.
    pub(super) fn batch(&mut self) -> Batch {
        self.is_urgent = false;
        let changes = self.changes.iter();
        Batch {
            up_to: self.last,
            changes: changes
                .map(|(target, change)| (target.clone(), change.content.clone()))
                .collect(),
        }
    }

    /// Records that a batch is on disk. Returns whether that ends a failure.
    pub(super) fn written(&mut self, batch: &Batch, now: Instant) -> bool {
        self.written = batch.up_to;
        self.changes.retain(|_, change| change.number > batch.up_to);
        self.since = (!self.changes.is_empty()).then_some(now);
        self.is_urgent &= self.since.is_some();
        self.failure.take().is_some()
    }

    /// Records that a batch could not be written.
    pub(super) fn failed(&mut self, batch: &Batch, problem: String, now: Instant) {
        self.failures += 1;
        // The keys of sessions never come again, so their removals would only grow in number. A row that
        // stays costs one needless reset.
        self.changes.retain(|target, change| {
            change.content.is_some() || !matches!(target, Target::Row(Table::Sessions, _))
        });
        self.failure = Some(Failure {
            problem,
            up_to: batch.up_to,
            retry_at: now + RETRY_PAUSE,
        });
    }

    /// Returns the outcome of the attempt that somebody waits for, once there is one.
    pub(super) fn outcome(&self, ticket: Ticket) -> Option<Result<(), String>> {
        if self.written >= ticket.up_to {
            return Some(Ok(()));
        }
        let failure = self.failure.as_ref();
        let failure = failure
            .filter(|failure| failure.up_to >= ticket.up_to && self.failures > ticket.failures)?;
        Some(Err(failure.problem.clone()))
    }

    /// Returns why the changes could not be written, if the last attempt failed.
    pub(super) fn problem(&self) -> Option<&str> {
        self.failure
            .as_ref()
            .map(|failure| failure.problem.as_str())
    }

    pub(super) fn count(&self) -> usize {
        self.changes.len()
    }

    pub(super) fn changes(&self) -> impl Iterator<Item = (&Target, Option<&Content>)> {
        let changes = self.changes.iter();
        changes.map(|(target, change)| (target, change.content.as_ref()))
    }
}

/// Pause before the next attempt after a failed one.
pub(super) const RETRY_PAUSE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::super::rows::Table;
    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);

    fn row(key: &str) -> Target {
        Target::Row(Table::Nodes, key.into())
    }

    fn content(text: &str) -> Option<Content> {
        Some(Content::new(text.as_bytes().to_vec().into()))
    }

    #[test]
    fn changes_wait_for_others_and_the_last_of_a_row_is_written() {
        let (mut pending, now) = (Pending::new(PAUSE), Instant::now());
        assert_eq!(pending.due(), None);
        pending.add(row("a"), content("1"), now);
        pending.add(row("b"), content("1"), now + PAUSE / 2);
        pending.add(row("a"), None, now + PAUSE / 2);
        assert_eq!(pending.due(), Some(now + PAUSE));
        let batch = pending.batch();
        assert_eq!(batch.changes.len(), 2);
        assert_eq!(batch.changes[0], (row("a"), None));
        // A change that arrives while the batch is written is written next.
        pending.add(row("b"), content("2"), now + PAUSE);
        assert!(!pending.written(&batch, now + PAUSE));
        assert_eq!(pending.due(), Some(now + PAUSE * 2));
        assert_eq!(pending.batch().changes, [(row("b"), content("2"))]);
        let last = pending.hurry();
        assert_eq!(pending.due(), Some(now + PAUSE), "at once");
        assert_eq!(pending.outcome(last), None);
    }

    #[test]
    fn urgent_changes_are_due_at_once_also_after_a_failure_and_others_are_tried_again() {
        let (mut pending, now) = (Pending::new(PAUSE), Instant::now());
        pending.add(row("a"), content("1"), now);
        let first = pending.hurry();
        assert_eq!(pending.due(), Some(now));
        let batch = pending.batch();
        pending.failed(&batch, "full".to_owned(), now);
        assert_eq!(pending.outcome(first), Some(Err("full".to_owned())));
        assert_eq!(pending.due(), Some(now + RETRY_PAUSE));
        pending.add(row("b"), content("1"), now);
        assert_eq!(pending.due(), Some(now + RETRY_PAUSE), "not urgent");
        let second = pending.hurry();
        assert_eq!(pending.due(), Some(now));
        assert_eq!(pending.outcome(second), None, "not tried yet");
        // Who waits without another change waits for another attempt, too.
        let third = pending.hurry();
        assert_eq!(pending.outcome(third), None);
        let batch = pending.batch();
        assert_eq!(batch.changes.len(), 2, "nothing is given up");
        assert!(pending.written(&batch, now));
        assert_eq!((pending.due(), pending.problem()), (None, None));
        assert_eq!(pending.outcome(second), Some(Ok(())));
    }
}
