//! Upgrades that are not granted leave no connection open (S40, CVE-2018-1002105).

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_proto::calibration::scaled;

use super::fixture::{Fixture, get, head};
use crate::testing::{assert_contains, within};

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";

#[tokio::test]
async fn request_behind_an_upgrade_that_is_not_granted_reaches_nobody() {
    let head_of = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
    let switching = "HTTP/1.1 101 Switching Protocols\r\n";
    let other = "Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
    for (answer, status) in [
        (head_of("400 Bad Request"), 400),
        (head_of("403 Forbidden"), 403),
        (head_of("500 Oops"), 500),
        (head_of("200 OK"), 200),
        (head_of("204 No Content"), 204),
        (head_of("301 A"), 301),
        (head_of("302 Found"), 302),
        (head_of("307 B"), 307),
        (head_of("308 C"), 308),
        (format!("{switching}\r\n"), 502),
        (format!("{switching}{other}"), 502),
        ("\0\u{1}garbage\r\n\r\n".into(), 502),
        (String::new(), 502),
    ] {
        let (fixture, agent) = Fixture::with_agent();
        let mut caller = fixture.dial().await;
        let asked = format!("{}{UPGRADE}{}\r\n", get("/exec"), get("/secret"));
        caller.write_all(asked.as_bytes()).await.unwrap();
        let mut stream = agent.accepts().await;
        let first = head(&mut stream).await;
        assert!(first.starts_with("GET /exec "), "{first}");
        stream.write_all(answer.as_bytes()).await.unwrap();
        if answer.is_empty() {
            stream.shutdown().await.unwrap();
        }
        // The response, followed by an end and no reset.
        let mut response = String::new();
        let read = caller.read_to_string(&mut response);
        let closed = timeout(scaled(Duration::from_secs(5)), read).await;
        closed.expect("open").unwrap();
        let expected = format!("HTTP/1.1 {status} ");
        assert!(response.starts_with(&expected), "{answer:?}: {response}");
        assert!(response.contains("Connection: close\r\n"), "{response}");
        assert_eq!(response.matches("HTTP/1.1 ").count(), 1, "{response}");
        let mut rest = Vec::new();
        let _ended_or_cut = within(stream.read_to_end(&mut rest)).await;
        let rest = String::from_utf8_lossy(&rest);
        assert!(!rest.contains("secret"), "{answer:?}: {rest}");
        assert!(agent.is_left_alone().await, "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn upgrade_field_without_the_option_is_no_upgrade_and_ends_in_order() {
    let (fixture, agent) = Fixture::with_agent();
    let asked = format!("{}Upgrade: h2c\r\nConnection: close\r\n\r\n", get("/"));
    let (response, asked) = tokio::join!(fixture.ask(&asked), agent.answers());
    assert!(response.ends_with("\r\n\r\nhi"), "{response}");
    assert!(!asked.to_lowercase().contains("upgrade"), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn all_protocols_of_the_list_are_offered_and_bytes_pass_both_ways() {
    let (fixture, agent) = Fixture::with_agent();
    let fields = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nUpgrade: SPDY/3.1\r\n";
    let asked = format!("{}{fields}\r\nearly", get("/exec"));
    let mut caller = fixture.send(&asked).await;
    let mut stream = agent.accepts().await;
    let request = head(&mut stream).await;
    assert_contains(&request, "pgrade: websocket, SPDY/3.1\r\n");
    let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: spdy/3.1\r\n\r\nhello";
    stream.write_all(answer).await.unwrap();
    let response = head(&mut caller).await;
    assert!(response.starts_with("HTTP/1.1 101 "), "{response}");
    let mut bytes = [0; 5];
    within(caller.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"hello");
    within(stream.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"early");
}
