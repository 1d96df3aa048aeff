//! Floods of small frames: DATA (S33), SETTINGS and PING.

use super::raw::{
    ACK, DATA, ENHANCE_YOUR_CALM, PADDED, PING, PROTOCOL_ERROR, RST_STREAM, SETTINGS, WINDOW_UPDATE,
};
use super::*;

const PRIORITY: u8 = 2;
/// A frame type that no specification defines.
const UNKNOWN: u8 = 0xaa;

/// PINGs that h2 sends itself: the one for the user's ping, and the one of its graceful shutdown.
const KNOWN_PINGS: [[u8; 8]; 2] = [
    [0x3b, 0x7c, 0xdb, 0x7a, 0x0b, 0x87, 0x16, 0xb4],
    [0x0b, 0x7b, 0xa2, 0xf0, 0x8b, 0x9b, 0xfe, 0x54],
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s33_empty_data_frames_end_the_session() {
    let empty = |id| raw::frame(DATA, 0, id, b"");
    let padding = |id| raw::frame(DATA, PADDED, id, &[9; 10]);
    let frames: [&dyn Fn(u32) -> Vec<u8>; 2] = [&empty, &padding];
    for empty in frames {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let (mut stream, id) = opened(&session, &mut raw).await;
        let before = resident();
        let outcome = within(raw.flood(&empty(id).repeat(1000), 10_000)).await;
        assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
        assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
        assert_bounded(before);

        let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
        open_raw(&mut raw, 3).await;
        let _stream = accepted(&session).await;
        let outcome = within(raw.flood(&empty(3).repeat(1000), 10_000)).await;
        assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
        assert_bounded(before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s33_hundred_thousand_unread_frames_of_one_byte_wait_for_their_reader() {
    const COUNT: usize = 100_000;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut unread, id) = opened(&session, &mut raw).await;
    let before = resident();
    let bytes: Vec<u8> = (0..=250).cycle().take(COUNT).collect();
    let frames: Vec<u8> = bytes
        .iter()
        .flat_map(|byte| raw::frame(DATA, 0, id, &[*byte]))
        .collect();
    let outcome = within(raw.flood(&frames, 1)).await;
    assert!(!outcome.closed, "{outcome:?}");
    // This stream has no reader, and other streams continue.
    assert_serves_raw_agent(&session, &mut raw).await;
    assert_bounded(before);
    raw.send(&raw::frame(DATA, END_STREAM, id, b"")).await;
    assert!(read_all(&mut unread).await.unwrap() == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s33_frames_of_one_byte_beyond_the_window_cut_their_stream() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut unread, id) = opened(&session, &mut raw).await;
    let before = resident();
    let frames = raw::frame(DATA, 0, id, b"x").repeat(10_000);
    // Data beyond the window is rejected.
    let outcome = within(raw.flood(&frames, WINDOW as usize / 10_000 + 3)).await;
    assert!(!outcome.closed, "{outcome:?}");
    assert_eq!(outcome.counts[usize::from(RST_STREAM)], 1);
    assert!(cut(&mut unread).await != StreamCut::SessionLost);
    assert_bounded(before);
    assert_serves_raw_agent(&session, &mut raw).await;
    // h2 limits these frames, too.
    let outcome = within(raw.flood(&frames, 1000)).await;
    assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_streams_beyond_the_limit_is_refused_stream_by_stream() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    // The close stream counts, too.
    let allowed = usize::try_from(STREAMS).unwrap() - 1;
    let flood: Vec<u8> = (0..STREAMS * 4)
        .flat_map(|index| raw::request(3 + 2 * index, "/stream"))
        .collect();
    let before = resident();
    let outcome = within(raw.flood(&flood, 1)).await;
    assert!(!outcome.closed, "{outcome:?}");
    assert_bounded(before);
    let refused = 4 * STREAMS as usize - allowed;
    assert_eq!(outcome.counts[usize::from(RST_STREAM)], refused);
    for _ in 0..allowed {
        drop(within(session.accept()).await);
        within(raw.reader.next_of_kind(RST_STREAM)).await;
    }
    assert_serves_raw_server(&session, &mut raw, 100_001).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_flood_is_answered_frame_by_frame() {
    const COUNT: usize = 5_000;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (_stream, _) = opened(&session, &mut raw).await;
    // Frames that were answered before do not count.
    within(raw.flood(&[], 1)).await;
    let change = [
        raw::settings(&[(INITIAL_WINDOW_SIZE, 0), (1, 0)]),
        raw::settings(&[(INITIAL_WINDOW_SIZE, 1 << 30), (1, 4096)]),
    ]
    .concat();
    let before = resident();
    let outcome = within(raw.flood(&change, COUNT / 2)).await;
    assert!(!outcome.closed, "{outcome:?}");
    assert_eq!(outcome.counts[usize::from(SETTINGS)], COUNT);
    assert_bounded(before);
    assert_serves_raw_agent(&session, &mut raw).await;
    // An acknowledgement of settings that were never sent.
    let outcome = within(raw.flood(&raw::frame(SETTINGS, ACK, 0, &[]), 1)).await;
    assert_protocol_close(&session, raw, &outcome, PROTOCOL_ERROR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ping_flood_is_answered_frame_by_frame() {
    const COUNT: usize = 5_000;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let before = resident();
    let outcome = within(raw.flood(&raw::frame(PING, 0, 0, b"question"), COUNT)).await;
    assert!(!outcome.closed, "{outcome:?}");
    assert_eq!(outcome.counts[usize::from(PING)], COUNT + 1);
    assert_bounded(before);
    assert_serves_raw_agent(&session, &mut raw).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_pings_never_asked_say_nothing() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    for payload in KNOWN_PINGS {
        let outcome = within(raw.flood(&raw::frame(PING, ACK, 0, &payload), 1000)).await;
        assert!(!outcome.closed, "{outcome:?}");
    }
    assert_eq!(session.stats().acknowledged, 0);
    session.probe();
    let question = within(raw.reader.next_of_kind(PING)).await;
    within(raw.flood(&[], 1)).await;
    assert_eq!(session.stats().acknowledged, 0);
    raw.send(&raw::frame(PING, ACK, 0, &question.payload)).await;
    within(async {
        while session.stats().acknowledged == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_serves_raw_agent(&session, &mut raw).await;
    assert_eq!(session.stats().acknowledged, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_frames_that_serve_nothing_close_the_session_at_either_end() {
    const COUNT: usize = 20_000;
    let kinds = [PING, SETTINGS, PRIORITY, WINDOW_UPDATE, UNKNOWN];
    for kind in kinds {
        let attack = match kind {
            PING => raw::frame(PING, 0, 0, b"question"),
            SETTINGS => raw::settings(&[]),
            PRIORITY => raw::frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 16]),
            WINDOW_UPDATE => raw::window_update(0, 1),
            _ => raw::frame(UNKNOWN, 0, 0, b"?"),
        };
        for (session, mut raw) in [
            with_raw_agent(WIDE).await,
            with_raw_server(STREAMS, WIDE).await,
        ] {
            let before = resident();
            let outcome = within(raw.flood(&attack, COUNT)).await;
            assert!(outcome.closed, "{kind}: {outcome:?}");
            drop(raw);
            let reason = within(session.closed()).await;
            assert_eq!(reason.code, CloseCode::Protocol, "{kind}: {reason}");
            assert!(reason.reason.contains("control frames"), "{kind}: {reason}");
            assert_bounded(before);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peer_that_floods_and_reads_nothing_is_closed_or_read_no_more() {
    for flood in [raw::frame(PING, 0, 0, b"question"), raw::settings(&[])] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let before = resident();
        let piece = flood.repeat(1000);
        let mut pieces = 0;
        let patience = scaled(Duration::from_secs(1));
        while let Ok(true) = timeout(patience, raw.writer.send(&piece)).await {
            assert!(pieces < 20_000, "{pieces}");
            pieces += 1;
        }
        assert_bounded(before);
        drop(raw);
        within(session.closed()).await;
    }
}
