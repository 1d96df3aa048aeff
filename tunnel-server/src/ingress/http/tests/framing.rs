//! Ambiguous heads are rejected or normalized, and every size has a limit (T07, T08, T12).

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::fixture::{Fixture, HI, assert_status, get, head};
use crate::testing::assert_contains;

/// Returns a request with these fields, after which the connection is closed.
fn closing(fields: &str) -> String {
    format!("{}Connection: close\r\n{fields}\r\n", get("/"))
}

/// Returns the request as the target receives it, and the response as the caller receives it.
async fn passes(fields: &str, answer: &str) -> (String, String) {
    let (fixture, agent) = Fixture::with_agent();
    let asked = closing(fields);
    let (reply, seen) = tokio::join!(fixture.ask(&asked), agent.answers_with(answer));
    (seen, reply)
}

/// Returns the listener's response, up to the end of the connection, to bytes that must not reach a
/// target.
async fn refused(request: &str) -> String {
    let (fixture, agent) = Fixture::with_agent();
    let (mut reader, mut writer) = tokio::io::split(fixture.connect());
    let mut reply = String::new();
    let asks = async {
        // The listener may close before everything is sent.
        let _refused_early = writer.write_all(request.as_bytes()).await;
    };
    let (_, read) = tokio::join!(asks, reader.read_to_string(&mut reply));
    read.unwrap();
    assert!(agent.is_left_alone().await, "{reply}");
    reply
}

#[tokio::test(start_paused = true)]
async fn other_transfer_codings_are_refused() {
    for coding in [
        "gzip, chunked",
        "chunked, chunked",
        "chunked\r\nTransfer-Encoding: chunked",
    ] {
        let head = closing(&format!("Transfer-Encoding: {coding}\r\n"));
        let reply = refused(&format!("{head}0\r\n\r\n")).await;
        assert!(reply.starts_with("HTTP/1.1 400 "), "{coding}: {reply}");
        let shown = format!("{coding}: {reply}");
        assert_contains(&shown, "X-Tunnel-Error: bad_request");
        let answer =
            format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: {coding}\r\n\r\n2\r\nhi\r\n0\r\n\r\n");
        let (_, reply) = passes("", &answer).await;
        let shown = format!("{coding}: {reply}");
        assert_contains(&shown, "X-Tunnel-Error: target_bad_response");
    }
    let unframed = format!("{}Transfer-Encoding: gzip\r\n\r\n", get("/"));
    assert_status(&refused(&unframed).await, 400);
}

#[tokio::test(start_paused = true)]
async fn length_is_said_once_in_plain_digits() {
    let upload = |length: &str| format!("{}Connection: close\r\n{length}\r\nab", get("/"));
    let (fixture, agent) = Fixture::with_agent();
    let asked = upload("Content-Length: 0002\r\n");
    let (_, seen) = tokio::join!(fixture.ask(&asked), agent.answers());
    let seen = seen.to_lowercase();
    assert_eq!(seen.matches("content-length").count(), 1, "{seen}");
    assert!(seen.contains("content-length: 2\r\n"), "{seen}");
    let twice = "2\r\nContent-Length: 2";
    let other = "2\r\nContent-Length: 3";
    for length in [
        twice,
        other,
        "2, 2",
        "+2",
        "0x2",
        "2 2",
        "",
        &"9".repeat(20),
    ] {
        let reply = refused(&upload(&format!("Content-Length: {length}\r\n"))).await;
        assert!(reply.starts_with("HTTP/1.1 400 "), "{length}: {reply}");
    }
    for length in ["2, 2", twice, "02"] {
        let answer = HI.replace("Content-Length: 2", &format!("Content-Length: {length}"));
        let (_, reply) = passes("", &answer).await;
        let shown = format!("{length}: {reply}");
        assert_contains(&shown, "Content-Length: 2\r\n");
        let lengths = reply.to_lowercase().matches("content-length").count();
        assert_eq!(lengths, 1, "{reply}");
        assert!(reply.ends_with("hi"), "{reply}");
    }
}

#[tokio::test(start_paused = true)]
async fn heads_with_two_readings_are_refused_and_the_connection_closed() {
    let post = get("/").replace("GET", "POST");
    let length_first = "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    let coding_first = "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n";
    let two_lengths = "Content-Length: 2\r\ncontent-length: 2\r\n\r\nab";
    for (asked, hint) in [
        (format!("{post}{length_first}"), "Transfer-Encoding"),
        (format!("{post}{coding_first}"), "Transfer-Encoding"),
        (format!("{post}{two_lengths}"), "more than once"),
        (format!("{}\r\n", get("/")).replace("\r\n", "\n"), "LF"),
        (format!("{}\n", get("/")), "LF"),
    ] {
        let answer = refused(&format!("{asked}{}\r\n", get("/smuggled"))).await;
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        assert_status(&answer, 400);
        assert_contains(&answer, "X-Tunnel-Error: bad_request\r\n");
        assert_contains(&answer, hint);
    }
}

/// Every head is checked and no body is taken for a head, even if everything arrives at once.
#[tokio::test(start_paused = true)]
async fn heads_of_later_requests_are_checked_too() {
    let bodies = "a\nb\n\nContent-Length: 1\nContent-Length: 1\n\n";
    let upload = |path: &str| {
        let post = get(path).replace("GET", "POST");
        format!("{post}Content-Length: {}\r\n\r\n{bodies}", bodies.len())
    };
    let bad = format!("{}\n", get("/smuggled"));
    for at_once in [true, false] {
        let (fixture, agent) = Fixture::with_agent();
        let (mut reader, mut writer) = tokio::io::split(fixture.connect());
        let mut answer = String::new();
        let (first, second) = (upload("/1"), format!("{}\r\n", get("/2")));
        let asks = async {
            if at_once {
                let all = [&first[..], &second, &bad].concat();
                writer.write_all(all.as_bytes()).await.unwrap();
            } else {
                for request in [&first, &second] {
                    writer.write_all(request.as_bytes()).await.unwrap();
                    let before = answer.len();
                    while !answer[before..].ends_with("\r\n\r\nhi") {
                        answer.push(char::from(reader.read_u8().await.unwrap()));
                    }
                }
                writer.write_all(bad.as_bytes()).await.unwrap();
            }
            reader.read_to_string(&mut answer).await.unwrap();
        };
        let answers = async {
            let mut first = agent.accepts().await;
            assert!(head(&mut first).await.starts_with("POST /1 "));
            let mut seen = vec![0; bodies.len()];
            first.read_exact(&mut seen).await.unwrap();
            assert_eq!(seen, bodies.as_bytes());
            first.write_all(HI.as_bytes()).await.unwrap();
            let mut second = agent.accepts().await;
            assert!(head(&mut second).await.starts_with("GET /2 "));
            second.write_all(HI.as_bytes()).await.unwrap();
            (first, second)
        };
        let (_streams, ()) = tokio::join!(answers, asks);
        let answers = answer.split("HTTP/1.1 ").skip(1);
        let statuses: Vec<_> = answers.map(|one| &one[..3]).collect();
        assert_eq!(statuses, ["200", "200", "400"], "{answer}");
        assert!(agent.is_left_alone().await);
    }
}

#[tokio::test(start_paused = true)]
async fn malformed_heads_are_refused() {
    let host = "Host: worker-1:9100\r\n";
    for request in [
        format!("GET / HTTP/1.1\r\n{host}X : 1\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}X: 1\r\n 2\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}X: 1\r2\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}X: \0\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}: 1\r\n\r\n"),
        format!("GET / HTTP/1.0\r\n{host}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        format!("GET  / HTTP/1.1\r\n{host}\r\n"),
        format!("GET / HTTP/1.1 \r\n{host}\r\n"),
        format!("GET / HTTP/3.0\r\n{host}\r\n"),
        "GET / HTTP/1.1\r\nConnection: close\r\n\r\n".into(),
        format!("GET / HTTP/1.1\r\nConnection: close\r\n{host}{host}\r\n"),
    ] {
        let reply = refused(&request).await;
        assert!(reply.starts_with("HTTP/1.1 400 "), "{request:?}: {reply}");
    }
}

#[tokio::test(start_paused = true)]
async fn heads_fields_and_targets_have_their_bounds() {
    let head = |size: usize| {
        let fixed = closing("X: \r\n").len();
        format!("X: {}\r\n", "x".repeat(size - fixed))
    };
    // Host and Connection count as two more fields.
    let fields = |count: usize| (2..count).map(|_| "X: 1\r\n").collect::<String>();
    for (small, large) in [
        (head(64 << 10), head((64 << 10) + 1)),
        (fields(1024), fields(1025)),
    ] {
        assert!(passes(&small, HI).await.1.ends_with("hi"));
        assert_status(&refused(&closing(&large)).await, 431);
    }
    for (length, status) in [(8193, 200), (65_000, 200), (65_001, 414)] {
        let path = format!("/{}", "p".repeat(length - 1));
        let asked = format!("{}Connection: close\r\n\r\n", get(&path));
        let reply = if status == 200 {
            let (fixture, agent) = Fixture::with_agent();
            tokio::join!(fixture.ask(&asked), agent.answers()).0
        } else {
            refused(&asked).await
        };
        let expected = format!("HTTP/1.1 {status} ");
        assert!(reply.starts_with(&expected), "{length}: {reply}");
    }
}

#[tokio::test(start_paused = true)]
async fn interim_answers_are_consumed_up_to_a_bound() {
    let interim = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    let (_, reply) = passes("", &format!("{}{HI}", interim.repeat(64))).await;
    assert_status(&reply, 200);
    assert!(reply.ends_with("hi"), "{reply}");
    let (fixture, agent) = Fixture::with_agent();
    let endless = async {
        let (mut reader, mut writer) = tokio::io::split(agent.accepts().await);
        let write = async {
            while writer.write_all(interim.as_bytes()).await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        let mut seen = Vec::new();
        // A writer alone would not notice that the reader is gone.
        tokio::select! {
            _ended = reader.read_to_end(&mut seen) => {}
            () = write => {}
        }
    };
    let asked = closing("");
    let (reply, ()) = tokio::join!(fixture.ask(&asked), endless);
    assert_contains(&reply, "X-Tunnel-Error: target_bad_response");
}

#[tokio::test(start_paused = true)]
async fn fields_of_one_hop_do_not_cross_and_others_do() {
    let (seen, reply) = passes(
        "Keep-Alive: 5\r\nProxy-Authorization: Basic x\r\nProxy-Connection: close\r\nAccept-Encoding: gzip\r\n",
        &HI.replace("\r\n\r\nhi", "\r\nKeep-Alive: 5\r\nProxy-Authenticate: Basic\r\nX-Tunnel-Error: forged\r\nContent-Encoding: gzip\r\nConnection: X-Hop\r\nX-Hop: 1\r\nUpgrade: h2c\r\n\r\nhi"),
    )
    .await;
    let lower = seen.to_lowercase();
    for gone in ["keep-alive", "proxy-", "via:", "x-forwarded"] {
        assert!(!lower.contains(gone), "{gone}: {seen}");
    }
    assert!(seen.contains("Accept-Encoding: gzip\r\n"), "{seen}");
    let lower = reply.to_lowercase();
    for gone in ["keep-alive", "proxy-", "x-tunnel-error", "x-hop", "upgrade"] {
        assert!(!lower.contains(gone), "{gone}: {reply}");
    }
    assert!(reply.contains("Content-Encoding: gzip\r\n"), "{reply}");
}

#[tokio::test(start_paused = true)]
async fn answers_without_a_body_keep_what_they_say_of_it() {
    for (method, answer, expected) in [
        ("HEAD", "200 OK", "Content-Length: 1234\r\n"),
        ("GET", "304 Not Modified", "ETag: \"a\"\r\n"),
        ("GET", "204 No Content", "X-Own: 1\r\n"),
    ] {
        let (fixture, agent) = Fixture::with_agent();
        let asked = closing("").replace("GET", method);
        let answer = format!("HTTP/1.1 {answer}\r\n{expected}\r\n");
        let (reply, _) = tokio::join!(fixture.ask(&asked), agent.answers_with(&answer));
        assert_contains(&reply, expected);
        assert!(reply.ends_with("\r\n\r\n"), "{reply}");
        let is_chunked = reply.to_lowercase().contains("transfer-encoding");
        assert!(!is_chunked, "{reply}");
    }
}
