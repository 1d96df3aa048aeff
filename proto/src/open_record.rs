//! The record of a stream in progress, and the only place that passes it to its sinks: metrics and
//! recent requests, the audit log and the access log.

use std::sync::Arc;

use parking_lot::MutexGuard;
use tokio::time::Instant;
use tracing::info;
use tunnel_process::telemetry::{ACCESS, LineForm, non_empty};

use crate::audit::{self, OpenStreamGuard, SharedRecord};
use crate::stream_record::{EndCode, Relayed, StreamEnd, StreamRecord};
use crate::transport::ByteCount;
use crate::wire::name::{NodeName, Port};

/// The sinks of the records of one end.
pub trait RecordSinks<E: EndCode = StreamEnd> {
    /// The end of a stream that nobody serves to its end.
    const DROPPED: E;
    /// Who writes audit events: `server` or `agent`.
    const REPORTER: &'static str;

    /// Adds what is the same for all streams that this value serves.
    fn describe(&self, _record: &mut StreamRecord<E>) {}

    /// Returns whether the stream was accepted by its target.
    fn has_reached_target(&self, record: &StreamRecord<E>) -> bool;

    /// Passes the record to the sinks that only this end has. Returns the form of the line in the access
    /// log, if there is one.
    fn end(&self, record: &mut StreamRecord<E>) -> Option<LineForm>;
}

/// The record of a stream in progress. Dropping it ends the record and passes it to all sinks, once.
#[derive(Debug)]
pub struct OpenRecord<S: RecordSinks<E>, E: EndCode = StreamEnd> {
    record: Arc<SharedRecord<E>>,
    /// What carries the stream, and the bytes that it had carried before.
    bytes: Option<(ByteCount, (u64, u64))>,
    started: Option<OpenStreamGuard>,
    /// The sinks of the record.
    pub sinks: S,
}

impl<S: RecordSinks<E>, E: EndCode> OpenRecord<S, E> {
    /// Begins the record of a stream that was accepted at `began`.
    pub fn start(began: Instant, sinks: S) -> Self {
        let record = StreamRecord::start(began, S::DROPPED);
        Self {
            record: Arc::new(SharedRecord::new(record, S::REPORTER)),
            bytes: None,
            started: None,
            sinks,
        }
    }

    /// Returns the record. The audit log reads it, too, when the stream has been open for a minute.
    pub fn lock(&self) -> MutexGuard<'_, StreamRecord<E>> {
        self.record.lock()
    }

    /// Records what carries the stream from here on.
    pub fn carried(&mut self, bytes: ByteCount) {
        let before = bytes.read();
        self.bytes = Some((bytes, before));
    }
}

impl<S: RecordSinks<E>, E: EndCode + Send + 'static> OpenRecord<S, E> {
    /// Records that the response of the target has begun, or that it has accepted the stream.
    pub fn started(&mut self) {
        let mut record = self.record.lock();
        self.sinks.describe(&mut record);
        if self.started.is_none() {
            self.started = audit::started(&self.record, record.began);
        }
    }
}

impl<S: RecordSinks> OpenRecord<S> {
    /// Sets how the relay of the stream ended.
    pub fn relayed(&mut self, relayed: Relayed) {
        self.bytes = None;
        let mut record = self.lock();
        record.fail(relayed.end, relayed.detail);
        record.bytes_in = relayed.bytes_in;
        record.bytes_out = relayed.bytes_out;
    }
}

impl<S: RecordSinks<E>, E: EndCode> Drop for OpenRecord<S, E> {
    fn drop(&mut self) {
        let Self {
            record: shared,
            bytes,
            started,
            sinks,
        } = self;
        drop(started.take());
        let mut record = shared.end();
        if let Some((bytes, before)) = bytes {
            let (received, sent) = bytes.read();
            record.bytes_in = received.saturating_sub(before.0);
            record.bytes_out = sent.saturating_sub(before.1);
        }
        sinks.describe(&mut record);
        let form = sinks.end(&mut record);
        audit::ended(&record, S::REPORTER, sinks.has_reached_target(&record));
        if let Some(form) = form {
            log(&record, form);
        }
    }
}

/// Writes the line of the access log.
fn log<E: EndCode>(record: &StreamRecord<E>, form: LineForm) {
    info!(
        target: ACCESS,
        listener = record.listener,
        peer = record.peer.as_ref().map(tracing::field::display),
        caller = non_empty(&record.caller),
        request = non_empty(&record.request),
        node = record.node.as_ref().map(NodeName::as_str),
        direction = record.direction,
        port = record.port.map(Port::get),
        target = non_empty(&record.target),
        dialed = non_empty(&record.dialed),
        session = record.session.map(|session| session.0),
        via = record.via.as_ref().map(tracing::field::display),
        status = record.status,
        code = record.end.label(),
        retried = record.is_retried.then_some(true),
        dry_run = record.dry_run.as_deref(),
        error = non_empty(form.of_error(&record.detail)),
        trace_parent = non_empty(&record.trace_parent),
        bytes_in = record.bytes_in,
        bytes_out = record.bytes_out,
        elapsed = record.began.elapsed().as_secs_f64(),
        "access"
    );
}
