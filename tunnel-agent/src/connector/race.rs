//! One race of two transports for a session: which to dial when; a pure state machine.
//!
//! ```text
//! first:  |--5 s--|..|--5 s--|....      a fresh dial asks at once, while an old one's next try may be seconds away
//! second: ---|--5 s--||--5 s--|...      so a round does not wait for the end of the second
//! ```

use std::time::Duration;

use tokio::time::Instant;

use super::ladder::Rung;

/// Why a dial or its admission did not give a ready session, as far as the race is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Failure {
    /// There is no way: refused, unreachable, no address, lost on the way.
    NoWay,
    /// Nothing came back until the time was over.
    Silence,
    /// Somebody answered, and TLS or the transport failed: an alert, a wrong certificate, a middlebox.
    Alert,
    /// The server, proved to be it, said no.
    Word,
}

/// What to do in a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Dial this transport.
    Dial(Rung),
    /// Something is still running.
    Wait,
    /// The round is over: [`Race::again`] after a while. What is still dialling may go on.
    Rest,
    /// Nothing is left to be tried in this race.
    Over,
}

/// At most two transports that are dialled for one session, the second with a delay; in rounds while both are silent.
#[derive(Debug)]
pub(crate) struct Race {
    first: Runner,
    second: Option<Runner>,
    head_start: Duration,
    head_start_ends: Instant,
    /// Between two rounds.
    resting: bool,
    /// The second still runs since the round before.
    carried: bool,
}

#[derive(Debug, Clone, Copy)]
struct Runner {
    rung: Rung,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Dialling,
    /// The server answered; what is awaited is Welcome.
    Answered,
    Ended,
}

impl Race {
    /// A race that begins by dialling the first.
    pub(crate) fn new(
        (first, second): (Rung, Option<Rung>),
        now: Instant,
        head_start: Duration,
    ) -> Self {
        let runner = |rung, stage| Runner { rung, stage };
        Self {
            first: runner(first, Stage::Dialling),
            second: second.map(|rung| runner(rung, Stage::Waiting)),
            head_start,
            head_start_ends: now + head_start,
            resting: false,
            carried: false,
        }
    }

    /// The transport that begins.
    pub(crate) fn first(&self) -> Rung {
        self.first.rung
    }

    /// Whether the next round is to be begun.
    pub(crate) fn is_resting(&self) -> bool {
        self.resting
    }

    /// Begins the next round by dialling the first.
    pub(crate) fn again(&mut self, now: Instant) -> Rung {
        self.resting = false;
        self.first.stage = Stage::Dialling;
        self.head_start_ends = now + self.head_start;
        if let Some(second) = &mut self.second {
            self.carried = second.stage != Stage::Ended;
            if second.stage == Stage::Ended {
                second.stage = Stage::Waiting;
            }
        }
        self.first.rung
    }

    /// When the head start ends, as long as the first one has no answer.
    pub(crate) fn due(&self) -> Option<Instant> {
        let waits = self.second?.stage == Stage::Waiting;
        (waits && self.first.stage == Stage::Dialling).then_some(self.head_start_ends)
    }

    /// The head start is over: the transport to dial beside the first.
    pub(crate) fn head_start_over(&mut self) -> Option<Rung> {
        let second = self.second.as_mut()?;
        if second.stage != Stage::Waiting {
            return None;
        }
        second.stage = Stage::Dialling;
        Some(second.rung)
    }

    /// A handshake is done.
    pub(crate) fn answered(&mut self, rung: Rung) {
        match &mut self.second {
            Some(second) if second.rung == rung => second.stage = Stage::Answered,
            Some(_) | None => self.first.stage = Stage::Answered,
        }
    }

    /// A transport has failed.
    pub(crate) fn failed(&mut self, rung: Rung, failure: Failure) -> Step {
        let decides = match failure {
            Failure::Word => true,
            // QUIC has no middleboxes that answer in the server's place. TCP has, and they say nothing about UDP.
            Failure::Alert => rung == Rung::Quic,
            Failure::Silence | Failure::NoWay => false,
        };
        let Some(second) = self.second.as_mut().filter(|_| !decides) else {
            return Step::Over;
        };
        if rung == second.rung {
            // One of the round before has its turn in this one still to come.
            let once_more = std::mem::take(&mut self.carried) && !self.resting;
            second.stage = if once_more {
                Stage::Waiting
            } else {
                Stage::Ended
            };
            return match self.first.stage {
                Stage::Ended if !self.resting => Step::Over,
                Stage::Waiting | Stage::Dialling | Stage::Answered | Stage::Ended => Step::Wait,
            };
        }
        self.first.stage = Stage::Ended;
        match second.stage {
            Stage::Waiting => {
                second.stage = Stage::Dialling;
                Step::Dial(second.rung)
            }
            Stage::Dialling => {
                self.resting = true;
                Step::Rest
            }
            Stage::Answered => Step::Wait,
            Stage::Ended => Step::Over,
        }
    }
}

#[cfg(test)]
mod tests;
