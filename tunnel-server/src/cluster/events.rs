//! Kubernetes Events for conditions, on the object that they concern, for `kubectl describe`.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Resource as _};

use super::failure::ApiError;

/// Maximum size of a note (Kubernetes `pkg/apis/core/validation/events.go`, `NoteLengthLimit`).
const NOTE_MAX_BYTES: usize = 1024;
/// Value of `reportingController` in Events.
const REPORTER: &str = "culvert.dev/tunnel-server";

/// A publisher of Events that publishes each condition once.
#[derive(Debug)]
pub(super) struct EventRecorder {
    api: Api<Event>,
    instance: String,
    namespace: String,
    published: HashMap<&'static str, String>,
}

impl EventRecorder {
    pub(super) fn new(api: Api<Event>, namespace: String, instance: String) -> Self {
        Self {
            api,
            instance,
            namespace,
            published: HashMap::new(),
        }
    }

    /// Publishes the lines of a condition of the ConfigMap with this name, unless they equal those that
    /// were last published with the `reason`. `map` is the observed ConfigMap.
    pub(super) async fn publish(
        &mut self,
        reason: &'static str,
        lines: &[String],
        name: &str,
        map: Option<&ConfigMap>,
    ) -> Result<(), ApiError> {
        if lines.is_empty() {
            self.published.remove(reason);
            return Ok(());
        }
        let note = note(lines);
        if self.published.get(reason) == Some(&note) {
            return Ok(());
        }
        let event = self.event(reason, note.clone(), self.reference(name, map));
        let made = self.api.create(&PostParams::default(), &event).await;
        made.map_err(|error| ApiError::from(&error))?;
        self.published.insert(reason, note);
        Ok(())
    }

    fn reference(&self, name: &str, map: Option<&ConfigMap>) -> ObjectReference {
        map.map(|map| map.object_ref(&()))
            .unwrap_or_else(|| ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("ConfigMap".into()),
                name: Some(name.to_owned()),
                namespace: Some(self.namespace.clone()),
                ..ObjectReference::default()
            })
    }

    fn event(&self, reason: &str, note: String, regarding: ObjectReference) -> Event {
        let now = Timestamp::now();
        Event {
            metadata: ObjectMeta {
                name: Some(format!(
                    "{}.{:x}",
                    regarding.name.as_deref().unwrap_or("tunnel-server"),
                    now.as_nanosecond()
                )),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some("Sync".into()),
            event_time: Some(MicroTime(now)),
            note: Some(note),
            reason: Some(reason.to_owned()),
            regarding: Some(regarding),
            reporting_controller: Some(REPORTER.into()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some("Warning".into()),
            ..Event::default()
        }
    }
}

fn note(lines: &[String]) -> String {
    let mut note = lines.join("; ");
    if note.len() > NOTE_MAX_BYTES {
        let mut end = NOTE_MAX_BYTES - "...".len();
        while !note.is_char_boundary(end) {
            end -= 1;
        }
        note.truncate(end);
        note.push_str("...");
    }
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_cut_at_a_character() {
        let text = note(&["ä".repeat(2000)]);
        assert!(
            text.len() <= NOTE_MAX_BYTES && text.ends_with("ä..."),
            "{text}"
        );
    }
}
