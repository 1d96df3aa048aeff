//! Faults that a test injects into requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::record::RecordedRequest;
use super::status::Status;

/// The reachability of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The server is reachable.
    Here,
    /// New connections are refused, open ones are reset.
    Refusing,
    /// Connections stay open or are accepted, but no request is answered.
    Silent,
}

/// The way in which watches end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The connection breaks in the middle of the body.
    Broken,
    /// The body ends, as after the watch's timeout.
    Ended,
}

/// A fault that affects requests.
#[derive(Debug, Clone)]
pub struct Fault {
    verbs: Vec<&'static str>,
    plural: Option<&'static str>,
    user: Option<String>,
    effect: Effect,
    left: Option<u32>,
}

#[derive(Debug, Clone)]
enum Effect {
    Answer(Status),
    Delay(Duration),
}

impl Fault {
    /// Answers the request with this status instead.
    pub fn answer(status: Status) -> Self {
        Self::of_all(Effect::Answer(status))
    }

    /// Answers a write of an object with a conflict, as if another writer had changed the object in
    /// the meantime.
    pub fn conflict() -> Self {
        let message = "Operation cannot be fulfilled: the object has been modified; please apply your changes to the latest \
                       version and try again";
        Self::answer(Status::new(409, "Conflict", message)).verbs(&["update", "patch"])
    }

    /// Delays the answer by this time.
    pub fn delay(time: Duration) -> Self {
        Self::of_all(Effect::Delay(time))
    }

    fn of_all(effect: Effect) -> Self {
        Self {
            verbs: Vec::new(),
            plural: None,
            user: None,
            effect,
            left: None,
        }
    }

    /// Limits the fault to requests with these API verbs (`get`, `list`, `watch`, `create`,
    /// `update`, `patch`, `delete`).
    pub fn verbs(mut self, verbs: &[&'static str]) -> Self {
        self.verbs = verbs.to_vec();
        self
    }

    /// Limits the fault to objects of this plural name.
    pub fn of(mut self, plural: &'static str) -> Self {
        self.plural = Some(plural);
        self
    }

    /// Limits the fault to requests of this user.
    pub fn by(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// Limits the fault to so many requests.
    pub fn times(mut self, count: u32) -> Self {
        self.left = Some(count);
        self
    }

    fn fits(&self, recorded: &RecordedRequest) -> bool {
        (self.verbs.is_empty() || self.verbs.contains(&recorded.verb.as_str()))
            && self.plural.is_none_or(|plural| plural == recorded.resource)
            && self.user.as_ref().is_none_or(|user| *user == recorded.user)
            && self.left != Some(0)
    }
}

/// The active faults. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Faults {
    rules: Arc<Mutex<Vec<Fault>>>,
    presence: watch::Sender<Presence>,
    cuts: watch::Sender<(u64, Cut)>,
}

/// The combined faults of one request.
pub(super) struct InjectedFault {
    pub(super) delay: Duration,
    pub(super) answer: Option<Status>,
}

impl Faults {
    pub(super) fn new() -> Self {
        Self {
            rules: Arc::default(),
            presence: watch::Sender::new(Presence::Here),
            cuts: watch::Sender::new((0, Cut::Ended)),
        }
    }

    fn rules(&self) -> MutexGuard<'_, Vec<Fault>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, fault: Fault) {
        self.rules().push(fault);
    }

    pub(super) fn clear(&self) {
        self.rules().clear();
    }

    pub(super) fn set_presence(&self, presence: Presence) {
        self.presence.send_replace(presence);
    }

    pub(super) fn presence(&self) -> watch::Receiver<Presence> {
        self.presence.subscribe()
    }

    pub(super) fn cut(&self, cut: Cut) {
        self.cuts.send_modify(|(count, how)| {
            *count += 1;
            *how = cut;
        });
    }

    pub(super) fn cuts(&self) -> watch::Receiver<(u64, Cut)> {
        self.cuts.subscribe()
    }

    /// Returns the faults of a request and counts the request against their limits.
    pub(super) fn inject(&self, recorded: &RecordedRequest) -> InjectedFault {
        let mut injected = InjectedFault {
            delay: Duration::ZERO,
            answer: None,
        };
        for rule in self.rules().iter_mut().filter(|rule| rule.fits(recorded)) {
            if let Some(left) = &mut rule.left {
                *left -= 1;
            }
            match &rule.effect {
                Effect::Delay(time) => injected.delay += *time,
                Effect::Answer(status) => {
                    injected.answer = Some(status.clone());
                    break;
                }
            }
        }
        injected
    }
}
