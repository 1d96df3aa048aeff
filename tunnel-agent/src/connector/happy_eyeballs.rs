//! One race of two transports for a session: which to dial when; a pure state machine.
//!
//! ```text
//! first:  |--5 s--|..|--5 s--|....      a fresh dial asks at once, while an old one's next try may be seconds away
//! second: ---|--5 s--||--5 s--|...      so a round does not wait for the end of the second
//! ```

use std::time::Duration;

use tokio::time::Instant;

use super::transport_policy::SessionTransport;

/// Why a dial or its admission did not give a ready session, as far as the race is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DialFailure {
    /// There is no way: refused, unreachable, no address, lost on the way.
    Unreachable,
    /// Nothing came back until the time was over.
    Timeout,
    /// Somebody answered, and TLS or the transport failed: an alert, a wrong certificate, a middlebox.
    HandshakeFailed,
    /// The server, proved to be it, said no.
    RefusedByServer,
}

/// What to do in a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DialAction {
    /// Dial this transport.
    Dial(SessionTransport),
    /// Something is still running.
    Wait,
    /// The round is over: [`HappyEyeballs::next_round`] after a while. What is still dialling may go on.
    RoundFailed,
    /// Nothing is left to be tried in this race.
    Exhausted,
}

/// At most two transports that are dialled for one session, the second with a delay; in rounds while both are silent.
#[derive(Debug)]
pub(crate) struct HappyEyeballs {
    first: Candidate,
    second: Option<Candidate>,
    head_start: Duration,
    head_start_ends: Instant,
    /// Between two rounds.
    between_rounds: bool,
    /// The second still runs since the round before.
    second_carried_over: bool,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    transport: SessionTransport,
    state: CandidateState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CandidateState {
    Waiting,
    Dialing,
    /// The server answered; what is awaited is Welcome.
    Answered,
    Ended,
}

impl HappyEyeballs {
    /// A race that begins by dialling the first.
    pub(crate) fn new(
        (first, second): (SessionTransport, Option<SessionTransport>),
        now: Instant,
        head_start: Duration,
    ) -> Self {
        let candidate = |transport, state| Candidate { transport, state };
        Self {
            first: candidate(first, CandidateState::Dialing),
            second: second.map(|transport| candidate(transport, CandidateState::Waiting)),
            head_start,
            head_start_ends: now + head_start,
            between_rounds: false,
            second_carried_over: false,
        }
    }

    /// The transport that begins.
    pub(crate) fn first(&self) -> SessionTransport {
        self.first.transport
    }

    /// Whether the next round is to be begun.
    pub(crate) fn is_between_rounds(&self) -> bool {
        self.between_rounds
    }

    /// Begins the next round by dialling the first.
    pub(crate) fn next_round(&mut self, now: Instant) -> SessionTransport {
        self.between_rounds = false;
        self.first.state = CandidateState::Dialing;
        self.head_start_ends = now + self.head_start;
        if let Some(second) = &mut self.second {
            self.second_carried_over = second.state != CandidateState::Ended;
            if second.state == CandidateState::Ended {
                second.state = CandidateState::Waiting;
            }
        }
        self.first.transport
    }

    /// When the head start ends, as long as the first one has no answer.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let waits = self.second?.state == CandidateState::Waiting;
        (waits && self.first.state == CandidateState::Dialing).then_some(self.head_start_ends)
    }

    /// The head start is over: the transport to dial beside the first.
    pub(crate) fn start_second(&mut self) -> Option<SessionTransport> {
        let second = self.second.as_mut()?;
        if second.state != CandidateState::Waiting {
            return None;
        }
        second.state = CandidateState::Dialing;
        Some(second.transport)
    }

    /// A handshake is done.
    pub(crate) fn answered(&mut self, transport: SessionTransport) {
        match &mut self.second {
            Some(second) if second.transport == transport => {
                second.state = CandidateState::Answered
            }
            Some(_) | None => self.first.state = CandidateState::Answered,
        }
    }

    /// A transport has failed.
    pub(crate) fn failed(
        &mut self,
        transport: SessionTransport,
        failure: DialFailure,
    ) -> DialAction {
        let decides = match failure {
            DialFailure::RefusedByServer => true,
            // QUIC has no middleboxes that answer in the server's place. TCP has, and they say nothing about UDP.
            DialFailure::HandshakeFailed => transport == SessionTransport::Quic,
            DialFailure::Timeout | DialFailure::Unreachable => false,
        };
        let Some(second) = self.second.as_mut().filter(|_| !decides) else {
            return DialAction::Exhausted;
        };
        if transport == second.transport {
            // One of the round before has its turn in this one still to come.
            let once_more = std::mem::take(&mut self.second_carried_over) && !self.between_rounds;
            second.state = if once_more {
                CandidateState::Waiting
            } else {
                CandidateState::Ended
            };
            return match self.first.state {
                CandidateState::Ended if !self.between_rounds => DialAction::Exhausted,
                CandidateState::Waiting
                | CandidateState::Dialing
                | CandidateState::Answered
                | CandidateState::Ended => DialAction::Wait,
            };
        }
        self.first.state = CandidateState::Ended;
        match second.state {
            CandidateState::Waiting => {
                second.state = CandidateState::Dialing;
                DialAction::Dial(second.transport)
            }
            CandidateState::Dialing => {
                self.between_rounds = true;
                DialAction::RoundFailed
            }
            CandidateState::Answered => DialAction::Wait,
            CandidateState::Ended => DialAction::Exhausted,
        }
    }
}

#[cfg(test)]
mod tests;
