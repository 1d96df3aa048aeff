//! Trailer fields are forwarded where they are accepted, without hop-by-hop fields and the tunnel's
//! fields.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::fixture::{Fixture, HI, get, head};
use crate::testing::within;

const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\
    Trailer: X-Sum, X-Tunnel-Error, Connection\r\n\r\n2\r\nhi\r\n0\r\n\
    X-Sum: 7\r\nX-Tunnel-Error: ok\r\nConnection: close\r\nX-Unannounced: 1\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn caller_that_takes_trailers_gets_those_that_were_announced() {
    for (te, wanted) in [
        ("", false),
        ("TE: gzip\r\n", false),
        ("TE: trailers\r\nConnection: TE\r\n", true),
        ("TE: gzip;q=0.5, Trailers\r\n", true),
    ] {
        let (fixture, agent) = Fixture::with_agent();
        let mut caller = fixture.send(&format!("{}{te}\r\n", get("/"))).await;
        let mut stream = agent.accepts().await;
        let asked = head(&mut stream).await.to_lowercase();
        assert_eq!(asked.contains("\r\nte: trailers\r\n"), wanted, "{asked}");
        assert!(!asked.contains("gzip"), "{asked}");
        stream.write_all(CHUNKED.as_bytes()).await.unwrap();
        head(&mut caller).await;
        let end = if wanted { "X-Sum: 7\r\n\r\n" } else { "\r\n" };
        let expected = format!("2\r\nhi\r\n0\r\n{end}");
        let mut body = vec![0; expected.len()];
        within(caller.read_exact(&mut body)).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&body), expected);
        // Both connections remain usable.
        let again = format!("{}\r\n", get("/again"));
        caller.write_all(again.as_bytes()).await.unwrap();
        let asked = head(&mut stream).await;
        assert!(asked.starts_with("GET /again "), "{asked}");
    }
}

#[tokio::test(start_paused = true)]
async fn trailers_of_a_request_arrive_without_selectors() {
    let (fixture, agent) = Fixture::with_agent();
    let upload = "POST / HTTP/1.1\r\nHost: worker-1:9100\r\nTransfer-Encoding: chunked\r\n\
        Trailer: X-Sum, X-Tunnel-Proxy-Host, Host\r\n\r\n2;ext=1\r\nhi\r\n0\r\n\
        X-Sum: 7\r\nX-Tunnel-Proxy-Host: worker-2\r\nHost: b\r\n\r\n";
    let mut caller = fixture.send(upload).await;
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    let expected = "2\r\nhi\r\n0\r\nx-sum: 7\r\n\r\n";
    let mut body = vec![0; expected.len()];
    within(stream.read_exact(&mut body)).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&body), expected);
    stream.write_all(HI.as_bytes()).await.unwrap();
    let reply = head(&mut caller).await;
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
}
