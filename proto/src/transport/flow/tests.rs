use std::task::Context;

use super::test_transport::TestTransport;
use super::*;

const WINDOW: u32 = 2 << 20;
const PERCENT: u64 = 200;
/// Memory of the first window that a session has for a stream.
const FIRST: u64 = (BASE_WINDOW + ACTIVE_WINDOW_MIN) * 2;

fn settings(peer_opens: bool) -> FlowSettings {
    FlowSettings {
        stream_window: StreamWindow::fixed(WINDOW),
        memory_percent: PERCENT,
        peer_opens,
    }
}

fn session_of(pool: &Arc<BufferPool>, settings: FlowSettings) -> (Arc<SessionFlow>, TestTransport) {
    let transport = TestTransport::new(|_| {});
    (pool.session(settings, transport.clone()), transport)
}

fn session(pool: &Arc<BufferPool>) -> (Arc<SessionFlow>, TestTransport) {
    session_of(pool, settings(false))
}

/// Opens a stream whose reader has stalled.
fn stall(flow: &SessionFlow) -> Arc<ReadMonitor> {
    let read_monitor = flow.open(0).unwrap();
    read_monitor.end_read();
    read_monitor
}

fn sample(pool: &BufferPool, times: u32) {
    for _ in 0..times {
        pool.sample();
    }
}

#[tokio::test(start_paused = true)]
async fn idle_session_reserves_nothing_and_a_stream_has_its_window_at_once() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session(&pool);
    assert_eq!(
        (pool.reserved(), transport.connection_window()),
        (0, BASE_WINDOW)
    );
    let stream = flow.open(0).unwrap();
    assert_eq!(transport.connection_window() * 2, FIRST);
    assert_eq!(pool.reserved(), FIRST);
    drop(stream);
    assert_eq!(pool.reserved(), 0);
    sample(&pool, 1);
    assert_eq!(transport.connection_window(), BASE_WINDOW);
    // The peer still has the credit, so the next stream reserves it again.
    let _stream = flow.open(0).unwrap();
    assert_eq!(pool.reserved(), FIRST);
}

#[tokio::test(start_paused = true)]
async fn session_whose_peer_opens_streams_reserves_what_the_peer_may_send() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session_of(&pool, settings(true));
    let (idle, window) = (u64::from(WINDOW) * 2, BASE_WINDOW + u64::from(WINDOW));
    let is_idle = || (pool.reserved(), transport.connection_window()) == (idle, window);
    assert!(is_idle());
    let stream = flow.accept();
    assert_eq!(pool.reserved(), window * 2);
    drop(stream);
    assert!(is_idle());
    // It is the same after larger windows, and whatever is free then.
    let streams = [flow.accept(), flow.accept()];
    streams[0].count_read(8 << 20);
    assert!(transport.connection_window() > window);
    let others = pool.limit() / 4 * 3;
    assert!(pool.try_reserve(others));
    drop(streams);
    sample(&pool, 1);
    assert_eq!(pool.reserved(), others + idle);
    let (narrow, transport) = session_of(&pool, settings(true));
    assert_eq!(
        transport.connection_window(),
        BASE_WINDOW + ACTIVE_WINDOW_MIN
    );
    pool.release(others);
    drop((flow, narrow));
    assert_eq!(pool.reserved(), 0);
}

/// The first transfer of a session waits for no larger window.
#[tokio::test(start_paused = true)]
async fn first_stream_of_a_caller_begins_with_a_stream_window_while_much_is_free() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session(&pool);
    let stream = flow.open(1).unwrap();
    let wide = BASE_WINDOW + u64::from(WINDOW);
    assert_eq!(transport.connection_window(), wide);
    assert_eq!(pool.reserved(), u64::from(WINDOW) * 2);
    drop(stream);
    assert_eq!(pool.reserved(), 0);
    let others = pool.limit() / 2 + 1;
    assert!(pool.try_reserve(others));
    let (flow, transport) = session(&pool);
    let _stream = flow.open(1).unwrap();
    assert_eq!(transport.connection_window() * 2, FIRST);
    pool.release(others);
}

/// Sessions keep their credit, which must not refuse streams when all of them have one.
#[tokio::test(start_paused = true)]
async fn first_windows_leave_memory_for_a_stream_of_each_of_many_sessions() {
    let pool = BufferPool::new(1 << 30);
    let mut sessions = Vec::new();
    for _ in 0..1000 {
        let (flow, transport) = session(&pool);
        drop(flow.open(1).unwrap());
        sample(&pool, 1);
        sessions.push((flow, transport));
    }
    let streams: Vec<_> = sessions
        .iter()
        .filter_map(|(flow, _)| flow.open(1))
        .collect();
    assert_eq!(streams.len(), sessions.len());
    assert!(pool.reserved() <= pool.limit());
}

#[tokio::test(start_paused = true)]
async fn idle_session_reserves_nothing_for_larger_windows_of_before() {
    let pool = BufferPool::new(1 << 30);
    // As at a server whose agents may open streams to targets of the cloud.
    let (flow, transport) = session_of(&pool, settings(false));
    flow.set_peer_opens();
    let streams: Vec<_> = (0..8).map(|_| flow.open(1).unwrap()).collect();
    for _ in 0..100 {
        for stream in &streams {
            stream.count_read(1 << 20);
            stream.end_read();
        }
        sample(&pool, 1);
    }
    assert!(transport.connection_window() > 1 << 20);
    let while_open = pool.reserved();
    drop(streams);
    sample(&pool, 1);
    assert_eq!(pool.reserved(), 0);
    // The peer can use it with its next stream.
    let stream = flow.accept();
    assert!(
        flow.has_room() && pool.reserved() > while_open / 2,
        "{} of {while_open}",
        pool.reserved()
    );
    drop(stream);
    let rest = pool.free();
    assert!(pool.try_reserve(rest));
    let _refused = flow.accept();
    assert!(!flow.has_room());
    pool.release(rest);
}

#[tokio::test(start_paused = true)]
async fn messages_of_the_control_stream_grow_no_window() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session_of(&pool, settings(true));
    let idle = pool.reserved();
    let control_stream = flow.accept();
    control_stream.exclude();
    for _ in 0..1000 {
        control_stream.count_read(64 << 10);
        sample(&pool, 1);
    }
    let first = BASE_WINDOW + u64::from(WINDOW);
    assert_eq!(
        (pool.reserved(), transport.connection_window()),
        (idle, first)
    );
}

/// A sender in slow start doubles what it sends with each round trip.
#[tokio::test(start_paused = true)]
async fn window_is_ahead_of_a_sender_in_slow_start() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session(&pool);
    let stream = flow.open(0).unwrap();
    let mut flight = 240_000;
    while flight < u64::from(WINDOW) {
        let credit = transport.connection_window();
        assert!(flight <= credit, "{flight} of {credit}");
        stream.count_read(usize::try_from(flight).unwrap());
        flight *= 2;
    }
    assert!(transport.connection_window() >= u64::from(WINDOW));
    // A stream that goes on slowly gives the memory back.
    for _ in 0..1000 {
        stream.end_read();
        stream.count_read(100);
        sample(&pool, 1);
    }
    assert!(transport.connection_window() <= 2 * (BASE_WINDOW + ACTIVE_WINDOW_MIN));
}

#[tokio::test(start_paused = true)]
async fn window_covers_stalled_streams_while_the_pool_has_room() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session(&pool);
    let stalled: Vec<_> = (0..3).map(|_| stall(&flow)).collect();
    sample(&pool, 1);
    let first = BASE_WINDOW + ACTIVE_WINDOW_MIN;
    assert_eq!(
        transport.connection_window(),
        first,
        "100 ms have not passed"
    );
    sample(&pool, 2);
    let held = 3 * u64::from(WINDOW);
    assert_eq!(transport.connection_window(), first + held + held / 7);
    assert!(flow.has_room());
    for stream in &stalled {
        for _ in 0..30 {
            stream.end_read();
            sample(&pool, 1);
        }
    }
    drop(stalled);
    sample(&pool, 1);
    assert_eq!(transport.connection_window(), BASE_WINDOW);
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test(start_paused = true)]
async fn session_with_much_unread_data_is_refused_first_and_others_have_smaller_windows() {
    let pool = BufferPool::new(16 << 20);
    let (greedy, transport) = session(&pool);
    let mut streams = Vec::new();
    while let Some(stream) = greedy.open(1) {
        stream.end_read();
        streams.push(stream);
        sample(&pool, 3);
    }
    let share = pool.reserved();
    assert!(
        (3 << 20..=4 << 20).contains(&share),
        "{share}: a quarter of the pool"
    );
    assert_eq!(transport.connection_window() * 2, share);
    let mut others = Vec::new();
    let mut first = u64::MAX;
    loop {
        let (other, transport) = session(&pool);
        if !other.has_room() {
            break;
        }
        let stream = other.open(0).unwrap();
        let size = transport.connection_window();
        assert!(size <= first, "windows become smaller");
        first = size;
        others.push((other, stream));
    }
    assert!(others.len() > 80, "{}", others.len());
    assert!(pool.reserved() <= pool.limit());
    drop(streams);
    sample(&pool, 1);
    let (other, _window) = session(&pool);
    assert!(greedy.has_room() && other.has_room());
}

#[tokio::test(start_paused = true)]
async fn stream_for_which_there_is_no_memory_is_not_opened() {
    let pool = BufferPool::new(3 * BASE_WINDOW);
    let ((one, _), (two, _)) = (session(&pool), session(&pool));
    let first = one.open(0).unwrap();
    assert!(!two.has_room());
    assert!(two.open(0).is_none());
    drop(first);
    assert!(two.has_room() && two.open(0).is_some());
}

#[tokio::test(start_paused = true)]
async fn reader_stalled_for_10_s_ends_only_when_another_stream_waits() {
    let pool = BufferPool::new(16 << 20);
    let settings = FlowSettings {
        stream_window: StreamWindow::fixed(512 << 10),
        ..settings(false)
    };
    let (flow, _) = session_of(&pool, settings);
    let streams: Vec<_> = (0..12).map(|_| stall(&flow)).collect();
    // Two streams of one source hold more than any other source.
    for stream in &streams[4..6] {
        stream.set_source(7);
    }
    let ended = || streams.iter().filter(|stream| stream.must_end()).count();
    sample(&pool, 300);
    assert_eq!(ended(), 0, "nobody waits");
    let waiting = flow.open(0).unwrap();
    sample(&pool, 1);
    assert_eq!(ended(), 1);
    assert!(streams[4..6].iter().any(|stream| stream.must_end()));
    let stalled = streams.iter().find(|stream| stream.must_end()).unwrap();
    std::future::poll_fn(|cx| stalled.poll_stalled(cx)).await;
    drop(waiting);
}

/// A transport that does not tell what is unread: the peer's report shows that data for a target
/// that is being dialed holds the window.
#[tokio::test(start_paused = true)]
async fn window_grows_when_the_peer_reports_that_nobody_reads_what_holds_it() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session_of(&pool, settings(true));
    let _dialing = [flow.accept(), flow.accept()];
    sample(&pool, 10);
    let window = || transport.connection_window() - BASE_WINDOW;
    assert_eq!(window(), u64::from(WINDOW));
    transport.block();
    sample(&pool, 10);
    assert_eq!(window(), 2 * u64::from(WINDOW));
}

/// A transport that tells what is unread.
#[tokio::test(start_paused = true)]
async fn data_for_a_target_that_is_being_dialed_does_not_hold_the_window() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = session(&pool);
    let dialing = flow.open(0).unwrap();
    dialing.set_unread(256 << 10);
    sample(&pool, 1);
    let first = BASE_WINDOW + ACTIVE_WINDOW_MIN;
    let held = 256 << 10;
    assert_eq!(transport.connection_window(), first + held + held / 7);
    sample(&pool, 1000);
    assert!(!dialing.must_end());
}

#[tokio::test(start_paused = true)]
async fn slow_readers_never_end_while_there_is_memory() {
    let pool = BufferPool::new(1 << 30);
    let (flow, _window) = session(&pool);
    let stalled: Vec<_> = (0..4).map(|_| stall(&flow)).collect();
    let _waiting = flow.open(0).unwrap();
    sample(&pool, 1000);
    assert!(!stalled.iter().any(|stream| stream.must_end()));
}

#[tokio::test(start_paused = true)]
async fn stream_that_must_end_and_does_not_counts_as_stalled_again() {
    let pool = BufferPool::new(1 << 30);
    let (flow, _) = session(&pool);
    let [open, ended] = [stall(&flow), stall(&flow)];
    sample(&pool, 3);
    assert_eq!(flow.stalled_streams(), 2);
    open.end_stalled();
    ended.end_stalled();
    sample(&pool, 20);
    assert_eq!(flow.stalled_streams(), 0, "both have time to end");
    drop(ended);
    sample(&pool, 1);
    assert_eq!(flow.stalled_streams(), 1);
    drop(open);
    sample(&pool, 1);
    assert_eq!(flow.stalled_streams(), 0);
}

/// Returns a session of at most 16 streams whose window of 64 KiB grows to 256 KiB.
fn growing_session(pool: &Arc<BufferPool>) -> (Arc<SessionFlow>, TestTransport) {
    let settings = FlowSettings {
        stream_window: StreamWindow::growing(64 << 10, 256 << 10, 16),
        ..settings(false)
    };
    session_of(pool, settings)
}

#[tokio::test(start_paused = true)]
async fn stream_window_grows_to_four_round_trips_while_few_streams_are_open() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = growing_session(&pool);
    let kib = |flow: &SessionFlow, kib_per_rtt: u64| {
        flow.widen(kib_per_rtt << 10);
        transport.stream_window() >> 10
    };
    let mut streams = vec![flow.open(0)];
    assert_eq!(kib(&flow, 16), 64, "the window is large enough");
    assert_eq!(kib(&flow, 17), 128);
    assert_eq!(kib(&flow, 32), 128);
    assert_eq!(kib(&flow, 1 << 20), 256);
    assert_eq!(kib(&flow, 1 << 20), 256, "the maximum");
    streams.push(flow.open(0));
    assert_eq!(kib(&flow, 0), 256, "half of the bound");
    streams.push(flow.open(0));
    assert_eq!(kib(&flow, 0), 64, "three streams could hold 768 KiB");
    streams.truncate(2);
    sample(&pool, 1);
    assert_eq!(kib(&flow, 1 << 20), 128);
    assert_eq!(kib(&flow, 1 << 20), 128, "more would be half of the bound");
}

#[tokio::test(start_paused = true)]
async fn stream_window_does_not_grow_when_the_pool_is_short() {
    let pool = BufferPool::new(1 << 30);
    let (flow, transport) = growing_session(&pool);
    let _stream = flow.open(0);
    flow.widen(1 << 30);
    assert_eq!(transport.stream_window(), 128 << 10);
    let rest = pool.free();
    assert!(pool.try_reserve(rest));
    flow.lock().stalled.bytes = 1 << 20;
    flow.widen(1 << 30);
    assert_eq!(transport.stream_window(), 128 << 10);
    flow.narrow(&mut flow.lock());
    assert_eq!(transport.stream_window(), 64 << 10);
    pool.release(rest);
}

/// Opens streams of a source that nobody reads, until the session is short.
fn exhaust(pool: &BufferPool, flow: &SessionFlow, source: u64) -> Vec<Arc<ReadMonitor>> {
    let mut streams = Vec::new();
    while let Some(stream) = flow.open(source) {
        stream.end_read();
        streams.push(stream);
        sample(pool, 3);
    }
    streams
}

#[tokio::test(start_paused = true)]
async fn source_that_holds_the_window_gets_no_new_streams_and_others_do() {
    let pool = BufferPool::new(16 << 20);
    let (flow, transport) = session(&pool);
    let streams = exhaust(&pool, &flow, 1);
    assert!(flow.has_room() && flow.open(2).is_some() && flow.open(0).is_some());
    assert!(flow.open(1).is_none());
    // Neither has the source streams of another session when little of the pool is free.
    let (other, _) = session(&pool);
    assert!(other.open(1).is_some());
    let (third, _) = session(&pool);
    let _more = exhaust(&pool, &third, 1);
    let (fourth, _) = session(&pool);
    let _more = exhaust(&pool, &fourth, 1);
    let rest = pool.free() - (pool.limit() / SHORT_SHARE) + 1;
    assert!(pool.try_reserve(rest));
    sample(&pool, 1);
    assert!(other.open(1).is_none() && other.open(2).is_some());
    pool.release(rest);
    drop(streams);
    sample(&pool, 1);
    assert!(other.open(1).is_some());
    assert!(transport.reports() > 0);
}

#[tokio::test(start_paused = true)]
async fn short_session_reports_it_and_then_grants_a_reserve_as_it_is_used() {
    let pool = BufferPool::new(16 << 20);
    let (flow, transport) = session(&pool);
    let _streams = exhaust(&pool, &flow, 1);
    sample(&pool, 3);
    let window = transport.connection_window();
    let reserve = |flow: &SessionFlow| flow.lock().shortage.reserve;
    let first = reserve(&flow);
    assert!(first > 0 && transport.reports() > 0);
    sample(&pool, 20);
    assert_eq!(
        (reserve(&flow), transport.connection_window()),
        (first, window)
    );
    transport.block();
    sample(&pool, 1);
    assert_eq!(reserve(&flow), first + (64 << 10));
    assert_eq!(transport.connection_window(), window + (64 << 10));
    // What others read is announced at once.
    let other = flow.open(2).unwrap();
    other.count_read(100);
    sample(&pool, 1);
    assert_eq!(transport.connection_window(), window + (64 << 10) + 1);
    drop(other);
    for _ in 0..1000 {
        transport.block();
        sample(&pool, 1);
    }
    assert!(
        pool.reserved() <= pool.limit() / 4 * 3,
        "{}",
        pool.reserved()
    );
}

/// A transport that reports what is unread, and not that the peer is blocked.
#[tokio::test(start_paused = true)]
async fn reserve_grows_while_unread_bytes_use_up_all_credit() {
    let pool = BufferPool::new(16 << 20);
    let transport = TestTransport::with_unread_reports();
    let flow = pool.session(settings(false), transport);
    let stalled = [flow.open(1).unwrap(), flow.open(2).unwrap()];
    for stream in &stalled {
        stream.end_read();
    }
    let reserve = || flow.lock().shortage.reserve;
    // The peer sends all that it may.
    let fill = || {
        let credit = flow.lock().credit.total();
        for stream in &stalled {
            stream.set_unread(usize::try_from(credit / 2).unwrap());
        }
        sample(&pool, 1);
        reserve()
    };
    for _ in 0..10 {
        fill();
    }
    let before = reserve();
    let step = 64 << 10;
    assert!(before > 0);
    assert_eq!((fill(), fill()), (before + step, before + 2 * step));
    sample(&pool, 20);
    assert_eq!(reserve(), before + 2 * step, "the last step is not used");
}

/// The peer reports only once that it has used up its credit.
#[tokio::test(start_paused = true)]
async fn reserve_that_was_used_up_without_memory_for_more_grows_when_there_is_some() {
    let pool = BufferPool::new(16 << 20);
    let (flow, transport) = session(&pool);
    let _streams = exhaust(&pool, &flow, 1);
    sample(&pool, 3);
    let reserve = || flow.lock().shortage.reserve;
    let first = reserve();
    let rest = pool.free();
    assert!(first > 0 && pool.try_reserve(rest));
    transport.block();
    sample(&pool, 10);
    assert_eq!(reserve(), first);
    pool.release(rest);
    sample(&pool, 10);
    assert_eq!(reserve(), first + (64 << 10));
}

#[tokio::test(start_paused = true)]
async fn credit_of_a_stream_that_ends_is_announced_while_the_session_is_short() {
    let pool = BufferPool::new(16 << 20);
    let (flow, transport) = session(&pool);
    let mut stalled: Vec<_> = (0..4).map(|_| stall(&flow)).collect();
    // Too little for a reserve.
    let rest = pool.free() - (64 << 10);
    assert!(pool.try_reserve(rest));
    sample(&pool, 10);
    let window = transport.connection_window();
    assert!(transport.reports() > 0 && flow.lock().shortage.reserve == 0);
    stalled.pop();
    sample(&pool, 1);
    assert_eq!(transport.connection_window(), window + 1);
    sample(&pool, 10);
    assert_eq!(transport.connection_window(), window + 1, "once");
    pool.release(rest);
}

#[tokio::test(start_paused = true)]
async fn writers_of_the_source_that_holds_the_most_wait_while_the_peer_is_short() {
    let pool = BufferPool::new(64 << 20);
    let (flow, _transport) = session(&pool);
    let open = |source| flow.open(source).unwrap();
    let (blocked, idle, other) = (open(1), open(1), open(2));
    blocked.end_write(Some(1 << 20));
    blocked.end_write(None);
    other.end_write(Some(1 << 20));
    let may_write = |stream: &ReadMonitor| {
        let cx = Context::from_waker(std::task::Waker::noop());
        assert_eq!(stream.poll_writable(&cx), stream.poll_sendable(&cx));
        stream.poll_writable(&cx).is_ready()
    };
    sample(&pool, 4);
    assert!(may_write(&blocked), "the peer is not short");
    flow.set_peer_short();
    assert!(!may_write(&blocked));
    assert!(!may_write(&idle) && may_write(&other));
    let accepted = flow.accept();
    accepted.set_source(1);
    assert!(!may_write(&accepted));
    assert!(flow.open(1).is_none() && flow.open(2).is_some());
    sample(&pool, 11);
    assert!(!may_write(&blocked));
    // The reports have ended.
    sample(&pool, 1);
    assert!(may_write(&blocked) && flow.open(1).is_some());
}

/// The opener's end has refused the stream, so the end that is short does not see it wait.
#[tokio::test(start_paused = true)]
async fn stream_that_is_refused_because_the_peer_is_short_ends_a_stalled_one_there() {
    let (pool, pool_of_peer) = (BufferPool::new(1 << 30), BufferPool::new(16 << 20));
    let ((opener, reports), (short, _)) = (session(&pool), session(&pool_of_peer));
    let mut stalled = Vec::new();
    while !short.is_exhausted(&short.lock()) {
        let stream = short.open(1).unwrap();
        stream.end_read();
        stalled.push(stream);
        sample(&pool_of_peer, 3);
    }
    let blocked = opener.open(1).unwrap();
    blocked.end_write(Some(1 << 20));
    blocked.end_write(None);
    sample(&pool, 4);
    let ended = || stalled.iter().filter(|stream| stream.must_end()).count();
    let sample_both = |times: u32| {
        for _ in 0..times {
            opener.set_peer_short();
            sample(&pool, 1);
            sample(&pool_of_peer, 1);
        }
    };
    sample_both(2 * REFUSED_SAMPLES);
    assert_eq!((ended(), reports.waiting_reports()), (0, 0), "nobody waits");
    let cx = Context::from_waker(std::task::Waker::noop());
    assert!(blocked.poll_held(&cx).is_ready() && blocked.is_source_refused());
    // One report in 200 ms, however many streams are refused.
    for _ in 0..100 {
        assert!(opener.open(1).is_none());
    }
    assert_eq!(reports.waiting_reports(), 1);
    short.set_peer_waits();
    sample_both(4);
    assert!(ended() > 0);
    assert!(opener.open(1).is_none());
    assert_eq!(reports.waiting_reports(), 2);
    // Others are served, and an end that is not short ends nothing.
    assert!(opener.open(2).is_some());
    opener.set_peer_waits();
    sample(&pool, 2 * REFUSED_SAMPLES);
    assert!(!blocked.must_end());
}

/// A request over a connection that was opened before opens no stream.
#[tokio::test(start_paused = true)]
async fn write_that_waits_because_the_peer_is_short_is_reported_like_a_refused_stream() {
    let pool = BufferPool::new(1 << 30);
    let (flow, reports) = session(&pool);
    let (blocked, kept) = (flow.open(1).unwrap(), flow.open(1).unwrap());
    blocked.end_write(Some(1 << 20));
    blocked.end_write(None);
    kept.end_write(Some(100));
    let waits = |stream: &ReadMonitor| {
        let cx = Context::from_waker(std::task::Waker::noop());
        stream.poll_writable(&cx).is_pending()
    };
    let sample_short = || {
        for _ in 0..40 {
            flow.set_peer_short();
            sample(&pool, 1);
        }
    };
    sample_short();
    assert!(waits(&blocked));
    sample_short();
    assert_eq!(reports.waiting_reports(), 0, "it holds the peer's memory");
    assert!(waits(&kept));
    sample_short();
    // One report in 200 ms.
    assert_eq!(reports.waiting_reports(), 10);
    sample(&pool, 20);
    assert!(!waits(&kept), "the shortage is over");
    let before = reports.waiting_reports();
    sample_short();
    assert_eq!(reports.waiting_reports(), before, "nothing is written");
}

#[tokio::test(start_paused = true)]
async fn full_pool_ends_a_stalled_stream_of_the_source_that_holds_most_in_all_sessions() {
    let pool = BufferPool::new(64 << 20);
    let sessions: Vec<_> = (0..4).map(|_| session(&pool)).collect();
    let stall_as = |index: usize, source| {
        let stream = sessions[index].0.open(source).unwrap();
        stream.end_read();
        stream
    };
    // One session has the most, but of two sources.
    let one = [stall_as(0, 1), stall_as(0, 2)];
    let most = [stall_as(1, 3), stall_as(2, 3), stall_as(3, 3)];
    sample(&pool, 300);
    let rest = pool.free();
    assert!(pool.try_reserve(rest));
    sample(&pool, 300);
    let ended =
        |streams: &[Arc<ReadMonitor>]| streams.iter().filter(|stream| stream.must_end()).count();
    assert_eq!((ended(&one), ended(&most)), (0, 0), "nobody waits");
    let (waiting, _) = session(&pool);
    assert!(waiting.open(4).is_none());
    sample(&pool, 1);
    assert_eq!((ended(&one), ended(&most)), (0, 1));
    pool.release(rest);
}

#[tokio::test(start_paused = true)]
async fn send_window_follows_what_is_written_and_is_reserved() {
    let pool = BufferPool::new(64 << 20);
    let transport = TestTransport::with_congestion_window(512 << 10);
    let flow = pool.session(settings(false), transport.clone());
    let stream = flow.open(1).unwrap();
    let before = pool.reserved();
    stream.end_write(Some(1000));
    assert_eq!(
        (transport.send_window(), pool.reserved()),
        (SEND_BASE_WINDOW, before)
    );
    let mut written = 0;
    while transport.send_window() < 2 << 20 {
        assert!(written < 4 << 20, "{}", transport.send_window());
        stream.end_write(Some(64 << 10));
        written += 64 << 10;
        assert!(transport.send_window() > 64 << 10);
    }
    for _ in 0..1000 {
        stream.end_write(Some(64 << 10));
    }
    assert_eq!(transport.send_window(), 2 << 20, "four congestion windows");
    let reserved = ((2 << 20) - SEND_BASE_WINDOW) * 3 / 2;
    assert_eq!(pool.reserved(), before + reserved);
    // It becomes smaller, and is given back.
    sample(&pool, 20 * 60);
    assert_eq!(
        (transport.send_window(), pool.reserved()),
        (SEND_BASE_WINDOW, before)
    );
    let rest = pool.free();
    assert!(pool.try_reserve(rest));
    stream.end_write(Some(1 << 20));
    assert_eq!(transport.send_window(), SEND_BASE_WINDOW, "no memory");
    pool.release(rest);
    // A stream that is only written, too.
    stream.finish();
    sample(&pool, 1);
    stream.end_write(Some(1 << 20));
    assert!(transport.send_window() > SEND_BASE_WINDOW);
    drop(stream);
    sample(&pool, 1);
    assert_eq!(
        (transport.send_window(), pool.reserved()),
        (SEND_BASE_WINDOW, 0)
    );
    drop(flow);
    assert_eq!(pool.reserved(), 0);
}
