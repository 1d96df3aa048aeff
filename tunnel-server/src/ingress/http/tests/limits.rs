//! Entries of `limits:` that apply to requests, just below, at and beyond each limit: the caller's
//! response, and the metric.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::calibration::scaled;
use tunnel_proto::transport::{BufferPool, Stream};

use super::super::RELEASE_BUFFERS_AFTER;
use super::fixture::{
    Agent, CALLER_BUFFER_BYTES, Fixture, HI, assert_status, expect_hi, get, head, http_listener,
};
use crate::config::{CONNECTION_HEAD_BYTES, Limit, Limits, SharedLimits};
use crate::ingress::ListenerKind;
use crate::ingress::caller_addr::CallerIdentity;
use crate::ingress::head_memory::HeadMemory;
use crate::routing::registry::CallerKey;
use crate::testing::{self, STREAMS, assert_contains, eventually, node, within};

fn reached(fixture: &Fixture, limit: Limit) -> u64 {
    let name = limit.label();
    fixture.metric(&format!(
        "tunnel_server_limits_reached_total{{limit=\"{name}\"}}"
    ))
}

#[tokio::test(start_paused = true)]
async fn streams_per_agent_hold_for_one_below_at_and_above() {
    let (fixture, agent) = Fixture::with_agent();
    let request = format!("{}\r\n", get("/"));
    let (mut open, mut others) = (Vec::new(), Vec::new());
    // One caller cannot use all of them.
    let other = CallerKey::Certificate("other".into());
    for _ in 0..STREAMS / 2 {
        let opened = testing::open(&fixture.registry, &node(), &other).await;
        others.push((opened.unwrap(), agent.accepts().await));
    }
    // One below the limit, and at it.
    for _ in 0..STREAMS / 2 {
        open.push((fixture.send(&request).await, agent.accepts().await));
    }
    assert_eq!(reached(&fixture, Limit::StreamsPerAgent), 0);
    let closing = format!("{}Connection: close\r\n\r\n", get("/"));
    let refused = fixture.ask(&closing).await;
    assert_status(&refused, 503);
    assert_contains(&refused, "X-Tunnel-Error: too_many_streams\r\n");
    assert_contains(&refused, "Retry-After: ");
    assert_contains(&refused, "the agent has 8 streams open");
    assert_contains(&refused, "limits.streamsPerAgent");
    assert_eq!(reached(&fixture, Limit::StreamsPerAgent), 1);
    // A released permit can be acquired at once.
    open.pop();
    let asked = async {
        // The task of the connection that ended releases the permit.
        sleep(Duration::from_millis(1)).await;
        fixture.ask(&closing).await
    };
    let (answer, _) = tokio::join!(asked, agent.answers());
    assert_status(&answer, 200);
    assert_eq!(reached(&fixture, Limit::StreamsPerAgent), 1);
}

/// Opens as many requests of one caller as its limit allows, none of which is answered. Returns
/// them with the response to one more request.
async fn fill(
    fixture: &Fixture,
    agent: &Agent,
    from: &str,
    identity: CallerIdentity,
) -> (Vec<(DuplexStream, Stream)>, String) {
    let mut open = Vec::new();
    loop {
        let mut caller = fixture.connect_as(http_listener(), from, identity.clone());
        let asks = async {
            let request = format!("{}Connection: close\r\n\r\n", get("/"));
            caller.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            caller.read_to_string(&mut answer).await.unwrap();
            answer
        };
        tokio::select! {
            refused = asks => return (open, refused),
            stream = agent.accepts() => open.push((caller, stream)),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_caller_cannot_take_all_streams_of_a_node() {
    let (fixture, agent) = Fixture::with_agent();
    let anonymous = || CallerIdentity::Anonymous;
    let (half, refused) = fill(&fixture, &agent, "192.0.2.1:5", anonymous()).await;
    assert_eq!(half.len(), STREAMS / 2);
    assert_status(&refused, 503);
    assert_contains(&refused, "X-Tunnel-Error: too_many_streams\r\n");
    assert_contains(&refused, "Retry-After: 1\r\n");
    for text in [
        "worker-1",
        "this caller has 4 streams open",
        "half of limits.streamsPerAgent",
    ] {
        assert_contains(&refused, text);
    }
    // Another port of the same address is the same caller. Other callers without a certificate
    // share the next quarter.
    let (none, _) = fill(&fixture, &agent, "192.0.2.1:6", anonymous()).await;
    assert!(none.is_empty());
    let (quarter, _) = fill(&fixture, &agent, "[2001:db8::1]:5", anonymous()).await;
    assert_eq!(quarter.len(), STREAMS / 4);
    for from in ["[2001:db8::2]:5", "192.0.2.9:5"] {
        let (none, _) = fill(&fixture, &agent, from, CallerIdentity::User("u".into())).await;
        assert!(none.is_empty(), "{from}");
    }
    let verified = CallerIdentity::Certificate("kube-apiserver".into());
    let (reserved, _) = fill(&fixture, &agent, "192.0.2.1:7", verified).await;
    assert_eq!(reserved.len(), STREAMS / 4);
    assert_eq!(reached(&fixture, Limit::StreamsPerAgent), 6);
}

#[tokio::test(start_paused = true)]
async fn open_timeout_holds_shortly_before_and_after() {
    let (fixture, agent) = Fixture::with_agent();
    let limit = fixture.ingress.limits.load().open_timeout;
    let request = format!("{}Connection: close\r\n\r\n", get("/"));
    let just = Duration::from_millis(50);
    for (reply_after, status) in [(limit - just, 200), (limit + just, 504)] {
        let began = Instant::now();
        let late = async {
            let mut stream = agent.stream().await;
            sleep(reply_after).await;
            // The requester may have given up by this time.
            let _gave_up = async {
                stream.accept("").await?;
                stream.write_all(HI.as_bytes()).await?;
                stream.shutdown().await
            }
            .await;
        };
        let asked = async { (fixture.ask(&request).await, began.elapsed()) };
        let ((answer, took), ()) = tokio::join!(asked, late);
        assert_status(&answer, status);
        assert!(took <= limit + Duration::from_millis(20), "{took:?}");
        let timed_out = status == 504;
        let names_limit = answer.contains("(limits.openTimeout)");
        assert_eq!(names_limit, timed_out, "{answer}");
        assert_eq!(reached(&fixture, Limit::OpenTimeout), u64::from(timed_out));
    }
}

#[tokio::test(start_paused = true)]
async fn caller_timeouts_are_counted_by_their_limit() {
    let (fixture, agent) = Fixture::with_agent();
    let limits = fixture.ingress.limits.load();
    let (head_time, idle) = (limits.request_head_timeout, limits.caller_idle_timeout);
    let just = Duration::from_millis(20);
    let _silent = fixture.send("GET /").await;
    let mut idler = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    tokio::join!(expect_hi(&mut idler, &request), agent.answers());
    sleep(head_time - just).await;
    assert_eq!(reached(&fixture, Limit::RequestHeadTimeout), 0);
    sleep(2 * just).await;
    assert_eq!(reached(&fixture, Limit::RequestHeadTimeout), 1);
    sleep(idle - head_time - 2 * just).await;
    assert_eq!(reached(&fixture, Limit::CallerIdleTimeout), 0);
    sleep(3 * just).await;
    assert_eq!(reached(&fixture, Limit::CallerIdleTimeout), 1);
    assert_eq!(reached(&fixture, Limit::RequestHeadTimeout), 1);
}

/// An idle connection without buffers waits until a byte arrives, the drain begins, or a newer
/// connection evicts it.
#[tokio::test]
async fn idle_caller_without_buffers_is_served_evicted_and_drained() {
    let fixture = Fixture::with_callers(2);
    let agent = fixture.agent();
    let request = format!("{}\r\n", get("/"));
    let address = fixture.listen(http_listener()).await;
    let mut callers = Vec::new();
    for _ in 0..2 {
        let mut caller = TcpStream::connect(address).await.unwrap();
        tokio::join!(expect_hi(&mut caller, &request), agent.answers());
        callers.push(caller);
    }
    sleep(RELEASE_BUFFERS_AFTER + Duration::from_millis(100)).await;
    // The buffers are allocated again for a request that arrives in pieces.
    let (begin, end) = request.split_at(10);
    callers[0].write_all(begin.as_bytes()).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    tokio::join!(expect_hi(&mut callers[0], end), agent.answers());
    // A newer caller takes the permit of the connection that has been idle longer, which is closed
    // gracefully.
    let mut newer = TcpStream::connect(address).await.unwrap();
    tokio::join!(expect_hi(&mut newer, &request), agent.answers());
    let mut rest = Vec::new();
    within(callers[1].read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
    assert_eq!(reached(&fixture, Limit::CallersTotal), 1);
    sleep(RELEASE_BUFFERS_AFTER + Duration::from_millis(100)).await;
    fixture.ingress.shutdown.drain().cancel();
    within(callers[0].read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn caller_with_a_request_under_way_is_never_evicted() {
    let fixture = Fixture::with_callers(2);
    let agent = fixture.agent();
    let address = fixture.listen(http_listener()).await;
    let request = format!("{}\r\n", get("/"));
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(request.as_bytes()).await.unwrap();
    let mut slow_target = agent.accepts().await;
    head(&mut slow_target).await;
    let mut upgraded = TcpStream::connect(address).await.unwrap();
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    let asked = format!("{}{upgrade}", get("/exec"));
    upgraded.write_all(asked.as_bytes()).await.unwrap();
    let mut target = agent.accepts().await;
    head(&mut target).await;
    let answer = format!("HTTP/1.1 101 Switching Protocols\r\n{upgrade}");
    target.write_all(answer.as_bytes()).await.unwrap();
    head(&mut upgraded).await;
    sleep(Duration::from_millis(1100)).await;
    let mut refused = TcpStream::connect(address).await.unwrap();
    let mut rest = Vec::new();
    within(refused.read_to_end(&mut rest)).await.ok();
    assert!(rest.is_empty(), "no place is left");
    assert_eq!(reached(&fixture, Limit::CallersTotal), 1);
    for (caller, target) in [(&mut slow, &mut slow_target), (&mut upgraded, &mut target)] {
        target.write_all(HI.as_bytes()).await.unwrap();
        let mut answer = vec![0; HI.len() - 2];
        within(caller.read_exact(&mut answer)).await.unwrap();
    }
}

/// Connects a caller whose kernel accepts little data that the caller does not read.
async fn slow_caller(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(address).await.unwrap()
}

/// hyper has finished a connection after it stopped reading the request body, and still holds the
/// data that a slow caller has not read.
#[tokio::test]
async fn answer_before_the_end_of_the_body_reaches_a_slow_caller_whole() {
    /// More than both kernels take, and less than they and hyper take together.
    const BYTES: usize = 120_000;
    let fixture = Fixture::with_callers(1);
    let agent = fixture.agent();
    let socket = TcpSocket::new_v4().unwrap();
    // Accepted sockets inherit it.
    socket.set_send_buffer_size(4096).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = socket.listen(8).unwrap();
    let address = listener.local_addr().unwrap();
    let kind = ListenerKind::Http(http_listener());
    fixture.ingress.start(listener, kind);
    let mut caller = slow_caller(address).await;
    let request = format!("POST {}Content-Length: 1000000\r\n\r\n", &get("/")[4..]);
    caller.write_all(request.as_bytes()).await.unwrap();
    caller.write_all(&[0; 1000]).await.unwrap();
    let mut target = agent.accepts().await;
    head(&mut target).await;
    let answering = async move {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BYTES}\r\n\r\n");
        target.write_all(head.as_bytes()).await.unwrap();
        target.write_all(&vec![b'x'; BYTES]).await.unwrap();
        // The target reads no more of the request.
        target.shutdown().await.unwrap();
        target
    };
    let (_, _target) = tokio::join!(head(&mut caller), within(answering));
    // hyper now holds the end of the response. A new connection does not evict the caller of that
    // response.
    sleep(Duration::from_millis(1100)).await;
    let mut newcomer = TcpStream::connect(address).await.unwrap();
    let refused = within(newcomer.read(&mut [0])).await;
    assert!(matches!(refused, Ok(0) | Err(_)), "{refused:?}");
    let mut body = Vec::new();
    within(caller.read_to_end(&mut body)).await.unwrap();
    assert_eq!(body.len(), BYTES);
}

/// The last response waits in hyper for a caller that reads nothing. The connection neither holds
/// its permit forever nor ends cleanly.
#[tokio::test]
async fn caller_that_takes_nothing_of_the_last_answer_is_cut() {
    let mut fixture = Fixture::with_callers(4);
    let ingress = Arc::get_mut(&mut fixture.ingress).unwrap();
    ingress.limits = SharedLimits::from(Limits {
        caller_idle_timeout: Duration::from_millis(500),
        ..ingress.limits.load()
    });
    let address = fixture.listen(http_listener()).await;
    let mut caller = slow_caller(address).await;
    // Short responses of the server itself, because no agent is connected.
    let requests = format!("{}\r\n", get("/")).repeat(1000);
    let flood = async { while caller.write_all(requests.as_bytes()).await.is_ok() {} };
    let flooded = timeout(scaled(Duration::from_secs(20)), flood).await;
    assert!(flooded.is_ok(), "never cut");
    let is_free = || fixture.ingress.callers.permits_in_use() == 0;
    eventually("the permit is free", is_free).await;
}

#[tokio::test]
async fn oversize_heads_are_counted_by_their_limit() {
    let fixture = Fixture::new();
    let limit = fixture.ingress.limits.load().request_head_bytes;
    let mut caller = fixture.connect();
    let head = format!("{}X: {}\r\n\r\n", get("/"), "y".repeat(limit));
    // The listener may have responded and closed before everything was accepted.
    let _cut = caller.write_all(head.as_bytes()).await;
    let is_counted = || reached(&fixture, Limit::RequestHeadBytes) == 1;
    eventually("counted", is_counted).await;
}

/// Creates a fixture whose heads may have 1 MiB, with this buffer pool.
fn with_large_heads(pool: &Arc<BufferPool>) -> (Fixture, Agent) {
    let mut fixture = Fixture::new();
    let ingress = Arc::get_mut(&mut fixture.ingress).unwrap();
    ingress.limits = SharedLimits::from(Limits {
        request_head_bytes: 1 << 20,
        ..ingress.limits.load()
    });
    ingress.head_memory = HeadMemory::new(pool.clone());
    let agent = fixture.agent();
    (fixture, agent)
}

/// Returns a head of `bytes` bytes with `fields` fields.
fn large_head(bytes: usize, fields: usize) -> String {
    let mut head = get("/large");
    for number in 3..=fields {
        head.push_str(&format!("X-{number}: y\r\n"));
    }
    let cookie = bytes - head.len() - "Cookie: \r\n\r\n".len();
    head + &format!("Cookie: {}\r\n\r\n", "z".repeat(cookie))
}

#[tokio::test(start_paused = true)]
async fn heads_of_a_mebibyte_and_of_a_thousand_fields_pass_in_memory_of_the_pool() {
    let pool = BufferPool::new(64 << 20);
    let (fixture, agent) = with_large_heads(&pool);
    let small = format!("{}\r\n", get("/small"));
    for (bytes, fields) in [
        (1 << 20, 2),
        (1 << 20, 1024),
        (900_000, 100),
        ((16 << 10) + 1, 2),
        (10_000, 101),
        (20_000, 1000),
    ] {
        let mut request = large_head(bytes, fields);
        assert_eq!(request.len(), bytes);
        // The connection is used before, and asked again in the same write.
        request.insert_str(0, &small);
        request.push_str(&small);
        let mut caller = fixture.connect();
        let asking = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            expect_hi(&mut caller, "").await;
            let answer = head(&mut caller).await;
            let mut body = [0; 2];
            caller.read_exact(&mut body).await.unwrap();
            assert_eq!(&body, b"hi");
            expect_hi(&mut caller, "").await;
            (caller, answer)
        };
        let answering = async {
            assert_contains(&agent.answers().await, "GET /small");
            let mut target = agent.accepts().await;
            let head = head(&mut target).await;
            assert!(pool.reserved() > 4 * bytes as u64, "{}", pool.reserved());
            target.write_all(HI.as_bytes()).await.unwrap();
            assert_contains(&agent.answers().await, "GET /small");
            head
        };
        let ((mut caller, answer), sent) = within(async { tokio::join!(asking, answering) }).await;
        assert_status(&answer, 200);
        assert!(!answer.contains("Connection:"), "{answer}");
        let cookie = |text: &str| {
            text.lines()
                .find(|line| line.starts_with("Cookie"))
                .map(str::len)
        };
        assert_eq!(cookie(&sent), cookie(&large_head(bytes, fields)));
        assert_eq!(sent.matches("\r\nX-").count(), fields - 2);
        assert_contains(&sent, "connection: close\r\n");
        assert_eq!(pool.reserved(), 0, "the memory is free");
        // Another one, with nothing behind it.
        let again = async {
            let asked = large_head(bytes, fields);
            caller.write_all(asked.as_bytes()).await.unwrap();
            expect_hi(&mut caller, "").await;
        };
        within(async { tokio::join!(again, agent.answers()) }).await;
        eventually("the memory is free", || pool.reserved() == 0).await;
    }
}

/// More would not be counted by the permit of the connection, however large hyper's buffer is.
#[tokio::test(start_paused = true)]
async fn of_what_a_caller_sends_behind_a_request_the_server_reads_one_head_ahead() {
    let small = format!("{}\r\n", get("/small"));
    let behind = small.repeat(10_000);
    for first in [small, large_head(100_000, 2)] {
        let (fixture, agent) = with_large_heads(&BufferPool::new(64 << 20));
        let mut caller = fixture.connect();
        let asking = caller.write_all(first.as_bytes());
        let (asked, mut target) = tokio::join!(asking, agent.accepts());
        asked.unwrap();
        head(&mut target).await;
        let mut left = behind.as_bytes();
        while !left.is_empty()
            && let Ok(written) = timeout(Duration::from_secs(1), caller.write(left)).await
        {
            left = &left[written.unwrap()..];
        }
        let taken = behind.len() - left.len();
        assert!(
            taken <= CALLER_BUFFER_BYTES + CONNECTION_HEAD_BYTES,
            "{taken}"
        );
        target.write_all(HI.as_bytes()).await.unwrap();
        expect_hi(&mut caller, "").await;
    }
}

/// A connection whose next request cannot be distinguished from a body closes.
#[tokio::test(start_paused = true)]
async fn connection_ends_with_the_answer_to_a_large_head_that_may_have_more_behind_it() {
    let (fixture, agent) = with_large_heads(&BufferPool::new(64 << 20));
    let large = large_head(100_000, 2);
    for request in [
        large.replacen("GET", "POST", 1),
        large.replacen("GET", "DELETE", 1),
        large.replacen("HTTP/1.1", "HTTP/1.0", 1),
        large.replacen("Cookie", "Connection: close\r\nCookie", 1),
    ] {
        let request = format!("{request}{}\r\n", get("/small"));
        // The answer ends with the connection.
        let (answer, sent) = tokio::join!(ask_too_much(&fixture, &request), agent.answers());
        assert!(answer.contains(" 200 OK\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nhi"), "{answer}");
        assert_contains(&sent, "/large");
    }
}

#[tokio::test(start_paused = true)]
async fn large_head_is_followed_by_its_body_or_by_another_protocol() {
    let (fixture, agent) = with_large_heads(&BufferPool::new(64 << 20));
    let body = "y".repeat(100_000);
    let post = large_head(200_000, 300).replacen("GET", "POST", 1);
    let post = post.trim_end().to_owned() + &format!("\r\nContent-Length: 100000\r\n\r\n{body}");
    let read = async {
        let mut target = agent.accepts().await;
        head(&mut target).await;
        let mut received = vec![0; body.len()];
        within(target.read_exact(&mut received)).await.unwrap();
        target.write_all(HI.as_bytes()).await.unwrap();
        received
    };
    let (answer, received) = tokio::join!(fixture.ask(&post), read);
    assert_status(&answer, 200);
    assert_eq!(received, body.as_bytes());
    // Bytes of another protocol are no head, whatever they look like.
    let lines = "x: y\r\n".repeat(500);
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    for head_text in [
        get("/exec"),
        large_head(100_000, 300).trim_end().to_owned() + "\r\n",
    ] {
        let request = format!("{head_text}{upgrade}{lines}");
        let switch = async {
            let mut target = agent.accepts().await;
            head(&mut target).await;
            let answer = format!("HTTP/1.1 101 Switching Protocols\r\n{upgrade}");
            target.write_all(answer.as_bytes()).await.unwrap();
            let mut received = vec![0; lines.len()];
            within(target.read_exact(&mut received)).await.unwrap();
            received
        };
        let mut caller = fixture.connect();
        let ask = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            head(&mut caller).await
        };
        let (answer, received) = tokio::join!(ask, switch);
        assert_status(&answer, 101);
        assert_eq!(received, lines.as_bytes());
    }
}

/// Sends a request that the server may refuse before it has read everything. Returns the response.
async fn ask_too_much(fixture: &Fixture, request: &str) -> String {
    let (mut answers, mut sends) = tokio::io::split(fixture.connect());
    let send = async { drop(sends.write_all(request.as_bytes()).await) };
    let mut answer = String::new();
    let (_, read) = within(async { tokio::join!(send, answers.read_to_string(&mut answer)) }).await;
    read.unwrap();
    answer
}

#[tokio::test(start_paused = true)]
async fn head_beyond_a_limit_is_answered_with_the_limit() {
    let (fixture, _agent) = with_large_heads(&BufferPool::new(64 << 20));
    let target = |bytes| format!("GET /{} HTTP/1.1\r\n", "x".repeat(bytes));
    let many = large_head(100_000, 1025);
    for (request, status, code, text) in [
        (
            large_head((1 << 20) + 1, 2),
            431,
            "head_too_large",
            "larger than 1048576 bytes (limits.requestHeadBytes)",
        ),
        (large_head(3 << 20, 2), 431, "head_too_large", "1048576"),
        (many.clone(), 431, "head_too_large", "more than 1024 fields"),
        (
            many.replacen("/large", &"/x".repeat(100), 1),
            431,
            "head_too_large",
            "1024",
        ),
        (
            target(65_000),
            414,
            "uri_too_long",
            "longer than 65000 bytes; a long script",
        ),
        (target(800_000), 414, "uri_too_long", "kubectl exec"),
    ] {
        let answer = ask_too_much(&fixture, &request).await;
        assert_status(&answer, status);
        assert_contains(&answer, &format!("X-Tunnel-Error: {code}\r\n"));
        assert_contains(&answer, "Connection: close\r\n");
        assert_contains(&answer, text);
    }
    assert_eq!(reached(&fixture, Limit::RequestHeadBytes), 2);
}

/// Many callers send 900 KiB of a head and no more. The memory of all is within their part of the
/// pool, others are served, and the head timeout ends them.
#[tokio::test(start_paused = true)]
async fn heads_that_never_end_hold_their_part_of_the_pool_until_the_timeout() {
    let pool = BufferPool::new(40 << 20);
    let (fixture, agent) = with_large_heads(&pool);
    let begun = &large_head(1 << 20, 2)[..900 << 10];
    let (mut waiting, mut refused) = (Vec::new(), 0);
    for number in 0..40 {
        let from = format!("192.0.2.{}:5", 1 + number % 4);
        let mut caller = fixture.connect_as(http_listener(), &from, CallerIdentity::Anonymous);
        let mut byte = [0; 16];
        let sent = async {
            let _refused = caller.write_all(begun.as_bytes()).await;
            std::future::pending::<()>().await;
        };
        // The clock moves on once nothing else does.
        tokio::select! {
            () = sent => unreachable!(),
            () = sleep(Duration::from_millis(10)) => {}
        }
        let answered = timeout(Duration::from_millis(10), caller.read_exact(&mut byte)).await;
        match answered {
            Err(_elapsed) => waiting.push(caller),
            Ok(_) => refused += 1,
        }
        assert!(pool.reserved() <= 20 << 20, "{}", pool.reserved());
    }
    // 4.5 MiB each, in 20 MiB; of one source in 10 MiB.
    assert_eq!((waiting.len(), refused), (4, 36));
    assert_eq!(reached(&fixture, Limit::BufferPool), 36);
    let small = format!("{}Connection: close\r\n\r\n", get("/"));
    let (answer, _) = tokio::join!(fixture.ask(&small), agent.answers());
    assert_status(&answer, 200);
    let full = ask_too_much(&fixture, &large_head(600_000, 2)).await;
    assert_status(&full, 503);
    assert_contains(&full, "X-Tunnel-Error: overloaded\r\n");
    assert_contains(&full, "Retry-After: 1\r\n");
    assert_contains(&full, "(limits.bufferPool)");
    sleep(fixture.ingress.limits.load().request_head_timeout).await;
    for mut caller in waiting {
        let mut rest = Vec::new();
        let _reset = within(caller.read_to_end(&mut rest)).await;
        assert!(rest.is_empty());
    }
    eventually("the memory is free", || pool.reserved() == 0).await;
    assert_eq!(reached(&fixture, Limit::RequestHeadTimeout), 4);
}

/// A caller with kept connections to more targets than it may have connections.
#[tokio::test]
async fn connection_between_requests_makes_room_at_once() {
    let fixture = Fixture::with_callers(2);
    let agent = fixture.agent();
    let address = fixture.listen(http_listener()).await;
    let request = format!("{}\r\n", get("/"));
    let mut kept = Vec::new();
    for _ in 0..50 {
        let mut caller = TcpStream::connect(address).await.unwrap();
        tokio::join!(expect_hi(&mut caller, &request), agent.answers());
        kept.push(caller);
    }
    let mut last = kept.split_off(48);
    for mut caller in kept {
        let mut rest = Vec::new();
        within(caller.read_to_end(&mut rest)).await.unwrap();
        assert!(rest.is_empty(), "a clean end");
    }
    tokio::join!(expect_hi(&mut last[1], &request), agent.answers());
    assert_eq!(reached(&fixture, Limit::CallersTotal), 48);
}

/// The first bytes of a request arrive together with the eviction of their connection.
#[tokio::test]
async fn request_that_has_arrived_is_answered_before_its_connection_is_evicted() {
    let fixture = Fixture::with_callers(1);
    let agent = fixture.agent();
    let address = fixture.listen(http_listener()).await;
    let request = format!("{}\r\n", get("/"));
    for idle in [
        Duration::ZERO,
        RELEASE_BUFFERS_AFTER + Duration::from_millis(100),
    ] {
        let mut caller = TcpStream::connect(address).await.unwrap();
        tokio::join!(expect_hi(&mut caller, &request), agent.answers());
        sleep(idle).await;
        // The runtime has one thread, so the server sees both at once.
        let caller = caller.into_std().unwrap();
        (&caller).write_all(request.as_bytes()).unwrap();
        let newcomer = std::net::TcpStream::connect(address).unwrap();
        let mut caller = TcpStream::from_std(caller).unwrap();
        newcomer.set_nonblocking(true).unwrap();
        let mut newcomer = TcpStream::from_std(newcomer).unwrap();
        let (answer, _) = tokio::join!(head(&mut caller), agent.answers());
        assert_status(&answer, 200);
        // The newcomer has the permit, or was refused while the request was answered.
        let both = async {
            newcomer.write_all(request.as_bytes()).await.ok()?;
            newcomer.read_u8().await.ok()
        };
        tokio::select! {
            _ended = within(both) => {}
            _answered = agent.answers() => {}
        }
        drop((caller, newcomer));
        let is_free = || fixture.ingress.callers.permits_in_use() == 0;
        eventually("the permits are free", is_free).await;
    }
}
