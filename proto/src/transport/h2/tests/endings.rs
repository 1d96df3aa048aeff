//! Ends of sessions with unusual peers: GOAWAY, no close message, no beginning.

use tokio::io::AsyncWriteExt;

use super::raw::{CANCEL, ENHANCE_YOUR_CALM, HEADERS, NO_ERROR, RST_STREAM};
use super::*;
use crate::transport::CUT_STALL_LIMIT;
use crate::wire::close::{SessionClose, SessionMessage};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn goaway_cuts_open_streams_and_gives_the_reason() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut reader, _) = opened(&session, &mut raw).await;
    let (mut writer, _) = opened(&session, &mut raw).await;
    raw.send(&raw::go_away(0, ENHANCE_YOUR_CALM)).await;
    assert_eq!(cut(&mut reader).await, StreamCut::SessionLost);
    let error = within(async {
        loop {
            if let Err(error) = writer.write_all(&[0; 4096]).await {
                return error;
            }
        }
    })
    .await;
    assert_eq!(
        find_cause::<StreamCut>(&error),
        Some(&StreamCut::SessionLost)
    );
    let reason = within(session.closed()).await;
    assert_eq!(
        (reason.by, reason.code),
        (ClosedBy::Network, CloseCode::Protocol)
    );
    assert!(reason.reason.contains("excessive load"), "{reason}");
    assert!(within(session.open(&header(), TEST_TIMEOUT)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn goaway_that_keeps_streams_still_ends_the_session() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut stream, _) = opened(&session, &mut raw).await;
    raw.send(&raw::go_away((1 << 31) - 1, NO_ERROR)).await;
    let reason = within(session.closed()).await;
    assert_eq!(reason.by, ClosedBy::Network, "{reason}");
    assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
    assert!(within(session.open(&header(), TEST_TIMEOUT)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn goaway_of_the_server_ends_the_session_when_it_leaves() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    open_raw(&mut raw, 3).await;
    let mut stream = accepted(&session).await;
    raw.send(&raw::go_away(0, CANCEL)).await;
    drop(raw);
    assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
    let reason = within(session.closed()).await;
    assert_eq!(reason.by, ClosedBy::Network, "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_ends_without_a_close_message_cuts_both_halves() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut stream, _) = opened(&session, &mut raw).await;
    drop(raw);
    assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
    let reason = within(session.closed()).await;
    assert_eq!(
        (reason.by, reason.code),
        (ClosedBy::Network, CloseCode::Dead)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_or_endless_close_message_closes_the_session() {
    for rubbish in [vec![0xff; 64], vec![0x80; 64 << 10], vec![0x80, 0x10, 1]] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let (mut stream, _) = opened(&session, &mut raw).await;
        let complete = rubbish.len() != 3;
        for piece in rubbish.chunks(raw::FRAME_PAYLOAD_MAX) {
            raw.send(&raw::frame(DATA, 0, 1, piece)).await;
        }
        if !complete {
            // The peer announced a close message and never sent it. The end of the connection ends
            // the session.
            drop(raw);
            let reason = within(session.closed()).await;
            assert_eq!(reason.by, ClosedBy::Network, "{reason}");
            continue;
        }
        let reason = within(session.closed()).await;
        assert_eq!(
            (reason.by, reason.code),
            (ClosedBy::Peer, CloseCode::Protocol)
        );
        assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_session_stream_holds_no_memory() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    let before = resident();
    let count = 2 * GROWTH_MAX / u64::from(WINDOW);
    // Sending ends only if all of it is read.
    within(async {
        for index in 0..u32::try_from(count).unwrap() {
            let stream = 3 + 2 * index;
            raw.send(&raw::request(stream, "/session")).await;
            raw.fill(stream, WINDOW.into(), 0).await;
        }
    })
    .await;
    assert_bounded(before);
    assert_serves_raw_server(&session, &mut raw, 100_001).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dial_to_a_server_that_opens_nothing_is_given_up_without_a_trace() {
    let (mut dialed, mut raw) = joined_by_server(STREAMS).await;
    raw.send(PREFACE).await;
    exchange_settings(&mut raw, WIDE).await;
    raw.send(&raw::request(1, "/stream")).await;
    assert_eq!(within(raw.reader.next_of_kind(HEADERS)).await.stream, 1);
    assert!(dialed.try_join_next().is_none());
    // A timeout of the caller has this effect.
    dialed.abort_all();
    assert!(within(raw.reader.watch()).await.closed);
}

/// An agent that stops may send everything in one piece: the end of each half, the close message,
/// GOAWAY and FIN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn halves_that_end_in_the_same_breath_as_the_session_are_whole() {
    const HALVES: usize = 20;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut streams = Vec::new();
    for _ in 0..HALVES {
        streams.push(opened(&session, &mut raw).await);
    }
    let mut close_message = BytesMut::new();
    let close = SessionMessage::Close(SessionClose {
        code: CloseCode::Normal,
        reason: "bye".into(),
    });
    close.encode(&mut close_message);
    let mut final_frames = Vec::new();
    for (_, id) in &streams {
        final_frames.extend(raw::frame(DATA, END_STREAM, *id, b"to the end"));
    }
    final_frames.extend(raw::frame(DATA, END_STREAM, 1, &close_message));
    final_frames.extend(raw::go_away((1 << 31) - 1, NO_ERROR));
    // Busy streams end the round over the set early.
    for (stream, _) in &mut streams {
        stream.write_all(&[0; 16 << 10]).await.unwrap();
    }
    raw.send(&final_frames).await;
    // FIN follows directly. The peer continues to read, as an agent does, because a close with
    // unread data would send a reset.
    raw.writer.end().await;
    let _reads_on = JoinSet::from_iter([async move { raw.reader.watch().await }]);
    for (mut stream, _) in streams {
        assert_eq!(read_all(&mut stream).await.unwrap(), b"to the end");
    }
    let reason = within(session.closed()).await;
    assert_eq!(
        (reason.by, reason.code),
        (ClosedBy::Peer, CloseCode::Normal)
    );
}

#[tokio::test]
async fn cut_behind_bytes_waits_for_a_slow_path() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut stream, id) = opened(&session, &mut raw).await;
    // The path takes no more when a write does not end.
    let mut written = 0;
    let patience = scaled(Duration::from_millis(200));
    while let Ok(count) = timeout(patience, stream.write(&[7; 4096])).await {
        written += count.unwrap();
    }
    tokio::time::pause();
    drop(stream);
    tokio::task::yield_now().await;
    tokio::time::advance(2 * CUT_STALL_LIMIT).await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    tokio::time::resume();
    let mut got = 0;
    loop {
        let frame = within(raw.reader.next()).await.unwrap();
        match frame.kind {
            DATA if frame.stream == id => got += frame.payload.len(),
            RST_STREAM if frame.stream == id => break,
            _ => {}
        }
    }
    assert_eq!(got, written);
}
