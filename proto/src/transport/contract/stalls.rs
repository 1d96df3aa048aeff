//! Readers that stall, next to others that do not.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use super::*;

pub(super) async fn one_stalled_reader_stops_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 1).await;
}

pub(super) async fn eight_stalled_readers_stop_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 8).await;
}

pub(super) async fn sixty_four_stalled_readers_stop_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 64).await;
}

pub(super) async fn five_hundred_stalled_readers_stop_nobody(pair: Pair) {
    stalled_readers_stop_nobody(pair, 512).await;
}

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
                within(accepted.write_all(&pattern(MIB))).await.unwrap();
                within(accepted.shutdown()).await.unwrap();
            });
            assert!(got.unwrap() == pattern(MIB));
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
