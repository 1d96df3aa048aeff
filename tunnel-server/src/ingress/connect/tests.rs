use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tunnel_process::scratch::ScratchDir;
use tunnel_proto::dial::{Resolve, ResolveFuture};
use tunnel_proto::wire::code::RefusalCode;

use super::DirectDialer;
use crate::ingress::connect::basic_auth::{BasicAuth, BasicAuthUsers};
use crate::ingress::context::{ConnectProxy, HttpListener};
use crate::ingress::http::tests::fixture::{Fixture, HI, assert_status, head};
use crate::routing::routes::{RouteNode, RouteSource, Routes};
use crate::testing::{assert_contains, eventually, within};
use tunnel_routing::dial_policy::{DialPolicy, LiveClusterNetworks};

mod fuzz;

/// The complete response to a CONNECT that was granted.
const GRANTED: &str = "HTTP/1.1 200 OK\r\n\r\n";
const ASK: &str = "CONNECT worker-1:9100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";

/// Returns a caller over TCP that has sent these bytes to a listener without passwords.
async fn dial(fixture: &Fixture, direct: &[&str], sent: &str) -> TcpStream {
    let mut caller = fixture.dial_at(connect_listener(None, direct)).await;
    caller.write_all(sent.as_bytes()).await.unwrap();
    caller
}

async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut text = String::new();
    within(stream.read_to_string(&mut text)).await.unwrap();
    text
}

fn connect_listener(passwords: Option<&str>, direct: &[&str]) -> Arc<HttpListener> {
    let listed = direct.iter().map(|text| text.parse().unwrap()).collect();
    let dial_policy = DialPolicy::Listed(listed, LiveClusterNetworks::default());
    let passwords = passwords.map(|text| {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("passwords", text).unwrap();
        let (_, passwords) = BasicAuthUsers::load(&path).unwrap();
        Arc::new(BasicAuth::new(passwords))
    });
    Fixture::connect_proxy(ConnectProxy {
        passwords,
        is_tls_optional: true,
        direct: Arc::new(DirectDialer::new(dial_policy, Duration::from_secs(5))),
    })
}

/// P4: the status is 200, and no byte follows the head before the caller sends data. Bytes after
/// the caller's head go to the target.
#[tokio::test]
async fn p04_answer_is_exactly_200_and_pipelined_bytes_arrive() {
    let (fixture, agent) = Fixture::with_agent();
    for (early, late) in [("", "hello"), ("he", "llo"), ("hello", "")] {
        let mut caller = fixture.connect_at(connect_listener(None, &[]));
        let asks = async {
            let sent = format!("{ASK}{early}");
            caller.write_all(sent.as_bytes()).await.unwrap();
            assert_eq!(head(&mut caller).await, GRANTED);
            let silent = timeout(Duration::from_millis(20), caller.read_u8()).await;
            assert!(silent.is_err(), "a byte came before the caller spoke");
            caller.write_all(late.as_bytes()).await.unwrap();
        };
        let (mut stream, ()) = tokio::join!(agent.accepts(), asks);
        let mut received = [0; 5];
        within(stream.read_exact(&mut received)).await.unwrap();
        assert_eq!(&received, b"hello");
        stream.write_all(b"answer").await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(read_all(&mut caller).await, "answer");
    }
}

#[tokio::test]
async fn half_close_is_kept_also_before_the_answer() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = dial(&fixture, &[], &format!("{ASK}all")).await;
    caller.shutdown().await.unwrap();
    let mut stream = agent.accepts().await;
    assert_eq!(read_all(&mut stream).await, "all");
    stream.write_all(b"late").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut caller).await, format!("{GRANTED}late"));
}

/// The caller's FIN follows its head directly. The response comes later, when the target is
/// connected.
#[tokio::test]
async fn half_close_right_behind_the_head_is_kept_until_the_answer_and_beyond() {
    let (fixture, agent) = Fixture::with_agent();
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = target.local_addr().unwrap();
    let mut caller = dial(&fixture, &[], ASK).await;
    caller.shutdown().await.unwrap();
    let mut stream = agent.stream().await;
    // The listener has had time to see the end before it can respond.
    assert!(agent.is_left_alone().await);
    stream.accept("").await.unwrap();
    speaks_after_the_end(&mut stream).await;
    assert_eq!(read_all(&mut caller).await, format!("{GRANTED}late"));

    let ask = format!("CONNECT {address} HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut caller = dial(&fixture, &["127.0.0.1/32"], &ask).await;
    caller.shutdown().await.unwrap();
    let (mut socket, _) = within(target.accept()).await.unwrap();
    speaks_after_the_end(&mut socket).await;
    drop(socket);
    assert_eq!(read_all(&mut caller).await, format!("{GRANTED}late"));
}

async fn speaks_after_the_end<S: AsyncRead + AsyncWrite + Unpin>(target: &mut S) {
    assert_eq!(read_all(target).await, "");
    target.write_all(b"late").await.unwrap();
    target.shutdown().await.unwrap();
}

#[tokio::test]
async fn cut_is_a_cut_on_either_side() {
    let (fixture, agent) = Fixture::with_agent();
    // The target's side: the stream is dropped before its end.
    let mut caller = dial(&fixture, &[], ASK).await;
    let mut stream = agent.accepts().await;
    stream.write_all(b"part").await.unwrap();
    assert_eq!(head(&mut caller).await, GRANTED);
    drop(stream);
    let mut rest = Vec::new();
    let ended = within(caller.read_to_end(&mut rest)).await.unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::ConnectionReset);
    // The caller's side: the socket is reset.
    let mut caller = dial(&fixture, &[], ASK).await;
    let mut stream = agent.accepts().await;
    assert_eq!(head(&mut caller).await, GRANTED);
    tunnel_proto::tcp::abort_on_close(&caller).unwrap();
    drop(caller);
    let mut rest = Vec::new();
    within(stream.read_to_end(&mut rest)).await.unwrap_err();
}

#[tokio::test]
async fn refusals_are_reported_and_the_connection_can_be_reused() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect_at(connect_listener(None, &[]));
    for target in ["worker-1:22", "unknown:443", "169.254.169.254:80"] {
        let ask = format!("CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        caller.write_all(ask.as_bytes()).await.unwrap();
        let answer = head(&mut caller).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{target}: {answer}");
        assert_contains(&answer, "X-Tunnel-Error: refused_by_policy");
        while within(caller.read_u8()).await.unwrap() != b'\n' {}
    }
    caller.write_all(ASK.as_bytes()).await.unwrap();
    agent.refuses(RefusalCode::TargetRefused).await;
    assert_status(&head(&mut caller).await, 502);
    assert!(agent.is_left_alone().await);
}

/// S44: a password for metrics opens no stream for anything other than a plain read.
#[tokio::test]
async fn s44_upgrades_and_other_methods_are_refused_before_any_stream_opens() {
    let (fixture, agent) = Fixture::with_agent();
    let websocket = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n";
    let exec = "http://worker-1:9100/exec/a/b/c?command=sh";
    for (method, fields) in [
        ("GET", websocket),
        ("GET", "Upgrade: SPDY/3.1\r\n"),
        ("GET", "Connection: Upgrade\r\n"),
        ("POST", ""),
        ("POST", "Content-Length: 0\r\n"),
        ("PUT", ""),
        ("DELETE", ""),
        ("OPTIONS", ""),
        ("PATCH", ""),
    ] {
        let ask = format!("{method} {exec} HTTP/1.1\r\nHost: worker-1:9100\r\n{fields}\r\n");
        let mut caller = fixture.connect_at(connect_listener(None, &[]));
        caller.write_all(ask.as_bytes()).await.unwrap();
        let answer = head(&mut caller).await;
        let is_refused = answer.starts_with("HTTP/1.1 403 ");
        assert!(is_refused, "{method} {fields}: {answer}");
    }
    assert!(agent.is_left_alone().await);
}

#[tokio::test]
async fn passwords_are_asked_for_and_never_passed_on() {
    let (fixture, agent) = Fixture::with_agent();
    let auth = |pair: &str| {
        let pair = BASE64_STANDARD.encode(pair);
        format!("Proxy-Authorization: Basic {pair}\r\n")
    };
    let url = "GET http://worker-1:9100/metrics?x=1 HTTP/1.1\r\nHost: elsewhere\r\n";
    let connect = "CONNECT worker-1:9100 HTTP/1.1\r\nHost: x\r\n";
    let right = "prometheus:right-0123456789";
    let wrong = auth("prometheus:wrong");
    let other = auth("other:right-0123456789");
    for ask in [url, connect] {
        for fields in ["", &wrong, &other] {
            let ask = format!("{ask}{fields}\r\n");
            let listener = connect_listener(Some(right), &[]);
            let answer = fixture.ask_at(listener, &ask).await;
            assert_status(&answer, 407);
            assert_contains(&answer, "Proxy-Authenticate: Basic realm=");
        }
    }
    assert!(agent.is_left_alone().await);
    let ask = format!("{url}{}Connection: close\r\n\r\n", auth(right));
    let asks = fixture.ask_at(connect_listener(Some(right), &[]), &ask);
    let (answer, seen) = tokio::join!(asks, agent.answers());
    assert!(answer.ends_with("hi"), "{answer}");
    assert!(seen.starts_with("GET /metrics?x=1 HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("worker-1:9100\r\n"), "{seen}");
    assert!(!seen.to_lowercase().contains("proxy-"), "{seen}");
    assert!(!seen.contains("elsewhere"), "{seen}");
}

#[tokio::test]
async fn names_of_no_node_are_dialed_by_the_server_within_its_list() {
    let fixture = Fixture::new();
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = target.local_addr().unwrap();
    let ask = format!("CONNECT {address} HTTP/1.1\r\nHost: x\r\n\r\n");
    let mut caller = dial(&fixture, &["10.0.0.0/8"], &ask).await;
    assert_status(&head(&mut caller).await, 403);

    let loopback = &["127.0.0.1/32"];
    let mut caller = dial(&fixture, loopback, &format!("{ask}ping")).await;
    let (mut socket, _) = within(target.accept()).await.unwrap();
    assert_eq!(head(&mut caller).await, GRANTED);
    let mut ping = [0; 4];
    within(socket.read_exact(&mut ping)).await.unwrap();
    assert_eq!(fixture.metric("tunnel_server_connect_direct_open"), 1);
    // A reset by the target resets the caller's connection, and the reverse.
    tunnel_proto::tcp::abort_on_close(&socket).unwrap();
    drop(socket);
    within(caller.read_u8()).await.unwrap_err();
    let mut caller = dial(&fixture, loopback, &ask).await;
    let (mut socket, _) = within(target.accept()).await.unwrap();
    assert_eq!(head(&mut caller).await, GRANTED);
    tunnel_proto::tcp::abort_on_close(&caller).unwrap();
    drop(caller);
    let cut = within(socket.read_u8()).await.unwrap_err();
    assert_eq!(cut.kind(), io::ErrorKind::ConnectionReset);

    // A plain request to another host, whose Host comes from the URL.
    let ask = format!("GET http://{address}/m HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let serves = async {
        let (mut socket, _) = within(target.accept()).await.unwrap();
        let seen = head(&mut socket).await;
        socket.write_all(HI.as_bytes()).await.unwrap();
        seen
    };
    let asks = fixture.ask_at(connect_listener(None, loopback), &ask);
    let (seen, answer) = tokio::join!(serves, asks);
    assert!(seen.starts_with("GET /m HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains(&format!("{address}\r\n")), "{seen}");
    assert!(answer.ends_with("hi"), "{answer}");
}

/// A resolver that answers with the address of a node which comes during the lookup.
#[derive(Debug)]
struct SlowResolver {
    routes: Routes,
    address: SocketAddr,
}

impl Resolve for SlowResolver {
    fn resolve<'a>(&'a self, _name: &'a str, _port: u16) -> ResolveFuture<'a> {
        let node = RouteNode::edge("edge-1".parse().unwrap(), vec![self.address.ip()]);
        self.routes.set(RouteSource::Cluster, vec![node]);
        let resolved = vec![self.address];
        Box::pin(async move { Ok(resolved) })
    }
}

#[tokio::test]
async fn node_that_comes_during_the_lookup_of_a_name_is_not_dialed_past_its_agent() {
    let fixture = Fixture::new();
    let canary = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = canary.local_addr().unwrap();
    let listed = vec!["127.0.0.0/8".parse().unwrap()];
    let dial_policy = DialPolicy::Listed(listed, LiveClusterNetworks::default());
    let resolver = Box::new(SlowResolver {
        routes: fixture.ingress.routes.clone(),
        address,
    });
    let direct = DirectDialer::with_resolver(dial_policy, Duration::from_secs(5), resolver);
    let listener = Fixture::connect_proxy(ConnectProxy {
        passwords: None,
        is_tls_optional: true,
        direct: Arc::new(direct),
    });
    let mut caller = fixture.connect_at(listener);
    let port = address.port();
    let ask = format!("CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n");
    caller.write_all(ask.as_bytes()).await.unwrap();
    let answer = head(&mut caller).await;
    assert_status(&answer, 403);
    assert_contains(&answer, "edge-1, which is reached through its agent");
}

#[tokio::test(start_paused = true)]
async fn caller_that_takes_nothing_hides_no_cut_of_a_target_that_the_server_dialed() {
    let fixture = Fixture::new();
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = target.local_addr().unwrap();
    let mut caller = fixture.connect_at(connect_listener(None, &["127.0.0.1/32"]));
    let ask = format!("GET http://{address}/m HTTP/1.1\r\nHost: x\r\n\r\n");
    caller.write_all(ask.as_bytes()).await.unwrap();
    let (mut socket, _) = within(target.accept()).await.unwrap();
    head(&mut socket).await;
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n";
    socket.write_all(answer).await.unwrap();
    let piece = vec![7; 64 << 10];
    while let Ok(written) = timeout(Duration::from_secs(2), socket.write_all(&piece)).await {
        written.unwrap();
    }
    tunnel_proto::tcp::abort_on_close(&socket).unwrap();
    drop(socket);
    let cut = "tunnel_server_streams_total{result=\"cut\"}";
    eventually("cut", || fixture.metric(cut) == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let fixture = Fixture::new();
    for begun in ["", "CONNECT worker-1:9100 HT"] {
        let mut caller = fixture.connect_at(connect_listener(None, &[]));
        caller.write_all(begun.as_bytes()).await.unwrap();
        let began = tokio::time::Instant::now();
        let mut rest = Vec::new();
        let _ended = caller.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
        let took = began.elapsed();
        assert!((10..11).contains(&took.as_secs()), "{took:?}");
    }
}

#[tokio::test]
async fn caller_that_ends_between_requests_is_let_go() {
    let fixture = Fixture::new();
    let ask = "CONNECT worker-1:22 HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut caller = dial(&fixture, &[], ask).await;
    let _refused = head(&mut caller).await;
    caller.shutdown().await.unwrap();
    let mut rest = Vec::new();
    within(caller.read_to_end(&mut rest)).await.unwrap();
}

#[test]
fn access_log_contains_neither_passwords_nor_queries() {
    let url = "http://u:secret@worker-1:9100/m?token=secret";
    for (method, uri, expected) in [
        ("CONNECT", "worker-1:9100", "CONNECT worker-1:9100"),
        ("CONNECT", "u:secret@worker-1:9100", "CONNECT worker-1:9100"),
        ("GET", url, "GET worker-1:9100/m"),
        ("GET", "/m?token=secret", "GET /m"),
    ] {
        let request = http::Request::builder().method(method).uri(uri);
        let request = request.body(()).unwrap();
        assert_eq!(super::subject(&request), expected);
    }
}
