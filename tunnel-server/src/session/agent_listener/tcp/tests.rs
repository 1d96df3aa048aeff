use std::collections::BTreeSet;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::sign::CertifiedKey;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tunnel_process::conn_limiter::{ConnLimiter, ConnLimits};
use tunnel_proto::calibration::scaled;
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::{BufferPool, CongestionControl, Dialer as _, TransportKind};
use tunnel_proto::wire::control::ControlMessage;

use super::*;
use crate::routing::registry::CallerKey;
use crate::testing::{self, Bench, assert_contains, eventually, header, node, say_hello};
use tunnel_ca::LocalCa;
use tunnel_ca::tokens::TokenStore;
use tunnel_store::data_dir::testing::Scratch;
use tunnel_store::known_nodes::KnownNodes;

const CONNS_PER_SOURCE: usize = 8;
/// Timeout of steps over loopback on a busy machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The TCP listener on port 10262.
struct Listener {
    bench: Bench,
    ca: Arc<LocalCa>,
    address: SocketAddr,
    limiter: Arc<ConnLimiter>,
    _scratch: Scratch,
}

fn settings() -> SessionSettings {
    SessionSettings {
        stream_window: 1 << 20,
        streams: 16,
        keep_alive: None,
        idle_timeout: Duration::from_secs(30),
        congestion: CongestionControl::default(),
        pool: BufferPool::new(64 << 20),
    }
}

impl Listener {
    async fn open(handshake_limit: Duration) -> Self {
        let (bench, scratch) = (Bench::new(), Scratch::new());
        let ca = Arc::new(LocalCa::load_or_create(&scratch.0).unwrap());
        let own = ca.server_resolver(Box::new(|_| {}));
        let roots = tls::roots([ca.root().clone()]).unwrap();
        let entry = Arc::new(TcpHandler {
            session_tls: tls::session_server_of_roots(own.clone(), roots, ALPN_SESSION_TCP)
                .unwrap(),
            settings: settings(),
            enroll_tls: tls::enroll_server(own).unwrap(),
            enrollment: Enrollment {
                renewals: None,
                tokens: Arc::new(TokenStore::open(&scratch.0).unwrap()),
                nodes: Arc::new(KnownNodes::open(&scratch.0).unwrap()),
                is_taken: Arc::new(|_| Some(false)),
                attestor: None,
                peers: None,
            },
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limiter = ConnLimiter::new(ConnLimits {
            per_source: CONNS_PER_SOURCE,
            total: 2 * CONNS_PER_SOURCE,
        });
        let (sessions, permits) = (Arc::new(bench.sessions.clone()), limiter.clone());
        let accept = async move {
            loop {
                let (socket, peer) = listener.accept().await.unwrap();
                let Ok(permit) = permits.acquire(peer.ip()) else {
                    continue;
                };
                let half_open = HalfOpenConn {
                    sessions: sessions.clone(),
                    peer,
                    deadline: Instant::now() + handshake_limit,
                    permit,
                };
                let entry = entry.clone();
                let serve = async move { entry.serve(socket, peer, half_open).await };
                sessions.shutdown.spawn_service(serve);
            }
        };
        bench.sessions.shutdown.spawn_service(accept);
        Self {
            bench,
            ca,
            address,
            limiter,
            _scratch: scratch,
        }
    }

    fn agent_key(&self) -> Arc<CertifiedKey> {
        let key = KeyPair::generate().unwrap();
        let request = CertificateParams::default().serialize_request(&key);
        let request = request.unwrap();
        let issued = self.ca.issue_agent(request.der(), &node()).unwrap();
        let key = key.serialize_der().try_into().unwrap();
        tls::certified_key(issued.chain, key).unwrap()
    }

    /// Connects with these protocols, and with or without a certificate. Returns the negotiated
    /// protocol, or the error that ends the connection.
    async fn connect(
        &self,
        offer: &[&[u8]],
        key: Option<Arc<CertifiedKey>>,
    ) -> Result<String, String> {
        let trust = Trust::Pin(self.ca.spki_sha256());
        let config = match key {
            Some(key) => tls::session_client(key, trust, b"").unwrap(),
            None => tls::enroll_client(trust).unwrap(),
        };
        let mut config = rustls::ClientConfig::clone(&config);
        config.alpn_protocols = offer.iter().map(|id| id.to_vec()).collect();
        let socket = TcpStream::connect(self.address).await.unwrap();
        let name = "any.invalid".try_into().unwrap();
        let connect = TlsConnector::from(Arc::new(config)).connect(name, socket);
        let mut stream = within(connect).await.map_err(|error| error.to_string())?;
        let agreed = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        // In TLS 1.3 the server verifies the client after the client's handshake has returned, so
        // the result shows in the server's first bytes. Enrollment waits for the client's bytes.
        if offer != [ALPN_ENROLL] {
            let first = within(stream.read_u8()).await;
            first.map_err(|error| error.to_string())?;
        }
        Ok(String::from_utf8(agreed.unwrap_or_default()).unwrap())
    }

    /// Waits until a failure with this code is remembered so many times.
    async fn remembers(&self, code: &str, count: u64) {
        let failures = &self.bench.sessions.failures;
        eventually(code, || {
            let all = failures.all();
            let mut of_code = all.iter().filter(|failure| failure.code == code);
            of_code.any(|failure| failure.count == count)
        })
        .await;
    }

    fn handshakes(&self, result: &str) -> Option<u64> {
        let metric = format!("tunnel_server_handshakes_total{{result=\"{result}\"}}");
        self.bench.metric(&metric)
    }

    async fn all_permits_are_free(&self) {
        eventually("every permit is free", || {
            self.limiter.permits_in_use() == 0
        })
        .await;
    }
}

#[test]
fn enrollment_must_be_offered_alone() {
    let of = |ids: &[&'static [u8]]| AlpnOffer::of(ids.iter().copied());
    assert_eq!(of(&[ALPN_ENROLL]), AlpnOffer::Enrollment);
    assert_eq!(of(&[ALPN_SESSION_TCP]), AlpnOffer::Session);
    assert_eq!(of(&[b"http/1.1", ALPN_SESSION_TCP]), AlpnOffer::Session);
    let unsuitable: BTreeSet<Vec<&'static [u8]>> = [
        vec![],
        vec![&b"http/1.1"[..]],
        vec![&b""[..]],
        vec![ALPN_ENROLL, ALPN_SESSION_TCP],
        vec![ALPN_SESSION_TCP, ALPN_ENROLL],
        vec![ALPN_ENROLL, ALPN_ENROLL],
        vec![ALPN_ENROLL, b"http/1.1"],
    ]
    .into();
    for ids in unsuitable {
        assert_eq!(of(&ids), AlpnOffer::Unsupported, "{ids:?}");
    }
}

#[tokio::test]
async fn other_protocols_none_and_both_end_in_the_handshake() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let offers: [&[&[u8]]; 5] = [
        &[],
        &[b"http/1.1"],
        &[b"culvert/1"],
        &[ALPN_ENROLL, ALPN_SESSION_TCP],
        &[ALPN_SESSION_TCP, ALPN_ENROLL],
    ];
    for offer in offers {
        for key in [None, Some(test_listener.agent_key())] {
            let error = test_listener.connect(offer, key).await.unwrap_err();
            let is_alert = error.contains("NoApplicationProtocol");
            assert!(is_alert, "{offer:?}: {error}");
        }
    }
    assert_eq!(test_listener.handshakes("unknown_protocol"), Some(10));
    test_listener.all_permits_are_free().await;
}

#[tokio::test]
async fn header_of_a_load_balancer_is_known_and_ends_the_connection() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let headers: [&[u8]; 2] = [
        b"PROXY TCP4 192.0.2.1 192.0.2.2 40000 10262\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\xc0\0\x02\x02\x9c\x40\x28\x16",
    ];
    for header in headers {
        let mut socket = TcpStream::connect(test_listener.address).await.unwrap();
        socket.write_all(header).await.unwrap();
        // The unread header makes the end a reset.
        let _end_or_reset = within(socket.read(&mut [0])).await;
    }
    let is_counted = || test_listener.handshakes("proxy_protocol") == Some(2);
    eventually("both are counted", is_counted).await;
    test_listener.remembers("proxy_protocol", 2).await;
    test_listener.all_permits_are_free().await;
}

#[tokio::test]
async fn connection_without_tls_is_remembered_and_one_without_bytes_is_not() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    for bytes in [&b""[..], b"GET / HTTP/1.1\r\n\r\n"] {
        let mut socket = TcpStream::connect(test_listener.address).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        socket.shutdown().await.unwrap();
        let _end_or_reset = within(socket.read(&mut [0])).await;
    }
    test_listener.remembers("not_tls", 1).await;
    assert_eq!(test_listener.handshakes("handshake_failed"), Some(1));
    assert_eq!(test_listener.bench.sessions.failures.all().len(), 1);
    test_listener.all_permits_are_free().await;
}

#[tokio::test]
async fn enrollment_needs_no_certificate_and_a_session_does() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let agreed = test_listener.connect(&[ALPN_ENROLL], None).await;
    assert_eq!(agreed.as_deref(), Ok("culvert-enroll/1"));
    let error = test_listener.connect(&[ALPN_SESSION_TCP], None).await;
    assert_contains(&error.unwrap_err(), "CertificateRequired");
    let is_counted = || test_listener.handshakes("handshake_failed") == Some(1);
    eventually("the failure is counted", is_counted).await;
    test_listener.remembers("no_certificate", 1).await;
    let key = Some(test_listener.agent_key());
    let agreed = test_listener.connect(&[ALPN_SESSION_TCP], key).await;
    assert_eq!(agreed.as_deref(), Ok("h2"));
    test_listener.all_permits_are_free().await;
}

#[tokio::test]
async fn certificate_of_another_ca_ends_in_the_handshake() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let other = Listener::open(WAIT_TIMEOUT).await;
    let key = Some(other.agent_key());
    let error = test_listener.connect(&[ALPN_SESSION_TCP], key).await;
    assert_contains(&error.unwrap_err(), "UnknownCA");
    test_listener.remembers("credential_untrusted", 1).await;
    assert!(test_listener.bench.sessions.registry.all().is_empty());
}

#[tokio::test]
async fn agent_is_admitted_over_h2_and_holds_no_unauthenticated_permit() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let trust = Trust::Pin(test_listener.ca.spki_sha256());
    let tls = tls::session_client(test_listener.agent_key(), trust, ALPN_SESSION_TCP).unwrap();
    let dialer = H2Dialer::new(tls, settings(), Arc::new(Direct));
    let remote = ServerAddr {
        name: test_listener.address.to_string(),
        address: Some(test_listener.address),
    };
    let session = within(dialer.dial(&remote)).await.unwrap();
    let (mut reader, _writer) = say_hello(&*session, 1).await;
    let answer = within(reader.receive()).await.unwrap();
    assert!(matches!(answer, Some(ControlMessage::Welcome(_))));
    let bench = &test_listener.bench;
    let registry = &bench.sessions.registry;
    let registered = registry.of_node(&node());
    assert_eq!(registered[0].session.transport(), TransportKind::H2);
    let remote = registered[0].session.stats().remote;
    assert_eq!(remote.ip(), test_listener.address.ip());
    let agents = "tunnel_server_agents{transport=\"h2\"}";
    eventually("the agent is counted", || bench.metric(agents) == Some(1)).await;
    let operator = CallerKey::Local(None);
    let opened = within(testing::open(registry, &node(), &operator)).await;
    let mut opened = opened.unwrap().stream;
    let incoming = within(session.accept()).await.unwrap();
    let asked = incoming.header(Instant::now() + WAIT_TIMEOUT);
    let (asked, mut accepted) = asked.await.unwrap();
    assert_eq!(asked, header());
    accepted.accept("").await.unwrap();
    accepted.write_all(b"!").await.unwrap();
    assert_eq!(within(opened.read_u8()).await.unwrap(), b'!');
    assert_eq!(test_listener.handshakes("ok"), Some(1));
    assert_eq!(test_listener.limiter.permits_in_use(), 0);
}

#[tokio::test]
async fn unauthenticated_peer_that_stays_silent_releases_its_permit() {
    let test_listener = Listener::open(Duration::from_millis(100)).await;
    let mut socket = TcpStream::connect(test_listener.address).await.unwrap();
    let ended = within(socket.read_u8()).await;
    assert!(ended.is_err(), "the connection was not ended");
    let is_counted = || test_listener.handshakes("timeout") == Some(1);
    eventually("the timeout is counted", is_counted).await;
    test_listener.all_permits_are_free().await;
}

#[tokio::test]
async fn silent_crowd_of_one_address_loses_its_oldest_and_an_agent_gets_in() {
    let test_listener = Listener::open(WAIT_TIMEOUT).await;
    let mut crowd = Vec::new();
    for admitted in 1..=CONNS_PER_SOURCE {
        crowd.push(TcpStream::connect(test_listener.address).await.unwrap());
        let has_permit = || test_listener.limiter.permits_in_use() == admitted;
        eventually("the connection has its permit", has_permit).await;
    }
    assert_eq!(test_listener.handshakes("evicted"), Some(0), "at the limit");
    let pushes = async {
        // In its first second the connection is protected from eviction by its neighbors.
        while let Err(_still_there) =
            tokio::time::timeout(Duration::from_millis(100), crowd[0].read_u8()).await
        {
            crowd.push(TcpStream::connect(test_listener.address).await.unwrap());
        }
    };
    within(pushes).await;
    let is_counted = || test_listener.handshakes("evicted") > Some(0);
    eventually("the eviction is counted", is_counted).await;
    let key = Some(test_listener.agent_key());
    let agreed = test_listener.connect(&[ALPN_SESSION_TCP], key).await;
    assert_eq!(agreed.as_deref(), Ok("h2"));
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(scaled(WAIT_TIMEOUT), future).await;
    done.expect("timed out")
}

/// A connection keeps its task for the life of its session, and each of many new connections has
/// one handshake.
#[test]
fn task_of_a_connection_is_small() {
    fn serving<'a, F>(
        _: impl FnOnce(&'a TcpHandler, TcpStream, SocketAddr, HalfOpenConn) -> F,
    ) -> usize {
        size_of::<F>()
    }
    fn meeting<'a, F>(
        _: impl FnOnce(&'a TcpHandler, TcpStream, SocketAddr, &'a HalfOpenConn) -> F,
    ) -> usize {
        size_of::<F>()
    }
    let (serving, meeting) = (serving(TcpHandler::serve), meeting(TcpHandler::dispatch));
    assert!(
        serving <= 1024 && meeting <= 5120,
        "{serving}, {meeting} bytes"
    );
}
