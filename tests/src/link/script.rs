//! A timetable of actions on a link.

use std::net::IpAddr;
use std::time::Duration;

use super::impairment::{Impairment, TrafficClass};

/// An action on a link, as a value: a call of the method of [`Link`](super::Link) with its name.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Set(TrafficClass, Impairment),
    Heal,
    Rebind,
    MoveTo(IpAddr),
    ResetTcp,
}

/// Actions with their times after the script's start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Script {
    actions: Vec<(Duration, Action)>,
    length: Duration,
}

impl Script {
    /// Creates an empty script.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a link that works for `up_for` and loses everything for `down_for`, so many times.
    /// The script ends with a working link.
    #[must_use]
    pub fn flapping(class: TrafficClass, up_for: Duration, down_for: Duration, times: u32) -> Self {
        (0..times).fold(Self::new(), |script, _| {
            script
                .wait(up_for)
                .then(Action::Set(class, Impairment::black_hole()))
                .wait(down_for)
                .then(Action::Set(class, Impairment::default()))
        })
    }

    /// Adds an action at that time after the start. Actions with equal times run in the order in
    /// which they were added.
    #[must_use]
    pub fn at(mut self, after: Duration, action: Action) -> Self {
        let index = self.actions.partition_point(|(time, _)| *time <= after);
        self.actions.insert(index, (after, action));
        self.length = self.length.max(after);
        self
    }

    /// Adds an action at the current end of the script.
    #[must_use]
    pub fn then(self, action: Action) -> Self {
        let end = self.length;
        self.at(end, action)
    }

    /// Extends the script's end.
    #[must_use]
    pub fn wait(mut self, time: Duration) -> Self {
        self.length += time;
        self
    }

    /// Returns the duration of the script.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Returns the actions in the order of their times.
    #[must_use]
    pub fn actions(&self) -> &[(Duration, Action)] {
        &self.actions
    }
}

impl From<Vec<(Duration, Action)>> for Script {
    fn from(actions: Vec<(Duration, Action)>) -> Self {
        actions
            .into_iter()
            .fold(Self::new(), |script, (after, action)| {
                script.at(after, action)
            })
    }
}
