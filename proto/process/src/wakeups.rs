//! Wakeups of a task by what it polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// The waker that a task gives to what it polls, where these parts wake each other while the task
/// polls them. Such a wakeup only asks for another round, because a task that wakes itself is
/// scheduled again, often on another thread.
#[derive(Debug, Default)]
pub struct Wakeups {
    task: AtomicWaker,
    is_polling: AtomicBool,
    is_pending: AtomicBool,
}

impl Wakeups {
    /// Calls `poll` until nothing has woken the task in the meantime, at most `rounds` times. Other
    /// tasks run before further rounds.
    pub fn poll<T>(
        self: &Arc<Self>,
        cx: &Context<'_>,
        rounds: usize,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.begin_poll(cx.waker());
        let waker = Waker::from(self.clone());
        let mut polled = Poll::Pending;
        for _ in 0..rounds {
            self.begin_round();
            polled = poll(&mut Context::from_waker(&waker));
            if polled.is_ready() || !self.is_pending() {
                break;
            }
        }
        self.end_poll();
        polled
    }

    /// Begins a poll of the task. Wakeups from here on are recorded.
    pub fn begin_poll(&self, task: &Waker) {
        self.task.register(task);
        self.is_polling.store(true, Ordering::SeqCst);
    }

    /// Begins a round, which follows all wakeups so far.
    pub fn begin_round(&self) {
        self.is_pending.store(false, Ordering::SeqCst);
    }

    /// Returns whether there was a wakeup in this round.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// Wakes the task if there was a wakeup that no round has followed.
    pub fn end_poll(&self) {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn wakeups_while_the_task_polls_are_further_rounds_up_to_a_limit() {
        for (wakes, rounds, task_wakes) in [(0, 1, 0), (1, 2, 0), (2, 3, 0), (9, 3, 1)] {
            let (task, wakeups) = (Arc::<Task>::default(), Arc::<Wakeups>::default());
            let waker = Waker::from(task.clone());
            let mut polls = 0;
            let polled = wakeups.poll(&Context::from_waker(&waker), 3, |cx| {
                polls += 1;
                if polls <= wakes {
                    cx.waker().wake_by_ref();
                }
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
            let woken = task.0.load(Ordering::Relaxed);
            assert_eq!((polls, woken), (rounds, task_wakes), "{wakes} wakeups");
        }
    }

    #[test]
    fn wakeup_between_polls_wakes_the_task() {
        let (task, wakeups) = (Arc::<Task>::default(), Arc::<Wakeups>::default());
        let waker = Waker::from(task.clone());
        let mut of_part = None;
        let polled = wakeups.poll(&Context::from_waker(&waker), 3, |cx| {
            of_part = Some(cx.waker().clone());
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        of_part.unwrap().wake();
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
    }
}
