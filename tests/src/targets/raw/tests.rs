use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::client::{BodyEnd, ByteStream};
use crate::eventually::eventually;
use crate::targets::{
    EchoTarget, HalfCloseTarget, ResetTarget, SilentTarget, deterministic_bytes, sha256_hex,
};

#[tokio::test]
async fn echo_survives_bulk_and_half_close() {
    let target = EchoTarget::start().await.unwrap();
    let bulk = deterministic_bytes(1, 8 << 20);
    let reading = ByteStream::connect(target.addr())
        .await
        .unwrap()
        .talk(&bulk)
        .await
        .unwrap();
    assert_eq!(
        (reading.sha256(), reading.ended),
        (sha256_hex(&bulk), BodyEnd::CleanClose)
    );
    let [received] = target.received().try_into().unwrap();
    assert_eq!(
        (received.bytes, received.sha256),
        (8 << 20, sha256_hex(&bulk))
    );
}

#[tokio::test]
async fn reset_target_cuts_at_once_or_after_a_byte() {
    let target = ResetTarget::start(1000).await.unwrap();
    let reading = ByteStream::connect(target.addr())
        .await
        .unwrap()
        .read_to_end()
        .await;
    assert_eq!(reading.ended, BodyEnd::Reset(ErrorKind::ConnectionReset));
    assert_eq!(reading.bytes, deterministic_bytes(0, 1000));

    let target = ResetTarget::start_waiting(0).await.unwrap();
    let mut stream = ByteStream::connect(target.addr()).await.unwrap();
    stream.send(b"x").await.unwrap();
    let reading = stream.read_to_end().await;
    assert_eq!(
        (reading.bytes.len(), reading.ended),
        (0, BodyEnd::Reset(ErrorKind::ConnectionReset))
    );
    assert_eq!(target.traffic().bytes_in(), 1);
}

#[tokio::test]
async fn half_close_works_in_both_orders() {
    let target = HalfCloseTarget::start(500_000).await.unwrap();
    let mut stream = ByteStream::connect(target.addr()).await.unwrap();
    stream.send(b"question").await.unwrap();
    stream.finish().await.unwrap();
    let reading = stream.read_to_end().await;
    assert_eq!(reading.ended, BodyEnd::CleanClose);
    assert!(reading.bytes == deterministic_bytes(0, 500_000));

    let target = HalfCloseTarget::start_sending(500_000).await.unwrap();
    let mut stream = ByteStream::connect(target.addr()).await.unwrap();
    let reading = stream.read_to_end().await;
    assert_eq!(reading.ended, BodyEnd::CleanClose);
    stream.send(b"afterwards").await.unwrap();
    stream.finish().await.unwrap();
    eventually("the target has it all", WAIT_TIMEOUT, || async {
        target.received().pop()
    })
    .await;
    assert_eq!(
        target.received().pop().unwrap().sha256,
        sha256_hex(b"afterwards")
    );
}

#[tokio::test]
async fn silent_target_reports_how_its_peers_closed() {
    let target = SilentTarget::start().await.unwrap();
    let mut fin = ByteStream::connect(target.addr()).await.unwrap();
    let cut = ByteStream::connect(target.addr()).await.unwrap();
    eventually("both are open", WAIT_TIMEOUT, || async {
        (target.traffic().open() == 2).then_some(())
    })
    .await;
    fin.send(b"unanswered").await.unwrap();
    fin.finish().await.unwrap();
    cut.reset().await.unwrap();
    eventually("both are gone", WAIT_TIMEOUT, || async {
        let traffic = target.traffic();
        let seen = (
            traffic.open(),
            traffic.fins(),
            traffic.cuts(),
            traffic.bytes_in(),
        );
        if seen == (0, 1, 1, 10) {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    })
    .await;
    assert_eq!(target.traffic().accepted(), 2);
    assert_eq!(fin.read_to_end().await.ended, BodyEnd::CleanClose);
}

#[tokio::test]
async fn writes_to_a_deaf_target_stall() {
    let target = SilentTarget::start_deaf().await.unwrap();
    let mut stream = ByteStream::connect(target.addr()).await.unwrap();
    let bulk = vec![0; 64 << 20];
    let writing = tokio::time::timeout(Duration::from_millis(300), stream.write_all(&bulk)).await;
    assert!(
        writing.is_err(),
        "64 MiB went into a target that reads nothing"
    );
    assert_eq!(target.traffic().bytes_in(), 0);
}

#[tokio::test]
async fn dropping_a_target_closes_its_connections() {
    let target = EchoTarget::start().await.unwrap();
    let mut stream = ByteStream::connect(target.addr()).await.unwrap();
    stream.send(b"x").await.unwrap();
    assert_eq!(stream.receive(1).await.unwrap(), b"x");
    drop(target);
    assert_eq!(stream.read_to_end().await.ended, BodyEnd::CleanClose);
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(5);
