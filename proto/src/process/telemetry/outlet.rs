//! Where log lines leave the process. Access records, of which there is one a request, wait a moment for others and leave
//! together; any other line leaves at once, behind those that wait.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long an access record waits for others: nobody who reads a log sees it, and 1,000 requests a second are 20 writes.
const GATHER: Duration = Duration::from_millis(20);
/// Bytes that may wait. Beyond it whoever has a line to write waits for the output, as without an outlet: nothing is lost.
const WAITING_MOST: usize = 256 * 1024;

/// Lines on their way to `W`, in their order.
#[derive(Debug)]
pub(super) struct Outlet<W> {
    /// Locked first: who holds it may empty what waits.
    out: Mutex<W>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: Vec<u8>,
    closed: bool,
}

impl<W: Write + Send + 'static> Outlet<W> {
    pub(super) fn new(out: W) -> Arc<Self> {
        Arc::new(Self {
            out: Mutex::new(out),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// A line that may wait, for as long as there is an [`Emptier`].
    pub(super) fn gather(&self, line: &[u8]) -> io::Result<()> {
        let mut waiting = lock(&self.waiting);
        if waiting.closed || waiting.lines.len() + line.len() > WAITING_MOST {
            drop(waiting);
            return self.write(line);
        }
        let first = waiting.lines.is_empty();
        waiting.lines.extend_from_slice(line);
        drop(waiting);
        if first {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// A line that leaves now, whatever becomes of those that wait.
    pub(super) fn write(&self, line: &[u8]) -> io::Result<()> {
        let mut out = lock(&self.out);
        let emptied = self.empty(&mut out);
        out.write_all(line)?;
        out.flush().and(emptied)
    }

    fn flush(&self) -> io::Result<()> {
        let mut out = lock(&self.out);
        self.empty(&mut out)?;
        out.flush()
    }

    /// An output that fails loses the line that it fails at, as without an outlet, and is tried again with the next.
    fn empty(&self, out: &mut W) -> io::Result<()> {
        let lines = std::mem::take(&mut lock(&self.waiting).lines);
        let mut left = Ok(());
        let mut rest = lines.as_slice();
        while !rest.is_empty() {
            let Err(error) = write_some(out, &mut rest) else {
                break;
            };
            left = Err(error);
            let line = rest.iter().position(|&byte| byte == b'\n');
            rest = line.map_or(&[], |end| &rest[end + 1..]);
        }
        left
    }

    /// Waits until something waits, and then for more of it; false when there will be none.
    fn gathered(&self) -> bool {
        let waiting = lock(&self.waiting);
        let waiting = self
            .changed
            .wait_while(waiting, |waiting| {
                waiting.lines.is_empty() && !waiting.closed
            })
            .unwrap_or_else(PoisonError::into_inner);
        let (waiting, _timeout) = self
            .changed
            .wait_timeout_while(waiting, GATHER, |waiting| !waiting.closed)
            .unwrap_or_else(PoisonError::into_inner);
        !waiting.closed
    }
}

/// The thread that lets waiting lines out. Dropped, it lets out the last ones, and no line waits any more.
#[derive(Debug)]
pub(super) struct Emptier<W: Write + Send + 'static> {
    outlet: Arc<Outlet<W>>,
    thread: Option<JoinHandle<()>>,
}

impl<W: Write + Send + 'static> Emptier<W> {
    /// # Errors
    /// There can be no further thread.
    pub(super) fn start(outlet: Arc<Outlet<W>>) -> io::Result<Self> {
        let of_thread = outlet.clone();
        let run = move || {
            while of_thread.gathered() {
                // Nowhere to tell.
                let _closed_output = of_thread.flush();
            }
        };
        let thread = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(run)?;
        Ok(Self {
            outlet,
            thread: Some(thread),
        })
    }
}

impl<W: Write + Send + 'static> Drop for Emptier<W> {
    fn drop(&mut self) {
        lock(&self.outlet.waiting).closed = true;
        self.outlet.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _it_does_not_panic = thread.join();
        }
        let _closed_output = self.outlet.flush();
    }
}

/// Writes until all is written or the output fails, and leaves what is not written.
fn write_some(out: &mut impl Write, rest: &mut &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        match out.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => *rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
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

    fn outlet() -> (Arc<Outlet<Told>>, mpsc::Receiver<String>, mpsc::Sender<()>) {
        let ((tell, told), (permit, may)) = (mpsc::channel(), mpsc::channel());
        (Outlet::new(Told { tell, may }), told, permit)
    }

    #[test]
    fn gathered_lines_leave_by_themselves_and_together() {
        let (outlet, told, permit) = outlet();
        let _emptier = Emptier::start(outlet.clone()).unwrap();
        outlet.gather(b"a\n").unwrap();
        outlet.gather(b"b\n").unwrap();
        permit.send(()).unwrap();
        let mut all = told.recv().unwrap();
        // A machine that is that slow may see the first alone.
        while all != "a\nb\n" {
            permit.send(()).unwrap();
            all += &told.recv().unwrap();
        }
    }

    #[test]
    fn line_that_leaves_at_once_leaves_behind_those_that_wait() {
        let (outlet, told, permit) = outlet();
        outlet.gather(b"a\n").unwrap();
        outlet.gather(b"b\n").unwrap();
        permit.send(()).unwrap();
        permit.send(()).unwrap();
        outlet.write(b"c\n").unwrap();
        assert_eq!(told.try_iter().collect::<String>(), "a\nb\nc\n");
    }

    #[test]
    fn last_lines_leave_before_the_emptier_is_gone_and_none_waits_after_it() {
        let (outlet, told, permit) = outlet();
        let emptier = Emptier::start(outlet.clone()).unwrap();
        drop(permit);
        outlet.gather(b"a\n").unwrap();
        drop(emptier);
        assert_eq!(told.try_iter().collect::<String>(), "a\n");
        outlet.gather(b"b\n").unwrap();
        assert_eq!(told.try_iter().collect::<String>(), "b\n");
    }

    /// A reader of the log that stands still must not stop requests before much is waiting, and then loses nothing.
    #[test]
    fn slow_output_holds_nobody_until_much_waits_and_nothing_is_lost() {
        let (outlet, told, permit) = outlet();
        let emptier = Emptier::start(outlet.clone()).unwrap();
        let line = [b'x'; 1024];
        for _ in 0..WAITING_MOST / line.len() {
            outlet.gather(&line).unwrap();
        }
        let (over, (tell, done)) = (outlet.clone(), mpsc::channel());
        std::thread::spawn(move || tell.send(over.gather(&[b'y'; 1024])));
        // The one that is too many waits for the output.
        let early = done.recv_timeout(Duration::from_millis(100));
        drop(permit);
        early.unwrap_err();
        done.recv().unwrap().unwrap();
        drop(emptier);
        let all: String = told.try_iter().collect();
        assert_eq!(all.len(), WAITING_MOST + 1024);
        assert!(all.ends_with('y'));
    }

    /// An output that fails once.
    struct Failing {
        failed: bool,
        taken: mpsc::Sender<Vec<u8>>,
    }

    impl Write for Failing {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            if !std::mem::replace(&mut self.failed, true) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let _test_is_over = self.taken.send(data.to_vec());
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn output_that_fails_loses_one_line_and_not_those_behind_it() {
        let (taken, told) = mpsc::channel();
        let failed = false;
        let outlet = Outlet::new(Failing { failed, taken });
        for line in [b"a\n", b"b\n", b"c\n"] {
            outlet.gather(line).unwrap();
        }
        outlet.write(b"d\n").unwrap_err();
        let all: Vec<u8> = told.try_iter().flatten().collect();
        assert_eq!(all, b"b\nc\nd\n");
    }
}
