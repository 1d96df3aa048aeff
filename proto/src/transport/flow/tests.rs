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

fn session(pool: &Arc<BufferPool>) -> (Arc<SessionFlow>, Arc<AtomicU64>) {
    let window = Arc::new(AtomicU64::new(BASE_WINDOW));
    let observed = window.clone();
    let set_windows = move |windows: ReceiveWindows| {
        observed.store(windows.connection, Ordering::Relaxed);
    };
    let flow = pool.session(settings(false), set_windows, || 0);
    (flow, window)
}

/// Opens a stream whose reader has stalled.
fn stall(flow: &SessionFlow) -> Arc<ReadMonitor> {
    let read_monitor = flow.open().unwrap();
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
    let (flow, window) = session(&pool);
    assert_eq!(
        (pool.reserved(), window.load(Ordering::Relaxed)),
        (0, BASE_WINDOW)
    );
    let stream = flow.open().unwrap();
    assert_eq!(window.load(Ordering::Relaxed) * 2, FIRST);
    assert_eq!(pool.reserved(), FIRST);
    drop(stream);
    assert_eq!(pool.reserved(), 0);
    sample(&pool, 1);
    assert_eq!(window.load(Ordering::Relaxed), BASE_WINDOW);
    // The peer still has the credit, so the next stream reserves it again.
    let _stream = flow.open().unwrap();
    assert_eq!(pool.reserved(), FIRST);
}

#[tokio::test(start_paused = true)]
async fn session_whose_peer_opens_streams_reserves_what_the_peer_may_send() {
    let pool = BufferPool::new(1 << 30);
    let flow = pool.session(settings(true), |_| {}, || 0);
    assert_eq!(pool.reserved(), ACTIVE_WINDOW_MIN * 2);
    let stream = flow.accept();
    assert_eq!(pool.reserved(), FIRST);
    drop(stream);
    assert_eq!(pool.reserved(), ACTIVE_WINDOW_MIN * 2);
    drop(flow);
    assert_eq!(pool.reserved(), 0);
}

/// A sender in slow start doubles what it sends with each round trip.
#[tokio::test(start_paused = true)]
async fn window_is_ahead_of_a_sender_in_slow_start() {
    let pool = BufferPool::new(1 << 30);
    let (flow, window) = session(&pool);
    let stream = flow.open().unwrap();
    let mut flight = 240_000;
    while flight < u64::from(WINDOW) {
        let credit = window.load(Ordering::Relaxed);
        assert!(flight <= credit, "{flight} of {credit}");
        stream.count_read(usize::try_from(flight).unwrap());
        flight *= 2;
    }
    assert!(window.load(Ordering::Relaxed) >= u64::from(WINDOW));
    // A stream that goes on slowly gives the memory back.
    for _ in 0..1000 {
        stream.end_read();
        stream.count_read(100);
        sample(&pool, 1);
    }
    assert!(window.load(Ordering::Relaxed) <= 2 * (BASE_WINDOW + ACTIVE_WINDOW_MIN));
}

#[tokio::test(start_paused = true)]
async fn window_covers_stalled_streams_while_the_pool_has_room() {
    let pool = BufferPool::new(1 << 30);
    let (flow, window) = session(&pool);
    let stalled: Vec<_> = (0..3).map(|_| stall(&flow)).collect();
    sample(&pool, 1);
    let first = BASE_WINDOW + ACTIVE_WINDOW_MIN;
    assert_eq!(
        window.load(Ordering::Relaxed),
        first,
        "100 ms have not passed"
    );
    sample(&pool, 2);
    let held = 3 * u64::from(WINDOW);
    assert_eq!(window.load(Ordering::Relaxed), first + held + held / 7);
    assert!(flow.has_room());
    for stream in &stalled {
        for _ in 0..30 {
            stream.end_read();
            sample(&pool, 1);
        }
    }
    drop(stalled);
    sample(&pool, 1);
    assert_eq!(window.load(Ordering::Relaxed), BASE_WINDOW);
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test(start_paused = true)]
async fn session_with_much_unread_data_is_refused_first_and_others_have_smaller_windows() {
    let pool = BufferPool::new(16 << 20);
    let (greedy, window) = session(&pool);
    let mut streams = Vec::new();
    while greedy.has_room() {
        streams.push(stall(&greedy));
        sample(&pool, 3);
    }
    let share = pool.reserved();
    assert!(
        (3 << 20..=4 << 20).contains(&share),
        "{share}: a quarter of the pool"
    );
    assert_eq!(window.load(Ordering::Relaxed) * 2, share);
    let mut others = Vec::new();
    let mut first = u64::MAX;
    loop {
        let (other, window) = session(&pool);
        if !other.has_room() {
            break;
        }
        let stream = other.open().unwrap();
        let size = window.load(Ordering::Relaxed);
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
    let first = one.open().unwrap();
    assert!(!two.has_room());
    assert!(two.open().is_none());
    drop(first);
    assert!(two.has_room() && two.open().is_some());
}

#[tokio::test(start_paused = true)]
async fn reader_stalled_for_10_s_ends_only_when_another_stream_waits() {
    let pool = BufferPool::new(16 << 20);
    let settings = FlowSettings {
        stream_window: StreamWindow::fixed(512 << 10),
        ..settings(false)
    };
    let flow = pool.session(settings, |_| {}, || 0);
    let streams: Vec<_> = (0..12).map(|_| stall(&flow)).collect();
    // Two streams of one source hold more than any other source.
    for stream in &streams[4..6] {
        stream.set_source(7);
    }
    let ended = || streams.iter().filter(|stream| stream.must_end()).count();
    sample(&pool, 300);
    assert_eq!(ended(), 0, "nobody waits");
    let waiting = flow.open().unwrap();
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
    let window = Arc::new(AtomicU64::new(0));
    let (observed, blocked) = (window.clone(), Arc::new(AtomicU64::new(0)));
    let set_windows = move |windows: ReceiveWindows| {
        observed.store(windows.connection, Ordering::Relaxed);
    };
    let reported = blocked.clone();
    let times_blocked = move || reported.load(Ordering::Relaxed);
    let flow = pool.session(settings(true), set_windows, times_blocked);
    let _dialing = flow.accept();
    sample(&pool, 10);
    assert_eq!(
        window.load(Ordering::Relaxed),
        BASE_WINDOW + ACTIVE_WINDOW_MIN
    );
    blocked.store(1, Ordering::Relaxed);
    sample(&pool, 10);
    assert_eq!(
        window.load(Ordering::Relaxed),
        BASE_WINDOW + 2 * ACTIVE_WINDOW_MIN
    );
}

/// A transport that tells what is unread.
#[tokio::test(start_paused = true)]
async fn data_for_a_target_that_is_being_dialed_does_not_hold_the_window() {
    let pool = BufferPool::new(1 << 30);
    let (flow, window) = session(&pool);
    let dialing = flow.open().unwrap();
    dialing.set_unread(256 << 10);
    sample(&pool, 1);
    let first = BASE_WINDOW + ACTIVE_WINDOW_MIN;
    let held = 256 << 10;
    assert_eq!(window.load(Ordering::Relaxed), first + held + held / 7);
    sample(&pool, 1000);
    assert!(!dialing.must_end());
}

#[tokio::test(start_paused = true)]
async fn slow_readers_never_end_while_there_is_memory() {
    let pool = BufferPool::new(1 << 30);
    let (flow, _window) = session(&pool);
    let stalled: Vec<_> = (0..4).map(|_| stall(&flow)).collect();
    let _waiting = flow.open().unwrap();
    sample(&pool, 1000);
    assert!(!stalled.iter().any(|stream| stream.must_end()));
}

/// Returns a session of at most 16 streams whose window of 64 KiB grows to 256 KiB.
fn growing_session(pool: &Arc<BufferPool>) -> (Arc<SessionFlow>, Arc<AtomicU64>) {
    let window = Arc::new(AtomicU64::new(64 << 10));
    let observed = window.clone();
    let settings = FlowSettings {
        stream_window: StreamWindow::growing(64 << 10, 256 << 10, 16),
        ..settings(false)
    };
    let set_windows = move |windows: ReceiveWindows| {
        observed.store(windows.stream, Ordering::Relaxed);
    };
    let flow = pool.session(settings, set_windows, || 0);
    (flow, window)
}

#[tokio::test(start_paused = true)]
async fn stream_window_grows_to_four_round_trips_while_few_streams_are_open() {
    let pool = BufferPool::new(1 << 30);
    let (flow, window) = growing_session(&pool);
    let kib = |flow: &SessionFlow, kib_per_rtt: u64| {
        flow.widen(kib_per_rtt << 10);
        window.load(Ordering::Relaxed) >> 10
    };
    let mut streams = vec![flow.open()];
    assert_eq!(kib(&flow, 16), 64, "the window is large enough");
    assert_eq!(kib(&flow, 17), 128);
    assert_eq!(kib(&flow, 32), 128);
    assert_eq!(kib(&flow, 1 << 20), 256);
    assert_eq!(kib(&flow, 1 << 20), 256, "the maximum");
    streams.push(flow.open());
    assert_eq!(kib(&flow, 0), 256, "half of the bound");
    streams.push(flow.open());
    assert_eq!(kib(&flow, 0), 64, "three streams could hold 768 KiB");
    streams.truncate(2);
    sample(&pool, 1);
    assert_eq!(kib(&flow, 1 << 20), 128);
    assert_eq!(kib(&flow, 1 << 20), 128, "more would be half of the bound");
}

#[tokio::test(start_paused = true)]
async fn stream_window_does_not_grow_when_the_pool_is_short() {
    let pool = BufferPool::new(1 << 30);
    let (flow, window) = growing_session(&pool);
    let _stream = flow.open();
    flow.widen(1 << 30);
    assert_eq!(window.load(Ordering::Relaxed), 128 << 10);
    let rest = pool.free();
    assert!(pool.try_reserve(rest));
    flow.lock().stalled.bytes = 1 << 20;
    flow.widen(1 << 30);
    assert_eq!(window.load(Ordering::Relaxed), 128 << 10);
    flow.narrow(&mut flow.lock());
    assert_eq!(window.load(Ordering::Relaxed), 64 << 10);
    pool.release(rest);
}
