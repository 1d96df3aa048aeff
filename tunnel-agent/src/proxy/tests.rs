use std::future::ready;

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_process::diag::redact::redact;
use tunnel_proto::transport::TransportKind;

use super::testing::FakeProxy;
use super::*;
use crate::app::App;
use crate::config::{Config, RawConfig};
use crate::testing::ScratchDir;
use crate::testing::server::Server;

const LONG: Duration = Duration::from_secs(10);
const CLOUD: &str = "cloud.example.com:10262";
const OK: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

fn remote(name: &str) -> ServerAddr {
    ServerAddr {
        name: name.to_owned(),
        address: None,
    }
}

fn proxy(fake_proxy: &FakeProxy, user: &str) -> HttpProxy {
    let url = format!("http://{user}{}", fake_proxy.address());
    url.parse().unwrap()
}

/// Returns the client's result after `answer`, and its request.
async fn answered(
    client: &dyn Connect,
    name: &str,
    by: &FakeProxy,
    answer: &[u8],
) -> (io::Result<TcpStream>, String) {
    let server = remote(name);
    let both = async { tokio::join!(client.connect(&server), by.answer(answer)) };
    let (connected, (request, _socket)) = timeout(LONG, both).await.unwrap();
    (connected, request)
}

#[tokio::test]
async fn servers_first_bytes_right_behind_the_head_are_not_lost() {
    let fake_proxy = FakeProxy::start().await;
    let proxy = proxy(&fake_proxy, "");
    let value = "a".repeat(HEAD_MAX - 24);
    let longest = format!("HTTP/1.1 200 OK\r\nA: {value}\r\n\r\n");
    for head in [
        "HTTP/1.1 200 Connection established\r\n\r\n",
        "HTTP/1.0 200 OK\r\nProxy-Agent: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 299\r\n\r\n",
        "HTTP/1.1 200 OK\nVia: x\n\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\nHTTP/1.1 204 Fine\r\n\r\n",
        &longest,
    ] {
        let bytes = format!("{head}\r\n\r\nserver speaks first\n\n");
        let (connected, _) = answered(&proxy, CLOUD, &fake_proxy, bytes.as_bytes()).await;
        let mut socket = connected.unwrap_or_else(|error| panic!("{head:?}: {error}"));
        assert!(socket.nodelay().unwrap());
        let mut received = String::new();
        let read = timeout(LONG, socket.read_to_string(&mut received)).await;
        read.unwrap().unwrap();
        assert_eq!(received, "\r\n\r\nserver speaks first\n\n", "{head:?}");
    }
}

/// The proxy might resolve the name to an address that this host may not dial.
#[tokio::test]
async fn proxy_dials_the_address_that_this_host_has_resolved() {
    let fake_proxy = FakeProxy::start().await;
    let proxy = proxy(&fake_proxy, "");
    for (address, target) in [
        ("192.0.2.7:10262", "192.0.2.7:10262"),
        ("[2001:db8::7]:10262", "[2001:db8::7]:10262"),
    ] {
        let server = ServerAddr {
            name: CLOUD.to_owned(),
            address: Some(address.parse().unwrap()),
        };
        let both = async { tokio::join!(proxy.connect(&server), fake_proxy.answer(OK)) };
        let (connected, (request, _socket)) = timeout(LONG, both).await.unwrap();
        connected.unwrap();
        let expected = format!("CONNECT {target} HTTP/1.1\r\n");
        assert!(request.starts_with(&expected), "{request}");
    }
}

#[tokio::test]
async fn head_may_arrive_in_pieces() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let head = "HTTP/1.1 200 OK\r\nA: b\r\n\r\n";
    for cut in 1..head.len() {
        let client = TcpStream::connect(listener.local_addr().unwrap()).await;
        let mut client = client.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        server.write_all(&head.as_bytes()[..cut]).await.unwrap();
        client.readable().await.unwrap();
        let mut reading = Box::pin(status_line(&mut client));
        tokio::select! {
            biased;
            early = &mut reading => panic!("after {cut} bytes: {early:?}"),
            () = ready(()) => {}
        }
        let rest = format!("{}x", &head[cut..]);
        server.write_all(rest.as_bytes()).await.unwrap();
        let answer = timeout(LONG, reading).await.unwrap().unwrap();
        assert_eq!(answer.to_string(), "200 OK", "{cut}");
        let behind = timeout(LONG, client.read_u8()).await.unwrap();
        assert_eq!(behind.unwrap(), b'x', "{cut}");
    }
}

#[tokio::test]
async fn request_names_the_server_and_authenticates() {
    let fake_proxy = FakeProxy::start().await;
    let aladdin = "Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n";
    for (user, name, authorization) in [
        ("", CLOUD, ""),
        ("", "[2001:db8::1]:443", ""),
        ("Aladdin:open%20sesame@", "10.0.0.1:1", aladdin),
    ] {
        let proxy = proxy(&fake_proxy, user);
        let (connected, request) = answered(&proxy, name, &fake_proxy, OK).await;
        connected.unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let expected = format!(
            "CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n{authorization}User-Agent: tunnel-agent/{version}\r\n\r\n"
        );
        assert_eq!(request, expected);
    }
}

#[tokio::test]
async fn refusals_say_what_to_do_and_keep_the_secret() {
    let fake_proxy = FakeProxy::start().await;
    for (user, line, words) in [
        (
            "",
            "407 Proxy Authentication Required",
            "put user and password",
        ),
        ("me:hunter2@", "407 No", "take the user and password"),
        (
            "me:hunter2@",
            "407 No\r\nProxy-Authenticate: NTLM\r\nProxy-Authenticate: Negotiate x",
            "offers NTLM, Negotiate only",
        ),
        (
            "me:hunter2@",
            "407 No\r\nProxy-Authenticate: NTLM\r\nproxy-authenticate: Basic realm=\"a\"",
            "take the user and password",
        ),
        ("me:hunter2@", "403 Forbidden", "allow CONNECT"),
        ("", "502 Bad Gateway", "does not reach the server"),
        ("", "503 Service Unavailable", "does not reach the server"),
        ("", "504 Gateway Timeout", "does not reach the server"),
        ("", "405 Method Not Allowed", "port of an HTTP proxy"),
        ("", "302 Found", "302 Found"),
        ("", "101 Switching Protocols", "101 Switching"),
        ("", "500", "500"),
        ("", "599 b\u{1b}[31mell\u{7}", "599 b[31mell"),
    ] {
        let proxy = proxy(&fake_proxy, user);
        let head = format!("HTTP/1.1 {line}\r\nContent-Length: 2\r\n\r\nno");
        let (connected, request) = answered(&proxy, CLOUD, &fake_proxy, head.as_bytes()).await;
        assert_eq!(request.contains("Basic"), !user.is_empty());
        let error = connected.unwrap_err();
        let kind = match line.starts_with("407") {
            true => io::ErrorKind::PermissionDenied,
            false => io::ErrorKind::ConnectionRefused,
        };
        assert_eq!(error.kind(), kind);
        let begin = format!("proxy {proxy}: refuses {CLOUD}: ");
        let text = error.to_string();
        let shown = format!("{text} {error:?}");
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.contains(words) && !text.contains('\n'), "{text}");
        assert_eq!(
            redact(&text),
            text,
            "a word of the advice looks like a secret"
        );
        for secret in ["hunter2", "bWU6aHVudGVyMg", "Basic bW"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}

#[tokio::test]
async fn invalid_response_is_reported_at_once() {
    let fake_proxy = FakeProxy::start().await;
    let proxy = proxy(&fake_proxy, "me:hunter2@");
    let long = format!("HTTP/1.1 200 OK\r\nA: {}", "a".repeat(HEAD_MAX));
    let interim = "HTTP/1.1 100 Continue\r\n\r\n".repeat(HEAD_MAX / 25 + 1);
    // The fake proxy keeps its connection open in the meantime.
    for (answer, words) in [
        ("SSH-2.0-OpenSSH_9.6\r\n", "HTTP proxy?"),
        ("\u{15}\u{3}", "HTTP proxy?"),
        ("HTTP/2 200\r\n", "HTTP proxy?"),
        ("HTTP/1.1 OK\r\n\r\n", "HTTP proxy?"),
        ("HTTP/1.1 20\r\n\r\n", "HTTP proxy?"),
        ("HTTP/1.1 2000 OK\r\n\r\n", "HTTP proxy?"),
        ("HTTP/1.1 099 OK\r\n\r\n", "HTTP proxy?"),
        ("HTTP/1.x 200 OK\r\n\r\n", "HTTP proxy?"),
        ("HTTP/1.1\r\n\r\n", "HTTP proxy?"),
        (&long, "longer than 16384"),
        (&interim, "longer than 16384"),
    ] {
        let (connected, _) = answered(&proxy, CLOUD, &fake_proxy, answer.as_bytes()).await;
        let error = connected.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{answer:?}");
        assert!(error.to_string().contains(words), "{answer:?}: {error}");
    }
}

#[tokio::test]
async fn proxy_that_echoes_or_closes_is_distinguished_from_one_that_refuses() {
    let fake_proxy = FakeProxy::start().await;
    let (proxy, server) = (proxy(&fake_proxy, "me:hunter2@"), remote("cloud:1"));
    for answer in [&b""[..], b"HTTP/1.1 200 OK\r\nA: b\r\n"] {
        let serve = async { drop(fake_proxy.answer(answer).await) };
        let both = async { tokio::join!(proxy.connect(&server), serve) };
        let error = timeout(LONG, both).await.unwrap().0.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        let text = error.to_string();
        assert!(text.contains("closed the connection"), "{text}");
    }
    let echo = async {
        let (request, mut socket) = fake_proxy.request().await;
        socket.write_all(request.as_bytes()).await.unwrap();
    };
    let both = async { tokio::join!(proxy.connect(&server), echo) };
    let error = timeout(LONG, both).await.unwrap().0.unwrap_err();
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("bWU6aHVudGVyMg"), "{shown}");
}

#[tokio::test]
async fn proxy_that_is_not_there_is_named() {
    let fake_proxy = FakeProxy::start().await;
    let gone = proxy(&fake_proxy, "me:hunter2@");
    drop(fake_proxy);
    let error = gone.connect(&remote("cloud:1")).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    let text = error.to_string();
    let begin = format!("proxy {gone}: cannot connect: ");
    assert!(text.starts_with(&begin), "{text}");

    let url = "http://me:hunter2@does-not-exist.invalid:1";
    let unknown: HttpProxy = url.parse().unwrap();
    let error = unknown.connect(&remote("cloud:1")).await.unwrap_err();
    let (text, name) = (error.to_string(), "does-not-exist.invalid:1");
    let problem = format!("{name}: cannot resolve the proxy name");
    assert!(text.contains(&problem), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn names_that_would_break_the_request_are_not_sent() {
    let fake_proxy = FakeProxy::start().await;
    let proxy = proxy(&fake_proxy, "");
    for name in ["", "cloud:1 HTTP/1.1\r\nX: y", "a b:1", "cl\u{f6}ud:1"] {
        let server = remote(name);
        let connected = timeout(LONG, proxy.connect(&server)).await.unwrap();
        let error = connected.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}

#[tokio::test]
async fn dropped_attempt_closes_its_connection() {
    let fake_proxy = FakeProxy::start().await;
    let (proxy, server) = (proxy(&fake_proxy, ""), remote("cloud:1"));
    let mut attempt = proxy.connect(&server);
    let (_, mut socket) = tokio::select! {
        _ = &mut attempt => panic!("ended without an answer"),
        asked = timeout(LONG, fake_proxy.request()) => asked.unwrap(),
    };
    drop(attempt);
    let end = timeout(LONG, socket.read(&mut [0; 16])).await.unwrap();
    assert_eq!(end.unwrap(), 0);
}

#[tokio::test]
async fn proxy_choice_connects_by_the_route_of_each_server() {
    let fake_proxy = FakeProxy::start().await;
    let direct = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let environment = EnvironmentProxy {
        variable: "HTTPS_PROXY",
        url: Secret(format!("http://{}", fake_proxy.address())),
        no_proxy: "near.example.com".to_owned(),
    };
    let names = ["near.example.com:1", "far.example.com:1"];
    let servers = names.map(|name| name.parse().unwrap());
    let choice = ProxyChoice::decide(None, Some(&environment), &servers).unwrap();
    let (connected, request) = answered(&choice, names[1], &fake_proxy, OK).await;
    connected.unwrap();
    let is_connect = request.starts_with("CONNECT far.example.com:1 ");
    assert!(is_connect, "{request}");
    let mut near = remote(names[0]);
    near.address = Some(direct.local_addr().unwrap());
    let connected = timeout(LONG, choice.connect(&near)).await.unwrap();
    assert_eq!(connected.unwrap().peer_addr().ok(), near.address);
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_behind_a_proxy_enrolls_and_connects_through_it() {
    let (server, scratch) = (Server::start().await, ScratchDir::new().unwrap());
    let fake_proxy = FakeProxy::start().await;
    let url = format!("http://me:hunter2@{}", fake_proxy.address());
    let settings = RawConfig {
        server: vec!["cloud.invalid:10262".into()],
        proxy: Some(Secret(url)),
        node_name: Some("worker-1".into()),
        token: Some(Secret(server.token().reveal())),
        data_dir: Some(scratch.path().to_owned()),
        meta_listen: Some("off".into()),
        ..RawConfig::default()
    };
    let app = App::start(Config::check(settings).unwrap()).await.unwrap();
    let mut running = JoinSet::new();
    running.spawn(async { app.run().await.unwrap() });
    let address = server.address();
    running.spawn(async move {
        loop {
            let asked = fake_proxy.relay(address).await;
            assert!(asked.contains("CONNECT cloud.invalid:10262 "), "{asked}");
            assert!(asked.contains("Basic bWU6aHVudGVyMg=="), "{asked}");
        }
    });
    let issue = |_| Some(server.issue(scratch.path(), "culvert://agent/worker-1"));
    let session = timeout(LONG, async {
        server.enrollment(issue).await.unwrap();
        server.session_over_tcp().await
    });
    let session = session.await.unwrap();
    assert_eq!(session.transport(), TransportKind::H2);
    let node = session.peer().node().unwrap();
    assert_eq!(node.as_str(), "worker-1");
    assert!(running.try_join_next().is_none());
}
