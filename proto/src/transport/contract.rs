//! The suite that every transport must pass. It defines the semantics of open, refuse, half-close,
//! reset, drop and close.
//!
//! `contract!` runs every rule on a transport, in both directions: the server's end opens streams,
//! and the agent's end does. The transport provides a function that creates two connected sessions.
//! The rules about streams also hold if another server forwards them.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf, duplex};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{ClosedBy, IncomingStream, Session, SessionError, Stream, StreamCut, find_cause};
use crate::calibration::scaled;
use crate::relay::{RelayEnd, Socket, relay};
use crate::wire::code::{CloseCode, RefusalCode, ResetCode};
use crate::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use crate::wire::name::Port;

mod pairs;
mod stalls;

use stalls::{
    five_hundred_stalled_readers_stop_nobody, one_byte_frames_wait_for_a_stalled_reader,
    sixty_four_stalled_readers_stop_nobody, source_of_unread_answers_leaves_others_served,
    source_of_unread_requests_leaves_others_served,
};

/// Two connected sessions, and the values that must live as long as they do. The opener is the
/// server's end unless the pair is reversed.
struct Pair {
    opener: Arc<dyn Session>,
    peer: Arc<dyn Session>,
    _keep: Box<dyn Send>,
}

/// The windows, stream limit and buffer pools of a pair.
#[derive(Clone, Copy)]
struct Windows {
    stream_window: u32,
    streams: u32,
    /// Bytes of the pool of each end.
    pool: u64,
}

/// Room for all streams that stall in a test.
const LARGE_POOL: u64 = 8 << 30;

/// The defaults of the server.
const DEFAULT: Windows = Windows {
    stream_window: 2 << 20,
    streams: 2000,
    pool: LARGE_POOL,
};
/// The defaults of the server with little memory.
const SHORT: Windows = Windows {
    pool: 32 << 20,
    ..DEFAULT
};
/// Narrow windows, for many streams that may all stall.
const NARROW: Windows = Windows {
    stream_window: 256 << 10,
    streams: 1024,
    pool: LARGE_POOL,
};

/// A writer that waits for this time waits for its reader.
const FULL_AFTER: Duration = Duration::from_millis(300);
const MIB: usize = 1 << 20;

fn header() -> StreamHeader {
    StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())))
}

/// Time for each step of a test.
fn test_timeout() -> Duration {
    scaled(Duration::from_secs(30))
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(test_timeout(), future).await.expect("timed out")
}

impl Pair {
    /// Returns the pair with the agent's end as the opener.
    fn reversed(self) -> Self {
        self.opener.set_max_concurrent_streams(DEFAULT.streams);
        Self {
            opener: self.peer,
            peer: self.opener,
            ..self
        }
    }

    async fn open(&self) -> Stream {
        within(self.opener.open(&header(), test_timeout()))
            .await
            .unwrap()
    }

    async fn accept(&self) -> Stream {
        let incoming = within(self.peer.accept()).await.unwrap();
        let (got, stream) = incoming
            .header(Instant::now() + test_timeout())
            .await
            .unwrap();
        assert_eq!(got, header());
        stream
    }

    /// Opens a stream from opener to peer and accepts it.
    async fn stream(&self) -> (Stream, Stream) {
        let mut opened = self.open().await;
        let mut accepted = self.accept().await;
        accepted.accept("127.0.0.1:9100").await.unwrap();
        assert_eq!(within(opened.accepted()).await.unwrap(), "127.0.0.1:9100");
        (opened, accepted)
    }
}

async fn read_all(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut got = Vec::new();
    within(stream.read_to_end(&mut got)).await.map(|_| got)
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..251u8).cycle().take(bytes).collect()
}

async fn bytes_and_half_closes_pass_both_ways(pair: Pair) {
    for (question, answer) in [(0, 3 * MIB), (3 * MIB, 0), (MIB, 3 * MIB)] {
        let (mut opened, mut accepted) = pair.stream().await;
        let (response, request) = tokio::join!(
            async {
                opened.write_all(&pattern(question)).await.unwrap();
                opened.shutdown().await.unwrap();
                read_all(&mut opened).await.unwrap()
            },
            async {
                let got = read_all(&mut accepted).await.unwrap();
                accepted.write_all(&pattern(answer)).await.unwrap();
                accepted.shutdown().await.unwrap();
                got
            }
        );
        assert!(response == pattern(answer) && request == pattern(question));
        assert_eq!(opened.bytes().read(), (answer as u64, question as u64));
    }
}

async fn relayed_bytes_and_half_closes_pass_both_ways(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    let (mut caller, mut caller_end) = duplex(MIB);
    let (mut target, mut target_end) = duplex(MIB);
    let (mut left, mut right) = (Socket(&mut caller_end), Socket(&mut target_end));
    let (near, far, answer, question) = tokio::join!(
        within(relay(&mut left, &mut opened)),
        within(relay(&mut accepted, &mut right)),
        async {
            caller.write_all(&pattern(3 * MIB)).await.unwrap();
            caller.shutdown().await.unwrap();
            let mut answer = Vec::new();
            within(caller.read_to_end(&mut answer)).await.unwrap();
            answer
        },
        async {
            let mut question = Vec::new();
            within(target.read_to_end(&mut question)).await.unwrap();
            target.write_all(&pattern(3 * MIB + 7)).await.unwrap();
            target.shutdown().await.unwrap();
            question
        }
    );
    assert!(answer == pattern(3 * MIB + 7) && question == pattern(3 * MIB));
    for outcome in [near, far] {
        assert!(matches!(outcome.end, RelayEnd::Clean), "{outcome:?}");
        let counts = (outcome.left_to_right, outcome.right_to_left);
        assert_eq!(counts, (question.len() as u64, answer.len() as u64));
    }
    let (received, sent) = (answer.len() as u64, question.len() as u64);
    assert_eq!(opened.bytes().read(), (received, sent));
    assert_eq!(accepted.bytes().read(), (sent, received));
}

async fn data_may_follow_the_header_before_the_reply(pair: Pair) {
    let mut opened = pair.open().await;
    opened.write_all(b"early").await.unwrap();
    let mut accepted = pair.accept().await;
    let mut got = [0; 5];
    within(accepted.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"early");
    accepted.accept("").await.unwrap();
    accepted.write_all(b"answer").await.unwrap();
    accepted.shutdown().await.unwrap();
    assert_eq!(read_all(&mut opened).await.unwrap(), b"answer");
}

async fn refusal_arrives_with_its_detail_after_optimistic_data(pair: Pair) {
    for _ in 0..20 {
        let mut opened = pair.open().await;
        // The window of a session without streams may be less than this.
        let data = pattern(64 << 10);
        let (written, accepted) = tokio::join!(opened.write_all(&data), pair.accept());
        written.unwrap();
        accepted
            .refuse(RefusalCode::TargetRefused, "no such port")
            .await;
        let error = read_all(&mut opened).await.unwrap_err();
        let refusal = find_cause::<Refusal>(&error).unwrap();
        assert_eq!(
            (refusal.code, refusal.detail.as_str()),
            (RefusalCode::TargetRefused, "no such port")
        );
        // A writer that receives the refusal first must get the same reason.
        let mut opened = pair.open().await;
        pair.accept()
            .await
            .refuse(RefusalCode::Policy, "not allowed")
            .await;
        let error = within(async {
            loop {
                if let Err(error) = opened.write_all(&pattern(4096)).await {
                    return error;
                }
            }
        })
        .await;
        assert_eq!(
            find_cause::<Refusal>(&error).unwrap().code,
            RefusalCode::Policy
        );
    }
}

async fn dropped_stream_is_a_cut_and_never_a_clean_end(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    accepted.write_all(&pattern(1000)).await.unwrap();
    drop(accepted);
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(
        find_cause::<StreamCut>(&error),
        Some(&StreamCut::Reset(ResetCode::Dropped))
    );

    let (mut opened, mut accepted) = pair.stream().await;
    opened.write_all(&pattern(1000)).await.unwrap();
    drop(opened);
    assert!(read_all(&mut accepted).await.is_err());
}

/// The reader begins after the cut.
async fn cut_stays_behind_the_bytes_before_it(pair: Pair) {
    for length in [1, 200_003] {
        for is_opener in [false, true] {
            let (opened, accepted) = pair.stream().await;
            let (mut reader, mut writer) = if is_opener {
                (accepted, opened)
            } else {
                (opened, accepted)
            };
            let sent = pattern(length);
            writer.write_all(&sent).await.unwrap();
            writer.cut_behind(ResetCode::PeerCut);
            drop(writer);
            within(poll_fn(|cx| reader.poll_cut(cx))).await;
            let mut got = Vec::new();
            let error = within(reader.read_to_end(&mut got)).await.unwrap_err();
            assert!(got == sent, "{} of {length} bytes", got.len());
            let cut = find_cause::<StreamCut>(&error).unwrap();
            assert!(matches!(cut, StreamCut::Reset(_)), "{cut}");
        }
    }
    within(async {
        while pair.opener.stats().streams + pair.peer.stats().streams > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// The ends of a stream see each other's end behind a half that has ended.
async fn end_of_a_peer_is_seen_behind_its_half_close(pair: Pair) {
    for (is_cut, expected) in [(true, ResetCode::PeerCut), (false, ResetCode::Dropped)] {
        for is_opener in [false, true] {
            let (opened, accepted) = pair.stream().await;
            let (mut other, mut ender) = if is_opener {
                (accepted, opened)
            } else {
                (opened, accepted)
            };
            let ending = async {
                ender.write_all(&pattern(1000)).await.unwrap();
                ender.shutdown().await.unwrap();
                ender
            };
            let (mut ender, got) = tokio::join!(within(ending), read_all(&mut other));
            assert!(got.unwrap() == pattern(1000));
            poll_fn(|cx| {
                assert!(other.poll_gone(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            if is_cut {
                ender.cut_behind(ResetCode::PeerCut);
            }
            drop(ender);
            let error = within(poll_fn(|cx| other.poll_gone(cx))).await;
            let cut = find_cause::<StreamCut>(&error).unwrap();
            assert_eq!(cut, &StreamCut::Stopped(expected));
            assert_eq!(cut.is_of_both_halves(), is_cut);
        }
    }
}

/// A question about a cut takes the place of the waker of a read that waits, and a read that is asked
/// again waits by its own waker.
async fn reader_is_woken_after_questions_about_a_cut(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    let mut byte = [0];
    for round in 0..3 {
        {
            let mut reading = pin!(opened.read(&mut byte));
            let mut nobody = Context::from_waker(Waker::noop());
            assert!(reading.as_mut().poll(&mut nobody).is_pending());
        }
        poll_fn(|cx| {
            if round > 0 {
                let mut nobody = Context::from_waker(Waker::noop());
                assert!(opened.poll_cut(&mut nobody).is_pending());
            }
            // Twice: the second poll finds the waker of the first.
            for _ in 0..2 {
                let mut reading = pin!(opened.read(&mut byte));
                assert!(reading.as_mut().poll(cx).is_pending());
            }
            Poll::Ready(())
        })
        .await;
        let writing = async { accepted.write_all(b"x").await.unwrap() };
        let reading = poll_fn(|cx| {
            let mut buffer = ReadBuf::new(&mut byte);
            let read = Pin::new(&mut opened).poll_read(cx, &mut buffer);
            read.map_ok(|()| buffer.filled().len())
        });
        let (read, ()) = within(async { tokio::join!(reading, writing) }).await;
        assert_eq!((read.unwrap(), byte), (1, *b"x"));
    }
    {
        let mut reading = pin!(opened.read(&mut byte));
        poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx).is_pending())).await;
    }
    drop(accepted);
    let error = within(opened.read(&mut byte)).await.unwrap_err();
    assert!(find_cause::<StreamCut>(&error).is_some());
}

/// Nobody reads a stream whose target is being dialed.
async fn end_of_an_opener_is_seen_before_the_reply(pair: Pair) {
    for (length, is_half_closed) in [(0, false), (0, true), (1000, false), (1000, true)] {
        let (mut opened, mut dialing) = (pair.open().await, pair.accept().await);
        opened.write_all(&pattern(length)).await.unwrap();
        if is_half_closed {
            within(opened.shutdown()).await.unwrap();
        }
        // What was sent before has arrived.
        let _later = pair.stream().await;
        poll_fn(|cx| {
            assert!(dialing.poll_opener_gone(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(opened);
        let error = if is_half_closed {
            within(poll_fn(|cx| dialing.poll_opener_gone(cx))).await
        } else {
            within(poll_fn(|cx| dialing.poll_opener_cut(cx))).await
        };
        let cut = find_cause::<StreamCut>(&error).unwrap();
        let (StreamCut::Reset(code) | StreamCut::Stopped(code)) = cut else {
            panic!("{cut}");
        };
        assert_eq!(*code, ResetCode::Dropped);
    }
}

async fn reset_cuts_both_directions_with_its_code(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    accepted.cut_behind(ResetCode::PeerCut);
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(
        find_cause::<StreamCut>(&error),
        Some(&StreamCut::Reset(ResetCode::PeerCut))
    );
    let error = within(async {
        loop {
            if let Err(error) = opened.write_all(&pattern(4096)).await {
                return error;
            }
        }
    })
    .await;
    assert!(
        matches!(find_cause::<StreamCut>(&error), Some(StreamCut::Stopped(_))),
        "{error:?}"
    );
}

async fn finished_half_survives_the_drop_of_its_stream(pair: Pair) {
    for _ in 0..20 {
        let (mut opened, mut accepted) = pair.stream().await;
        let sent = pattern(MIB);
        let (got, ()) = tokio::join!(read_all(&mut opened), async {
            accepted.write_all(&sent).await.unwrap();
            accepted.shutdown().await.unwrap();
            drop(accepted);
        });
        assert!(got.unwrap() == sent);
    }
}

async fn reply_that_does_not_come_is_given_up(pair: Pair) {
    let mut silent = pair
        .opener
        .open(&header(), Duration::from_millis(50))
        .await
        .unwrap();
    let _accepted = pair.accept().await;
    let error = within(silent.accepted()).await.unwrap_err();
    assert_eq!(
        find_cause::<StreamCut>(&error),
        Some(&StreamCut::ReplyTimeout)
    );
}

async fn many_streams_run_at_once(pair: Pair) {
    pair.peer.set_max_concurrent_streams(2000);
    let peer = pair.peer.clone();
    let mut echoes = JoinSet::new();
    let server = async {
        for _ in 0..1000 {
            let incoming = within(peer.accept()).await.unwrap();
            echoes.spawn(async move {
                let (_, mut stream) = incoming
                    .header(Instant::now() + test_timeout())
                    .await
                    .unwrap();
                stream.accept("").await.unwrap();
                let got = read_all(&mut stream).await.unwrap();
                stream.write_all(&got).await.unwrap();
                within(stream.shutdown()).await.unwrap();
            });
        }
    };
    let mut callers = JoinSet::new();
    for index in 0..1000usize {
        let opener = pair.opener.clone();
        callers.spawn(async move {
            let mut stream = within(opener.open(&header(), test_timeout()))
                .await
                .unwrap();
            let sent = pattern(index % 5000);
            stream.write_all(&sent).await.unwrap();
            within(stream.shutdown()).await.unwrap();
            assert!(read_all(&mut stream).await.unwrap() == sent);
        });
    }
    tokio::join!(server, async {
        while callers.join_next().await.transpose().unwrap().is_some() {}
    });
    while echoes.join_next().await.transpose().unwrap().is_some() {}
    // The last streams are no longer counted after their tasks have ended.
    assert_eq!(pair.opener.stats().streams, 0);
}

async fn answer_if_whole(incoming: IncomingStream) -> bool {
    let Ok((_, mut stream)) = incoming.header(Instant::now() + test_timeout()).await else {
        return false;
    };
    if stream.accept("").await.is_err() || stream.write_all(b"still here").await.is_err() {
        return false;
    }
    let whole = read_all(&mut stream).await.is_ok_and(|got| got == b"whole");
    if whole {
        within(stream.shutdown()).await.unwrap();
    }
    whole
}

async fn burst_of_resets_leaves_the_session_usable(pair: Pair) {
    pair.peer.set_max_concurrent_streams(2000);
    let peer = pair.peer.clone();
    // A stream that was reset is either never accepted or is cut. Only the last stream is complete.
    let served = async move {
        let mut streams = JoinSet::new();
        loop {
            tokio::select! {
                incoming = peer.accept() => {
                    streams.spawn(answer_if_whole(incoming.unwrap()));
                }
                Some(whole) = streams.join_next() => if whole.unwrap() {
                    return;
                }
            }
        }
    };
    let opened = async {
        for burst in 0..2 {
            let streams: Vec<_> =
                futures_util::future::join_all((0..1000).map(|_| pair.open())).await;
            drop(streams);
            for _ in 0..1000 * burst {
                drop(pair.open().await);
            }
        }
        let mut last = pair.open().await;
        last.write_all(b"whole").await.unwrap();
        within(last.shutdown()).await.unwrap();
        assert_eq!(read_all(&mut last).await.unwrap(), b"still here");
    };
    within(async { tokio::join!(served, opened) }).await;
}

async fn probe_is_acknowledged(pair: Pair) {
    let before = pair.opener.stats().acknowledged;
    pair.opener.probe();
    within(async {
        while pair.opener.stats().acknowledged == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

async fn close_delivers_what_was_sent_and_its_reason(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    let sent = pattern(MIB);
    let reader = async {
        let got = read_all(&mut opened).await.unwrap();
        (got, within(pair.opener.closed()).await)
    };
    let writer = async {
        accepted.write_all(&sent).await.unwrap();
        accepted.shutdown().await.unwrap();
        drop(accepted);
        pair.peer.close(CloseCode::Draining, "going away").await;
    };
    let ((got, reason), ()) = tokio::join!(reader, writer);
    assert!(got == sent);
    assert_eq!(
        (reason.by, reason.code, reason.reason.as_str()),
        (ClosedBy::Peer, CloseCode::Draining, "going away")
    );
    assert_eq!(within(pair.peer.closed()).await.by, ClosedBy::Local);
    assert!(matches!(
        pair.opener.open(&header(), test_timeout()).await,
        Err(SessionError::Closed(_))
    ));
}

async fn close_cuts_open_streams(pair: Pair) {
    let (mut opened, _accepted) = pair.stream().await;
    pair.peer.close(CloseCode::Normal, "").await;
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(
        find_cause::<StreamCut>(&error),
        Some(&StreamCut::SessionLost)
    );
}

/// The readers were asked for the cut before they have read everything.
async fn bytes_before_the_loss_of_a_session_are_read_behind_its_cut(pair: Pair) {
    let ((mut open, mut writer), (mut complete, mut finished)) =
        (pair.stream().await, pair.stream().await);
    writer.write_all(b"ab").await.unwrap();
    finished.write_all(&pattern(1000)).await.unwrap();
    within(finished.shutdown()).await.unwrap();
    for reader in [&mut open, &mut complete] {
        within(reader.read_u8()).await.unwrap();
    }
    pair.opener.close(CloseCode::Dead, "no answer").await;
    within(poll_fn(|cx| open.poll_cut(cx))).await;
    let _seen = poll_fn(|cx| Poll::Ready(complete.poll_cut(cx))).await;
    let mut got = Vec::new();
    let error = within(open.read_to_end(&mut got)).await.unwrap_err();
    assert_eq!(got, b"b");
    assert_eq!(find_cause(&error), Some(&StreamCut::SessionLost));
    let mut got = vec![0; 999];
    within(complete.read_exact(&mut got)).await.unwrap();
    assert!(got == pattern(1000)[1..]);
}

/// The reader and the writer wait when their own end gives up a peer that may be silent.
async fn close_cuts_waiting_streams_of_its_own_end(pair: Pair) {
    let ((mut reader, _sends_nothing), (mut writer, _reads_nothing)) =
        (pair.stream().await, pair.stream().await);
    let (piece, full_after) = (pattern(64 << 10), scaled(FULL_AFTER));
    while let Ok(written) = timeout(full_after, writer.write(&piece)).await {
        written.unwrap();
    }
    let (read, written, ()) = within(async {
        tokio::join!(
            reader.read_u8(),
            writer.write_all(&piece),
            pair.opener.close(CloseCode::Dead, "no answer")
        )
    })
    .await;
    for cut in [read.unwrap_err(), written.unwrap_err()] {
        assert_eq!(find_cause(&cut), Some(&StreamCut::SessionLost), "{cut}");
    }
}

async fn every_close_code_arrives<F: Future<Output = Pair>>(make: impl Fn() -> F) {
    let codes = (0..=10).chain([4000]).map(CloseCode::from_number);
    for (index, code) in codes.enumerate() {
        let pair = make().await;
        let (opener, peer) = (&pair.opener, &pair.peer);
        let (closer, other) = if index % 2 == 0 {
            (opener, peer)
        } else {
            (peer, opener)
        };
        within(closer.close(code, "why not")).await;
        let reason = within(other.closed()).await;
        assert_eq!(
            (reason.by, reason.code, reason.reason.as_str()),
            (ClosedBy::Peer, code, "why not")
        );
    }
}

async fn session_that_stopped_opening_keeps_its_streams(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    pair.opener.stop_opening();
    assert!(matches!(
        pair.opener.open(&header(), test_timeout()).await,
        Err(SessionError::NotOpening)
    ));
    accepted.write_all(b"on").await.unwrap();
    accepted.shutdown().await.unwrap();
    assert_eq!(read_all(&mut opened).await.unwrap(), b"on");
}

macro_rules! contract {
    ($transport:ident, $pair:path) => {
        mod $transport {
            contract!(@direction server_opens, $pair, std::convert::identity);
            contract!(
                @direction agent_opens, $pair, super::super::Pair::reversed,
                #[ignore = "takes 20 s; make test-all runs it"]
            );
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn every_close_code_arrives() {
                super::every_close_code_arrives(|| $pair(super::DEFAULT)).await;
            }
        }
    };
    (@forwarded $transport:ident, $pair:path) => {
        mod $transport {
            mod server_opens {
                contract!(@rules $pair, std::convert::identity, super::super::DEFAULT;
                    bytes_and_half_closes_pass_both_ways,
                    relayed_bytes_and_half_closes_pass_both_ways,
                    data_may_follow_the_header_before_the_reply,
                    refusal_arrives_with_its_detail_after_optimistic_data,
                    dropped_stream_is_a_cut_and_never_a_clean_end,
                    cut_stays_behind_the_bytes_before_it,
                    finished_half_survives_the_drop_of_its_stream,
                    reply_that_does_not_come_is_given_up,
                    many_streams_run_at_once,
                    burst_of_resets_leaves_the_session_usable,
                );
                contract!(@rules $pair, std::convert::identity, super::super::NARROW;
                    sixty_four_stalled_readers_stop_nobody,
                );
            }
        }
    };
    (@direction $direction:ident, $pair:path, $directed:path $(, #[$slow:meta])?) => {
        mod $direction {
            contract!(@rules $pair, $directed, super::super::DEFAULT;
                bytes_and_half_closes_pass_both_ways,
                relayed_bytes_and_half_closes_pass_both_ways,
                data_may_follow_the_header_before_the_reply,
                refusal_arrives_with_its_detail_after_optimistic_data,
                dropped_stream_is_a_cut_and_never_a_clean_end,
                cut_stays_behind_the_bytes_before_it,
                end_of_a_peer_is_seen_behind_its_half_close,
                end_of_an_opener_is_seen_before_the_reply,
                reader_is_woken_after_questions_about_a_cut,
                reset_cuts_both_directions_with_its_code,
                finished_half_survives_the_drop_of_its_stream,
                reply_that_does_not_come_is_given_up,
                many_streams_run_at_once,
                burst_of_resets_leaves_the_session_usable,
                sixty_four_stalled_readers_stop_nobody,
                one_byte_frames_wait_for_a_stalled_reader,
                probe_is_acknowledged,
                close_delivers_what_was_sent_and_its_reason,
                close_cuts_open_streams,
                bytes_before_the_loss_of_a_session_are_read_behind_its_cut,
                close_cuts_waiting_streams_of_its_own_end,
                session_that_stopped_opening_keeps_its_streams,
            );
            contract!(@rules $pair, $directed, super::super::NARROW;
                $(#[$slow])? five_hundred_stalled_readers_stop_nobody,
            );
        }
    };
    (@short $transport:ident, $pair:path) => {
        mod $transport {
            mod server_opens {
                contract!(@rules $pair, std::convert::identity, super::super::SHORT;
                    source_of_unread_answers_leaves_others_served,
                    source_of_unread_requests_leaves_others_served,
                );
            }
        }
    };
    (@rules $pair:path, $directed:path, $windows:expr; $($(#[$attribute:meta])? $rule:ident,)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            $(#[$attribute])?
            async fn $rule() {
                super::super::$rule($directed($pair($windows).await)).await;
            }
        )+
    };
}

contract!(memory, crate::transport::contract::pairs::memory);
contract!(@short short_quic, crate::transport::contract::pairs::quic);
contract!(@short short_h2, crate::transport::contract::pairs::h2);
contract!(@short short_forwarded, crate::transport::contract::pairs::forwarded_to_quic);
contract!(quic, crate::transport::contract::pairs::quic);
contract!(h2, crate::transport::contract::pairs::h2);
contract!(@forwarded forwarded_to_quic, crate::transport::contract::pairs::forwarded_to_quic);
contract!(@forwarded forwarded_to_h2, crate::transport::contract::pairs::forwarded_to_h2);
