use std::io::ErrorKind;

use crate::client::{BodyEnd, HttpReply, RawRequest, request};
use crate::targets::{Exporter, deterministic_bytes, sha256_hex};

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
async fn garbage_is_no_answer() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let garbage = request(exporter.addr(), &RawRequest::get("a", "/garbage")).await;
    assert!(garbage.is_err(), "{garbage:?}");
}

async fn get(exporter: &Exporter, path: &str) -> HttpReply {
    request(exporter.addr(), &RawRequest::get("node-a", path))
        .await
        .unwrap()
}
