//! Happy eyeballs (RFC 8305) over two transports: which to dial when. A pure state machine.
//!
//! ```text
//! first:  |--5 s--|..|--5 s--|....      a fresh dial asks at once, while an old one's next try may be seconds away
//! second: ---|--5 s--||--5 s--|...      so a round does not wait for the end of the second
//! ```

use std::time::Duration;

use tokio::time::Instant;

use super::transport_policy::SessionTransport;

/// The reason why a dial or its admission did not give a ready session, as far as happy eyeballs
/// needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DialFailure {
    /// No connection: refused, unreachable, no address, or lost on the path.
    Unreachable,
    /// No answer arrived in time.
    Timeout,
    /// A peer answered, and TLS or the transport failed: an alert, a wrong certificate, a
    /// middlebox.
    HandshakeFailed,
    RefusedByServer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DialAction {
    Dial(SessionTransport),
    /// Wait for a dial in progress.
    Wait,
    /// The round is over: call [`HappyEyeballs::next_round`] after a pause. Dials in progress may
    /// continue.
    RoundFailed,
    /// No transport is left to try.
    Exhausted,
}

/// At most two transports that are dialed for one session. The second starts with a delay. Rounds
/// repeat while both are silent.
#[derive(Debug)]
pub(crate) struct HappyEyeballs {
    first: Candidate,
    second: Option<Candidate>,
    head_start: Duration,
    head_start_ends: Instant,
    /// Whether the pause between two rounds is in progress.
    between_rounds: bool,
    /// Whether the second still runs since the previous round.
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
    /// The server answered, and the dial waits for Welcome.
    Answered,
    Ended,
}

impl HappyEyeballs {
    /// Creates a state machine whose first action is to dial the first transport.
    pub(crate) fn new(
        first: SessionTransport,
        second: Option<SessionTransport>,
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

    pub(crate) fn first(&self) -> SessionTransport {
        self.first.transport
    }

    /// Returns whether the next round has yet to begin.
    pub(crate) fn is_between_rounds(&self) -> bool {
        self.between_rounds
    }

    /// Begins the next round by dialing the first transport.
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

    /// Returns the end of the head start while the first transport has no answer.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let waits = self.second?.state == CandidateState::Waiting;
        (waits && self.first.state == CandidateState::Dialing).then_some(self.head_start_ends)
    }

    /// Ends the head start and returns the transport to dial in parallel.
    pub(crate) fn start_second(&mut self) -> Option<SessionTransport> {
        let second = self.second.as_mut()?;
        if second.state != CandidateState::Waiting {
            return None;
        }
        second.state = CandidateState::Dialing;
        Some(second.transport)
    }

    pub(crate) fn answered(&mut self, transport: SessionTransport) {
        match &mut self.second {
            Some(second) if second.transport == transport => {
                second.state = CandidateState::Answered
            }
            Some(_) | None => self.first.state = CandidateState::Answered,
        }
    }

    pub(crate) fn failed(
        &mut self,
        transport: SessionTransport,
        failure: DialFailure,
    ) -> DialAction {
        let decides = match failure {
            DialFailure::RefusedByServer => true,
            // With QUIC no middlebox answers in place of the server. With TCP one may, and its
            // answer reveals nothing about UDP.
            DialFailure::HandshakeFailed => transport == SessionTransport::Quic,
            DialFailure::Timeout | DialFailure::Unreachable => false,
        };
        let Some(second) = self.second.as_mut().filter(|_| !decides) else {
            return DialAction::Exhausted;
        };
        if transport == second.transport {
            // A dial of the previous round has its turn in this round still to come.
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
