use std::sync::mpsc;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// An output whose writes call a function.
struct Output<F>(F);

impl<F: FnMut(&[u8]) -> io::Result<usize>> Write for Output<F> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        (self.0)(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a writer to an output that `write` handles before it is reported.
fn output(
    mut write: impl FnMut(&[u8]) -> io::Result<usize> + Send + 'static,
) -> (
    Arc<BatchWriter<impl Write + Send + 'static>>,
    mpsc::Receiver<String>,
) {
    let (sender, written) = mpsc::channel();
    let output = Output(move |data: &[u8]| -> io::Result<usize> {
        let count = write(data)?;
        let text = String::from_utf8_lossy(&data[..count]).into_owned();
        let _test_is_over = sender.send(text);
        Ok(count)
    });
    let counters = Box::leak(Box::new(DropCounters::new()));
    (BatchWriter::new(output, counters), written)
}

#[test]
fn lines_are_written_after_the_thread_has_panicked() {
    let mut has_panicked = false;
    let (writer, written) = output(move |data| {
        assert!(std::mem::replace(&mut has_panicked, true), "of the test");
        Ok(data.len())
    });
    let flusher = start(&writer);
    writer.push(b"lost\n", LineKind::Panic);
    while !writer.queue.lock().finished {
        std::thread::yield_now();
    }
    writer.push(b"later\n", LineKind::Other);
    assert_eq!(written.recv_timeout(LONG).unwrap(), "later\n");
    drop(flusher);
}

/// A reporter to which something is due at any time.
struct DueReporter(mpsc::Sender<()>);

impl LogReporter for DueReporter {
    fn dropped(&mut self, _dropped: DroppedCounts) {}

    fn report_due(&mut self, _is_last: bool) -> bool {
        self.0.send(()).is_ok()
    }
}

#[test]
fn reporter_to_which_something_is_due_is_asked_again_though_no_line_is_logged() {
    let (writer, _written) = output(|data| Ok(data.len()));
    let (asked, asks) = mpsc::channel();
    let _flusher = Flusher::start(writer, DueReporter(asked)).unwrap();
    for _ in 0..3 {
        asks.recv_timeout(LONG).unwrap();
    }
}

/// Returns a writer to an output that accepts a write only when the test permits it.
fn writer() -> (
    Arc<BatchWriter<impl Write + Send + 'static>>,
    mpsc::Receiver<String>,
    mpsc::Sender<()>,
) {
    let (permit, permits) = mpsc::channel();
    let (writer, written) = output(move |data| {
        let _test_is_over = permits.recv();
        Ok(data.len())
    });
    (writer, written, permit)
}

/// Returns what was written since the last call.
fn text(written: &mpsc::Receiver<String>) -> String {
    written.try_iter().collect()
}

/// A reporter that writes the notice as a line of the test.
struct TestReporter<W>(Arc<BatchWriter<W>>);

impl<W: Write + Send + 'static> LogReporter for TestReporter<W> {
    fn dropped(&mut self, dropped: DroppedCounts) {
        let line = format!("lost {} {}\n", dropped.access, dropped.other);
        self.0.push(line.as_bytes(), LineKind::Notice);
    }

    fn report_due(&mut self, _is_last: bool) -> bool {
        false
    }
}

fn start<W: Write + Send + 'static>(writer: &Arc<BatchWriter<W>>) -> Flusher<W> {
    Flusher::start(writer.clone(), TestReporter(writer.clone())).unwrap()
}

#[test]
fn batched_access_lines_are_written_together() {
    let (writer, written, permit) = writer();
    let _flusher = start(&writer);
    writer.push(b"a\n", LineKind::Access);
    writer.push(b"b\n", LineKind::Access);
    permit.send(()).unwrap();
    let mut all = written.recv().unwrap();
    // On a slow machine the first line may arrive alone.
    while all != "a\nb\n" {
        permit.send(()).unwrap();
        all += &written.recv().unwrap();
    }
    drop(permit);
}

#[test]
fn line_wakes_the_thread_only_if_time_does_not() {
    for kind in [LineKind::Access, LineKind::Audit, LineKind::Other] {
        let mut queue = Queue {
            is_parked: true,
            ..Queue::default()
        };
        let mut push = |bytes, kind| queue.push(&vec![b'x'; bytes], kind);
        assert!(push(1, LineKind::Audit), "the thread was parked");
        assert!(!push(1, LineKind::Audit), "the same batch");
        let below = kind.batch_bytes().saturating_sub(3);
        assert!(below == 0 || !push(below, kind), "{kind:?}");
        assert!(push(1, kind), "{kind:?}");
        assert!(!push(1, LineKind::Other), "the batch is due");
    }
}

#[test]
fn urgent_line_is_written_after_queued_lines() {
    let (writer, written, permit) = writer();
    drop(permit);
    writer.push(b"a\n", LineKind::Access);
    writer.push(b"b\n", LineKind::Access);
    assert!(!writer.queue.lock().is_due);
    writer.push(b"c\n", LineKind::Other);
    assert!(writer.queue.lock().is_due);
    drop(start(&writer));
    assert_eq!(text(&written), "a\nb\nc\n");
}

#[test]
fn last_lines_are_written_before_the_flusher_is_dropped() {
    let (writer, written, permit) = writer();
    let flusher = start(&writer);
    drop(permit);
    writer.push(b"a\n", LineKind::Access);
    drop(flusher);
    assert_eq!(text(&written), "a\n");
    writer.push(b"b\n", LineKind::Access);
    assert_eq!(text(&written), "b\n");
}

/// A blocked reader of the log blocks no task. Access log lines are dropped first, and dropped
/// lines are counted.
#[test]
fn slow_output_blocks_no_task_and_dropped_lines_are_counted() {
    let (writer, written, permit) = writer();
    let flusher = start(&writer);
    let access = format!("{}\n", "x".repeat(1023));
    let other = format!("{}\n", "y".repeat(1023));
    // The output accepts none of these lines. The loop would block if logging a line waited for
    // the output.
    for _ in 0..10_000 {
        writer.push(access.as_bytes(), LineKind::Access);
    }
    let dropped = writer.dropped.snapshot();
    // The batch that the thread holds, and the lines in the queue.
    let most = 2 * LineKind::Access.queue_limit() / 1024;
    assert!(dropped.access >= 10_000 - most as u64, "{dropped:?}");
    assert_eq!(dropped.other, 0);
    for _ in 0..100 {
        writer.push(other.as_bytes(), LineKind::Other);
    }
    let later = writer.dropped.snapshot();
    assert_eq!(later, dropped, "there is room for others");
    for _ in 0..1000 {
        writer.push(other.as_bytes(), LineKind::Other);
    }
    let dropped = writer.dropped.snapshot();
    assert!(dropped.other > 0);
    drop(permit);
    drop(flusher);
    let all = text(&written);
    let lines = |begin| all.lines().filter(|line| line.starts_with(begin)).count() as u64;
    assert_eq!(lines('x') + dropped.access, 10_000);
    assert_eq!(lines('y') + dropped.other, 1100);
    let notice = format!("\nlost {} {}\n", dropped.access, dropped.other);
    assert!(all.ends_with(&notice), "{}", all.lines().last().unwrap());
    assert_eq!(lines('l'), 1);
}

#[test]
fn blocked_output_does_not_delay_the_exit() {
    let (writer, written, permit) = writer();
    let flusher = start(&writer);
    writer.push(b"a\n", LineKind::Access);
    let (over, ended) = mpsc::channel();
    let ending = writer.clone();
    std::thread::spawn(move || {
        drop(flusher);
        ending.push(b"b\n", LineKind::Other);
        over.send(())
    });
    ended.recv_timeout(LONG).unwrap();
    assert!(written.try_recv().is_err());
    drop(permit);
    assert_eq!(written.recv_timeout(LONG).unwrap(), "a\n");
}

/// Many threads panic while the output is blocked. Only one of them waits.
#[test]
fn panic_waits_for_its_line_only_once_while_the_output_is_blocked() {
    let (writer, written, permit) = writer();
    let flusher = start(&writer);
    writer.push(b"a\n", LineKind::Panic);
    assert!(writer.queue.lock().stalled);
    writer.push(b"b\n", LineKind::Panic);
    drop(permit);
    drop(flusher);
    assert!(!writer.queue.lock().stalled);
    assert_eq!(text(&written), "a\nb\n");
}

/// Returns a writer to an output that fails a number of times, in the middle of a line if the
/// line is long.
fn failing(
    mut failures: usize,
) -> (
    Arc<BatchWriter<impl Write + Send + 'static>>,
    mpsc::Receiver<String>,
) {
    output(move |data| {
        if failures > 0 && data.starts_with(b"long") {
            return Ok(2);
        }
        if failures > 0 {
            failures -= 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(data.len())
    })
}

#[test]
fn output_that_fails_loses_one_line_and_not_those_behind_it() {
    let (writer, written) = failing(1);
    for line in [b"a\n", b"b\n", b"c\n"] {
        writer.push(line, LineKind::Access);
    }
    writer.push(b"d\n", LineKind::Other);
    drop(start(&writer));
    assert_eq!(text(&written), "b\nc\nd\nlost 1 0\n");
}

#[test]
fn line_that_a_full_disk_cut_is_ended_before_the_next_one() {
    let (writer, written) = failing(1);
    writer.push(b"long line\n", LineKind::Access);
    writer.push(b"b\n", LineKind::Access);
    drop(start(&writer));
    assert_eq!(text(&written), "lo\nb\nlost 1 0\n");
}

/// The notice is written although no other line follows that would show that the disk has space
/// again.
#[test]
fn output_that_works_again_gets_the_notice_without_another_line() {
    let (writer, written) = failing(2);
    let flusher = start(&writer);
    writer.push(b"a\n", LineKind::Other);
    let notice = written.recv_timeout(LONG).unwrap();
    assert_eq!(notice, "lost 0 1\n", "the notices that failed are none");
    drop(flusher);
    assert_eq!(text(&written), "");
}
