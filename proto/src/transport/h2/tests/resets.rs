//! Attacks with resets: rapid reset (S30, CVE-2023-44487), and peers that make our end reset
//! streams (S31, CVE-2025-8671).

use std::collections::HashSet;

use futures_util::FutureExt;
use tokio::io::AsyncWriteExt;
use tokio::task::unconstrained;

use super::raw::{
    CANCEL, DATA, END_HEADERS, ENHANCE_YOUR_CALM, FLOW_CONTROL_ERROR, PROTOCOL_ERROR, PUSH_PROMISE,
    RST_STREAM,
};
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s30_burst_of_a_thousand_streams_opened_and_reset_is_survived() {
    for streams in [8, STREAMS, 2000] {
        let (session, mut raw) = with_raw_server(streams, WIDE).await;
        let burst: Vec<u8> = (0..1000)
            .flat_map(|index| [opening(3 + 2 * index), raw::reset(3 + 2 * index, CANCEL)].concat())
            .collect();
        let outcome = within(raw.flood(&burst, 1)).await;
        assert!(!outcome.closed, "{streams}: {outcome:?}");
        assert_serves_raw_server(&session, &mut raw, 3001).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s30_flood_of_resets_ends_the_session_or_costs_it_nothing() {
    const COUNT: u32 = 100_000;
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    let before = resident();
    // These streams are never accepted.
    let flood: Vec<u8> = (0..COUNT)
        .flat_map(|index| {
            let stream = 3 + 2 * index;
            [raw::request(stream, "/stream"), raw::reset(stream, CANCEL)].concat()
        })
        .collect();
    let outcome = within(raw.flood(&flood, 1)).await;
    assert_bounded(before);
    if outcome.closed {
        assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
    } else {
        assert_serves_raw_server(&session, &mut raw, 3 + 2 * COUNT).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s30_streams_that_are_reset_before_anyone_accepts_them_queue_up_to_a_bound() {
    const ROUNDS: u32 = 60;
    const IN_ONE: u32 = 200;
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    for round in 0..ROUNDS {
        let ids = (0..IN_ONE).map(|index| 3 + 2 * (round * IN_ONE + index));
        for id in ids.clone() {
            raw.send(&raw::request(id, "/stream")).await;
        }
        // Each stream was queued, or dropped when the queue was full, before it is reset.
        let full = (round * IN_ONE) as usize >= max_pending_resets(STREAMS);
        let mut waiting: HashSet<u32> = ids.clone().collect();
        while !waiting.is_empty() {
            let frame = within(raw.reader.next()).await.unwrap();
            match frame.kind {
                RST_STREAM => {
                    assert_eq!(frame.code(), 0x1000);
                    waiting.remove(&frame.stream);
                }
                HEADERS if !full => {
                    waiting.remove(&frame.stream);
                }
                _ => {}
            }
        }
        for id in ids {
            raw.send(&raw::reset(id, CANCEL)).await;
        }
    }
    let mut queued = 0;
    while let Some(incoming) = unconstrained(session.accept()).now_or_never() {
        drop(incoming.unwrap());
        queued += 1;
    }
    assert!(queued == max_pending_resets(STREAMS), "{queued}");
    assert_serves_raw_server(&session, &mut raw, 100_001).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s30_agent_that_opens_streams_is_thrown_out() {
    let odd = raw::request(3, "/stream");
    let even = raw::request(2, "/stream");
    let promised = [&2u32.to_be_bytes()[..], &raw::request_block("/stream")].concat();
    let promise = raw::frame(PUSH_PROMISE, END_HEADERS, 1, &promised);
    for forbidden in [odd, even, promise] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let outcome = within(raw.flood(&forbidden, 1)).await;
        assert_protocol_close(&session, raw, &outcome, PROTOCOL_ERROR).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_answers_that_break_a_rule_of_the_connection_end_it() {
    for index in 0..rules_broken_on(0).len() {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let (_attacked, id) = opened(&session, &mut raw).await;
        let (mut other, _) = opened(&session, &mut raw).await;
        let (attack, code) = &rules_broken_on(id)[index];
        let outcome = within(raw.flood(attack, 1)).await;
        assert_protocol_close(&session, raw, &outcome, *code).await;
        assert_eq!(cut(&mut other).await, StreamCut::SessionLost, "{index}");
    }
}

fn rules_broken_on(id: u32) -> [(Vec<u8>, u32); 4] {
    let end = raw::frame(DATA, END_STREAM, id, b"all");
    let after_its_end = [end, raw::frame(DATA, 0, id, b"more")].concat();
    [
        (raw::window_update(id, 0), PROTOCOL_ERROR),
        (raw::window_update(0, (1 << 31) - 1), FLOW_CONTROL_ERROR),
        (after_its_end, PROTOCOL_ERROR),
        (raw::frame(DATA, 0, 4001, b"whose?"), PROTOCOL_ERROR),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_window_that_overflows_cuts_its_stream_alone() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut attacked, id) = opened(&session, &mut raw).await;
    let (mut other, _) = opened(&session, &mut raw).await;
    raw.send(&raw::window_update(id, (1 << 31) - 1)).await;
    let reset = within(raw.reader.next_of_kind(RST_STREAM)).await;
    assert_eq!((reset.stream, reset.code()), (id, FLOW_CONTROL_ERROR));
    assert_eq!(
        cut(&mut attacked).await,
        StreamCut::Reset(ResetCode::Dropped)
    );
    other.write_all(b"goes on").await.unwrap();
    assert_eq!(
        &within(raw.reader.next_of_kind(DATA)).await.payload[..],
        b"goes on"
    );
    assert_serves_raw_agent(&session, &mut raw).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_peer_that_makes_us_reset_its_streams_is_thrown_out_in_the_end() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    let before = resident();
    let count = u32::try_from(LOCAL_ERROR_RESETS_MAX).unwrap() * 2;
    let flood: Vec<u8> = (0..count)
        .flat_map(|index| {
            let stream = 3 + 2 * index;
            let overflow = raw::window_update(stream, (1 << 31) - 1);
            [raw::request(stream, "/stream"), overflow].concat()
        })
        .collect();
    let outcome = within(raw.flood(&flood, 1)).await;
    assert_bounded(before);
    assert_protocol_close(&session, raw, &outcome, ENHANCE_YOUR_CALM).await;
    assert!(
        outcome.counts[usize::from(RST_STREAM)] <= LOCAL_ERROR_RESETS_MAX,
        "{outcome:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_peer_that_makes_us_reset_and_reads_nothing_is_read_no_more() {
    // Either h2 or the code that accepts streams resets them.
    for by_overflow in [true, false] {
        let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
        let before = resident();
        let mut dropping = JoinSet::new();
        let accepting = session.clone();
        dropping.spawn(async move { while accepting.accept().await.is_ok() {} });
        let mut stream = 3;
        let mut piece = Vec::new();
        let patience = scaled(Duration::from_secs(1));
        loop {
            piece.clear();
            for _ in 0..100 {
                piece.extend(opening(stream));
                if by_overflow {
                    piece.extend(raw::window_update(stream, (1 << 31) - 1));
                }
                stream += 2;
            }
            match timeout(patience, raw.writer.send(&piece)).await {
                Ok(taken) => assert!(taken && stream < 1_000_000, "{stream}"),
                Err(_stuck) => break,
            }
        }
        assert_bounded(before);
        drop(raw);
        within(session.closed()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_storm_of_resets_cuts_streams_and_nothing_else() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut streams = Vec::new();
    let mut storm = Vec::new();
    for _ in 0..200 {
        let (stream, id) = opened(&session, &mut raw).await;
        streams.push(stream);
        storm.extend(raw::reset(id, 0x1001).repeat(500));
        storm.extend(raw::window_update(id, 1).repeat(10));
    }
    let outcome = within(raw.flood(&storm, 1)).await;
    assert!(!outcome.closed, "{outcome:?}");
    for mut stream in streams {
        assert_eq!(cut(&mut stream).await, StreamCut::Reset(ResetCode::PeerCut));
    }
    assert_serves_raw_agent(&session, &mut raw).await;
    let outcome = within(raw.flood(&raw::reset(4001, CANCEL), 1)).await;
    assert_protocol_close(&session, raw, &outcome, PROTOCOL_ERROR).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s31_frames_on_streams_that_were_reset_here_are_dropped() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (stream, id) = opened(&session, &mut raw).await;
    drop(stream);
    assert_eq!(within(raw.reader.next_of_kind(RST_STREAM)).await.stream, id);
    // From the peer's view these bytes were in flight. Their window is released.
    raw.fill(id, ALMOST_WINDOW, 0).await;
    for _ in 0..20 {
        let (stream, id) = opened(&session, &mut raw).await;
        drop(stream);
        within(raw.reader.next_of_kind(RST_STREAM)).await;
        within(raw.fill(id, ALMOST_WINDOW, 0)).await;
    }
    assert_serves_raw_agent(&session, &mut raw).await;
}
