//! Where log lines leave the process: a bounded queue, and one thread that writes. Logging a line never waits for the output.
//! Access lines, of which there is one a request, wait a moment for others and leave together; any other line leaves at
//! once, behind those that wait. When the queue is full, lines are dropped and counted, access lines first.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::lost::{Lost, LostLines};

/// How long an access line waits for others: nobody who reads a log sees it, and 1,000 requests a second are 20 writes.
const GATHER: Duration = Duration::from_millis(20);
/// Bytes of access lines that wait for no more: the queue must not fill while the output could take them.
const GATHER_BYTES: usize = 64 * 1024;
/// Capacity that a queue retains between two writes; a burst gives its memory back.
const RETAINED_BYTES: usize = 2 * GATHER_BYTES;
/// How often an output that failed is tried, and windows of repeated lines are looked at.
const RETRY: Duration = Duration::from_secs(1);
/// Pause of a non-blocking output that has no room.
const NO_ROOM: Duration = Duration::from_millis(10);
/// How long a task that panicked waits for its line to be written: an abort that follows would take the line with it.
const PANIC_WAIT: Duration = Duration::from_millis(100);
/// How long the end of the process waits for an output that takes nothing.
pub(super) const FLUSH_WITHIN: Duration = Duration::from_secs(1);

/// What a line is, and so who goes first when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// An access line.
    Access,
    /// Any line that is none of the others.
    Other,
    /// A panic.
    Panic,
    /// How many lines were lost. The thread that writes logs it, and no second one before that is written.
    Notice,
}

impl Class {
    /// Bytes in the queue beyond which a line is dropped.
    fn most_waiting(self) -> usize {
        match self {
            Self::Access => 256 * 1024,
            Self::Other => 448 * 1024,
            Self::Panic => 512 * 1024,
            Self::Notice => usize::MAX,
        }
    }
}

/// Lines on their way to `W`, in their order.
#[derive(Debug)]
pub(super) struct Outlet<W> {
    /// Held by the thread that writes while it does.
    out: Mutex<Output<W>>,
    queue: Mutex<Queue>,
    /// For the thread that writes.
    changed: Condvar,
    /// For those who wait for that thread.
    progress: Condvar,
    lost: &'static LostLines,
}

#[derive(Debug, Default)]
struct Queue {
    lines: Batch,
    /// A line waits that is to leave at once.
    urgent: bool,
    /// Lines that were ever queued, and those of them that were written or lost.
    queued: u64,
    done: u64,
    /// A panic waited in vain: no other one does before the output has taken something.
    stalled: bool,
    closed: bool,
    /// The thread has ended: a line is written by the thread that logs it.
    finished: bool,
}

/// Whole lines, and where each ends.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    lines: Vec<(usize, Class)>,
}

#[derive(Debug)]
struct Output<W> {
    out: W,
    /// It failed inside a line: the next one must not continue that.
    is_torn: bool,
}

impl Batch {
    fn push(&mut self, line: &[u8], class: Class) {
        self.bytes.extend_from_slice(line);
        self.lines.push((self.bytes.len(), class));
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(RETAINED_BYTES);
        self.lines.clear();
        self.lines.shrink_to(RETAINED_BYTES / 64);
    }
}

impl<W: Write + Send + 'static> Outlet<W> {
    pub(super) fn new(out: W, lost: &'static LostLines) -> Arc<Self> {
        Arc::new(Self {
            out: Mutex::new(Output {
                out,
                is_torn: false,
            }),
            queue: Mutex::default(),
            changed: Condvar::new(),
            progress: Condvar::new(),
            lost,
        })
    }

    /// Queues a whole line, or drops and counts it. Waits for nothing, except that a panic gives the output a moment.
    pub(super) fn push(&self, line: &[u8], class: Class) {
        let mut queue = lock(&self.queue);
        if queue.finished {
            drop(queue);
            return self.write_late(line, class);
        }
        let waiting = queue.lines.bytes.len();
        if waiting + line.len() > class.most_waiting() {
            drop(queue);
            return self.lose(class);
        }
        queue.lines.push(line, class);
        queue.queued += 1;
        let urgent = class != Class::Access && !std::mem::replace(&mut queue.urgent, true);
        let enough = waiting < GATHER_BYTES && waiting + line.len() >= GATHER_BYTES;
        if waiting == 0 || urgent || enough {
            self.changed.notify_one();
        }
        if class == Class::Panic && !queue.stalled {
            let last = queue.queued;
            let (mut queue, waited) = self
                .progress
                .wait_timeout_while(queue, PANIC_WAIT, |queue| queue.done < last)
                .unwrap_or_else(PoisonError::into_inner);
            queue.stalled |= waited.timed_out();
        }
    }

    /// Writes a line after the thread has ended, unless the output still holds that up.
    fn write_late(&self, line: &[u8], class: Class) {
        let mut out = match self.out.try_lock() {
            Ok(out) => out,
            Err(TryLockError::Poisoned(out)) => out.into_inner(),
            Err(TryLockError::WouldBlock) => return self.lose(class),
        };
        let mut batch = Batch::default();
        batch.push(line, class);
        out.write(&batch, |class| self.lose(class));
    }

    fn lose(&self, class: Class) {
        match class {
            Class::Access => self.lost.add_access(),
            Class::Other | Class::Panic => self.lost.add_other(),
            // What it says is said again.
            Class::Notice => {}
        }
    }

    /// Waits until something is to be written, or for [`RETRY`] with `is_due`; false when there will be no more.
    fn wait(&self, is_due: bool) -> bool {
        let queue = lock(&self.queue);
        let is_idle = |queue: &mut Queue| queue.lines.bytes.is_empty() && !queue.closed;
        let queue = if is_due {
            let waited = self.changed.wait_timeout_while(queue, RETRY, is_idle);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            let waited = self.changed.wait_while(queue, is_idle);
            waited.unwrap_or_else(PoisonError::into_inner)
        };
        let gathers = |queue: &mut Queue| {
            let waiting = queue.lines.bytes.len();
            (1..GATHER_BYTES).contains(&waiting) && !queue.urgent && !queue.closed
        };
        let waited = self.changed.wait_timeout_while(queue, GATHER, gathers);
        !waited.unwrap_or_else(PoisonError::into_inner).0.closed
    }

    /// Writes all that waits. `batch` is room for it.
    fn flush(&self, batch: &mut Batch) -> Written {
        {
            let mut queue = lock(&self.queue);
            std::mem::swap(&mut queue.lines, batch);
            queue.urgent = false;
        }
        if batch.lines.is_empty() {
            return Written::default();
        }
        let written = lock(&self.out).write(batch, |class| self.lose(class));
        let mut queue = lock(&self.queue);
        queue.done += batch.lines.len() as u64;
        queue.stalled &= !written.some;
        drop(queue);
        self.progress.notify_all();
        batch.clear();
        written
    }
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, Default)]
struct Written {
    /// The output took some of it.
    some: bool,
    /// It did not take the last line.
    is_failing: bool,
    /// It did not take the notice.
    lost_notice: bool,
}

impl<W: Write> Output<W> {
    /// Writes a batch, and calls `lose` for each line that the output fails at; it is tried again with the next line.
    fn write(&mut self, batch: &Batch, lose: impl Fn(Class)) -> Written {
        let (mut from, mut result) = (0, Written::default());
        while let Some(rest) = batch.bytes.get(from..).filter(|rest| !rest.is_empty()) {
            if self.is_torn && write_all(&mut self.out, b"\n").is_ok() {
                self.is_torn = false;
            }
            let Err(count) = write_all(&mut self.out, rest) else {
                (result.some, result.is_failing) = (true, false);
                break;
            };
            (result.some, result.is_failing) = (result.some || count > 0, true);
            from += count;
            let failed = batch.lines.partition_point(|(end, _)| *end <= from);
            let before = failed.checked_sub(1).and_then(|last| batch.lines.get(last));
            self.is_torn |= from > before.map_or(0, |(end, _)| *end);
            let Some((end, class)) = batch.lines.get(failed) else {
                break;
            };
            result.lost_notice |= *class == Class::Notice;
            lose(*class);
            from = *end;
        }
        let _unbuffered = self.out.flush();
        result
    }
}

/// The thread that writes. Dropped, it writes the last lines, and from then on a line is written by the thread that logs it; an output
/// that takes nothing is left to the end of the process after [`FLUSH_WITHIN`].
#[derive(Debug)]
pub(super) struct Emptier<W: Write + Send + 'static> {
    outlet: Arc<Outlet<W>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread logs between writes.
pub(super) trait Reports: Send + 'static {
    /// Logs how many lines were lost, as [`Class::Notice`].
    fn lost(&mut self, lost: Lost);
    /// Logs what is due; with `is_last`, all there is. Says whether something will be due later.
    fn due(&mut self, is_last: bool) -> bool;
}

impl<W: Write + Send + 'static> Emptier<W> {
    /// # Errors
    /// There can be no further thread.
    pub(super) fn start(outlet: Arc<Outlet<W>>, reports: impl Reports) -> io::Result<Self> {
        let of_thread = outlet.clone();
        let thread = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || run(&of_thread, reports))?;
        Ok(Self {
            outlet,
            thread: Some(thread),
        })
    }
}

/// Lines are written by the threads that log them from its drop on, also when the thread that writes has panicked.
struct Finish<'a, W>(&'a Outlet<W>);

impl<W> Drop for Finish<'_, W> {
    fn drop(&mut self) {
        lock(&self.0.queue).finished = true;
        self.0.progress.notify_all();
    }
}

fn run<W: Write + Send + 'static>(outlet: &Outlet<W>, mut reports: impl Reports) {
    let _finish = Finish(outlet);
    let mut batch = Batch::default();
    let mut reported = Lost::default();
    let mut is_due = false;
    loop {
        let is_open = outlet.wait(is_due);
        let is_failing = outlet.flush(&mut batch).is_failing;
        is_due = reports.due(!is_open);
        let read = outlet.lost.read();
        let lost = read.since(reported);
        // While lines fail, the notice would; without any, it is what tries the output again.
        let reports_lost = !lost.is_empty() && !is_failing;
        if reports_lost {
            reports.lost(lost);
        }
        let written = outlet.flush(&mut batch);
        if reports_lost && !written.lost_notice {
            reported = read;
        }
        is_due |= outlet.lost.read() != reported;
        let mut queue = lock(&outlet.queue);
        if !is_open && queue.lines.bytes.is_empty() {
            queue.finished = true;
            return;
        }
    }
}

impl<W: Write + Send + 'static> Drop for Emptier<W> {
    fn drop(&mut self) {
        let mut queue = lock(&self.outlet.queue);
        queue.closed = true;
        self.outlet.changed.notify_one();
        let (queue, _timeout) = self
            .outlet
            .progress
            .wait_timeout_while(queue, FLUSH_WITHIN, |queue| !queue.finished)
            .unwrap_or_else(PoisonError::into_inner);
        let finished = queue.finished;
        drop(queue);
        if let Some(thread) = self.thread.take().filter(|_| finished) {
            let _panicked = thread.join();
        }
    }
}

/// Writes until all is written or the output fails; then how much was written.
fn write_all(out: &mut impl Write, data: &[u8]) -> Result<(), usize> {
    let mut written = 0;
    while let Some(rest) = data.get(written..).filter(|rest| !rest.is_empty()) {
        match out.write(rest) {
            Ok(0) => return Err(written),
            Ok(count) => written += count,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => std::thread::park_timeout(NO_ROOM),
                _ => return Err(written),
            },
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// An output that tells each write, and takes it only when it may.
    struct Told {
        tell: mpsc::Sender<String>,
        may: mpsc::Receiver<()>,
    }

    impl Write for Told {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            let _test_is_over = self.may.recv();
            let text = String::from_utf8_lossy(data).into_owned();
            let _test_is_over = self.tell.send(text);
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// An output that panics at its first line.
    struct Panics(mpsc::Sender<String>, bool);

    impl Write for Panics {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            assert!(std::mem::replace(&mut self.1, true), "of the test");
            let _test_is_over = self.0.send(String::from_utf8_lossy(data).into_owned());
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_after_the_thread_has_panicked() {
        let (tell, written) = mpsc::channel();
        let outlet = Outlet::new(Panics(tell, false), counters());
        let emptier = Emptier::start(outlet.clone(), Notices(outlet.clone())).unwrap();
        outlet.push(b"lost\n", Class::Panic);
        while !lock(&outlet.queue).finished {
            std::thread::yield_now();
        }
        outlet.push(b"later\n", Class::Other);
        assert_eq!(written.recv_timeout(LONG).unwrap(), "later\n");
        drop(emptier);
    }

    fn counters() -> &'static LostLines {
        Box::leak(Box::new(LostLines::new()))
    }

    fn outlet() -> (Arc<Outlet<Told>>, mpsc::Receiver<String>, mpsc::Sender<()>) {
        let ((tell, written), (permit, may)) = (mpsc::channel(), mpsc::channel());
        (Outlet::new(Told { tell, may }, counters()), written, permit)
    }

    /// Writes the notice as a line of the test.
    struct Notices<W>(Arc<Outlet<W>>);

    impl<W: Write + Send + 'static> Reports for Notices<W> {
        fn lost(&mut self, lost: Lost) {
            let line = format!("lost {} {}\n", lost.access, lost.other);
            self.0.push(line.as_bytes(), Class::Notice);
        }

        fn due(&mut self, _is_last: bool) -> bool {
            false
        }
    }

    fn start<W: Write + Send + 'static>(outlet: &Arc<Outlet<W>>) -> Emptier<W> {
        Emptier::start(outlet.clone(), Notices(outlet.clone())).unwrap()
    }

    #[test]
    fn gathered_lines_leave_by_themselves_and_together() {
        let (outlet, written, permit) = outlet();
        let _emptier = start(&outlet);
        outlet.push(b"a\n", Class::Access);
        outlet.push(b"b\n", Class::Access);
        permit.send(()).unwrap();
        let mut all = written.recv().unwrap();
        // A machine that is that slow may see the first alone.
        while all != "a\nb\n" {
            permit.send(()).unwrap();
            all += &written.recv().unwrap();
        }
        drop(permit);
    }

    #[test]
    fn line_that_leaves_at_once_leaves_behind_those_that_wait() {
        let (outlet, written, permit) = outlet();
        drop(permit);
        outlet.push(b"a\n", Class::Access);
        outlet.push(b"b\n", Class::Access);
        assert!(!lock(&outlet.queue).urgent);
        outlet.push(b"c\n", Class::Other);
        assert!(lock(&outlet.queue).urgent);
        drop(start(&outlet));
        assert_eq!(written.try_iter().collect::<String>(), "a\nb\nc\n");
    }

    #[test]
    fn last_lines_leave_before_the_emptier_is_gone_and_none_waits_after_it() {
        let (outlet, written, permit) = outlet();
        let emptier = start(&outlet);
        drop(permit);
        outlet.push(b"a\n", Class::Access);
        drop(emptier);
        assert_eq!(written.try_iter().collect::<String>(), "a\n");
        outlet.push(b"b\n", Class::Access);
        assert_eq!(written.try_iter().collect::<String>(), "b\n");
    }

    /// A reader of the log that stands still stops nobody; access lines go first, and what is missing is counted.
    #[test]
    fn slow_output_holds_nobody_and_the_lines_that_are_missing_are_counted() {
        let (outlet, written, permit) = outlet();
        let emptier = start(&outlet);
        let access = format!("{}\n", "x".repeat(1023));
        let other = format!("{}\n", "y".repeat(1023));
        // None of it is taken, so all of this would stand still if a line waited for the output.
        for _ in 0..10_000 {
            outlet.push(access.as_bytes(), Class::Access);
        }
        let lost = outlet.lost.read();
        // What the thread holds, and what waits in the queue.
        let most = 2 * Class::Access.most_waiting() / 1024;
        assert!(lost.access >= 10_000 - most as u64, "{lost:?}");
        assert_eq!(lost.other, 0);
        for _ in 0..100 {
            outlet.push(other.as_bytes(), Class::Other);
        }
        assert_eq!(outlet.lost.read(), lost, "there is room for others");
        for _ in 0..1000 {
            outlet.push(other.as_bytes(), Class::Other);
        }
        let lost = outlet.lost.read();
        assert!(lost.other > 0);
        drop(permit);
        drop(emptier);
        let all: String = written.try_iter().collect();
        let lines = |begin| all.lines().filter(|line| line.starts_with(begin)).count() as u64;
        assert_eq!(lines('x') + lost.access, 10_000);
        assert_eq!(lines('y') + lost.other, 1100);
        let notice = format!("\nlost {} {}\n", lost.access, lost.other);
        assert!(all.ends_with(&notice), "{}", all.lines().last().unwrap());
        assert_eq!(lines('l'), 1);
    }

    #[test]
    fn output_that_takes_nothing_does_not_keep_the_process() {
        let (outlet, written, permit) = outlet();
        let emptier = start(&outlet);
        outlet.push(b"a\n", Class::Access);
        let (over, ended) = mpsc::channel();
        let ending = outlet.clone();
        std::thread::spawn(move || {
            drop(emptier);
            ending.push(b"b\n", Class::Other);
            over.send(())
        });
        ended.recv_timeout(LONG).unwrap();
        assert!(written.try_recv().is_err());
        drop(permit);
        assert_eq!(written.recv_timeout(LONG).unwrap(), "a\n");
    }

    /// Of many panics under an output that stands still, one waits.
    #[test]
    fn panic_waits_for_its_line_but_only_once_while_the_output_stands_still() {
        let (outlet, written, permit) = outlet();
        let emptier = start(&outlet);
        outlet.push(b"a\n", Class::Panic);
        assert!(lock(&outlet.queue).stalled);
        outlet.push(b"b\n", Class::Panic);
        drop(permit);
        drop(emptier);
        assert!(!lock(&outlet.queue).stalled);
        assert_eq!(written.try_iter().collect::<String>(), "a\nb\n");
    }

    /// An output that fails a number of times, in the middle of a line if it is long.
    struct Failing {
        failures: usize,
        taken: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Failing {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            if self.failures > 0 {
                if data.starts_with(b"long") {
                    let _test_is_over = self.taken.send(b"lo".to_vec());
                    return Ok(2);
                }
                self.failures -= 1;
                return Err(io::ErrorKind::StorageFull.into());
            }
            let _test_is_over = self.taken.send(data.to_vec());
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn failing(failures: usize) -> (Arc<Outlet<Failing>>, mpsc::Receiver<Vec<u8>>) {
        let (taken, written) = mpsc::channel();
        (
            Outlet::new(Failing { failures, taken }, counters()),
            written,
        )
    }

    fn text(written: &mpsc::Receiver<Vec<u8>>) -> String {
        String::from_utf8(written.try_iter().flatten().collect()).unwrap()
    }

    #[test]
    fn output_that_fails_loses_one_line_and_not_those_behind_it() {
        let (outlet, written) = failing(1);
        for line in [b"a\n", b"b\n", b"c\n"] {
            outlet.push(line, Class::Access);
        }
        outlet.push(b"d\n", Class::Other);
        drop(start(&outlet));
        assert_eq!(text(&written), "b\nc\nd\nlost 1 0\n");
    }

    #[test]
    fn line_that_a_full_disk_cut_is_ended_before_the_next_one() {
        let (outlet, written) = failing(1);
        outlet.push(b"long line\n", Class::Access);
        outlet.push(b"b\n", Class::Access);
        drop(start(&outlet));
        assert_eq!(text(&written), "lo\nb\nlost 1 0\n");
    }

    /// Nothing else may come that shows that the disk has room again.
    #[test]
    fn output_that_works_again_gets_the_notice_without_another_line() {
        let (outlet, written) = failing(2);
        let emptier = start(&outlet);
        outlet.push(b"a\n", Class::Other);
        let notice = written.recv_timeout(LONG).unwrap();
        assert_eq!(notice, b"lost 0 1\n", "the notices that failed are none");
        drop(emptier);
        assert_eq!(text(&written), "");
    }
}
