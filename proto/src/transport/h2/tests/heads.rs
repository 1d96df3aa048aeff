//! Endless header blocks (S32), header blocks that are too large (S34), and bytes that are not
//! HTTP/2.

use super::raw::{CONTINUATION, ENHANCE_YOUR_CALM, FRAME_PAYLOAD_MAX, HEADERS, RST_STREAM};
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s32_head_without_end_ends_the_session_at_once() {
    for payload in [0, 1, 1000, FRAME_PAYLOAD_MAX] {
        // A field whose value never ends.
        let endless = [&[0, 1, b'x', 127, 0xff, 0xff, 0xff, 0x07][..], &[b'v'; 64]].concat();
        for block in [raw::OK.to_vec(), endless] {
            let (session, mut raw) = with_raw_agent(WIDE).await;
            within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
            let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
            raw.send(&raw::frame(HEADERS, 0, id, &block)).await;
            attack(&session, raw, id, payload).await;

            let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
            let begun = [raw::request_block("/stream"), block.clone()].concat();
            raw.send(&raw::frame(HEADERS, 0, 3, &begun)).await;
            attack(&session, raw, 3, payload).await;
        }
    }
}

async fn attack(session: &Arc<dyn Session>, mut raw: RawPeer, id: u32, payload: usize) {
    let (before, begun) = (resident(), Instant::now());
    let piece = raw::frame(CONTINUATION, 0, id, &vec![b'v'; payload]);
    let outcome = within(raw.flood(&piece.repeat(100), 1_000_000)).await;
    assert!(begun.elapsed() < scaled(Duration::from_secs(1)));
    assert!(
        outcome.closed && outcome.go_away.is_some(),
        "{payload}: {outcome:?}"
    );
    assert_protocol_close(session, raw, &outcome, outcome.go_away.unwrap()).await;
    assert_bounded(before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s34_head_above_64_kib_costs_its_stream_alone() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    let large = |count| [raw::request_block("/stream"), raw::fields(count)].concat();
    raw.send(&raw::head(3, &large(65))).await;
    // Status 431 and the end of the stream.
    let answer = within(raw.reader.next_of_kind(HEADERS)).await;
    assert!(answer.stream == 3 && answer.ends());
    assert_eq!(within(raw.reader.next_of_kind(RST_STREAM)).await.stream, 3);
    assert_serves_raw_server(&session, &mut raw, 5).await;
    // A header block slightly below the limit opens a normal stream.
    raw.send(&raw::head(7, &large(63))).await;
    raw.send(&raw::frame(DATA, 0, 7, &header_bytes())).await;
    accepted(&session).await;

    let (session, mut raw) = with_raw_agent(WIDE).await;
    let large = |count| [raw::OK.to_vec(), raw::fields(count)].concat();
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
    raw.send(&raw::head(id, &large(65))).await;
    assert_eq!(within(raw.reader.next_of_kind(RST_STREAM)).await.stream, id);
    assert!(cut(&mut stream).await != StreamCut::SessionLost);
    assert_serves_raw_agent(&session, &mut raw).await;
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
    let reply = accepted_reply("x");
    raw.send(&raw::head(id, &large(63))).await;
    raw.send(&raw::frame(DATA, 0, id, &reply_bytes(&reply)))
        .await;
    assert_eq!(within(stream.accepted()).await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s34_head_of_a_mebibyte_ends_the_session() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    let block = [raw::request_block("/stream"), raw::fields(1024)].concat();
    let outcome = within(raw.flood(&raw::head(3, &block), 1)).await;
    assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;

    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
    let block = [raw::OK.to_vec(), raw::fields(1024)].concat();
    let outcome = within(raw.flood(&raw::head(id, &block), 1)).await;
    assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
    assert_eq!(cut(&mut stream).await, StreamCut::SessionLost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_before_the_answer_are_skipped_and_never_pile_up() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
    let before = resident();
    // 103 Early Hints with a field of 1 KiB.
    let hint = [&[0x08, 3][..], b"103", &raw::fields(1)].concat();
    let outcome = within(raw.flood(&raw::head(id, &hint).repeat(10), 10_000)).await;
    assert!(!outcome.closed, "{outcome:?}");
    assert_bounded(before);
    assert_serves_raw_agent(&session, &mut raw).await;
    let answer = raw::frame(DATA, END_STREAM, id, &reply_bytes(&accepted_reply("x")));
    raw.send(&[raw::response(id), answer].concat()).await;
    assert_eq!(within(stream.accepted()).await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peer_that_speaks_another_protocol_differs_from_a_lost_one() {
    let http = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n".to_vec();
    for noise in [
        http,
        vec![0; 1000],
        vec![0xff; 1000],
        b"SSH-2.0-x\r\n".repeat(100),
    ] {
        let (session, mut raw) = joined_by_agent().await;
        raw.reader.preface().await;
        let outcome = within(raw.flood(&noise, 1)).await;
        assert!(outcome.closed, "{outcome:?}");
        drop(raw);
        let reason = within(session.closed()).await;
        assert_eq!(
            (reason.by, reason.code),
            (ClosedBy::Network, CloseCode::Protocol),
            "{reason}"
        );

        let (mut dialed, mut raw) = joined_by_server(STREAMS).await;
        let outcome = within(raw.flood(&noise, 1)).await;
        assert!(outcome.closed, "{outcome:?}");
        drop(raw);
        let refused = within(dialed.join_next()).await.unwrap().unwrap();
        assert!(
            matches!(refused, Err(HandshakeError::Transport(_))),
            "{refused:?}"
        );
    }
}
