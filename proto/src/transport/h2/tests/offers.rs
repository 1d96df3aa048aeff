//! Streams that the server's end offers: who gets offers, and how many.

use super::raw::{CANCEL, ENABLE_CONNECT_PROTOCOL, RST_STREAM};
use super::*;
use crate::transport::h2::offers::{OFFER_INTERVAL, OFFERS_MAX};

/// Requests offers as the raw agent.
async fn request_offers(raw: &mut RawPeer) {
    let request = raw::settings(&[(ENABLE_CONNECT_PROTOCOL, 1)]);
    raw.send(&request).await;
}

/// Opens a stream at our agent's end, which gets no offer in time and requests offers. Then
/// acknowledges the request as the raw server.
async fn open_in_vain(session: &Arc<dyn Session>, raw: &mut RawPeer) {
    let limit = Duration::from_millis(50);
    let waited = timeout(limit, session.open(&header(), TEST_TIMEOUT)).await;
    assert!(waited.is_err(), "nothing is offered");
    let request = within(raw.reader.next_of_kind(SETTINGS)).await;
    assert_eq!(request.payload[..], [0, 8, 0, 0, 0, 1]);
    raw.send(&raw::frame(SETTINGS, ACK, 0, &[])).await;
}

/// Returns the number of requests that our server's end sends until it has nothing to do.
async fn requests(raw: &mut RawPeer) -> usize {
    let mut count = 0;
    for _ in 0..2 {
        count += within(raw.flood(&[], 1)).await.counts[usize::from(HEADERS)];
    }
    count
}

async fn next_offer(raw: &mut RawPeer) -> u32 {
    within(raw.reader.next_of_kind(HEADERS)).await.stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_gets_offers_only_if_it_requests_them_and_may_open_streams() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    session.set_max_concurrent_streams(STREAMS);
    // As from an agent that does not know offers, or that opens no streams.
    assert_eq!(requests(&mut raw).await, 0);

    let (session, mut raw) = with_raw_agent(WIDE).await;
    request_offers(&mut raw).await;
    assert_eq!(requests(&mut raw).await, 0, "the agent may open none");
    session.set_max_concurrent_streams(STREAMS);
    for _ in 0..OFFERS_MAX {
        next_offer(&mut raw).await;
    }
    assert_eq!(requests(&mut raw).await, 0, "the offers are bounded");
    assert_eq!(session.stats().streams, 0, "offers are not open streams");
    assert_serves_raw_agent(&session, &mut raw).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offers_and_the_streams_that_an_agent_opened_are_within_its_limit() {
    const LIMIT: u32 = 20;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    session.set_max_concurrent_streams(LIMIT);
    request_offers(&mut raw).await;
    let mut id = 0;
    for _ in 0..LIMIT {
        id = next_offer(&mut raw).await;
        raw.send(&raw::response(id)).await;
        raw.send_data(id, 0, &header_bytes()).await;
    }
    assert_eq!(requests(&mut raw).await, 0);
    let mut open = Vec::new();
    for _ in 0..LIMIT {
        open.push(accepted(&session).await);
    }
    assert_eq!(session.stats().streams, open.len());
    // The end of a stream makes room for one more.
    raw.send(&raw::reset(id, CANCEL)).await;
    next_offer(&mut raw).await;
    assert_eq!(requests(&mut raw).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t10_agent_that_resets_offers_in_a_loop_gets_them_at_a_bounded_rate() {
    for answers_first in [false, true] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        session.set_max_concurrent_streams(STREAMS);
        let (began, before) = (Instant::now(), resident());
        request_offers(&mut raw).await;
        let mut offers = 0;
        while began.elapsed() < OFFER_INTERVAL * 50 {
            let id = next_offer(&mut raw).await;
            offers += 1;
            if answers_first {
                raw.send(&raw::response(id)).await;
            }
            raw.send(&raw::reset(id, CANCEL)).await;
        }
        let batches = began.elapsed().as_millis() / OFFER_INTERVAL.as_millis() + 1;
        let most = OFFERS_MAX * usize::try_from(batches).unwrap();
        assert!(offers > OFFERS_MAX && offers <= most, "{offers} of {most}");
        assert_bounded(before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_waits_for_an_offer_and_the_session_goes_on_without_one() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    // As with a server that does not know offers.
    open_in_vain(&session, &mut raw).await;
    assert_serves_raw_server(&session, &mut raw, 3).await;

    raw.send(&raw::offer(5)).await;
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    assert_eq!(within(raw.reader.next_of_kind(HEADERS)).await.stream, 5);
    let first = within(raw.reader.next_of_kind(DATA)).await;
    assert!(first.stream == 5 && first.payload[..] == header_bytes());
    let reply = [reply_bytes(&accepted_reply("")), b"answer".to_vec()].concat();
    raw.send_data(5, END_STREAM, &reply).await;
    assert_eq!(read_all(&mut stream).await.unwrap(), b"answer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_refuses_offers_that_it_did_not_request_or_that_are_too_many() {
    let (session, mut raw) = with_raw_server(STREAMS, WIDE).await;
    raw.send(&raw::offer(3)).await;
    assert_eq!(within(raw.reader.next_of_kind(RST_STREAM)).await.stream, 3);
    open_in_vain(&session, &mut raw).await;
    let last = 5 + 2 * u32::try_from(OFFERS_MAX).unwrap();
    for id in (5..=last).step_by(2) {
        raw.send(&raw::offer(id)).await;
    }
    let refused = within(raw.reader.next_of_kind(RST_STREAM)).await;
    assert_eq!(refused.stream, last);
    assert_serves_raw_server(&session, &mut raw, last + 2).await;
}
