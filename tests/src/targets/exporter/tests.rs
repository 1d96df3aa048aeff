use std::io::ErrorKind;
use std::time::Duration;

use crate::client::{BodyEnd, Exchange, HttpReply, KeepAliveClient, RawRequest, request};
use crate::eventually::eventually;
use crate::targets::{Exporter, deterministic_bytes, sha256_hex};

#[tokio::test]
async fn metrics_name_the_node() {
    let exporter = Exporter::start("node-a").await.unwrap();
    for path in ["/", "/metrics"] {
        let reply = get(&exporter, path).await;
        assert_eq!(
            (reply.status, reply.ended.clone()),
            (200, BodyEnd::CleanLength)
        );
        assert!(
            reply
                .text()
                .starts_with("# node node-a\nculvert_demo_info{node=\"node-a\"} 1\n")
        );
    }
    assert_eq!(exporter.traffic().accepted(), 2);
    assert_eq!(exporter.traffic().requests(), 2);
}

#[tokio::test]
async fn sized_bodies_arrive_whole_in_each_framing() {
    let exporter = Exporter::start("node-a").await.unwrap();
    for n in [0, 1, 16 * 1024, 100_001, 3 << 20] {
        for (path, end) in [
            ("size", BodyEnd::CleanLength),
            ("chunked", BodyEnd::CleanChunked),
            ("close-delimited", BodyEnd::CleanClose),
        ] {
            let reply = get(&exporter, &format!("/{path}/{n}")).await;
            assert_eq!((reply.status, &reply.ended), (200, &end), "/{path}/{n}");
            assert_eq!(reply.body.len(), n);
            assert_eq!(reply.header("x-sha256"), Some(reply.sha256().as_str()));
            assert_eq!(reply.sha256(), sha256_hex(&deterministic_bytes(0, n)));
        }
    }
}

#[tokio::test]
async fn seed_chooses_the_sequence_and_nonsense_is_refused() {
    let exporter = Exporter::start("node-a").await.unwrap();
    assert_eq!(
        get(&exporter, "/size/100?seed=9").await.body,
        deterministic_bytes(9, 100)
    );
    assert_eq!(get(&exporter, "/size/many").await.status, 400);
    assert_eq!(get(&exporter, "/status/101").await.status, 400);
    assert_eq!(get(&exporter, "/nowhere").await.status, 404);
}

#[tokio::test]
async fn follow_hands_out_lines_one_at_a_time_and_ends_cleanly() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let mut one = Exchange::start(exporter.addr(), &RawRequest::get("a", "/follow"))
        .await
        .unwrap();
    let mut two = Exchange::start(exporter.addr(), &RawRequest::get("a", "/follow"))
        .await
        .unwrap();
    for line in ["first", "second"] {
        assert_eq!(exporter.emit(line), 2);
        assert_eq!(one.line().await.as_deref(), Some(line));
        assert_eq!(two.line().await.as_deref(), Some(line));
    }
    assert_eq!(exporter.end_follows(), 2);
    assert_eq!(one.line().await, None);
    assert_eq!(one.ended(), Some(&BodyEnd::CleanChunked));
}

#[tokio::test]
async fn timer_drives_follow_without_a_handle() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let request = RawRequest::get("a", "/follow?interval_ms=5");
    let mut follow = Exchange::start(exporter.addr(), &request).await.unwrap();
    assert_eq!(follow.line().await.as_deref(), Some("node-a line 1"));
    assert_eq!(follow.line().await.as_deref(), Some("node-a line 2"));
}

#[tokio::test]
async fn caller_that_leaves_is_noticed_while_nothing_is_sent() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let mut fin = Exchange::start(exporter.addr(), &RawRequest::get("a", "/follow"))
        .await
        .unwrap();
    let cut = Exchange::start(exporter.addr(), &RawRequest::get("a", "/follow"))
        .await
        .unwrap();
    assert_eq!((exporter.followers(), exporter.traffic().open()), (2, 2));
    fin.finish().await.unwrap();
    cut.reset().await.unwrap();
    eventually("both connections end", WAIT_TIMEOUT, || async {
        let traffic = exporter.traffic();
        let seen = (
            exporter.followers(),
            traffic.open(),
            traffic.fins(),
            traffic.cuts(),
        );
        if seen == (0, 0, 1, 1) {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    })
    .await;
}

#[tokio::test]
async fn headers_come_back_as_they_were_sent() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let head =
        "GET /headers HTTP/1.1\r\nhOST: b\r\nX-Twice: 1\r\nConnection: close\r\nX-Twice: 2\r\n\r\n";
    let reply = request(exporter.addr(), &RawRequest::raw(head))
        .await
        .unwrap();
    assert_eq!(reply.text(), head);
}

#[tokio::test]
async fn cut_bodies_end_by_reset() {
    let exporter = Exporter::start("node-a").await.unwrap();
    for path in [
        "/reset-mid-body",
        "/reset-chunked",
        "/reset-close-delimited",
    ] {
        let reply = get(&exporter, path).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(
            reply.ended,
            BodyEnd::Reset(ErrorKind::ConnectionReset),
            "{path}"
        );
        assert!(reply.body.len() <= 64 * 1024);
        assert!(
            deterministic_bytes(0, 64 * 1024).starts_with(&reply.body),
            "{path}"
        );
    }
}

#[tokio::test]
async fn short_body_is_truncated_and_garbage_is_no_answer() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let reply = get(&exporter, "/short").await;
    assert_eq!((reply.body.len(), reply.ended), (500, BodyEnd::Truncated));
    let garbage = request(exporter.addr(), &RawRequest::get("a", "/garbage")).await;
    assert!(garbage.is_err(), "{garbage:?}");
}

#[tokio::test]
async fn slow_head_waits_for_its_release() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let slow = RawRequest::get("a", "/slow-head");
    let release = async {
        eventually("the request waits", WAIT_TIMEOUT, || async {
            (exporter.waiting() == 1).then_some(())
        })
        .await;
        exporter.release();
    };
    let (reply, ()) = tokio::join!(request(exporter.addr(), &slow), release);
    assert_eq!(reply.unwrap().text(), "node-a at last\n");
}

#[tokio::test]
async fn upload_is_counted_and_hashed() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let body = deterministic_bytes(3, 1 << 20);
    let expected = format!("{} {}\n", body.len(), sha256_hex(&body));
    let post = RawRequest::new("POST", "/upload", "a").header("Connection", "close");

    let plain = request(exporter.addr(), &post.clone().body(body.clone()))
        .await
        .unwrap();
    assert_eq!((plain.text(), plain.interim), (expected.clone(), vec![]));

    let asking = post.clone().expecting_continue().body(body);
    let asked = request(exporter.addr(), &asking).await.unwrap();
    assert_eq!((asked.text(), asked.interim), (expected, vec![100]));

    let chunked = post
        .header("Transfer-Encoding", "chunked")
        .followed_by("3\r\nabc\r\n0\r\n\r\n");
    let chunked = request(exporter.addr(), &chunked).await.unwrap();
    assert_eq!(chunked.text(), format!("3 {}\n", sha256_hex(b"abc")));
}

#[tokio::test]
async fn statuses_trailers_and_hints() {
    let exporter = Exporter::start("node-a").await.unwrap();
    assert_eq!(
        get(&exporter, "/status/503").await.text(),
        "status 503 as ordered\n"
    );
    let empty = get(&exporter, "/status/204").await;
    assert_eq!(
        (empty.status, empty.body.len(), empty.ended),
        (204, 0, BodyEnd::CleanLength)
    );
    let trailers = get(&exporter, "/trailers").await;
    assert_eq!(
        trailers.trailers,
        [("X-Checksum".to_owned(), "42".to_owned())]
    );
    assert_eq!(get(&exporter, "/early-hints").await.interim, [103]);
}

#[tokio::test]
async fn requests_share_a_connection_until_one_ends_it() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let mut client = KeepAliveClient::connect(exporter.addr()).await.unwrap();
    for path in ["/metrics", "/chunked/70000", "/size/70000", "/status/304"] {
        let reply = client
            .request(&RawRequest::new("GET", path, "a"))
            .await
            .unwrap();
        assert!(reply.ended.is_clean(), "{path}");
    }
    let head = client
        .request(&RawRequest::new("HEAD", "/size/70000", "a"))
        .await
        .unwrap();
    assert_eq!(
        (head.header("content-length"), head.body.len()),
        (Some("70000"), 0)
    );
    let ignored = RawRequest::new("POST", "/metrics", "a").body("never read by the page");
    assert_eq!(client.request(&ignored).await.unwrap().status, 200);
    assert_eq!(exporter.traffic().accepted(), 1);
    let last = client
        .request(&RawRequest::get("a", "/metrics"))
        .await
        .unwrap();
    assert_eq!(last.header("connection"), Some("close"));
    assert_eq!(client.closed().await, BodyEnd::CleanClose);
}

#[tokio::test]
async fn stop_ends_connections_and_frees_the_port() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let addr = exporter.addr();
    let mut follow = Exchange::start(addr, &RawRequest::get("a", "/follow"))
        .await
        .unwrap();
    exporter.stop().await;
    assert_eq!(follow.data().await, None);
    assert_eq!(follow.ended(), Some(&BodyEnd::Truncated));
    assert!(request(addr, &RawRequest::get("a", "/")).await.is_err());
    let again = Exporter::start_on(addr, "node-b", None).await.unwrap();
    assert!(get(&again, "/").await.text().contains("node-b"));
}

async fn get(exporter: &Exporter, path: &str) -> HttpReply {
    request(exporter.addr(), &RawRequest::get("node-a", path))
        .await
        .unwrap()
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(5);
