//! A transport for tests of flow control.

use super::*;

/// What a session asked of its transport, and what the transport reports.
#[derive(Clone)]
pub(in crate::transport) struct TestTransport(Arc<TransportState>);

struct TransportState {
    windows: Mutex<ReceiveWindows>,
    on_windows: Box<dyn Fn(ReceiveWindows) + Send + Sync>,
    /// `None` if the transport reports what is unread.
    blocked: Option<AtomicU64>,
    reports: AtomicU64,
    waiting_reports: AtomicU64,
    congestion_window: Option<u64>,
    send_window: AtomicU64,
}

impl TestTransport {
    pub(in crate::transport) fn new(
        on_windows: impl Fn(ReceiveWindows) + Send + Sync + 'static,
    ) -> Self {
        Self::create(Some(AtomicU64::new(0)), None, Box::new(on_windows))
    }

    /// Creates a transport that reports what is unread, and not that the peer is blocked.
    pub(super) fn with_unread_reports() -> Self {
        Self::create(None, None, Box::new(|_| {}))
    }

    pub(super) fn with_congestion_window(bytes: u64) -> Self {
        Self::create(Some(AtomicU64::new(0)), Some(bytes), Box::new(|_| {}))
    }

    fn create(
        blocked: Option<AtomicU64>,
        congestion_window: Option<u64>,
        on_windows: Box<dyn Fn(ReceiveWindows) + Send + Sync>,
    ) -> Self {
        Self(Arc::new(TransportState {
            windows: Mutex::new(ReceiveWindows {
                stream: 0,
                connection: BASE_WINDOW,
            }),
            on_windows,
            blocked,
            reports: AtomicU64::new(0),
            waiting_reports: AtomicU64::new(0),
            congestion_window,
            send_window: AtomicU64::new(SEND_BASE_WINDOW),
        }))
    }

    pub(super) fn connection_window(&self) -> u64 {
        self.0.windows.lock().connection
    }

    pub(super) fn stream_window(&self) -> u64 {
        self.0.windows.lock().stream
    }

    pub(super) fn send_window(&self) -> u64 {
        self.0.send_window.load(Ordering::Relaxed)
    }

    pub(super) fn reports(&self) -> u64 {
        self.0.reports.load(Ordering::Relaxed)
    }

    pub(super) fn waiting_reports(&self) -> u64 {
        self.0.waiting_reports.load(Ordering::Relaxed)
    }

    pub(super) fn block(&self) {
        if let Some(blocked) = &self.0.blocked {
            blocked.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl FlowTransport for TestTransport {
    fn set_windows(&self, windows: ReceiveWindows) {
        *self.0.windows.lock() = windows;
        (self.0.on_windows)(windows);
    }

    fn times_blocked(&self) -> Option<u64> {
        let blocked = self.0.blocked.as_ref()?;
        Some(blocked.load(Ordering::Relaxed))
    }

    fn report_shortage(&self) {
        self.0.reports.fetch_add(1, Ordering::Relaxed);
    }

    fn report_waiting(&self) {
        self.0.waiting_reports.fetch_add(1, Ordering::Relaxed);
    }

    fn congestion_window(&self) -> Option<u64> {
        self.0.congestion_window
    }

    fn set_send_window(&self, bytes: u64) {
        self.0.send_window.store(bytes, Ordering::Relaxed);
    }
}
