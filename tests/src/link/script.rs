//! A timetable of what happens to a link.

use std::net::IpAddr;
use std::time::Duration;

use super::impairment::{Impairment, TrafficClass};

/// What can be done to a link, as a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// [`Link::set`](super::Link::set).
    Set(TrafficClass, Impairment),
    /// [`Link::heal`](super::Link::heal).
    Heal,
    /// [`Link::rebind`](super::Link::rebind).
    Rebind,
    /// [`Link::move_to`](super::Link::move_to).
    MoveTo(IpAddr),
    /// [`Link::reset_tcp`](super::Link::reset_tcp).
    ResetTcp,
}

/// Actions, each with its time after the script's start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Script {
    actions: Vec<(Duration, Action)>,
    length: Duration,
}

impl Script {
    /// A script in which nothing happens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A link that works for `up_for` and loses everything for `down_for`, so many times; it ends working.
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

    /// Adds an action at that time after the start. Actions of the same time happen in the order in which they were
    /// added.
    #[must_use]
    pub fn at(mut self, after: Duration, action: Action) -> Self {
        let index = self.actions.partition_point(|(time, _)| *time <= after);
        self.actions.insert(index, (after, action));
        self.length = self.length.max(after);
        self
    }

    /// Adds an action at the script's present end.
    #[must_use]
    pub fn then(self, action: Action) -> Self {
        let end = self.length;
        self.at(end, action)
    }

    /// Moves the script's end.
    #[must_use]
    pub fn wait(mut self, time: Duration) -> Self {
        self.length += time;
        self
    }

    /// How long it plays.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// The actions in the order of their times.
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
