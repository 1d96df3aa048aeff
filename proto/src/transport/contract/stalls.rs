//! Readers that stall, next to others that do not.

use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::*;

pub(super) async fn sixty_four_stalled_readers_stop_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 64).await;
}

pub(super) async fn five_hundred_stalled_readers_stop_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 512).await;
}

/// Bytes of each stream whose reader does not stall. All of them together exceed the windows that
/// are spare.
const BUSY: usize = 256 << 10;

/// Fills streams that have no reader at the same time. Then checks that 100 busy streams all make
/// progress.
async fn stalled_readers_stop_nobody(pair: Pair, count: usize) {
    pair.peer.set_max_concurrent_streams(2048);
    let mut stalled = Vec::new();
    let mut writers = JoinSet::new();
    for _ in 0..count {
        let (mut opened, mut accepted) = pair.stream().await;
        // This reader waited before it stalled, like a reader behind a full pipe.
        let waited = timeout(Duration::ZERO, opened.read(&mut [0; 1])).await;
        assert!(waited.is_err(), "nothing was sent");
        stalled.push(opened);
        writers.spawn(async move { while accepted.write_all(&pattern(64 << 10)).await.is_ok() {} });
    }
    let mut busy = JoinSet::new();
    for _ in 0..100 {
        let (mut opened, mut accepted) = pair.stream().await;
        busy.spawn(async move {
            let (got, ()) = tokio::join!(read_all(&mut opened), async {
                within(accepted.write_all(&pattern(BUSY))).await.unwrap();
                within(accepted.shutdown()).await.unwrap();
            });
            assert!(got.unwrap() == pattern(BUSY));
        });
    }
    while within(busy.join_next())
        .await
        .transpose()
        .unwrap()
        .is_some()
    {}
    assert!(
        writers.try_join_next().is_none(),
        "a stalled stream is not cut"
    );
    // Slow readers lose nothing: each one reads what the peer sent to it.
    for mut opened in stalled {
        let mut first = vec![0; 64 << 10];
        within(opened.read_exact(&mut first)).await.unwrap();
        assert!(first == pattern(64 << 10));
    }
}

pub(super) async fn one_byte_frames_wait_for_a_stalled_reader(pair: Pair) {
    const COUNT: usize = 30_000;
    let (mut stalled, mut accepted) = pair.stream().await;
    let writer = tokio::task::JoinSet::from_iter([async move {
        for byte in pattern(COUNT) {
            accepted.write_all(&[byte]).await.unwrap();
            accepted.flush().await.unwrap();
            tokio::task::yield_now().await;
        }
        within(accepted.shutdown()).await.unwrap();
    }]);
    // Other streams continue in the meantime, and the session stays open.
    for _ in 0..20 {
        let (mut opened, mut accepted) = pair.stream().await;
        accepted.write_all(b"others").await.unwrap();
        within(accepted.shutdown()).await.unwrap();
        assert_eq!(read_all(&mut opened).await.unwrap(), b"others");
    }
    // The window holds all of it, so the writer finishes although the reader has not read.
    within(writer.join_all()).await;
    assert!(read_all(&mut stalled).await.unwrap() == pattern(COUNT));
}

/// Source of the streams that are not read.
const GREEDY: u64 = 1;
const OTHER: u64 = 2;
const GREEDY_STREAMS: usize = 64;

fn header_of(source: u64) -> StreamHeader {
    StreamHeader { source, ..header() }
}

/// The direction in which the bytes of the greedy source go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unread {
    /// From the opener, and the accepting end does not read.
    Requests,
    Answers,
}

pub(super) async fn source_of_unread_requests_leaves_others_served(pair: Pair) {
    greedy_source_leaves_others_served(pair, Unread::Requests).await;
}

pub(super) async fn source_of_unread_answers_leaves_others_served(pair: Pair) {
    greedy_source_leaves_others_served(pair, Unread::Answers).await;
}

/// One source fills the memory with what is not read, until it gets no new streams. Others are
/// served, and none of its streams ends: its readers read a byte now and then, so that none may be
/// ended for being stalled, however long the test takes.
async fn greedy_source_leaves_others_served(pair: Pair, unread: Unread) {
    pair.peer.set_max_concurrent_streams(DEFAULT.streams);
    let (mut tasks, ended) = (JoinSet::new(), Arc::<AtomicUsize>::default());
    tasks.spawn(serve(pair.peer.clone(), unread, ended.clone()));
    let open = async |source| within(pair.opener.open(&header_of(source), test_timeout())).await;
    for _ in 0..GREEDY_STREAMS {
        let (opener, ended) = (pair.opener.clone(), ended.clone());
        tasks.spawn(async move {
            let Ok(mut stream) = opener.open(&header_of(GREEDY), test_timeout()).await else {
                return;
            };
            match unread {
                Unread::Requests => write_on(stream).await,
                Unread::Answers => {
                    if stream.accepted().await.is_ok() {
                        hold(stream, &ended).await;
                    }
                }
            }
        });
    }
    // Another server refuses the stream in place of the opener if its own memory is short first. A
    // stream that was opened just before waits with the others of its source.
    within(async {
        while let Ok(mut stream) = open(GREEDY).await {
            let accepted = timeout(scaled(FULL_AFTER), stream.accepted()).await;
            if !accepted.is_ok_and(|accepted| accepted.is_ok()) {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for _ in 0..20 {
        let mut stream = open(OTHER).await.unwrap();
        within(stream.write_all(&pattern(200))).await.unwrap();
        assert!(read_all(&mut stream).await.unwrap() == pattern(200));
    }
    assert_eq!(
        ended.load(Ordering::Relaxed),
        0,
        "greedy streams have ended"
    );
}

/// Answers the streams of the other source, and treats those of the greedy one as `unread` says.
async fn serve(session: Arc<dyn Session>, unread: Unread, ended: Arc<AtomicUsize>) {
    let mut streams = JoinSet::new();
    while let Ok(incoming) = session.accept().await {
        let ended = ended.clone();
        streams.spawn(async move {
            let deadline = Instant::now() + test_timeout();
            let Ok((header, mut stream)) = incoming.header(deadline).await else {
                return;
            };
            if stream.accept("").await.is_err() {
                return;
            }
            match (header.source, unread) {
                (GREEDY, Unread::Requests) => hold(stream, &ended).await,
                (GREEDY, Unread::Answers) => write_on(stream).await,
                _ => {
                    let mut request = [0; 200];
                    stream.read_exact(&mut request).await.unwrap();
                    stream.write_all(&request).await.unwrap();
                    stream.shutdown().await.unwrap();
                }
            }
        });
    }
}

async fn write_on(mut stream: Stream) {
    while stream.write_all(&pattern(64 << 10)).await.is_ok() {}
    pending::<()>().await;
}

/// Reads a byte each second until the stream must end, which it counts.
async fn hold(mut stream: Stream, ended: &AtomicUsize) {
    let watch = stream.watch();
    loop {
        let reading = async {
            sleep(Duration::from_secs(1)).await;
            stream.read_exact(&mut [0]).await
        };
        tokio::select! {
            () = poll_fn(|cx| watch.poll_stalled(cx)) => {
                ended.fetch_add(1, Ordering::Relaxed);
                return;
            }
            read = reading => if read.is_err() {
                return;
            }
        }
    }
}
