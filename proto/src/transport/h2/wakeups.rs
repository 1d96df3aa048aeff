//! Wakeups of the driver by what it polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use futures_util::task::AtomicWaker;

/// The waker that the driver gives to h2 and to the pumps. They wake the driver for each other
/// while it polls them. Such a wakeup only asks for another round, because a task that wakes itself
/// is scheduled again, often on another thread.
#[derive(Debug, Default)]
pub(super) struct Wakeups {
    task: AtomicWaker,
    is_polling: AtomicBool,
    is_pending: AtomicBool,
}

impl Wakeups {
    pub(super) fn begin_poll(&self, task: &Waker) {
        self.task.register(task);
        self.is_polling.store(true, Ordering::SeqCst);
    }

    /// Begins a round, which follows all wakeups so far.
    pub(super) fn begin_round(&self) {
        self.is_pending.store(false, Ordering::SeqCst);
    }

    /// Returns whether there was a wakeup in this round.
    pub(super) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// Wakes the task if there was a wakeup that no round has followed.
    pub(super) fn end_poll(&self) {
        self.is_polling.store(false, Ordering::SeqCst);
        if self.is_pending() {
            self.task.wake();
        }
    }
}

impl Wake for Wakeups {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_pending.store(true, Ordering::SeqCst);
        if !self.is_polling.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}
