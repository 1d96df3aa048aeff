//! Which failure leads to another attempt of a request to a node, and what is not asked again. Pure.

use tunnel_proto::transport::StreamCut;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_routing::directory::HOLDERS_TRIED_MAX;

use crate::routing::registry::OpenError;
use crate::routing::via::Via;

/// The attempts of one request: each uses one session of this server, or one other server.
#[derive(Debug, Default)]
pub struct Attempts {
    /// What has failed and is not asked again.
    except: Vec<Via>,
    /// Servers over which no stream could be opened, or which hold an agent that stops.
    failed_servers: usize,
    /// The request has left a session or a server that was lost, or refused it and does not stop.
    has_moved: bool,
    /// An idle stream was evicted for the request.
    has_evicted: bool,
    resent: Option<ResendCause>,
}

/// Why a request was sent a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResendCause {
    /// The connection had carried other requests before, and ended.
    Reused,
    /// The session was lost.
    SessionLost,
}

/// How an attempt failed.
#[derive(Debug, Clone, Copy)]
pub enum AttemptEnd<'a> {
    /// No stream was opened, so nothing was sent.
    NotOpened(&'a OpenError),
    /// The agent, or the server that forwards the stream, refused it.
    Refused { code: RefusalCode, replay: Replay },
    /// The stream ended before a response.
    Ended(EndedStream),
}

/// A stream that ended before a response.
#[derive(Debug, Clone, Copy, Default)]
pub struct EndedStream {
    /// How the stream was cut, if it was.
    pub cut: Option<StreamCut>,
    pub replay: Replay,
    /// A byte of an answer arrived.
    pub has_answer: bool,
    /// The connection to the target had carried other requests before.
    pub is_reused: bool,
    /// The session is suspect or has ended.
    pub is_suspect: bool,
}

/// Whether a request can be sent a second time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Replay {
    /// A part of a body, or of a byte stream, may have been sent.
    #[default]
    Never,
    /// Nothing, or a head alone, was sent: again if the target has not served it.
    Unserved,
    /// A head alone was sent, and the target may serve it twice.
    Safe,
}

/// What follows a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAttempt {
    /// Another attempt, without what failed.
    Move,
    /// Another attempt over any session or server.
    Repeat,
    /// The same if an idle stream over the server that refused this one can be evicted for it.
    RepeatIfEvicted,
    GiveUp,
}

impl Attempts {
    /// Returns what the next attempt leaves out.
    pub fn except(&self) -> &[Via] {
        &self.except
    }

    /// Returns why the request is sent a second time, if it is.
    pub fn resent(&self) -> Option<ResendCause> {
        self.resent
    }

    /// Returns what follows a failure. `via` is what carried the stream or should have, and `None` if
    /// nothing was left to ask. After its stream was opened, a request leaves each session and
    /// server whose agent stops, and has at most one move after another refusal, one repetition after
    /// an eviction, and one replay after a loss or an end: no target serves it more than twice.
    pub fn next(&mut self, via: Option<&Via>, end: &AttemptEnd<'_>) -> NextAttempt {
        let next = match end {
            AttemptEnd::NotOpened(error) => self.after_open(via, error),
            AttemptEnd::Refused { code, replay } => self.after_refusal(via, *code, *replay),
            AttemptEnd::Ended(end) => self.after_end(end),
        };
        if next == NextAttempt::Move {
            self.except.extend(via.cloned());
        }
        next
    }

    fn after_open(&mut self, via: Option<&Via>, error: &OpenError) -> NextAttempt {
        let is_last = self.except.len() >= EXCEPT_MAX;
        match (via, error) {
            (
                Some(Via::Local(_)),
                OpenError::Draining | OpenError::Lost(_) | OpenError::BufferPoolFull(_),
            ) if !is_last => NextAttempt::Move,
            (
                Some(Via::Replica(_)),
                OpenError::Lost(_) | OpenError::Timeout | OpenError::BufferPoolFull(_),
            ) => {
                if self.may_ask_next_server() {
                    NextAttempt::Move
                } else {
                    NextAttempt::GiveUp
                }
            }
            // The limits are those of the node. A session that does not open a stream in time has used
            // up the time for it.
            (Some(Via::Local(_) | Via::Replica(_)) | None, _) => NextAttempt::GiveUp,
        }
    }

    /// Counts a server that failed. Returns whether another one may be asked.
    fn may_ask_next_server(&mut self) -> bool {
        self.failed_servers += 1;
        self.failed_servers < HOLDERS_TRIED_MAX
    }

    fn after_refusal(
        &mut self,
        via: Option<&Via>,
        code: RefusalCode,
        replay: Replay,
    ) -> NextAttempt {
        if replay == Replay::Never {
            return NextAttempt::GiveUp;
        }
        if code == RefusalCode::TooManyStreams && !self.has_evicted {
            self.has_evicted = true;
            return NextAttempt::RepeatIfEvicted;
        }
        if !is_retryable(code) {
            return NextAttempt::GiveUp;
        }
        let can_move = match (code, via) {
            // All sessions of an agent that stops refuse, at each server.
            (RefusalCode::Draining, Some(Via::Replica(_))) => self.may_ask_next_server(),
            (RefusalCode::Draining, Some(Via::Local(_)) | None) => self.except.len() < EXCEPT_MAX,
            (_, _) => !std::mem::replace(&mut self.has_moved, true),
        };
        if can_move {
            NextAttempt::Move
        } else {
            NextAttempt::GiveUp
        }
    }

    fn after_end(&mut self, end: &EndedStream) -> NextAttempt {
        if end.has_answer || self.resent.is_some() {
            return NextAttempt::GiveUp;
        }
        self.resent = end.resend_cause();
        match self.resent {
            Some(ResendCause::SessionLost) => {
                self.has_moved = true;
                NextAttempt::Move
            }
            Some(ResendCause::Reused) => NextAttempt::Repeat,
            None => NextAttempt::GiveUp,
        }
    }
}

/// Sessions and servers that one request leaves out, at most.
const EXCEPT_MAX: usize = 8;

impl EndedStream {
    /// Returns why the request may be sent a second time, if it may.
    fn resend_cause(&self) -> Option<ResendCause> {
        let cause = match self.cut {
            Some(cut) if cut.is_session_lost() => ResendCause::SessionLost,
            // A live session would have delivered a reply, so the agent or its target is slow.
            Some(StreamCut::ReplyTimeout) if self.is_suspect => ResendCause::SessionLost,
            Some(cut @ (StreamCut::Reset(_) | StreamCut::Stopped(_))) if !cut.is_for_memory() => {
                ResendCause::Reused
            }
            None => ResendCause::Reused,
            Some(
                StreamCut::ReplyTimeout
                | StreamCut::Reset(_)
                | StreamCut::Stopped(_)
                | StreamCut::NoReply
                | StreamCut::SessionLost
                | StreamCut::ReaderStalled,
            ) => return None,
        };
        let can_resend = match cause {
            ResendCause::SessionLost => self.replay == Replay::Safe,
            // Servers close idle connections (RFC 9112, section 9.3.1).
            ResendCause::Reused => self.is_reused && self.replay != Replay::Never,
        };
        can_resend.then_some(cause)
    }
}

/// Returns whether another session or server may take a stream that was refused with `code`: nothing
/// was sent to an agent, or the agent is draining.
fn is_retryable(code: RefusalCode) -> bool {
    match code {
        RefusalCode::Draining
        | RefusalCode::NotHere
        | RefusalCode::AgentSuspect
        | RefusalCode::AgentLost => true,
        RefusalCode::BadHeader
        | RefusalCode::Policy
        | RefusalCode::TargetRefused
        | RefusalCode::TargetTimeout
        | RefusalCode::TooManyStreams
        | RefusalCode::UnknownTarget
        | RefusalCode::Internal
        | RefusalCode::AgentTimeout
        | RefusalCode::Unknown(_) => false,
    }
}

#[cfg(test)]
mod tests;
