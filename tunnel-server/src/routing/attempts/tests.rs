use tunnel_proto::transport::SessionError;
use tunnel_proto::wire::code::ResetCode;
use tunnel_proto::wire::name::SessionId;

use super::*;
use crate::routing::registry::{QuotaExhausted, StreamQuota, SuspectReason};

/// The requests of a row, in order.
const REPLAYS: [Replay; 3] = [Replay::Never, Replay::Unserved, Replay::Safe];
const STREAM: EndedStream = EndedStream {
    cut: None,
    replay: Replay::Safe,
    has_answer: false,
    is_reused: false,
    is_suspect: false,
};

fn session(number: u64) -> Via {
    Via::Local(SessionId(number))
}

fn server(name: &str) -> Via {
    Via::Replica(name.parse().unwrap())
}

fn letter(next: NextAttempt) -> char {
    match next {
        NextAttempt::Move => 'm',
        NextAttempt::Repeat => 'r',
        NextAttempt::RepeatIfEvicted => 'e',
        NextAttempt::GiveUp => '.',
    }
}

/// Returns a request that has been through `before`, each over a session of its own.
fn attempts(before: &[AttemptEnd<'_>]) -> Attempts {
    let mut attempts = Attempts::default();
    for (number, failure) in (100..).zip(before) {
        let next = attempts.next(Some(&session(number)), failure);
        assert_ne!(next, NextAttempt::GiveUp, "{failure:?}");
    }
    attempts
}

fn refused(code: RefusalCode, replay: Replay) -> AttemptEnd<'static> {
    AttemptEnd::Refused { code, replay }
}

/// A row: the letters for each kind of request, as the first failure, after a refusal, after a loss
/// of the session, after the end of a reused connection, and after an eviction.
fn row(failure: impl Fn(Replay) -> AttemptEnd<'static>) -> [String; 5] {
    let lost = AttemptEnd::Ended(EndedStream {
        cut: Some(StreamCut::SessionLost),
        ..STREAM
    });
    let ended = AttemptEnd::Ended(EndedStream {
        is_reused: true,
        ..STREAM
    });
    let states: [&[AttemptEnd<'_>]; 5] = [
        &[],
        &[refused(RefusalCode::NotHere, Replay::Safe)],
        &[lost],
        &[ended],
        &[refused(RefusalCode::TooManyStreams, Replay::Safe)],
    ];
    states.map(|before| {
        let next = |replay| {
            let mut attempts = attempts(before);
            let excepted = attempts.except().len();
            let next = attempts.next(Some(&session(1)), &failure(replay));
            let is_excepted = attempts.except().contains(&session(1));
            assert_eq!(is_excepted, next == NextAttempt::Move);
            assert_eq!(attempts.except().len() - excepted, usize::from(is_excepted));
            letter(next)
        };
        REPLAYS.into_iter().map(next).collect()
    })
}

/// m: over another session or server. r: over any. e: over any, after an eviction. A dot: the failure
/// is the answer.
#[test]
fn refusals_move_a_request_once_or_from_each_agent_that_stops_if_nothing_of_it_was_served() {
    use RefusalCode::{
        AgentLost, AgentSuspect, AgentTimeout, BadHeader, Draining, Internal, NotHere, Policy,
        TargetRefused, TargetTimeout, TooManyStreams, Unknown, UnknownTarget,
    };
    for (codes, expected) in [
        (&[Draining][..], [".mm"; 5]),
        (
            &[NotHere, AgentSuspect, AgentLost],
            [".mm", "...", "...", ".mm", ".mm"],
        ),
        (&[TooManyStreams], [".ee", ".ee", ".ee", ".ee", "..."]),
        (
            &[
                BadHeader,
                Policy,
                TargetRefused,
                TargetTimeout,
                UnknownTarget,
                Internal,
                AgentTimeout,
                Unknown(250),
            ],
            ["..."; 5],
        ),
    ] {
        for code in codes {
            assert_eq!(row(|replay| refused(*code, replay)), expected, "{code:?}");
        }
    }
}

#[test]
fn two_servers_at_most_are_asked_for_a_node_whose_agents_stop() {
    let mut attempts = Attempts::default();
    let stops = refused(RefusalCode::Draining, Replay::Safe);
    let letters = [session(1), server("s1"), session(2), server("s2")]
        .map(|via| letter(attempts.next(Some(&via), &stops)));
    assert_eq!(letters, ['m', 'm', 'm', '.']);
}

/// The first two columns of facts: the connection is reused, and the session is suspect.
#[test]
fn streams_that_end_without_an_answer_are_replayed_once_if_that_is_safe() {
    let [reset, stalled, session_lost] = [
        ResetCode::PeerCut,
        ResetCode::ReaderStalled,
        ResetCode::SessionLost,
    ];
    let never = ["..."; 5];
    let moves = ["..m", "..m", "...", "...", "..m"];
    let repeats = [".rr", ".rr", "...", "...", ".rr"];
    let (no, yes) = (false, true);
    for (is_reused, is_suspect, cut, expected) in [
        (no, no, Some(StreamCut::SessionLost), moves),
        (no, yes, Some(StreamCut::SessionLost), moves),
        (yes, no, Some(StreamCut::SessionLost), moves),
        (no, no, Some(StreamCut::ReplyTimeout), never),
        (no, yes, Some(StreamCut::ReplyTimeout), moves),
        (yes, no, Some(StreamCut::ReplyTimeout), never),
        (yes, yes, Some(StreamCut::ReplyTimeout), moves),
        (no, yes, Some(StreamCut::Reset(reset)), never),
        (no, yes, Some(StreamCut::Reset(session_lost)), moves),
        (yes, no, Some(StreamCut::Reset(session_lost)), moves),
        (no, no, Some(StreamCut::Stopped(session_lost)), moves),
        (yes, no, Some(StreamCut::Reset(reset)), repeats),
        (yes, no, Some(StreamCut::Reset(stalled)), never),
        (no, yes, Some(StreamCut::Stopped(reset)), never),
        (yes, no, Some(StreamCut::Stopped(reset)), repeats),
        (yes, no, Some(StreamCut::Stopped(stalled)), never),
        (no, yes, Some(StreamCut::NoReply), never),
        (yes, yes, Some(StreamCut::NoReply), never),
        (no, yes, Some(StreamCut::ReaderStalled), never),
        (yes, yes, Some(StreamCut::ReaderStalled), never),
        (no, yes, None, never),
        (yes, no, None, repeats),
    ] {
        for (has_answer, expected) in [(false, expected), (true, never)] {
            let found = row(|replay| {
                AttemptEnd::Ended(EndedStream {
                    cut,
                    replay,
                    has_answer,
                    is_reused,
                    is_suspect,
                })
            });
            assert_eq!(
                found, expected,
                "{cut:?}, reused {is_reused}, suspect {is_suspect}, answered {has_answer}"
            );
        }
    }
}

/// The columns: over a session, over the first other server, over the second one, and with nothing
/// to ask.
#[test]
fn streams_that_are_not_opened_move_unless_time_or_a_limit_is_used_up() {
    let quota = QuotaExhausted {
        quota: StreamQuota::Agent,
        streams: 1,
    };
    let suspect = OpenError::Suspect(SuspectReason::PeerHearsNothing);
    for (error, expected) in [
        (OpenError::NoAgent, "...."),
        (suspect, "...."),
        (OpenError::TooManyStreams(quota), "...."),
        (OpenError::PeerStreams(1), "...."),
        (OpenError::BufferPoolFull(1), "mm.."),
        (OpenError::Draining, "m..."),
        (OpenError::Lost(SessionError::NotOpening), "mm.."),
        (OpenError::Timeout, ".m.."),
    ] {
        let mut attempts = Attempts::default();
        let asked = [Some(session(1)), Some(server("b")), Some(server("c")), None];
        let next =
            |via: &Option<Via>| letter(attempts.next(via.as_ref(), &AttemptEnd::NotOpened(&error)));
        let found: String = asked.iter().map(next).collect();
        assert_eq!(found, expected, "{error:?}");
    }
}

#[test]
fn sessions_that_fail_one_after_another_end_the_attempts() {
    let error = OpenError::Lost(SessionError::NotOpening);
    for end in [
        AttemptEnd::NotOpened(&error),
        refused(RefusalCode::Draining, Replay::Unserved),
    ] {
        let mut attempts = Attempts::default();
        let mut numbers = 0..100;
        let last = numbers
            .find(|number| attempts.next(Some(&session(*number)), &end) == NextAttempt::GiveUp);
        assert_eq!(last, Some(EXCEPT_MAX as u64));
    }
}
