//! The open streams of a process. A stream that is open for a minute has an event meanwhile. Nearly all
//! streams end before, so the list refers to their records and copies none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::event::{Stage, with_event};
use crate::stream_record::{EndCode, StreamRecord};

/// The record of a stream, which the stream itself and the list of open streams refer to.
#[derive(Debug)]
pub(crate) struct SharedRecord<E> {
    record: Mutex<StreamRecord<E>>,
    has_ended: AtomicBool,
    reporter: &'static str,
}

impl<E> SharedRecord<E> {
    pub(crate) fn new(record: StreamRecord<E>, reporter: &'static str) -> Self {
        Self {
            record: Mutex::new(record),
            has_ended: AtomicBool::new(false),
            reporter,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, StreamRecord<E>> {
        self.record.lock()
    }

    /// Returns the record of a stream that ends. From here on there is no event of the open stream.
    pub(crate) fn end(&self) -> MutexGuard<'_, StreamRecord<E>> {
        let record = self.record.lock();
        self.has_ended.store(true, Ordering::Relaxed);
        record
    }
}

/// A stream in the list.
pub(super) trait OpenStream: Send + Sync {
    /// Passes the event of the open stream to `push`, unless the stream ends.
    fn event(&self, push: &mut dyn FnMut(&[u8]));
}

impl<E: EndCode + Send> OpenStream for SharedRecord<E> {
    fn event(&self, push: &mut dyn FnMut(&[u8])) {
        let record = self.record.lock();
        if !self.has_ended.load(Ordering::Relaxed) {
            with_event(&record, self.reporter, Stage::ResponseStarted, push);
        }
    }
}

/// A list of open streams.
pub(super) struct OpenStreams(Mutex<Slots>);

/// Each open stream has a slot, which is empty after its event.
struct Slots {
    all: Vec<Option<Due>>,
    /// Those without an open stream.
    free: Vec<usize>,
    /// When all slots were last looked at.
    checked: Option<Instant>,
}

struct Due {
    at: Instant,
    stream: Arc<dyn OpenStream>,
}

tunnel_process::partial_debug!(OpenStreams);

impl OpenStreams {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Slots {
            all: Vec::new(),
            free: Vec::new(),
            checked: None,
        }))
    }

    /// Adds a stream that was accepted at `began`, until the guard is dropped.
    pub(super) fn insert(
        &'static self,
        began: Instant,
        stream: Arc<dyn OpenStream>,
    ) -> OpenStreamGuard {
        let at = began + STARTED_AFTER;
        let due = Some(Due { at, stream });
        let mut slots = self.0.lock();
        let free = slots.free.pop();
        let slot = match free.and_then(|slot| Some((slot, slots.all.get_mut(slot)?))) {
            Some((slot, place)) => {
                *place = due;
                slot
            }
            None => {
                slots.all.push(due);
                slots.all.len() - 1
            }
        };
        OpenStreamGuard { list: self, slot }
    }

    fn remove(&self, slot: usize) {
        let mut slots = self.0.lock();
        let due = slots.all.get_mut(slot).and_then(Option::take);
        slots.free.push(slot);
        if slots.free.len() == slots.all.len() {
            slots.all.clear();
            slots.free.clear();
            slots.all.shrink_to(RETAINED);
            slots.free.shrink_to(RETAINED);
        }
        drop(slots);
        // The record may end here.
        drop(due);
    }

    /// Passes the events that are due to `push`. All streams are looked at, but at most twice a second
    /// unless this `is_last`.
    pub(super) fn write_due(&self, now: Instant, is_last: bool, push: &mut dyn FnMut(&[u8])) {
        let is_early = |checked: Instant| !is_last && now < checked + CHECK_INTERVAL;
        let mut slots = self.0.lock();
        if slots.checked.is_some_and(is_early) {
            return;
        }
        slots.checked = Some(now);
        drop(slots);
        for from in (0..).step_by(CHECKED_AT_ONCE) {
            let mut slots = self.0.lock();
            let to = slots.all.len().min(from + CHECKED_AT_ONCE);
            let Some(checked) = slots.all.get_mut(from..to).filter(|some| !some.is_empty()) else {
                return;
            };
            let take_due = |slot: &mut Option<Due>| slot.take_if(|due| due.at <= now);
            let due: Vec<_> = checked.iter_mut().filter_map(take_due).collect();
            drop(slots);
            for Due { stream, .. } in due {
                stream.event(push);
            }
        }
    }
}

/// An open stream, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenStreamGuard {
    list: &'static OpenStreams,
    slot: usize,
}

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.list.remove(self.slot);
    }
}

/// Time after which an open stream has an event.
const STARTED_AFTER: Duration = Duration::from_secs(60);
/// Time between two looks at all streams, at least.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Streams that are looked at while others wait to begin or to end.
const CHECKED_AT_ONCE: usize = 1024;
/// Slots whose memory is retained when no stream is open.
const RETAINED: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream_record::StreamEnd;

    fn record(began: Instant) -> Arc<SharedRecord<StreamEnd>> {
        let record = StreamRecord::start(began, StreamEnd::Ok);
        Arc::new(SharedRecord::new(record, "agent"))
    }

    fn due(list: &OpenStreams, now: Instant) -> Vec<String> {
        events(list, now, false)
    }

    fn events(list: &OpenStreams, now: Instant, is_last: bool) -> Vec<String> {
        let mut events = Vec::new();
        list.write_due(now, is_last, &mut |event| {
            events.push(String::from_utf8(event.to_vec()).unwrap());
        });
        events
    }

    fn list() -> &'static OpenStreams {
        Box::leak(Box::new(OpenStreams::new()))
    }

    #[test]
    fn stream_that_is_open_for_a_minute_has_one_event_meanwhile() {
        let (list, start) = (list(), Instant::now());
        let minute = start + STARTED_AFTER;
        let (first, second, third) = (record(start), record(start), record(start));
        let _first = list.insert(start, first.clone());
        let ended = list.insert(start, second);
        let _ends = list.insert(start, third.clone());
        assert_eq!(due(list, start + Duration::from_secs(59)), [""; 0]);
        drop(ended);
        // The record ends, and its guard is about to be dropped.
        drop(third.end());
        // What the record is at the time of the event, not at the begin of the stream.
        first.lock().status = Some(299);
        let events = due(list, minute);
        assert_eq!(events.len(), 1, "{events:?}");
        let event: serde_json::Value = serde_json::from_str(&events[0]).unwrap();
        assert_eq!(event["auditID"], first.lock().audit_id.to_string());
        assert_eq!(event["stage"], "ResponseStarted");
        assert_eq!(event["responseStatus"]["code"], 299);
        assert_eq!(due(list, minute + STARTED_AFTER), [""; 0]);
    }

    #[test]
    fn end_of_the_process_loses_no_event_that_became_due_since_the_last_look() {
        let (list, start) = (list(), Instant::now());
        let minute = start + STARTED_AFTER;
        let _open = list.insert(start, record(start));
        assert_eq!(due(list, minute - Duration::from_millis(1)), [""; 0]);
        assert_eq!(due(list, minute), [""; 0], "too soon for another look");
        assert_eq!(events(list, minute, true).len(), 1);
    }

    #[test]
    fn slot_is_used_again_only_after_its_stream_has_ended() {
        let (list, start) = (list(), Instant::now());
        let minute = start + STARTED_AFTER;
        let old = list.insert(start, record(start));
        assert_eq!(due(list, minute).len(), 1);
        let new = list.insert(start, record(start));
        // The slot of a stream that had its event belongs to it until it ends.
        drop(old);
        let many: Vec<_> = (0..3000)
            .map(|_| list.insert(start, record(start)))
            .collect();
        assert_eq!(list.0.lock().all.len(), 3001);
        assert_eq!(due(list, minute + STARTED_AFTER).len(), 3001);
        drop((new, many));
        let slots = list.0.lock();
        assert_eq!((slots.all.len(), slots.free.len()), (0, 0));
        assert!(slots.all.capacity() <= RETAINED);
    }
}
