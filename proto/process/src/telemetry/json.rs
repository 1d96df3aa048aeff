//! JSON log lines. Access log lines, one for each request, are written directly; all others by the
//! formatter of `tracing-subscriber`, which parses the fields of the span for each line.

use std::fmt;
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use humantime::format_rfc3339_micros;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{self, Json, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, SpanRef};

use super::log_writer::ACCESS;
use super::sanitize::Sanitizer;

/// The format of JSON lines: all fields of the event in one object, and the current span.
#[derive(Debug)]
pub(super) struct JsonLines(format::Format<Json>);

impl JsonLines {
    pub(super) fn new() -> Self {
        let lines = format::json()
            .flatten_event(true)
            // Events have a field named `target`: the target of a request.
            .with_target(false)
            .with_current_span(true)
            .with_span_list(false);
        Self(lines)
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> FormatEvent<S, JsonFields> for JsonLines {
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        if metadata.target() != ACCESS {
            return self.0.format_event(context, out, event);
        }
        let now = SystemTime::now().max(UNIX_EPOCH);
        let (now, level) = (format_rfc3339_micros(now), metadata.level());
        write!(out, "{{\"timestamp\":\"{now}\",\"level\":\"{level}\"")?;
        let mut fields = FieldWriter {
            line: Vec::with_capacity(512),
            scratch: String::new(),
        };
        event.record(&mut fields);
        out.write_str(str::from_utf8(&fields.line).map_err(|_not_json| fmt::Error)?)?;
        if let Some(span) = context.lookup_current() {
            write_span(&mut out, &span)?;
        }
        out.write_str("}\n")
    }
}

/// Writes the fields of a span, which the layer has formatted as an object, and its name.
fn write_span<'a, S: LookupSpan<'a>>(out: &mut Writer<'_>, span: &SpanRef<'a, S>) -> fmt::Result {
    out.write_str(",\"span\":{")?;
    let extensions = span.extensions();
    let object = extensions.get::<FormattedFields<JsonFields>>();
    let object = object.map_or("", |formatted| formatted.fields.as_str());
    let fields = object.trim_start_matches('{').trim_end_matches('}');
    if !fields.is_empty() {
        write!(out, "{fields},")?;
    }
    write!(out, "\"name\":\"{}\"}}", span.name())
}

/// Appends a text as a JSON string in which hidden characters are escaped.
pub fn append_json_text(line: &mut Vec<u8>, text: &str) {
    // Nearly all texts contain only such characters. Without a branch for each of them, the compiler compares
    // many at once.
    let is_plain = |byte: u8| (b' '..=b'~').contains(&byte) & (byte != b'"') & (byte != b'\\');
    if text.bytes().fold(true, |all, byte| all & is_plain(byte)) {
        line.push(b'"');
        line.extend_from_slice(text.as_bytes());
        line.push(b'"');
        return;
    }
    // Writing to memory cannot fail.
    let quoted = serde_json::to_string(text).unwrap_or_default();
    let sanitizer = Sanitizer {
        json: true,
        colors: false,
    };
    line.extend_from_slice(sanitizer.escaped(&quoted).as_bytes());
}

/// Appends each field as `,"name":value`.
struct FieldWriter {
    line: Vec<u8>,
    scratch: String,
}

impl FieldWriter {
    fn append_name(&mut self, field: &Field) {
        self.line.extend_from_slice(b",\"");
        self.line.extend_from_slice(field.name().as_bytes());
        self.line.extend_from_slice(b"\":");
    }

    /// Appends a number or a boolean.
    fn append_plain(&mut self, field: &Field, value: impl fmt::Display) {
        self.append_name(field);
        // Writing to memory cannot fail.
        write!(self.line, "{value}").ok();
    }
}

impl Visit for FieldWriter {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.append_name(field);
        append_json_text(&mut self.line, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.append_plain(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.append_plain(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.append_name(field);
        // Writing to memory cannot fail.
        serde_json::to_writer(&mut self.line, &value).ok();
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.append_plain(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = std::mem::take(&mut self.scratch);
        text.clear();
        // Writing to memory fails only if the value's own Debug does.
        fmt::Write::write_fmt(&mut text, format_args!("{value:?}")).ok();
        self.record_str(field, &text);
        self.scratch = text;
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing::{Span, info, info_span};
    use tracing_subscriber::Registry;
    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Debug, Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Lines {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    /// Logs one access event with `format` and returns the line without its timestamp.
    fn logged<F>(format: F, span: fn() -> Span) -> serde_json::Value
    where
        F: FormatEvent<Registry, JsonFields> + Send + Sync + 'static,
    {
        let lines = Lines::default();
        let layer = tracing_subscriber::fmt::layer()
            .fmt_fields(JsonFields::new())
            .event_format(format)
            .with_writer(lines.clone());
        let subscriber = Registry::default().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let _entered = span().entered();
            info!(
                target: ACCESS,
                peer = %"[::1]:1",
                request = "GET /\"quoted\"\\\n\u{1}é",
                session = Some(7_u64),
                status = None::<u16>,
                open = true,
                change = -3_i64,
                elapsed = std::time::Duration::from_micros(1500).as_secs_f64(),
                "access"
            );
        });
        let line = lines.0.lock().clone();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let mut line: serde_json::Value = serde_json::from_slice(&line).unwrap();
        let timestamp = line.as_object_mut().unwrap().remove("timestamp").unwrap();
        assert!(timestamp.as_str().unwrap().ends_with('Z'), "{timestamp}");
        line
    }

    #[test]
    fn access_line_equals_that_of_the_general_formatter() {
        let spans: [fn() -> Span; 3] = [
            Span::none,
            || info_span!("empty"),
            || info_span!("conn", listener = "http", peer = %"{\"}", again = tracing::field::Empty),
        ];
        for span in spans {
            let line = logged(JsonLines::new(), span);
            assert_eq!(line, logged(JsonLines::new().0, span));
            assert_eq!(line["message"], "access");
            assert_eq!(line["elapsed"], 0.0015);
        }
    }
}
